"""The rotation as Triton code: a program turns a block of tokens and heads, of the queries or of the keys.

Tiles are (T, H, C): tokens, heads, channels. This module needs Triton; `triton_rotation` imports it when it launches.
"""

# What Triton traces has types of its own.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton  # type: ignore[import-untyped,import-not-found]
import triton.language as tl  # type: ignore[import-untyped,import-not-found]

# Of one value as of another the code is the same, so that no new shape is compiled anew.
_PLAIN = [
    *(f"{tensor}_{axis}" for tensor in ("q_out", "q", "k_out", "k", "cos", "sin") for axis in "bhs"),
    *("positions_b", "positions_s", "tokens", "q_heads", "k_heads", "tables", "table_rows"),
]


# fmt: off
@triton.jit(do_not_specialize=_PLAIN)
def rotate_kernel(
    q_out, q, k_out, k, cos, sin, positions,
    q_out_b, q_out_h, q_out_s, q_out_d, q_b, q_h, q_s, q_d,
    k_out_b, k_out_h, k_out_s, k_out_d, k_b, k_h, k_s, k_d,
    cos_b, cos_h, cos_s, cos_d, sin_b, sin_h, sin_s, sin_d, positions_b, positions_s,
    tokens, q_heads, k_heads, tables, table_rows,
    ALIGN: tl.constexpr, TABLE_ALIGN: tl.constexpr, GATHER: tl.constexpr, SHARE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, Q_BLOCK_HEADS: tl.constexpr, K_BLOCK_HEADS: tl.constexpr,
    START: tl.constexpr, HALF: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
    Q_KEPT: tl.constexpr, K_KEPT: tl.constexpr, BLOCK_KEPT: tl.constexpr,
    BY_CHANNEL: tl.constexpr, INTERLEAVED: tl.constexpr, CONJUGATE: tl.constexpr,
):
    """Turn q and k by the rows of cos and sin.

    Strides of batch, head and token come divided by ALIGN, those of tables by TABLE_ALIGN. With SHARE a row of the
    table is read once for all heads of a program; otherwise each head reads its own. A call for q alone has no k_heads.
    """
    # The blocks of one token, of q and then of k, are neighbours, so that they find its table row in the cache.
    q_blocks = (q_heads + Q_BLOCK_HEADS - 1) // Q_BLOCK_HEADS
    blocks = q_blocks + (k_heads + K_BLOCK_HEADS - 1) // K_BLOCK_HEADS
    token_blocks = (tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    block = tl.program_id(0) % blocks
    place = tl.program_id(0) // blocks
    # int64 from here on, so that every offset is: no tensor is too large.
    batch = (place // token_blocks).to(tl.int64)
    token = (place % token_blocks).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None, None]
    present = token < tokens
    row, known = token, present
    if GATHER:
        row = tl.load(positions + batch * positions_b + token * positions_s, mask=present, other=0).to(tl.int64)
        inside = (row >= 0) & (row < table_rows)
        tl.device_assert(inside, "positions: a position has no row in the tables")
        known = present & inside
    # A product with the constant ALIGN tells the compiler that rows are aligned: it reads and writes 16 bytes at once.
    cos_row = cos + (batch * cos_b + row * cos_s) * TABLE_ALIGN
    sin_row = sin + (batch * sin_b + row * sin_s) * TABLE_ALIGN
    if block < q_blocks:
        _turn(
            q_out + (batch * q_out_b + token * q_out_s) * ALIGN, q_out_h, q_out_d,
            q + (batch * q_b + token * q_s) * ALIGN, q_h, q_d, cos_row, cos_h, cos_d, sin_row, sin_h, sin_d,
            block, q_heads, tables, present, known, ALIGN, TABLE_ALIGN, SHARE, Q_BLOCK_HEADS,
            START, HALF, BLOCK_PAIRS, Q_KEPT, BLOCK_KEPT, BY_CHANNEL, INTERLEAVED, CONJUGATE,
        )
    else:
        _turn(
            k_out + (batch * k_out_b + token * k_out_s) * ALIGN, k_out_h, k_out_d,
            k + (batch * k_b + token * k_s) * ALIGN, k_h, k_d, cos_row, cos_h, cos_d, sin_row, sin_h, sin_d,
            block - q_blocks, k_heads, tables, present, known, ALIGN, TABLE_ALIGN, SHARE, K_BLOCK_HEADS,
            START, HALF, BLOCK_PAIRS, K_KEPT, BLOCK_KEPT, BY_CHANNEL, INTERLEAVED, CONJUGATE,
        )


@triton.jit
def _turn(
    out, out_h, out_d, x, x_h, x_d, cos, cos_h, cos_d, sin, sin_h, sin_d, block, heads, tables, present, known,
    ALIGN: tl.constexpr, TABLE_ALIGN: tl.constexpr, SHARE: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    START: tl.constexpr, HALF: tl.constexpr, BLOCK_PAIRS: tl.constexpr, KEPT: tl.constexpr, BLOCK_KEPT: tl.constexpr,
    BY_CHANNEL: tl.constexpr, INTERLEAVED: tl.constexpr, CONJUGATE: tl.constexpr,
):
    """Turn one block of the heads of tokens, whose first heads lie at `x`, and at `out`: pointers (T, 1, 1) both."""
    head = (block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[None, :, None]
    mask = present & (head < heads)
    x += head.to(tl.int64) * x_h * ALIGN
    out += head.to(tl.int64) * out_h * ALIGN
    if not SHARE:
        table = (head // (heads // tables)).to(tl.int64)
        cos += table * cos_h * TABLE_ALIGN
        sin += table * sin_h * TABLE_ALIGN
        known = known & mask
    WIDE: tl.constexpr = x.dtype.element_ty == tl.float64
    x1, x2 = _load_pairs(x, x_d, mask, START, HALF, BLOCK_PAIRS, INTERLEAVED)
    c1, c2 = _load_table(cos, cos_d, known, HALF, BLOCK_PAIRS, BY_CHANNEL, INTERLEAVED, WIDE)
    s1, s2 = _load_table(sin, sin_d, known, HALF, BLOCK_PAIRS, BY_CHANNEL, INTERLEAVED, WIDE)
    x1, x2 = x1.to(c1.dtype), x2.to(c1.dtype)
    if CONJUGATE:
        first, second = x1 * c1 + x2 * s2, x2 * c2 - x1 * s1
    else:
        first, second = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    # The one rounding, to nearest even.
    first, second = first.to(out.dtype.element_ty), second.to(out.dtype.element_ty)
    if INTERLEAVED:
        channel = tl.arange(0, 2 * BLOCK_PAIRS).to(tl.int64)[None, None, :]
        both = tl.reshape(tl.join(first, second), (first.shape[0], first.shape[1], 2 * BLOCK_PAIRS))
        tl.store(out + (START + channel) * out_d, both, mask=mask & (channel < 2 * HALF))
    else:
        pair = tl.arange(0, BLOCK_PAIRS).to(tl.int64)[None, None, :]
        tl.store(out + (START + pair) * out_d, first, mask=mask & (pair < HALF))
        tl.store(out + (START + HALF + pair) * out_d, second, mask=mask & (pair < HALF))
    if KEPT > 0:
        channel = tl.arange(0, BLOCK_KEPT).to(tl.int64)[None, None, :]
        kept = mask & (channel < KEPT)
        if START == 0:
            channel += 2 * HALF
        tl.store(out + channel * out_d, tl.load(x + channel * x_d, mask=kept), mask=kept)


@triton.jit
def _load_pairs(
    rows, step, mask, START: tl.constexpr, HALF: tl.constexpr, BLOCK_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """The first and the second of every pair of channels of rows (T, H, 1): two tiles (T, H, BLOCK_PAIRS)."""
    if INTERLEAVED:
        # Read as it lies and parted in registers: two loads with gaps would move every sector twice.
        channel = tl.arange(0, 2 * BLOCK_PAIRS).to(tl.int64)[None, None, :]
        both = tl.load(rows + (START + channel) * step, mask=mask & (channel < 2 * HALF), other=0)
        first, second = tl.split(tl.reshape(both, (both.shape[0], both.shape[1], BLOCK_PAIRS, 2)))
    else:
        pair = tl.arange(0, BLOCK_PAIRS).to(tl.int64)[None, None, :]
        first = tl.load(rows + (START + pair) * step, mask=mask & (pair < HALF), other=0)
        second = tl.load(rows + (START + HALF + pair) * step, mask=mask & (pair < HALF), other=0)
    return first, second


@triton.jit
def _load_table(
    rows, step, mask, HALF: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
    BY_CHANNEL: tl.constexpr, INTERLEAVED: tl.constexpr, WIDE: tl.constexpr,
):
    """The entries of both channels of every pair, in the dtype of the arithmetic."""
    if BY_CHANNEL:
        first, second = _load_pairs(rows, step, mask, 0, HALF, BLOCK_PAIRS, INTERLEAVED)
    else:
        pair = tl.arange(0, BLOCK_PAIRS).to(tl.int64)[None, None, :]
        first = tl.load(rows + pair * step, mask=mask & (pair < HALF), other=0)
        second = first
    if first.dtype == tl.int8:
        # Rounded to float32 whatever the arithmetic, as everywhere else.
        first, second = first.to(tl.float32) * (1 / 127), second.to(tl.float32) * (1 / 127)
    if WIDE:
        first, second = first.to(tl.float64), second.to(tl.float64)
    else:
        first, second = first.to(tl.float32), second.to(tl.float32)
    return first, second
# fmt: on
