"""The rotation in plain torch: block by block, so that the scratch stays in the cache, and rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

# Elements of one scratch tensor: 1 MiB of float32.
_BLOCK = 2**18


def rotate_into(
    out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, conjugate: bool, token_dim: int
) -> None:
    """Turn all channels of `x` (..., D) by `cos`, `sin` (..., D/2), write to `out`, which may be `x` itself.

    cos and sin are float32 (float64 for float64 `x`) and must broadcast against (..., D/2). `token_dim` is the
    dimension of tokens, the same in all four; blocks are cut along it.
    """
    tokens = x.shape[token_dim]
    step = max(1, _BLOCK * tokens // max(1, x.numel() // 2))
    if step >= tokens:
        _rotate_block(out, x, cos, sin, interleaved=interleaved, conjugate=conjugate)
        return
    for start in range(0, tokens, step):
        block = (tensor.narrow(token_dim, start, min(step, tokens - start)) for tensor in (out, x, cos, sin))
        _rotate_block(*block, interleaved=interleaved, conjugate=conjugate)


def _rotate_block(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, conjugate: bool) -> None:
    first, second = _turned(x, cos, sin, interleaved=interleaved, conjugate=conjugate)
    # Both halves are computed before either is written, for `out` may be `x`. copy_ is the one rounding.
    out1, out2 = _pairs(out, interleaved)
    out1.copy_(first)
    out2.copy_(second)


def rotate_traced(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, conjugate: bool) -> Tensor:
    """The same in the form that torch.compile fuses: each half is cast before the two are joined."""
    first, second = (half.to(x.dtype) for half in _turned(x, cos, sin, interleaved=interleaved, conjugate=conjugate))
    return torch.stack((first, second), dim=-1).flatten(-2) if interleaved else torch.cat((first, second), dim=-1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, conjugate: bool) -> tuple[Tensor, Tensor]:
    x1, x2 = (half.to(cos.dtype) for half in _pairs(x, interleaved))
    # Products and sums stand apart (no addcmul), so that every backend, block and layout gives the same bits.
    first, second = torch.mul(x1, cos), torch.mul(x2, cos)
    if conjugate:
        return first.add_(torch.mul(x2, sin)), second.sub_(torch.mul(x1, sin))
    return first.sub_(torch.mul(x2, sin)), second.add_(torch.mul(x1, sin))


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second channel of every pair, (..., D/2) each, as views."""
    half = x.shape[-1] // 2
    return (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
