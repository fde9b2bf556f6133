"""The spaces that a search knows, and which of them a model has."""

from __future__ import annotations

from theodolite.plan import ModelPlan, PlanError
from theodolite.search.pair_space import PairSpace
from theodolite.search.space import Space, searched_rotary
from theodolite.search.yarn_space import YaRNSpace


def spaces(plan: ModelPlan, to: int) -> tuple[dict[str, type[Space]], dict[str, str]]:
    """The spaces that a model has, by name, and for those that it has not the reason.

    Raises:
        PlanError: it has none.
    """
    searched_rotary(plan)
    have: dict[str, type[Space]] = {}
    lack: dict[str, str] = {}
    for kind in (YaRNSpace, PairSpace):
        try:
            kind(plan, to).require_writable()
        except PlanError as error:
            lack[kind.name] = str(error)
        else:
            have[kind.name] = kind
    if not have:
        raise PlanError("layers", plan.model_type, "; ".join(f"{name}: {why}" for name, why in lack.items()))
    return have, lack
