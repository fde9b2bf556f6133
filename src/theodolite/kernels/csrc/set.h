/* All four types by one instruction set: SET names it, VECTORS is the file of its vectors. */

#define N(name) CAT(CAT(name, _), SET)
#define NK(name, kind) CAT(CAT(CAT(CAT(name, _), kind), _), SET)

#include VECTORS
#ifndef FLUSHES_bf16
#define FLUSHES_bf16 0
#endif
#include "row.h"

#define P f32
#define T float
#define A float
#define K f
#include "turn.h"
#undef P
#undef T
#define P bf16
#define T uint16_t
#include "turn.h"
#undef P
#define P f16
#include "turn.h"
#undef P
#undef T
#undef A
#undef K
#define P f64
#define T double
#define A double
#define K d
#include "turn.h"
#undef P
#undef T
#undef A
#undef K

static const turn_function N(turns)[4] = {
    NK(turn_tokens, f32), NK(turn_tokens, bf16), NK(turn_tokens, f16), NK(turn_tokens, f64)};

#undef FLUSHES_bf16
#undef PAIRS_TYPE
#undef N
#undef NK
#undef WIDTH_f
#undef WIDTH_d
#undef SET
#undef VECTORS
