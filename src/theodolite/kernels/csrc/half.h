/* bfloat16 and float16, one at a time, by integer arithmetic: exact, with subnormals, and nearest even. */

#ifndef THEODOLITE_HALF_H
#define THEODOLITE_HALF_H

#include <stdint.h>
#include <string.h>

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float from_bf16(uint16_t half) {
    return float_of((uint32_t)half << 16);
}

static inline uint16_t to_bf16(float value) {
    uint32_t bits = bits_of(value);
    /* A NaN keeps its sign and is quiet; rounding could carry it into the sign. */
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float from_f16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = half & 0x7fffu;
    if (rest >= 0x7c00u) /* infinity, NaN */
        return float_of(sign | 0x7f800000u | ((rest & 0x3ffu) << 13) | (rest > 0x7c00u ? 0x400000u : 0u));
    if (rest >= 0x400u)
        return float_of(sign | ((rest << 13) + (112u << 23)));
    /* Subnormal: the integer times 2^-24, exact in float32. */
    float magnitude = (float)rest * 0x1p-24f;
    return float_of(sign | bits_of(magnitude));
}

static inline uint16_t to_f16(float value) {
    uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | ((rest >> 13) & 0x3ffu));
    if (rest >= 0x477ff000u) /* from 65520 on, which rounds to infinity */
        return (uint16_t)(sign | 0x7c00u);
    if (rest >= 0x38800000u) { /* normal */
        rest += 0xfffu + ((rest >> 13) & 1u);
        return (uint16_t)(sign | ((rest - (112u << 23)) >> 13));
    }
    if (rest < 0x33000000u) /* below 2^-25, which rounds to 0 */
        return (uint16_t)sign;
    uint32_t shift = 126u - (rest >> 23), mantissa = (rest & 0x7fffffu) | 0x800000u;
    uint32_t kept = mantissa >> shift, lost = mantissa & ((1u << shift) - 1u), middle = 1u << (shift - 1u);
    return (uint16_t)(sign | (kept + (lost > middle || (lost == middle && (kept & 1u)))));
}

#endif
