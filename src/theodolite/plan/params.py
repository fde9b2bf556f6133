"""The `params.json` beside the weights that Meta and Mistral release in their own formats, read into a plan.

Keys and what they mean are those of `meta-llama/llama-models` (`args.py`, `model.py`), of `mistral-inference`
(`args.py`, `transformer.py`) and of vLLM's reading of the latter (`transformers_utils/configs/mistral.py`). In both
formats pairs are neighbouring channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from theodolite.plan.errors import PlanError, boundary, require_positive, require_whole
from theodolite.plan.families.family import MOST_LAYERS, WIDEST, flag, listed, positive, whole
from theodolite.plan.model import LayerPlan, Mask, ModelPlan, Temperature
from theodolite.plan.rotary import Rotary
from theodolite.plan.scaling import Llama3, Scaling, YaRN

Params = Mapping[str, Any]
# What Meta's code has where its file says `use_scaled_rope` and no more: Llama 3.1's, and Llama 4 Scout's.
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA4 = {**_LLAMA3, "factor": 16.0, "high_freq_factor": 1.0}
_READ = {
    "rope_theta", "use_scaled_rope", "rope_scaling_factor", "rope_high_freq_factor", "nope_layer_interval",
}  # fmt: skip
_YARN = {"factor", "original_max_position_embeddings", "alpha", "beta", "apply_scale"}
_TEMPERATURE = {"original_max_position_embeddings", "beta"}


def is_params(raw: Params) -> bool:
    """Whether a JSON object is one of these files rather than a config of transformers."""
    return "model_type" not in raw and "dim" in raw and "n_layers" in raw


def read_params(params: Params, *, source: str | None = None) -> ModelPlan:
    """What a `params.json` says about positions.

    Raises:
        PlanError: a base or another needed key is missing; a key that speaks of rotation is unknown; a number is out
            of range; the model is one that only its config.json describes (latent attention).
    """
    with boundary("params", source):
        _refuse_unread(params)
        count = whole(params, "n_layers", most=MOST_LAYERS)
        head_dim = _head_dim(params)
        length = params.get("max_position_embeddings", params.get("max_seq_len"))
        require_whole(max_position_embeddings=length)
        rotary = Rotary(head_dim=head_dim, rope_theta=_base(params), scaling=_scaling(params, length), interleaved=True)
        windows, turning = _windows(params, count), _turning(params, count)
        return ModelPlan(
            model_type="mistral" if is_mistral(params) else "llama4_text" if _is_llama4(params) else "llama",
            max_position_embeddings=length,
            layers=tuple(
                LayerPlan(
                    rotate=rotary if turns else None,
                    mask=Mask(sliding_window=window, chunk=_chunk(params) if turns else None),
                    temperature=_temperature(params, turns=turns),
                )
                for window, turns in zip(windows, turning, strict=True)
            ),
            one_rotary=True,
        )


def is_mistral(params: Params) -> bool:
    """Whether the file is Mistral's: it states the width of the feed-forward layers, and Meta's derives it."""
    return "hidden_dim" in params and "multiple_of" not in params


def _is_llama4(params: Params) -> bool:
    return params.get("nope_layer_interval") is not None or params.get("attention_chunk_size") is not None


def _refuse_unread(params: Params) -> None:
    for key in ("qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank"):
        if params.get(key):
            raise PlanError(key, params[key], "latent attention is read from the model's config.json; give that")
    for key, value in params.items():
        if "rope" in key and key not in _READ and value not in (None, False):
            raise PlanError(key, value, "it speaks of rotation and no reading of it is known")


def _head_dim(params: Params) -> int:
    if params.get("head_dim") is not None:
        return whole(params, "head_dim", most=WIDEST)
    width, heads = (whole(params, key, most=WIDEST) for key in ("dim", "n_heads"))
    if width % heads:
        raise PlanError("dim", width, f"without a head_dim it must be a multiple of n_heads ({heads})")
    return width // heads


def _base(params: Params) -> float:
    if params.get("rope_theta") is not None:
        return float(positive(params, "rope_theta"))
    codes = (
        "mistral-inference has 1000000, and the first Mistral 7B was trained with 10000"
        if is_mistral(params)
        else "Meta's code has 10000 in Llama 1 and 2 and 500000 in 3"
    )
    raise PlanError("rope_theta", None, f"the base is missing, and no default is safe ({codes}): state it")


def _scaling(params: Params, length: int | None) -> Scaling:
    yarn = _object(params, "yarn", _YARN)
    if yarn and flag(params, "use_scaled_rope"):
        raise PlanError("yarn", yarn, "use_scaled_rope stands beside it, and a model has one scaling")
    if yarn:
        for key in ("factor", "original_max_position_embeddings"):
            if yarn.get(key) is None:
                raise PlanError(f"yarn.{key}", None, "YaRN needs it")
        return YaRN(
            factor=float(positive(yarn, "factor")),
            original_max_position_embeddings=whole(yarn, "original_max_position_embeddings"),
            beta_fast=float(positive({"beta": 32, **yarn}, "beta")),
            beta_slow=float(positive({"alpha": 1, **yarn}, "alpha")),
            attention_factor_given=None if flag(yarn, "apply_scale", True) else 1.0,
        )
    if not flag(params, "use_scaled_rope"):
        return Scaling()
    numbers: dict[str, Any] = dict(_LLAMA4 if _is_llama4(params) else _LLAMA3)
    for key, name in (("rope_scaling_factor", "factor"), ("rope_high_freq_factor", "high_freq_factor")):
        if params.get(key) is not None:
            require_positive(**{key: params[key]})
            numbers[name] = float(params[key])
    if numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        # Meta's code then has no blend: pairs are kept below this wavelength, and divided above it.
        numbers["high_freq_factor"] = math.nextafter(numbers["low_freq_factor"], math.inf)
    return Llama3(**numbers)


def _object(params: Params, name: str, known: set[str]) -> dict[str, Any]:
    value = params.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise PlanError(name, value, "it must be an object")
    for key in value:
        if key not in known:
            raise PlanError(f"{name}.{key}", value[key], f"known: {', '.join(sorted(known))}")
    return dict(value)


def _windows(params: Params, count: int) -> list[int | None]:
    """The window of each layer; a list is repeated, null standing for none."""
    given = params.get("sliding_window")
    if given is None:
        return [None] * count
    pattern = listed(params, "sliding_window", (int, type(None))) if isinstance(given, (list, tuple)) else [given]
    if not pattern or count % len(pattern):
        raise PlanError(
            "sliding_window", given, f"its entries are repeated over the layers, of which there are {count}"
        )
    require_whole(**{"sliding_window": given} if pattern == [given] else {})
    for window in pattern:
        require_whole(sliding_window=window)
    return list(pattern) * (count // len(pattern))


def _turning(params: Params, count: int) -> list[bool]:
    if params.get("nope_layer_interval") is None:
        return [True] * count
    step = whole(params, "nope_layer_interval")
    return [(i + 1) % step != 0 for i in range(count)]


def _chunk(params: Params) -> int | None:
    return None if params.get("attention_chunk_size") is None else whole(params, "attention_chunk_size")


def _temperature(params: Params, *, turns: bool) -> Temperature | None:
    given = _object(params, "llama_4_scaling", _TEMPERATURE)
    if given:
        for key in sorted(_TEMPERATURE):
            if given.get(key) is None:
                raise PlanError(f"llama_4_scaling.{key}", None, "the temperature needs it")
        return Temperature(beta=given["beta"], length=whole(given, "original_max_position_embeddings"))
    if not turns and flag(params, "attn_temperature_tuning"):
        length = positive({"floor_scale": 8192.0, **params}, "floor_scale")
        return Temperature(beta=params.get("attn_scale", 0.1), length=int(length), shift=1)
    return None
