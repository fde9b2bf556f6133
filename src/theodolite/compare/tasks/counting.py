"""Counting what has come since a mark."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from theodolite.compare.tasks.base import Ids, empty
from theodolite.plan.errors import require_whole

_COUNTED, _OTHER, _RESET, _ASK, _ZERO = 0, 1, 2, 3, 4
_CHANCES = (0.2, 0.6, 0.04, 0.16)


@dataclass(frozen=True, kw_only=True)
class Counting:
    """Tokens to count, others, resets, and questions, after each of which stands how many were counted since the reset.

    What is counted lies among what is not, so that no distance in tokens is the answer (after Golovneva et al.,
    "Contextual position encoding", arXiv 2405.18719, section 5.2). A count past `most` is said as `most`.

    Args:
        highest: the largest answer.
    """

    highest: int = 9

    def __post_init__(self) -> None:
        require_whole(highest=self.highest)

    @property
    def vocab_size(self) -> int:
        return _ZERO + self.highest + 1

    @property
    def least(self) -> int:
        return 4

    def most(self) -> int | None:
        return None

    def rows(self, rng: np.random.Generator, rows: int, length: int, *, test: bool) -> tuple[Ids, Ids]:
        ids, targets = empty(rows, length, _OTHER)
        # A question and its answer are two tokens: as many units as there are tokens are enough.
        units = rng.choice(4, p=_CHANCES, size=(rows, length))
        units[:, 0] = _RESET
        for row in range(rows):
            count, place = 0, 0
            for unit in units[row]:
                if place >= length:
                    break
                if place == length - 1:
                    # So that no row asks nothing.
                    unit = _ASK
                ids[row, place] = unit
                if unit == _ASK:
                    targets[row, place] = answer = _ZERO + min(count, self.highest)
                    place += 1
                    if place < length:
                        ids[row, place] = answer
                count = 0 if unit == _RESET else count + (unit == _COUNTED)
                place += 1
        return ids, targets
