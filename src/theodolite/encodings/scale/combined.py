"""Score scales together: multiplied, or some heads by one and some by another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn

from theodolite.encodings.scale.base import Scale


class ScaleProduct(Scale):
    """Several scales of the same query, multiplied."""

    def __init__(self, scales: Sequence[Scale]) -> None:
        super().__init__()
        if not scales:
            raise ValueError("scales: got none; give at least one")
        self.scales = nn.ModuleList(scales)

    def reset_parameters(self) -> None:
        for scale in self.scales:
            cast(Scale, scale).reset_parameters()

    def _factors(self, positions: Tensor, heads: slice | None) -> Tensor:
        first, *others = (cast(Scale, scale)._factors(positions, heads) for scale in self.scales)
        for other in others:
            first = first * other
        return first


class ScaleByHead(Scale):
    """Heads with scales of their own: `ScaleByHead([(LogN(train_length=512), 6), (None, 2)])`.

    Args:
        parts: a scale, or None, and how many query heads in a row have it.
    """

    def __init__(self, parts: Sequence[tuple[Scale | None, int]]) -> None:
        super().__init__()
        if not parts:
            raise ValueError("parts: got none; give pairs of a scale, or None, and its heads")
        for _, count in parts:
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"parts: got {count!r} heads; it must be a whole number of at least 1")
        self.scales = nn.ModuleList(scale for scale, _ in parts if scale is not None)
        self._there = tuple(scale is not None for scale, _ in parts)
        self._ends = tuple(accumulate((count for _, count in parts), initial=0))

    def reset_parameters(self) -> None:
        for scale in self.scales:
            cast(Scale, scale).reset_parameters()

    def _factors(self, positions: Tensor, heads: slice | None) -> Tensor:
        heads = slice(0, self._ends[-1]) if heads is None else heads
        scales, made = iter(self.scales), []
        for lo, hi, there in zip(self._ends, self._ends[1:], self._there, strict=False):
            scale = cast(Scale, next(scales)) if there else None
            start, stop = max(lo, heads.start), min(hi, heads.stop)
            if start < stop:
                own = None if scale is None else scale._factors(positions, slice(start - lo, stop - lo))
                made.append((stop - start, own))
        like = next((own for _, own in made if own is not None), torch.ones((), device=positions.device))
        one = like.new_ones(1, 1, 1)
        return torch.cat(
            [
                (one if own is None else own).expand(positions.shape[0], count, positions.shape[1])
                for count, own in made
            ],
            dim=1,
        )
