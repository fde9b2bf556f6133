"""How much memory a survey takes, known before it starts."""

from __future__ import annotations

from typing import Any

import torch

from theodolite.models.reader import Reader
from theodolite.plan import ModelPlan

_GIB = 2**30


# Groups that the maps part pairs of tokens into, each with keys turned for it.
_GROUPS = 3


def survey_bytes(model: Any, plan: ModelPlan, *, length: int, mapped: bool = False) -> int:
    """Bytes that reading `length` tokens takes beyond the weights: keys, values, one chunk's activations and logits.

    At `mapped` distances the keys of the layer at work are there once more for each group of the map.
    """
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = max(rotary.head_dim for rotary in plan.rotaries)
    item = model.dtype.itemsize
    cache = (2 * len(plan.layers) + (_GROUPS if mapped else 0)) * heads * width * item * length
    chunk = Reader(model, plan, capacity=0).chunk
    vocabulary = model.get_output_embeddings().weight.shape[0]
    inner = getattr(config, "intermediate_size", 4 * config.hidden_size)
    activations = chunk * (8 * config.hidden_size + 3 * inner) * item
    return int(cache + 2 * chunk * vocabulary * item + activations)


def require_memory(needed: int, what: str, device: torch.device, *, instead: str) -> None:
    """Raise MemoryError, with both figures and what to do `instead`, where `needed` bytes are not free on `device`."""
    free = _free(device)
    if needed > free:
        raise MemoryError(
            f"{what} needs {needed / _GIB:.1f} GiB and {free / _GIB:.1f} GiB are free on {device.type}; take {instead}"
        )


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        import psutil
    except ImportError as error:
        raise ImportError(
            "theodolite.survey needs psutil; install it with: pip install 'theodolite[survey]'"
        ) from error
    return int(psutil.virtual_memory().available)
