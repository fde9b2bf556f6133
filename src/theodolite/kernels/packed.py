"""Neighbours taken apart and joined two at a time, as the halves of a word.

Compilers read and write every second number one by one; words of twice the width they read and write as vectors.
Nothing here has a gradient.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor


def packs(x: Tensor, *tables: Tensor) -> bool:
    """Whether this is the faster way for `x`: in a graph compiled for a processor that nothing derives from.

    Not in one that is exported, which may run anywhere, nor inside transforms, which take a word for a constant.
    """
    return (
        torch.compiler.is_compiling()
        and not torch.compiler.is_exporting()
        and not torch._C._are_functorch_transforms_active()
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *tables)))
        and type(x) is Tensor
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.device.type == "cpu"
        and sys.byteorder == "little"
    )


def apart(x: Tensor) -> tuple[Tensor, Tensor]:
    """(..., R) in float32 or bfloat16 to the first and the second of each pair, (..., R/2) in float32."""
    x = x.contiguous()
    if x.dtype == torch.bfloat16:
        words = x.view(torch.int32)
        return (words << 16).view(torch.float32), (words & -0x10000).view(torch.float32)
    words = x.view(torch.int64)
    return words.to(torch.int32).view(torch.float32), (words >> 32).to(torch.int32).view(torch.float32)


def together(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """The reverse, each rounded to the dtype."""
    if dtype == torch.bfloat16:
        words = (rounded(first) >> 16) & 0xFFFF | rounded(second) & -0x10000
    else:
        low, high = (part.view(torch.int32).to(torch.int64) for part in (first, second))
        words = low & 0xFFFFFFFF | high << 32
    return words.contiguous().view(dtype)


def rounded(x: Tensor) -> Tensor:
    """The bits of a float32, rounded to the nearest bfloat16 (to even at a tie) in their upper half."""
    bits = x.view(torch.int32)
    # A NaN is kept one: rounded as a number, it might become an infinity. `isnan` would be called number by number.
    return torch.where(x != x, bits | 0x400000, bits + (0x7FFF + (bits >> 16 & 1)))
