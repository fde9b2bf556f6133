"""What a comparison is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from theodolite.compare.policies import PolicySpec, read_policy
from theodolite.compare.training import Training
from theodolite.plan.errors import PlanError, require_whole

POLICIES = ("nope", "learned", "sinusoidal", "rope", "rope+logn", "t5", "alibi", "kerple", "fire")
QUICK_POLICIES = ("sinusoidal", "rope", "t5", "alibi")
SCALINGS = "linear,ntk,yarn,self-extend,rerope,dca"
FINE_TUNED = "none,linear,ntk,yarn"
STYLES = ("plain", "pose")
TIMES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of the decoder that hosts the policies.

    Args:
        hidden_size: channels between layers.
        num_layers: layers.
        num_heads: heads of queries, and of keys.
        qk_norm: whether queries and keys are normed before they are turned.
    """

    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    qk_norm: bool = False

    def __post_init__(self) -> None:
        require_whole(hidden_size=self.hidden_size, num_layers=self.num_layers, num_heads=self.num_heads)
        if self.hidden_size % (2 * self.num_heads):
            raise PlanError("hidden_size", self.hidden_size, f"a multiple of twice the {self.num_heads} heads")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A comparison's settings; lengths are in tokens.

    Args:
        out: the folder of results.
        policies: names, as `read_policy` takes them; the first is what the others are held against.
        seeds: each policy is trained once with each.
        size: of the model.
        training: at its `length`; what a policy learns there is what is measured at longer ones.
        times: lengths of the test, as multiples of the training length, ascending from 1.
        rows: of the test, each of the longest length.
        scalings: what trained rotary models are run under as they are, as a survey takes them; "" for nothing.
        fine_tuned: what they are run under after more training; "" for nothing.
        fine_tuning: how many steps more.
        styles: "plain" trains on rows of the length that is aimed at, "pose" on rows of the training length whose
            positions skip.
        reach: the multiple that fine-tuning and scalings without a factor aim at; the last of `times` by default.
    """

    out: Path
    policies: tuple[str, ...] = POLICIES
    seeds: tuple[int, ...] = (0, 1, 2)
    size: Size = field(default_factory=Size)
    training: Training = field(default_factory=Training)
    times: tuple[int, ...] = TIMES
    rows: int = 64
    scalings: str = SCALINGS
    fine_tuned: str = FINE_TUNED
    fine_tuning: int = 0
    styles: tuple[str, ...] = STYLES
    reach: int | None = None

    def __post_init__(self) -> None:
        require_whole(rows=self.rows, reach=self.reach)
        require_whole(fine_tuning=self.fine_tuning, least=0)
        if not self.policies:
            raise PlanError("policies", self.policies, "give one at least")
        canonical = [spec.name for spec in self.specs]
        twice = {name for name in canonical if canonical.count(name) > 1}
        if twice:
            raise PlanError("policies", ",".join(self.policies), f"{', '.join(sorted(twice))} stands twice")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise PlanError("seeds", self.seeds, "whole numbers from 0, none twice, one at least")
        if self.times[:1] != (1,) or list(self.times) != sorted(set(self.times)):
            raise PlanError("times", self.times, "multiples of the training length, ascending from 1")
        if not set(self.styles) <= set(STYLES):
            raise PlanError("styles", self.styles, f"of {', '.join(STYLES)}")

    @property
    def specs(self) -> list[PolicySpec]:
        return [read_policy(name) for name in self.policies]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the test (tokens)."""
        return tuple(self.training.length * n for n in self.times)

    @property
    def longest(self) -> int:
        return self.lengths[-1]

    @property
    def aim(self) -> int:
        """The length (tokens) that scalings and fine-tuning are for."""
        return self.training.length * (self.times[-1] if self.reach is None else self.reach)

    @property
    def tail(self) -> int:
        """Tokens at the end of a window that count where it slides: its stride."""
        return max(1, self.training.length // 4)
