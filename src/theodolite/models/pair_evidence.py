"""Which channels turn together, from query and key weights alone.

A rotation enters the score of a pair of channels (a, b) by two numbers of the projections' rows: q_a.k_a + q_b.k_b goes
with the cosine of the distance, and q_a.k_b - q_b.k_a with its sine. Training gives the second a size where a and b
turn together. So its size, ranked among all pairs of channels of a head, says which pairs there are.

Where nothing turns, or nothing was learned, all pairings are alike: neither initialisation nor training know an order
of channels but that of the pairs. So the sum over a layout's pairs is compared with that over random pairings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Evidence:
    """Sums of pair scores for the two layouts, less what a random pairing of channels would have; they add up.

    Args:
        halves, interleaved: the sum over pairs less its mean over all pairings.
        variance: of that sum, over all pairings.
        mean: of that sum before the mean is taken off.
    """

    halves: float = 0.0
    interleaved: float = 0.0
    variance: float = 0.0
    mean: float = 0.0

    def __add__(self, other: Evidence) -> Evidence:
        return Evidence(*(getattr(self, name) + getattr(other, name) for name in vars(self)))

    @property
    def deviations(self) -> tuple[float, float]:
        """Halves and interleaved, in standard deviations of a random pairing; 0 where there is nothing to tell."""
        scale = self.variance**0.5
        return (self.halves / scale, self.interleaved / scale) if scale > 0 else (0.0, 0.0)


def pair_evidence(q: Array, k: Array) -> Evidence:
    """The evidence of one layer.

    Args:
        q: (H, R, E) rows of the query projection, of the channels that turn.
        k: (K, R, E) rows of the key projection; H is a multiple of K.
    """
    share = len(q) // len(k)
    groups = (_group(q[at * share : (at + 1) * share], k[at]) for at in range(len(k)))
    return sum(groups, Evidence())


def _group(queries: Iterable[Array], keys: Array) -> Evidence:
    """Query heads of one key head: their scores are added, for they share half of what the scores are made of."""
    scores = np.sum([_scores(q, keys) for q in queries], axis=0)
    channels = len(scores)
    if channels < 4:
        # One pair: both layouts are the same.
        return Evidence()
    mean, variance = _moments(scores)
    half = np.arange(channels // 2)
    halves = float(scores[half, half + channels // 2].sum())
    interleaved = float(scores[2 * half, 2 * half + 1].sum())
    return Evidence(halves - mean, interleaved - mean, variance, mean)


def _scores(q: Array, k: Array) -> Array:
    """(R, R), symmetric: the rank of (q_a.k_b - q_b.k_a)^2 among all pairs, as an exponential variable of mean 1."""
    products = _unit(q) @ _unit(k).T
    sine = np.abs(products - products.T)
    above = np.triu_indices(len(sine), 1)
    values = sine[above]
    scores = np.zeros(sine.shape)
    if values.size and values.max() > values.min() and np.isfinite(values).all():
        # Bounded, so that no single pair decides; and steep, for a few pairs of a head carry what it has learned.
        scores[above] = -np.log1p(-(_ranks(values) + 0.5) / len(values))
    return scores + scores.T


def _ranks(values: Array) -> Array:
    """From 0; equal values share the middle of theirs, for the order in which channels stand must decide nothing."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts + 1) / 2)[places])


def _unit(rows: Array) -> Array:
    rows = rows.astype(np.float64)
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    return np.asarray(np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0))


def _moments(scores: Array) -> tuple[float, float]:
    """Mean and variance of the sum of scores over a random perfect matching of the channels, exact."""
    channels = len(scores)
    total, squares = scores.sum() / 2, (scores**2).sum() / 2
    by_channel = (scores.sum(0) ** 2).sum()
    mean = total / (channels - 1)
    # A pair is in a matching with chance 1/(n-1), two pairs without a common channel with 1/((n-1)(n-3)).
    apart = total**2 + squares - by_channel
    second = squares / (channels - 1) + apart / ((channels - 1) * (channels - 3))
    return float(mean), max(0.0, float(second - mean**2))
