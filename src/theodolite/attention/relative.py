"""Attention at distances that a map has changed: ReRoPE, leaky ReRoPE, Self-Extend, LM-Infinite, dual chunks.

A map parts the pairs of queries and keys into a few groups, in each of which queries and keys turn by positions of the
group's own. Attention over each group is a piece, and the pieces are merged by their log-sum-exp.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from theodolite.attention.pieces import Piece, attend, merge, with_sink
from theodolite.attention.plain import scale_of
from theodolite.encodings.policy import Policy
from theodolite.encodings.rotate.lengths import Lengths
from theodolite.positions.relative import Group, RelativeMap
from theodolite.positions.visible import visible_of_rows

_ROWS = 256


def attend_relatively(
    policy: Policy,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    relative: RelativeMap,
    *,
    visible: Tensor | None = None,
    lengths: Lengths | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q (B, H, S, D) over k (B, G, T, D) and v (B, G, T, E), none of them turned: (B, H, S, E).

    What is visible goes by the true positions, (S,) or (B, S), as scales of the policy do; scores go by those of
    `relative`. A query that sees no key gives zeros.

    Args:
        visible: (B, S, T) or (B, H, S, T) booleans besides the policy's mask, 1 where it holds for all.
        lengths, sinks: as in `attend_plainly`.

    Raises:
        ValueError: a policy without a rotation, or with a bias or turned values, which no map is for.
    """
    scale = scale_of(policy, q)
    at = q_positions, k_positions
    piece = piece_by_map(policy, q, k, v, *at, relative, scale=scale, visible=visible, lengths=lengths)
    return piece.out if sinks is None else with_sink(piece, sinks)


def piece_by_map(
    policy: Policy,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    relative: RelativeMap,
    *,
    scale: float,
    visible: Tensor | None = None,
    lengths: Lengths | None = None,
    softcap: float | None = None,
    memory: dict[Any, Any] | None = None,
) -> Piece:
    """The same with its log-sum-exp.

    Args:
        scale: multiplies q.k.
        softcap: bounds the scores.
        memory: keeps tables from layer to layer, for the same positions, map and lengths.
    """
    _require(policy)
    assert policy.rotate is not None
    if policy.scale is not None:
        q = policy.scale(q, q_positions)
    groups = relative.groups(q_positions, k_positions)
    memory = {} if memory is None else memory
    turned = [
        _turned(policy, q, k, k_positions, group, lengths, memory.setdefault((number, policy.rotate), {}))
        for number, group in enumerate(groups)
    ]
    pieces = []
    for start in range(0, q.shape[2], _ROWS):
        rows = slice(start, start + _ROWS)
        given = None if visible is None else visible_of_rows(visible, rows)
        seen = policy.visible(q_positions[..., rows], k_positions, visible=given)
        whole: Piece | None = None
        for group, (turned_q, turned_k, begin) in zip(groups, turned, strict=True):
            here = replace(group, first=group.first[..., rows], last=group.last[..., rows]).region(k_positions)
            region = (here if here.dim() == 3 else here[None])[:, None].to(q.device)
            pairs = region if seen is None else region & seen
            keys = _keys_of(pairs)
            if keys is None:
                if whole is not None or group is not groups[-1]:
                    continue
                keys = slice(begin, begin + 1)
            mask = pairs[..., keys]
            piece = attend(
                turned_q[:, :, rows],
                turned_k[:, :, keys.start - begin : keys.stop - begin],
                v[:, :, keys],
                scale=scale,
                # Decoding, every key of a group is seen: without a mask no key is repeated for its queries.
                mask=None if _all_of(mask) else mask,
                softcap=softcap,
            )
            whole = piece if whole is None else merge(whole, piece)
        assert whole is not None
        pieces.append(whole)
    return Piece(torch.cat([piece.out for piece in pieces], dim=2), torch.cat([piece.lse for piece in pieces], dim=2))


def _turned(
    policy: Policy,
    q: Tensor,
    k: Tensor,
    k_positions: Tensor,
    group: Group,
    lengths: Lengths | None,
    memory: dict[str, Any],
) -> tuple[Tensor, Tensor, int]:
    """Queries and keys turned for a group; of the keys only the slots, from the third on, that can be in it."""
    assert policy.rotate is not None
    if not memory:
        slots = slice(0, k.shape[2])
        if group.first.numel():
            within = (k_positions >= group.first.min()) & (k_positions <= group.last.max())
            slots = _keys_of(torch.atleast_2d(within)) or slice(0, min(1, k.shape[2]))
        at = group.q, group.k[..., slots]
        memory["slots"] = slots
        memory["q"], memory["k"] = (policy.rotate.tables(one, lengths=lengths, device=q.device) for one in at)
    slots = memory["slots"]
    _, turned_k = policy.rotate.apply_tables(None, k[:, :, slots], memory["k"])
    return policy.rotate.apply_tables(q, None, memory["q"])[0], turned_k, slots.start


def _all_of(mask: Tensor) -> bool:
    """Whether it can be seen at once that a mask hides nothing."""
    return not torch.compiler.is_compiling() and mask.device.type == "cpu" and bool(mask.all())


def _keys_of(pairs: Tensor) -> slice | None:
    """The slots from the first key that is in a pair to the last, None without any; all where that cannot be seen."""
    if torch.compiler.is_compiling() or pairs.device.type != "cpu":
        return slice(0, pairs.shape[-1])
    used = pairs.flatten(0, -2).any(0).nonzero()
    return slice(int(used[0]), int(used[-1]) + 1) if len(used) else None


def _require(policy: Policy) -> None:
    if policy.rotate is None:
        raise ValueError(f"relative: {policy} turns nothing, and a map of distances changes what is turned")
    if policy.bias is not None or policy.rotate_values:
        what = "turned values" if policy.bias is None else type(policy.bias).__name__
        raise ValueError(f"relative: {policy} has {what}, and a map of distances is for queries and keys alone")
