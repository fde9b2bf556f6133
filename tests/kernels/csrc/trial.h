/* A call of the library, by each of its instruction sets, held to the model bit by bit. */

#ifndef TRIAL_H
#define TRIAL_H

#include "model.h"

/* From the first element to behind the last. */
static int64_t stretch_of(const struct options *o, struct place place, int which) {
    const int64_t last = at(place, o->batch - 1, o->heads[which] - 1, o->tokens - 1) - place.start;
    return (last + o->head_dim) * bytes_of(o->type);
}

static struct theodolite_call describe(const struct trial *t) {
    const struct options *o = &t->o;
    struct theodolite_call call;
    int which;
    memset(&call, 0, sizeof call);
    call.batch = o->batch, call.tokens = o->tokens, call.head_dim = o->head_dim;
    call.first_channel = o->first_channel, call.rotary_dim = o->rotary_dim;
    call.table_heads = o->table_heads, call.rows = o->rows;
    call.position_size = o->position_size;
    call.position_batch_stride = t->row.batch, call.position_token_stride = t->row.token;
    call.position_bytes = t->position_elements * o->position_size;
    call.type = o->type, call.table_type = o->table_type;
    call.interleaved = o->interleaved, call.conjugate = o->conjugate;
    call.by_channel = o->by_channel, call.apart = o->apart;
    for (which = 0; which < 2; which++) {
        const struct place from = t->x.of[which], to = t->out.of[which];
        struct theodolite_operand *operand = &call.operands[which];
        if (o->heads[which] == 0)
            continue;
        operand->heads = o->heads[which];
        operand->batch_stride = from.batch, operand->head_stride = from.head, operand->token_stride = from.token;
        operand->out_batch_stride = to.batch, operand->out_head_stride = to.head, operand->out_token_stride = to.token;
        operand->bytes = stretch_of(o, from, which), operand->out_bytes = stretch_of(o, to, which);
    }
    call.cos.batch_stride = t->table.batch, call.cos.head_stride = t->table.head, call.cos.row_stride = t->table.token;
    call.cos.bytes = (t->table_elements - t->table.start) * bytes_of(o->table_type);
    call.sin = call.cos;
    return call;
}

static char *begin_of(const struct options *o, const struct memory *memory, int which) {
    const struct place place = memory->of[which];
    return o->heads[which] ? memory->blocks[place.block] + place.start * bytes_of(o->type) : NULL;
}

static int64_t turn(const struct trial *t) {
    const struct theodolite_call call = describe(t);
    const struct memory *x = t->o.in_place ? &t->out : &t->x;
    const int64_t skipped = t->table.start * bytes_of(t->o.table_type);
    return theodolite_rotate(&call, begin_of(&t->o, x, 0), begin_of(&t->o, &t->out, 0), begin_of(&t->o, x, 1),
        begin_of(&t->o, &t->out, 1), t->cos + skipped, t->sin + skipped, t->positions);
}

/* What out holds before a call: the input in place, else a pattern. */
static void reset(const struct trial *t) {
    int which;
    for (which = 0; which < 2; which++) {
        const size_t bytes = (size_t)(t->out.elements[which] * bytes_of(t->o.type));
        if (bytes && t->o.in_place)
            memcpy(t->out.blocks[which], t->x.blocks[which], bytes);
        else if (bytes)
            memset(t->out.blocks[which], 0xa5, bytes);
    }
}

/* Equal bits everywhere, gaps included; where a channel turns, any NaN is as good as another. */
static void compare(const struct trial *t, const char *what) {
    const int64_t size = bytes_of(t->o.type);
    int which;
    for (which = 0; which < 2; which++) {
        const char *expected = t->expected.blocks[which], *got = t->out.blocks[which];
        int64_t i;
        checks++;
        if (!got || memcmp(expected, got, (size_t)(t->out.elements[which] * size)) == 0)
            continue;
        for (i = 0; i < t->out.elements[which]; i++) {
            const double e = get(t->o.type, expected, i), g = get(t->o.type, got, i);
            if (memcmp(expected + i * size, got + i * size, (size_t)size) == 0)
                continue;
            if (t->turns[which][i] && isnan(e) && isnan(g))
                continue;
            printf("element %d of block %d: expected %.17g (%a), got %.17g (%a)\n", (int)i, which, e, e, g, g);
            fail(&t->o, what);
        }
    }
}

/* Every instruction set that runs makes of it what the model makes. */
static void check(struct trial *t, const char *what) {
    int32_t set;
    model(t);
    for (set = 0; set < theodolite_sets(); set++) {
        if (!theodolite_choose_set(set))
            continue;
        reset(t);
        require(&t->o, turn(t) == THEODOLITE_DONE, what);
        compare(t, what);
    }
}

static void try_options(struct options o, const char *what) {
    struct trial t = prepare(o);
    check(&t, what);
    release(&t);
}

#endif
