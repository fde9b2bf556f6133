"""Positions of tokens that are generated: one by one, drafted in a line, or drafted as a tree.

A position is the number of tokens of the row that stand before. It is not the number of keys that a cache holds
(fewer, once it evicts), nor the slot that a key is written to (the same row of memory again and again, in a ring), nor
the column of a padded batch. So everything here starts from `seen`: the tokens that a row has ever had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from theodolite.positions.checks import can_read_at_once, integers_of, require_count, require_integers
from theodolite.positions.padding import from_attention_mask, real_tokens

Counts = Tensor | Sequence[int] | int
"""A count for each row, (B,), or one, (): a tensor, or whole numbers, which are put on the CPU."""


def tokens_seen(attention_mask: Tensor | Sequence[Any]) -> Tensor:
    """The real tokens of each row of a mask (B, S) or (S,): (B,) or (), int64. What is not 0 is real.

    Raises:
        ValueError: as `from_attention_mask`.
    """
    return real_tokens("attention_mask", attention_mask).sum(-1)


def next_positions(
    seen: Counts, *, new_tokens: int | None = None, new_mask: Tensor | None = None, delta: Counts | None = None
) -> Tensor:
    """Positions of the tokens that each row takes next: (B, n), or (n,) for one row, int64.

    Args:
        seen: (B,) or (), the tokens that a row has had so far, those that a cache has dropped included.
        new_tokens: n, the same for every row; 1 by default.
        new_mask: (B, n) or (n,), not 0 at real tokens, where rows take different numbers; padding has position 0.
            Give this or `new_tokens`, or neither.
        delta: (B,) or (), added to the row's positions: what images or videos have made them differ from a plain
            count (`rope_delta` of M-RoPE). It belongs to the sequence and is never kept here.

    Nothing is read from the device.

    Raises:
        ValueError: both `new_tokens` and `new_mask`, or shapes that differ.
    """
    first = _rows("seen", seen)
    if delta is not None:
        first = first + _rows("delta", delta, like=first)
    if new_mask is None:
        new_tokens = 1 if new_tokens is None else new_tokens
        require_count("new_tokens", new_tokens, least=1)
        return first.unsqueeze(-1) + torch.arange(new_tokens, device=first.device)
    if new_tokens is not None:
        raise ValueError("new_tokens, new_mask: got both; give one of the two")
    real = real_tokens("new_mask", new_mask)
    if real.shape[:-1] != first.shape:
        raise ValueError(
            f"new_mask: got shape {tuple(real.shape)} for seen of shape {tuple(first.shape)}; "
            "one row of tokens for each is needed"
        )
    return (first.unsqueeze(-1) + from_attention_mask(real)).masked_fill(~real, 0)


def seen_after_draft(seen: Counts, *, accepted: Counts, drafted: int) -> Tensor:
    """The tokens that each row has had once its draft is judged, which is the position of its next token: (B,) or ().

    A draft of n tokens stands at `next_positions(seen, new_tokens=n)`; of those the first `accepted` stay, and the
    next token stands where the first rejected one stood.

    Args:
        seen: (B,) or (), the tokens before the draft.
        accepted: (B,) or (), 0 to `drafted`.
        drafted: n.

    Raises:
        ValueError: shapes that differ, or more accepted than drafted (looked at on the CPU only, so that no device
            waits).
    """
    seen = _rows("seen", seen)
    accepted = _rows("accepted", accepted, like=seen)
    require_count("drafted", drafted, least=0)
    if can_read_at_once(accepted) and accepted.numel():
        low, high = int(accepted.min()), int(accepted.max())
        if low < 0 or high > drafted:
            raise ValueError(
                f"accepted: got {low if low < 0 else high}; of {drafted} drafted it must be 0 to {drafted}"
            )
    return seen + accepted


def tree_positions(parents: Tensor | Sequence[Any], *, seen: Counts) -> Tensor:
    """Positions of the tokens of a drafted tree: `seen` plus the depth of each, (B, N) or (N,), int64.

    Siblings are rivals for one place and share its position.

    Args:
        parents: (N,) for one tree in every row, or (B, N): the index of each token's parent, which stands before
            it; -1 for a token that follows the accepted text directly.
        seen: (B,) or (), the tokens before the tree.

    Depths are found by doubling, in log2(N) rounds over all tokens at once.

    Raises:
        ValueError: shapes that differ, or a parent that does not stand before its child (looked at on the CPU only).
    """
    parents = integers_of("parents", parents, of="one for each token")
    require_integers("parents", parents, dims=(1, 2))
    seen = _rows("seen", seen)
    if parents.dim() == 2 and seen.shape != parents.shape[:1]:
        raise ValueError(
            f"seen: got shape {tuple(seen.shape)} for parents of shape {tuple(parents.shape)}; one per row is needed"
        )
    parents = parents.to(torch.int64)
    nodes = parents.shape[-1]
    if can_read_at_once(parents):
        wrong = (parents < -1) | (parents >= torch.arange(nodes, device=parents.device))
        if bool(wrong.any()):
            *_, node = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"parents: token {node} has parent {int(parents[wrong][0])}; it must be -1 or a token before it"
            )
    depth, ancestor = (parents >= 0).to(torch.int64), parents
    # Token 0 has no parent, so a token past its root may look there: it finds depth 0 and no parent.
    for _ in range(max(nodes - 2, 0).bit_length()):
        index = ancestor.clamp(min=0)
        depth, ancestor = depth + depth.gather(-1, index), ancestor.gather(-1, index)
    return seen.unsqueeze(-1) + depth


def _rows(name: str, given: Counts, *, like: Tensor | None = None) -> Tensor:
    """The counts as int64, checked."""
    counts = integers_of(name, given, of="one for each row").to(torch.int64)
    if counts.dim() > 1:
        raise ValueError(f"{name}: got shape {tuple(counts.shape)}; it must be (B,), or () for one row")
    if like is not None and counts.shape != like.shape:
        raise ValueError(f"{name}: got shape {tuple(counts.shape)}; it must be {tuple(like.shape)}, as seen is")
    return counts if like is None or isinstance(given, Tensor) else counts.to(like.device)
