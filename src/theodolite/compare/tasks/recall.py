"""Finding again what stood beside a key."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from theodolite.compare.tasks.base import Ids, empty
from theodolite.plan.errors import PlanError, require_whole


@dataclass(frozen=True, kw_only=True)
class Recall:
    """Pairs of a key and a value among noise, then every key again in another order: the value after it is asked.

    Multi-query associative recall (Arora et al., "Zoology", arXiv 2312.04927), with as many pairs at every length and
    more noise in longer rows. No key is in a row twice before it is asked.

    Args:
        pairs: in a row.
        keys, values, noise: how many tokens there are of each.
    """

    pairs: int = 8
    keys: int = 64
    values: int = 64
    noise: int = 16

    def __post_init__(self) -> None:
        require_whole(pairs=self.pairs, keys=self.keys, values=self.values, noise=self.noise)
        if self.pairs > self.keys:
            raise PlanError("pairs", self.pairs, f"at most as many as the {self.keys} keys")

    @property
    def vocab_size(self) -> int:
        return self.keys + self.values + self.noise

    @property
    def least(self) -> int:
        return 4 * self.pairs

    def most(self) -> int | None:
        return None

    def rows(self, rng: np.random.Generator, rows: int, length: int, *, test: bool) -> tuple[Ids, Ids]:
        ids, targets = empty(rows, length, 0)
        ids[:] = self.keys + self.values + rng.integers(self.noise, size=ids.shape)
        before = length - 2 * self.pairs
        at = 2 * rng.permuted(np.tile(np.arange(before // 2), (rows, 1)), axis=1)[:, : self.pairs]
        keys = rng.permuted(np.tile(np.arange(self.keys), (rows, 1)), axis=1)[:, : self.pairs]
        values = self.keys + rng.integers(self.values, size=keys.shape)
        np.put_along_axis(ids, at, keys, axis=1)
        np.put_along_axis(ids, at + 1, values, axis=1)
        order = rng.permuted(np.tile(np.arange(self.pairs), (rows, 1)), axis=1)
        ids[:, before::2] = np.take_along_axis(keys, order, axis=1)
        ids[:, before + 1 :: 2] = targets[:, before::2] = np.take_along_axis(values, order, axis=1)
        return ids, targets
