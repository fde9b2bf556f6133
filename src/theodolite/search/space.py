"""A space of frequency maps as a box, for an optimiser: what a point means, where to begin, how far to go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from theodolite.plan import ModelPlan, PlanError, Rotary, Scaling
from theodolite.plan.huggingface import rope_parameters

AMPLITUDES = (0.9, 1.4)
"""How far an attention factor may go, where the model's own is inside."""
_DIGITS = 6


@dataclass(frozen=True, kw_only=True)
class Coordinate:
    """One direction of a space, in its own units: where to begin, how far a first step goes, and the bounds."""

    name: str
    start: float
    step: float
    low: float
    high: float


class Space:
    """What the two spaces share.

    Args:
        plan: the model's own.
        to: the length (tokens) that is searched for.
    """

    name = ""

    def __init__(self, plan: ModelPlan, to: int) -> None:
        self.plan, self.to = plan, to
        self.trained = trained_length(plan)
        self.rotary = searched_rotary(plan)
        self.most = 4.0 * max(to / self.trained, 1.0)
        """The largest divisor of a frequency."""

    @property
    def coordinates(self) -> tuple[Coordinate, ...]:
        """The directions, in the order of a point."""
        raise NotImplementedError

    def plan_of(self, point: Sequence[float]) -> ModelPlan:
        """The plan that a point means; a point outside of the box is moved into it."""
        raise NotImplementedError

    def inside(self, point: Sequence[float]) -> list[float]:
        """A point, moved into the box."""
        limits = zip(point, self.coordinates, strict=True)
        return [min(max(float(x), c.low), c.high) for x, c in limits]

    def require_writable(self) -> None:
        """Raise PlanError where no config of this model's family can say what the search would find."""
        rope_parameters(self.plan_of([c.start for c in self.coordinates]))


def trained_length(plan: ModelPlan) -> int:
    """The length that a plan states (tokens).

    Raises:
        PlanError: it states none.
    """
    if plan.max_position_embeddings is None:
        raise PlanError("max_position_embeddings", None, "the model's config must say its trained length")
    return plan.max_position_embeddings


def searched_rotary(plan: ModelPlan) -> Rotary:
    """The rotary encoding that is searched: the one of all layers that see past the trained length.

    Raises:
        PlanError: there are several, or none.
    """
    if len(plan.scalable) != 1:
        # Raises the right sentence where there is none.
        plan.with_scaling(Scaling())
        raise PlanError(
            "layers", plan.model_type, f"{len(plan.scalable)} rotary encodings see far; one can be searched"
        )
    return plan.scalable[0]


def rounded(value: float) -> float:
    """Six significant digits, of all settings: what is measured is what a config will say."""
    return float(f"{value:.{_DIGITS}g}")


def amplitude(start: float) -> Coordinate:
    """The direction of the attention factor, from where it is."""
    low, high = AMPLITUDES
    return Coordinate(name="attention_factor", start=start, step=0.03, low=low, high=max(high, start + 0.2))
