/* One number at a time, on any processor; compilers may vectorise what they can. */

#define WIDTH_f 1
#define WIDTH_d 1
typedef float N(vec_f);
typedef double N(vec_d);

#define SCALAR_KIND(K, A)                                                        \
    static INLINE A NK(set1, K)(A value) { return value; }                       \
    static INLINE A NK(load_row, K)(const A *from) { return *from; }             \
    static INLINE A NK(load_row_some, K)(const A *from, int64_t n) {             \
        (void)n;                                                                 \
        return *from;                                                            \
    }                                                                            \
    static INLINE A NK(mul, K)(A a, A b) { return a * b; }                       \
    static INLINE A NK(add, K)(A a, A b) { return a + b; }                       \
    static INLINE A NK(sub, K)(A a, A b) { return a - b; }                       \
    static INLINE A NK(order, K)(A a) { return a; }                              \
    static INLINE void NK(split, K)(A a, A b, A *first, A *second) {             \
        *first = a;                                                              \
        *second = b;                                                             \
    }                                                                            \
    static INLINE void NK(join, K)(A first, A second, A *a, A *b) {              \
        *a = first;                                                              \
        *b = second;                                                             \
    }

SCALAR_KIND(f, float)
SCALAR_KIND(d, double)

#define SCALAR_TYPE(P, T, A, FROM, TO)                                           \
    static INLINE A NK(load, P)(const T *from) { return FROM(*from); }           \
    static INLINE A NK(load_some, P)(const T *from, int64_t n) {                 \
        (void)n;                                                                 \
        return FROM(*from);                                                      \
    }                                                                            \
    static INLINE void NK(load2, P)(const T *from, A *a, A *b) {                 \
        *a = FROM(from[0]);                                                      \
        *b = FROM(from[1]);                                                      \
    }                                                                            \
    static INLINE void NK(store_some, P)(T *to, A value, int64_t n) {            \
        (void)n;                                                                 \
        *to = TO(value);                                                         \
    }                                                                            \
    static INLINE void NK(store2, P)(T *to, A a, A b, int stream) {              \
        (void)stream;                                                            \
        to[0] = TO(a);                                                           \
        to[1] = TO(b);                                                           \
    }

#define SAME(value) (value)
SCALAR_TYPE(f32, float, float, SAME, SAME)
SCALAR_TYPE(f64, double, double, SAME, SAME)
SCALAR_TYPE(bf16, uint16_t, float, from_bf16, to_bf16)
SCALAR_TYPE(f16, uint16_t, float, from_f16, to_f16)
#undef SAME
#undef SCALAR_TYPE
#undef SCALAR_KIND

#include "pairs.h"
PAIRS_TYPE(f32, f, float)
PAIRS_TYPE(f64, d, double)
PAIRS_TYPE(f16, f, uint16_t)
PAIRS_TYPE(bf16, f, uint16_t)
