"""A plan, written as a config. What is written is read back before it is returned: a config that says less raises."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal

from theodolite.plan.errors import PlanError, require_one_of
from theodolite.plan.families import Family, family_of, known
from theodolite.plan.families.family import NAMES
from theodolite.plan.families.layers import NO_ATTENTION
from theodolite.plan.huggingface.reading import TEXT_PARTS, read_config
from theodolite.plan.huggingface.rope_writing import write_rope_dict
from theodolite.plan.model import LayerPlan, ModelPlan
from theodolite.plan.rotary import Rotary
from theodolite.plan.scaling import NTK, LongRoPE, Scaling

_ROPE_KEYS = ("rope_parameters", "rope_scaling", *NAMES["rope_theta"], *NAMES["partial_rotary_factor"])


def write_config(
    plan: ModelPlan, into: Mapping[str, Any] | None = None, *, dialect: Literal["v5", "legacy"] = "v5"
) -> dict[str, Any]:
    """A config that says this plan.

    Args:
        into: the config to start from; its other keys stay as they are, and it is not changed itself. If it says the
            plan already, it comes back key for key. Without it a config of the keys about positions is made.
        dialect: "v5" for `rope_parameters` (transformers 5), "legacy" for `rope_theta` and `rope_scaling`.

    NTK at a fixed factor is written as what it is: a larger `rope_theta`.

    Raises:
        PlanError: for what the dialect, or the family's config, has no words for.
    """
    require_one_of("dialect", dialect, ("v5", "legacy"))
    if into is not None and _reads_as(into, plan):
        return copy.deepcopy(dict(into))
    if not plan.rotaries:
        raise PlanError("layers", plan.model_type, "only rotary positions can be written into a config")
    config = copy.deepcopy(dict(into)) if into is not None else _bare_config(plan)
    part = _text_part(config)
    if into is not None and part.get("model_type") != plan.model_type:
        raise PlanError("model_type", part.get("model_type"), f"the plan is one of {plan.model_type!r}")
    family = family_of(plan.model_type)
    for key in (*_ROPE_KEYS, *family.bases.values()):
        part.pop(key, None)
    _set_lengths(part, plan)
    if part.get("rotary_dim") is not None:
        part["rotary_dim"] = plan.rotaries[0].rotary_dim
    if family.fixed:
        part.setdefault("rotary_dim", plan.rotaries[0].rotary_dim)
    elif dialect == "v5":
        part["rope_parameters"] = rope_parameters(plan)
    else:
        part.update(_legacy(plan, family))
    _refuse_difference(as_written(plan), read_config(config))
    return config


def rope_parameters(plan: ModelPlan) -> dict[str, Any]:
    """The `rope_parameters` of transformers 5 that say this plan: one dict, or one per layer type where they differ.

    Raises:
        PlanError: the layers differ, and the family's config has one dict for all; or a dict has no words for them.
    """
    family = family_of(plan.model_type)
    by_type: dict[str | None, dict[str, Any] | None] = {}
    for layer in plan.layers:
        if layer.layer_type in NO_ATTENTION:
            continue
        rope = None if layer.rotate is None else _rope_dict(layer.rotate, family)
        if by_type.setdefault(layer.layer_type, rope) != rope and (rope is not None and by_type[layer.layer_type]):
            raise PlanError("layers", layer.layer_type, "layers of one type differ, and a config has one dict per type")
        by_type[layer.layer_type] = by_type[layer.layer_type] or rope
    turning = [rope for rope in by_type.values() if rope is not None]
    if not family.nested and all(rope == turning[0] for rope in turning):
        return turning[0] if turning else {}
    if not family.nested and (plan.one_rotary or known(plan.model_type)):
        raise PlanError("layers", plan.model_type, "they differ, and a config of this family has one rope dict for all")
    return {str(label): rope for label, rope in by_type.items()}


def _rope_dict(rotary: Rotary, family: Family) -> dict[str, Any]:
    rope = write_rope_dict(rotary)
    if family.latent:
        # The width stands in qk_rope_head_dim.
        rope.pop("partial_rotary_factor", None)
    elif "partial_rotary_factor" not in rope and family.partial_rotary_factor != 1.0:
        rope["partial_rotary_factor"] = 1.0
    return rope


def as_written(plan: ModelPlan) -> ModelPlan:
    """The plan as a config can say it: the same frequencies, NTK folded into the base."""

    def fold(layer: LayerPlan) -> LayerPlan:
        rotary = layer.rotate
        if rotary is None:
            return layer
        if isinstance(rotary.scaling, NTK):
            theta = rotary.scaling.scaled_theta(rotary.rope_theta, rotary.rotary_dim)
            return replace(layer, rotate=replace(rotary, rope_theta=theta, scaling=Scaling()))
        if isinstance(rotary.scaling, LongRoPE) and rotary.scaling.factor is None:
            return replace(layer, rotate=replace(rotary, scaling=replace(rotary.scaling, factor=1.0)))
        return layer

    return replace(plan, layers=tuple(map(fold, plan.layers)))


def _reads_as(config: Mapping[str, Any], plan: ModelPlan) -> bool:
    try:
        return read_config(config, part=plan.part) == plan
    except PlanError:
        # A config that cannot be read is the one to be put right.
        return False


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    for name in TEXT_PARTS:
        if isinstance(config.get(name), dict) and config[name]:
            inner = _text_part(config[name])
            inner.setdefault("model_type", config.get("model_type"))
            return inner
    return config


def _set_lengths(part: dict[str, Any], plan: ModelPlan) -> None:
    key = next((key for key in NAMES["max_position_embeddings"] if key in part), "max_position_embeddings")
    if plan.max_position_embeddings is not None:
        part[key] = plan.max_position_embeddings
    originals = {getattr(rotary.scaling, "original_max_position_embeddings", None) for rotary in plan.rotaries} - {None}
    if "original_max_position_embeddings" in part and len(originals) == 1:
        part["original_max_position_embeddings"] = originals.pop()


def _legacy(plan: ModelPlan, family: Family) -> dict[str, Any]:
    """The older keys: the base and the partial factor beside `rope_scaling`, not in it."""
    rope = rope_parameters(plan)
    nested = {label: given for label, given in rope.items() if isinstance(given, dict)}
    if nested and not family.bases:
        raise PlanError("dialect", "legacy", "it has one dict for all layers, and the layers of this plan differ")
    dicts = nested or {"": rope}
    keys: dict[str, Any] = {
        family.bases.get(label, "rope_theta"): given["rope_theta"] for label, given in dicts.items()
    }
    scalings = [_without_base(given) for label, given in dicts.items() if not family.scaled or label in family.scaled]
    chosen = scalings[0] if scalings else {"rope_type": "default"}
    if "partial_rotary_factor" in chosen:
        keys["partial_rotary_factor"] = chosen.pop("partial_rotary_factor")
    keys["rope_scaling"] = None if chosen == {"rope_type": "default"} else chosen
    return keys


def _without_base(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in rope.items() if key != "rope_theta"}


def _bare_config(plan: ModelPlan) -> dict[str, Any]:
    """The keys about positions, for a plan that comes from no config."""
    rotary = plan.rotaries[0]
    config: dict[str, Any] = {"model_type": plan.model_type, "num_hidden_layers": len(plan.layers)}
    if family_of(plan.model_type).latent:
        config["qk_rope_head_dim"] = rotary.rotary_dim
        config["qk_nope_head_dim"] = rotary.head_dim - rotary.rotary_dim
    else:
        config["head_dim"] = rotary.head_dim
    if all(layer.layer_type is not None for layer in plan.layers):
        config["layer_types"] = [layer.layer_type for layer in plan.layers]
    for key, name in (("sliding_window", "sliding_window"), ("attention_chunk_size", "chunk")):
        sizes = {getattr(layer.mask, name) for layer in plan.layers} - {None}
        if len(sizes) == 1:
            config[key] = sizes.pop()
    attending = [layer for layer in plan.layers if layer.layer_type not in NO_ATTENTION]
    if any(layer.rotate is None for layer in attending):
        config["no_rope_layers"] = [int(layer.rotate is not None) for layer in plan.layers]
    return config


def _refuse_difference(wanted: ModelPlan, written: ModelPlan) -> None:
    if wanted == written:
        return
    for name in ("max_position_embeddings", "embed"):
        if getattr(wanted, name) != getattr(written, name):
            raise PlanError(name, getattr(wanted, name), f"the config would say {getattr(written, name)!r}")
    if len(wanted.layers) != len(written.layers):
        raise PlanError("layers", len(wanted.layers), f"the config has num_hidden_layers={len(written.layers)}")
    for i, (layer, other) in enumerate(zip(wanted.layers, written.layers, strict=True)):
        for field in fields(LayerPlan):
            mine, theirs = getattr(layer, field.name), getattr(other, field.name)
            if mine != theirs:
                raise PlanError(f"layers[{i}].{field.name}", mine, f"the config can only say {theirs!r}")
