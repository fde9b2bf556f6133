"""How much tokens attend to parts of what was read before them.

Attention whose values are marks, 1 at the tokens of a part and 0 elsewhere, gives the sum of the weights on each part:
no weight of a single token is kept, and windows and mapped distances are those of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from theodolite.attention import Piece
from theodolite.models.feed import Attends
from theodolite.models.reader import Reader


class _Marking(Attends):
    """Attention as it is, and beside it that over the marks."""

    def __init__(self, feed: Attends, marked: Attends, parts: int, reduced: Callable[[Tensor], Tensor]) -> None:
        self.feed, self.marked, self.parts, self.reduced = feed, marked, parts, reduced
        self.sums: list[Tensor] = []
        self._piece: Piece | None = None

    def tempered(self, layer_idx: int, q: Tensor) -> Tensor:
        return self.feed.tempered(layer_idx, q)

    def attention(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Piece:
        none = v.new_zeros(*v.shape[:3], self.parts)
        self._piece = self.marked.attention(layer_idx, q, k, none, scale, softcap)
        return self.feed.attention(layer_idx, q, k, v, scale, softcap)

    def finished(self, piece: Piece, sinks: Tensor | None) -> Tensor:
        assert self._piece is not None
        self.sums.append(self.reduced(self.marked.finished(self._piece, sinks)[0].float()).cpu())
        return self.feed.finished(piece, sinks)


def attended(
    reader: Reader,
    tokens: Tensor,
    positions: Tensor,
    parts: Sequence[slice],
    *,
    reduced: Callable[[Tensor], Tensor] = lambda weights: weights,
) -> Tensor:
    """Weights of `tokens` (S,) at `positions` (S,), as if they came next, on parts of what `reader` has read.

    They leave no trace, and see each other too: the weights on what was read sum to less than 1.

    Args:
        parts: P ranges of the tokens read, none in two of them.
        reduced: what is kept of the weights (H, S, P) of a layer.

    Returns:
        (layers, H, S, P) float32 on the CPU, or what `reduced` leaves.
    """
    if not reader.length:
        raise ValueError("parts: nothing was read that they could be parts of")
    marks = torch.zeros(reader.length, len(parts), dtype=reader.model.dtype)
    for number, part in enumerate(parts):
        marks[part, number] = 1
    at = positions[None]
    marked = reader.feed(at, writing=False, prefix=reader.prefix.with_values(marks.to(reader.model.device)))
    feed = _Marking(reader.feed(at, writing=False), marked, len(parts), reduced)
    reader.forward(feed, tokens[None], at, keep=1)
    return torch.stack(feed.sums)
