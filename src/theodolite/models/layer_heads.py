"""How queries and keys stand in a checkpoint's tensors, layer by layer: from its config, or as the caller says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from theodolite.encodings.layout import Layout, Part
from theodolite.models.errors import LoadError
from theodolite.plan import ModelPlan, PlanError, Rotary
from theodolite.plan.families import family_of
from theodolite.plan.families.family import WIDEST, flag, get, whole
from theodolite.plan.huggingface import read_config
from theodolite.plan.huggingface.reading import text_part
from theodolite.plan.json_object import read_object
from theodolite.plan.params import is_params, read_params

_LARGEST_CONFIG = 2**26
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?|blk)\.(\d{1,6})\.")
# What a projection's rows are, where its name stands for several orders.
_NAMES: dict[str, dict[str, Part]] = {
    "gpt_neox": {"query_key_value": "qkv_grouped"},
    "gpt_neox_japanese": {"query_key_value": "qkv_grouped"},
    "falcon": {"query_key_value": "qkv_grouped"},
    "persimmon": {"query_key_value": "qkv_grouped"},
    "internlm2": {"wqkv": "qkv_grouped"},
    "phi3": {"qkv_proj": "qkv_blocks"},
    "phi4_multimodal": {"qkv_proj": "qkv_blocks"},
    "modernbert": {"Wqkv": "qkv_blocks"},
    "modernbert-decoder": {"Wqkv": "qkv_blocks"},
    "dbrx": {"Wqkv": "qkv_blocks"},
    "nomic_bert": {"Wqkv": "qkv_blocks"},
    "qwen3_next": {"q_proj": "q_gated"},
    "qwen3_5": {"q_proj": "q_gated"},
    "qwen3_5_moe": {"q_proj": "q_gated"},
    "qwen4_exp": {"q_proj": "q_gated"},
    "codegen": {"qkv_proj": "qkv_codegen"},
}
# Families whose code has as many key heads as query heads, whatever a config says.
_ALL_HEADS = ("gpt_neox", "gpt_neox_japanese", "persimmon", "codegen", "gptj", "roformer", "esm")
# Families whose code looks at this key.
_TOLD = ("axk1", "deepseek_v3", "glm4_moe_lite", "mistral4", "youtu")


class Width(NamedTuple):
    """The channels of a head, and those of them that turn: the last ones if `trailing`."""

    head_dim: int
    rotary_dim: int
    trailing: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerHeads:
    """What a checkpoint's queries and keys are.

    Args:
        num_heads, num_key_value_heads: None where they follow from the rows.
        widths: one entry a layer, None for a layer that turns nothing; or one entry for all layers.
        names: what modules with these names are, beyond the usual.
        stated: the layout that the config and the family's code say; None without a config.
        told: the family's code reads the layout from the config's `rope_interleave`.
        model_type: the family; empty without a config.
        rows_per_scale: rows that share a scale, where weights are quantised in blocks.
        v_head_dim: channels of a value head, where they differ.
    """

    num_heads: int | None = None
    num_key_value_heads: int | None = None
    widths: tuple[Width | None, ...]
    names: Mapping[str, Part] = field(default_factory=dict)
    stated: Layout | None = None
    told: bool = False
    model_type: str = ""
    rows_per_scale: int | None = None
    v_head_dim: int | None = None

    def width_of(self, key: str) -> Width | None:
        """The width of a tensor's layer by its name; None where that layer turns nothing, or it is of none."""
        found = layer_of(key)
        if len(set(self.widths)) == 1:
            return self.widths[0]
        if found is None:
            return None
        if found >= len(self.widths):
            raise ValueError(f"{key}: the config states {len(self.widths)} layers, and they are not all alike")
        return self.widths[found]


def layer_of(key: str) -> int | None:
    """The number of the layer that a tensor belongs to by its name, or None."""
    found = _LAYER.search(key)
    return None if found is None else int(found[1])


def find_config(source: Path) -> Path | None:
    """The `config.json` or `params.json` of a folder."""
    return next((file for name in ("config.json", "params.json") if (file := source / name).is_file()), None)


def read_raw(file: Path) -> dict[str, Any]:
    """The JSON object of a config.

    Raises:
        LoadError: it cannot be read as one.
    """
    try:
        return read_object(file, largest=_LARGEST_CONFIG)
    except (OSError, ValueError) as error:
        raise LoadError(f"{file} cannot be read: {error}") from None


def heads_of_config(config: Mapping[str, Any], source: str | None = None) -> LayerHeads:
    """What a `config.json` or a `params.json` says.

    Raises:
        PlanError: it cannot be read as a plan, or says no head counts.
        ValueError: it turns nothing.
    """
    if is_params(config):
        plan, family_names = read_params(config, source=source), {}
        heads = whole(config, "n_heads", most=WIDEST)
        stated_keys = config.get("n_kv_heads")
        told, rows_per_scale, v_head_dim = False, None, None
    else:
        plan = read_config(config, source=source)
        part = {**family_of(plan.model_type).defaults, **text_part(config)}
        family_names = _NAMES.get(plan.model_type.removesuffix("_text"), {})
        heads = whole(part, "num_attention_heads", most=WIDEST)
        stated_keys = _key_heads(part, plan.model_type)
        told = plan.model_type in _TOLD
        rows_per_scale = _block_rows(config)
        v_head_dim = part.get("v_head_dim") if isinstance(part.get("v_head_dim"), int) else None
    if not plan.rotaries:
        raise ValueError(f"{plan.model_type}: no layer of it turns queries and keys, so there is no layout")
    latent = plan.rotaries[0].trailing
    key_heads = heads if latent or stated_keys is None else stated_keys
    if isinstance(key_heads, bool) or not isinstance(key_heads, int) or key_heads < 1:
        raise PlanError("num_key_value_heads", key_heads, "it must be a whole number above 0", source=source)
    return LayerHeads(
        num_heads=heads,
        num_key_value_heads=key_heads,
        widths=_widths(plan),
        names=family_names,
        stated=_stated(plan),
        told=told,
        model_type=plan.model_type,
        rows_per_scale=rows_per_scale,
        v_head_dim=v_head_dim,
    )


def _widths(plan: ModelPlan) -> tuple[Width | None, ...]:
    return tuple(None if layer.rotate is None else width_of(layer.rotate) for layer in plan.layers)


def width_of(rotary: Rotary) -> Width:
    """The channels of a rotary encoding."""
    return Width(rotary.head_dim, rotary.rotary_dim, rotary.trailing)


def _stated(plan: ModelPlan) -> Layout:
    layouts = {rotary.interleaved for rotary in plan.rotaries}
    if len(layouts) > 1:
        raise ValueError(f"{plan.model_type}: its layers have both layouts; convert its tensors one by one")
    return "interleaved" if layouts.pop() else "halves"


def _key_heads(config: Mapping[str, Any], model_type: str) -> Any:
    if model_type in _ALL_HEADS:
        return None
    if model_type == "falcon":
        if flag(config, "new_decoder_architecture"):
            return config.get("num_kv_heads")
        return 1 if flag(config, "multi_query", True) else None
    return get(config, "num_key_value_heads")


def _block_rows(config: Mapping[str, Any]) -> int | None:
    """Rows that share a scale in DeepSeek's float8."""
    quantised = config.get("quantization_config")
    block = quantised.get("weight_block_size") if isinstance(quantised, Mapping) else None
    rows = block[0] if isinstance(block, list) and block else None
    return rows if type(rows) is int and rows > 0 else None
