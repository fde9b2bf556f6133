"""One function that turns queries and keys: it checks what it is given and picks the implementation."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from theodolite.kernels.eager import rotate_into, rotate_traced

Q = TypeVar("Q", Tensor, None)
K = TypeVar("K", Tensor, None)


def rotate(
    q: Q,
    k: K,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    trailing: bool = False,
    heads_first: bool = True,
    conjugate: bool = False,
    inplace: bool = False,
) -> tuple[Q, K]:
    """Turn queries and keys by the angles of a table: `(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)` per pair.

    Shapes (B batch, H heads, S tokens, D channels of a head, R = rotary_dim):
        q, k: (B, H, S, D), or (B, S, H, D) with `heads_first=False`; their H may differ; either may be None.
        cos, sin: (S, R/2) or (B, S, R/2), float32 or float64; one row per token of the call.

    Args:
        interleaved: pairs are channels (2i, 2i+1); otherwise (i, i + R/2).
        rotary_dim: channels that turn, the last ones if `trailing`; all by default. The others pass bit for bit.
        conjugate: turn the other way (the inverse, if the tables carry no attention factor).
        inplace: write into q and k themselves and return them.

    Returns:
        q and k in their own dtypes, computed in float32 (float64 for float64 input) and rounded once.

    Raises:
        ValueError: a shape or dtype does not fit; the message names the argument.
    """
    sin = -sin if conjugate else sin
    options = (cos, sin, interleaved, rotary_dim, trailing, heads_first, inplace)
    return (
        None if q is None else _turn("q", q, *options),
        None if k is None else _turn("k", k, *options),
    )


def _turn(
    name: str,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    rotary_dim: int | None,
    trailing: bool,
    heads_first: bool,
    inplace: bool,
) -> Tensor:
    rotary_dim = x.shape[-1] if rotary_dim is None else rotary_dim
    _check(name, x, cos, sin, rotary_dim, heads_first)
    # Tables follow the arithmetic, never the input: float32 for half precision.
    table_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = (_broadcast(table, heads_first).to(x.device, table_dtype) for table in (cos, sin))
    channels = slice(x.shape[-1] - rotary_dim, None) if trailing else slice(0, rotary_dim)
    if torch.compiler.is_compiling() and not inplace:
        if rotary_dim == x.shape[-1]:
            return rotate_traced(x, cos, sin, interleaved=interleaved)
        turned = rotate_traced(x[..., channels], cos, sin, interleaved=interleaved)
        kept = x[..., : x.shape[-1] - rotary_dim] if trailing else x[..., rotary_dim:]
        return torch.cat((kept, turned) if trailing else (turned, kept), dim=-1)
    return _Rotation.apply(x, cos, sin, interleaved, channels, inplace)  # type: ignore[no-any-return, no-untyped-call]


def _broadcast(table: Tensor, heads_first: bool) -> Tensor:
    if heads_first:
        return table.unsqueeze(-3)
    return table.unsqueeze(-2)


def _check(name: str, x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, heads_first: bool) -> None:
    if x.dim() != 4:
        raise ValueError(
            f"{name}: got shape {tuple(x.shape)}; it must have four dimensions, (B, H, S, D) or (B, S, H, D)"
        )
    if not x.is_floating_point():
        raise ValueError(f"{name}: got {x.dtype}; it must be a floating-point tensor")
    if not 0 < rotary_dim <= x.shape[-1] or rotary_dim % 2:
        raise ValueError(
            f"rotary_dim: got {rotary_dim}; it must be even, above 0 and at most the {x.shape[-1]} channels of {name}"
        )
    batch, tokens = x.shape[0], x.shape[2 if heads_first else 1]
    allowed = ((tokens, rotary_dim // 2), (batch, tokens, rotary_dim // 2), (1, tokens, rotary_dim // 2))
    for table_name, table in (("cos", cos), ("sin", sin)):
        if tuple(table.shape) not in allowed:
            layout = "(B, H, S, D)" if heads_first else "(B, S, H, D)"
            raise ValueError(
                f"{table_name}: got shape {tuple(table.shape)}; for {name} of shape {tuple(x.shape)} read as {layout} "
                f"and rotary_dim {rotary_dim} it must be {allowed[0]} or {allowed[1]}"
            )
        if table.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{table_name}: got {table.dtype}; tables are float32 or float64, whatever the dtype of {name}"
            )


class _Rotation(torch.autograd.Function):
    """Saves the tables only: the gradient is the same rotation the other way."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, channels: slice, inplace: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.channels = interleaved, channels
        if inplace:
            ctx.mark_dirty(x)
            out = x
        else:
            out = torch.empty_like(x)
            if x.shape[-1] != x[..., channels].shape[-1]:
                kept = slice(0, channels.start) if channels.start else slice(channels.stop, None)
                out[..., kept].copy_(x[..., kept])
        rotate_into(out[..., channels], x[..., channels], cos, sin, interleaved=interleaved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _Rotation.apply(grad, cos, -sin, ctx.interleaved, ctx.channels, False), None, None, None, None, None
