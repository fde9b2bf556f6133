"""Whether a model's files hold its weights: transformers would fill what is missing with random numbers and warn."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from theodolite.models.errors import LoadError


def loader(config: Any, where: object) -> Any:
    """The class of transformers that loads a config's causal language model.

    Raises:
        LoadError: it has none.
    """
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    raise LoadError(f"{where} ({config.model_type}) is no causal language model")


def require_numbers(config: Any, held: int, where: object, *, packed: int) -> None:
    """Raise before anything is allocated where a config asks for far more numbers than its files hold.

    Args:
        config: transformers' own.
        held: numbers in the files.
        where: the file or folder, for the message.
        packed: weights that one number of the files may stand for.
    """
    with torch.device("meta"):
        model = loader(config, where).from_config(copy.deepcopy(config))
    asked = sum(parameter.numel() for parameter in model.parameters())
    if asked > packed * held:
        raise LoadError(f"{where} lacks weights: its config asks for {asked:,} numbers, and there are {held:,}")


def require_weights(report: Mapping[str, Any], where: object) -> None:
    """Raise where transformers' report of a loading names weights that were missing or of another shape."""
    lacking = sorted(report["missing_keys"])
    lacking += [
        f"{name} of shape {_shape(asked)} (there is {_shape(found)})"
        for name, found, asked in sorted(report["mismatched_keys"])
    ]
    if lacking:
        raise LoadError(f"{where} lacks weights: {', '.join(lacking[:3])}{' ...' if lacking[3:] else ''}")


def _shape(shape: Any) -> str:
    return "x".join(map(str, shape))
