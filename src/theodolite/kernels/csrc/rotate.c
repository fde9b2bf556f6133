/* Queries and keys turned by the rows of a table: in one pass, without scratch of their size, in threads of the caller.
 *
 * Each product is rounded, then the sum, then the result, once: no fused multiply-add, whose bits would differ from one
 * instruction set to the next. So a build must not contract (-ffp-contract=off).
 */

#include "rotate.h"

#include <stddef.h>
#include <string.h>

#include "half.h"

#if defined(__x86_64__) || defined(_M_X64)
#define X86 1
#include <immintrin.h>
#if defined(_MSC_VER)
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#elif defined(__aarch64__) || defined(_M_ARM64)
#define ARM 1
#include <arm_neon.h>
#endif

#if defined(_MSC_VER) && !defined(__clang__)
#define INLINE __forceinline
#define LIKELY(condition) (condition)
#else
#define INLINE inline __attribute__((always_inline))
#define LIKELY(condition) __builtin_expect(!!(condition), 1)
#endif

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define UNROLL _Pragma("GCC unroll 4")
#else
#define UNROLL
#endif

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)

/* Tables of a block (256 KiB for 64 pairs in float32) stay in the second cache while heads pass. */
#define TOKENS_OF_BLOCK 512
/* From here on outputs are written past the caches. */
#define STREAM_BYTES (16 << 20)
/* What does not stay in a core's second cache is asked for ahead: in the one stream of a token's heads, or
 * shared among the streams of several heads' tokens; more would not stay in the first cache. */
#define AHEAD_BYTES 8192
#define AHEAD_FROM (1 << 20)
/* Where tokens stand together: the heads, which are as many streams, that a row is read for once. */
#define HEADS_TOGETHER 4
/* Beyond the last cache fewer streams, further ahead, are quicker. */
#define FAR_BYTES (32 << 20)
#define FAR_TOGETHER 2
/* Elements that are worth a thread. */
#define GRAIN 32768
#define LINE 64
/* Whether the processor's rounding to a type may take for 0 what is not: as each set says for bfloat16. */
#define FLUSHES_f32 0
#define FLUSHES_f64 0
#define FLUSHES_f16 0

struct job {
    const struct theodolite_call *call;
    const void *x[2];
    void *out[2];
    const void *cos, *sin, *positions;
    int64_t table_size;
    int heads_inside[2]; /* a token's heads stand closer than a head's tokens */
    int64_t ahead[2];    /* elements from what is turned to what is prefetched; 0 where all stays in the caches */
    int stream[2];
    int64_t together[2]; /* heads at a time */
    int rows_in_turn; /* a token's row is the table's next, used as it stands */
};

/* `steps` tokens of `heads` heads, by rows that follow each other. Strides from head to head and from step to step. */
struct run {
    int64_t heads, steps, pairs;
    int64_t x_head, x_step, out_head, out_step;
    int64_t cos_step, sin_step;
    int64_t ahead, ahead_bytes;
};

struct row_f {
    const float *cos1, *cos2, *sin1, *sin2;
    float sign;
};

struct row_d {
    const double *cos1, *cos2, *sin1, *sin2;
    double sign;
};

typedef void (*turn_function)(const struct job *, int64_t batch, int64_t begin, int64_t end);

static INLINE int64_t position_at(const struct job *job, int64_t batch, int64_t token) {
    const struct theodolite_call *call = job->call;
    int64_t offset = batch * call->position_batch_stride + token * call->position_token_stride;
    if (call->position_size == 4)
        return ((const int32_t *)job->positions)[offset];
    return ((const int64_t *)job->positions)[offset];
}

static INLINE int64_t row_of(const struct job *job, int64_t batch, int64_t token) {
    return job->call->position_size ? position_at(job, batch, token) : token;
}

static INLINE int64_t table_offset(const struct theodolite_table *table, int64_t batch, int64_t head, int64_t row) {
    return batch * table->batch_stride + head * table->head_stride + row * table->row_stride;
}

static INLINE void copy_others(const struct theodolite_call *call, const char *x, char *out, int64_t size) {
    int64_t before = call->first_channel, behind = before + call->rotary_dim;
    if (before)
        memcpy(out, x, (size_t)(before * size));
    if (behind < call->head_dim)
        memcpy(out + behind * size, x + behind * size, (size_t)((call->head_dim - behind) * size));
}

static INLINE void prefetch(const void *from, int64_t bytes) {
#if defined(X86)
    int64_t i;
    for (i = 0; i < bytes; i += LINE)
        _mm_prefetch((const char *)from + i, _MM_HINT_T0);
#elif defined(__GNUC__)
    int64_t i;
    for (i = 0; i < bytes; i += LINE)
        __builtin_prefetch((const char *)from + i);
#else
    (void)from;
    (void)bytes;
#endif
}

static INLINE void fence(const struct job *job) {
#if defined(X86)
    if (job->stream[0] || job->stream[1])
        _mm_sfence();
#else
    (void)job;
#endif
}

#define SET scalar
#define VECTORS "set_scalar.h"
#include "set.h"

#if defined(X86)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
#define SET avx2
#define VECTORS "set_avx2.h"
#include "set.h"
#if defined(__clang__)
#pragma clang attribute pop
#elif defined(__GNUC__)
#pragma GCC pop_options
#endif

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq"))), apply_to = function)
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq")
#endif
#define SET avx512
#define HAS_BF16 0
#define VECTORS "set_avx512.h"
#include "set.h"
#undef HAS_BF16
#if defined(__clang__)
#pragma clang attribute pop
#elif defined(__GNUC__)
#pragma GCC pop_options
#endif

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16"))), apply_to = function)
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
#endif
#define SET avx512_bf16
#define HAS_BF16 1
#define VECTORS "set_avx512.h"
#include "set.h"
#undef HAS_BF16
#if defined(__clang__)
#pragma clang attribute pop
#elif defined(__GNUC__)
#pragma GCC pop_options
#endif

#elif defined(ARM)

#define SET neon
#define VECTORS "set_neon.h"
#include "set.h"

#endif

#include "processor.h"

static const struct {
    const char *name;
    const turn_function *turns;
    int (*runs)(void);
} sets[] = {
    {"scalar", turns_scalar, always},
#if defined(X86)
    {"avx2", turns_avx2, has_avx2},
    {"avx512", turns_avx512, has_avx512},
    {"avx512_bf16", turns_avx512_bf16, has_avx512_bf16},
#elif defined(ARM)
    {"neon", turns_neon, always},
#endif
};

/* Written when the library is loaded and in tests, read by every call: a word each, and any value of it is right. */
static volatile int32_t chosen_set = -1;
static theodolite_parallel_for volatile parallel_for = NULL;

int32_t theodolite_abi(void) { return THEODOLITE_ABI; }

int64_t theodolite_call_size(void) { return (int64_t)sizeof(struct theodolite_call); }

void theodolite_set_parallel(theodolite_parallel_for function) { parallel_for = function; }

int32_t theodolite_sets(void) { return (int32_t)(sizeof sets / sizeof *sets); }

const char *theodolite_set_name(int32_t set) { return set < 0 || set >= theodolite_sets() ? NULL : sets[set].name; }

int32_t theodolite_set_runs(int32_t set) { return set >= 0 && set < theodolite_sets() && sets[set].runs(); }

int32_t theodolite_chosen_set(void) {
    int32_t set = chosen_set;
    if (set >= 0)
        return set;
    for (set = theodolite_sets() - 1; !sets[set].runs(); set--)
        ;
    chosen_set = set;
    return set;
}

int32_t theodolite_choose_set(int32_t set) {
    if (!theodolite_set_runs(set))
        return 0;
    chosen_set = set;
    return 1;
}

static void turn_range(int64_t begin, int64_t end, void *context) {
    const struct job *job = (const struct job *)context;
    const int64_t tokens = job->call->tokens;
    const turn_function turn = sets[theodolite_chosen_set()].turns[job->call->type];
    while (begin < end) {
        const int64_t batch = begin / tokens, token = begin % tokens;
        const int64_t left = tokens - token, here = left < end - begin ? left : end - begin;
        turn(job, batch, token, token + here);
        begin += here;
    }
}

static int meet(const void *a, int64_t a_bytes, const void *b, int64_t b_bytes) {
    uintptr_t from = (uintptr_t)a, other = (uintptr_t)b;
    return a && b && a_bytes && b_bytes && from < other + (uintptr_t)b_bytes && other < from + (uintptr_t)a_bytes;
}

/* Whether an output may share memory with what is read, or with the other output; with its own input it may be one. */
static int overlaps(const struct job *job) {
    const struct theodolite_call *call = job->call;
    int which;
    for (which = 0; which < 2; which++) {
        const struct theodolite_operand *own = &call->operands[which], *other = &call->operands[1 - which];
        const void *out = job->out[which];
        if (own->heads == 0)
            continue;
        if (meet(out, own->out_bytes, job->cos, call->cos.bytes) ||
            meet(out, own->out_bytes, job->sin, call->sin.bytes) ||
            meet(out, own->out_bytes, job->positions, call->position_bytes))
            return 1;
        if (call->apart)
            continue;
        if (out == job->x[which]) {
            if (own->batch_stride != own->out_batch_stride || own->head_stride != own->out_head_stride ||
                own->token_stride != own->out_token_stride)
                return 1;
        } else if (meet(out, own->out_bytes, job->x[which], own->bytes))
            return 1;
        if (other->heads && (meet(out, own->out_bytes, job->x[1 - which], other->bytes) ||
                                meet(out, own->out_bytes, job->out[1 - which], other->out_bytes)))
            return 1;
    }
    return 0;
}

static int64_t size_of(int32_t type) {
    return type == THEODOLITE_FLOAT64 ? 8 : type == THEODOLITE_FLOAT32 ? 4 : type == THEODOLITE_INT8 ? 1 : 2;
}

static int unaligned(const void *pointer, int64_t size) { return (uintptr_t)pointer % (uintptr_t)size != 0; }

/* Streams write whole lines: each half of a head must begin with one. */
static int can_stream(const struct theodolite_call *call, const struct theodolite_operand *operand, const void *out) {
    const int64_t size = size_of(call->type);
    const int64_t part = call->interleaved ? call->rotary_dim : call->rotary_dim / 2;
    return call->operands[0].out_bytes + call->operands[1].out_bytes >= STREAM_BYTES && !unaligned(out, LINE) &&
           part * size % LINE == 0 && call->first_channel * size % LINE == 0 &&
           operand->out_batch_stride * size % LINE == 0 && operand->out_head_stride * size % LINE == 0 &&
           operand->out_token_stride * size % LINE == 0;
}

/* Elements from what is turned to what is asked for: in the same head's stream, or in that of all heads. */
static int64_t ahead_of(const struct job *job, int which) {
    const struct theodolite_operand *operand = &job->call->operands[which];
    const int64_t row = job->call->head_dim, size = size_of(job->call->type);
    if (job->heads_inside[which])
        return operand->head_stride == row ? AHEAD_BYTES / size : operand->token_stride;
    return operand->token_stride == row ? AHEAD_BYTES / job->together[which] / size : 4 * operand->token_stride;
}

static void plan_operand(struct job *job, int which) {
    const struct theodolite_operand *operand = &job->call->operands[which];
    job->heads_inside[which] =
        operand->heads && (operand->head_stride <= operand->token_stride || job->call->tokens == 1);
    job->together[which] = operand->bytes > FAR_BYTES ? FAR_TOGETHER : HEADS_TOGETHER;
    job->ahead[which] = operand->bytes < AHEAD_FROM ? 0 : ahead_of(job, which);
    job->stream[which] =
        operand->heads && job->out[which] != job->x[which] && can_stream(job->call, operand, job->out[which]);
}

static int64_t position_out_of_range(const struct job *job) {
    const struct theodolite_call *call = job->call;
    int64_t batch, token;
    /* One row for the whole batch is looked at once. */
    const int64_t rows = call->position_batch_stride == 0 && call->batch > 1 ? 1 : call->batch;
    for (batch = 0; batch < rows; batch++)
        for (token = 0; token < call->tokens; token++) {
            const int64_t position = position_at(job, batch, token);
            if (position < 0 || position >= call->rows)
                return batch * call->tokens + token;
        }
    return -1;
}

int64_t theodolite_rotate(
    const struct theodolite_call *call,
    const void *q,
    void *out_q,
    const void *k,
    void *out_k,
    const void *cos,
    const void *sin,
    const void *positions) {
    struct job job = {.call = call, .x = {q, k}, .out = {out_q, out_k}, .cos = cos, .sin = sin, .positions = positions};
    const theodolite_parallel_for threads = parallel_for;
    const int64_t tokens = call->batch * call->tokens, size = size_of(call->type);
    const int64_t heads = call->operands[0].heads + call->operands[1].heads;
    int64_t grain, worst;
    int which;
    job.table_size = size_of(call->table_type);
    for (which = 0; which < 2; which++)
        if (call->operands[which].heads && (unaligned(job.x[which], size) || unaligned(job.out[which], size)))
            return THEODOLITE_UNALIGNED;
    if (unaligned(cos, job.table_size) || unaligned(sin, job.table_size) ||
        (call->position_size && unaligned(positions, call->position_size)))
        return THEODOLITE_UNALIGNED;
    if (tokens == 0 || heads == 0 || call->head_dim == 0)
        return THEODOLITE_DONE;
    if (call->position_size && !positions)
        return THEODOLITE_NULL;
    if (call->position_size && (worst = position_out_of_range(&job)) >= 0)
        return worst << 8 | THEODOLITE_POSITION;
    if (!cos || !sin)
        return THEODOLITE_NULL;
    for (which = 0; which < 2; which++)
        if (call->operands[which].heads && (!job.x[which] || !job.out[which]))
            return THEODOLITE_NULL;
    if (overlaps(&job))
        return THEODOLITE_OVERLAP;
    for (which = 0; which < 2; which++)
        plan_operand(&job, which);
    job.rows_in_turn =
        call->position_size == 0 && !(call->by_channel && call->interleaved) &&
        call->table_type == (call->type == THEODOLITE_FLOAT64 ? THEODOLITE_FLOAT64 : THEODOLITE_FLOAT32);
    grain = GRAIN / (heads * call->head_dim) + 1;
    if (threads && tokens > grain)
        return threads(0, tokens, grain, turn_range, &job) ? THEODOLITE_THREADS : THEODOLITE_DONE;
    turn_range(0, tokens, &job);
    return THEODOLITE_DONE;
}
