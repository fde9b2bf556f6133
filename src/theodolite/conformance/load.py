"""Load a causal language model for its checks: with rotary positions or any others, and without a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from theodolite.models.load import load_model
from theodolite.plan import ModelPlan


class Loaded(NamedTuple):
    """A model, what its config says about positions, and how it is called."""

    model: Any
    plan: ModelPlan
    name: str


def load(
    name: str,
    *,
    dtype: torch.dtype | str = "float32",
    device: torch.device | str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Loaded:
    """Load a model in one dtype, as `theodolite.models.load` does it; one without rotary positions is not refused.

    Raises:
        LoadError: the model cannot be had or read; one sentence.
        PlanError: its config contradicts itself or says something unknown about positions.
        ValueError: a dtype that no model is read in, or the device "meta", which holds no numbers.
    """
    opened = load_model(name, dtype=dtype, device=device, progress=progress)
    return Loaded(opened.model, opened.plan, opened.source.name)
