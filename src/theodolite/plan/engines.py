"""The settings to paste into transformers, vLLM, SGLang and llama.cpp, so that they apply a plan.

Read off: vLLM's `model_executor/layers/rotary_embedding` and its page on context extension, SGLang's
`srt/layers/rotary_embedding/factory.py`, llama.cpp's server README and `llama-context.cpp`. An engine that cannot do
what the plan says gets a sentence in place of its command, or a comment line above it where it does something near.
"""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

from theodolite.plan.errors import PlanError, require_whole
from theodolite.plan.families import family_of
from theodolite.plan.gguf_architectures import WINDOWED
from theodolite.plan.huggingface import rope_parameters
from theodolite.plan.model import ModelPlan
from theodolite.plan.rotary import Rotary
from theodolite.plan.scaling import NTK, DynamicNTK, Linear, Llama3, LongRoPE, Scaling, YaRN, YaRNByLength


def settings(
    plan: ModelPlan, *, model: str, length: int, part: str | None = None, as_shipped: bool = False
) -> dict[str, str | dict[str, Any]]:
    """What makes each engine apply this plan for sequences of up to `length` tokens.

    Args:
        model: the model's name or path, as the engines take it.
        part: the key of the language model in a config of several parts ("text_config"), or None.
        as_shipped: the plan is what the model's own files say, so that a GGUF made of them has its scaling too.

    Returns:
        `transformers`: keys of the config. `vllm`, `sglang`, `llama.cpp`: a command line for a POSIX shell, with
        comment lines above it where the engine differs, or one sentence where it cannot.
    """
    require_whole(length=length)
    if not plan.rotaries:
        sentence = f"{plan.model_type} has no rotary positions, so there is nothing to set."
        return {"transformers": {"remark": sentence}, "vllm": sentence, "sglang": sentence, "llama.cpp": sentence}
    try:
        transformers: dict[str, Any] = _transformers(plan, length)
    except PlanError as error:
        sentence = f"A config has no words for this plan: {error}."
        return {
            "transformers": {"remark": sentence},
            "vllm": sentence,
            "sglang": sentence,
            "llama.cpp": _llama_cpp(plan, model, length, as_shipped),
        }
    return {
        "transformers": {part: transformers} if part else transformers,
        "vllm": _vllm(plan, model, length, part),
        "sglang": _sglang(plan, model, length, part),
        "llama.cpp": _llama_cpp(plan, model, length, as_shipped),
    }


def _transformers(plan: ModelPlan, length: int) -> dict[str, Any]:
    if family_of(plan.model_type).fixed:
        raise PlanError("model_type", plan.model_type, "this family's code has one base and no scaling")
    keys: dict[str, Any] = {"rope_parameters": rope_parameters(plan), "max_position_embeddings": length}
    dynamic = [rotary.scaling for rotary in plan.rotaries if isinstance(rotary.scaling, DynamicNTK)]
    if dynamic:
        keys["max_position_embeddings"] = dynamic[0].original_max_position_embeddings
        keys["remark"] = "max_position_embeddings stays at the trained length: transformers grows 'dynamic' from it."
    longrope = [rotary.scaling for rotary in plan.rotaries if isinstance(rotary.scaling, LongRoPE)]
    if longrope:
        # Phi-3 states it beside the dict, where it overrides the dict.
        keys["original_max_position_embeddings"] = longrope[0].original_max_position_embeddings
    return keys


def _engine_keys(plan: ModelPlan, length: int) -> dict[str, Any]:
    """The keys for vLLM and SGLang: length-dependent bases settled, amplitudes under their names too."""
    settled = plan.at_length(length) if _has(plan, DynamicNTK) else plan
    keys: dict[str, Any] = {"rope_parameters": rope_parameters(settled), "max_position_embeddings": length}
    latent = family_of(plan.model_type).latent
    for rope in _dicts(keys["rope_parameters"]):
        same_type = (rotary.scaling for rotary in settled.rotaries if rotary.scaling.rope_type == rope["rope_type"])
        scaling = next(same_type, Scaling())
        if isinstance(scaling, YaRN) and not latent and not math.isclose(_amplitude(scaling), 1.0, rel_tol=1e-9):
            # Older vLLM, and SGLang, multiply m(1) by `attn_factor` and read no `attention_factor`.
            for name in ("mscale", "mscale_all_dim"):
                rope.pop(name, None)
            rope["attention_factor"] = scaling.attention_factor()
            rope["attn_factor"] = _amplitude(scaling)
        if isinstance(scaling, LongRoPE):
            # Both engines would derive it from the lengths.
            rope["short_mscale"] = rope["long_mscale"] = scaling.attention_factor()
    return keys


def _amplitude(scaling: YaRN) -> float:
    """The attention factor over the one that every engine has for YaRN by itself."""
    return scaling.attention_factor() / scaling.magnitude(1.0)


def _dicts(rope: dict[str, Any]) -> list[dict[str, Any]]:
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or ([rope] if "rope_type" in rope else [])


def _has(plan: ModelPlan, kind: type[Scaling]) -> bool:
    return any(isinstance(rotary.scaling, kind) for rotary in plan.rotaries)


def _static_dynamic(plan: ModelPlan, engine: str, length: int) -> list[str]:
    if not _has(plan, DynamicNTK):
        return []
    return [f"{engine} has one static table for dynamic NTK, so this is the base settled for {length} tokens."]


def _command(remarks: list[str], *words: str) -> str:
    return "\n".join([*(f"# {remark}" for remark in remarks), shlex.join(words)])


def _overrides(keys: dict[str, Any], part: str | None) -> str:
    return json.dumps({part: keys} if part else keys)


def _vllm(plan: ModelPlan, model: str, length: int, part: str | None) -> str:
    remarks = _static_dynamic(plan, "vLLM", length)
    for scaling in (rotary.scaling for rotary in plan.rotaries):
        if isinstance(scaling, LongRoPE) and scaling.depends_on_length:
            original = scaling.original_max_position_embeddings
            chosen = "long factors for every sequence, short ones too" if length > original else "short factors"
            remarks.append(f"vLLM chooses LongRoPE's list once, by --max-model-len: here the {chosen}.")
        if isinstance(scaling, YaRN) and length > scaling.factor * scaling.original_max_position_embeddings:
            reach = int(scaling.factor * scaling.original_max_position_embeddings)
            remarks.append(f"vLLM takes YaRN to reach {reach} tokens and may refuse a longer --max-model-len.")
    return _command(
        remarks, "vllm", "serve", model, "--max-model-len", str(length),
        "--hf-overrides", _overrides(_engine_keys(plan, length), part),
    )  # fmt: skip


def _sglang(plan: ModelPlan, model: str, length: int, part: str | None) -> str:
    return _command(
        _static_dynamic(plan, "SGLang", length),
        "python", "-m", "sglang.launch_server", "--model-path", model, "--context-length", str(length),
        "--json-model-override-args", _overrides(_engine_keys(plan, length), part),
    )  # fmt: skip


def _llama_cpp(plan: ModelPlan, model: str, length: int, as_shipped: bool) -> str:
    far = [layer.rotate for layer in plan.layers if layer.rotate is not None and layer.mask.reach is None]
    distinct = list(dict.fromkeys(far)) or list(plan.rotaries)
    if len(distinct) > 1:
        return "llama.cpp has one set of rope flags for all layers that see everything, and those of this plan differ."
    rotary = distinct[0].at_length(length) if isinstance(distinct[0].scaling, DynamicNTK) else distinct[0]
    remarks = []
    if isinstance(distinct[0].scaling, DynamicNTK):
        remarks.append(f"llama.cpp has no dynamic NTK, so this is the base settled for {length} tokens.")
    if len(plan.rotaries) > 1:
        remarks.append("Layers with a window keep what the GGUF says of them; the flags act on the others.")
    elif type(rotary.scaling) is not Scaling and plan.model_type in WINDOWED and len(far) < _rotating(plan):
        remarks.append(
            "Newer llama.cpp keeps what the GGUF says of layers with a window, and the flags act on the others; this "
            "plan has one rotation for all."
        )
    if isinstance(rotary.scaling, (Llama3, LongRoPE)):
        remarks.append(
            f"llama.cpp has no flag for {rotary.scaling.rope_type!r}: it reads the divisors from the GGUF, where "
            "convert_hf_to_gguf.py puts them if the config.json says them."
        )
        flags: tuple[str, ...] = ()
    else:
        refusal = _llama_cpp_cannot(rotary)
        if refusal and not (as_shipped and _in_gguf(rotary)):
            return refusal
        flags = () if refusal else _llama_cpp_flags(rotary)
        if refusal:
            remarks += ["The GGUF carries the model's own YaRN, so no flag is given.", refusal]
    file = model if model.endswith(".gguf") else f"{model}.gguf"
    return _command(remarks, "llama-server", "-m", file, "-c", str(length), *flags)


def _in_gguf(rotary: Rotary) -> bool:
    """Whether a GGUF has keys for this scaling, though the command line has no flags."""
    return isinstance(rotary.scaling, YaRN) and rotary.scaling.ramp == "index"


def _rotating(plan: ModelPlan) -> int:
    return sum(layer.rotate is not None for layer in plan.layers)


def _llama_cpp_cannot(rotary: Rotary) -> str | None:
    scaling = rotary.scaling
    if isinstance(scaling, YaRNByLength):
        return "llama.cpp has one set of frequencies for all sequences, and this plan scales long ones alone."
    if not isinstance(scaling, YaRN):
        return None
    if not scaling.truncate:
        return "llama.cpp rounds the ends of YaRN's ramp to whole pairs, and this plan does not (truncate is false)."
    if scaling.ramp != "index":
        return "llama.cpp takes YaRN's ramp in the pair's index, and this plan in rotations."
    if not math.isclose(_amplitude(scaling), 1.0, rel_tol=1e-9):
        return (
            f"llama.cpp computes YaRN's attention factor itself ({scaling.magnitude(1.0):.6g}) and has no flag "
            f"for this plan's ({scaling.attention_factor():.6g})."
        )
    return None


def _llama_cpp_flags(rotary: Rotary) -> tuple[str, ...]:
    scaling, theta = rotary.scaling, rotary.rope_theta
    if isinstance(scaling, NTK):
        theta = scaling.scaled_theta(theta, rotary.rotary_dim)
    flags: tuple[str, ...] = ("--rope-freq-base", _number(theta))
    if isinstance(scaling, Linear):
        return (*flags, "--rope-scaling", "linear", "--rope-scale", _number(scaling.factor))
    if isinstance(scaling, YaRN):
        flags = (
            *flags, "--rope-scaling", "yarn", "--rope-scale", _number(scaling.factor),
            "--yarn-orig-ctx", str(scaling.original_max_position_embeddings),
        )  # fmt: skip
        if (scaling.beta_fast, scaling.beta_slow) != (32.0, 1.0):
            flags = (
                *flags, "--yarn-beta-fast", _number(scaling.beta_fast), "--yarn-beta-slow", _number(scaling.beta_slow),
            )  # fmt: skip
        return flags
    return (*flags, "--rope-scaling", "none")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
