"""One sentence on the positions of a model that has no rotary ones, or none that a patch can reach."""

from __future__ import annotations

from typing import Any

from torch import nn

from theodolite.plan import ModelPlan
from theodolite.plan.describe import describe
from theodolite.plan.huggingface import read_config


def positions_instead(plan: ModelPlan) -> str:
    """What a model without rotary positions has instead, in one sentence."""
    return f"{plan.model_type} has no rotary positions; it has {describe(plan)}"


def why_not_rotary(model: nn.Module) -> str:
    """Why a loaded model has no rotary positions that can be replaced, in one sentence."""
    config: Any = getattr(model, "config", None)
    if config is None:
        return f"{type(model).__name__} has no config: only models of transformers can be patched"
    try:
        plan = read_config(config.to_dict(), source=f"the config of {type(model).__name__}")
    except ValueError as error:
        return (
            f"{type(model).__name__} has no rotary_emb beside its decoder layers, and its config is not read: {error}"
        )
    if not plan.rotaries:
        return positions_instead(plan)
    return f"{plan.model_type} computes its rotary positions inside each layer, where they cannot be replaced"
