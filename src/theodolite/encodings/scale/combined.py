"""Score scales together: multiplied, or some heads by one and some by another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn

from theodolite.encodings.heads import heads_of_rank, require_heads
from theodolite.encodings.scale.base import Scale


class ScaleProduct(Scale):
    """Several scales of the same query, multiplied."""

    def __init__(self, scales: Sequence[Scale]) -> None:
        super().__init__()
        if not scales:
            raise ValueError("scales: got none; give at least one")
        counts = {scale.num_heads for scale in scales if scale.num_heads is not None}
        if len(counts) > 1:
            raise ValueError(f"scales: got {sorted(counts)} heads; all that differ by head must have the same number")
        self.num_heads = counts.pop() if counts else None
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
        for part, count in parts:
            require_heads("parts", count)
            if part is not None and not isinstance(part, Scale):
                raise ValueError(f"parts: got a {type(part).__name__}; a part is a Scale module, or None for 1")
            if part is not None and part.num_heads not in (None, count):
                raise ValueError(f"parts: got a {type(part).__name__} of {part.num_heads} heads for {count} heads")
        self.scales = nn.ModuleList(scale for scale, _ in parts if scale is not None)
        self._there = tuple(scale is not None for scale, _ in parts)
        self._ends = tuple(accumulate((count for _, count in parts), initial=0))
        self.num_heads = self._ends[-1]

    def reset_parameters(self) -> None:
        for scale in self.scales:
            cast(Scale, scale).reset_parameters()

    def _factors(self, positions: Tensor, heads: slice | None) -> Tensor:
        heads = heads_of_rank(heads, self._ends[-1])
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
