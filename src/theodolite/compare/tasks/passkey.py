"""Finding a key of several digits in a long row of nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from theodolite.compare.tasks.base import Ids, empty
from theodolite.plan.errors import require_whole

_MARK, _ASK, _ZERO = 0, 1, 2
_DIGITS = 10


@dataclass(frozen=True, kw_only=True)
class Passkey:
    """Noise, with `MARK d_1 ... d_k` at a random place, and at the end `ASK d_1 ... d_k`: the last k are asked.

    Mohtashami and Jaggi (arXiv 2305.16300) with a token for each part of their sentences.

    Args:
        digits: of the key, k.
        noise: how many tokens of noise there are.
    """

    digits: int = 4
    noise: int = 32

    def __post_init__(self) -> None:
        require_whole(digits=self.digits, noise=self.noise)

    @property
    def vocab_size(self) -> int:
        return _ZERO + _DIGITS + self.noise

    @property
    def least(self) -> int:
        return 2 * self.digits + 2

    def most(self) -> int | None:
        return None

    def rows(self, rng: np.random.Generator, rows: int, length: int, *, test: bool) -> tuple[Ids, Ids]:
        ids, targets = empty(rows, length + 1, 0)
        ids[:] = _ZERO + _DIGITS + rng.integers(self.noise, size=ids.shape)
        key = _ZERO + rng.integers(_DIGITS, size=(rows, self.digits))
        # The answer's last digit is a target and not read: it stands one past the row.
        ask = length - self.digits
        at = rng.integers(ask - self.digits, size=(rows, 1))
        np.put_along_axis(ids, at, _MARK, axis=1)
        np.put_along_axis(ids, at + 1 + np.arange(self.digits), key, axis=1)
        ids[:, ask], ids[:, ask + 1 :] = _ASK, key
        targets[:, ask:length] = key
        return ids[:, :length], targets[:, :length]
