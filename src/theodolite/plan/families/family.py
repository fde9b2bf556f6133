"""The shape of a row of the family table, and the reading of keys that have several names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from theodolite.plan.errors import LONGEST, PlanError, require_list, require_positive, require_whole

Config = Mapping[str, Any]
# One name per layer, first layer first.
Pattern = Callable[[Config, int], list[str]]

MOST_LAYERS = 100_000
WIDEST = 2**20
"""Channels of a model, and heads of one, at most."""

# The names that one quantity has in different families.
NAMES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model", "dim"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels"),
    "max_position_embeddings": (
        "max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "seq_length", "n_ctx",
    ),
    "sliding_window": ("sliding_window", "attention_window_size"),
    "rope_theta": ("rope_theta", "rotary_emb_base", "rotary_embedding_base"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_emb_fraction"),
}  # fmt: skip


def get(config: Config, name: str) -> Any:
    """The value of a quantity under whichever of its names the config uses; None where it is absent or null."""
    for key in NAMES.get(name, (name,)):
        if config.get(key) is not None:
            return config[key]
    return None


def need(config: Config, name: str) -> Any:
    """`get`, and PlanError where there is nothing."""
    value = get(config, name)
    if value is None:
        names = NAMES.get(name, (name,))
        also = f" (or {', '.join(names[1:])})" if names[1:] else ""
        raise PlanError(name, None, f"the config does not state it{also}")
    return value


def whole(config: Config, name: str, *, least: int = 1, most: int = LONGEST) -> int:
    """`need`, and PlanError for what is no whole number between the two, ends included."""
    value: int = need(config, name)
    require_whole(least=least, most=most, **{name: value})
    return value


def positive(config: Config, name: str) -> float:
    """`need`, and PlanError for what is no finite number above 0."""
    value: float = need(config, name)
    require_positive(**{name: value})
    return value


def flag(config: Config, name: str, default: bool = False) -> bool:
    """A key that is true or false (or a number, as some configs have it); the default where it is absent or null."""
    value = config.get(name)
    if value is not None and not isinstance(value, (bool, int)):
        raise PlanError(name, value, "it must be true or false")
    return default if value is None else bool(value)


def is_stated(config: Config, key_and_value: tuple[str, Any] | None) -> bool:
    """Whether the config has that value under that key."""
    return key_and_value is not None and bool(config.get(key_and_value[0]) == key_and_value[1])


def listed(config: Config, name: str, kind: type | tuple[type, ...], *, count: int | None = None) -> list[Any] | None:
    """A list whose entries are of that kind, `count` of them if that is given; None where it is absent or null."""
    value = config.get(name)
    if value is None:
        return None
    require_list(**{name: value})
    if not all(isinstance(entry, kind) for entry in value):
        names = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
        raise PlanError(name, value, f"its entries must be of type {names}")
    if count is not None and len(value) != count:
        raise PlanError(name, f"{len(value)} entries", f"one per layer is needed: num_hidden_layers is {count}")
    return list(value)


def mapped(config: Config, name: str) -> Mapping[Any, Any]:
    """A mapping; empty where it is absent or null."""
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise PlanError(name, value, "it must be a mapping, or null")
    return value or {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """What must be known about a family beyond the keys of its config.

    Args:
        interleaved: pairs are neighbouring channels. transformers' convention is half-split, so that is the default.
        causal: queries see only what stands before them.
        causal_if: the key and the value with which they do in a family where else they see both ways.
        defaults: values that released configs of the family leave out on purpose, since its config class, or
            the code of its authors, fixes them.
        default_bases: the base on the same terms, by label ("" where there is one dict).
        partial_rotary_factor: the part of the head that turns, on the same terms.
        pattern: the layer types where `layer_types` is not given.
        unrotated: layer types that have attention and no rotation, where the config has a window for the others.
        rotates_if: the key and the value with which there is any rotation at all.
        nested: the labels under which `rope_parameters` stands in the family's configs; () where it is one dict.
        bases: top-level keys of the base by label, where the family has more than one.
        scaled: labels that an older, flat `rope_scaling` acts on; () for all.
        aliases: further older names of rope types.
        rope_keys: further keys of its rope dict.
        fixed: its code has one base and no scaling, whatever the config says of them.
        latent: queries and keys have a part that turns and one that does not (`qk_rope_head_dim`).
        mrope_interleaved: its axes alternate pair by pair.
        mrope_section: pairs per axis where the config states none and the model's code has its own.
        score_scale: the multiplier of q.k where it is not `head_dim ** -0.5`.
        sinks: learned logits in the softmax's denominator.
    """

    interleaved: bool = False
    causal: bool = True
    causal_if: tuple[str, Any] | None = None
    defaults: Config = field(default_factory=dict)
    default_bases: Mapping[str, float] = field(default_factory=dict)
    partial_rotary_factor: float = 1.0
    pattern: Pattern | None = None
    unrotated: tuple[str, ...] = ()
    rotates_if: tuple[str, Any] | None = None
    nested: tuple[str, ...] = ()
    bases: Mapping[str, str] = field(default_factory=dict)
    scaled: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    rope_keys: tuple[str, ...] = ()
    fixed: bool = False
    latent: bool = False
    mrope_interleaved: bool = False
    mrope_section: tuple[int, ...] | None = None
    score_scale: Callable[[Config], float | None] | None = None
    sinks: bool = False
