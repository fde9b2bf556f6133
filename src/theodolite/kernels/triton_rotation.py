"""The rotation in Triton, for GPUs: one launch turns queries and keys, forward or, conjugated, backward."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from theodolite.kernels.layout import Layout

# Bytes of x that a program turns, and a thread of it: four reads of 16 bytes each. Four such programs keep about 30 KB
# of a multiprocessor under way, enough for 4.8 TB/s at 0.8 us; their registers leave room for eight.
_PROGRAM_BYTES = 8192
_THREAD_BYTES = 64


def supported(x: Tensor) -> bool:
    """Whether `rotate_into` can run for `x` here: it is on a GPU that Triton knows, and Triton is installed."""
    return x.device.type in ("cuda", "xpu") and _known(x.device) and _kernel() is not None


def rotate_into(
    turns: Sequence[tuple[Tensor, Tensor]], cos: Tensor, sin: Tensor, positions: Tensor | None, layout: Layout
) -> None:
    """Turn each `x` into its `out`, all in one launch.

    Args:
        turns: one or two `(out, x)`, (B, H, S, D) of float16, bfloat16, float32 or float64, with any strides. `out` is
            `x` itself or shares no memory with any `x` or table. H may differ between the two.
        cos, sin: (1 or B, Ht, L, R/2), or R columns for tables by channel; Ht is 1 or divides every H.
        positions: None for row s of the tables for token s; or int64 or int32 (1 or B, S).
        layout: which channels turn, in which pairs, and which way.

    Every product and every sum is rounded, in float32 (float64 for float64), then the result once, to nearest even.

    A position without a row is an assertion on the device, as in torch's own indexing: nothing is read outside of the
    tables; the next call that waits for the device raises a RuntimeError, after which the process can use it no more.
    To raise before anything is written would mean to wait for the device in every call.
    """
    turns = [(out, x) for out, x in turns if x.numel()]
    if not turns:
        return
    (q_out, q), (k_out, k) = turns[0], turns[-1]
    plan = _plan(
        layout,
        q.element_size(),
        len(turns),
        (q_out is q, k_out is k),
        *((tensor.shape, tensor.stride()) for tensor in (q_out, q, k_out, k, cos, sin)),
        None if positions is None else (positions.shape, positions.stride()),
    )
    launch = _kernel()[plan.grid]
    module = getattr(torch, q.device.type)
    if q.device.index in (None, module.current_device()):
        launch(q_out, q, k_out, k, cos, sin, positions, *plan.numbers, **plan.constants)
        return
    # Triton launches on the current device, whatever its arguments are on.
    with module.device(q.device):
        launch(q_out, q, k_out, k, cos, sin, positions, *plan.numbers, **plan.constants)


@functools.cache
def _kernel() -> Any:
    # Not before it is needed: importing Triton takes a while, and many installations are without.
    try:
        from theodolite.kernels.triton_code import rotate_kernel
    except ImportError:
        return None
    return rotate_kernel


@functools.cache
def _known(device: torch.device) -> bool:
    # Triton has no code for GPUs of NVIDIA's before Volta.
    nvidia = device.type == "cuda" and torch.version.hip is None
    return not nvidia or torch.cuda.get_device_capability(device) >= (7, 0)


# The shape and the strides of a tensor.
_Form = tuple[tuple[int, ...], tuple[int, ...]]


class _Plan(NamedTuple):
    """All of a launch that does not depend on where tensors lie."""

    grid: tuple[int]
    numbers: tuple[int, ...]
    constants: dict[str, Any]


# Decoding asks for the same shapes in every layer and step, and would spend more time here than on the device.
@functools.lru_cache(maxsize=1024)
def _plan(
    layout: Layout,
    itemsize: int,
    turns: int,
    inplace: tuple[bool, bool],
    q_out: _Form,
    q: _Form,
    k_out: _Form,
    k: _Form,
    cos: _Form,
    sin: _Form,
    positions: _Form | None,
) -> _Plan:
    (batch, q_heads, tokens, head_dim), k_heads = q[0], k[0][1]
    (_, tables, table_rows, columns), half = cos[0], layout.rotary_dim // 2
    others = head_dim - layout.rotary_dim
    q_kept, k_kept = (0 if same else others for same in inplace)
    block_pairs = _power_of_two(half)
    row_bytes = itemsize * (_power_of_two(head_dim) if q_kept or k_kept else 2 * block_pairs)
    block_tokens, block_heads = _block(q, max(q_heads, k_heads), max(1, _PROGRAM_BYTES // row_bytes))
    warps = max(1, min(16, block_tokens * block_heads * row_bytes // (32 * _THREAD_BYTES)))
    q_block, k_block = (min(block_heads, _power_of_two(heads)) for heads in (q_heads, k_heads))
    if turns == 1:
        k_heads = 0
    programs = batch * -(-tokens // block_tokens) * (-(-q_heads // q_block) - (-k_heads // k_block))
    by_channel = columns != half
    # A thread reads no more entries at once than it has pairs, or they would change hands through shared memory.
    pairs = max(1, 16 // itemsize // (2 if layout.interleaved and not by_channel else 1))
    align, table_align = _align(q_out, q, k_out, k), min(_align(cos, sin), pairs)
    strides = [stride for form in (q_out, q, k_out, k) for stride in _steps(form, align)]
    strides += [stride for form in (cos, sin) for stride in _steps(form, table_align)]
    strides += (0, 0) if positions is None else _inner(positions)
    # Of a tile with fewer entries than threads, each thread reads what it needs; a larger one would go round by shared
    # memory to serve several heads, and reading it again from the first cache is as cheap and needs no barrier.
    entries = block_tokens * block_pairs * (2 if by_channel and layout.interleaved else 1)
    constants: dict[str, Any] = {
        "ALIGN": align,
        "TABLE_ALIGN": table_align,
        "GATHER": positions is not None,
        "SHARE": tables == 1 and entries < 32 * warps,
        "BLOCK_TOKENS": block_tokens,
        "Q_BLOCK_HEADS": q_block,
        "K_BLOCK_HEADS": k_block,
        "START": others if layout.trailing else 0,
        "HALF": half,
        "BLOCK_PAIRS": block_pairs,
        "Q_KEPT": q_kept,
        "K_KEPT": k_kept,
        "BLOCK_KEPT": _power_of_two(others),
        "BY_CHANNEL": by_channel,
        "INTERLEAVED": layout.interleaved,
        "CONJUGATE": layout.conjugate,
        "num_warps": warps,
        # No fused multiply-add: every implementation gives the same bits.
        "enable_fp_fusion": False,
        # It is what makes an assertion on the device more than a comment; checks of our int32 sums are not wanted.
        "debug": positions is not None,
        "sanitize_overflow": False,
    }
    return _Plan((programs,), (*strides, tokens, q_heads, k_heads, tables, table_rows), constants)


def _block(x: _Form, heads: int, rows: int) -> tuple[int, int]:
    """Tokens and heads of a program that turns `rows` rows at most: powers of two."""
    (_, _, tokens, _), (_, head_stride, token_stride, _) = x
    # More heads, fewer rows of the table; but where the rows of a head lie together, runs of 512 bytes are taken.
    run = max(1, min(_power_of_two(tokens), rows * 512 // _PROGRAM_BYTES)) if token_stride < head_stride else 1
    most = min(_power_of_two(heads), max(1, rows // run))
    # 40 heads are five blocks of 8, not two of 32 of which one would mostly idle.
    block_heads = min((most, most // 2, most // 4) if most >= 16 else (most,), key=lambda size: (-heads % size, -size))
    return min(_power_of_two(tokens), max(1, rows // block_heads)), block_heads


def _power_of_two(size: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(0, size - 1).bit_length()


def _inner(form: _Form) -> tuple[int, ...]:
    """Strides, 0 where a dimension has one element, whose stride means nothing."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(*form, strict=True))


def _align(*forms: _Form) -> int:
    """The largest divisor of 16 that divides the strides of batch, head and token, in elements."""
    return math.gcd(16, *(stride for form in forms for stride in _inner(form)[:-1]))


def _steps(form: _Form, align: int) -> tuple[int, ...]:
    *outer, channel = _inner(form)
    return (*(stride // align for stride in outer), channel)
