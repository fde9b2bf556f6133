"""A frequency map that a search has found: what its `search.json` says is to be applied, and to which model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from theodolite.plan import LongRoPE, ModelPlan, PlanError, Rotary, Scaling, YaRN
from theodolite.plan.json_object import read_object

NAME = "search"
"""`search:DIR` names what the search in the folder DIR has found."""
FILE = "search.json"
SCHEMA = "theodolite.search/1"
FOUND = "found"
"""The name, among those that were confirmed, of what was found."""

_SCALINGS: dict[str, type[Scaling]] = {kind.rope_type: kind for kind in (YaRN, LongRoPE)}
_LARGEST_FILE = 64_000_000


def with_found(plan: ModelPlan, rope_theta: float, scaling: Scaling) -> ModelPlan:
    """A plan whose layers that see far have this base, and this scaling in place of their own."""
    if isinstance(scaling, YaRN):
        # It moves latent attention's score scale along; a larger base then goes under it.
        plan = plan.with_scaling(scaling)
        return plan.with_rotary(replace(plan.scalable[0], rope_theta=rope_theta))
    return plan.with_rotary(replace(plan.scalable[0], rope_theta=rope_theta, scaling=scaling))


def recorded(shipped: Rotary, found: Rotary) -> dict[str, Any]:
    """What `read_found` needs, as plain data: the frequencies it was found for, the base and the scaling."""
    given = {name: value for name, value in asdict(found.scaling).items() if value is not None}
    scaling = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    return {
        "shipped_inv_freq": _frequencies(shipped),
        "rope_theta": found.rope_theta,
        "scaling": {"rope_type": found.scaling.rope_type, **scaling},
    }


def folder_of(name: str) -> str | None:
    """The folder of a scaling that is named `search:DIR`; None of any other name."""
    kind, _, folder = name.strip().partition(":")
    return folder if kind == NAME else None


def read_result(folder: str) -> dict[str, Any]:
    """What a search wrote.

    Raises:
        PlanError: there is no such search, or the file is damaged or of another version.
    """
    path, name = Path(folder) / FILE, f"{NAME}:{folder}"
    try:
        told = read_object(path, largest=_LARGEST_FILE)
    except (OSError, ValueError) as error:
        raise PlanError("scaling", name, f"{path} cannot be read as a result of a search: {error}") from None
    if told.get("schema") != SCHEMA:
        raise PlanError("scaling", name, f"{path} is no result of a search of this version")
    return told


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """What full passes gave of what a search has found, checked.

    Args:
        fingerprint: of the model's files.
        to: the length (tokens) that was searched for.
        lengths: those confirmed, rising.
        recall: by length and name, "found" and the named scalings that it was held against.
        short: nats a token of short text, by name.
        texts: name, tokens and SHA-256 of each text.
        won: whether it is better than each of them.
    """

    version: str
    fingerprint: str
    dtype: str
    to: int
    lengths: tuple[int, ...]
    recall: Mapping[int, Mapping[str, float]]
    short: Mapping[str, float]
    texts: tuple[tuple[str, int, str], ...]
    won: bool
    why: str


def read_confirmation(folder: str) -> Confirmation:
    """What a search says of what it found.

    Raises:
        PlanError: there is no such search, or it is damaged.
    """
    told, name = read_result(folder), f"{NAME}:{folder}"
    try:
        details, confirmed = told["model_details"], told["confirmed"]
        names = (FOUND, *told["rivals"])
        recall = {
            int(entry["length"]): {one: float(entry["recall"][one]) for one in names} for entry in confirmed["lengths"]
        }
        return Confirmation(
            version=str(told["theodolite"]),
            fingerprint=str(details["fingerprint"]),
            dtype=str(details["dtype"]),
            to=int(told["to"]),
            lengths=tuple(sorted(recall)),
            recall=recall,
            short={one: float(confirmed["short"][one]) for one in names},
            texts=tuple((str(x["name"]), int(x["tokens"]), str(x["sha256"])) for x in told["texts"]["confirm"]),
            won=told["won"] is True and bool(recall),
            why=str(told["why"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{Path(folder) / FILE} cannot be read as a result of a search: {error!r}"
        raise PlanError("scaling", name, reason) from None


def read_found(folder: str, plan: ModelPlan) -> ModelPlan:
    """The plan that the search in `folder` has found, over the model's own.

    Raises:
        PlanError: there is no such search, it is damaged, or it was made for other frequencies.
    """
    told, name = read_result(folder), f"{NAME}:{folder}"
    try:
        winner = told["winner"]
        scaling = dict(winner["scaling"])
        kind = _SCALINGS[scaling.pop("rope_type")]
        made = kind(**{key: tuple(x) if isinstance(x, list) else x for key, x in scaling.items()})
        theta, before = float(winner["rope_theta"]), np.asarray(winner["shipped_inv_freq"], dtype=np.float64)
    except PlanError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{Path(folder) / FILE} cannot be read as a result of a search: {error!r}"
        raise PlanError("scaling", name, reason) from None
    if len(plan.scalable) != 1 or not np.array_equal(before, np.asarray(_frequencies(plan.scalable[0]))):
        raise PlanError("scaling", name, "it was found for a model with other frequencies")
    return with_found(plan, theta, made)


def _frequencies(rotary: Rotary) -> list[float]:
    # Of those that depend on the length, the ones of the shortest sequences.
    return [float(x) for x in rotary.inv_freq(length=1)]
