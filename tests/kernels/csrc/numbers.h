/* Numbers of every type, one at a time, by exact arithmetic in double: written without a look at half.h. */

#ifndef NUMBERS_H
#define NUMBERS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "rotate.h"

/* bfloat16 and float16: bits of the fraction, and the exponent of the least normal number. */
struct format {
    int fraction_bits, least;
};
static const struct format formats[2] = {{7, -126}, {10, -14}};

static double halves[2][65536];

static int64_t bytes_of(int type) {
    static const int64_t bytes[] = {4, 2, 2, 8, 1};
    return bytes[type];
}

static uint16_t infinity_of(struct format f) { return (uint16_t)(0x8000u - (1u << f.fraction_bits)); }

static void decode_halves(void) {
    int which;
    for (which = 0; which < 2; which++) {
        const struct format f = formats[which];
        const int one = 1 << f.fraction_bits;
        int code;
        for (code = 0; code < 65536; code++) {
            const int rest = code & 0x7fff, field = rest >> f.fraction_bits, fraction = rest & (one - 1);
            double size;
            if (rest >= infinity_of(f))
                size = fraction ? NAN : INFINITY;
            else if (field == 0)
                size = ldexp(fraction, f.least - f.fraction_bits);
            else
                size = ldexp(one + fraction, f.least + field - 1 - f.fraction_bits);
            halves[which][code] = code & 0x8000 ? -size : size;
        }
    }
}

/* The nearest half, of two that are as near the even one. */
static uint16_t nearest_half(struct format f, double value) {
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    const double size = fabs(value);
    double steps, count;
    int exponent;
    uint64_t code;
    if (isnan(value))
        return 0x7fff;
    if (isinf(value))
        return sign | infinity_of(f);
    frexp(size, &exponent);
    /* size is in [2^exponent, 2^(exponent + 1)) */
    exponent = size == 0 || exponent - 1 < f.least ? f.least : exponent - 1;
    steps = ldexp(size, f.fraction_bits - exponent);
    count = floor(steps);
    code = (uint64_t)count;
    if (steps - count > 0.5 || (steps - count == 0.5 && code % 2))
        code++;
    code += (uint64_t)(exponent - f.least) << f.fraction_bits;
    return sign | (code > infinity_of(f) ? infinity_of(f) : (uint16_t)code);
}

/* Exact, as every type but int8 (an integer here) fits in double. */
static double get(int type, const void *from, int64_t i) {
    switch (type) {
    case THEODOLITE_FLOAT32:
        return ((const float *)from)[i];
    case THEODOLITE_FLOAT64:
        return ((const double *)from)[i];
    case THEODOLITE_INT8:
        return ((const int8_t *)from)[i];
    default:
        return halves[type == THEODOLITE_FLOAT16][((const uint16_t *)from)[i]];
    }
}

/* Rounded once. */
static void put(int type, void *to, int64_t i, double value) {
    switch (type) {
    case THEODOLITE_FLOAT32:
        ((float *)to)[i] = (float)value;
        break;
    case THEODOLITE_FLOAT64:
        ((double *)to)[i] = value;
        break;
    case THEODOLITE_INT8:
        ((int8_t *)to)[i] = (int8_t)value;
        break;
    default:
        ((uint16_t *)to)[i] = nearest_half(formats[type == THEODOLITE_FLOAT16], value);
    }
}

static float float_from(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* xorshift64*: the same numbers in every run. */
static uint64_t state = 0x9e3779b97f4a7c15u;

static uint64_t random_bits(void) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545f4914f6cdd1du;
}

static int64_t below(int64_t n) { return (int64_t)(random_bits() % (uint64_t)n); }

/* Zeros, infinities, NaNs of full and of least payload, subnormals, the least and the largest numbers, 1. */
static void put_special(int type, void *to, int64_t i) {
    static const uint32_t singles[] = {0x00000000, 0x80000000, 0x7f800000, 0xff800000, 0x7fffffff, 0xffffffff,
        0x7f800001, 0x00000001, 0x80000001, 0x007fffff, 0x807fffff, 0x00800000, 0x7f7fffff, 0xff7fffff, 0x3f800000,
        0x00018000};
    static const uint16_t bfloats[] = {0x0000, 0x8000, 0x7f80, 0xff80, 0x7fff, 0xffff, 0x7f81, 0x0001, 0x8001, 0x007f,
        0x807f, 0x0080, 0x7f7f, 0xff7f, 0x3f80, 0x0100};
    static const uint16_t floats[] = {0x0000, 0x8000, 0x7c00, 0xfc00, 0x7fff, 0xffff, 0x7c01, 0x0001, 0x8001, 0x03ff,
        0x83ff, 0x0400, 0x7bff, 0xfbff, 0x3c00, 0x0800};
    static const uint64_t doubles[] = {0, 1ull << 63, 0x7ffull << 52, 0xfffull << 52, ~0ull >> 1, ~0ull,
        (0x7ffull << 52) + 1, 1, (1ull << 63) + 1, (1ull << 52) - 1, (1ull << 63) + (1ull << 52) - 1, 1ull << 52,
        (0x7ffull << 52) - 1, (0xfffull << 52) - 1, 0x3ffull << 52, (1ull << 52) + 1};
    const int64_t size = bytes_of(type), which = below(16);
    const void *from = type == THEODOLITE_FLOAT32 ? (const void *)&singles[which]
        : type == THEODOLITE_FLOAT64              ? (const void *)&doubles[which]
        : type == THEODOLITE_FLOAT16              ? (const void *)&floats[which]
                                                  : (const void *)&bfloats[which];
    memcpy((char *)to + i * size, from, (size_t)size);
}

/* Mostly in [-2, 2); of `rare` numbers one is special and one has any bits at all. */
static void put_random(int type, void *to, int64_t i, int64_t rare) {
    const int64_t kind = below(rare);
    const uint64_t bits = random_bits();
    if (type == THEODOLITE_INT8 || kind == 0)
        memcpy((char *)to + i * bytes_of(type), &bits, (size_t)bytes_of(type));
    else if (kind == 1)
        put_special(type, to, i);
    else
        put(type, to, i, ldexp((double)(bits >> 11), -51) - 2);
}

#endif
