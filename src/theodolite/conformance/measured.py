"""A rotary table as it was found: the frequencies, amplitude and positions that are in its numbers.

Shapes: N positions, P pairs; float64 throughout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

_SEARCHED = 2**24


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cosines and sines (N, P) found at `positions` (N,), beside the frequencies (P,) and amplitude that are right.

    Args:
        table_eps: the rounding of the dtype that the table was given in.
        rope_theta: the base, for what its power costs in float32.
    """

    positions: Int64
    cos: Float64
    sin: Float64
    inv_freq: Float64
    amplitude: float
    rope_theta: float
    table_eps: float = 2.0**-24

    def allowed(self, inv_freq: Float64 | None = None) -> Float64:
        """What float32 frequencies, angles and one rounding of the result may cost, (N, P).

        The power theta^(-2i/D) of rounded numbers costs ln(theta) roundings, the rest of a frequency and the product
        with the position eight more; cosine, sine and amplitude two of the result.
        """
        angles = self.positions[:, None] * np.abs(self.inv_freq if inv_freq is None else inv_freq)
        roundings = (math.log(self.rope_theta) + 8) * 2.0**-24
        return np.asarray(self.amplitude * (np.minimum(angles * roundings, 2.0) + 4 * self.table_eps))

    def error(self, inv_freq: Float64, amplitude: float, positions: NDArray[np.generic] | None = None) -> Float64:
        """Distance of the table from the exact one of these settings, (N, P)."""
        angles = np.asarray(self.positions if positions is None else positions, dtype=np.float64)[:, None] * inv_freq
        return np.asarray(
            np.maximum(np.abs(self.cos - amplitude * np.cos(angles)), np.abs(self.sin - amplitude * np.sin(angles)))
        )

    def matches(
        self, inv_freq: Float64, amplitude: float | None = None, positions: NDArray[np.generic] | None = None
    ) -> bool:
        """Whether these settings explain the table to the rounding of float32."""
        found = self.error(inv_freq, self.amplitude if amplitude is None else amplitude, positions)
        return bool((found <= 2 * self.allowed(inv_freq)).all())

    def found_amplitude(self) -> float | None:
        """The number that multiplies cos and sin; None where it is not one number."""
        lengths = np.hypot(self.cos, self.sin)
        middle = float(np.median(lengths))
        return middle if np.abs(lengths - middle).max() <= 8 * self.table_eps * max(middle, 1e-30) else None

    def found_frequencies(self) -> Float64:
        """Radians a token of each pair (P,), read at position 1 and refined as far out as the angle stays below 1.5."""
        order = np.argsort(self.positions, kind="stable")
        angles = np.arctan2(self.sin, self.cos)
        found = np.full(self.inv_freq.shape, np.nan)
        for row in order:
            position = int(self.positions[row])
            if position == 0:
                continue
            near = np.isnan(found) | (np.abs(found) * position < 1.5)
            found = np.where(near, angles[row] / position, found)
        return found

    def found_positions(self) -> list[int] | None:
        """The position whose exact row each row is, (N,); None where some row is that of no position searched."""
        last = int(self.positions.max())
        limit = min(2 * last + 2, max(1, _SEARCHED // max(1, len(self.inv_freq))))
        candidates = np.arange(limit, dtype=np.float64)[:, None] * self.inv_freq
        cos, sin = self.amplitude * np.cos(candidates), self.amplitude * np.sin(candidates)
        found = []
        # Rows are looked for from the last on: a wrong one is told soonest far out.
        for row in range(len(self.positions))[::-1]:
            apart = np.maximum(np.abs(cos - self.cos[row]), np.abs(sin - self.sin[row])).max(-1)
            best = int(apart.argmin())
            roundings = (math.log(self.rope_theta) + 8) * 2.0**-23 * best
            if apart[best] > self.amplitude * (min(roundings, 0.5) + 8 * self.table_eps):
                return None
            found.append(best)
        return found[::-1]


def rounded(values: NDArray[np.generic], dtype: str) -> Float64:
    """Numbers rounded to "bfloat16" or "float16", by way of float32 as code does it."""
    single = np.asarray(values, dtype=np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return single.astype(np.float16).astype(np.float64)
    bits = single.view(np.uint32)
    # To the nearest, a tie to the even one.
    bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)
