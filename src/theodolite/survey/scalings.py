"""Scalings by name, as the command line takes them: `yarn`, `yarn:2`, `yarn:2:beta_fast=64:truncate=false`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from theodolite.plan import NTK, DynamicNTK, Linear, Llama3, ModelPlan, PlanError, Scaling, YaRN

AS_SHIPPED = "none"
"""The name of the model's own plan among the candidates."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A scaling under test: `name` as the user wrote it, and the plan that it makes of the model's own."""

    name: str
    plan: ModelPlan


def _yarn(factor: float, length: int, **more: Any) -> Scaling:
    # What configs call attention_factor is the dataclass's given value: the answer has that name there.
    given = {"attention_factor_given": more.pop("attention_factor")} if "attention_factor" in more else {}
    return YaRN(factor=factor, original_max_position_embeddings=length, **given, **more)


_MAKERS: dict[str, Callable[..., Scaling]] = {
    "linear": lambda factor, length: Linear(factor=factor),
    "ntk": lambda factor, length: NTK(factor=factor),
    "dynamic": lambda factor, length: DynamicNTK(factor=factor, original_max_position_embeddings=length),
    "yarn": _yarn,
    "llama3": lambda factor, length, low_freq_factor=1.0, high_freq_factor=4.0: Llama3(
        factor=factor,
        original_max_position_embeddings=length,
        low_freq_factor=low_freq_factor,
        high_freq_factor=high_freq_factor,
    ),
}


def default_factor(trained_length: int, to: int) -> float:
    """The factor of a scaling that gives none: the whole number at or above `to / trained_length`, at least 2.

    A factor of exactly the ratio stretches what the model knows to exactly that length, and models rarely
    recall from the last of it.
    """
    return float(max(2, math.ceil(to / trained_length)))


def parse_scalings(text: str, plan: ModelPlan, *, to: int) -> list[Candidate]:
    """The candidates of a comma-separated list; the model as shipped is always the first.

    Raises:
        PlanError: an unknown name or setting, a factor out of range, a scaling that the model cannot take.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    candidates = [Candidate(name=AS_SHIPPED, plan=plan)]
    for name in dict.fromkeys(names):
        if name != AS_SHIPPED:
            candidates.append(Candidate(name=name, plan=plan.with_scaling(_parse(name, plan, to))))
    return candidates


def _parse(text: str, plan: ModelPlan, to: int) -> Scaling:
    kind, *rest = text.split(":")
    if kind not in _MAKERS:
        raise PlanError(
            "scaling", text, f"allowed: {AS_SHIPPED}, {', '.join(_MAKERS)}, each with a factor (yarn:2) if wanted"
        )
    length = plan.max_position_embeddings
    if length is None:
        raise PlanError("max_position_embeddings", None, "the model's config must say its trained length")
    factor, settings = default_factor(length, to), {}
    for i, part in enumerate(rest):
        key, equals, value = part.partition("=")
        if equals:
            settings[key] = _value(text, value)
        elif i == 0:
            factor = _value(text, part)
        else:
            raise PlanError("scaling", text, "a factor comes first, then settings as key=value: yarn:2:beta_fast=64")
    try:
        return _MAKERS[kind](factor, length, **settings)
    except TypeError:
        raise PlanError("scaling", text, f"{kind!r} has no setting {', '.join(map(repr, settings))}") from None


def _value(text: str, value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        raise PlanError("scaling", text, f"{value!r} is no number, true or false") from None
