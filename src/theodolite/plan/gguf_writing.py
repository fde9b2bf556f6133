"""A plan, written as the metadata of a GGUF file, and as its tensors of divisors.

As llama.cpp reads it (`llama-context.cpp`, `models/*.cpp`): it multiplies `rope.scaling.attn_factor` by the factor
that it has for YaRN by itself, has one base and one scaling for all layers without a window, and divides each pair's
frequency by `rope_freqs.weight`, or under `longrope` by `rope_factors_long.weight`, in the architectures that load
those tensors; the others refuse a file that has them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from theodolite.plan.errors import PlanError
from theodolite.plan.gguf import read_file
from theodolite.plan.model import LayerPlan, ModelPlan
from theodolite.plan.rotary import Rotary
from theodolite.plan.scaling import NTK, DynamicNTK, Linear, Llama3, LongRoPE, Scaling, YaRN, plain_inv_freq

Value = int | float | str | None

_FREQS = ("llama", "granite", "granitemoe", "minicpm", "arcee", "exaone4", "apertus")
_LONG_FACTORS = ("llama", "granite", "granitemoe", "minicpm", "apertus", "phi3", "phimoe", "minicpm3")
# Numbers are kept in float32, and two of them enter a frequency.
_ROUNDED = 2.0**-22
_SCALING_KEYS = (
    "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "rope.scaling.original_context_length",
    "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What is to be different in a file.

    Args:
        values: metadata by full key: a number of tokens (uint32), a float (float32) or a text; None takes the key away.
        divisors: numbers by the name of their tensor, one per pair (float32).
    """

    values: Mapping[str, Value]
    divisors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


def changes_for(keys: Mapping[str, Any], before: ModelPlan, after: ModelPlan) -> Changes:
    """What makes a file with these metadata, which says `before`, say `after`.

    Raises:
        PlanError: for what GGUF, or llama.cpp's code for the architecture, has no words for.
    """
    architecture = str(keys["general.architecture"])
    values: dict[str, Value] = {"context_length": after.max_position_embeddings}
    divisors: dict[str, tuple[float, ...]] = {}
    if (pair := _changed_rotary(before, after)) is not None:
        old, new = pair
        if isinstance(new.scaling, NTK):
            theta = new.scaling.scaled_theta(new.rope_theta, new.rotary_dim)
            new = replace(new, rope_theta=theta, scaling=Scaling())
        if new.rope_theta != old.rope_theta:
            values["rope.freq_base"] = float(new.rope_theta)
        if new.scaling != old.scaling:
            said, divisors = _scaling(new, architecture)
            values |= dict.fromkeys(_SCALING_KEYS) | said
    named = {f"{architecture}.{name}": value for name, value in values.items()}
    # What is to go is named only where it is there.
    kept = {name: value for name, value in named.items() if value is not None or name in keys}
    return Changes(values=kept, divisors=divisors)


def _changed_rotary(before: ModelPlan, after: ModelPlan) -> tuple[Rotary, Rotary] | None:
    pairs = [(old.rotate, new.rotate) for old, new in zip(before.layers, after.layers, strict=True)]
    changed = list(dict.fromkeys(pair for pair in pairs if pair[0] != pair[1]))
    if not changed:
        return None
    (old, new), *others = changed
    if old is None or new is None or others:
        raise PlanError("layers", f"{len(changed)} different changes", "a GGUF has one scaling for all it scales")
    return old, new


def _scaling(rotary: Rotary, architecture: str) -> tuple[dict[str, Value], dict[str, tuple[float, ...]]]:
    """The metadata (without the architecture's name) and the tensors that say a scaling."""
    scaling = rotary.scaling
    if type(scaling) is Scaling:
        return {}, {}
    if isinstance(scaling, Linear):
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.factor)}, {}
    if isinstance(scaling, YaRN):
        return _yarn(scaling), {}
    if isinstance(scaling, DynamicNTK):
        raise PlanError("scaling", "dynamic", "llama.cpp has one base for all lengths; take ntk with a factor: ntk:3")
    if isinstance(scaling, (Llama3, LongRoPE)):
        return _divided(rotary, scaling, architecture)
    raise PlanError("scaling", scaling.rope_type, "llama.cpp has one set of frequencies for all sequences")


def _yarn(scaling: YaRN) -> dict[str, Value]:
    if scaling.ramp != "index" or not scaling.truncate:
        given = f"ramp={scaling.ramp!r}, truncate={scaling.truncate}"
        raise PlanError("scaling", given, "llama.cpp takes YaRN's ramp in the pair's index, its ends rounded")
    values: dict[str, Value] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(scaling.factor),
        "rope.scaling.original_context_length": scaling.original_max_position_embeddings,
    }
    if (scaling.beta_fast, scaling.beta_slow) != (32.0, 1.0):
        values["rope.scaling.yarn_beta_fast"] = float(scaling.beta_fast)
        values["rope.scaling.yarn_beta_slow"] = float(scaling.beta_slow)
    if scaling.mscale_all_dim:
        values["rope.scaling.yarn_log_multiplier"] = scaling.mscale_all_dim / 10
    elif not math.isclose(scaling.attention_factor(), scaling.magnitude(1.0), rel_tol=1e-9):
        values["rope.scaling.attn_factor"] = scaling.attention_factor() / scaling.magnitude(1.0)
    return values


def _divided(
    rotary: Rotary, scaling: Llama3 | LongRoPE, architecture: str
) -> tuple[dict[str, Value], dict[str, tuple[float, ...]]]:
    if rotary.live_pairs is not None:
        raise PlanError("live_pairs", rotary.live_pairs, "no divisor makes a pair stand still")
    original, amplitude = scaling.original_max_position_embeddings, scaling.attention_factor()
    plain = plain_inv_freq(rotary.rope_theta, rotary.rotary_dim)
    short, long = (tuple(plain / rotary.inv_freq(length=length)) for length in (original, original + 1))
    if short == long and amplitude == 1.0 and architecture in _FREQS:
        return {}, {"rope_freqs.weight": long}
    if architecture not in _LONG_FACTORS:
        given = f"{scaling.rope_type} in architecture {architecture!r}"
        raise PlanError("scaling", given, "llama.cpp does not load divisors for it; take yarn, linear or ntk")
    values: dict[str, Value] = {
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": float(amplitude),
    }
    return values, {"rope_factors_long.weight": long, "rope_factors_short.weight": short}


def require_says(path: Path, plan: ModelPlan) -> None:
    """Raise unless a file, read back, says this plan, to the last bits of float32.

    Raises:
        PlanError: it says another one; the message names the first difference.
    """
    found = read_file(path)
    for name, mine, theirs in (
        ("context_length", plan.max_position_embeddings, found.max_position_embeddings),
        ("block_count", len(plan.layers), len(found.layers)),
    ):
        if mine != theirs:
            raise PlanError(name, mine, f"the file says {theirs}")
    lengths = {getattr(r.scaling, "original_max_position_embeddings", 1) for r in (*plan.rotaries, *found.rotaries)}
    checked = {1, *lengths, *(length + 1 for length in lengths)}
    for pair in dict.fromkeys(zip(plan.layers, found.layers, strict=True)):
        if not _same(*pair, checked):
            raise PlanError("scaling", pair[0], f"the file can only say {pair[1]}")


def _same(wanted: LayerPlan, found: LayerPlan, lengths: set[int]) -> bool:
    mine, theirs = wanted.rotate, found.rotate
    scales = [1.0 if scale is None else scale for scale in (wanted.score_scale, found.score_scale)]
    if replace(wanted, rotate=None, score_scale=None) != replace(found, rotate=None, score_scale=None):
        return False
    if (wanted.score_scale is None) != (found.score_scale is None) or not math.isclose(*scales, rel_tol=_ROUNDED):
        return False
    if mine is None or theirs is None:
        return mine is theirs
    if replace(mine, rope_theta=2.0, scaling=Scaling()) != replace(theirs, rope_theta=2.0, scaling=Scaling()):
        return False
    if not math.isclose(mine.attention_factor(), theirs.attention_factor(), rel_tol=_ROUNDED):
        return False
    return all(
        np.allclose(mine.inv_freq(length=length), theirs.inv_freq(length=length), rtol=_ROUNDED, atol=0.0)
        for length in lengths
    )
