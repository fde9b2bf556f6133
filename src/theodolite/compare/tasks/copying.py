"""Saying again what was said, in its order or backwards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from theodolite.compare.tasks.base import Ids, empty
from theodolite.plan.errors import PlanError, require_one_of, require_whole

_SEPARATOR, _END, _PADDING, _FIRST = 0, 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class Copying:
    """`x_1 ... x_n SEP x_1 ... x_n END`, or backwards after SEP: everything after SEP is asked.

    Training has n from 1 to what the length holds, each as likely, and padding behind; the test has the most
    (Kazemnejad et al., arXiv 2305.19466, section 4, where symbols are words).

    Args:
        kind: "random" symbols, "unique" ones (none twice in a row), or "repeated": one symbol n times, so that all that
            must be known is n.
        symbols: how many there are.
        backwards: the copy is reversed.
    """

    kind: str = "random"
    symbols: int = 32
    backwards: bool = False

    def __post_init__(self) -> None:
        require_one_of("kind", self.kind, ("random", "unique", "repeated"))
        require_whole(symbols=self.symbols, least=2)
        if self.backwards and self.kind == "repeated":
            raise PlanError("kind", self.kind, "backwards it is the same: use copy")

    @property
    def vocab_size(self) -> int:
        return _FIRST + self.symbols

    @property
    def least(self) -> int:
        return 4

    def most(self) -> int | None:
        return 2 * self.symbols + 2 if self.kind == "unique" else None

    def rows(self, rng: np.random.Generator, rows: int, length: int, *, test: bool) -> tuple[Ids, Ids]:
        ids, targets = empty(rows, length + 1, _PADDING)
        longest = (length - 1) // 2
        counts = np.full(rows, longest) if test else rng.integers(1, longest + 1, size=rows)
        symbols = self._symbols(rng, rows, longest)
        for row, n in enumerate(counts):
            said = symbols[row, :n]
            ids[row, :n], ids[row, n] = said, _SEPARATOR
            ids[row, n + 1 : 2 * n + 1] = said[::-1] if self.backwards else said
            ids[row, 2 * n + 1] = _END
            targets[row, n : 2 * n + 1] = ids[row, n + 1 : 2 * n + 2]
        return ids[:, :length], targets[:, :length]

    def _symbols(self, rng: np.random.Generator, rows: int, count: int) -> Ids:
        if self.kind == "unique":
            return _FIRST + rng.permuted(np.tile(np.arange(self.symbols), (rows, 1)), axis=1)[:, :count]
        if self.kind == "repeated":
            return np.repeat(_FIRST + rng.integers(self.symbols, size=(rows, 1)), count, axis=1)
        return _FIRST + rng.integers(self.symbols, size=(rows, count))
