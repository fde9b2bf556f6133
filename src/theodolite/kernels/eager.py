"""The rotation in plain torch: one output, at most one float32 scratch of half its size, one rounding."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
    """Turn all channels of `x` (..., D) by `cos`, `sin` (..., D/2), write to `out`, which may be `x` itself.

    cos and sin are float32 (float64 for float64 `x`) and must broadcast against (..., D/2).
    """
    half = x.shape[-1] // 2
    pairs = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(None, half), slice(half, None))
    x1, x2 = x[..., pairs[0]], x[..., pairs[1]]
    # mul and addcmul_ promote half precision to the tables' dtype, so each value is rounded once, by copy_.
    first = torch.mul(x1, cos).addcmul_(x2, sin, value=-1)
    if out.data_ptr() == x.data_ptr():
        second = torch.mul(x2, cos).addcmul_(x1, sin)
        out[..., pairs[0]].copy_(first)
        out[..., pairs[1]].copy_(second)
        return
    out[..., pairs[0]].copy_(first)
    out[..., pairs[1]].copy_(torch.mul(x2, cos, out=first).addcmul_(x1, sin))


def rotate_traced(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """The same in the form that torch.compile fuses: each half is cast before the two are joined."""
    half = x.shape[-1] // 2
    x1, x2 = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    first, second = (x1 * cos - x2 * sin).to(x.dtype), (x2 * cos + x1 * sin).to(x.dtype)
    return torch.stack((first, second), dim=-1).flatten(-2) if interleaved else torch.cat((first, second), dim=-1)
