"""Attention under a policy with every pair written out: what every faster way is held to."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from theodolite.encodings.policy import Order, Policy
from theodolite.encodings.rotate.axial import PatchRotate
from theodolite.encodings.rotate.lengths import Lengths
from theodolite.encodings.shared import SharedTables
from theodolite.positions.visible import require_visible


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
    order: Order | None = None,
    lengths: Lengths | None = None,
    sinks: Tensor | None = None,
    q_state: Tensor | None = None,
    k_state: Tensor | None = None,
) -> Tensor:
    """Attention of q (B, H, Sq, D) over k (B, Hkv, Sk, D) and v (B, Hkv, Sk, E), with positions as the policy has them.

    It holds the scores of all pairs, in float32 (float64 for float64 input).

    Args:
        q_positions: (Sq,) or (B, Sq), or (axes, B, Sq).
        k_positions: the same of the keys; those of the queries by default.
        x: the layer's input (B, Sq, E), where the bias reads it.
        visible: (B, Sq, Sk) or (B, H, Sq, Sk) booleans besides the policy's mask, 1 where it holds for all: padding
            (`visible_keys`), documents (`visible_in_documents`). A query that sees no key gives zeros.
        order: what the mask goes by where it is not the positions, (S,) or (B, S), or one for queries and one for keys;
            needed where positions have several axes, unless the mask lets all be seen.
        lengths: the tokens of each row's whole sequence, for frequencies that depend on it.
        sinks: (H,) logits in the softmax's denominator, where the policy's mask has `sinks`.
        q_state, k_state: the bias's own numbers at queries and keys; made of x where that covers all keys.

    Returns:
        (B, H, Sq, E) in the dtype of v.
    """
    k_positions = q_positions if k_positions is None else k_positions
    check_attention(policy, q, k, v, q_positions, k_positions, sinks, visible)
    seen = policy.visible(q_positions, k_positions, visible=visible, order=order)
    bias = policy.dense_bias(q_positions, k_positions, q=q, k=k, x=x, q_state=q_state, k_state=k_state, visible=seen)
    q_tables, k_tables = (SharedTables(at, lengths=lengths, device=q.device) for at in (q_positions, k_positions))
    scale = scale_of(policy, q)
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
    # A query that sees nothing has no softmax, and no gradient of one.
    blind = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)[..., : k.shape[2]]
    out = torch.matmul(weights, turned.repeat_interleave(group, dim=1).to(dtype))
    out = policy.turn_output_back(out, q_tables)
    # Relative already, so added after turning back.
    added = policy.values(weights, q_positions, k_positions)
    if added is not None and added.shape != out.shape:
        raise ValueError(f"v: got {v.shape[-1]} channels; the policy's vectors for values have {added.shape[-1]}")
    return (out if added is None else out + added).to(v.dtype)


def scale_of(policy: Policy, q: Tensor) -> float:
    """What multiplies q.k, for q (B, H, S, D)."""
    return q.shape[-1] ** -0.5 if policy.score_scale is None else policy.score_scale


def check_attention(
    policy: Policy,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    sinks: Tensor | None,
    visible: Tensor | None,
) -> None:
    """Refuse what does not fit together.

    Raises:
        ValueError: as said; the message names the argument.
    """
    if policy.mask.sinks != (sinks is not None):
        raise ValueError(f"sinks: got {'logits' if sinks is not None else 'None'} with {policy.mask}")
    for name, x, positions in (("q", q, q_positions), ("k", k, k_positions)):
        if x.dim() != 4 or x.shape[2] != positions.shape[-1]:
            raise ValueError(
                f"{name}: got shape {tuple(x.shape)} for {positions.shape[-1]} positions; it must be (B, H, S, D)"
            )
    if v.shape[:3] != k.shape[:3] or q.shape[0] != k.shape[0] or q.shape[1] % k.shape[1] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"k, v: got shapes {tuple(k.shape)} and {tuple(v.shape)} for q of shape {tuple(q.shape)}; they must be "
            "(B, Hkv, Sk, D) and (B, Hkv, Sk, E), where Hkv divides H"
        )
    for name, positions in (("q_positions", q_positions), ("k_positions", k_positions)):
        # Of an image (axes, S) has no rows.
        rows = not (positions.dim() == 2 and isinstance(policy.rotate, PatchRotate))
        if rows and positions.dim() > 1 and positions.shape[-2] not in (1, q.shape[0]):
            raise ValueError(
                f"{name}: got {positions.shape[-2]} rows for the {q.shape[0]} of q of shape {tuple(q.shape)}"
            )
    if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
        raise ValueError(f"sinks: got shape {tuple(sinks.shape)}; it must be one for each head, ({q.shape[1]},)")
    if visible is not None:
        require_visible(visible, q.shape[2], k.shape[2], batch=q.shape[0], heads=q.shape[1])
    heads = policy.bias.num_heads if policy.bias is not None else q.shape[1]
    if heads != q.shape[1]:
        raise ValueError(f"q: got {q.shape[1]} heads; the policy's {type(policy.bias).__name__} has {heads}")
