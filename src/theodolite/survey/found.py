"""A frequency map that a search has found: what its `search.json` says is to be applied, and to which model."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from theodolite.plan import LongRoPE, ModelPlan, PlanError, Rotary, Scaling, YaRN
from theodolite.plan.json_object import parse_object

NAME = "search"
"""`search:DIR` names what the search in the folder DIR has found."""
FILE = "search.json"
SCHEMA = "theodolite.search/1"

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
    scaling = {name: value for name, value in asdict(found.scaling).items() if value is not None}
    return {
        "shipped_inv_freq": _frequencies(shipped),
        "rope_theta": found.rope_theta,
        "scaling": {"rope_type": found.scaling.rope_type, **scaling},
    }


def read_found(folder: str, plan: ModelPlan) -> ModelPlan:
    """The plan that the search in `folder` has found, over the model's own.

    Raises:
        PlanError: there is no such search, it is damaged, or it was made for other frequencies.
    """
    path = Path(folder) / FILE
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise ValueError("it is too large for one")
        told = parse_object(path.read_bytes())
        if told["schema"] != SCHEMA:
            raise PlanError("scaling", f"{NAME}:{folder}", f"{path} is no result of a search of this version")
        winner = told["winner"]
        scaling = dict(winner["scaling"])
        kind = _SCALINGS[scaling.pop("rope_type")]
        made = kind(**{name: tuple(x) if isinstance(x, list) else x for name, x in scaling.items()})
        theta, before = float(winner["rope_theta"]), np.asarray(winner["shipped_inv_freq"], dtype=np.float64)
    except PlanError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{path} cannot be read as a result of a search: {error}"
        raise PlanError("scaling", f"{NAME}:{folder}", reason) from None
    if len(plan.scalable) != 1 or not np.array_equal(before, np.asarray(_frequencies(plan.scalable[0]))):
        raise PlanError("scaling", f"{NAME}:{folder}", "it was found for a model with other frequencies")
    return with_found(plan, theta, made)


def _frequencies(rotary: Rotary) -> list[float]:
    # Of those that depend on the length, the ones of the shortest sequences.
    return [float(x) for x in rotary.inv_freq(length=1)]
