/* Neighbours by the steps that every type has. */

#define PAIRS_TYPE(P, K, T) \
    static INLINE N(vec_##K) NK(order_pairs, P)(N(vec_##K) row) { return NK(order, K)(row); } \
    static INLINE void NK(load_pairs, P)(const T *from, N(vec_##K) *first, N(vec_##K) *second) { \
        N(vec_##K) a, b; \
        NK(load2, P)(from, &a, &b); \
        NK(split, K)(a, b, first, second); \
    } \
    static INLINE void NK(store_pairs, P)(T *to, N(vec_##K) first, N(vec_##K) second, int stream) { \
        N(vec_##K) a, b; \
        NK(join, K)(first, second, &a, &b); \
        NK(store2, P)(to, a, b, stream); \
    }
