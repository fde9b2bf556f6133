/* The interface of the library: one call turns queries and keys. Plain C, without torch and without Python. */

#ifndef THEODOLITE_ROTATE_H
#define THEODOLITE_ROTATE_H

#include <stdint.h>

#if defined(_WIN32)
#define THEODOLITE_API __declspec(dllexport)
#else
#define THEODOLITE_API __attribute__((visibility("default")))
#endif

/* Raised with every change of what follows; the loader refuses a library of another number. */
#define THEODOLITE_ABI 1

enum theodolite_type {
    THEODOLITE_FLOAT32 = 0,
    THEODOLITE_BFLOAT16 = 1,
    THEODOLITE_FLOAT16 = 2,
    THEODOLITE_FLOAT64 = 3,
    THEODOLITE_INT8 = 4 /* of tables: the entry times 127 */
};

/* Tables and rows are converted on the stack. */
#define THEODOLITE_MAX_PAIRS 1024

/* One of q and k: (batch, heads, tokens, head_dim), the last dimension contiguous. Strides count elements. */
struct theodolite_operand {
    int64_t heads; /* 0: not given */
    int64_t batch_stride, head_stride, token_stride;
    int64_t out_batch_stride, out_head_stride, out_token_stride;
    int64_t bytes, out_bytes; /* from the first to behind the last element */
};

/* cos or sin: (batch, table_heads, rows, pairs), or twice as many columns where each channel has its own. */
struct theodolite_table {
    int64_t batch_stride, head_stride, row_stride;
    int64_t bytes;
};

struct theodolite_call {
    int64_t batch, tokens, head_dim;
    int64_t first_channel, rotary_dim; /* the channels that turn */
    int64_t table_heads, rows;
    int64_t position_batch_stride, position_token_stride, position_bytes;
    struct theodolite_operand operands[2];
    struct theodolite_table cos, sin;
    int32_t type, table_type;
    int32_t position_size; /* bytes of one position: 0 (row s for token s), 4 or 8 */
    int32_t interleaved, conjugate, by_channel;
    int32_t apart; /* the caller has seen that no output shares an element with q, k or the other, but its own input */
    int32_t reserved;
};

/* What theodolite_rotate returns in its low byte; nothing is written but for the first and the last. */
enum theodolite_outcome {
    THEODOLITE_DONE = 0,
    THEODOLITE_POSITION = 1, /* out of range; the other bytes are its index, batch * tokens + token */
    THEODOLITE_OVERLAP = 2,  /* what is written may share memory with what is read */
    THEODOLITE_UNALIGNED = 3,
    THEODOLITE_NULL = 4,     /* a tensor without memory */
    THEODOLITE_THREADS = 5   /* threads failed: the outputs are not to be used */
};

/* The signature of torch_parallel_for, whose threads are used. */
typedef void (*theodolite_body)(int64_t begin, int64_t end, void *context);
typedef int32_t (*theodolite_parallel_for)(int64_t begin, int64_t end, int64_t grain, theodolite_body, void *context);

THEODOLITE_API int32_t theodolite_abi(void);

/* Bytes of struct theodolite_call, for a loader to compare with its own. */
THEODOLITE_API int64_t theodolite_call_size(void);

/* NULL: work is done in the calling thread. */
THEODOLITE_API void theodolite_set_parallel(theodolite_parallel_for);

/* The instruction sets, from 0, the plainest; and which of them this processor runs. */
THEODOLITE_API int32_t theodolite_sets(void);
THEODOLITE_API const char *theodolite_set_name(int32_t set);
THEODOLITE_API int32_t theodolite_set_runs(int32_t set);

/* Which set is used; the last that runs, until it is chosen. Returns 0 if the set does not run here. */
THEODOLITE_API int32_t theodolite_chosen_set(void);
THEODOLITE_API int32_t theodolite_choose_set(int32_t set);

/* Turn q into out_q and k into out_k; either is NULL where its operand has no heads. An out may be the input itself. */
THEODOLITE_API int64_t theodolite_rotate(
    const struct theodolite_call *call,
    const void *q,
    void *out_q,
    const void *k,
    void *out_k,
    const void *cos,
    const void *sin,
    const void *positions);

#endif
