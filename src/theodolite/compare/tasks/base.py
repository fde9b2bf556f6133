"""What all tasks have in common: rows that say all that is needed, and targets where an answer is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from theodolite.compare.batch import IGNORE, Batch
from theodolite.compare.draws import draws
from theodolite.plan import PlanError

Ids = NDArray[np.int64]


class Task(Protocol):
    """One kind of rows.

    `vocab_size` tokens; `least` is the shortest row. `rows(rng, rows, length, test)` gives ids and targets
    (rows, length) each: in tests every row is as hard as its length allows.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def least(self) -> int: ...

    def rows(self, rng: np.random.Generator, rows: int, length: int, *, test: bool) -> tuple[Ids, Ids]: ...

    def most(self) -> int | None:
        """The longest row that it can make, or None."""


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """A task without end: each step and each row of the test is drawn by its number."""

    name: str
    task: Task

    nested = False

    @property
    def vocab_size(self) -> int:
        return self.task.vocab_size

    @property
    def identity(self) -> Mapping[str, Any]:
        # Raised when a name comes to mean other rows.
        return {"kind": "task", "task": self.name, "version": 1}

    def training_batch(self, step: int, *, rows: int, length: int, seed: int) -> Batch:
        return _batch(*self.task.rows(draws(f"training {self.name}", seed, step), rows, length, test=False))

    def test_batch(self, start: int, *, rows: int, length: int) -> Batch:
        made = [
            self.task.rows(draws(f"test {self.name}", row, length), 1, length, test=True)
            for row in range(start, start + rows)
        ]
        return _batch(np.concatenate([ids for ids, _ in made]), np.concatenate([targets for _, targets in made]))

    def require(self, *, length: int, longest: int, rows: int) -> None:
        if length < self.task.least:
            raise PlanError("length", length, f"{self.name} needs {self.task.least} tokens a row at least")
        most = self.task.most()
        if most is not None and longest > most:
            raise PlanError("times", longest, f"{self.name} has rows of at most {most} tokens")


def empty(rows: int, length: int, fill: int) -> tuple[Ids, Ids]:
    """Rows of one token, and nothing asked."""
    return np.full((rows, length), fill, np.int64), np.full((rows, length), IGNORE, np.int64)


def _batch(ids: Ids, targets: Ids) -> Batch:
    return Batch(ids=torch.from_numpy(ids), targets=torch.from_numpy(targets), positions=torch.arange(ids.shape[1]))
