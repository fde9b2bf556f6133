"""Load a causal language model with its tokenizer and the plan of its positions."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer

from theodolite.models.describe import positions_instead
from theodolite.models.errors import LoadError, refusing
from theodolite.models.gguf_cache import converted
from theodolite.models.hub import fetch
from theodolite.models.quiet import quiet
from theodolite.models.source import Source, count_folder_parameters, fingerprint, read_config_dict, resolve
from theodolite.models.weights import loader, require_numbers, require_weights
from theodolite.plan import ModelPlan
from theodolite.plan.huggingface import read_config
from theodolite.plan.pair_layout import FILE as PAIR_LAYOUT
from theodolite.plan.pair_layout import differs, read_layout

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
# Quantised weights lie packed in the files, up to sixteen of two bits in one number of 32.
_PACKED = 16


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
        ValueError: a dtype that no model is read in, or the device "meta", which holds no numbers.
    """
    opened = load_model(name, dtype=dtype, device=device, cache=cache, progress=progress, rotary=True)
    with quiet(), refusing(f"{opened.folder} has no tokenizer that can be read"):
        tokenizer = AutoTokenizer.from_pretrained(opened.folder, config=opened.model.config, trust_remote_code=False)
    return LoadedModel(
        model=opened.model,
        tokenizer=tokenizer,
        plan=opened.plan,
        name=opened.source.name,
        revision=opened.revision,
        fingerprint=opened.digest or fingerprint(opened.source),
        config=opened.config,
    )


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model and where it came from; `digest` is the fingerprint of its source where it is known already."""

    model: Any
    plan: ModelPlan
    config: dict[str, Any]
    source: Source
    folder: Path
    revision: str | None
    digest: str | None


def load_model(
    name: str,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
    rotary: bool = False,
) -> Opened:
    """Load a model as `load` does, without its tokenizer; one with other positions too, unless `rotary`."""
    source, chosen = resolve(name), choose_device(device)
    if chosen.type == "meta":
        raise ValueError("device: got 'meta', which holds no numbers; give 'cpu' or an accelerator")
    kept = choose_dtype(dtype, chosen)
    folder, revision, digest = _folder(source, cache, progress)
    config = read_config_dict(folder)
    _require_own_code(config, source.location)
    plan = read_config(config, source=f"config.json of {source.location}")
    layout = read_layout(folder)
    if differs(plan, layout):
        other = "half" if layout == "interleaved" else "interleaved"
        raise LoadError(
            f"{source.location} is in {layout} pairs ({PAIR_LAYOUT}), and the code of {plan.model_type} turns the "
            f"other ones: theodolite convert layout {source.location} OUT --to {other}"
        )
    if rotary and not plan.rotaries:
        raise LoadError(positions_instead(plan))
    held = count_folder_parameters(folder)
    if progress is not None:
        progress(f"loading {source.name}")
    with quiet():
        model = _load_model(folder, config, kept, held)
    return Opened(
        model=model.to(chosen),
        plan=plan,
        config=config,
        source=source,
        folder=folder,
        revision=revision,
        digest=digest,
    )


def _folder(source: Source, cache: Any, progress: Callable[[str], None] | None) -> tuple[Path, str | None, str | None]:
    """Where config, tokenizer and safetensors lie here; the commit on the hub; the fingerprint where it is known."""
    if source.kind == "folder":
        return source.path, None, None
    if source.kind == "gguf":
        # All bytes of the file are read for it: once is enough.
        digest = fingerprint(source)
        return converted(source, digest=digest, cache=cache, progress=progress), None, digest
    if progress is not None:
        progress(f"fetching {source.location} from the hub")
    folder, revision = fetch(source.location)
    return folder, revision, revision


def _require_own_code(config: dict[str, Any], location: str) -> None:
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        return
    brings = ", and the code that it brings is never run" if "auto_map" in config else ""
    raise LoadError(f"{location} is of type {model_type!r:.80}, which transformers does not know{brings}")


def _load_model(folder: Path, config: dict[str, Any], dtype: torch.dtype, held: int) -> Any:
    """The model of a folder; `held` numbers are in its files."""
    with refusing(f"{folder} cannot be loaded"):
        own = _transformers_config(folder, config)
        require_numbers(own, held, folder, packed=_PACKED)
        model, report = loader(own, folder).from_pretrained(
            folder,
            config=own,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            # They are told below, by name.
            ignore_mismatched_sizes=True,
        )
        require_weights(report, folder)
    return model.eval()


def _transformers_config(folder: Path, config: dict[str, Any]) -> Any:
    # From the text that was checked, not from the file, which may begin with a mark that transformers refuses.
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "config.json"
        file.write_text(json.dumps(config), encoding="utf-8")
        own = AutoConfig.from_pretrained(file, trust_remote_code=False)
    own.name_or_path = str(folder)
    return own


def choose_device(device: torch.device | str | None) -> torch.device:
    """The device that is meant: the accelerator if there is one, else the CPU, for None."""
    if device is not None:
        return torch.device(device)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def choose_dtype(dtype: torch.dtype | str, device: torch.device) -> torch.dtype:
    """The dtype that is meant: for "auto", bfloat16 where the device is fast at it, else float32.

    Raises:
        ValueError: any other than float16, bfloat16, float32 and float64.
    """
    if dtype != "auto":
        named = next((known for name, known in _DTYPES.items() if dtype in (name, known)), None)
        if named is None:
            raise ValueError(f"dtype: got {dtype!r}; allowed: {', '.join(map(repr, ('auto', *_DTYPES)))}")
        return named
    if device.type == "cpu":
        fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    else:
        fast = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if fast else torch.float32
