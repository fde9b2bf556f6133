"""What a survey is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from theodolite.plan import ModelPlan
from theodolite.plan.errors import PlanError, require_whole
from theodolite.positions.checks import LARGEST_POSITION
from theodolite.survey.passages import LENGTH
from theodolite.survey.reach import Spread

DEFAULT_SCALINGS = "none,linear,ntk,dynamic,yarn"
DEPTHS = (0.02, 0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A survey's settings; lengths are in tokens of the model.

    Args:
        out: the folder of results.
        texts: UTF-8 files, or books of the package.
        to: how far to go; 1.5 times the trained length by default.
        scalings: comma-separated, as `parse_scalings` takes them.
        passes: how many scalings besides the model as shipped are read in full, best by reach first.
        spread: the form of the spread reach.
        far: whether the far reach is measured, to four times the trained length.
        depths: where in the text recall is tried, 0 the beginning and 1 the end.
        passages: passages a cell of recall.
        passkey: whether a passkey is hidden and asked for.
        join: one document of all texts.
    """

    out: Path
    texts: tuple[str, ...] = ("moby-dick",)
    to: int | None = None
    scalings: str = DEFAULT_SCALINGS
    passes: int = 2
    spread: Spread = field(default_factory=lambda: Spread(tokens=4096, chunk=256, passages=2))
    far: bool = True
    depths: tuple[float, ...] = DEPTHS
    passages: int = 3
    passkey: bool = False
    join: bool = False

    def __post_init__(self) -> None:
        require_whole(to=self.to, passages=self.passages)
        if self.passes < 0:
            raise PlanError("passes", self.passes, "0 for none, or how many scalings to read in full")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise PlanError("depths", depth, "between 0 (the beginning) and 1 (the end)")


def checked_length(settings: Settings, plan: ModelPlan) -> int:
    """How far the survey goes, in tokens: as asked, or 1.5 times the trained length.

    Raises:
        PlanError: the model does not say its length, or one of the two lengths is too short to measure anything on.
    """
    trained = plan.max_position_embeddings
    least = 8 * LENGTH
    if trained is None or trained < least:
        raise PlanError(
            "max_position_embeddings", trained, f"a survey needs a trained length of at least {least} tokens"
        )
    to = settings.to if settings.to is not None else trained + trained // 2
    shortest = max(least, 2 * settings.passages * LENGTH)
    if to < shortest:
        raise PlanError("to", to, f"at least {shortest} tokens")
    if settings.passages * LENGTH > checkpoints(trained, to)[0]:
        raise PlanError(
            "passages", settings.passages, f"at most {checkpoints(trained, to)[0] // LENGTH} fit the shortest length"
        )
    if to + 4 * trained > LARGEST_POSITION:
        raise PlanError("to", to, f"positions end at {LARGEST_POSITION}, four times the trained length included")
    return to


def checkpoints(trained: int, to: int) -> list[int]:
    """Lengths at which recall is tried: a short one, the trained length, then `to` in at most four steps.

    The short one is a quarter of the trained length: there the model is at its best, and trying costs least. It is
    half where a quarter would be no length to speak of.
    """
    if to <= trained:
        return sorted({max(to // 2, 1), to})
    short = trained // 4 if trained // 4 >= 8 * LENGTH else trained // 2
    steps = min(4, max(1, round((to - trained) / (trained / 2))))
    return sorted({short, trained, *(trained + round((to - trained) * i / steps) for i in range(1, steps + 1))})
