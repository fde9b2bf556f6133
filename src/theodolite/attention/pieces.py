"""Attention in pieces: over parts of the keys apart, merged exactly by their log-sum-exp.

A softmax over the union of two sets of keys is the mean of the softmaxes over each, weighted by
their sums of exponentials. So a chunk of queries can attend to a long prefix without a mask, to its
own keys causally, and the two are added up: no score matrix and no mask of the full size is made.

Shapes: B batch, H query heads, G key-value heads (H a multiple of G), S queries, T keys, D channels
of q and k, E channels of v.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_QUERY_BLOCK = 256


class Piece(NamedTuple):
    """Attention over some of the keys: `out` (B, H, S, E) in the input's dtype, `lse` (B, H, S) float32."""

    out: Tensor
    lse: Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> Piece:
    """Attention of q (B, H, S, D) over k (B, G, T, D) and v (B, G, T, E).

    Args:
        scale: multiplies q.k.
        causal: query s sees keys 0 to s (S = T).
        mask: (B or 1, 1, S, T) boolean, true where a query sees a key. A query that sees none has `out` 0 and `lse`
            -inf: merged with other pieces it counts for nothing.
        softcap: scores become `softcap * tanh(score / softcap)`.
    """
    heads_per_key = q.shape[1] // k.shape[1]
    if not causal and mask is None and heads_per_key > 1:
        # Without a mask the heads of a group are only more queries: fold them, and no key is repeated.
        piece = attend(q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1]), k, v, scale=scale, softcap=softcap)
        return Piece(piece.out.reshape(*q.shape[:3], -1), piece.lse.reshape(q.shape[:3]))
    if heads_per_key > 1:
        k, v = k.repeat_interleave(heads_per_key, dim=1), v.repeat_interleave(heads_per_key, dim=1)
    # The fused CPU kernel returns the log-sum-exp; torch has no public way to it on the CPU.
    if q.device.type == "cpu" and softcap is None and v.shape[-1] <= q.shape[-1] and not torch.is_grad_enabled():
        return _attend_fused_cpu(q, k, v, scale, causal, mask)
    return _attend_plain(q, k, v, scale, causal, mask, softcap)


def merge(a: Piece, b: Piece) -> Piece:
    """Attention over the keys of both pieces, which must not share a key."""
    lse = torch.logaddexp(a.lse, b.lse)
    # Where neither saw a key both outputs are 0, and so is what lies between them.
    weight = (a.lse - lse.masked_fill(lse == -math.inf, 0.0)).exp().unsqueeze(-1)
    out = torch.lerp(b.out.to(weight.dtype), a.out.to(weight.dtype), weight)
    return Piece(out.to(a.out.dtype), lse)


def with_sink(piece: Piece, sink: Tensor) -> Tensor:
    """The output when each head's softmax has one more logit `sink` (H,) that carries no value."""
    kept = torch.sigmoid(piece.lse - sink.to(piece.lse.dtype)[None, :, None])
    return (piece.out * kept.unsqueeze(-1)).to(piece.out.dtype)


def _attend_fused_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None) -> Piece:
    width, values = q.shape[-1], v.shape[-1]
    if values < width:
        # The kernel wants one width for all three; zero channels of v come out as zeros and are cut off.
        v = torch.nn.functional.pad(v, (0, width - values))
    blind = None
    if mask is not None:
        # Looked up: what the kernel says of a row that sees nothing differs by dtype and size.
        blind = ~mask.any(-1)
        mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -math.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    if blind is not None:
        out, lse = out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, -math.inf)
    return Piece(out[..., :values], lse)


def _attend_plain(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None, softcap: float | None
) -> Piece:
    """Block by block of queries, the softmax in float32 (float64 for float64)."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    outs, lses = [], []
    for start in range(0, q.shape[2], _QUERY_BLOCK):
        block = slice(start, min(start + _QUERY_BLOCK, q.shape[2]))
        scores = torch.matmul(q[:, :, block], k.transpose(-1, -2)).to(dtype) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if causal:
            seen = torch.arange(block.start, block.stop, device=q.device)[:, None] >= torch.arange(
                k.shape[2], device=q.device
            )
            scores = scores.masked_fill(~seen, -math.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, :, block], -math.inf)
        # The gradient of a softmax over nothing is no number, so that of such rows is taken of zeros.
        blind = (scores == -math.inf).all(-1, keepdim=True)
        lse = torch.logsumexp(scores.masked_fill(blind, 0.0), dim=-1, keepdim=True)
        weights = (scores - lse).exp().to(v.dtype)
        outs.append(torch.matmul(weights, v))
        lses.append(lse.masked_fill(blind, -math.inf).squeeze(-1))
    return Piece(torch.cat(outs, dim=2), torch.cat(lses, dim=2))
