/* Calls that the library does not take: it says why, and writes nothing. */

#ifndef REFUSALS_H
#define REFUSALS_H

#include "special.h"

static void forbid(struct trial *t, int64_t expected, const char *what) {
    const int64_t size = bytes_of(t->o.type);
    int which;
    reset(t);
    for (which = 0; which < 2; which++)
        if (t->out.elements[which])
            memcpy(t->expected.blocks[which], t->out.blocks[which], (size_t)(t->out.elements[which] * size));
    require(&t->o, turn(t) == expected, what);
    compare(t, what);
}

static void set_position(struct trial *t, int64_t where, int64_t value) {
    if (t->o.position_size == 4)
        ((int32_t *)t->positions)[where] = (int32_t)value;
    else
        ((int64_t *)t->positions)[where] = value;
}

static void positions_out_of_range(void) {
    int number;
    for (number = 0; number < 2 * 2 * 2 * 3 * 5; number++) {
        struct options o = plain_options(number % 4, number % 2, 2, 5, 4);
        int64_t batch, token, where, before, value;
        struct trial t;
        o.position_size = number % 2 ? 4 : 8;
        o.positions_shared = number / 2 % 2;
        o.in_place = number / 4 % 2;
        o.batch = 3;
        o.rows = 7;
        o.heads[1] = 1;
        t = prepare(o);
        /* The first, the last, one between. */
        batch = o.positions_shared ? 0 : number / 8 % 3;
        token = number / 8 % 3 == 0 ? 0 : number / 8 % 3 == 2 ? o.tokens - 1 : 3;
        where = at(t.row, batch, 0, token);
        before = row_at(&t, batch, token);
        value = number / 24 == 0 ? -1 : number / 24 == 1 ? o.rows : number / 24 == 2 ? INT32_MAX : INT32_MIN;
        if (number / 24 == 4)
            value = o.position_size == 8 ? 1ll << 40 : 1 << 30;
        set_position(&t, where, value);
        forbid(&t, (batch * o.tokens + token) << 8 | THEODOLITE_POSITION, "a position without a row");
        set_position(&t, where, before);
        check(&t, "the same call with a row");
        release(&t);
    }
}

/* Parts of one stretch of memory: q, out_q, k, out_k, cos, sin, positions, far from each other. */
enum part { Q, OUT_Q, K, OUT_K, COS, SIN, POSITIONS, PARTS };

struct stretch {
    struct theodolite_call call;
    float *memory, *before;
    int64_t begin[PARTS], length[PARTS];
};

static const int64_t stretch_elements = 2048;

static int64_t call_stretch(const struct stretch *s) {
    const float *m = s->memory;
    float *w = s->memory;
    return theodolite_rotate(&s->call, m + s->begin[Q], w + s->begin[OUT_Q], m + s->begin[K], w + s->begin[OUT_K],
        m + s->begin[COS], m + s->begin[SIN], m + s->begin[POSITIONS]);
}

static void expect_overlap(const struct stretch *s, const struct options *o, int expected, const char *what) {
    const size_t bytes = (size_t)stretch_elements * sizeof(float);
    memcpy(s->memory, s->before, bytes);
    require(o, call_stretch(s) == (expected ? THEODOLITE_OVERLAP : THEODOLITE_DONE), what);
    require(o, (memcmp(s->memory, s->before, bytes) == 0) == expected, what);
}

static void overlaps_are_seen(void) {
    struct options o = plain_options(THEODOLITE_FLOAT32, 0, 2, 3, 4);
    const int64_t lengths[PARTS] = {96, 96, 48, 48, 12, 12, 3};
    struct stretch s = {
        .memory = (float *)block_of(stretch_elements * 4), .before = (float *)block_of(stretch_elements * 4)};
    struct trial t;
    int64_t *strides[3], i;
    int part, out;
    o.batch = 2;
    o.heads[1] = 1;
    o.out_order = o.order;
    o.position_size = 4;
    o.positions_shared = 1;
    t = prepare(o);
    s.call = describe(&t);
    s.call.cos.batch_stride = s.call.cos.head_stride = 0;
    s.call.cos.row_stride = 4;
    s.call.cos.bytes = 12 * 4;
    s.call.sin = s.call.cos;
    s.call.position_token_stride = 1;
    s.call.position_bytes = 3 * 4;
    /* Zeros are positions too, where an integer is read. */
    for (i = 0; i < stretch_elements; i++)
        s.before[i] = 0;
    for (part = 0; part < PARTS; part++) {
        s.begin[part] = 256 * part + 128;
        s.length[part] = lengths[part];
        for (i = 0; part < POSITIONS && i < lengths[part]; i++)
            s.before[s.begin[part] + i] = (float)(i + 1);
    }
    expect_overlap(&s, &o, 0, "nothing is shared");
    for (out = OUT_Q; out <= OUT_K; out += OUT_K - OUT_Q)
        for (part = 0; part < PARTS; part++) {
            const int64_t kept = s.begin[out];
            if (part == out)
                continue;
            s.begin[out] = s.begin[part] + lengths[part] - 1;
            expect_overlap(&s, &o, 1, "the last element of another is the first written");
            s.begin[out] = s.begin[part] - lengths[out] + 1;
            expect_overlap(&s, &o, 1, "the first element of another is the last written");
            s.begin[out] = s.begin[part] + lengths[part];
            expect_overlap(&s, &o, 0, "written behind another");
            s.begin[out] = s.begin[part] - lengths[out];
            expect_overlap(&s, &o, 0, "written in front of another");
            s.begin[out] = kept;
        }
    /* Whoever has seen that operands are apart has not looked at tables and positions. */
    s.call.apart = 1;
    for (part = COS; part < PARTS; part++) {
        const int64_t kept = s.begin[OUT_K];
        s.begin[OUT_K] = s.begin[part];
        expect_overlap(&s, &o, 1, "written over a table or positions");
        s.begin[OUT_K] = kept;
    }
    s.call.apart = 0;
    s.begin[OUT_Q] = s.begin[Q];
    expect_overlap(&s, &o, 0, "in place");
    strides[0] = &s.call.operands[0].out_batch_stride;
    strides[1] = &s.call.operands[0].out_head_stride;
    strides[2] = &s.call.operands[0].out_token_stride;
    for (i = 0; i < 3; i++) {
        *strides[i] += 1;
        expect_overlap(&s, &o, 1, "in its own place, with another stride");
        *strides[i] -= 1;
    }
    release(&t);
    free(s.memory);
    free(s.before);
    o.order = FUSED;
    o.in_place = 1;
    t = prepare(o);
    forbid(&t, THEODOLITE_OVERLAP, "slices of one projection in place, not known to be apart");
    release(&t);
}

/* Each pointer in turn is a byte past its place, or NULL. */
static void unusable_pointers(void) {
    int number;
    for (number = 0; number < 4 * PARTS * 2; number++) {
        struct options o = plain_options(number % 4, 0, 1, 2, 2);
        const int which = number / 4 % PARTS, null = number / 4 / PARTS;
        struct trial t;
        struct theodolite_call call;
        char *pointers[PARTS];
        int64_t outcome;
        o.heads[1] = 1;
        o.position_size = 8;
        o.positions_shared = 1;
        t = prepare(o);
        call = describe(&t);
        reset(&t);
        pointers[Q] = begin_of(&o, &t.x, 0), pointers[OUT_Q] = begin_of(&o, &t.out, 0);
        pointers[K] = begin_of(&o, &t.x, 1), pointers[OUT_K] = begin_of(&o, &t.out, 1);
        pointers[COS] = t.cos, pointers[SIN] = t.sin, pointers[POSITIONS] = t.positions;
        pointers[which] = null ? NULL : pointers[which] + 1;
        outcome = theodolite_rotate(&call, pointers[Q], pointers[OUT_Q], pointers[K], pointers[OUT_K], pointers[COS],
            pointers[SIN], pointers[POSITIONS]);
        require(&o, outcome == (null ? THEODOLITE_NULL : THEODOLITE_UNALIGNED), null ? "NULL" : "between two elements");
        /* Nothing of it was modelled, so what is expected is what was there before. */
        compare(&t, "written, though it was refused");
        release(&t);
    }
}

static void nothing_to_do(void) {
    const struct options o = plain_options(THEODOLITE_FLOAT32, 0, 1, 1, 1);
    struct theodolite_call call;
    int which;
    for (which = 0; which < 4; which++) {
        memset(&call, 0, sizeof call);
        call.table_heads = 1, call.position_size = 8;
        call.batch = which != 0, call.tokens = which != 1, call.operands[0].heads = which != 2;
        call.head_dim = call.rotary_dim = which == 3 ? 0 : 2;
        require(&o, theodolite_rotate(&call, NULL, NULL, NULL, NULL, NULL, NULL, NULL) == THEODOLITE_DONE,
            "nothing to do");
    }
}

static void sets_by_name(void) {
    const struct options o = plain_options(THEODOLITE_FLOAT32, 0, 1, 1, 1);
    const int32_t count = theodolite_sets();
    int32_t set;
    require(&o, theodolite_abi() == THEODOLITE_ABI, "the number of the interface");
    require(&o, theodolite_call_size() == (int64_t)sizeof(struct theodolite_call), "the size of a call");
    require(&o, theodolite_set_runs(0) && strcmp(theodolite_set_name(0), "scalar") == 0, "the plainest set");
    require(&o, !theodolite_set_name(-1) && !theodolite_set_name(count), "no name");
    require(&o, !theodolite_set_runs(-1) && !theodolite_set_runs(count), "no set");
    /* Until one is chosen, it is the last that runs. */
    for (set = count - 1; !theodolite_set_runs(set); set--)
        ;
    require(&o, theodolite_chosen_set() == set, "the first choice");
    for (set = 0; set < count; set++) {
        const int32_t before = theodolite_chosen_set(), chosen = theodolite_choose_set(set);
        require(&o, chosen == theodolite_set_runs(set), "choose");
        require(&o, theodolite_chosen_set() == (chosen ? set : before), "chosen");
    }
    set = theodolite_chosen_set();
    require(&o, !theodolite_choose_set(-1) && !theodolite_choose_set(count), "choose no set");
    require(&o, theodolite_chosen_set() == set, "the choice is kept");
}

static void refusals(void) {
    positions_out_of_range();
    overlaps_are_seen();
    unusable_pointers();
    nothing_to_do();
}

#endif
