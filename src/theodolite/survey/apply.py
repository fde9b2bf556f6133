"""How to apply what was recommended: settings for engines, or a sentence for each where it is a map of distances.

What engines do with maps is read off: transformers' rope_parameters; vLLM's issue 49296; SGLang's page on attention
backends; llama.cpp's common/arg.cpp and its pull request 9860.
"""

from __future__ import annotations

import shlex
from typing import Any

from theodolite.plan.engines import settings as engine_settings
from theodolite.positions import DualChunk, RelativeMap, SelfExtend
from theodolite.survey.maps import spelled
from theodolite.survey.scalings import AS_SHIPPED, Candidate


def settings_of(chosen: Candidate, *, model: str, length: int) -> dict[str, str | dict[str, Any]]:
    """What makes each engine, and this library, read up to `length` tokens as the candidate was read.

    Returns:
        `transformers`, `vllm`, `sglang`, `llama.cpp`: as `theodolite.plan.engines.settings`; of a map, a sentence each.
        `theodolite`: a command line for a POSIX shell, and for a map a comment line on how Python has it.
    """
    if chosen.relative is None:
        return engine_settings(chosen.plan, model=model, length=length) | {"theodolite": _here(chosen.name, model)}
    return {
        "transformers": "No key of a config.json says this map of distances; transformers cannot apply it.",
        "vllm": _vllm(chosen.relative),
        "sglang": _sglang(chosen.relative),
        "llama.cpp": _llama_cpp(chosen.relative),
        "theodolite": f"{_here(spelled(chosen.relative), model)}\n{_in_python(chosen.relative)}",
    }


def _here(name: str, model: str) -> str:
    scaling = [] if name == AS_SHIPPED else ["--scaling", name]
    return f"{shlex.join(['theodolite', 'ask', '--model', model, *scaling])} DOCUMENT QUESTION"


def _in_python(relative: RelativeMap) -> str:
    return f"# in Python: theodolite.models.Stream(model, plan, relative={relative!r})"


def _vllm(relative: RelativeMap) -> str:
    if isinstance(relative, DualChunk):
        return "vLLM cannot apply this map: its dual chunk attention went with the old engine, in v0.11.0."
    return "vLLM has no setting for this map of distances."


def _sglang(relative: RelativeMap) -> str:
    if isinstance(relative, DualChunk):
        return (
            "SGLang has dual chunk attention (--attention-backend dual_chunk_flash_attn) for models whose config.json "
            "has a dual_chunk_attention_config, such as Qwen2.5-14B-Instruct-1M; whether it reads this model, and as "
            "was measured here, was not tried."
        )
    return "SGLang has no setting for this map of distances."


def _llama_cpp(relative: RelativeMap) -> str:
    if isinstance(relative, SelfExtend):
        return (
            "llama-server had Self-Extend and dropped it in October 2024. llama-completion has --grp-attn-n and "
            "--grp-attn-w, which move keys that are turned already: near to this map, and not measured here."
        )
    return "llama.cpp has no setting for this map of distances."
