/* The rotation of one type P (numbers T, arithmetic in A, of kind K) by one instruction set. Included once for each. */

#define V N(CAT(vec_, K))
#define W CAT(WIDTH_, K)
#define ROW struct CAT(row_, K)
#define LOAD_ROW(from) NK(load_row, K)(from)
#define MUL(a, b) NK(mul, K)(a, b)
#define ADD(a, b) NK(add, K)(a, b)
#define SUB(a, b) NK(sub, K)(a, b)

/* Pairs (i, i + pairs) of `count` heads that stand together: the row is read once for all of them. */
static INLINE void NK(halves, P)(
    const ROW *row, const T *x, T *out, int64_t x_head, int64_t out_head, int64_t pairs, int stream, const int count) {
    const V sign = NK(set1, K)(row->sign);
    int64_t i = 0;
    int head;
    for (; i + 2 * W <= pairs; i += 2 * W) {
        const V cos1a = LOAD_ROW(row->cos1 + i), cos1b = LOAD_ROW(row->cos1 + i + W);
        const V cos2a = LOAD_ROW(row->cos2 + i), cos2b = LOAD_ROW(row->cos2 + i + W);
        const V sin1a = MUL(LOAD_ROW(row->sin1 + i), sign), sin1b = MUL(LOAD_ROW(row->sin1 + i + W), sign);
        const V sin2a = MUL(LOAD_ROW(row->sin2 + i), sign), sin2b = MUL(LOAD_ROW(row->sin2 + i + W), sign);
        UNROLL
        for (head = 0; head < count; head++) {
            const T *from = x + head * x_head + i;
            T *to = out + head * out_head + i;
            V first_a, first_b, second_a, second_b;
            NK(load2, P)(from, &first_a, &first_b);
            NK(load2, P)(from + pairs, &second_a, &second_b);
            NK(store2, P)(to, SUB(MUL(first_a, cos1a), MUL(second_a, sin1a)),
                SUB(MUL(first_b, cos1b), MUL(second_b, sin1b)), stream);
            NK(store2, P)(to + pairs, ADD(MUL(second_a, cos2a), MUL(first_a, sin2a)),
                ADD(MUL(second_b, cos2b), MUL(first_b, sin2b)), stream);
        }
    }
    for (; i < pairs; i += W) {
        const int64_t n = pairs - i;
        const V cos1 = NK(load_row_some, K)(row->cos1 + i, n), cos2 = NK(load_row_some, K)(row->cos2 + i, n);
        const V sin1 = MUL(NK(load_row_some, K)(row->sin1 + i, n), sign);
        const V sin2 = MUL(NK(load_row_some, K)(row->sin2 + i, n), sign);
        for (head = 0; head < count; head++) {
            const T *from = x + head * x_head + i;
            T *to = out + head * out_head + i;
            const V first = NK(load_some, P)(from, n), second = NK(load_some, P)(from + pairs, n);
            NK(store_some, P)(to, SUB(MUL(first, cos1), MUL(second, sin1)), n);
            NK(store_some, P)(to + pairs, ADD(MUL(second, cos2), MUL(first, sin2)), n);
        }
    }
}

/* Pairs (2i, 2i + 1), the same way. */
static INLINE void NK(neighbours, P)(
    const ROW *row, const T *x, T *out, int64_t x_head, int64_t out_head, int64_t pairs, int stream, const int count) {
    const V sign = NK(set1, K)(row->sign);
    int64_t i = 0;
    int head;
    V a, b, first, second;
    for (; i + W <= pairs; i += W) {
        const V cos1 = NK(order, K)(LOAD_ROW(row->cos1 + i)), cos2 = NK(order, K)(LOAD_ROW(row->cos2 + i));
        const V sin1 = MUL(NK(order, K)(LOAD_ROW(row->sin1 + i)), sign);
        const V sin2 = MUL(NK(order, K)(LOAD_ROW(row->sin2 + i)), sign);
        UNROLL
        for (head = 0; head < count; head++) {
            NK(load2, P)(x + head * x_head + 2 * i, &a, &b);
            NK(split, K)(a, b, &first, &second);
            NK(join, K)(SUB(MUL(first, cos1), MUL(second, sin1)), ADD(MUL(second, cos2), MUL(first, sin2)), &a, &b);
            NK(store2, P)(out + head * out_head + 2 * i, a, b, stream);
        }
    }
    if (i < pairs) {
        const int64_t n = pairs - i, channels = 2 * n;
        const V cos1 = NK(order, K)(NK(load_row_some, K)(row->cos1 + i, n));
        const V cos2 = NK(order, K)(NK(load_row_some, K)(row->cos2 + i, n));
        const V sin1 = MUL(NK(order, K)(NK(load_row_some, K)(row->sin1 + i, n)), sign);
        const V sin2 = MUL(NK(order, K)(NK(load_row_some, K)(row->sin2 + i, n)), sign);
        for (head = 0; head < count; head++) {
            const T *from = x + head * x_head + 2 * i;
            T *to = out + head * out_head + 2 * i;
            a = NK(load_some, P)(from, channels);
            b = channels > W ? NK(load_some, P)(from + W, channels - W) : NK(set1, K)(0);
            NK(split, K)(a, b, &first, &second);
            NK(join, K)(SUB(MUL(first, cos1), MUL(second, sin1)), ADD(MUL(second, cos2), MUL(first, sin2)), &a, &b);
            NK(store_some, P)(to, a, channels);
            if (channels > W)
                NK(store_some, P)(to + W, b, channels - W);
        }
    }
}

/* Prefetch what four heads further on in memory hold, or the same four heads of a token to come. */
static INLINE void NK(look_ahead, P)(const struct job *job, int which, const T *x) {
    const struct theodolite_operand *operand = &job->call->operands[which];
    const int64_t row = job->call->head_dim * (int64_t)sizeof(T);
    int head;
    if (job->heads_inside[which] && 4 * operand->head_stride * (int64_t)sizeof(T) == 4 * row) {
        prefetch((const char *)x + AHEAD_BYTES, 4 * row);
        return;
    }
    for (head = 0; head < 4; head++)
        prefetch(x + head * operand->head_stride + AHEAD_TOKENS * operand->token_stride, row);
}

static INLINE void NK(turn_heads, P)(
    const struct job *job, int which, const ROW *row, const T *x, T *out, int64_t heads) {
    const struct theodolite_call *call = job->call;
    const struct theodolite_operand *operand = &call->operands[which];
    const int64_t pairs = call->rotary_dim / 2, x_head = operand->head_stride, out_head = operand->out_head_stride;
    const int stream = job->stream[which];
    int64_t head = 0;
#define TURN(count)                                                                                                  \
    do {                                                                                                             \
        const T *from = x + head * x_head + call->first_channel;                                                     \
        T *to = out + head * out_head + call->first_channel;                                                         \
        if (call->interleaved)                                                                                       \
            NK(neighbours, P)(row, from, to, x_head, out_head, pairs, stream, count);                                \
        else                                                                                                         \
            NK(halves, P)(row, from, to, x_head, out_head, pairs, stream, count);                                    \
    } while (0)
    for (; head + 4 <= heads; head += 4) {
        if (job->ahead[which])
            NK(look_ahead, P)(job, which, x + head * x_head);
        TURN(4);
    }
    for (; head < heads; head++)
        TURN(1);
#undef TURN
    if (x == out)
        return;
    for (head = 0; head < heads; head++)
        copy_others(call, (const char *)(x + head * x_head), (char *)(out + head * out_head), sizeof(T));
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
                    out + table * heads * operand->out_head_stride, heads);
            }
        }
    /* Tokens stand together: four heads at a time are four streams, over a block whose rows stay in the cache. */
    for (which = 0; which < 2; which++) {
        const struct theodolite_operand *operand = &call->operands[which];
        const int64_t heads = operand->heads / call->table_heads;
        if (job->heads_inside[which] || operand->heads == 0)
            continue;
        for (block = begin; block < end; block += TOKENS_OF_BLOCK)
            for (table = 0; table < call->table_heads; table++)
                for (first = table * heads; first < (table + 1) * heads; first += 4)
                    for (token = block; token < end && token < block + TOKENS_OF_BLOCK; token++) {
                        const ROW row = N(CAT(row_, K))(job, batch, token, table, scratch);
                        const int64_t left = (table + 1) * heads - first;
                        const int64_t at = batch * operand->batch_stride + first * operand->head_stride;
                        const int64_t to = batch * operand->out_batch_stride + first * operand->out_head_stride;
                        NK(turn_heads, P)(job, which, &row,
                            (const T *)job->x[which] + at + token * operand->token_stride,
                            (T *)job->out[which] + to + token * operand->out_token_stride, left < 4 ? left : 4);
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
