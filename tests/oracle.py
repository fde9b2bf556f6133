"""What the tables must say, in 50 digits and from the printed formulas alone; none of the library's maths is used."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from mpmath import mp, mpf

DIGITS = 50


def plain(rope_theta: float, dim: int) -> list[mpf]:
    """theta^(-2i/dim) for i = 0 .. dim/2 - 1."""
    with mp.workdps(DIGITS):
        return [mp.power(mpf(rope_theta), -mpf(2 * i) / dim) for i in range(dim // 2)]


def ntk(rope_theta: float, dim: int, factor: float) -> list[mpf]:
    """The base times factor^(dim/(dim-2))."""
    with mp.workdps(DIGITS):
        base = mpf(rope_theta) * mp.power(mpf(factor), mpf(dim) / (dim - 2))
        return [mp.power(base, -mpf(2 * i) / dim) for i in range(dim // 2)]


def by_parts(rope_theta: float, dim: int, factor: float, slow: float, fast: float, length: int) -> list[mpf]:
    """Blend by turns made in `length` tokens: below `slow` divided, above `fast` kept, linear between."""
    with mp.workdps(DIGITS):
        out = []
        for f in plain(rope_theta, dim):
            kept = min(max((length * f / (2 * mp.pi) - slow) / (mpf(fast) - slow), mpf(0)), mpf(1))
            out.append(kept * f + (1 - kept) * f / mpf(factor))
        return out


def yarn(
    rope_theta: float,
    dim: int,
    factor: float,
    length: int,
    *,
    beta_fast: float = 32,
    beta_slow: float = 1,
    truncate: bool = True,
) -> list[mpf]:
    """The authors' code: a ramp over pair indices between the pairs that turn beta_fast and beta_slow times."""
    with mp.workdps(DIGITS):

        def index(turns: float) -> mpf:
            return dim * mp.log(mpf(length) / (mpf(turns) * 2 * mp.pi)) / (2 * mp.log(mpf(rope_theta)))

        low, high = index(beta_fast), index(beta_slow)
        if truncate:
            low, high = mp.floor(low), mp.ceil(high)
        low, high = max(low, mpf(0)), min(high, mpf(dim - 1))
        if low == high:
            high += mpf("0.001")
        out = []
        for i, f in enumerate(plain(rope_theta, dim)):
            divided = min(max((i - low) / (high - low), mpf(0)), mpf(1))
            out.append(divided * f / mpf(factor) + (1 - divided) * f)
        return out


def cos_sin(inv_freq: Sequence[mpf], position: float | Fraction, amplitude: float = 1.0) -> tuple[list[mpf], list[mpf]]:
    """One row of the tables."""
    with mp.workdps(DIGITS):
        p = mpf(position)
        return [amplitude * mp.cos(p * f) for f in inv_freq], [amplitude * mp.sin(p * f) for f in inv_freq]


def worst_error(row: np.ndarray, true: Sequence[mpf]) -> float:
    """The largest distance between a float32 row and the true values."""
    assert len(row) == len(true)
    with mp.workdps(DIGITS):
        return max(float(abs(mpf(float(entry)) - value)) for entry, value in zip(row, true, strict=True))


def worst_ratio(given: Sequence[float], true: Sequence[mpf]) -> float:
    """The largest relative distance between frequencies and the true ones (none of which is 0)."""
    assert len(given) == len(true)
    with mp.workdps(DIGITS):
        return max(float(abs(mpf(float(entry)) / value - 1)) for entry, value in zip(given, true, strict=True))
