"""How an extended model is served: the section of its card."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from theodolite.models.extend.configs import as_read_by_all
from theodolite.models.extend.markdown import block, code, escaped
from theodolite.plan import ModelPlan, PlanError
from theodolite.plan.engines import settings
from theodolite.plan.huggingface import rope_parameters

_OVERRIDES = ("--hf-overrides", "--json-model-override-args")
_COMMANDS = ("vllm ", "python ", "llama-server ")


def serving(plan: ModelPlan, *, name: str, to: int, part: str | None, layout: str | None) -> Iterator[str]:
    """Paragraphs of Markdown.

    Args:
        plan: what the files say.
        name: of the folder or the .gguf file.
        to: tokens.
        part: the key of the language model in a config of several parts.
        layout: the pair layout of the weights, where the family's own code reads the other.
    """
    yield "## How to serve it"
    if name.endswith(".gguf"):
        yield "The file says all that llama.cpp needs:"
        yield block(shlex.join(["llama-server", "-m", name, "-c", str(to)]), "sh")
        return
    if layout is not None:
        other = "half" if layout == "interleaved" else "interleaved"
        yield (
            f"**Not in plain transformers, vLLM or SGLang.** Queries and keys stand in {layout} pairs, as "
            f"`pair_layout.json` says, and the code of {escaped(plan.model_type)} reads the other: the model would "
            f"give nonsense. {code(f'theodolite convert layout {shlex.quote(name)} OUT --to {other}')} writes it as "
            "that code reads it."
        )
        return
    loading = code(f"AutoModelForCausalLM.from_pretrained({json.dumps(name, ensure_ascii=False)})")
    yield f"transformers needs nothing but {loading}. Other engines:"
    told = settings(plan, model=name, length=to, part=part)
    said = _said(plan, part)
    for engine in ("vllm", "sglang"):
        yield f"{engine}:"
        yield _shown(_with_floats(str(told[engine]), said))
    llama = str(told["llama.cpp"])
    made = f"python convert_hf_to_gguf.py {shlex.quote(name)} --outfile {shlex.quote(f'{name}.gguf')}"
    yield "llama.cpp, whose own script makes a GGUF file of this folder:" if _is_command(llama) else "llama.cpp:"
    yield _shown(llama, made)


def _shown(told: str, first: str | None = None) -> str:
    """A command as a block, and a sentence as one."""
    *remarks, last = told.splitlines()
    if not _is_command(told):
        return escaped(told)
    return block("\n".join([*remarks, *([first] if first else []), last]), "sh")


def _is_command(told: str) -> bool:
    return told.splitlines()[-1].startswith(_COMMANDS)


def _said(plan: ModelPlan, part: str | None) -> dict[str, Any]:
    """What the config.json of the folder says of it."""
    try:
        keys: dict[str, Any] = {"rope_parameters": as_read_by_all(rope_parameters(plan))}
    except PlanError:
        return {}
    keys["max_position_embeddings"] = plan.max_position_embeddings
    return {part: keys} if part else keys


def _with_floats(command: str, said: Mapping[str, Any]) -> str:
    """A command without the overrides that repeat what the config says; with factors as floats in those that stay."""
    *remarks, last = command.splitlines()
    words = shlex.split(last) if _is_command(command) else []
    if len(words) < 2 or words[-2] not in _OVERRIDES:
        return command
    overrides = json.loads(words[-1])
    if _repeats(overrides, said):
        return "\n".join([*remarks, shlex.join(words[:-2])])
    return "\n".join([*remarks, shlex.join([*words[:-1], json.dumps(_floats(overrides))])])


def _repeats(overrides: Any, said: Any) -> bool:
    """Whether all that is overridden is said already."""
    if isinstance(overrides, dict) and isinstance(said, Mapping):
        return all(key in said and _repeats(value, said[key]) for key, value in overrides.items())
    return bool(overrides == said)


def _floats(overrides: dict[str, Any]) -> dict[str, Any]:
    return {
        key: as_read_by_all(value) if key == "rope_parameters" else _floats(value) if isinstance(value, dict) else value
        for key, value in overrides.items()
    }
