"""Where two plans differ, field by field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from theodolite.plan.layer_json import embed_json, layer_json
from theodolite.plan.model import LayerPlan, ModelPlan


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One field in which two plans differ.

    Args:
        layers: the layers in which they differ so; empty for what is said of the model as a whole.
        field: its name, as the JSON of a plan has it; "scaling.factor" for a key of one that both have.
        one, other: the two values; of lists with a number per pair, how many differ and the pair that differs most.
    """

    layers: tuple[int, ...]
    field: str
    one: Any
    other: Any


def differences(one: ModelPlan, other: ModelPlan) -> tuple[Difference, ...]:
    """Where they differ: first what is said of the model, then of layers, those with the same difference together.

    Frequencies are compared at the lengths that the models state. `kind` is a name and is compared as one.
    """
    found: list[Difference] = []
    for field, get in (
        ("model_type", lambda plan: plan.model_type),
        ("max_position_embeddings", lambda plan: plan.max_position_embeddings),
        ("embed", embed_json),
        ("layers", lambda plan: len(plan.layers)),
    ):
        if get(one) != get(other):
            found.append(Difference(layers=(), field=field, one=get(one), other=get(other)))
    groups: dict[tuple[str, str, str], list[int]] = {}
    values: dict[tuple[str, str, str], tuple[Any, Any]] = {}
    pairs: dict[tuple[int, int], dict[tuple[str, str, str], tuple[Any, Any]]] = {}
    for i, (mine, theirs) in enumerate(zip(one.layers, other.layers, strict=False)):
        # Equal layers of a plan are one object, so each pair of kinds is compared once.
        here = (id(mine), id(theirs))
        if here not in pairs:
            pairs[here] = _fields(mine, theirs, one.max_position_embeddings, other.max_position_embeddings)
        for key, pair in pairs[here].items():
            groups.setdefault(key, []).append(i)
            values[key] = pair
    found += [
        Difference(layers=tuple(layers), field=key[0], one=values[key][0], other=values[key][1])
        for key, layers in groups.items()
    ]
    return tuple(found)


def _fields(
    mine: LayerPlan, theirs: LayerPlan, length: int | None, other_length: int | None
) -> dict[tuple[str, str, str], tuple[Any, Any]]:
    """The fields in which two layers differ, by name and values."""
    if mine == theirs and length == other_length:
        return {}
    found = {}
    ours, yours = layer_json(mine, length), layer_json(theirs, other_length)
    for field in ours:
        if ours[field] != yours[field]:
            for name, pair in _pairs(field, ours[field], yours[field]):
                found[name, repr(pair[0]), repr(pair[1])] = pair
    return found


def _pairs(field: str, one: Any, other: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """What differs within a field: of two mappings of one kind the keys, of two lists of numbers how many."""
    if field == "inv_freq":
        yield field, _frequencies(one, other)
    elif isinstance(one, dict) and isinstance(other, dict) and _kind(one) == _kind(other):
        for key in dict.fromkeys((*one, *other)):
            mine, theirs = one.get(key), other.get(key)
            if mine != theirs:
                lists = isinstance(mine, list) and isinstance(theirs, list) and _numbers(mine + theirs)
                yield f"{field}.{key}", _frequencies(mine, theirs) if lists else (mine, theirs)
    else:
        yield field, (one, other)


def _kind(mapping: dict[str, Any]) -> Any:
    return mapping.get("rope_type", mapping.get("kind"))


def _numbers(values: list[Any]) -> bool:
    return all(isinstance(value, (int, float)) for value in values)


def _frequencies(one: list[float] | None, other: list[float] | None) -> tuple[Any, Any]:
    """Two lists of a number per pair, in a few words where both are there and equally long."""
    if one is None or other is None or len(one) != len(other):
        return tuple(None if given is None else f"{len(given)} pairs" for given in (one, other))  # type: ignore[return-value]
    mine, theirs = np.asarray(one), np.asarray(other)
    with np.errstate(all="ignore"):
        apart = np.abs(np.log(mine) - np.log(theirs))
    pair = int(np.nanargmax(np.where(np.isnan(apart), 0.0, apart)))
    where = f"{np.count_nonzero(mine != theirs)} of {len(mine)} pairs differ, most pair {pair}"
    return f"{where}: {float(mine[pair])!r}", f"{where}: {float(theirs[pair])!r}"
