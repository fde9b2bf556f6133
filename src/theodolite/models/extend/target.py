"""What a plan is to become for more tokens, and whether its scaling reaches that far."""

from __future__ import annotations

import math
from dataclasses import replace

from theodolite.plan import (
    NTK,
    DynamicNTK,
    LayerPlan,
    Linear,
    Llama3,
    LongRoPE,
    ModelPlan,
    PlanError,
    Rotary,
    Scaling,
    YaRN,
)
from theodolite.plan.describe import describe_scaling
from theodolite.plan.errors import require_whole


def stretched(before: ModelPlan, after: ModelPlan, to: int, *, name: str, found: bool = False) -> ModelPlan:
    """The plan to write: `after`, stating `to` tokens.

    A LongRoPE states its amplitude outright. Under dynamic NTK the stated length stays that of training, from which
    transformers grows the base.

    Args:
        before: what the model says.
        after: with the scaling on it.
        name: of the scaling, as the user wrote it.
        found: a search has found it. Its factor is free then, beside its base and ramp, and no length follows from it.

    Raises:
        PlanError: no more tokens than the model states already; a scaling weaker than the model's own, or one for
            fewer tokens than `to`; or the model states no length.
    """
    require_whole(to=to)
    trained = before.max_position_embeddings
    if trained is None:
        raise PlanError("max_position_embeddings", None, "the model's config must say its length, to be extended")
    if to <= trained:
        raise PlanError("to", to, f"the model states {trained:,} tokens already; give more")
    if not found:
        for old, new in _pairs(before, after):
            _require_no_weaker(old, new, name)
        reach = reach_of(before, after)
        if reach is not None and reach < to:
            wanted = f"{name.split(':')[0]}:{math.ceil(to / trained)}"
            raise PlanError("scaling", name, f"it stretches to {reach:,.0f} tokens, and {to:,} are wanted: {wanted}")
    if any(isinstance(rotary.scaling, DynamicNTK) for rotary in after.rotaries):
        return after
    return replace(after, max_position_embeddings=to, layers=tuple(map(_said_outright, after.layers)))


def _said_outright(layer: LayerPlan) -> LayerPlan:
    """A layer whose LongRoPE states its amplitude: engines derive one from the lengths where none is given."""
    rotary = layer.rotate
    if rotary is None or not isinstance(rotary.scaling, LongRoPE):
        return layer
    scaling = replace(rotary.scaling, attention_factor_given=rotary.scaling.attention_factor())
    return replace(layer, rotate=replace(rotary, scaling=scaling))


def reach_of(before: ModelPlan, after: ModelPlan) -> float | None:
    """The tokens to which the factors stretch what was trained, in the layer that reaches least; None for no end."""
    trained = before.max_position_embeddings or 0
    return min((reach for pair in _pairs(before, after) if (reach := _reach(*pair, trained)) is not None), default=None)


def widened(before: ModelPlan, after: ModelPlan) -> tuple[Scaling, Scaling] | None:
    """The model's own scaling and the one in its place, where they are of one kind; None where none is widened."""
    for old, new in _pairs(before, after):
        if old is not None and new is not None and old != new and _is_widened(old, new):
            return old.scaling, new.scaling
    return None


def require_counted_over_stated(before: ModelPlan, after: ModelPlan, to: int, *, name: str) -> None:
    """Raise where a factor over the model's own scaling looks like one that is meant over the trained length.

    A factor counts over the stated length. Where less than it would do, and it would do over the trained length too,
    it may be meant either way, and the two are different models.

    Raises:
        PlanError: it may be meant either way.
    """
    own, stated, reach = widened(before, after), before.max_position_embeddings, reach_of(before, after)
    if own is None or stated is None or reach is None:
        return
    old, new = own
    factor, enough = reach / stated, max(2, math.ceil(to / stated))
    if isinstance(old, Linear):
        trained = stated / old.factor
    else:
        trained = getattr(old, "original_max_position_embeddings", stated)
    if factor > enough and trained < stated and factor * trained >= to:
        raise PlanError(
            "scaling",
            name,
            f"the model carries {describe_scaling(old)} already and states {stated:,} tokens, over which a factor "
            f"counts: this would be {describe_scaling(new)}; {name.split(':')[0]}:{enough} is enough for {to:,} tokens",
        )


def _pairs(before: ModelPlan, after: ModelPlan) -> list[tuple[Rotary | None, Rotary | None]]:
    rotaries = ((old.rotate, new.rotate) for old, new in zip(before.layers, after.layers, strict=True))
    return list(dict.fromkeys(rotaries))


def _is_widened(old: Rotary, new: Rotary) -> bool:
    return type(old.scaling) is type(new.scaling) and isinstance(old.scaling, (YaRN, Linear, Llama3))


def _require_no_weaker(old: Rotary | None, new: Rotary | None, name: str) -> None:
    """Raise where a native scaling would be replaced by less of the same."""
    if old is None or new is None:
        return
    native, wanted = getattr(old.scaling, "factor", None), getattr(new.scaling, "factor", None)
    if _is_widened(old, new) and native is not None and wanted is not None and wanted < native:
        kind = old.scaling.rope_type
        raise PlanError("scaling", name, f"the model carries {kind} {native:g} already, and this would be {wanted:g}")


def _reach(old: Rotary | None, new: Rotary | None, trained: int) -> float | None:
    """The tokens that a layer's scaling stretches what was trained to; None where it has no end, or is no scaling."""
    if old is None or new is None or (old == new and not isinstance(new.scaling, YaRN)):
        return None
    scaling = new.scaling
    if isinstance(scaling, (YaRN, Llama3)):
        return scaling.factor * scaling.original_max_position_embeddings
    if isinstance(scaling, Linear):
        return trained * scaling.factor / (old.scaling.factor if isinstance(old.scaling, Linear) else 1.0)
    return trained * scaling.factor if isinstance(scaling, NTK) else None


def over_llama3(plan: ModelPlan, factor: float) -> ModelPlan | None:
    """The plan with its native llama3 scaling `factor` times as strong; None where it has none.

    The pairs that it divides are divided by more, and those that it leaves alone stay alone.
    """
    if not any(isinstance(rotary.scaling, Llama3) for rotary in plan.rotaries):
        return None

    def widen(layer: LayerPlan) -> LayerPlan:
        rotary = layer.rotate
        if rotary is None or not isinstance(rotary.scaling, Llama3):
            return layer
        scaling = replace(rotary.scaling, factor=rotary.scaling.factor * factor)
        return replace(layer, rotate=replace(rotary, scaling=scaling))

    return replace(plan, layers=tuple(map(widen, plan.layers)))
