"""Attention of a text of any length with a bounded cache: a window of the last tokens, and the first few of all.

Shapes: H query heads, G key-value heads, S tokens of the call, N tokens kept, D and E channels of keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from theodolite.attention import Piece, attend, merge
from theodolite.encodings import rerotate
from theodolite.models.feed import Attends, temper
from theodolite.plan import ModelPlan, Rotary

Kept = tuple[Tensor, Tensor]
"""Keys (1, G, N, D) and values (1, G, N, E), turned as the model turns them."""


@dataclass
class Window:
    """What is kept of a text: for each layer the first `sinks` tokens, and the last `size - 1` of the others.

    A token sees those less than `size` tokens behind it at their true distance. It sees the sinks as if they stood
    right before a full window: `min(position, sinks + size - 1)` is where it stands among what is kept (StreamingLLM,
    Xiao et al. 2023, 2309.17453), so that no distance exceeds that, however long the text.
    """

    size: int
    sinks: int
    length: int = 0
    """Tokens read so far."""
    first: list[Kept | None] = field(default_factory=list)
    last: list[Kept | None] = field(default_factory=list)

    def held(self) -> int:
        """Tokens that are kept of the others than the sinks."""
        return max(0, min(self.length - self.sinks, self.size - 1))


class WindowFeed(Attends):
    """What attention must know of one call: the plan, what is kept, and where the queries stand.

    What the call makes of the window is put into it by `commit`, once all layers are through: a call that fails leaves
    it as it was.
    """

    def __init__(self, plan: ModelPlan, window: Window, positions: Tensor) -> None:
        self.plan, self.window, self.positions = plan, window, positions
        self._first = list(window.first)
        self._last = list(window.last)

    def tempered(self, layer_idx: int, q: Tensor) -> Tensor:
        """q (1, H, S, D) times what the plan multiplies queries by at their positions."""
        return temper(self.plan.layers[layer_idx].temperature, q, self.positions)

    def attention(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Piece:
        window, start, tokens = self.window, self.window.length, k.shape[2]
        first, last = window.first[layer_idx], window.last[layer_idx]
        fresh = max(0, min(window.sinks - start, tokens))
        if fresh:
            # Of their own: a view would keep the whole call's.
            first = _joined(first, k[:, :, :fresh].clone(), v[:, :, :fresh].clone())
        self._first[layer_idx] = first
        keys, values = _joined(last, k[:, :, fresh:], v[:, :, fresh:])
        self._last[layer_idx] = _tail(keys, values, window.size - 1)

        at = torch.arange(start, start + tokens)
        own = self.plan.layers[layer_idx].mask.sliding_window
        pieces = []
        if keys.shape[2]:
            reach = window.size if own is None else min(window.size, own)
            key_at = torch.arange(start + tokens - keys.shape[2], start + tokens)
            pieces.append(_piece(q, (keys, values), at, key_at, reach, scale, softcap))
        if first is not None and first[0].shape[2]:
            key_at = torch.arange(first[0].shape[2])
            if own is None:
                among_kept = at.clamp(max=window.sinks + window.size - 1)
                q = _turned(q, self.plan.layers[layer_idx].rotate, among_kept - at)
            # A layer with a window of its own sees no further than that.
            if own is None or start - len(key_at) < own:
                pieces.append(_piece(q, first, at, key_at, own, scale, softcap))
        return pieces[0] if len(pieces) == 1 else merge(*pieces)

    def commit(self) -> None:
        """Take over what this call made."""
        self.window.first, self.window.last = self._first, self._last
        self.window.length += self.positions.shape[1]


def _piece(
    q: Tensor, kept: Kept, at: Tensor, key_at: Tensor, reach: int | None, scale: float, softcap: float | None
) -> Piece:
    """Queries at `at` over keys at `key_at`, causal, none `reach` tokens behind or more."""
    distance = at[:, None] - key_at
    seen = distance >= 0 if reach is None else (distance >= 0) & (distance < reach)
    return attend(q, *kept, scale=scale, softcap=softcap, mask=None if seen.all() else seen[None, None].to(q.device))


def _joined(kept: Kept | None, k: Tensor, v: Tensor) -> Kept:
    return (k, v) if kept is None else (torch.cat((kept[0], k), dim=2), torch.cat((kept[1], v), dim=2))


def _tail(k: Tensor, v: Tensor, count: int) -> Kept:
    """The last `count` tokens, in memory of their own."""
    start = max(0, k.shape[2] - count)
    return k[:, :, start:].clone(), v[:, :, start:].clone()


def _turned(q: Tensor, rotary: Rotary | None, by: Tensor) -> Tensor:
    """Queries as they would be `by` (S,) positions on."""
    if rotary is None or not bool(by.any()):
        return q
    return rerotate(q, rotary=rotary, by=by)
