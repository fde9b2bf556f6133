"""Load a causal language model with its tokenizer and the plan of its positions."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

from theodolite.models.describe import positions_instead
from theodolite.models.errors import LoadError
from theodolite.models.gguf_cache import converted
from theodolite.models.hub import fetch
from theodolite.models.quiet import quiet
from theodolite.models.source import Source, fingerprint, read_config_dict, resolve, safetensors_files
from theodolite.plan import ModelPlan
from theodolite.plan.huggingface import read_config


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to read.

    Args:
        model: in evaluation mode, on its device.
        tokenizer: its own.
        plan: what its config says about positions.
        name: how it is called in tables and reports.
        revision: the commit on the hub; None for local files.
        fingerprint: changes when the model's files do.
        config: its config.json as it is written.
    """

    model: Any
    tokenizer: Any
    plan: ModelPlan
    name: str
    revision: str | None
    fingerprint: str
    config: dict[str, Any]


def load(
    name: str,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Load a model with rotary positions, from safetensors or GGUF only; no code that comes with it is run.

    Args:
        name: what `resolve` takes.
        dtype: of the weights; "auto" is bfloat16 where the device is fast at it, else float32.
        device: the accelerator if there is one, else the CPU.
        cache: where a GGUF file is converted to, once (`gguf_cache.cache_folder`).
        progress: called with a line before each step that takes long.

    Raises:
        LoadError: the model cannot be had or read, or has no rotary positions; one sentence.
        PlanError: its config contradicts itself or says something unknown about positions.
    """
    source, chosen = resolve(name), choose_device(device)
    folder, revision = _folder(source, cache, progress)
    config = read_config_dict(folder)
    _require_own_code(config, source.location)
    plan = read_config(config, source=f"config.json of {source.location}")
    if not plan.rotaries:
        raise LoadError(positions_instead(plan))
    safetensors_files(folder)
    if progress is not None:
        progress(f"loading {source.name}")
    return LoadedModel(
        model=_load_model(folder, choose_dtype(dtype, chosen)).to(chosen),
        tokenizer=_load_tokenizer(folder),
        plan=plan,
        name=source.name,
        revision=revision,
        fingerprint=revision or fingerprint(source),
        config=config,
    )


def _folder(source: Source, cache: Any, progress: Callable[[str], None] | None) -> tuple[Path, str | None]:
    """Where config, tokenizer and safetensors lie on this machine, and the commit if they come from the hub."""
    if source.kind == "folder":
        return source.path, None
    if source.kind == "gguf":
        return converted(source, cache=cache, progress=progress), None
    if progress is not None:
        progress(f"fetching {source.location} from the hub")
    return fetch(source.location)


def _require_own_code(config: dict[str, Any], location: str) -> None:
    model_type = config.get("model_type")
    if model_type in CONFIG_MAPPING:
        return
    brings = ", and the code that it brings is never run" if "auto_map" in config else ""
    raise LoadError(f"{location} is of type {model_type!r}, which transformers does not know{brings}")


def _load_model(folder: Path, dtype: torch.dtype) -> Any:
    with quiet():
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            model, report = _loader(config, folder).from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise LoadError(f"{folder} cannot be loaded: {_first_line(error)}") from error
    lacking = sorted(map(str, (*report["missing_keys"], *report["mismatched_keys"])))
    if lacking:
        # transformers would fill them with random numbers and warn.
        raise LoadError(f"{folder} lacks weights: {', '.join(lacking[:3])}{' ...' if lacking[3:] else ''}")
    return model.eval()


def _loader(config: Any, folder: Path) -> Any:
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    raise LoadError(f"{folder} ({config.model_type}) is no causal language model")


def _load_tokenizer(folder: Path) -> Any:
    with quiet():
        try:
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:
            raise LoadError(f"{folder} has no tokenizer that can be read: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def choose_device(device: torch.device | str | None) -> torch.device:
    """The device that is meant: the accelerator if there is one, else the CPU, for None."""
    if device is not None:
        return torch.device(device)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def choose_dtype(dtype: torch.dtype | str, device: torch.device) -> torch.dtype:
    """The dtype that is meant: for "auto", bfloat16 where the device is fast at it, else float32.

    Raises:
        ValueError: a name that torch does not have, or no floating-point dtype.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto":
        named = getattr(torch, dtype, None)
        if not isinstance(named, torch.dtype) or not named.is_floating_point:
            raise ValueError(f"dtype: got {dtype!r}; allowed: 'auto', 'bfloat16', 'float32', or a torch.dtype")
        return named
    if device.type == "cpu":
        fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    else:
        fast = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if fast else torch.float32
