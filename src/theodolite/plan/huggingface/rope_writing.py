"""One encoding, written as the `rope_parameters` dict of transformers 5."""

from __future__ import annotations

import math
from typing import Any

from theodolite.plan.errors import PlanError
from theodolite.plan.rotary import Rotary
from theodolite.plan.scaling import NTK, DynamicNTK, Linear, Llama3, LongRoPE, Scaling, YaRN

_L = "original_max_position_embeddings"


def partial_factor(head_dim: int, rotary_dim: int) -> float:
    """The number p for which `int(head_dim * p)` is exactly `rotary_dim`, as every reader of a config computes it."""
    factor = rotary_dim / head_dim
    return factor if int(head_dim * factor) == rotary_dim else math.nextafter(factor, math.inf)


def write_rope_dict(rotary: Rotary) -> dict[str, Any]:
    """The `rope_parameters` dict of transformers 5 that says this encoding (layout and head width stand elsewhere).

    Raises:
        PlanError: for what the dict has no words for.
    """
    scaling, theta = rotary.scaling, rotary.rope_theta
    if isinstance(scaling, NTK):
        theta = scaling.scaled_theta(theta, rotary.rotary_dim)
        scaling = Scaling()
    rope: dict[str, Any] = {"rope_type": scaling.rope_type, "rope_theta": theta, **_scaling_keys(scaling)}
    if rotary.live_pairs is not None:
        if not (type(scaling) is Scaling or isinstance(scaling, Linear)):
            raise PlanError(
                "live_pairs", rotary.live_pairs, f"a config cannot say it together with {scaling.rope_type!r}"
            )
        if rotary.rotary_dim != rotary.head_dim:
            raise PlanError(
                "live_pairs", rotary.live_pairs, "a config cannot say it together with a partial rotary_dim"
            )
        rope["rope_type"] = "proportional"
        rope["partial_rotary_factor"] = 2 * rotary.live_pairs / rotary.head_dim
    elif rotary.rotary_dim != rotary.head_dim:
        rope["partial_rotary_factor"] = partial_factor(rotary.head_dim, rotary.rotary_dim)
    if rotary.mrope_section is not None:
        rope["mrope_section"] = list(rotary.mrope_section)
        if rotary.mrope_interleaved:
            rope["mrope_interleaved"] = True
    return rope


def _scaling_keys(scaling: Scaling) -> dict[str, Any]:
    # Factors as floats: older readers of transformers ask for them.
    if type(scaling) is Scaling:
        return {}
    if isinstance(scaling, Linear):
        return {"factor": float(scaling.factor)}
    if isinstance(scaling, DynamicNTK):
        return {"factor": float(scaling.factor)}
    if isinstance(scaling, Llama3):
        names = ("factor", "low_freq_factor", "high_freq_factor")
        return {name: float(getattr(scaling, name)) for name in names} | {_L: scaling.original_max_position_embeddings}
    if isinstance(scaling, YaRN):
        return _yarn_keys(scaling)
    if isinstance(scaling, LongRoPE):
        keys = {
            "short_factor": list(scaling.short_factor),
            "long_factor": list(scaling.long_factor),
            # Without a factor readers would imply one from max_position_embeddings.
            "factor": 1.0 if scaling.factor is None else float(scaling.factor),
            _L: scaling.original_max_position_embeddings,
        }
        if scaling.attention_factor_given is not None:
            keys["attention_factor"] = scaling.attention_factor_given
        return keys
    raise PlanError("scaling", scaling.rope_type, "a config has no name for it")


def _yarn_keys(scaling: YaRN) -> dict[str, Any]:
    if scaling.ramp != "index":
        raise PlanError("ramp", scaling.ramp, "every reader of a config takes the ramp in the pair's index")
    keys: dict[str, Any] = {"factor": float(scaling.factor), _L: scaling.original_max_position_embeddings}
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0), ("truncate", True)):
        if getattr(scaling, name) != default:
            keys[name] = getattr(scaling, name)
    for name, value in (
        ("attention_factor", scaling.attention_factor_given),
        ("mscale", scaling.mscale),
        ("mscale_all_dim", scaling.mscale_all_dim),
    ):
        if value is not None:
            keys[name] = value
    return keys
