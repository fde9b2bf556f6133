/* The rotation in plain arithmetic, one pair after the other. */

#ifndef MODEL_H
#define MODEL_H

#include "memory.h"

static int64_t row_at(const struct trial *t, int64_t batch, int64_t token) {
    const int64_t where = at(t->row, batch, 0, token);
    return t->o.position_size == 0 ? token
        : t->o.position_size == 4  ? ((const int32_t *)t->positions)[where]
                                   : ((const int64_t *)t->positions)[where];
}

/* An entry as the arithmetic sees it: tables of other types pass through float32. */
static double entry(const struct options *o, const char *table, int64_t i) {
    const double value = get(o->table_type, table, i);
    volatile float single = (float)value;
    if (o->table_type == THEODOLITE_INT8)
        single = (float)value * (1.0f / 127.0f);
    return o->type == THEODOLITE_FLOAT64 && o->table_type == THEODOLITE_FLOAT64 ? value : single;
}

/* a * b + sign * c * d: each product is rounded, then the sum; volatile keeps a compiler from fusing them. */
static double sum(int type, double a, double b, int sign, double c, double d) {
    if (type == THEODOLITE_FLOAT64) {
        volatile double one = a * b, other = c * d;
        return sign > 0 ? one + other : one - other;
    } else {
        volatile float one = (float)a * (float)b, other = (float)c * (float)d, total;
        total = sign > 0 ? one + other : one - other;
        return total;
    }
}

static void model_head(struct trial *t, int which, int64_t batch, int64_t head, int64_t token) {
    const struct options *o = &t->o;
    const struct place from = t->x.of[which], to = t->out.of[which];
    const char *x = t->x.blocks[from.block];
    const int64_t size = bytes_of(o->type), pairs = o->rotary_dim / 2;
    const int64_t in = at(from, batch, head, token), out = at(to, batch, head, token);
    const int64_t row = at(t->table, batch, head / (o->heads[which] / o->table_heads), row_at(t, batch, token));
    char *expected = t->expected.blocks[to.block];
    int64_t i;
    memcpy(expected + out * size, x + in * size, (size_t)(o->head_dim * size));
    for (i = 0; i < pairs; i++) {
        const int64_t one = o->interleaved ? 2 * i : i, two = o->interleaved ? 2 * i + 1 : i + pairs;
        const int64_t at1 = row + (o->by_channel ? one : i), at2 = row + (o->by_channel ? two : i);
        const int64_t channel1 = o->first_channel + one, channel2 = o->first_channel + two;
        const double x1 = get(o->type, x, in + channel1), x2 = get(o->type, x, in + channel2);
        const double c1 = entry(o, t->cos, at1), c2 = entry(o, t->cos, at2);
        const double s1 = entry(o, t->sin, at1), s2 = entry(o, t->sin, at2);
        const int way = o->conjugate ? -1 : 1;
        put(o->type, expected, out + channel1, sum(o->type, x1, c1, -way, x2, o->conjugate ? s2 : s1));
        put(o->type, expected, out + channel2, sum(o->type, x2, c2, way, x1, o->conjugate ? s1 : s2));
        t->turns[to.block][out + channel1] = t->turns[to.block][out + channel2] = 1;
    }
}

static void model(struct trial *t) {
    const struct options *o = &t->o;
    int64_t batch, head, token;
    int which;
    for (which = 0; which < 2; which++)
        if (t->expected.blocks[which] && o->in_place)
            memcpy(t->expected.blocks[which], t->x.blocks[which], (size_t)(t->x.elements[which] * bytes_of(o->type)));
    for (which = 0; which < 2; which++)
        for (batch = 0; batch < o->batch; batch++)
            for (head = 0; head < o->heads[which]; head++)
                for (token = 0; token < o->tokens; token++)
                    model_head(t, which, batch, head, token);
}

#endif
