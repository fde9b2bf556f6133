"""What a search holds in hand, before it is put in words."""

from __future__ import annotations

from dataclasses import dataclass

from theodolite.plan import ModelPlan
from theodolite.search.confirm import Confirmed
from theodolite.search.settings import Texts
from theodolite.search.trials import Measure


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One frequency map that was tried; `space` is "named" for those that have a name."""

    name: str
    space: str
    point: tuple[float, ...]
    plan: ModelPlan
    measure: Measure
    cost: float


@dataclass(frozen=True, kw_only=True)
class Searched:
    """All that a search measured, before it is put in words.

    Args:
        copies: whether the model continues passages from near by, so that copying measures anything.
        short: nats a token of short text above which a map pays: the least that a rival has.
        rivals: the named scaling of each kind that copies best, best first.
        winner: of the finalists the one that costs least on text that the search did not see.
        confirmed: by name, the winner's and the rivals'; the winner's name is "found".
    """

    trained: int
    texts: Texts
    copies: bool
    short: float
    trials: list[Trial]
    left_out: dict[str, str]
    rivals: list[Trial]
    finalists: list[tuple[Trial, float]]
    winner: Trial
    lengths: list[int]
    confirmed: dict[str, Confirmed]
