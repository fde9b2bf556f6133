"""The space of what a YaRN config says: base, factor, the two betas, the attention factor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from theodolite.plan import ModelPlan, YaRN
from theodolite.search.space import Coordinate, Space, amplitude, rounded
from theodolite.survey.found import with_found

_WIDEST_BASE = 8.0
_BETAS_FAST, _BETAS_SLOW = (4.0, 128.0), (0.1, 4.0)


class YaRNSpace(Space):
    """Base, factor, betas and attention factor of YaRN over the model's own base; logarithms, but for the last."""

    name = "yarn"

    @property
    def coordinates(self) -> tuple[Coordinate, ...]:
        native, start = self.rotary.scaling, self._start
        box = [
            Coordinate(name="base", start=0.0, step=0.3, low=0.0, high=math.log(_WIDEST_BASE)),
            # What the model has already is the least: a native factor is widened, never taken back.
            _log("factor", start.factor, 0.25, getattr(native, "factor", 1.0), start.factor * 4),
            _log("beta_fast", start.beta_fast, 0.4, *_BETAS_FAST),
            _log("beta_slow", start.beta_slow, 0.4, *_BETAS_SLOW),
        ]
        if not self.rotary.trailing:
            box.append(amplitude(start.attention_factor()))
        return tuple(box)

    def plan_of(self, point: Sequence[float]) -> ModelPlan:
        start, inside = self._start, self.inside(point)
        base, factor, fast, slow = (math.exp(x) for x in inside[:4])
        scaling = replace(
            start,
            factor=rounded(factor),
            beta_fast=rounded(fast),
            beta_slow=min(rounded(slow), rounded(fast)),
            attention_factor_given=rounded(inside[4]) if len(inside) > 4 else start.attention_factor_given,
        )
        return with_found(self.plan, rounded(self.rotary.rope_theta * base), scaling)

    @property
    def _start(self) -> YaRN:
        native = self.rotary.scaling
        if isinstance(native, YaRN):
            return replace(native, factor=max(native.factor, self.to / native.original_max_position_embeddings))
        return YaRN(factor=max(self.to / self.trained, 1.0), original_max_position_embeddings=self.trained)


def _log(name: str, start: float, step: float, low: float, high: float) -> Coordinate:
    return Coordinate(
        name=name,
        start=min(max(math.log(start), math.log(low)), math.log(high)),
        step=step,
        low=math.log(low),
        high=math.log(high),
    )
