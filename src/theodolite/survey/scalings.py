"""Scalings by name, as the command line takes them: `yarn`, `yarn:2`, `yarn:2:beta_fast=64:truncate=false`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from theodolite.plan import NTK, DynamicNTK, Linear, Llama3, ModelPlan, PlanError, Scaling, YaRN

AS_SHIPPED = "none"
"""The name of the model's own plan among the candidates."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A scaling under test: `name` as the user wrote it, and the plan that it makes of the model's own."""

    name: str
    plan: ModelPlan


def _yarn_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by the names of the dataclass, where `attention_factor` is the answer and not what was given."""
    return {"attention_factor_given" if name == "attention_factor" else name: settings[name] for name in settings}


def _yarn(factor: float, length: int, **settings: Any) -> Scaling:
    return YaRN(factor=factor, original_max_position_embeddings=length, **_yarn_settings(settings))


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


def require_known(text: str) -> None:
    """Raise PlanError for a name that no scaling has: what can be told before a model is loaded."""
    for name in filter(None, (name.strip() for name in text.split(","))):
        if name.split(":")[0] not in (AS_SHIPPED, *_MAKERS):
            allowed = ", ".join((AS_SHIPPED, *_MAKERS))
            raise PlanError("scaling", name, f"allowed: {allowed}, each with a factor (yarn:2) if wanted")


def parse_scalings(
    text: str,
    plan: ModelPlan,
    *,
    to: int,
    strict: bool = True,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Candidate]:
    """The candidates of a comma-separated list; the model as shipped is always the first, and none stands twice.

    Args:
        strict: false leaves out a scaling that this model cannot take.
        tell: is given a line for each that is left out, and why.

    Raises:
        PlanError: an unknown name or setting, a factor out of range, or (if `strict`) a scaling that the model cannot
            take.
    """
    require_known(text)
    names = [name.strip() for name in text.split(",") if name.strip()]
    candidates = {plan: Candidate(name=AS_SHIPPED, plan=plan)}
    for name in names:
        if name == AS_SHIPPED:
            continue
        scaling = _parse(name, plan, to)
        try:
            scaled = plan.with_scaling(scaling)
        except PlanError as error:
            if strict:
                raise
            tell(f"left out: {name}; {error.allowed}")
        else:
            same = candidates.setdefault(scaled, Candidate(name=name, plan=scaled))
            if same.name != name:
                tell(f"left out: {name}, which is the same as {same.name}")
    return list(candidates.values())


def _parse(text: str, plan: ModelPlan, to: int) -> Scaling:
    kind, *rest = text.split(":")
    length = plan.max_position_embeddings
    if length is None:
        raise PlanError("max_position_embeddings", None, "the model's config must say its trained length")
    factor, settings = default_factor(length, to), {}
    for i, part in enumerate(rest):
        key, equals, value = part.partition("=")
        if equals and key in settings:
            raise PlanError("scaling", text, f"{key!r} stands twice")
        if equals:
            settings[key] = _value(text, value)
        elif i == 0:
            factor = _value(text, part)
        else:
            raise PlanError("scaling", text, "a factor comes first, then settings as key=value: yarn:2:beta_fast=64")
    try:
        wanted = _MAKERS[kind](factor, length, **settings)
    except TypeError:
        raise PlanError("scaling", text, f"{kind!r} has no setting {', '.join(map(repr, settings))}") from None
    native = next((r.scaling for r in plan.rotaries if isinstance(r.scaling, YaRN)), None)
    if isinstance(wanted, YaRN) and native is not None:
        # A factor is wanted over the stated length, which may have the native factor in it or not (Qwen 2.5's has not).
        already = length / native.original_max_position_embeddings
        return replace(native, factor=wanted.factor * already, **_yarn_settings(settings))
    return wanted


def _value(text: str, value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        raise PlanError("scaling", text, f"{value!r} is no number, true or false") from None
