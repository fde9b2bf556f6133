/* AVX2 with F16C: 8 float32 or 4 float64 at a time. */

#define WIDTH_f 8
#define WIDTH_d 4
typedef __m256 N(vec_f);
typedef __m256d N(vec_d);

static INLINE __m256 NK(set1, f)(float value) { return _mm256_set1_ps(value); }
static INLINE __m256 NK(mul, f)(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
static INLINE __m256 NK(add, f)(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
static INLINE __m256 NK(sub, f)(__m256 a, __m256 b) { return _mm256_sub_ps(a, b); }

static INLINE __m256d NK(set1, d)(double value) { return _mm256_set1_pd(value); }
static INLINE __m256d NK(mul, d)(__m256d a, __m256d b) { return _mm256_mul_pd(a, b); }
static INLINE __m256d NK(add, d)(__m256d a, __m256d b) { return _mm256_add_pd(a, b); }
static INLINE __m256d NK(sub, d)(__m256d a, __m256d b) { return _mm256_sub_pd(a, b); }

/* Pairs come out of split in the order 0 1 4 5 2 3 6 7, which spares crossing lanes; order brings a row into it. */
static INLINE __m256 NK(order, f)(__m256 row) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(row), 0xd8));
}
static INLINE void NK(split, f)(__m256 a, __m256 b, __m256 *first, __m256 *second) {
    *first = _mm256_shuffle_ps(a, b, 0x88);
    *second = _mm256_shuffle_ps(a, b, 0xdd);
}
static INLINE void NK(join, f)(__m256 first, __m256 second, __m256 *a, __m256 *b) {
    *a = _mm256_unpacklo_ps(first, second);
    *b = _mm256_unpackhi_ps(first, second);
}

/* 0 2 1 3 */
static INLINE __m256d NK(order, d)(__m256d row) { return _mm256_permute4x64_pd(row, 0xd8); }
static INLINE void NK(split, d)(__m256d a, __m256d b, __m256d *first, __m256d *second) {
    *first = _mm256_unpacklo_pd(a, b);
    *second = _mm256_unpackhi_pd(a, b);
}
static INLINE void NK(join, d)(__m256d first, __m256d second, __m256d *a, __m256d *b) {
    *a = _mm256_unpacklo_pd(first, second);
    *b = _mm256_unpackhi_pd(first, second);
}

static INLINE __m256 NK(load, f32)(const float *from) { return _mm256_loadu_ps(from); }
static INLINE void NK(store, f32)(float *to, __m256 value) { _mm256_storeu_ps(to, value); }
static INLINE void NK(load2, f32)(const float *from, __m256 *a, __m256 *b) {
    *a = _mm256_loadu_ps(from);
    *b = _mm256_loadu_ps(from + 8);
}
static INLINE void NK(store2, f32)(float *to, __m256 a, __m256 b, int stream) {
    if (stream) {
        _mm256_stream_ps(to, a);
        _mm256_stream_ps(to + 8, b);
    } else {
        _mm256_storeu_ps(to, a);
        _mm256_storeu_ps(to + 8, b);
    }
}

static INLINE __m256d NK(load, f64)(const double *from) { return _mm256_loadu_pd(from); }
static INLINE void NK(store, f64)(double *to, __m256d value) { _mm256_storeu_pd(to, value); }
static INLINE void NK(load2, f64)(const double *from, __m256d *a, __m256d *b) {
    *a = _mm256_loadu_pd(from);
    *b = _mm256_loadu_pd(from + 4);
}
static INLINE void NK(store2, f64)(double *to, __m256d a, __m256d b, int stream) {
    if (stream) {
        _mm256_stream_pd(to, a);
        _mm256_stream_pd(to + 4, b);
    } else {
        _mm256_storeu_pd(to, a);
        _mm256_storeu_pd(to + 4, b);
    }
}

static INLINE __m256 N(widen_bf16)(__m128i half) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
/* bfloat16 in the low half of each 32 bits. */
static INLINE __m256i N(round_bf16)(__m256 value) {
    __m256i bits = _mm256_castps_si256(value);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256 nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
    rounded = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(nan));
    return _mm256_srli_epi32(rounded, 16);
}
static INLINE __m256i N(pack)(__m256i a, __m256i b) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
}

static INLINE __m256 NK(load, bf16)(const uint16_t *from) {
    return N(widen_bf16)(_mm_loadu_si128((const __m128i *)from));
}
static INLINE void NK(store, bf16)(uint16_t *to, __m256 value) {
    __m256i packed = N(pack)(N(round_bf16)(value), _mm256_setzero_si256());
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(packed));
}
static INLINE void NK(load2, bf16)(const uint16_t *from, __m256 *a, __m256 *b) {
    *a = NK(load, bf16)(from);
    *b = NK(load, bf16)(from + 8);
}
static INLINE void N(put)(uint16_t *to, __m256i packed, int stream) {
    if (stream)
        _mm256_stream_si256((__m256i *)to, packed);
    else
        _mm256_storeu_si256((__m256i *)to, packed);
}
static INLINE void NK(store2, bf16)(uint16_t *to, __m256 a, __m256 b, int stream) {
    N(put)(to, N(pack)(N(round_bf16)(a), N(round_bf16)(b)), stream);
}

static INLINE __m256 NK(load, f16)(const uint16_t *from) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
}
static INLINE void NK(store, f16)(uint16_t *to, __m256 value) {
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static INLINE void NK(load2, f16)(const uint16_t *from, __m256 *a, __m256 *b) {
    *a = NK(load, f16)(from);
    *b = NK(load, f16)(from + 8);
}
static INLINE void NK(store2, f16)(uint16_t *to, __m256 a, __m256 b, int stream) {
    __m128i low = _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m128i high = _mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    N(put)(to, _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1), stream);
}

#include "some.h"

/* A pair fills 32 bits, so that its channels come apart and back without a look at their neighbours. */
static INLINE __m256 NK(order_pairs, bf16)(__m256 row) { return row; }
static INLINE void NK(load_pairs, bf16)(const uint16_t *from, __m256 *first, __m256 *second) {
    const __m256i words = _mm256_loadu_si256((const __m256i *)from);
    *first = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
    *second = _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32((int)0xffff0000u)));
}
static INLINE void NK(store_pairs, bf16)(uint16_t *to, __m256 first, __m256 second, int stream) {
    N(put)(to, _mm256_or_si256(N(round_bf16)(first), _mm256_slli_epi32(N(round_bf16)(second), 16)), stream);
}

#include "pairs.h"
PAIRS_TYPE(f32, f, float)
PAIRS_TYPE(f64, d, double)
PAIRS_TYPE(f16, f, uint16_t)
