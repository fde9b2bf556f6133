"""A config's positions, read into a plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from theodolite.plan.errors import PlanError, boundary, require_one_of, require_positive, require_whole, shown
from theodolite.plan.families import (
    Family,
    family_of,
    known,
    layer_bases,
    layer_plan,
    layer_types,
    read_unrotated,
    refuse_misread,
    turns,
    unreadable,
)
from theodolite.plan.families.family import MOST_LAYERS, NAMES, Config, get, whole
from theodolite.plan.families.layers import ATTENTION
from theodolite.plan.families.parts import require_own_part
from theodolite.plan.huggingface.layer_rotary import head_dim_of, rotary_of, score_scale_of
from theodolite.plan.huggingface.rope_dict import ALIASES, RopeDict, read_rope_dict
from theodolite.plan.model import PARTS, LayerPlan, ModelPlan, Part
from theodolite.plan.scaling import LongRoPE

# Where a model of several parts keeps its language model.
TEXT_PARTS = ("text_config", "thinker_config", "llm_config", "language_config")

# Of layers that differ in width, base or type, and of their heads together; the largest models have some ten.
_MOST_KINDS, _MOST_CHANNELS = 1024, 2**21
_MOST_NUMBERS = 2**22
_LONGEST_NAME = 100

# Top-level keys that speak of rotation and are read, or change nothing in a language model's positions.
_KNOWN = {
    "rope_parameters", "rope_scaling", "rope_local_base_freq", "global_rope_theta", "local_rope_theta",
    "layer_rope_theta", "no_rope_layers", "no_rope_layer_interval", "qk_rope_head_dim", "rope_interleave",
    "indexer_rope_interleave", "rotary_dim", "use_mem_rope",
    *NAMES["rope_theta"], *NAMES["partial_rotary_factor"],
}  # fmt: skip


def read_config_file(path: str | Path, *, part: Part | None = None) -> ModelPlan:
    """The plan of a `config.json`, or of the one in a folder; `part` as in `read_config`."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise PlanError("config.json", str(error), "it must be JSON", source=str(file)) from error
    return read_config(config, part=part, source=str(file))


def read_config(config: Mapping[str, Any], *, part: Part | None = None, source: str | None = None) -> ModelPlan:
    """What a config says about positions.

    A family that transformers has is read if it has been compared with its code, and refused if not. One that
    transformers does not know is read by its convention (a causal decoder, half-split pairs) as long as its config
    says nothing against that.

    Args:
        config: the content of a `config.json`, or `model.config.to_dict()`.
        part: "decoder" or "encoder" of an encoder-decoder (T5, BART, Whisper); its decoder by default. A model of
            one stack is read as what it is, and refused under the other's name.
        source: the file's name, for messages.

    Raises:
        PlanError: a base or another needed key is missing; a rope type or a key that speaks of rotation is unknown;
            two keys contradict each other; a number is out of range; nothing is known of the family's code; the
            model has no such part. The message names the field and the file.
    """
    with boundary("config", source):
        if not isinstance(config, Mapping):
            hint = "; give its .to_dict()" if hasattr(config, "to_dict") else ""
            raise PlanError("config", type(config).__name__, f"it must be a mapping of keys to values{hint}")
        require_one_of("part", part, (None, *PARTS))
        # A model may use a language model's layers in a way of its own.
        _refuse_unreadable(config)
        return _read(text_part(config), part)


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model; the config itself where it has no parts."""
    for name in TEXT_PARTS:
        part = config.get(name)
        if isinstance(part, Mapping) and part:
            inner = text_part(part)
            return inner if "model_type" in inner else {**inner, "model_type": config.get("model_type")}
    return config


def _read(config: Config, part: Part | None) -> ModelPlan:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise PlanError("model_type", model_type, "the config must name its family")
    if len(model_type) > _LONGEST_NAME:
        # It stands in messages, tables and pictures.
        raise PlanError("model_type", model_type, f"a name of {len(model_type):,} characters; at most {_LONGEST_NAME}")
    _refuse_unreadable(config)
    unrotated = read_unrotated(config, part)
    if unrotated is not None:
        return unrotated
    if not known(model_type):
        refuse_misread(config)
    return require_own_part(_rotated(config, model_type), part)


def _refuse_unreadable(config: Config) -> None:
    model_type = config.get("model_type")
    reason = unreadable(model_type) if isinstance(model_type, str) else None
    if reason is not None:
        raise PlanError("model_type", model_type, reason)


def _rotated(config: Config, model_type: str) -> ModelPlan:
    family = family_of(model_type)
    _refuse_unknown_keys(config)
    config = {**family.defaults, **config}
    count = whole(config, "num_hidden_layers", most=MOST_LAYERS)
    require_whole(max_position_embeddings=get(config, "max_position_embeddings"))
    types = layer_types(config, family, count)
    turning = turns(config, family, types)
    kinds = {kind for kind, turned in zip(types, turning, strict=True) if turned}
    ropes = _rope_dicts(config, family, kinds, labels={*family.nested, *types} - {None})
    bases = layer_bases(config, count) or [None] * count
    made: dict[tuple[Any, ...], LayerPlan] = {}
    layers, channels = [], 0
    for i, layer_type in enumerate(types):
        head_dim = head_dim_of(config, family, i, layer_type)
        # Layers of one kind are made once: there may be many, and a wide head takes a while.
        kind = (layer_type, turning[i], head_dim, bases[i])
        if kind not in made:
            channels += head_dim
            _refuse_many_kinds(len(made) + 1, channels)
            rope = ropes[layer_type] if turning[i] else None
            rotate = None if rope is None else rotary_of(config, family, rope, head_dim, i)
            scale = score_scale_of(config, family, rotate, head_dim)
            made[kind] = layer_plan(config, family, layer_type, rotate, scale)
        layers.append(made[kind])
    for layer in made.values():
        if layer.rotate is not None and isinstance(layer.rotate.scaling, LongRoPE):
            refuse_many_numbers("long_factor", len(layer.rotate.scaling.long_factor), count)
    return ModelPlan(
        model_type=model_type,
        max_position_embeddings=get(config, "max_position_embeddings"),
        layers=tuple(layers),
        one_rotary=not (family.nested or _is_nested(config, types)),
    )


def _refuse_many_kinds(kinds: int, channels: int) -> None:
    if kinds > _MOST_KINDS or channels > _MOST_CHANNELS:
        raise PlanError(
            "num_hidden_layers",
            f"{kinds:,} kinds of layer, their heads {channels:,} channels wide together",
            f"at most {_MOST_KINDS:,} kinds and {_MOST_CHANNELS:,} channels are read",
        )


def refuse_many_numbers(field: str, numbers: int, layers: int) -> None:
    """Raise PlanError for a list of one number a pair that is too long for so many layers: each compares it."""
    if numbers * layers > _MOST_NUMBERS:
        raise PlanError(
            field, f"{numbers:,} numbers for each of {layers:,} layers", f"at most {_MOST_NUMBERS:,} in all are read"
        )


def _is_nested(config: Config, types: tuple[str | None, ...]) -> bool:
    """Whether a config of a family without a row has its rope dict by layer type."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return not known(config["model_type"]) and any(layer_type in rope for layer_type in types)


def _refuse_unknown_keys(config: Config) -> None:
    for key, value in config.items():
        if ("rope" in key or "rotary" in key) and key not in _KNOWN and value is not None and value is not False:
            raise PlanError(key, value, "it speaks of rotation and no reading of it is known")


def _rope_dicts(
    config: Config, family: Family, kinds: set[str | None], labels: set[str | None]
) -> dict[str | None, RopeDict | None]:
    """The settled dict of each kind of turning layer, base included; None where the dict itself says no rotation."""
    parameters, scaling = config.get("rope_parameters"), config.get("rope_scaling")
    for key, given in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if given is not None and not isinstance(given, Mapping):
            raise PlanError(key, given, "it must be a mapping, or null")
    if parameters and scaling:
        _refuse_two(config, parameters, scaling)
    rope = parameters or scaling or {}
    name = "rope_parameters" if parameters else "rope_scaling"
    if family.fixed and (rope or get(config, "rope_theta") is not None):
        key = name if rope else "rope_theta"
        raise PlanError(key, rope or get(config, "rope_theta"), "this family's code has one base and no scaling")
    if any(key in labels for key in rope):
        _refuse_strays(rope, labels, name)
        return _nested(config, family, rope, kinds, name)
    if family.nested:
        if parameters:
            raise PlanError(
                name, sorted(parameters), f"in this family it stands by layer type: {', '.join(family.nested)}"
            )
        return {
            kind: _settled(config, family, rope if not family.scaled or kind in family.scaled else {}, kind or "", name)
            for kind in kinds
        }
    settled = _settled(config, family, rope, "", name) if kinds else None
    return dict.fromkeys(kinds, settled)


def _refuse_two(config: Config, new: Mapping[str, Any], old: Mapping[str, Any]) -> None:
    """Both dicts may stand side by side, where they say the same; the older has its base beside it."""
    ours, theirs = ({**rope, "rope_type": rope.get("rope_type", rope.get("type"))} for rope in (new, old))
    if "rope_theta" in ours and get(config, "rope_theta") is not None:
        theirs.setdefault("rope_theta", get(config, "rope_theta"))
    for key in dict.fromkeys((*ours, *theirs)):
        if key != "type" and ours.get(key) != theirs.get(key):
            name = key if key == "rope_theta" and key not in old else f"rope_scaling.{key}"
            raise PlanError(name, theirs.get(key), f"rope_parameters beside it has {key} {shown(ours.get(key))}")


def _nested(
    config: Config, family: Family, rope: Mapping[str, Any], kinds: set[str | None], name: str
) -> dict[str | None, RopeDict | None]:
    found: dict[str | None, RopeDict | None] = {}
    for kind in kinds:
        if kind is None or kind not in rope:
            raise PlanError(f"{name}.{kind}", None, f"layers of this type turn, and only {shown(list(rope))} are given")
        found[kind] = None if rope[kind] is None else _settled(config, family, rope[kind], kind, f"{name}.{kind}")
    return found


def _refuse_strays(rope: Mapping[str, Any], labels: set[str | None], name: str) -> None:
    bases = [given.get("rope_theta") for given in rope.values() if isinstance(given, Mapping)]
    for key, value in rope.items():
        # Two released families left a flat dict's remains beside their nested ones.
        remains = (
            value is None or (key == "rope_type" and value == "default") or (key == "rope_theta" and value in bases)
        )
        # A family's defaults may name a kind of layer that this model has none of.
        if key not in labels and key not in ATTENTION and not remains:
            raise PlanError(f"{name}.{key}", value, f"no layer is of this type: {', '.join(sorted(map(str, labels)))}")


def _settled(config: Config, family: Family, rope: Mapping[str, Any], label: str, name: str) -> RopeDict:
    """One dict, with the base that it or the config states."""
    if not isinstance(rope, Mapping):
        raise PlanError(name, rope, "it must be a mapping, or null for layers without rotation")
    try:
        read = read_rope_dict(
            rope,
            max_position_embeddings=get(config, "max_position_embeddings"),
            original_max_position_embeddings=config.get("original_max_position_embeddings"),
            aliases={**ALIASES, **family.aliases},
            further_keys=family.rope_keys,
        )
    except PlanError as error:
        raise PlanError(f"{name}.{error.field}", error.given, error.allowed) from error
    return RopeDict(**{**vars(read), "rope_theta": _base(config, family, read, label, name)})


def _base(config: Config, family: Family, rope: RopeDict, label: str, name: str) -> float:
    key = family.bases.get(label, "rope_theta")
    beside = get(config, key)
    for other in NAMES.get(key, ()):
        if config.get(other) not in (None, beside):
            raise PlanError(
                other, config[other], f"it is another name of {key}, and beside it the base is {shown(beside)}"
            )
    if beside is None and key != "rope_theta" and key in config:
        # ModernBERT: a local base of null is the global one.
        beside = get(config, next(iter(family.bases.values())))
    if rope.rope_theta is not None:
        if beside is not None and beside != rope.rope_theta:
            raise PlanError(f"{name}.rope_theta", rope.rope_theta, f"{key} beside it says {shown(beside)}")
        return _as_float(rope.rope_theta)
    base = beside if beside is not None else family.default_bases.get(label)
    if base is None:
        model_type = config["model_type"]
        stranger = "" if known(model_type) else f"; {model_type!r} is a family of which nothing is known"
        raise PlanError(
            key, None, f"the base is missing, and no default is safe: state it (10000 in the first Llamas){stranger}"
        )
    return _as_float(base)


def _as_float(value: float) -> float:
    """The number as a float."""
    require_positive(rope_theta=value)
    return float(value)
