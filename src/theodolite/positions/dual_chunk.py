"""Dual chunk attention as a map of distances."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.positions.checks import require_count
from theodolite.positions.relative import Group, RelativeMap, unbounded


@dataclass(frozen=True, kw_only=True)
class DualChunk(RelativeMap):
    """Dual chunk attention (ChunkLlama, 2402.17463): exact inside a chunk and near its border, bounded elsewhere.

    Keys count from 0 in each chunk of s = chunk_size - local_size tokens. A query sees its own chunk at the true
    distance; the chunk before from min(m mod s + s, pinned), so that the nearest `local_size` distances are true; all
    earlier ones from `pinned`. The identity up to `pinned` + 1 tokens. All groups rotate keys alike, so a cache may
    hold them rotated. Distances to chunks further back do not order them: that is the method.

    Args:
        chunk_size: at most the trained length.
        local_size: at most half of `chunk_size`.
        pinned: the largest distance. chunk_size - 1 is the paper's, and the default; chunk_size is what ChunkLlama's
            and vLLM's code has, and must then be below the trained length to have been seen.
    """

    chunk_size: int
    local_size: int
    pinned: int | None = None

    def __post_init__(self) -> None:
        require_count("chunk_size", self.chunk_size, least=2)
        require_count("local_size", self.local_size, least=1)
        if 2 * self.local_size > self.chunk_size:
            raise ValueError(f"local_size: got {self.local_size}; at most half of chunk_size ({self.chunk_size})")
        if self.pinned not in (None, self.chunk_size - 1, self.chunk_size):
            raise ValueError(
                f"pinned: got {self.pinned}; allowed: {self.chunk_size - 1} (the paper), {self.chunk_size} (ChunkLlama)"
            )

    def largest_distance(self, tokens: int) -> int:
        require_count("tokens", tokens, least=1)
        return min(tokens - 1, self._pinned)

    @property
    def _pinned(self) -> int:
        return self.chunk_size - 1 if self.pinned is None else self.pinned

    def _groups(self, m: Tensor, n: Tensor) -> tuple[Group, ...]:
        length = self.chunk_size - self.local_size
        start, inside, keys = m // length * length, m % length, n % length
        intra = Group(q=inside, k=keys, first=start, last=m)
        near = (inside + length).clamp(max=self._pinned)
        successive = Group(q=near, k=keys, first=start - length, last=start - 1)
        pinned = torch.full_like(m, self._pinned)
        inter = Group(q=pinned, k=keys, first=unbounded(m), last=start - length - 1)
        return intra, successive, inter
