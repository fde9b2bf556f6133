/* Values that a random number seldom is: every half there is, and every place where rounding to one turns over. */

#ifndef SPECIAL_H
#define SPECIAL_H

#include "trial.h"

/* One batch of `heads` heads with `pairs` pairs, for `tokens` tokens with a row each. */
static struct options plain_options(int type, int interleaved, int64_t heads, int64_t tokens, int64_t pairs) {
    struct options o = {.type = type, .table_type = THEODOLITE_FLOAT32, .interleaved = interleaved};
    o.order = HEADS_INSIDE;
    o.batch = o.table_batch = o.table_heads = 1;
    o.heads[0] = heads;
    o.tokens = o.rows = tokens;
    o.head_dim = o.rotary_dim = 2 * pairs;
    o.rare = 32;
    return o;
}

static void fill_row(const struct trial *t, int64_t token, int64_t i, float cos, float sin) {
    const int64_t where = at(t->table, 0, 0, token) + i;
    ((float *)t->cos)[where] = cos;
    ((float *)t->sin)[where] = sin;
}

/* All 65,536 halves by cos 1 and sin 0: each comes back as it was, as the first of its pair or the second. */
static void all_halves(int type, int interleaved, int64_t pairs, int second) {
    const int64_t heads = 4, tokens = 65536 / (heads * pairs) + 1;
    struct trial t = prepare(plain_options(type, interleaved, heads, tokens, pairs));
    const uint16_t one = nearest_half(formats[type == THEODOLITE_FLOAT16], 1);
    uint16_t *x = (uint16_t *)t.x.blocks[0], code = 0;
    int64_t token, head, i;
    for (token = 0; token < tokens; token++) {
        for (i = 0; i < pairs; i++)
            fill_row(&t, token, i, 1, 0);
        for (head = 0; head < heads; head++)
            for (i = 0; i < pairs; i++) {
                uint16_t *pair = x + at(t.x.of[0], 0, head, token) + (interleaved ? 2 * i : i);
                uint16_t *partner = pair + (interleaved ? 1 : pairs);
                *(second ? partner : pair) = code++;
                *(second ? pair : partner) = one;
            }
    }
    check(&t, "all halves");
    for (token = 0, code = 0; token < tokens; token++)
        for (head = 0; head < heads; head++)
            for (i = 0; i < pairs; i++, code++) {
                const int64_t channel = (interleaved ? 2 * i + second : i + second * pairs);
                const uint16_t got = ((uint16_t *)t.out.blocks[0])[at(t.out.of[0], 0, head, token) + channel];
                const double value = halves[type == THEODOLITE_FLOAT16][code];
                /* -0 + 0 is 0. */
                const uint16_t expected = second && code == 0x8000 ? 0 : code;
                if (got != expected && !isnan(value))
                    fail(&t.o, "a half came back as another");
            }
    checks++;
    release(&t);
}

/* Numbers of float32 next to and at every half, and halfway between every two; and 128 of each exponent. */
static int64_t turning_points(int type, float *to) {
    const int shift = type == THEODOLITE_FLOAT16;
    const uint16_t infinity = infinity_of(formats[shift]);
    int64_t n = 0;
    int code, step;
    for (code = 0; code < 65536; code++) {
        const int next = code + 1;
        double value = halves[shift][code], above, middle;
        uint32_t bits;
        float single;
        if ((code & 0x7fff) >= infinity)
            continue;
        above = (next & 0x7fff) < infinity ? halves[shift][next] : copysign(ldexp(1, shift ? 16 : 128), value);
        middle = value / 2 + above / 2;
        for (step = -1; step <= 1; step++) {
            single = (float)middle;
            memcpy(&bits, &single, sizeof bits);
            to[n++] = float_from(bits + (uint32_t)step);
            single = (float)value;
            memcpy(&bits, &single, sizeof bits);
            to[n++] = float_from(bits + (uint32_t)step);
        }
    }
    for (code = 0; code < 512; code++)
        for (step = 0; step < 128; step++)
            to[n++] = float_from((uint32_t)code << 23 | (uint32_t)(random_bits() >> 41));
    return n;
}

/* Each of them, as an entry of cos and of sin, comes out of the pair (1, 0) rounded. */
static void all_roundings(int type, int interleaved, int64_t pairs) {
    static float numbers[6 * 65536 + 512 * 128];
    const int64_t n = turning_points(type, numbers), tokens = n / pairs + 1;
    struct trial t = prepare(plain_options(type, interleaved, 1, tokens, pairs));
    uint16_t *x = (uint16_t *)t.x.blocks[0];
    int64_t token, i;
    for (token = 0; token < tokens; token++)
        for (i = 0; i < pairs; i++) {
            const float number = numbers[(token * pairs + i) % n];
            uint16_t *pair = x + at(t.x.of[0], 0, 0, token) + (interleaved ? 2 * i : i);
            fill_row(&t, token, i, number, number);
            put(type, pair, 0, 1);
            put(type, pair, interleaved ? 1 : pairs, 0);
        }
    check(&t, "all roundings");
    release(&t);
}

static void special_values(void) {
    /* Whole vectors of any set, and the rest behind them. */
    static const int64_t widths[] = {64, 5};
    int type, interleaved, width;
    for (type = THEODOLITE_BFLOAT16; type <= THEODOLITE_FLOAT16; type++)
        for (interleaved = 0; interleaved < 2; interleaved++)
            for (width = 0; width < 2; width++) {
                all_halves(type, interleaved, widths[width], 0);
                all_halves(type, interleaved, widths[width], 1);
                all_roundings(type, interleaved, widths[width]);
            }
}

#endif
