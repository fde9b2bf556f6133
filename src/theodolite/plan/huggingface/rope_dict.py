"""One rope dict of a config (`rope_parameters` of transformers 5, or the older `rope_scaling`), read.

Axes (`mrope_section`) and frequency scaling are separate matters that share the dict: neither shuts the other out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from theodolite.plan.errors import PlanError, require_list, require_one_of, require_whole, shown
from theodolite.plan.scaling import NTK, DynamicNTK, Linear, Llama3, LongRoPE, Scaling, YaRN

# The older names of a rope type. "mrope" says what the axes are and nothing about the scaling.
ALIASES = {"su": "longrope", "mrope": "default"}

_L = "original_max_position_embeddings"
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "alpha", _L),
    # "finetuned" is a note that the YaRN authors' own models carry; it has no effect on the frequencies.
    "yarn": (
        "factor",
        _L,
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",
    ),
    "longrope": ("factor", _L, "attention_factor", "short_factor", "long_factor", "short_mscale", "long_mscale"),
    "llama3": ("factor", _L, "low_freq_factor", "high_freq_factor"),
    "proportional": ("factor",),
}


@dataclass(frozen=True, kw_only=True)
class RopeDict:
    """What one rope dict says; None where it says nothing."""

    scaling: Scaling
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    proportional: bool = False
    mrope_section: tuple[int, ...] | None = None
    mrope_interleaved: bool | None = None


def read_rope_dict(
    rope: Mapping[str, Any],
    *,
    max_position_embeddings: int | None,
    original_max_position_embeddings: int | None = None,
    aliases: Mapping[str, str] = ALIASES,
    further_keys: tuple[str, ...] = (),
) -> RopeDict:
    """Read one rope dict.

    Args:
        max_position_embeddings: the length (tokens) that the config states beside the dict.
        original_max_position_embeddings: the same key stated beside the dict (Phi-3), which then overrides it.
        aliases: older names of rope types.
        further_keys: keys that this family's dict carries besides the standard ones.
    """
    rope_type = _rope_type(rope, aliases)
    require_one_of("rope_type", rope_type, KEYS)
    given = {key: value for key, value in rope.items() if value is not None}
    _refuse_unknown_keys(given, rope_type, further_keys)
    original = given.get(_L) if original_max_position_embeddings is None else original_max_position_embeddings
    require_whole(original_max_position_embeddings=original)
    section = given.get("mrope_section")
    for name in ("mrope_section", "short_factor", "long_factor"):
        require_list(**{name: given.get(name)})
    return RopeDict(
        scaling=_scaling(given, rope_type, max_position_embeddings, original),
        rope_theta=given.get("rope_theta"),
        partial_rotary_factor=given.get("partial_rotary_factor"),
        proportional=rope_type == "proportional",
        mrope_section=None if section is None else tuple(section),
        mrope_interleaved=given.get("mrope_interleaved"),
    )


def _rope_type(rope: Mapping[str, Any], aliases: Mapping[str, str]) -> str:
    named = [rope[key] for key in ("rope_type", "type") if rope.get(key) is not None]
    for name in named:
        if not isinstance(name, str):
            raise PlanError("rope_type", name, "it must be a name")
    # "mrope" beside a scaling's name only adds the axes.
    settled = {aliases.get(name, name) for name in named if name != "mrope"} or {"default"}
    if len(settled) == 2 and "mrope" not in named:
        raise PlanError(
            "rope_type", rope["rope_type"], f"it contradicts type={shown(rope['type'])}, and both name the scaling"
        )
    return str(settled.pop())


def _refuse_unknown_keys(given: Mapping[str, Any], rope_type: str, further_keys: tuple[str, ...]) -> None:
    known = (*_COMMON, *KEYS[rope_type], *further_keys)
    for key in given:
        if key not in known:
            raise PlanError(
                key,
                given[key],
                f"not a key of rope type {rope_type!r}, which has: {', '.join(_COMMON + KEYS[rope_type])}",
            )


def _scaling(given: Mapping[str, Any], rope_type: str, length: int | None, original: int | None) -> Scaling:
    if rope_type == "default":
        return Scaling()
    if rope_type == "linear":
        return Linear(factor=_required(given, "factor", rope_type))
    if rope_type == "proportional":
        return Linear(factor=given["factor"]) if "factor" in given else Scaling()
    if rope_type == "dynamic":
        return _dynamic(given, length)
    if original is None:
        raise PlanError(_L, None, f"rope type {rope_type!r} needs the length (tokens) that the model was trained to")
    if rope_type == "llama3":
        return Llama3(
            factor=_required(given, "factor", rope_type),
            low_freq_factor=_required(given, "low_freq_factor", rope_type),
            high_freq_factor=_required(given, "high_freq_factor", rope_type),
            original_max_position_embeddings=original,
        )
    factor = given.get("factor")
    if factor is None:
        factor = _implied_factor(length, original, rope_type)
    if rope_type == "longrope":
        return LongRoPE(
            short_factor=tuple(_required(given, "short_factor", rope_type)),
            long_factor=tuple(_required(given, "long_factor", rope_type)),
            original_max_position_embeddings=original,
            factor=factor,
            attention_factor_given=_longrope_attention_factor(given),
        )
    return YaRN(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor_given=given.get("attention_factor"),
        **{
            name: given[name]
            for name in ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim")
            if name in given
        },
    )


def _dynamic(given: Mapping[str, Any], length: int | None) -> Scaling:
    if "alpha" in given:
        # Hunyuan calls it "dynamic", but a fixed alpha is NTK at one factor for every length.
        return NTK(factor=given["alpha"])
    if length is None:
        raise PlanError("max_position_embeddings", None, "rope type 'dynamic' grows from this length (tokens)")
    if given.get(_L, length) != length:
        raise PlanError(
            _L,
            given[_L],
            f"rope type 'dynamic' grows from max_position_embeddings ({length}), so the two must be equal",
        )
    return DynamicNTK(factor=_required(given, "factor", "dynamic"), original_max_position_embeddings=length)


def _implied_factor(length: int | None, original: int, rope_type: str) -> float:
    if length is None:
        raise PlanError("factor", None, f"rope type {rope_type!r} needs it, or max_position_embeddings to imply it")
    if length < original:
        raise PlanError(
            _L, original, f"without a factor it must be at most max_position_embeddings ({length}), which implies one"
        )
    return length / original


def _longrope_attention_factor(given: Mapping[str, Any]) -> float | None:
    """PhiMoE states one attention factor for each of the two lists; they are equal in every released model."""
    short, long = given.get("short_mscale"), given.get("long_mscale")
    if short is None and long is None:
        return given.get("attention_factor")
    if short != long:
        raise PlanError(
            "short_mscale",
            short,
            f"only one attention factor for both lists is known, and long_mscale is {shown(long)}",
        )
    return short


def _required(given: Mapping[str, Any], key: str, rope_type: str) -> Any:
    if key not in given:
        raise PlanError(key, None, f"rope type {rope_type!r} needs it")
    return given[key]
