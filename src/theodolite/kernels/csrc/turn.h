/* The rotation of one type P (numbers T, arithmetic in A, of kind K) by one instruction set. Included once for each. */

#define V N(CAT(vec_, K))
#define W CAT(WIDTH_, K)
#define ROW struct CAT(row_, K)
#define LOAD_ROW(from) NK(load_row, K)(from)
#define MUL(a, b) NK(mul, K)(a, b)
#define ADD(a, b) NK(add, K)(a, b)
#define SUB(a, b) NK(sub, K)(a, b)

/* 2 W pairs: their entries, and their channels. */
struct NK(entries, P) {
    V cos1a, cos1b, cos2a, cos2b, sin1a, sin1b, sin2a, sin2b;
};
struct NK(block, P) {
    V first_a, first_b, second_a, second_b;
};

static INLINE V NK(entry, P)(const A *from, const int interleaved) {
    return interleaved ? NK(order_pairs, P)(LOAD_ROW(from)) : LOAD_ROW(from);
}

static INLINE struct NK(entries, P) NK(entries_at, P)(const ROW *row, int64_t i, const int interleaved) {
    const V sign = NK(set1, K)(row->sign);
    struct NK(entries, P) by;
    by.cos1a = NK(entry, P)(row->cos1 + i, interleaved), by.cos1b = NK(entry, P)(row->cos1 + i + W, interleaved);
    by.sin1a = MUL(NK(entry, P)(row->sin1 + i, interleaved), sign);
    by.sin1b = MUL(NK(entry, P)(row->sin1 + i + W, interleaved), sign);
    by.cos2a = by.cos1a, by.cos2b = by.cos1b, by.sin2a = by.sin1a, by.sin2b = by.sin1b;
    if (row->cos2 != row->cos1) {
        by.cos2a = NK(entry, P)(row->cos2 + i, interleaved), by.cos2b = NK(entry, P)(row->cos2 + i + W, interleaved);
        by.sin2a = MUL(NK(entry, P)(row->sin2 + i, interleaved), sign);
        by.sin2b = MUL(NK(entry, P)(row->sin2 + i + W, interleaved), sign);
    }
    return by;
}

/* A block of the head at x, turned: channels i and i + pairs, or 2i and 2i + 1. */
static INLINE struct NK(block, P) NK(turned, P)(
    struct NK(entries, P) by, const T *x, int64_t pairs, const int interleaved) {
    struct NK(block, P) from, to;
    if (interleaved) {
        NK(load_pairs, P)(x, &from.first_a, &from.second_a);
        NK(load_pairs, P)(x + 2 * W, &from.first_b, &from.second_b);
    } else {
        NK(load2, P)(x, &from.first_a, &from.first_b);
        NK(load2, P)(x + pairs, &from.second_a, &from.second_b);
    }
    to.first_a = SUB(MUL(from.first_a, by.cos1a), MUL(from.second_a, by.sin1a));
    to.first_b = SUB(MUL(from.first_b, by.cos1b), MUL(from.second_b, by.sin1b));
    to.second_a = ADD(MUL(from.second_a, by.cos2a), MUL(from.first_a, by.sin2a));
    to.second_b = ADD(MUL(from.second_b, by.cos2b), MUL(from.first_b, by.sin2b));
    return to;
}

static INLINE void NK(put_block, P)(
    T *out, struct NK(block, P) turned, int64_t pairs, const int interleaved, const int stream) {
#if CAT(FLUSHES_, P)
    N(words) one, two;
    N(doubt) doubt;
    if (interleaved) {
        one = NK(round2, P)(turned.first_a, turned.second_a), two = NK(round2, P)(turned.first_b, turned.second_b);
        doubt = N(doubt_of)(one, two);
        one = N(interleave)(one), two = N(interleave)(two);
    } else {
        one = NK(round2, P)(turned.first_a, turned.first_b), two = NK(round2, P)(turned.second_a, turned.second_b);
        doubt = N(doubt_of)(one, two);
    }
    if (LIKELY(!N(doubtful)(doubt))) {
        N(put)(out, one, stream);
        N(put)(out + (interleaved ? 2 * W : pairs), two, stream);
        return;
    }
#endif
    if (interleaved) {
        NK(store_pairs, P)(out, turned.first_a, turned.second_a, stream);
        NK(store_pairs, P)(out + 2 * W, turned.first_b, turned.second_b, stream);
    } else {
        NK(store2, P)(out, turned.first_a, turned.first_b, stream);
        NK(store2, P)(out + pairs, turned.second_a, turned.second_b, stream);
    }
}

/* The pairs from i on that are no whole block, of one head. */
static INLINE void NK(turn_rest, P)(
    const ROW *row, const T *x, T *out, int64_t i, int64_t pairs, const int interleaved) {
    const V sign = NK(set1, K)(row->sign);
    for (; i < pairs; i += W) {
        const int64_t n = pairs - i, channels = 2 * n;
        V cos1 = NK(load_row_some, K)(row->cos1 + i, n), cos2 = NK(load_row_some, K)(row->cos2 + i, n);
        V sin1 = MUL(NK(load_row_some, K)(row->sin1 + i, n), sign);
        V sin2 = MUL(NK(load_row_some, K)(row->sin2 + i, n), sign);
        V first, second, a, b;
        if (!interleaved) {
            first = NK(load_some, P)(x + i, n), second = NK(load_some, P)(x + pairs + i, n);
            NK(store_some, P)(out + i, SUB(MUL(first, cos1), MUL(second, sin1)), n);
            NK(store_some, P)(out + pairs + i, ADD(MUL(second, cos2), MUL(first, sin2)), n);
            continue;
        }
        cos1 = NK(order, K)(cos1), cos2 = NK(order, K)(cos2), sin1 = NK(order, K)(sin1), sin2 = NK(order, K)(sin2);
        a = NK(load_some, P)(x + 2 * i, channels);
        b = channels > W ? NK(load_some, P)(x + 2 * i + W, channels - W) : NK(set1, K)(0);
        NK(split, K)(a, b, &first, &second);
        NK(join, K)(SUB(MUL(first, cos1), MUL(second, sin1)), ADD(MUL(second, cos2), MUL(first, sin2)), &a, &b);
        NK(store_some, P)(out + 2 * i, a, channels);
        if (channels > W)
            NK(store_some, P)(out + 2 * i + W, b, channels - W);
    }
}

/* Heads of one or two blocks, whose entries stay in registers from head to head. */
static INLINE void NK(turn_whole, P)(const struct run *run, const ROW *row, const T *x, T *out, const int blocks,
    const int interleaved, const int stream) {
    const int64_t pairs = blocks * 2 * W, other = interleaved ? 4 * W : 2 * W;
    const struct NK(entries, P) low = NK(entries_at, P)(row, 0, interleaved);
    const struct NK(entries, P) high = blocks == 2 ? NK(entries_at, P)(row, 2 * W, interleaved) : low;
    int64_t head;
    for (head = 0; head < run->heads; head++) {
        if (run->ahead)
            prefetch(x + run->ahead, run->ahead_bytes);
        const struct NK(block, P) a = NK(turned, P)(low, x, pairs, interleaved);
        const struct NK(block, P) b = blocks == 2 ? NK(turned, P)(high, x + other, pairs, interleaved) : a;
        NK(put_block, P)(out, a, pairs, interleaved, stream);
        if (blocks == 2)
            NK(put_block, P)(out + other, b, pairs, interleaved, stream);
        x += run->x_head;
        out += run->out_head;
    }
}

/* Heads of any width, block by block. */
static INLINE void NK(turn_wide, P)(
    const struct run *run, const ROW *row, const T *x, T *out, const int interleaved, const int stream) {
    int64_t i, head;
    for (head = 0; head < run->heads && run->ahead; head++)
        prefetch(x + head * run->x_head + run->ahead, run->ahead_bytes);
    for (i = 0; i + 2 * W <= run->pairs; i += 2 * W) {
        const struct NK(entries, P) by = NK(entries_at, P)(row, i, interleaved);
        const int64_t channel = interleaved ? 2 * i : i;
        for (head = 0; head < run->heads; head++) {
            const T *from = x + head * run->x_head + channel;
            const struct NK(block, P) turned = NK(turned, P)(by, from, run->pairs, interleaved);
            NK(put_block, P)(out + head * run->out_head + channel, turned, run->pairs, interleaved, stream);
        }
    }
    for (head = 0; head < run->heads && i < run->pairs; head++)
        NK(turn_rest, P)(row, x + head * run->x_head, out + head * run->out_head, i, run->pairs, interleaved);
}

/* A run; `blocks` is 1 or 2 where heads have as many, else 0. */
static INLINE void NK(turn_run, P)(
    const struct run *run, ROW row, const T *x, T *out, const int blocks, const int interleaved, const int stream) {
    int64_t step;
    for (step = 0; step < run->steps; step++) {
        if (blocks)
            NK(turn_whole, P)(run, &row, x, out, blocks, interleaved, stream);
        else
            NK(turn_wide, P)(run, &row, x, out, interleaved, stream);
        x += run->x_step;
        out += run->out_step;
        row.cos1 += run->cos_step, row.cos2 += run->cos_step;
        row.sin1 += run->sin_step, row.sin2 += run->sin_step;
    }
}

#define RUN(blocks, interleaved, stream)                                         \
    static void NK(turn_##blocks##interleaved##stream, P)(const struct run *run, const ROW *row, const T *x, T *out) { \
        NK(turn_run, P)(run, *row, x, out, blocks, interleaved, stream);         \
    }
RUN(0, 0, 0)
RUN(0, 0, 1)
RUN(0, 1, 0)
RUN(0, 1, 1)
RUN(1, 0, 0)
RUN(1, 0, 1)
RUN(1, 1, 0)
RUN(1, 1, 1)
RUN(2, 0, 0)
RUN(2, 0, 1)
RUN(2, 1, 0)
RUN(2, 1, 1)
#undef RUN

/* `heads` heads of `tokens` tokens, whose rows follow each other where there are several. */
static INLINE void NK(turn_heads, P)(
    const struct job *job, int which, const ROW *row, const T *x, T *out, int64_t heads, int64_t tokens) {
    static void (*const turns[3][2][2])(const struct run *, const ROW *, const T *, T *) = {
        {{NK(turn_000, P), NK(turn_001, P)}, {NK(turn_010, P), NK(turn_011, P)}},
        {{NK(turn_100, P), NK(turn_101, P)}, {NK(turn_110, P), NK(turn_111, P)}},
        {{NK(turn_200, P), NK(turn_201, P)}, {NK(turn_210, P), NK(turn_211, P)}},
    };
    const struct theodolite_call *call = job->call;
    const struct theodolite_operand *operand = &call->operands[which];
    const int64_t pairs = call->rotary_dim / 2;
    const int blocks = pairs == 4 * W ? 2 : pairs == 2 * W ? 1 : 0;
    /* Streams that stay narrow, or a token whose heads are one stream. */
    const int64_t group = blocks && tokens == 1 ? heads : job->together[which];
    int64_t head, token;
    struct run run = {.steps = tokens,
        .pairs = pairs,
        .x_head = operand->head_stride,
        .x_step = operand->token_stride,
        .out_head = operand->out_head_stride,
        .out_step = operand->out_token_stride,
        .cos_step = call->cos.row_stride,
        .sin_step = call->sin.row_stride,
        .ahead = job->ahead[which],
        .ahead_bytes = 2 * pairs * (int64_t)sizeof(T)};
    for (head = 0; head < heads; head += group) {
        run.heads = heads - head < group ? heads - head : group;
        turns[blocks][call->interleaved][job->stream[which]](&run, row, x + call->first_channel + head * run.x_head,
            out + call->first_channel + head * run.out_head);
    }
    if (x == out || call->rotary_dim == call->head_dim)
        return;
    for (token = 0; token < tokens; token++)
        for (head = 0; head < heads; head++)
            copy_others(call, (const char *)(x + head * operand->head_stride + token * operand->token_stride),
                (char *)(out + head * operand->out_head_stride + token * operand->out_token_stride), sizeof(T));
}

/* Tokens `begin` to `end` of one row of the batch. */
static void NK(turn_tokens, P)(const struct job *job, int64_t batch, int64_t begin, int64_t end) {
    const struct theodolite_call *call = job->call;
    A scratch[8 * THEODOLITE_MAX_PAIRS];
    int64_t token, block, table, first;
    int which;
    /* Heads stand together in memory: token by token, queries and keys, so that a fused projection is walked once. */
    for (token = begin; token < end && (job->heads_inside[0] || job->heads_inside[1]); token++)
        for (table = 0; table < call->table_heads; table++) {
            const ROW row = N(CAT(row_, K))(job, batch, token, table, scratch);
            for (which = 0; which < 2; which++) {
                if (!job->heads_inside[which])
                    continue;
                const struct theodolite_operand *operand = &call->operands[which];
                const int64_t heads = operand->heads / call->table_heads;
                const T *x = (const T *)job->x[which] + batch * operand->batch_stride + token * operand->token_stride;
                T *out = (T *)job->out[which] + batch * operand->out_batch_stride + token * operand->out_token_stride;
                NK(turn_heads, P)(job, which, &row, x + table * heads * operand->head_stride,
                    out + table * heads * operand->out_head_stride, heads, 1);
            }
        }
    /* Tokens stand together: a few heads at a time are as many streams, over a block whose rows stay in the cache. */
    for (which = 0; which < 2; which++) {
        const struct theodolite_operand *operand = &call->operands[which];
        const int64_t heads = operand->heads / call->table_heads, together = job->together[which];
        if (job->heads_inside[which] || operand->heads == 0)
            continue;
        for (block = begin; block < end; block += TOKENS_OF_BLOCK)
            for (table = 0; table < call->table_heads; table++)
                for (first = table * heads; first < (table + 1) * heads; first += together) {
                    const int64_t stop = block + TOKENS_OF_BLOCK < end ? block + TOKENS_OF_BLOCK : end;
                    const int64_t tokens = job->rows_in_turn ? stop - block : 1;
                    const int64_t left = (table + 1) * heads - first;
                    for (token = block; token < stop; token += tokens) {
                        const ROW row = N(CAT(row_, K))(job, batch, token, table, scratch);
                        const int64_t at = batch * operand->batch_stride + first * operand->head_stride;
                        const int64_t to = batch * operand->out_batch_stride + first * operand->out_head_stride;
                        NK(turn_heads, P)(job, which, &row,
                            (const T *)job->x[which] + at + token * operand->token_stride,
                            (T *)job->out[which] + to + token * operand->out_token_stride,
                            left < together ? left : together, tokens);
                    }
                }
    }
    fence(job);
}

#undef V
#undef W
#undef ROW
#undef LOAD_ROW
#undef MUL
#undef ADD
#undef SUB
