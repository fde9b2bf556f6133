"""The oracle: the rotation written plainly, in float64. Slow, and what every other kernel is held to."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Turn all channels of `x` (..., D) by the angles of `cos`, `sin` (..., D/2), which must broadcast; float64 out."""
    x, cos, sin = x.double(), cos.double(), sin.double()
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
