/* Fewer numbers than a vector holds, through the stack: for sets without masks. */

#define SOME_TYPE(P, K, T)                                                       \
    static INLINE N(vec_##K) NK(load_some, P)(const T *from, int64_t n) {        \
        T buffer[WIDTH_##K] = {0};                                               \
        if (n >= WIDTH_##K)                                                      \
            return NK(load, P)(from);                                            \
        memcpy(buffer, from, (size_t)n * sizeof(T));                             \
        return NK(load, P)(buffer);                                              \
    }                                                                            \
    static INLINE void NK(store_some, P)(T *to, N(vec_##K) value, int64_t n) {   \
        T buffer[WIDTH_##K];                                                     \
        if (n >= WIDTH_##K) {                                                    \
            NK(store, P)(to, value);                                             \
            return;                                                              \
        }                                                                        \
        NK(store, P)(buffer, value);                                             \
        memcpy(to, buffer, (size_t)n * sizeof(T));                               \
    }

SOME_TYPE(f32, f, float)
SOME_TYPE(f64, d, double)
SOME_TYPE(bf16, f, uint16_t)
SOME_TYPE(f16, f, uint16_t)
#undef SOME_TYPE

static INLINE N(vec_f) NK(load_row, f)(const float *from) { return NK(load, f32)(from); }
static INLINE N(vec_d) NK(load_row, d)(const double *from) { return NK(load, f64)(from); }
static INLINE N(vec_f) NK(load_row_some, f)(const float *from, int64_t n) { return NK(load_some, f32)(from, n); }
static INLINE N(vec_d) NK(load_row_some, d)(const double *from, int64_t n) { return NK(load_some, f64)(from, n); }
