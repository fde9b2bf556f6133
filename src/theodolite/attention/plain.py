"""Attention under a policy with every pair written out: what every faster way is held to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from theodolite.encodings.policy import Policy
from theodolite.encodings.shared import SharedTables
from theodolite.plan import Mask


def attend_plainly(
    policy: Policy,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    k_positions: Tensor | None = None,
    *,
    x: Tensor | None = None,
    visible: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    sinks: Tensor | None = None,
    q_state: Tensor | None = None,
    k_state: Tensor | None = None,
) -> Tensor:
    """Attention of q (B, H, Sq, D) over k (B, Hkv, Sk, D) and v (B, Hkv, Sk, E), with positions as the policy has them.

    It holds the scores of all pairs, in float32 (float64 for float64 input).

    Args:
        q_positions: (Sq,) or (B, Sq), or (axes, B, Sq) with `visible`.
        k_positions: the same of the keys; those of the queries by default.
        x: the layer's input (B, Sq, E), where the bias reads it.
        visible: (Sq, Sk), (B, Sq, Sk) or (B, H, Sq, Sk) booleans besides the policy's mask: padding, documents. A query
            that sees no key gives zeros.
        lengths: the tokens of each row's whole sequence, for frequencies that depend on it.
        sinks: (H,) logits in the softmax's denominator, where the policy's mask has `sinks`.
        q_state, k_state: the bias's own numbers at queries and keys; made of x where that covers all keys.

    Returns:
        (B, H, Sq, E) in the dtype of v.
    """
    if policy.mask.sinks != (sinks is not None):
        raise ValueError(f"sinks: got {'logits' if sinks is not None else 'None'} with {policy.mask}")
    k_positions = q_positions if k_positions is None else k_positions
    if policy.bias is not None and "k_state" in policy.bias.reads and k_state is None and x is not None:
        q_state = k_state = policy.bias.state(x)
    seen = _both(visible_by_position(policy.mask, q_positions, k_positions), visible)
    bias = policy.dense_bias(q_positions, k_positions, q=q, k=k, x=x, q_state=q_state, k_state=k_state, visible=seen)
    q_tables, k_tables = (SharedTables(at, lengths=lengths, device=q.device) for at in (q_positions, k_positions))
    scale = q.shape[-1] ** -0.5 if policy.score_scale is None else policy.score_scale
    q, _ = policy.turn(q, None, q_tables)
    _, k = policy.turn(None, k, k_tables)
    turned = policy.turn_values(v, k_tables)

    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    scores = torch.matmul(q.to(dtype), k.repeat_interleave(group, dim=1).to(dtype).transpose(-1, -2)) * scale
    if bias is not None:
        scores = scores + bias.to(dtype)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(dtype)[None, :, None, None].expand(*scores.shape[:3], 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)[..., : k.shape[2]]
    out = torch.matmul(weights, turned.repeat_interleave(group, dim=1).to(dtype)).to(v.dtype)
    return policy.turn_output_back(out, q_tables)


def visible_by_position(mask: Mask, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
    """Which keys the mask lets a query see by their positions: (Sq, Sk) or (B, Sq, Sk), or None for all.

    Raises:
        ValueError: positions of several axes with a mask that goes by position: pictures share one, so their order is
            not in it.
    """
    if not mask.causal and mask.sliding_window is None and mask.chunk is None:
        return None
    if q_positions.dim() == 3 or k_positions.dim() == 3:
        raise ValueError(f"positions: got several axes with {mask}; give `visible` and a mask with causal=False")
    q, k = q_positions.unsqueeze(-1), k_positions.unsqueeze(-2)
    seen = k <= q if mask.causal else torch.ones_like(k == q)
    if mask.sliding_window is not None:
        seen = seen & ((q - k).abs() < mask.sliding_window)
    if mask.chunk is not None:
        seen = seen & (q // mask.chunk == k // mask.chunk)
    return seen


def _both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Keys seen by both, with a dimension for heads; None sees all."""
    masks = [mask if mask.dim() == 4 else mask.unsqueeze(-3) for mask in (one, other) if mask is not None]
    # (1, Sq, Sk) still lacks the batch.
    masks = [mask if mask.dim() == 4 else mask[None] for mask in masks]
    return masks[0] & masks[1] if len(masks) == 2 else masks[0] if masks else None
