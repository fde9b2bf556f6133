/* The table entries of one token: as they stand, or widened and parted on the stack. */

static void N(widen)(int32_t type, const void *from, int64_t n, float *to) {
    int64_t i = 0;
    switch (type) {
    case THEODOLITE_FLOAT32:
        memcpy(to, from, (size_t)n * sizeof(float));
        break;
    case THEODOLITE_FLOAT64:
        for (; i < n; i++)
            to[i] = (float)((const double *)from)[i];
        break;
    case THEODOLITE_BFLOAT16:
        for (; i < n; i++)
            to[i] = from_bf16(((const uint16_t *)from)[i]);
        break;
    case THEODOLITE_FLOAT16:
        for (; i < n; i += WIDTH_f) {
            float lane[WIDTH_f];
            N(vec_f) wide = NK(load_some, f16)((const uint16_t *)from + i, n - i);
            memcpy(lane, &wide, sizeof lane);
            memcpy(to + i, lane, (size_t)(n - i < WIDTH_f ? n - i : WIDTH_f) * sizeof(float));
        }
        break;
    default:
        for (; i < n; i++)
            to[i] = (float)((const int8_t *)from)[i] * (float)(1.0 / 127.0);
    }
}

#define ROW_KIND(K, A, OWN_TYPE)                                                 \
    static INLINE void N(entries_##K)(                                           \
        const struct job *job, const void *table, int64_t offset, A *scratch, const A **first, const A **second) { \
        const struct theodolite_call *call = job->call;                          \
        int64_t pairs = call->rotary_dim / 2, columns = call->by_channel ? 2 * pairs : pairs, i; \
        const A *row = (const A *)table + offset;                                \
        if (call->table_type != OWN_TYPE) {                                      \
            const char *from = (const char *)table + offset * job->table_size;   \
            N(widened_##K)(call->table_type, from, columns, scratch);            \
            row = scratch;                                                       \
        }                                                                        \
        *first = row;                                                            \
        *second = call->by_channel ? row + pairs : row;                          \
        if (call->by_channel && call->interleaved) {                             \
            A *parted = scratch + 2 * pairs;                                     \
            for (i = 0; i < pairs; i++) {                                        \
                parted[i] = row[2 * i];                                          \
                parted[pairs + i] = row[2 * i + 1];                              \
            }                                                                    \
            *first = parted;                                                     \
            *second = parted + pairs;                                            \
        }                                                                        \
    }                                                                            \
    /* scratch: 8 rows of pairs */                                               \
    static INLINE struct row_##K N(row_##K)(                                     \
        const struct job *job, int64_t batch, int64_t token, int64_t head, A *scratch) { \
        const struct theodolite_call *call = job->call;                          \
        int64_t at = row_of(job, batch, token);                                  \
        struct row_##K row;                                                      \
        N(entries_##K)(job, job->cos, table_offset(&call->cos, batch, head, at), scratch, &row.cos1, &row.cos2); \
        N(entries_##K)(job, job->sin, table_offset(&call->sin, batch, head, at), \
            scratch + 2 * call->rotary_dim, &row.sin1, &row.sin2);               \
        row.sign = 1;                                                            \
        if (call->conjugate) {                                                   \
            const A *swapped = row.sin1;                                         \
            row.sin1 = row.sin2;                                                 \
            row.sin2 = swapped;                                                  \
            row.sign = -1;                                                       \
        }                                                                        \
        return row;                                                              \
    }

static INLINE void N(widened_f)(int32_t type, const void *from, int64_t n, float *to) { N(widen)(type, from, n, to); }
static void N(widened_d)(int32_t type, const void *from, int64_t n, double *to) {
    float narrow[2 * THEODOLITE_MAX_PAIRS];
    int64_t i;
    N(widen)(type, from, n, narrow);
    for (i = 0; i < n; i++)
        to[i] = narrow[i];
}

ROW_KIND(f, float, THEODOLITE_FLOAT32)
ROW_KIND(d, double, THEODOLITE_FLOAT64)
#undef ROW_KIND
