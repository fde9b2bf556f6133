"""Data small enough for tests: rows of a language in which each token says what the next is likely to be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from theodolite.compare.batch import IGNORE, Batch

VOCAB = 11


class Words:
    """Text whose next token is mostly the last one plus 3."""

    name = "words"
    vocab_size = VOCAB
    nested = True

    def __init__(self, *, available: int = 10_000) -> None:
        self.available = available

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"kind": "words"}

    def training_batch(self, step: int, *, rows: int, length: int, seed: int) -> Batch:
        return self._batch([seed * 7919 + step * 131 + row for row in range(rows)], length)

    def test_batch(self, start: int, *, rows: int, length: int) -> Batch:
        return self._batch([-1 - row for row in range(start, start + rows)], length)

    def require(self, *, length: int, longest: int, rows: int) -> None:
        if rows * longest > self.available:
            raise ValueError(f"text: {rows * longest} tokens are needed and there are {self.available}")

    def _batch(self, seeds: list[int], length: int) -> Batch:
        tokens = torch.stack([_row(seed, length + 1) for seed in seeds])
        return Batch(ids=tokens[:, :-1], targets=tokens[:, 1:], positions=torch.arange(length))


class Last(Words):
    """A task: the last token of a row is to be the first."""

    name = "last"
    nested = False

    def _batch(self, seeds: list[int], length: int) -> Batch:
        ids = torch.stack([_row(seed, length) for seed in seeds])
        targets = torch.full_like(ids, IGNORE)
        targets[:, -1] = ids[:, 0]
        return Batch(ids=ids, targets=targets, positions=torch.arange(length))


def _row(seed: int, length: int) -> Tensor:
    # The test's rows have seeds of their own.
    generator = torch.Generator().manual_seed(seed if seed >= 0 else 10**9 - seed)
    steps = torch.where(
        torch.rand(length, generator=generator) < 0.8, 3, torch.randint(VOCAB, (length,), generator=generator)
    )
    return steps.cumsum(0) % VOCAB
