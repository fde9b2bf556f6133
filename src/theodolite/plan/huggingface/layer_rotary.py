"""The rotation of one layer, from its rope dict and from what the config and the family say beside it."""

from __future__ import annotations

import math

from theodolite.plan.errors import PlanError, require_bool, require_positive, require_whole, shown
from theodolite.plan.families import Family, known
from theodolite.plan.families.family import WIDEST, Config, flag, get, mapped, whole
from theodolite.plan.huggingface.rope_dict import RopeDict
from theodolite.plan.huggingface.rope_writing import partial_factor
from theodolite.plan.rotary import Rotary


def head_dim_of(config: Config, family: Family, index: int, layer_type: str | None) -> int:
    if config.get("qk_rope_head_dim") is not None:
        if not family.latent:
            raise PlanError("qk_rope_head_dim", config["qk_rope_head_dim"], "latent attention of an unknown family")
        return sum(whole(config, key, least=0, most=WIDEST) for key in ("qk_nope_head_dim", "qk_rope_head_dim"))
    by_layer = mapped(config, "per_layer_config")
    own = by_layer.get(index, by_layer.get(str(index)))
    override = mapped({f"per_layer_config.{index}": own}, f"per_layer_config.{index}").get("head_dim")
    if override is None and layer_type == "full_attention":
        override = config.get("global_head_dim")
    if override is not None or get(config, "head_dim") is not None:
        return whole(config if override is None else {"head_dim": override}, "head_dim", most=WIDEST)
    hidden, heads = (whole(config, key, most=WIDEST) for key in ("hidden_size", "num_attention_heads"))
    if hidden % heads:
        raise PlanError("hidden_size", hidden, f"without a head_dim it must be a multiple of the heads ({heads})")
    return hidden // heads


def rotary_of(config: Config, family: Family, rope: RopeDict, head_dim: int, index: int) -> Rotary | None:
    bases = config.get("layer_rope_theta")
    base = bases[index] if bases else rope.rope_theta
    assert base is not None
    interleaved = flag(config, "rope_interleave", family.interleaved)
    if family.latent:
        turned = whole(config, "qk_rope_head_dim", least=0, most=WIDEST)
        if turned == 0:
            return None
        return Rotary(
            head_dim=head_dim,
            rope_theta=base,
            rotary_dim=turned,
            scaling=rope.scaling,
            interleaved=interleaved,
            trailing=True,
        )
    if rope.mrope_section is None and family.mrope_section is not None:
        rope = RopeDict(**{**vars(rope), "mrope_section": family.mrope_section})
    if rope.mrope_interleaved is not None:
        require_bool(mrope_interleaved=rope.mrope_interleaved)
    alternating = family.mrope_interleaved if rope.mrope_interleaved is None else rope.mrope_interleaved
    if known(config["model_type"]) and alternating != family.mrope_interleaved:
        raise PlanError(
            "mrope_interleaved", rope.mrope_interleaved, f"this family's code has it {family.mrope_interleaved}"
        )
    return _from_dict(
        rope,
        head_dim=head_dim,
        rope_theta=base,
        factor=_partial(config, family, rope, head_dim),
        interleaved=interleaved,
        mrope_interleaved=alternating,
    )


def _partial(config: Config, family: Family, rope: RopeDict, head_dim: int) -> float:
    """The part of the head that turns, from wherever the config states it; all places that do must agree."""
    stated = {
        "rope_parameters.partial_rotary_factor": rope.partial_rotary_factor,
        "partial_rotary_factor": get(config, "partial_rotary_factor"),
        "rotary_dim": config.get("rotary_dim"),
    }
    given = {name: value for name, value in stated.items() if value is not None}
    if not given:
        return family.partial_rotary_factor
    for name, value in given.items():
        if name == "rotary_dim":
            require_whole(rotary_dim=value, most=WIDEST)
        else:
            _require_part(name, value)
    channels = {name: int(value if name == "rotary_dim" else head_dim * value) for name, value in given.items()}
    first = next(iter(given))
    for name, value in given.items():
        if channels[name] != channels[first]:
            raise PlanError(name, value, f"{first}={shown(given[first])} beside it says {channels[first]} channels")
    return partial_factor(head_dim, channels[first]) if first == "rotary_dim" else float(given[first])


def _require_part(name: str, value: float) -> None:
    require_positive(**{name: value})
    if value > 1:
        raise PlanError(name, value, "it must be at most 1")


def score_scale_of(config: Config, family: Family, rotate: Rotary | None, head_dim: int) -> float | None:
    scale = None if family.score_scale is None else family.score_scale(config)
    if family.latent and rotate is not None and rotate.scaling.score_factor() != 1.0:
        # DeepSeek: the temperature stands here, and the factor on cos and sin is only a ratio (1 in V3).
        scale = head_dim**-0.5 * rotate.scaling.score_factor()
    return None if scale is None or math.isclose(scale, head_dim**-0.5, rel_tol=1e-12) else scale


def _from_dict(
    rope: RopeDict, *, head_dim: int, rope_theta: float, factor: float, interleaved: bool, mrope_interleaved: bool
) -> Rotary:
    """The encoding of one layer, from its dict and what the config and the family say beside it.

    Args:
        factor: the part of the head that turns, 0 to 1.
    """
    _require_part("partial_rotary_factor", factor)
    section = rope.mrope_section
    live_pairs = int(factor * head_dim // 2) if rope.proportional else None
    return Rotary(
        head_dim=head_dim,
        rope_theta=rope_theta,
        rotary_dim=head_dim if rope.proportional else int(head_dim * factor),
        live_pairs=None if live_pairs == head_dim // 2 else live_pairs,
        scaling=rope.scaling,
        interleaved=interleaved,
        mrope_section=section,
        mrope_interleaved=mrope_interleaved and section is not None,
    )
