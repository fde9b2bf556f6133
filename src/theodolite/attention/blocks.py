"""Attention under any policy, a block of queries at a time: scratch grows with the keys, not with pairs.

Where gradients are asked for, a block keeps its inputs and is worked out again in the backward.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from theodolite.encodings.policy import Policy
from theodolite.positions.visible import visible_of_rows

_ROWS = 256


class Given(NamedTuple):
    """What attention was given besides q, k and v, in the names of `attend_plainly`; `q` and `k` before they turn."""

    q: Tensor
    k: Tensor
    q_positions: Tensor
    k_positions: Tensor
    x: Tensor | None = None
    visible: Tensor | None = None
    q_order: Tensor | None = None
    k_order: Tensor | None = None
    sinks: Tensor | None = None
    q_state: Tensor | None = None
    k_state: Tensor | None = None

    def of_rows(self, rows: slice) -> Given:
        """The same for some of the queries."""
        return self._replace(
            q=self.q[:, :, rows],
            q_positions=self.q_positions[..., rows],
            x=None if self.x is None else self.x[:, rows],
            visible=None if self.visible is None else visible_of_rows(self.visible, rows),
            q_order=None if self.q_order is None else self.q_order[..., rows],
            q_state=None if self.q_state is None else self.q_state[:, :, rows],
        )

    def on(self, device: torch.device) -> Given:
        """The same with all tensors there."""
        return Given(*(None if x is None else x.to(device) for x in self))  # type: ignore[arg-type]

    def content(self) -> dict[str, Any]:
        """What a bias may read."""
        return {"q": self.q, "k": self.k, "x": self.x, "q_state": self.q_state, "k_state": self.k_state}

    def seen(self, policy: Policy) -> Tensor | None:
        """(1 or B, 1 or H, S, T) booleans, or None where every key is seen."""
        order = None if self.q_order is None or self.k_order is None else (self.q_order, self.k_order)
        return policy.visible(self.q_positions, self.k_positions, visible=self.visible, order=order)


def attend_in_blocks(
    policy: Policy, q: Tensor, k: Tensor, v: Tensor, given: Given, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Attention of q (B, H, S, D) over k (B, G, T, D) and v (B, G, T, E), turned already.

    Args:
        given: as said there, of all queries.
        scale: multiplies q.k.

    Returns:
        (B, H, S, E); and what positions add to it besides (`Policy.values`), or None.
    """
    tensors = [q, k, v, *(one for one in given if one is not None), *policy.parameters()]
    again = torch.is_grad_enabled() and any(one.requires_grad for one in tensors) and q.shape[2] > _ROWS
    outs = []
    for start in range(0, max(1, q.shape[2]), _ROWS):
        rows = slice(start, start + _ROWS)
        block = policy, q[:, :, rows], k, v, given.of_rows(rows), scale
        if again and not torch.compiler.is_compiling():
            outs.append(checkpoint(_of_block, *block, use_reentrant=False, preserve_rng_state=False))
        else:
            outs.append(_of_block(*block))
    parts = list(zip(*outs, strict=True))
    out = torch.cat(parts[0], dim=2)
    return out, None if parts[1][0] is None else torch.cat(parts[1], dim=2)


def _of_block(
    policy: Policy, q: Tensor, k: Tensor, v: Tensor, given: Given, scale: float
) -> tuple[Tensor, Tensor | None]:
    seen = given.seen(policy)
    if seen is not None and not torch.compiler.is_compiling() and q.device.type == "cpu":
        keys = _keys_seen(seen)
        if keys.stop - keys.start < k.shape[2] and policy.bias is None:
            k, v, seen = k[:, :, keys], v[:, :, keys], seen[..., keys]
    bias = policy.dense_bias(given.q_positions, given.k_positions, visible=seen, **given.content())
    if bias is not None:
        # Not in half precision, which could not tell neighbours apart; and beside float64, float32 would be misread.
        bias = bias.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    blind = None if seen is None else ~seen.any(-1, keepdim=True)
    if seen is not None and blind is not None:
        # A softmax over nothing is no number, nor its gradient: such rows see all, and count for nothing after.
        seen = seen | blind
    mask = seen
    if bias is not None:
        mask = bias if seen is None else bias.masked_fill(~seen, -math.inf)
    added = None
    if given.sinks is not None or _adds_values(policy):
        out, added = _written_out(policy, q, k, v, mask, given, scale)
    else:
        whole = None if mask is None else mask.expand(len(q), q.shape[1], -1, -1)
        grouped = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(q, k, v, attn_mask=whole, scale=scale, enable_gqa=grouped)
    if blind is not None:
        out = out.masked_fill(blind, 0.0)
        added = None if added is None else added.masked_fill(blind, 0.0)
    return out, added


def _written_out(
    policy: Policy, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, given: Given, scale: float
) -> tuple[Tensor, Tensor | None]:
    """With the weights at hand: for sinks, and for what positions add to the output."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    scores = torch.matmul(q.to(dtype), k.repeat_interleave(group, dim=1).to(dtype).mT) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if given.sinks is not None:
        scores = torch.cat((scores, given.sinks.to(dtype)[None, :, None, None].expand(*scores.shape[:3], 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]]
    out = torch.matmul(weights, v.repeat_interleave(group, dim=1).to(dtype))
    return out, policy.values(weights, given.q_positions, given.k_positions)


def _adds_values(policy: Policy) -> bool:
    return policy.bias is not None and policy.bias.adds_values


def _keys_seen(seen: Tensor) -> slice:
    """From the first to the last key that a query of the block sees."""
    columns = seen.reshape(-1, seen.shape[-1]).any(0).nonzero()
    return slice(int(columns[0]), int(columns[-1]) + 1) if len(columns) else slice(0, min(1, seen.shape[-1]))
