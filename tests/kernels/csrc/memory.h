/* What a call is told of, in memory of exactly its size, filled at random. */

#ifndef MEMORY_H
#define MEMORY_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "numbers.h"
#include "rotate.h"

/* How (batch, heads, tokens, head_dim) lies in memory. */
enum order {
    TOKENS_INSIDE,
    HEADS_INSIDE,
    FUSED,    /* a token's heads of q, of k, and one more */
    GAPPED,   /* tokens inside, with gaps behind each token and each head: a slot of a cache */
    WRITABLE,
    EXPANDED = WRITABLE, /* one head of one batch stands for all */
    REPEATED,            /* one batch stands for all */
    READABLE
};

struct options {
    int type, table_type, interleaved, conjugate, by_channel, in_place, apart;
    int order, out_order;
    int position_size, positions_shared;
    int64_t batch, tokens, heads[2], head_dim, rotary_dim, first_channel;
    int64_t table_heads, table_batch, rows;
    int64_t rare; /* of so many numbers, two are special */
};

struct place {
    int block; /* which of the blocks */
    int64_t start, batch, head, token;
};

struct memory {
    char *blocks[2];
    int64_t elements[2];
    struct place of[2];
};

struct trial {
    struct options o;
    struct memory x, out, expected;
    char *turns[2]; /* for each element of expected: whether its channel turns */
    char *cos, *sin, *positions;
    struct place table, row;
    int64_t table_elements, position_elements;
};

static long checks;

/* What was tried last, for whoever reads of a failure. */
static struct options tried;

static void fail(const struct options *o, const char *what) {
    printf("failed: %s, set %s\n", what, theodolite_set_name(theodolite_chosen_set()));
    printf("  type %d, tables %d, interleaved %d, conjugate %d, by channel %d, in place %d, apart %d, orders %d %d\n",
        o->type, o->table_type, o->interleaved, o->conjugate, o->by_channel, o->in_place, o->apart, o->order,
        o->out_order);
    printf("  batch %d, heads %d %d, tokens %d, head_dim %d, %d channels turn from %d, table %d x %d x %d\n",
        (int)o->batch, (int)o->heads[0], (int)o->heads[1], (int)o->tokens, (int)o->head_dim, (int)o->rotary_dim,
        (int)o->first_channel, (int)o->table_batch, (int)o->table_heads, (int)o->rows);
    printf("  positions of %d bytes, shared %d\n", o->position_size, o->positions_shared);
    fflush(stdout);
    _Exit(1);
}

/* A store where no line begins, an instruction that the processor does not have. */
static void fault(int number) {
    (void)number;
    fail(&tried, "the processor stopped (a fault in memory, or an instruction that it does not have)");
}

static void require(const struct options *o, int holds, const char *what) {
    checks++;
    if (!holds)
        fail(o, what);
}

/* No byte more than asked for, so that a sanitizer sees one that is touched behind it. */
static char *block_of(int64_t bytes) {
    char *block = malloc((size_t)bytes);
    if (!block && bytes) {
        printf("failed: no memory\n");
        exit(1);
    }
    if (bytes)
        memset(block, 0xa5, (size_t)bytes);
    return block;
}

static int64_t at(struct place place, int64_t batch, int64_t head, int64_t token) {
    return place.start + batch * place.batch + head * place.head + token * place.token;
}

/* `shift` elements in front keep a block from beginning where a vector would. */
static struct memory lay_out(const struct options *o, int order, int64_t shift) {
    struct memory memory = {{NULL, NULL}, {0, 0}, {{0, 0, 0, 0, 0}, {0, 0, 0, 0, 0}}};
    int which;
    for (which = 0; which < 2; which++) {
        const int64_t d = order == GAPPED ? o->head_dim + 3 : o->head_dim, heads = o->heads[which];
        const int64_t all_heads = order == FUSED ? o->heads[0] + o->heads[1] + 1 : heads;
        const int64_t all_tokens = order == GAPPED ? o->tokens + 5 : o->tokens;
        const int inside = order == HEADS_INSIDE || order == FUSED;
        struct place *place = &memory.of[which];
        if (heads == 0)
            continue;
        place->block = order == FUSED ? 0 : which;
        place->start = shift + (order == FUSED && which ? o->heads[0] * d : 0);
        place->batch = order == EXPANDED || order == REPEATED ? 0 : all_heads * all_tokens * d;
        place->head = order == EXPANDED ? 0 : inside ? d : all_tokens * d;
        place->token = inside ? all_heads * d : d;
        memory.elements[place->block] = at(*place, o->batch - 1, heads - 1, o->tokens - 1) + o->head_dim;
    }
    for (which = 0; which < 2; which++)
        if (memory.elements[which])
            memory.blocks[which] = block_of(memory.elements[which] * bytes_of(o->type));
    return memory;
}

static void lay_out_tables(struct trial *t) {
    const struct options *o = &t->o;
    const int64_t columns = o->by_channel ? o->rotary_dim : o->rotary_dim / 2, width = columns + below(2) * 3;
    const int64_t position_step = 1 + below(2) * 2, position_rows = o->positions_shared ? 1 : o->batch;
    int64_t i, batch, head, row, column;
    t->table.start = below(3);
    t->table.token = width;
    t->table.head = o->rows * width;
    t->table.batch = o->table_batch > 1 ? o->table_heads * o->rows * width : 0;
    t->table_elements = at(t->table, o->table_batch - 1, o->table_heads - 1, o->rows - 1) + columns;
    t->cos = block_of(t->table_elements * bytes_of(o->table_type));
    t->sin = block_of(t->table_elements * bytes_of(o->table_type));
    for (batch = 0; batch < o->table_batch; batch++)
        for (head = 0; head < o->table_heads; head++)
            for (row = 0; row < o->rows; row++)
                for (column = 0; column < columns; column++) {
                    put_random(o->table_type, t->cos, at(t->table, batch, head, row) + column, 4 * o->rare);
                    put_random(o->table_type, t->sin, at(t->table, batch, head, row) + column, 4 * o->rare);
                }
    if (!o->position_size)
        return;
    t->row.token = position_step;
    t->row.batch = o->positions_shared ? 0 : o->tokens * position_step;
    t->position_elements = at(t->row, position_rows - 1, 0, o->tokens - 1) + 1;
    t->positions = block_of(t->position_elements * o->position_size);
    for (batch = 0; batch < position_rows; batch++)
        for (i = 0; i < o->tokens; i++) {
            const int64_t position = below(o->rows), where = at(t->row, batch, 0, i);
            if (o->position_size == 4)
                ((int32_t *)t->positions)[where] = (int32_t)position;
            else
                ((int64_t *)t->positions)[where] = position;
        }
}

static struct trial prepare(struct options o) {
    struct trial t = {.o = o};
    const int64_t size = bytes_of(o.type);
    int which;
    tried = o;
    t.x = lay_out(&o, o.order, below(3));
    t.out = o.in_place ? t.x : lay_out(&o, o.out_order, below(3));
    for (which = 0; which < 2; which++) {
        int64_t i;
        for (i = 0; i < t.x.elements[which]; i++)
            put_random(o.type, t.x.blocks[which], i, o.rare);
        if (t.out.elements[which] == 0)
            continue;
        /* In place too, what is turned is a copy, since the model needs it as it was. */
        if (o.in_place)
            t.out.blocks[which] = block_of(t.out.elements[which] * size);
        t.expected.blocks[which] = block_of(t.out.elements[which] * size);
        t.turns[which] = calloc((size_t)t.out.elements[which], 1);
    }
    lay_out_tables(&t);
    return t;
}

static void release(struct trial *t) {
    int which;
    for (which = 0; which < 2; which++) {
        free(t->x.blocks[which]);
        free(t->out.blocks[which]);
        free(t->expected.blocks[which]);
        free(t->turns[which]);
    }
    free(t->cos);
    free(t->sin);
    free(t->positions);
}

#endif
