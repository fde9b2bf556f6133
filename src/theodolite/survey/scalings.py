"""Scalings by name, as the command line takes them: `yarn`, `yarn:2`, `yarn:2:beta_fast=64:truncate=false`.

Maps of distances (`self-extend:4:window=1024`) stand in the same lists: survey/maps.py makes them. So does what a
search has found, by its folder (`search:DIR`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from theodolite.plan import NTK, DynamicNTK, Linear, Llama3, ModelPlan, PlanError, Scaling, YaRN
from theodolite.positions import RelativeMap
from theodolite.survey import found
from theodolite.survey.maps import MAPS, changes_nothing, make_map, require_mappable
from theodolite.survey.passages import LENGTH

AS_SHIPPED = "none"
"""The name of the model's own plan among the candidates."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What is tested: `name` as the user wrote it, the plan that it makes of the model's own, a map of distances."""

    name: str
    plan: ModelPlan
    relative: RelativeMap | None = None


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
        if name.split(":")[0] not in (AS_SHIPPED, *_MAKERS, *MAPS, found.NAME):
            scalings, maps = ", ".join((AS_SHIPPED, *_MAKERS)), ", ".join(MAPS)
            allowed = (
                f"allowed: {scalings}, each with a factor (yarn:2) if wanted; and {maps}, each with settings "
                f"(self-extend:4:window=1024) if wanted; and what a search has found ({found.NAME}:DIR)"
            )
            raise PlanError("scaling", name, allowed)


def names_map(text: str) -> bool:
    """Whether a map of distances is among the names of a comma-separated list."""
    return any(name.strip().split(":")[0] in MAPS for name in text.split(","))


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
        to: tokens to be read; factors and settings that are not given follow from it.
        strict: false leaves out a scaling that this model cannot take.
        tell: is given a line for each that is left out, and why, and for each with distances beyond the trained ones.

    Raises:
        PlanError: an unknown name or setting, a factor out of range, or (if `strict`) a scaling that the model cannot
            take.
    """
    require_known(text)
    names = [name.strip() for name in text.split(",") if name.strip()]
    shipped = Candidate(name=AS_SHIPPED, plan=plan)
    candidates: dict[tuple[ModelPlan, RelativeMap | None], Candidate] = {(plan, None): shipped}
    for name in names:
        if name == AS_SHIPPED:
            continue
        made = None if _is_found(name) else _parse(name, plan, to)
        try:
            candidate = _candidate(name, made, plan)
        except PlanError as error:
            if strict:
                raise
            tell(f"left out: {name}; {error.allowed}")
            continue
        still = candidate.relative is not None and _moves_nothing(candidate.relative, to)
        candidate = replace(candidate, relative=None) if still else candidate
        same = candidates.setdefault((candidate.plan, candidate.relative), candidate)
        if same.name != name:
            reason = ""
            if still:
                reason = f": it moves no distance in {to:,} tokens"
            elif isinstance(made, RelativeMap) and candidate.relative is None:
                reason = ": all layers have windows of their own, whose distances a map leaves as they are"
            tell(f"left out: {name}, which is the same as {same.name}{reason}")
        elif same is candidate and candidate.relative is not None:
            _tell_beyond(candidate, to, tell)
    return list(candidates.values())


def candidate_of(text: str, plan: ModelPlan, *, to: int, tell: Callable[[str], None] = lambda line: None) -> Candidate:
    """The one scaling that `text` names, as a summary has it, for a text of `to` tokens.

    `tell` is given a line for a map with distances beyond the trained ones, and for one that changes nothing.

    Raises:
        PlanError: no scaling or several, one unknown, or one that the model cannot take.
    """
    if not text.strip() or "," in text:
        raise PlanError("scaling", text, "give the name of one, for example yarn:2")
    name = text.strip()
    require_known(name)
    if name == AS_SHIPPED:
        return Candidate(name=name, plan=plan)
    candidate = _candidate(name, None if _is_found(name) else _parse(name, plan, to), plan)
    if candidate.relative is not None:
        _tell_beyond(candidate, to, tell)
    return candidate


def with_factor(candidate: Candidate, factor: float) -> str:
    """A scaling's name with the factor that it was given, which a name without one would take from another length."""
    kind, *rest = candidate.name.split(":")
    given = bool(rest) and ("=" not in rest[0] or _is_found(candidate.name))
    if candidate.name == AS_SHIPPED or candidate.relative is not None or given:
        return candidate.name
    return ":".join([kind, f"{factor:g}", *rest])


def _is_found(name: str) -> bool:
    return name.split(":")[0] == found.NAME


def _candidate(name: str, made: Scaling | RelativeMap | None, plan: ModelPlan) -> Candidate:
    if _is_found(name):
        return Candidate(name=name, plan=found.read_found(name.partition(":")[2], plan))
    if isinstance(made, Scaling):
        return Candidate(name=name, plan=plan.with_scaling(made))
    require_mappable(plan, name)
    return Candidate(name=name, plan=plan, relative=None if changes_nothing(plan) else made)


def _moves_nothing(relative: RelativeMap, to: int) -> bool:
    """Whether all distances in `to` tokens and a passage after them stay: the longest does, and maps only shorten."""
    return relative.largest_distance(to + LENGTH) >= to + LENGTH - 1


def _tell_beyond(candidate: Candidate, to: int, tell: Callable[[str], None]) -> None:
    """Say so where a map that a user has set leaves distances that the model was not trained for."""
    assert candidate.relative is not None
    trained, furthest = candidate.plan.max_position_embeddings, candidate.relative.largest_distance(to)
    if trained is not None and furthest > trained - 1:
        name = candidate.name
        tell(f"{name}: distances to {furthest:,.0f} in {to:,} tokens, and those trained end at {trained - 1:,}")


def _parse(text: str, plan: ModelPlan, to: int) -> Scaling | RelativeMap | None:
    """The scaling or the map that `text` names; None for a map that leaves all distances as they are."""
    kind, number, settings = _parts(text)
    length = plan.max_position_embeddings
    if length is None:
        raise PlanError("max_position_embeddings", None, "the model's config must say its trained length")
    if kind in MAPS:
        # A passage that is begun again at the end stands after the text.
        return make_map(text, number, settings, trained=length, tokens=to + LENGTH)
    factor = default_factor(length, to) if number is None else number
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


def _parts(text: str) -> tuple[str, Any, dict[str, Any]]:
    """A name's kind, its number (None without one) and its settings: ("yarn", 2, {"beta_fast": 64})."""
    kind, *rest = text.split(":")
    number, settings = None, {}
    for i, part in enumerate(rest):
        key, equals, value = part.partition("=")
        if equals and key in settings:
            raise PlanError("scaling", text, f"{key!r} stands twice")
        if equals:
            settings[key] = _value(text, value)
        elif i == 0:
            number = _value(text, part)
            if number is None:
                raise PlanError("scaling", text, f"{part!r} is no number")
        else:
            raise PlanError("scaling", text, "a factor comes first, then settings as key=value: yarn:2:beta_fast=64")
    return kind, number, settings


def _value(text: str, value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        raise PlanError("scaling", text, f"{value!r} is no number, true or false") from None
