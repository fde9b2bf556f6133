"""Attention under what depends on the distance alone: one number a distance and head, laid out as a mask by strides.

With the rows of a block of queries in reverse, the mask at row i and key j is entry i + j of the curve of its head: a
view of one vector, and no mask is made. Blocks are cut at the last key that a causal mask, and at the first that a
window, leaves them.

Shapes: B batch, H query heads, G key-value heads, S queries, T keys, R queries of a block, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from theodolite.encodings.bias.content import full_precision
from theodolite.encodings.policy import Policy
from theodolite.plan import Mask
from theodolite.positions.visible import seen

_ROWS = 512
# Elements of the scores that a backward of learned numbers holds at a time.
_BACKWARD_BLOCK = 2**21


class Span(NamedTuple):
    """Queries and keys whose positions follow each other one by one, the same in all rows."""

    ahead: int
    """Position of the first query minus that of the first key."""
    queries: int
    keys: int

    @property
    def furthest(self) -> int:
        """The distance from the last query to the first key."""
        return self.ahead + self.queries - 1


class _Block(NamedTuple):
    rows: slice
    keys: slice
    entry: int
    """Of the curve: that of the block's last query and first key."""


def curve_of(policy: Policy, span: Span, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(H or 1, S + T - 1): what a policy adds at the distances from `span.furthest` down, -inf where it hides a key.

    In float32, or float64 for float64; differentiable where the bias is learned.
    """
    keys = torch.arange(span.queries + span.keys - 1, device=device)
    # Any query will do, and positions below 0 are none.
    query = torch.tensor([max(span.furthest, 0)], device=device)
    keys = keys + (query - span.furthest)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bias = policy.dense_bias(query, keys)
    curve = keys.new_zeros(1, len(keys), dtype=wide) if bias is None else bias[0, :, 0].to(wide)
    return curve.masked_fill(~seen(policy.mask, query, keys), -torch.inf)


def attend_by_distance(q: Tensor, k: Tensor, v: Tensor, curve: Tensor, span: Span, mask: Mask, scale: float) -> Tensor:
    """Attention of q (B, H, S, D) over k (B, G, T, D) and v (B, G, T, E), turned already: (B, H, S, E).

    Every query must see a key. Scratch is that of one block, forward and backward.

    Args:
        curve: as `curve_of` gives it.
        scale: multiplies q.k.
    """
    if curve.requires_grad and torch.is_grad_enabled():
        result: Tensor = _learned(q, k, v, curve, span, mask, scale)
        return result
    outs = [
        scaled_dot_product_attention(
            q[:, :, block.rows].flip(2),
            k[:, :, block.keys],
            v[:, :, block.keys],
            attn_mask=_view(curve, block).expand(len(q), q.shape[1], -1, -1),
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        ).flip(2)
        for block in _blocks(span, mask, _ROWS)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _blocks(span: Span, mask: Mask, rows: int) -> Iterator[_Block]:
    for start in range(0, span.queries, rows):
        stop = min(start + rows, span.queries)
        first, last = 0, span.keys
        reach = mask.reach
        if mask.causal:
            last = min(last, span.ahead + stop)
        elif reach is not None:
            last = min(last, span.ahead + stop + reach)
        if reach is not None:
            first = max(first, span.ahead + start - reach)
        yield _Block(slice(start, stop), slice(first, last), span.queries - stop + first)


def _view(curve: Tensor, block: _Block) -> Tensor:
    """(1, H or 1, R, T) of a curve, for queries in reverse."""
    rows, keys = (part.stop - part.start for part in (block.rows, block.keys))
    return curve.as_strided(
        (1, len(curve), rows, keys), (0, curve.stride(0), 1, 1), curve.storage_offset() + block.entry
    )


class _Learned(torch.autograd.Function):
    """The same where the curve asks for a gradient: scores are made again, block by block, and summed by distance."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, curve: Tensor, span: Span, mask: Mask, scale: float
    ) -> Tensor:
        ctx.span, ctx.mask, ctx.scale = span, mask, scale
        # A fused kernel takes no mask that asks for a gradient.
        out = attend_by_distance(q, k, v, curve.detach(), span, mask, scale)
        ctx.save_for_backward(q, k, v, curve, out)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # A backward that is called under autocast would be lowered by it.
        with full_precision(grad.device):
            return _gradients(ctx, grad)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, curve, out = ctx.saved_tensors
    batch, heads = q.shape[:2]
    groups, keys = k.shape[1], k.shape[2]
    grads = [torch.zeros_like(x, dtype=curve.dtype) for x in (q, k, v, curve)]
    rows = max(1, min(_ROWS, _BACKWARD_BLOCK // max(1, batch * heads * keys)))
    for block in _blocks(ctx.span, ctx.mask, rows):
        count = block.rows.stop - block.rows.start
        # Heads of a group are more queries of one key head.
        q_rows, grad_rows, out_rows = (
            x[:, :, block.rows].flip(2).to(curve.dtype).reshape(batch, groups, -1, x.shape[-1]) for x in (q, grad, out)
        )
        k_part, v_part = (x[:, :, block.keys].to(curve.dtype) for x in (k, v))
        scores = torch.matmul(q_rows, k_part.mT).mul_(ctx.scale).view(batch, heads, count, -1)
        weights = scores.add_(_view(curve, block)).softmax(-1).view(batch, groups, -1, k_part.shape[2])
        grads[2][:, :, block.keys] += torch.matmul(weights.mT, grad_rows)
        part = torch.matmul(grad_rows, v_part.mT)
        part.sub_((grad_rows * out_rows).sum(-1, keepdim=True)).mul_(weights)
        grads[0][:, :, block.rows] = torch.matmul(part, k_part).mul_(ctx.scale).view(batch, heads, count, -1).flip(2)
        grads[1][:, :, block.keys] += torch.matmul(part.mT, q_rows).mul_(ctx.scale)
        sums = _by_entry(part.view(batch, heads, count, -1).sum(0))
        grads[3][:, block.entry : block.entry + sums.shape[1]] += sums if len(curve) > 1 else sums.sum(0)
    q_grad, k_grad, v_grad = (made.to(x.dtype) for made, x in zip(grads, (q, k, v), strict=False))
    return q_grad, k_grad, v_grad, grads[3], None, None, None


def _by_entry(part: Tensor) -> Tensor:
    """(H, R + T - 1) of (H, R, T): the sums over rows i and keys j of equal i + j."""
    heads, rows, keys = part.shape
    # Rows one longer by each: the next row begins one entry further on.
    skewed = torch.nn.functional.pad(part, (0, rows)).view(heads, -1)[:, : rows * (keys + rows - 1)]
    return skewed.view(heads, rows, keys + rows - 1).sum(1)


_learned: Callable[..., Tensor] = _Learned.apply
