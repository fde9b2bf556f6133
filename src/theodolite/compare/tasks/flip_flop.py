"""Remembering one bit past what is to be ignored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from theodolite.compare.tasks.base import Ids, empty
from theodolite.plan.errors import require_between

_WRITE, _READ, _IGNORE, _ZERO = 0, 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class FlipFlop:
    """Pairs of an instruction and a bit: `w 1 i 0 i 1 r 1 ...`; the bit after r is that after the last w, and is asked.

    The first instruction is w and the last r; between them each is i with probability `ignore`, else w or r alike
    (Liu et al., "Exposing attention glitches with flip-flop language modeling", arXiv 2306.00946).

    Args:
        ignore: in training.
        test: in tests; the paper's are 0.98 (sparse) and 0.1 (dense).
    """

    ignore: float = 0.8
    test: float = 0.8

    def __post_init__(self) -> None:
        require_between(0.0, 1.0, ignore=self.ignore, test=self.test)
        # 1 and 1.0 are one probability, and should have one name; so should 0.0 and -0.0.
        object.__setattr__(self, "ignore", abs(float(self.ignore)))
        object.__setattr__(self, "test", abs(float(self.test)))

    @property
    def vocab_size(self) -> int:
        return 5

    @property
    def least(self) -> int:
        return 4

    def most(self) -> int | None:
        return None

    def rows(self, rng: np.random.Generator, rows: int, length: int, *, test: bool) -> tuple[Ids, Ids]:
        ids, targets = empty(rows, length, _IGNORE)
        pairs = length // 2
        chance = self.test if test else self.ignore
        kind = np.where(
            rng.random((rows, pairs)) < chance, _IGNORE, np.where(rng.random((rows, pairs)) < 0.5, _WRITE, _READ)
        )
        kind[:, 0], kind[:, -1] = _WRITE, _READ
        bits = rng.integers(2, size=(rows, pairs))
        # The last place at or before each where something was written.
        written = np.maximum.accumulate(np.where(kind == _WRITE, np.arange(pairs), 0), axis=1)
        bits = np.where(kind == _READ, np.take_along_axis(bits, written, axis=1), bits)
        ids[:, 0 : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2] = kind, _ZERO + bits
        asked = targets[:, 0 : 2 * pairs : 2]
        asked[kind == _READ] = _ZERO + bits[kind == _READ]
        return ids, targets
