"""Means over seeds and over differences at equal seeds, with what they can be trusted to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_SEEDS = 3
"""Fewer show no spread worth the name, and nothing is claimed from them."""

# The 97.5 % points of Student's t by degrees of freedom, from 1.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_NORMAL = 1.960


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over seeds.

    Args:
        by_seed: one number a seed.
        mean: of them.
        interval: where the mean over all possible seeds lies with 95 %, by Student's t; None for fewer than two seeds.
    """

    by_seed: tuple[float, ...]
    mean: float
    interval: tuple[float, float] | None

    @property
    def significant(self) -> bool:
        """Whether there are seeds enough, and 0 lies outside of the interval."""
        if len(self.by_seed) < LEAST_SEEDS or self.interval is None:
            return False
        return not self.interval[0] <= 0.0 <= self.interval[1]


def over_seeds(by_seed: Sequence[float]) -> Estimate:
    """The mean of one number a seed, all finite.

    Raises:
        ValueError: no seed, or a number that is not finite.
    """
    values = np.asarray(by_seed, np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError(f"by_seed: got {list(by_seed)}; give one finite number a seed")
    mean = float(values.mean())
    interval = None
    if len(values) > 1:
        half = student(len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
        interval = (mean - half, mean + half)
    return Estimate(by_seed=tuple(map(float, values)), mean=mean, interval=interval)


def paired(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """The mean of `first` - `second` at equal seeds: what both have in common (weights, batches, rows) drops out."""
    if len(first) != len(second):
        raise ValueError(f"second: got {len(second)} seeds for {len(first)}; pairs have equal seeds")
    return over_seeds(np.subtract(np.asarray(first, np.float64), np.asarray(second, np.float64)).tolist())


def student(freedom: int) -> float:
    """The 97.5 % point of Student's t; above 15 degrees of freedom by its expansion (to 1e-3)."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = _NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
