"""One function that turns queries and keys: it checks what it is given and picks the implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from theodolite.kernels.eager import rotate_into, rotate_traced

Q = TypeVar("Q", Tensor, None)
K = TypeVar("K", Tensor, None)

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
        cos, sin: (S, R/2) or (B, S, R/2), float32 or float64; one row per token of the call. Where heads turn by
            frequencies of their own, (B, Ht, S, R/2) or (1, Ht, S, R/2) in either layout of q and k; H of q and of k
            must be multiples of Ht, and heads that stand together share a table, as grouped queries share a key.

    Args:
        interleaved: pairs are channels (2i, 2i+1); otherwise (i, i + R/2).
        rotary_dim: channels that turn, the last ones if `trailing`; all by default. The others pass bit for bit.
        conjugate: turn the other way: with tables of amplitude 1, the inverse.
        inplace: write into q and k themselves and return them.

    Returns:
        q and k in their own dtypes, computed in float32 (float64 for float64 input) and rounded once.
        Gradients flow to q and k, to any order, and to tables that ask for one (learned frequencies).

    Raises:
        ValueError: a shape or dtype does not fit, or `inplace` with tables that ask for a gradient; the message names
            the argument.
        RuntimeError: `inplace` on a leaf that requires a gradient, or on a tensor that overlaps itself.
    """
    # Both are checked before either is written.
    for name, x in (("q", q), ("k", k)):
        if x is not None:
            _check(name, x, cos, sin, rotary_dim, heads_first, inplace)
    if inplace and q is not None and k is not None:
        require_apart(q, k)
    options = (cos, sin, interleaved, rotary_dim, trailing, heads_first, conjugate, inplace)
    return None if q is None else _turn(q, *options), None if k is None else _turn(k, *options)


def _turn(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    rotary_dim: int | None,
    trailing: bool,
    heads_first: bool,
    conjugate: bool,
    inplace: bool,
) -> Tensor:
    rotary_dim = x.shape[-1] if rotary_dim is None else rotary_dim
    # Tables follow the arithmetic, never the input: float32 for half precision.
    table_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    channels = slice(x.shape[-1] - rotary_dim, None) if trailing else slice(0, rotary_dim)
    learned = (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled()
    traced = torch.compiler.is_compiling() or learned
    token_dim = -2 if heads_first else -3
    head_dim = -3 if heads_first else -2
    if cos.dim() == 4:
        # (B, Ht, S, R/2) against (B, Ht, H/Ht, S, D): a view, so the table is not repeated for each head.
        whole, x = x, x.unflatten(head_dim, (cos.shape[1], -1))
        if not heads_first:
            cos, sin, token_dim = cos.transpose(1, 2), sin.transpose(1, 2), -4
    cos, sin = (table.unsqueeze(head_dim).to(x.device, table_dtype) for table in (cos, sin))
    if traced:
        turned = _turn_traced(x, cos, sin, interleaved, channels, conjugate, inplace)
    else:
        # The autograd node costs as much as a small rotation, so decoding goes without.
        run = _rotation if x.requires_grad and torch.is_grad_enabled() else _turn_eager
        turned = run(x, cos, sin, interleaved, channels, conjugate, inplace, token_dim)
    if cos.dim() != 5:
        return turned
    return whole if inplace else turned.flatten(head_dim - 1, head_dim)


def _turn_eager(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    channels: slice,
    conjugate: bool,
    inplace: bool,
    token_dim: int,
) -> Tensor:
    out = x if inplace else torch.empty_like(x)
    turned, turning = out, x
    if cos.shape[-1] * 2 < x.shape[-1]:
        turned, turning = out[..., channels], x[..., channels]
        if not inplace:
            kept = _others(channels)
            out[..., kept].copy_(x[..., kept])
    rotate_into(turned, turning, cos, sin, interleaved=interleaved, conjugate=conjugate, token_dim=token_dim)
    return out


def _turn_traced(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, channels: slice, conjugate: bool, inplace: bool
) -> Tensor:
    turned = rotate_traced(x[..., channels], cos, sin, interleaved=interleaved, conjugate=conjugate)
    if inplace:
        x[..., channels].copy_(turned)
        return x
    if turned.shape[-1] == x.shape[-1]:
        return turned
    kept = x[..., _others(channels)]
    return torch.cat((kept, turned) if channels.start else (turned, kept), dim=-1)


def _others(channels: slice) -> slice:
    return slice(0, channels.start) if channels.start else slice(channels.stop, None)


def _check(
    name: str, x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int | None, heads_first: bool, inplace: bool
) -> None:
    if x.dim() != 4:
        raise ValueError(
            f"{name}: got shape {tuple(x.shape)}; it must have four dimensions, (B, H, S, D) or (B, S, H, D)"
        )
    if x.dtype not in _DTYPES:
        raise ValueError(f"{name}: got {x.dtype}; it must be float16, bfloat16, float32 or float64")
    rotary_dim = x.shape[-1] if rotary_dim is None else rotary_dim
    if not 0 < rotary_dim <= x.shape[-1] or rotary_dim % 2:
        raise ValueError(
            f"rotary_dim: got {rotary_dim}; it must be even, above 0 and at most the {x.shape[-1]} channels of {name}"
        )
    batch, tokens = x.shape[0], x.shape[2 if heads_first else 1]
    heads = x.shape[1 if heads_first else 2]
    for table_name, table in (("cos", cos), ("sin", sin)):
        if not _fits(table, batch, heads, tokens, rotary_dim // 2):
            layout, row = "(B, H, S, D)" if heads_first else "(B, S, H, D)", (tokens, rotary_dim // 2)
            raise ValueError(
                f"{table_name}: got shape {tuple(table.shape)}; for {name} of shape {tuple(x.shape)} read as {layout} "
                f"and rotary_dim {rotary_dim} it must be {row} or {(batch, *row)}, or ({batch}, Ht, {tokens}, "
                f"{rotary_dim // 2}) where Ht divides {heads}"
            )
        if table.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{table_name}: got {table.dtype}; tables are float32 or float64, whatever the dtype of {name}"
            )
        if inplace and table.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{table_name}: it requires a gradient, which needs {name} as it was; use inplace=False")
    if cos.shape != sin.shape:
        raise ValueError(f"sin: got shape {tuple(sin.shape)}; it must be that of cos, {tuple(cos.shape)}")
    if inplace and any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
        raise RuntimeError(f"{name}: it overlaps itself (an expanded tensor) and cannot be turned in place")
    if inplace and x.requires_grad and x.is_leaf and torch.is_grad_enabled():
        raise RuntimeError(f"{name}: a leaf that requires a gradient cannot be turned in place; use inplace=False")


def require_apart(q: Tensor, k: Tensor) -> None:
    """Refuse queries and keys that share an element: in place it would be turned twice.

    Slices of a fused projection pass, whose elements stand in turn. Views with different strides are told apart only by
    where they begin.

    Raises:
        ValueError: they do.
    """
    if q.is_meta or torch.compiler.is_compiling() or q.numel() == 0 or k.numel() == 0:
        return
    offset = (k.data_ptr() - q.data_ptr()) / q.element_size()
    same = q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    if same and (offset == 0 or (q.stride() == k.stride() and _meet(int(offset), q, k))):
        raise ValueError(
            "k: it shares elements with q, which in place would be turned twice; give one of the two as None"
        )


def _meet(offset: int, q: Tensor, k: Tensor) -> bool:
    """Whether some element of q is one of k, which begins `offset` elements later with the same strides."""
    axes = sorted(zip(q.stride(), q.shape, k.shape, strict=True), reverse=True)

    def reached(left: int, axis: int) -> bool:
        # What is to be found are steps along each axis, from -(k's size) to q's, that make up the offset.
        if axis == len(axes):
            return left == 0
        stride, ours, others = axes[axis]
        near = left // stride if stride else 0
        return any(-others < step < ours and reached(left - step * stride, axis + 1) for step in {near, near + 1, 0})

    return reached(offset, 0)


def _fits(table: Tensor, batch: int, heads: int, tokens: int, pairs: int) -> bool:
    """Whether it is (S, R/2), (1 or B, S, R/2) or (1 or B, Ht, S, R/2).

    The rank decides what is compared with what: an exported graph keeps each comparison as a condition.
    """
    rank = table.dim()
    if rank not in (2, 3, 4) or table.shape[-1] != pairs or table.shape[-2] != tokens:
        return False
    if rank == 4 and (table.shape[1] == 0 or heads % table.shape[1] != 0):
        return False
    return rank == 2 or table.shape[0] == 1 or table.shape[0] == batch


class _Rotation(torch.autograd.Function):
    """Saves the tables only: the gradient is the same rotation the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        channels: slice,
        conjugate: bool,
        inplace: bool,
        token_dim: int,
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.channels, ctx.conjugate, ctx.token_dim = interleaved, channels, conjugate, token_dim
        if inplace:
            ctx.mark_dirty(x)
        return _turn_eager(x, cos, sin, interleaved, channels, conjugate, inplace, token_dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        options = (ctx.interleaved, ctx.channels, not ctx.conjugate, False, ctx.token_dim)
        return _rotation(grad, cos, sin, *options), *(None,) * 7


_rotation: Callable[..., Tensor] = _Rotation.apply
