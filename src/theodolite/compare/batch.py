"""What a model is trained and measured on, whatever it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

IGNORE = -100
"""The target where nothing is asked; torch's own."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of tokens, and what should follow each.

    Args:
        ids: (B, S) int64.
        targets: (B, S) int64, the token that should follow, `IGNORE` where none is asked for.
        positions: (S,) or (B, S) int64.
    """

    ids: Tensor
    targets: Tensor
    positions: Tensor


class Data(Protocol):
    """Batches without end for training, and others for tests that training never sees.

    Each batch follows from the arguments alone: whatever was asked before, on whatever machine.
    """

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def nested(self) -> bool:
        """Whether the first n tokens of a longer row of the test are a row of n tokens, as in text."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """All that the batches depend on, as plain data."""

    def training_batch(self, step: int, *, rows: int, length: int, seed: int) -> Batch:
        """The batch of a step (from 0): `rows` rows of at most `length` tokens."""

    def test_batch(self, start: int, *, rows: int, length: int) -> Batch:
        """Rows `start` to `start + rows` of the test at `length` tokens: the same for every policy and seed."""

    def require(self, *, length: int, longest: int, rows: int) -> None:
        """Raise ValueError if there is too little to train at `length` tokens or to test `rows` rows of `longest`."""
