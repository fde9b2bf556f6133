"""The rotation as torch operations out of place: what compilers fuse, transforms map and autograd records."""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.kernels.layout import Layout
from theodolite.kernels.packed import apart, packs, together


def rotate_traced(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, layout: Layout) -> Tensor:
    """Turn `x` (B, H, S, D); the result has its dtype and its order in memory.

    Gradients of any order flow to `x` and to tables of a floating dtype.

    Args:
        cos, sin: (1 or B, Ht, L, P), Ht 1 or a divisor of H; P is R/2, or R for tables by channel. float64, float32,
            float16, bfloat16, or int8 in steps of 1/127.
        positions: (1 or B, S), int64 or int32, the row of each token; None where row s belongs to token s.
        layout: which channels turn, in which pairs, which way.

    Raises:
        IndexError, or RuntimeError from a compiled graph: a position has no row. It is found when the graph runs, and
            the row that the message names is the number of rows where the position was negative.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if positions is not None:
        # A negative index would wrap around; one past the end is an error under every compiler.
        positions = positions.masked_fill(positions < 0, cos.shape[2])
        cos, sin = _picked(cos, positions), _picked(sin, positions)
    cos, sin = _widened(cos, dtype), _widened(sin, dtype)
    # Loops follow the order of the output, and run slowly where it is not that of x.
    tokens_first = x.stride(1) < x.stride(2)
    heads = 1
    if tokens_first:
        heads = 2
        x, cos, sin = x.transpose(1, 2), cos.transpose(1, 2), sin.transpose(1, 2)
    grouped = cos.shape[heads] > 1
    if grouped:
        x, cos, sin = x.unflatten(heads, (cos.shape[heads], -1)), cos.unsqueeze(heads + 1), sin.unsqueeze(heads + 1)
    turned = _turned(x, cos, sin, layout)
    if grouped:
        turned = turned.flatten(heads, heads + 1)
    return turned.transpose(1, 2) if tokens_first else turned


def _picked(table: Tensor, positions: Tensor) -> Tensor:
    """(1 or B, Ht, S, P) from (1 or B, Ht, L, P) and (1 or B, S)."""
    if table.shape[0] == 1:
        return table[0][:, positions].transpose(0, 1)
    batch = torch.arange(table.shape[0], device=table.device)[:, None]
    # The indices of batch and row stand apart, so torch puts what they pick first.
    return table[batch, :, positions].transpose(1, 2)


def _widened(table: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype of the arithmetic. An entry of int8 is rounded to float32 whatever follows."""
    return (table.to(torch.float32) * (1 / 127)).to(dtype) if table.dtype == torch.int8 else table.to(dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Heads (..., D) by tables (..., P) that broadcast against them."""
    width, channels, interleaved = layout.rotary_dim, x.shape[-1], layout.interleaved
    turning = x.narrow(-1, channels - width if layout.trailing else 0, width)
    if cos.shape[-1] == width:
        (c1, c2), (s1, s2) = _apart(cos, interleaved), _apart(sin, interleaved)
    else:
        c1, c2, s1, s2 = cos, cos, sin, sin
    # An odd head may leave the first of a pair in the middle of a word.
    packed = interleaved and channels % 2 == 0 and packs(x, cos, sin)
    x1, x2 = apart(turning) if packed else (part.to(cos.dtype) for part in _apart(turning, interleaved))
    if layout.conjugate:
        first, second = x1 * c1 + x2 * s2, x2 * c2 - x1 * s1
    else:
        first, second = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    # Each is cast before the two are joined: joined first, compilers fuse nothing.
    parts: tuple[Tensor, ...]
    if packed:
        parts = (together(first, second, x.dtype),)
    elif interleaved:
        parts = (torch.stack((first.to(x.dtype), second.to(x.dtype)), -1).flatten(-2),)
    else:
        parts = first.to(x.dtype), second.to(x.dtype)
    if width < channels:
        kept = x.narrow(-1, 0 if layout.trailing else width, channels - width)
        parts = (kept, *parts) if layout.trailing else (*parts, kept)
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def _apart(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second channel of every pair."""
    if interleaved:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = x.chunk(2, -1)
    return first, second
