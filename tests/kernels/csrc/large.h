/* What only large calls do: write past the caches, part their work, block their tokens, fill the stack. */

#ifndef LARGE_H
#define LARGE_H

#include <pthread.h>

#include "special.h"

/* Of rotate.c; whoever compiles this says what they are. */
#ifndef STREAM_BYTES
#define STREAM_BYTES (16 << 20)
#endif
#ifndef GRAIN
#define GRAIN 32768
#endif
#ifndef TOKENS_OF_BLOCK
#define TOKENS_OF_BLOCK 512
#endif
#define LINE 64
/* A batch, and a line before and behind. */
#define MORE (512 << 10)

struct pieces {
    theodolite_body body;
    void *context;
    int64_t begin, end;
};

static long handed_out;

static void *run_piece(void *pieces) {
    const struct pieces *p = pieces;
    p->body(p->begin, p->end, p->context);
    return NULL;
}

/* One index after the other, the last first. */
static int32_t one_by_one(int64_t begin, int64_t end, int64_t grain, theodolite_body body, void *context) {
    if (grain < 1)
        exit(1);
    handed_out++;
    while (end-- > begin)
        body(end, end + 1, context);
    return 0;
}

/* Threads with pieces of 1, 3, 9, ... and what is left. */
static int32_t in_threads(int64_t begin, int64_t end, int64_t grain, theodolite_body body, void *context) {
    struct pieces pieces[5];
    pthread_t threads[5];
    int64_t length = 1;
    int n = 0, i;
    (void)grain;
    handed_out++;
    for (; begin < end; begin += length, length *= 3, n++) {
        if (n == 4 || begin + length > end)
            length = end - begin;
        pieces[n] = (struct pieces){body, context, begin, begin + length};
        if (pthread_create(&threads[n], NULL, run_piece, &pieces[n]) != 0)
            exit(1);
    }
    for (i = 0; i < n; i++)
        pthread_join(threads[i], NULL);
    return 0;
}

static void parts_of_work(void) {
    static const theodolite_parallel_for ways[] = {one_by_one, in_threads};
    int number;
    for (number = 0; number < 4 * 2 * 2 * WRITABLE; number++) {
        struct options o = plain_options(number % 4, number / 4 % 2, 3, 37, 32);
        const int way = number / 8 % 2;
        long before = handed_out;
        o.in_place = (int)below(2);
        o.order = o.out_order = number / 16;
        o.apart = 1;
        o.batch = 1 + 2 * below(2);
        o.heads[1] = 1;
        o.head_dim = 70;
        o.position_size = 8;
        o.tokens = o.rows = 2 * GRAIN / (4 * o.head_dim) + 5;
        theodolite_set_parallel(ways[way]);
        try_options(o, way ? "in threads" : "one by one");
        require(&o, handed_out > before, "work is parted");
        theodolite_set_parallel(NULL);
        before = handed_out;
        try_options(o, "in this thread");
        require(&o, handed_out == before, "work is not parted");
    }
}

static void blocks_of_tokens(void) {
    int number;
    for (number = 0; number < 4 * 2 * 2; number++) {
        struct options o = plain_options(number % 4, number / 4 % 2, 6, 2 * TOKENS_OF_BLOCK + 3, 4);
        o.in_place = number / 8;
        o.order = o.out_order = GAPPED;
        o.table_heads = number % 2 ? 1 : 2;
        o.heads[1] = 2;
        try_options(o, "more tokens than a block");
    }
}

/* Rows of a table are widened and parted on the stack. */
static void widest_heads(void) {
    int number;
    for (number = 0; number < 4 * 5 * 2 * 2; number++) {
        struct options o = plain_options(number % 4, number / 20 % 2, 1, 2, THEODOLITE_MAX_PAIRS);
        o.table_type = number / 4 % 5;
        o.by_channel = number / 40;
        try_options(o, "the widest head");
    }
}

/* An output of many batches, of which the input has one that stands for all, so that the model turns one.
 *
 * bytes: of the output; shift: elements in front of it; gap: elements behind each batch.
 */
static void stream(struct options o, int64_t bytes, int64_t shift, int64_t gap, char *memory) {
    struct trial t = prepare(o);
    const int64_t size = bytes_of(o.type), turned = o.heads[0] * o.tokens * o.head_dim * size;
    const int64_t each = turned + gap * size, batches = (bytes + each - 1) / each;
    const int64_t end = shift * size + batches * each - gap * size;
    struct theodolite_call call = describe(&t);
    char *out = memory + shift * size;
    int64_t batch, i;
    int32_t set;
    call.batch = batches;
    call.operands[0].batch_stride = 0;
    call.operands[0].out_batch_stride = each / size;
    call.operands[0].out_bytes = batches * each - gap * size;
    model(&t);
    /* The plainest set has no such instructions. */
    for (set = 1; set < theodolite_sets(); set++) {
        if (!theodolite_choose_set(set))
            continue;
        memset(memory, 0xa5, STREAM_BYTES + MORE);
        require(&o, theodolite_rotate(&call, begin_of(&o, &t.x, 0), out, NULL, NULL, t.cos + t.table.start * 4,
            t.sin + t.table.start * 4, NULL) == THEODOLITE_DONE, "past the caches");
        for (batch = 0; batch < batches; batch++) {
            memcpy(t.out.blocks[0] + t.out.of[0].start * size, out + batch * each, (size_t)turned);
            compare(&t, "past the caches");
        }
        for (i = 0; i < LINE; i++)
            if ((i < shift * size && memory[i] != (char)0xa5) || memory[end + i] != (char)0xa5)
                fail(&o, "written beside the output");
    }
    release(&t);
}

/* A store past the caches faults where no line of the cache begins: then the output must be written the other way. */
static void streams(void) {
    enum { ALL, PART, BELOW, SHIFTED, NARROW, ASIDE, ODD_HEADS, ODD_BATCHES, CASES };
    char *memory = aligned_alloc(LINE, STREAM_BYTES + MORE);
    int number;
    for (number = 0; number < 4 * 2 * CASES; number++) {
        const int type = number % 4, interleaved = number / 4 % 2, which = number / 8;
        struct options o = plain_options(type, interleaved, 4, 64, which == ALL || which == ODD_BATCHES ? 64 : 32);
        int64_t each;
        /* What does not depend on the type is tried on one. */
        if (which > BELOW && type != number / 8 % 4)
            continue;
        if (which == NARROW)
            o.rotary_dim = 72;
        o.head_dim = which == ODD_HEADS ? 130 : 128;
        o.first_channel = which == PART ? 64 : which == ASIDE ? 3 : 0;
        o.order = o.out_order = (number + number / 4) % 2 ? HEADS_INSIDE : TOKENS_INSIDE;
        o.conjugate = number % 2;
        each = o.heads[0] * o.tokens * o.head_dim * bytes_of(type);
        stream(o, which == BELOW ? STREAM_BYTES - each : STREAM_BYTES, which == SHIFTED, which == ODD_BATCHES ? 3 : 0,
            memory);
    }
    free(memory);
}

static void large_calls(void) {
    parts_of_work();
    blocks_of_tokens();
    widest_heads();
    streams();
}

#endif
