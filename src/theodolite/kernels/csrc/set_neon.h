/* NEON of 64-bit ARM: 4 float32 or 2 float64 at a time. */

#define WIDTH_f 4
#define WIDTH_d 2
typedef float32x4_t N(vec_f);
typedef float64x2_t N(vec_d);

static INLINE float32x4_t NK(set1, f)(float value) { return vdupq_n_f32(value); }
static INLINE float32x4_t NK(mul, f)(float32x4_t a, float32x4_t b) { return vmulq_f32(a, b); }
static INLINE float32x4_t NK(add, f)(float32x4_t a, float32x4_t b) { return vaddq_f32(a, b); }
static INLINE float32x4_t NK(sub, f)(float32x4_t a, float32x4_t b) { return vsubq_f32(a, b); }
static INLINE float32x4_t NK(order, f)(float32x4_t row) { return row; }
static INLINE void NK(split, f)(float32x4_t a, float32x4_t b, float32x4_t *first, float32x4_t *second) {
    *first = vuzp1q_f32(a, b);
    *second = vuzp2q_f32(a, b);
}
static INLINE void NK(join, f)(float32x4_t first, float32x4_t second, float32x4_t *a, float32x4_t *b) {
    *a = vzip1q_f32(first, second);
    *b = vzip2q_f32(first, second);
}

static INLINE float64x2_t NK(set1, d)(double value) { return vdupq_n_f64(value); }
static INLINE float64x2_t NK(mul, d)(float64x2_t a, float64x2_t b) { return vmulq_f64(a, b); }
static INLINE float64x2_t NK(add, d)(float64x2_t a, float64x2_t b) { return vaddq_f64(a, b); }
static INLINE float64x2_t NK(sub, d)(float64x2_t a, float64x2_t b) { return vsubq_f64(a, b); }
static INLINE float64x2_t NK(order, d)(float64x2_t row) { return row; }
static INLINE void NK(split, d)(float64x2_t a, float64x2_t b, float64x2_t *first, float64x2_t *second) {
    *first = vuzp1q_f64(a, b);
    *second = vuzp2q_f64(a, b);
}
static INLINE void NK(join, d)(float64x2_t first, float64x2_t second, float64x2_t *a, float64x2_t *b) {
    *a = vzip1q_f64(first, second);
    *b = vzip2q_f64(first, second);
}

static INLINE float32x4_t NK(load, f32)(const float *from) { return vld1q_f32(from); }
static INLINE void NK(store, f32)(float *to, float32x4_t value) { vst1q_f32(to, value); }
static INLINE float64x2_t NK(load, f64)(const double *from) { return vld1q_f64(from); }
static INLINE void NK(store, f64)(double *to, float64x2_t value) { vst1q_f64(to, value); }

static INLINE float32x4_t NK(load, bf16)(const uint16_t *from) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from), 16));
}
static INLINE void NK(store, bf16)(uint16_t *to, float32x4_t value) {
    uint32x4_t bits = vreinterpretq_u32_f32(value);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    vst1_u16(to, vshrn_n_u32(vbslq_u32(vceqq_f32(value, value), rounded, quiet), 16));
}
static INLINE float32x4_t NK(load, f16)(const uint16_t *from) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
}
static INLINE void NK(store, f16)(uint16_t *to, float32x4_t value) {
    vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(value)));
}

#define NEON_TYPE(P, K, T)                                                       \
    static INLINE void NK(load2, P)(const T *from, N(vec_##K) * a, N(vec_##K) * b) { \
        *a = NK(load, P)(from);                                                  \
        *b = NK(load, P)(from + WIDTH_##K);                                      \
    }                                                                            \
    static INLINE void NK(store2, P)(T *to, N(vec_##K) a, N(vec_##K) b, int stream) { \
        (void)stream;                                                            \
        NK(store, P)(to, a);                                                     \
        NK(store, P)(to + WIDTH_##K, b);                                         \
    }

NEON_TYPE(f32, f, float)
NEON_TYPE(f64, d, double)
NEON_TYPE(bf16, f, uint16_t)
NEON_TYPE(f16, f, uint16_t)
#undef NEON_TYPE

#include "some.h"
#include "pairs.h"
PAIRS_TYPE(f32, f, float)
PAIRS_TYPE(f64, d, double)
PAIRS_TYPE(f16, f, uint16_t)
PAIRS_TYPE(bf16, f, uint16_t)
