"""The metadata of a GGUF file, read into a plan, as llama.cpp reads it.

The keys are translated into the config of the same family, so that layer patterns and checks are those of
`huggingface`; three things are llama.cpp's own:

- the pair layout, from its `llama_model_rope_type`: a GGUF of the Llama architecture has its q and k rows permuted to
  neighbouring pairs, whatever the original had. (transformers permutes them back when it loads the file: a plan for
  the loaded model is the one read from its config.)
- a missing `rope.freq_base` is 10000. Elsewhere a missing base is an error, but here the reader that defines the
  format has this default, and its converter leaves the key out exactly where the original config had no base.
- divisors per pair stand in tensors (`rope_freqs.weight` for Llama 3.1's scaling, `rope_factors_long.weight` and
  `rope_factors_short.weight` for LongRoPE), not in the metadata.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from theodolite.plan.errors import (
    LONGEST,
    PlanError,
    boundary,
    require_between,
    require_given,
    require_list,
    require_one_of,
    require_positive,
    require_whole,
)
from theodolite.plan.gguf_architectures import ARCHITECTURES, LOCAL_BASES, QUERY_SCALARS, UNROTATED, WINDOWED
from theodolite.plan.gguf_header import read_header_and
from theodolite.plan.huggingface import read_config
from theodolite.plan.huggingface.reading import refuse_many_numbers
from theodolite.plan.model import LayerPlan, ModelPlan
from theodolite.plan.rotary import Rotary
from theodolite.plan.scaling import LongRoPE, Scaling

PASSED = "a list that is not read"
"""The value of a key whose list is passed over."""
DIVISOR_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def read_file(path: str | Path) -> ModelPlan:
    """The plan of a `.gguf` file. Only the metadata and the small tensors of divisors are read.

    Raises:
        OSError: the file cannot be opened.
        PlanError: the file is no GGUF file, or damaged; or as `read_metadata`.
    """
    keys, divisors = read_keys(path)
    return read_metadata(keys, divisors=divisors, source=str(path))


def read_keys(path: str | Path) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """The metadata of a `.gguf` file without its tokenizer's, and the tensors of divisors that it has.

    Raises:
        OSError: the file cannot be opened.
        PlanError: the file is no GGUF file, or damaged.
    """
    try:
        header, divisors = read_header_and(Path(path), DIVISOR_TENSORS)
    except ValueError as error:
        raise PlanError("GGUF", Path(path).name, str(error)) from error
    # What is passed over is there: taken for absent, it would be read as a default.
    keys = {**header.metadata, **header.lists, **dict.fromkeys(header.passed, PASSED)}
    return {name: value for name, value in keys.items() if not name.startswith("tokenizer.")}, divisors


def read_metadata(
    keys: Mapping[str, Any],
    *,
    divisors: Mapping[str, Sequence[float]] | None = None,
    source: str | None = None,
) -> ModelPlan:
    """What the metadata of a GGUF says about positions.

    Args:
        keys: the metadata, full names to values (`llama.rope.freq_base`).
        divisors: the tensors of divisors per pair, by name; without them a scaling that lives there is not seen,
            and LongRoPE raises.
        source: the file's name, for messages.

    Raises:
        PlanError: an unknown architecture or scaling, or numbers that contradict each other.
    """
    with boundary("metadata", source):
        return _read(keys, divisors or {})


def _read(keys: Mapping[str, Any], divisors: Mapping[str, Sequence[float]]) -> ModelPlan:
    architecture = keys.get("general.architecture")
    require_one_of("general.architecture", architecture, (*ARCHITECTURES, *UNROTATED))
    assert isinstance(architecture, str)

    def get(name: str) -> Any:
        return keys.get(f"{architecture}.{name}")

    if architecture in UNROTATED:
        return read_config(_common(architecture, UNROTATED[architecture], get))
    family, interleaved = ARCHITECTURES[architecture]
    config = _common(architecture, family, get)
    _add_rotation(config, architecture, family, get, divisors)
    plan = read_config(config)
    numbers = divisors.get("rope_freqs.weight")
    refuse_many_numbers("rope_freqs.weight", len(numbers or ()), len(plan.layers))
    # Equal layers are one object, and are made once here too.
    made = {id(layer): _as_stored(layer, interleaved, numbers) for layer in plan.layers}
    return replace(plan, layers=tuple(made[id(layer)] for layer in plan.layers))


def _common(architecture: str, family: str, get: Any) -> dict[str, Any]:
    heads = get("attention.head_count")
    config: dict[str, Any] = {
        "model_type": family,
        "num_hidden_layers": _needed(architecture, "block_count", get),
        # Some architectures state the heads layer by layer; the width of a head is one.
        "num_attention_heads": None if heads is None else _needed(architecture, "attention.head_count", get),
        "hidden_size": get("embedding_length"),
        "max_position_embeddings": get("context_length"),
        "sliding_window": get("attention.sliding_window"),
        "pad_token_id": 0,
        "relative_attention_num_buckets": get("attention.relative_buckets_count"),
    }
    width = get("attention.key_length_mla") or get("attention.key_length")
    if width is not None:
        config["head_dim"] = width
    return {key: value for key, value in config.items() if value is not None}


def _add_rotation(
    config: dict[str, Any], architecture: str, family: str, get: Any, divisors: Mapping[str, Sequence[float]]
) -> None:
    width = config.get("head_dim")
    if width is None:
        # llama.cpp divides so, whether it comes out even or not.
        width = _needed(architecture, "embedding_length", get) // _needed(architecture, "attention.head_count", get)
        config["head_dim"] = width
    require_whole(**{f"{architecture}.attention.key_length": width})
    turned = width if get("rope.dimension_count") is None else get("rope.dimension_count")
    require_whole(least=0, **{f"{architecture}.rope.dimension_count": turned})
    rope = _scaling(architecture, get, divisors)
    sections = get("rope.dimension_sections")
    if sections is not None:
        name = f"{architecture}.rope.dimension_sections"
        require_list(**{name: sections})
        for section in sections:
            require_whole(least=0, **{name: section})
        rope["mrope_section"] = [section for section in sections if section]
    if family in ("deepseek_v3", "minicpm3"):
        config.update(qk_rope_head_dim=turned, qk_nope_head_dim=width - turned)
    else:
        config["rotary_dim"] = turned
    config[LOCAL_BASES.get(family, ("rope_theta", ""))[0]] = _base(architecture, "rope.freq_base", get)
    if family in LOCAL_BASES:
        config[LOCAL_BASES[family][1]] = _base(architecture, "rope.freq_base_swa", get)
    if family in QUERY_SCALARS:
        # No metadata key has it: llama.cpp knows the largest model of each family by its layers.
        config["query_pre_attn_scalar"] = width
        if config["num_hidden_layers"] == QUERY_SCALARS[family]:
            parts = (_needed(architecture, name, get) for name in ("embedding_length", "attention.head_count"))
            config["query_pre_attn_scalar"] = next(parts) // next(parts)
    if get("attention.scale") is not None:
        require_positive(**{f"{architecture}.attention.scale": get("attention.scale")})
        config["attention_multiplier"] = get("attention.scale")
    window = config.pop("sliding_window", None)
    if window is not None and family in WINDOWED:
        config["local_attention" if family == "modernbert" else "sliding_window"] = window
    config["rope_scaling"] = rope or None


def _base(architecture: str, name: str, get: Any) -> Any:
    base = 10000.0 if get(name) is None else get(name)
    require_positive(**{f"{architecture}.{name}": base})
    return base


def _scaling(architecture: str, get: Any, divisors: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The rope dict that says what `rope.scaling.*` says."""
    for name in ("rope.scaling.factor", "rope.scale_linear", "rope.scaling.attn_factor"):
        require_between(0, LONGEST, **{f"{architecture}.{name}": get(name)})
    kind = get("rope.scaling.type")
    if kind is None:
        kind = "linear" if get("rope.scaling.factor") or get("rope.scale_linear") else "none"
    require_one_of(f"{architecture}.rope.scaling.type", kind, ("none", "linear", "yarn", "longrope"))
    original = get("rope.scaling.original_context_length")
    long, short = divisors.get("rope_factors_long.weight"), divisors.get("rope_factors_short.weight")
    if kind == "longrope" or long is not None:
        if long is None or short is None:
            raise PlanError(
                "rope_factors_long.weight", None, "LongRoPE needs its divisors, which stand in the file's tensors"
            )
        return {
            "rope_type": "longrope",
            "short_factor": list(short),
            "long_factor": list(long),
            "original_max_position_embeddings": original,
            # llama.cpp derives nothing here: the converter has written the factor.
            "attention_factor": 1.0 if get("rope.scaling.attn_factor") is None else get("rope.scaling.attn_factor"),
        }
    factor = get("rope.scaling.factor") or get("rope.scale_linear")
    if kind == "none" or not factor:
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    rope = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": get("context_length") if original is None else original,
        "beta_fast": get("rope.scaling.yarn_beta_fast"),
        "beta_slow": get("rope.scaling.yarn_beta_slow"),
    }
    multiplier = get("rope.scaling.yarn_log_multiplier")
    own = get("rope.scaling.attn_factor")
    if own is not None and own != 1.0:
        # It multiplies the one that llama.cpp has for YaRN by itself.
        rope["attention_factor"] = own * (0.1 * math.log(factor) + 1.0)
    if multiplier:
        # The converter writes a tenth of mscale_all_dim, and llama.cpp takes mscale to be the same.
        rope.update(mscale=10 * multiplier, mscale_all_dim=10 * multiplier)
    return rope


def _as_stored(layer: LayerPlan, interleaved: bool, divisors: Sequence[float] | None) -> LayerPlan:
    rotary = layer.rotate
    if rotary is None:
        return layer
    rotary = replace(rotary, interleaved=interleaved)
    return replace(layer, rotate=rotary if divisors is None else _divided(rotary, divisors))


def _divided(rotary: Rotary, divisors: Sequence[float]) -> Rotary:
    """llama.cpp divides each pair's frequency by its number, at every length and with no temperature."""
    if type(rotary.scaling) is not Scaling:
        raise PlanError("rope_freqs.weight", f"{len(divisors)} numbers", f"beside {rotary.scaling.rope_type!r} scaling")
    numbers = tuple(divisors)
    # The length chooses between two equal lists, so any will do.
    return replace(
        rotary,
        scaling=LongRoPE(short_factor=numbers, long_factor=numbers, original_max_position_embeddings=2, factor=1.0),
    )


def _needed(architecture: str, name: str, get: Any) -> int:
    value = get(name)
    if value is None:
        raise PlanError(f"{architecture}.{name}", None, "the metadata do not state it")
    by_layer = list(value) if isinstance(value, (list, tuple)) else [value]
    for entry in by_layer:
        require_given(**{f"{architecture}.{name}": entry})
        # 0 is said of a layer without attention.
        require_whole(least=0, **{f"{architecture}.{name}": entry})
    widest = max(by_layer, default=0)
    require_whole(**{f"{architecture}.{name}": widest})
    return int(widest)
