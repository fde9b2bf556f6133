"""Maps of distances by name, as the command line takes them: `self-extend`, `self-extend:4:window=1024`.

What is not given follows from the trained length L and the tokens to be read: no distance is longer than L - 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from itertools import count
from typing import Any

from theodolite.plan import ModelPlan, PlanError
from theodolite.positions import AttentionSinks, DualChunk, LeakyReRoPE, LMInfinite, RelativeMap, ReRoPE, SelfExtend
from theodolite.positions.checks import LARGEST_POSITION, require_count

MAPS: dict[str, type[RelativeMap]] = {
    "self-extend": SelfExtend,
    "dca": DualChunk,
    "rerope": ReRoPE,
    "leaky-rerope": LeakyReRoPE,
    "sinks": AttentionSinks,
    "lm-infinite": LMInfinite,
}
"""Maps by the names that the command line has for them."""

# What a number means that stands without a name.
_NUMBERS = {"self-extend": "group_size", "leaky-rerope": "factor", "sinks": "sinks", "lm-infinite": "sinks"}
_SINKS = 4


def require_mappable(plan: ModelPlan, text: str) -> None:
    """Raise PlanError for a model whose distances a map cannot change."""
    for layer in plan.layers:
        if layer.rotate is None:
            raise PlanError("scaling", text, "this model has layers that turn nothing, which no map changes")
        if layer.bias is not None:
            raise PlanError("scaling", text, "this model has biases of the distance, which a map does not change")
        if layer.rotate.mrope_section:
            raise PlanError("scaling", text, "this model turns by positions on several axes, and a map knows one")


def changes_nothing(plan: ModelPlan) -> bool:
    """Whether all layers have windows of their own, which keep their true distances under any map."""
    return all(layer.mask.reach is not None for layer in plan.layers)


def make_map(text: str, number: Any, settings: Mapping[str, Any], *, trained: int, tokens: int) -> RelativeMap | None:
    """The map that `text` names, in its plainest form; None for one that leaves all distances as they are.

    Args:
        number: the one that stands without a name; None if there is none.
        settings: by field of the map.
        trained: the model's trained length L.
        tokens: how many are to be read.

    Raises:
        PlanError: a setting that the map does not have, or out of range.
    """
    kind = text.split(":")[0]
    given = dict(settings)
    if number is not None:
        name = _NUMBERS.get(kind)
        if name is None:
            raise PlanError("scaling", text, f"{kind!r} has no number; its settings are {_settings_of(kind)}")
        if name in given:
            raise PlanError("scaling", text, f"{name!r} stands twice")
        given[name] = number
    unknown = given.keys() - {field.name for field in fields(MAPS[kind])}  # type: ignore[arg-type]
    if unknown:
        named = ", ".join(map(repr, sorted(unknown)))
        raise PlanError("scaling", text, f"{kind!r} has no setting {named}; it has {_settings_of(kind)}")
    try:
        for name, value in given.items():
            _require_in_range(name, value)
        return _plainest(MAPS[kind](**_with_defaults(kind, given, trained, tokens)))
    except ValueError as error:
        raise PlanError("scaling", text, str(error)) from None


def _settings_of(kind: str) -> str:
    return ", ".join(f"{field.name}=" for field in fields(MAPS[kind]))  # type: ignore[arg-type]


def _require_in_range(name: str, value: Any) -> None:
    if name != "factor":
        require_count(name, value, least=0)
    elif isinstance(value, (bool, str, list, dict)) or value is None:
        raise ValueError(f"factor: got {value!r}; give a number of at least 1")
    if value > LARGEST_POSITION and value != math.inf:
        raise ValueError(f"{name}: got {value}; it must be at most {LARGEST_POSITION}, where positions end")


def _with_defaults(kind: str, given: dict[str, Any], trained: int, tokens: int) -> dict[str, Any]:
    if kind == "dca":
        # ChunkLlama's proportions: three quarters and a sixteenth of the trained length.
        chunk_size = given.get("chunk_size", trained * 3 // 4)
        return {"chunk_size": chunk_size, "local_size": max(1, chunk_size // 12), **given}
    if kind in ("sinks", "lm-infinite"):
        sinks = given.get("sinks", _SINKS)
        # As many keys as in training, the first ones among them.
        return {"sinks": sinks, "window": max(trained - sinks, 1), **given}
    window = given.get("window", trained // 2)
    made = {"window": window, **given}
    if kind == "self-extend" and "group_size" not in given:
        made["group_size"] = _smallest_group(window, trained, tokens)
    if kind == "leaky-rerope" and "factor" not in given:
        made["factor"] = _smallest_factor(window, trained, tokens)
    return made


def _smallest_group(window: int, trained: int, tokens: int) -> int:
    """The smallest group, of at least 2, with which no distance is beyond the trained ones; 2 where none is."""
    if not 0 < window < trained:
        return 2
    # No smaller one fits; rounding makes some above it fail.
    least = max(2, (tokens - 1 - window) // (trained - window))
    groups = (SelfExtend(window=window, group_size=size) for size in count(least))
    return next(made.group_size for made in groups if made.largest_distance(tokens) < trained)


def _smallest_factor(window: int, trained: int, tokens: int) -> float:
    """The smallest whole factor, of at least 2, with which no distance is beyond the trained ones; 2 where none is."""
    room = trained - 1 - window
    return 2.0 if room < 1 else float(max(2, -((window + 1 - tokens) // room)))


def _plainest(made: RelativeMap) -> RelativeMap | None:
    """The one form of all that set every pair at the same distance; None for the true distances."""
    if isinstance(made, SelfExtend) and made.group_size == 1:
        return None
    if isinstance(made, LeakyReRoPE):
        if made.factor == 1:
            return None
        return ReRoPE(window=made.window) if math.isinf(made.factor) else replace(made, factor=float(made.factor))
    if isinstance(made, DualChunk) and made.pinned == made.chunk_size - 1:
        return replace(made, pinned=None)
    if isinstance(made, LMInfinite) and made.sinks == 0:
        return AttentionSinks(window=made.window, sinks=0)
    return made


def record(relative: RelativeMap) -> dict[str, Any]:
    """The map as plain data, its `kind` first: {"kind": "self_extend", "window": 4096, "group_size": 2}."""
    return {"kind": _name(relative).replace("-", "_"), **asdict(relative)}  # type: ignore[call-overload]


def spelled(relative: RelativeMap) -> str:
    """The map as the command line takes it, with every setting: "self-extend:2:window=4096"."""
    name = _name(relative)
    settings = {key: value for key, value in record(relative).items() if key != "kind" and value is not None}
    number = settings.pop(_NUMBERS[name], None) if name in _NUMBERS else None
    parts = [name, *([] if number is None else [_number(number)])]
    return ":".join([*parts, *(f"{key}={value}" for key, value in settings.items())])


def describe_map(relative: RelativeMap) -> str:
    """The map with its figures, in words."""
    match relative:
        case SelfExtend():
            return f"Self-Extend: groups of {relative.group_size:,} beyond {relative.window:,} tokens"
        case DualChunk():
            furthest = relative.largest_distance(LARGEST_POSITION)
            return (
                f"dual chunk attention: chunks of {relative.chunk_size:,} tokens, {relative.local_size:,} local, "
                f"no distance beyond {furthest:,}"
            )
        case ReRoPE():
            return f"ReRoPE: no distance beyond {relative.window:,} tokens"
        case LeakyReRoPE():
            return f"leaky ReRoPE: distances beyond {relative.window:,} tokens divided by {_number(relative.factor)}"
        case LMInfinite():
            return f"LM-Infinite: the last {relative.window:,} tokens and the first {relative.sinks:,}, no others"
        case AttentionSinks():
            return f"attention sinks: the last {relative.window:,} tokens and the first {relative.sinks:,}, no others"
    raise TypeError(f"{type(relative).__name__} has no words here")


def _name(relative: RelativeMap) -> str:
    return next(name for name, kind in MAPS.items() if type(relative) is kind)


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(value)
