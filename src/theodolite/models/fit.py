"""Whether a plan fits a model, told before anything is changed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import nn

from theodolite.models.parts import Decoder, head_dim
from theodolite.plan import LayerPlan, ModelPlan
from theodolite.plan.huggingface import read_config

_LEFT_ALONE = ("bias", "temperature", "mask")


def check_length(decoder: Decoder, plan: ModelPlan) -> None:
    """Raise unless the plan has a policy for each layer."""
    if len(plan.layers) != len(decoder.layers):
        raise ValueError(
            f"layers: the plan ({plan.model_type}) has {len(plan.layers)} layers, "
            f"the model ({type(decoder.module).__name__}) has {len(decoder.layers)}"
        )


def check_rest(model: nn.Module, plan: ModelPlan) -> None:
    """Raise where the plan asks for something else than the model does, in a place that a patch does not reach."""
    config: Any = getattr(model, "config", None)
    try:
        own = read_config(config.to_dict(), source="the model's config")
    except (AttributeError, ValueError):
        # The model's own policy cannot be told: only what no rotary model has is refused.
        own = replace(plan, embed=None, layers=tuple(replace(layer, bias=None) for layer in plan.layers))
    asked: list[tuple[str, object, object]] = [("embed", plan.embed, own.embed)]
    for index, (layer, own_layer) in enumerate(zip(plan.layers, own.layers, strict=False)):
        asked += [(f"layers[{index}].{name}", getattr(layer, name), getattr(own_layer, name)) for name in _LEFT_ALONE]
    for name, wanted, present in asked:
        if wanted != present:
            raise ValueError(
                f"{name}: the plan has {wanted}, the model has {present}; patch changes rotate and score_scale only"
            )


def check_layer(decoder: Decoder, plan: ModelPlan, index: int) -> tuple[nn.Module, float] | None:
    """Raise where a layer's policy does not fit its module; the attention and its new score scale, if it changes."""
    policy, attention = plan.layers[index], decoder.attention(index)
    if attention is None:
        if policy.rotate is not None:
            raise ValueError(
                f"layers[{index}].rotate: the plan turns queries and keys; the model has no attention there"
            )
        return None
    if policy.rotate is not None:
        width = head_dim(attention)
        if width is not None and width != policy.rotate.head_dim:
            raise ValueError(
                f"layers[{index}].rotate.head_dim: the plan has {policy.rotate.head_dim}, the model has {width}"
            )
        if not getattr(attention, "use_rope", True):
            raise ValueError(
                f"layers[{index}].rotate: the plan turns queries and keys; the model turns nothing there (NoPE)"
            )
    return _score_scale(policy, attention, index)


def _score_scale(policy: LayerPlan, attention: nn.Module, index: int) -> tuple[nn.Module, float] | None:
    present = getattr(attention, "scaling", None)
    if policy.score_scale is None:
        width = head_dim(attention)
        if isinstance(present, float) and width and not math.isclose(present, width**-0.5, rel_tol=1e-6):
            raise ValueError(
                f"layers[{index}].score_scale: the plan leaves it at head_dim ** -0.5 = {width**-0.5:.6g}, "
                f"the model multiplies scores by {present:.6g}; say which in the plan"
            )
        return None
    if not isinstance(present, (int, float)):
        raise ValueError(f"layers[{index}].score_scale: the plan has {policy.score_scale}, the model keeps none to set")
    # A difference in the last places is another order of the same multiplications; the model keeps its own.
    if math.isclose(present, policy.score_scale, rel_tol=1e-9):
        return None
    return attention, policy.score_scale
