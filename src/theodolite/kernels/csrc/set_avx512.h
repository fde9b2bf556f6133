/* AVX-512 (F, BW, VL, DQ): 16 float32 or 8 float64 at a time, tails by masks. HAS_BF16: its instructions for them. */

#define WIDTH_f 16
#define WIDTH_d 8
typedef __m512 N(vec_f);
typedef __m512d N(vec_d);

static INLINE __m512 NK(set1, f)(float value) { return _mm512_set1_ps(value); }
static INLINE __m512 NK(mul, f)(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
static INLINE __m512 NK(add, f)(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
static INLINE __m512 NK(sub, f)(__m512 a, __m512 b) { return _mm512_sub_ps(a, b); }

static INLINE __m512d NK(set1, d)(double value) { return _mm512_set1_pd(value); }
static INLINE __m512d NK(mul, d)(__m512d a, __m512d b) { return _mm512_mul_pd(a, b); }
static INLINE __m512d NK(add, d)(__m512d a, __m512d b) { return _mm512_add_pd(a, b); }
static INLINE __m512d NK(sub, d)(__m512d a, __m512d b) { return _mm512_sub_pd(a, b); }

/* Pairs come out of split in an order that spares crossing lanes; order brings a row into it. */
static INLINE __m512 NK(order, f)(__m512 row) {
    const __m512i index = _mm512_setr_epi32(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    return _mm512_permutexvar_ps(index, row);
}
static INLINE void NK(split, f)(__m512 a, __m512 b, __m512 *first, __m512 *second) {
    *first = _mm512_shuffle_ps(a, b, 0x88);
    *second = _mm512_shuffle_ps(a, b, 0xdd);
}
static INLINE void NK(join, f)(__m512 first, __m512 second, __m512 *a, __m512 *b) {
    *a = _mm512_unpacklo_ps(first, second);
    *b = _mm512_unpackhi_ps(first, second);
}

static INLINE __m512d NK(order, d)(__m512d row) {
    const __m512i index = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm512_permutexvar_pd(index, row);
}
static INLINE void NK(split, d)(__m512d a, __m512d b, __m512d *first, __m512d *second) {
    *first = _mm512_unpacklo_pd(a, b);
    *second = _mm512_unpackhi_pd(a, b);
}
static INLINE void NK(join, d)(__m512d first, __m512d second, __m512d *a, __m512d *b) {
    *a = _mm512_unpacklo_pd(first, second);
    *b = _mm512_unpackhi_pd(first, second);
}

static INLINE __mmask16 N(first16)(int64_t n) { return (__mmask16)((1u << (n < 16 ? n : 16)) - 1u); }
static INLINE __mmask8 N(first8)(int64_t n) { return (__mmask8)((1u << (n < 8 ? n : 8)) - 1u); }

static INLINE __m512 NK(load, f32)(const float *from) { return _mm512_loadu_ps(from); }
static INLINE __m512 NK(load_some, f32)(const float *from, int64_t n) {
    return _mm512_maskz_loadu_ps(N(first16)(n), from);
}
static INLINE void NK(store_some, f32)(float *to, __m512 value, int64_t n) {
    _mm512_mask_storeu_ps(to, N(first16)(n), value);
}
static INLINE void NK(load2, f32)(const float *from, __m512 *a, __m512 *b) {
    *a = _mm512_loadu_ps(from);
    *b = _mm512_loadu_ps(from + 16);
}
static INLINE void NK(store2, f32)(float *to, __m512 a, __m512 b, int stream) {
    if (stream) {
        _mm512_stream_ps(to, a);
        _mm512_stream_ps(to + 16, b);
    } else {
        _mm512_storeu_ps(to, a);
        _mm512_storeu_ps(to + 16, b);
    }
}

static INLINE __m512d NK(load, f64)(const double *from) { return _mm512_loadu_pd(from); }
static INLINE __m512d NK(load_some, f64)(const double *from, int64_t n) {
    return _mm512_maskz_loadu_pd(N(first8)(n), from);
}
static INLINE void NK(store_some, f64)(double *to, __m512d value, int64_t n) {
    _mm512_mask_storeu_pd(to, N(first8)(n), value);
}
static INLINE void NK(load2, f64)(const double *from, __m512d *a, __m512d *b) {
    *a = _mm512_loadu_pd(from);
    *b = _mm512_loadu_pd(from + 8);
}
static INLINE void NK(store2, f64)(double *to, __m512d a, __m512d b, int stream) {
    if (stream) {
        _mm512_stream_pd(to, a);
        _mm512_stream_pd(to + 8, b);
    } else {
        _mm512_storeu_pd(to, a);
        _mm512_storeu_pd(to + 8, b);
    }
}

static INLINE __m512 N(widen_bf16)(__m256i half) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
static INLINE __m256i N(round_bf16)(__m512 value) {
    __m512i bits = _mm512_castps_si512(value);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
static INLINE __m512i N(pair_up)(__m256i low, __m256i high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
static INLINE void N(put)(uint16_t *to, __m512i packed, int stream) {
    if (stream)
        _mm512_stream_si512((__m512i *)to, packed);
    else
        _mm512_storeu_si512(to, packed);
}

static INLINE __m512 NK(load, bf16)(const uint16_t *from) {
    return N(widen_bf16)(_mm256_loadu_si256((const __m256i *)from));
}
static INLINE __m512 NK(load_some, bf16)(const uint16_t *from, int64_t n) {
    return N(widen_bf16)(_mm256_maskz_loadu_epi16(N(first16)(n), from));
}
static INLINE void NK(store_some, bf16)(uint16_t *to, __m512 value, int64_t n) {
    _mm256_mask_storeu_epi16(to, N(first16)(n), N(round_bf16)(value));
}
/* Each word goes to the upper half of 32 bits, the lower half is 0: one instruction instead of two. */
static INLINE void NK(load2, bf16)(const uint16_t *from, __m512 *a, __m512 *b) {
    const __m512i low = _mm512_set_epi16(
        15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5, 0, 4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    __m512i words = _mm512_loadu_si512(from);
    *a = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, low, words));
    *b = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, high, words));
}
static INLINE void NK(store2, bf16)(uint16_t *to, __m512 a, __m512 b, int stream) {
    N(put)(to, N(pair_up)(N(round_bf16)(a), N(round_bf16)(b)), stream);
}

/* A pair fills 32 bits, so that its channels come apart and back without a look at their neighbours. */
static INLINE __m512 NK(order_pairs, bf16)(__m512 row) { return row; }
static INLINE void NK(load_pairs, bf16)(const uint16_t *from, __m512 *first, __m512 *second) {
    const __m512i words = _mm512_loadu_si512(from);
    *first = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    *second = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000u)));
}
/* The first 16 words and the last in turn. */
static INLINE __m512i N(interleave)(__m512i words) {
    const __m512i index = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
        21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(index, words);
}
static INLINE void NK(store_pairs, bf16)(uint16_t *to, __m512 first, __m512 second, int stream) {
    N(put)(to, N(interleave)(N(pair_up)(N(round_bf16)(first), N(round_bf16)(second))), stream);
}

#if HAS_BF16
/* The processor's own rounding takes subnormals for 0, which nothing else does: where a word is 0, it is in doubt. */
#define FLUSHES_bf16 1
typedef __m512i N(words);
typedef __m512i N(doubt);
static INLINE __m512i NK(round2, bf16)(__m512 a, __m512 b) {
    const __m512bh rounded = _mm512_cvtne2ps_pbh(b, a);
    __m512i words;
    memcpy(&words, &rounded, sizeof words);
    return words;
}
static INLINE __m512i N(doubt_of)(__m512i one, __m512i two) {
    return _mm512_min_epu16(_mm512_add_epi16(one, one), _mm512_add_epi16(two, two));
}
static INLINE int N(doubtful)(__m512i doubt) { return _mm512_test_epi16_mask(doubt, doubt) != 0xffffffffu; }
#endif

static INLINE __m512 NK(load, f16)(const uint16_t *from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}
static INLINE __m512 NK(load_some, f16)(const uint16_t *from, int64_t n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(N(first16)(n), from));
}
static INLINE __m256i N(round_f16)(__m512 value) {
    return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static INLINE void NK(store_some, f16)(uint16_t *to, __m512 value, int64_t n) {
    _mm256_mask_storeu_epi16(to, N(first16)(n), N(round_f16)(value));
}
static INLINE void NK(load2, f16)(const uint16_t *from, __m512 *a, __m512 *b) {
    *a = NK(load, f16)(from);
    *b = NK(load, f16)(from + 16);
}
static INLINE void NK(store2, f16)(uint16_t *to, __m512 a, __m512 b, int stream) {
    N(put)(to, N(pair_up)(N(round_f16)(a), N(round_f16)(b)), stream);
}

static INLINE __m512 NK(load_row, f)(const float *from) { return _mm512_loadu_ps(from); }
static INLINE __m512d NK(load_row, d)(const double *from) { return _mm512_loadu_pd(from); }
static INLINE __m512 NK(load_row_some, f)(const float *from, int64_t n) { return NK(load_some, f32)(from, n); }
static INLINE __m512d NK(load_row_some, d)(const double *from, int64_t n) { return NK(load_some, f64)(from, n); }
#include "pairs.h"
PAIRS_TYPE(f32, f, float)
PAIRS_TYPE(f64, d, double)
PAIRS_TYPE(f16, f, uint16_t)
