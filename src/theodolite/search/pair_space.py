"""The space of a divisor for each pair of channels, and the attention factor: LongRoPE's form.

The divisors are free at a few knots, which lie where pairs turn so and so often in the trained length, and interpolated
between them; from the fastest pair to the slowest they never decrease.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from theodolite.plan import LongRoPE, ModelPlan, PlanError, Rotary, Scaling, YaRN
from theodolite.search.space import Coordinate, Space, amplitude, rounded
from theodolite.survey.found import with_found

Float64 = NDArray[np.float64]

_KNOTS = (64.0, 32.0, 16.0, 8.0, 4.0, 2.0, 1.0, 0.25)
"""Turns in the trained length."""


class PairSpace(Space):
    """A divisor for each pair's own frequency, and the attention factor.

    A point holds by how much the logarithm of the divisor grows from knot to knot, none of them below 0, so that the
    divisors never decrease; then the attention factor.

    Args:
        start: the plan to begin at; by default divisors of 1 for pairs that turn 32 times or more in the trained
            length, `to` over the trained length for those that turn once or less, and between in between.
    """

    name = "pairs"

    def __init__(self, plan: ModelPlan, to: int, start: ModelPlan | None = None) -> None:
        super().__init__(plan, to)
        own = self.rotary
        if own.scaling.score_factor() != 1.0 or own.trailing:
            raise PlanError(
                "scaling", own.scaling.rope_type, "latent attention has no divisors of its pairs in configs"
            )
        if own.live_pairs is not None:
            raise PlanError("live_pairs", own.live_pairs, "pairs that stand still have no divisors in configs")
        if own.rotary_dim < 4:
            raise PlanError("rotary_dim", own.rotary_dim, "divisors that rise need two pairs (4 channels)")
        self.frequencies = own.inv_freq(length=to)
        self._places = _knots(self.trained * self.frequencies / (2 * math.pi))
        given = None if start is None else start.scalable[0]
        if given is None:
            logs = self._ramp()
            self._amplitude = (
                own.attention_factor()
                * YaRN(
                    factor=max(to / self.trained, 1.0), original_max_position_embeddings=self.trained
                ).attention_factor()
            )
        else:
            logs = np.log(self.frequencies / given.inv_freq(length=to))
            self._amplitude = given.attention_factor()
        at_knots = np.maximum.accumulate(np.interp(self._places, np.arange(len(logs)), np.maximum(logs, 0.0)))
        self._rises = np.diff(at_knots, prepend=0.0)

    @property
    def coordinates(self) -> tuple[Coordinate, ...]:
        most = math.log(self.most)
        rises = [
            Coordinate(name=f"pair {place:.1f}", start=float(rise), step=0.02 + 0.15 * float(rise), low=0.0, high=most)
            for place, rise in zip(self._places, self._rises, strict=True)
        ]
        return (*rises, amplitude(self._amplitude))

    def divisors(self, point: Sequence[float]) -> Float64:
        """The divisors of the model's own frequencies, one a pair, fastest first: 1 or more, non-decreasing."""
        rises = np.asarray(self.inside(point)[:-1])
        at_knots = np.minimum(np.cumsum(rises), math.log(self.most))
        # The fastest pair is left alone; from there the divisor rises to that of the first knot.
        places, values = np.concatenate([[0.0], self._places]), np.concatenate([[0.0], at_knots])
        return np.asarray(np.exp(np.interp(np.arange(len(self.frequencies)), places, values)))

    def plan_of(self, point: Sequence[float]) -> ModelPlan:
        plain = Rotary(
            head_dim=self.rotary.head_dim, rope_theta=self.rotary.rope_theta, rotary_dim=self.rotary.rotary_dim
        ).inv_freq()
        factors = tuple(rounded(x) for x in plain / (self.frequencies / self.divisors(point)))
        scaling = LongRoPE(
            # One list for all lengths: keys that are cached stay right when a text grows past the trained one.
            short_factor=factors,
            long_factor=factors,
            original_max_position_embeddings=_original(self.rotary.scaling, self.trained),
            attention_factor_given=rounded(self.inside(point)[-1]),
        )
        return with_found(self.plan, self.rotary.rope_theta, scaling)

    def _ramp(self) -> Float64:
        turns = np.maximum(self.trained * self.frequencies / (2 * math.pi), 1e-12)
        share = np.clip(1.0 - np.log(turns) / math.log(32.0), 0.0, 1.0)
        return np.asarray(share * math.log(max(self.to / self.trained, 1.0)))


def _knots(turns: Float64) -> Float64:
    """Indices of pairs (fractional) that turn as often as the knots say, and the last pair; rising, none twice."""
    last = float(len(turns) - 1)
    # `np.interp` wants what it looks up to rise: slower pairs turn less often.
    inside = [knot for knot in _KNOTS if turns[-1] < knot < turns[0]]
    places = np.interp(-np.log(inside), -np.log(turns), np.arange(len(turns))) if inside else np.empty(0)
    return np.unique(np.append(places, last))


def _original(scaling: Scaling, trained: int) -> int:
    return int(getattr(scaling, "original_max_position_embeddings", trained))
