"""The config.json of an extended model, for transformers 5 and for older readers, and the limits beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig

from theodolite.models.errors import LoadError, refusing
from theodolite.models.quiet import quiet
from theodolite.plan import ModelPlan, PlanError
from theodolite.plan.families import family_of
from theodolite.plan.findings import find
from theodolite.plan.huggingface import read_config, rope_parameters, write_config
from theodolite.plan.huggingface.reading import text_part
from theodolite.plan.huggingface.writing import as_written

_ORIGINAL = "original_max_position_embeddings"
_FLOATS = ("factor", "attention_factor", "low_freq_factor", "high_freq_factor", "rope_theta")
# Code that comes with a model is not copied, so nothing may name it.
_CODE = ("auto_map",)


def config_for(config: Mapping[str, Any], plan: ModelPlan) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The config that says `plan`, and one for older readers where one file cannot be for both.

    Where all layers have one rope dict, `rope_parameters` and the older `rope_theta` and `rope_scaling` stand in one
    file and say the same, word for word: transformers 5 takes `rope_scaling` where both are there.

    Raises:
        PlanError: for what a config, or the family's, has no words for.
    """
    given = {key: value for key, value in config.items() if key not in _CODE}
    try:
        written = write_config(plan, given)
    except PlanError as error:
        names = ", ".join(dict.fromkeys(rotary.scaling.rope_type for rotary in plan.rotaries))
        raise PlanError(
            "scaling", names, f"a config of {plan.model_type} has no words for this plan: {error}"
        ) from error
    rope = as_read_by_all(rope_parameters(plan))
    part = text_part(written)
    assert isinstance(part, dict)
    part["rope_parameters"] = rope
    if any(isinstance(inner, Mapping) for inner in rope.values()) or family_of(plan.model_type).bases:
        return _checked(written, plan), _legacy(plan, given)
    part["rope_theta"] = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        part["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if rope["rope_type"] != "default":
        both = {**rope, "type": rope["rope_type"]}
        part["rope_parameters"], part["rope_scaling"] = both, dict(both)
    if _ORIGINAL in rope and _states_original(plan.model_type):
        # Phi-3's config class has one by itself, which would override the dict's.
        part[_ORIGINAL] = rope[_ORIGINAL]
    return _checked(written, plan), None


def _checked(config: dict[str, Any], plan: ModelPlan) -> dict[str, Any]:
    if read_config(config) != as_written(plan):
        raise PlanError("rope_scaling", plan.rotaries, "with older keys beside the new it is read as another plan")
    return config


def as_read_by_all(rope: dict[str, Any]) -> dict[str, Any]:
    """The same with factors as floats, which older readers ask for, and LongRoPE's amplitude by every name.

    vLLM and SGLang read `short_mscale` and `long_mscale`, and would derive another from the lengths.
    """
    if any(isinstance(inner, dict) for inner in rope.values()):
        return {name: as_read_by_all(inner) if isinstance(inner, dict) else inner for name, inner in rope.items()}
    rope = {name: float(value) if name in _FLOATS else value for name, value in rope.items()}
    if rope.get("rope_type") == "longrope" and "attention_factor" in rope:
        rope["short_mscale"] = rope["long_mscale"] = rope["attention_factor"]
    return rope


def _legacy(plan: ModelPlan, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config for older readers alone; None where they have no words for the plan."""
    try:
        written = write_config(plan, config, dialect="legacy")
    except PlanError:
        return None
    part = text_part(written)
    if isinstance(part, dict) and part.get("rope_scaling"):
        part["rope_scaling"] = as_read_by_all(part["rope_scaling"])
    return written


def _states_original(model_type: str) -> bool:
    kind = CONFIG_MAPPING.get(model_type, None)
    return kind is not None and hasattr(kind, _ORIGINAL)


def require_read_by_transformers(folder: Any, plan: ModelPlan) -> None:
    """Raise unless the installed transformers reads the plan from a folder's config.json.

    Raises:
        LoadError: it cannot read the file, or reads another plan.
    """
    with quiet(), refusing(f"transformers does not read the config.json of this extension ({plan.model_type})"):
        read = read_config(AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict())
    wanted = as_written(plan)
    if read == wanted:
        return
    lengths = f"{read.max_position_embeddings} tokens and {read.rotaries}"
    raise LoadError(
        f"the installed transformers would read {lengths}, and {wanted.max_position_embeddings} tokens and "
        f"{wanted.rotaries} are meant"
    )


def require_turned_so(config: Mapping[str, Any], plan: ModelPlan) -> None:
    """Raise where the family's code in transformers turns other channels than its config says.

    Args:
        config, plan: of the model that is extended.

    Raises:
        PlanError: it does. With a scaling it would fail on the widths, and without one turn the others too.
    """
    for finding in find(plan, config):
        if finding.field == "partial_rotary_factor" and finding.severity != "note":
            raise PlanError(finding.field, plan.rotaries[0].rotary_dim, f"{finding.message}; {finding.fix}")


def raised_limits(name: str, content: dict[str, Any], to: int) -> dict[str, Any]:
    """The content of a tokenizer_config.json or generation_config.json with the limits in it at least `to` tokens."""
    keys = {"tokenizer_config.json": ("model_max_length",), "generation_config.json": ("max_length",)}[name]
    raised = {key: to for key in keys if _below(content.get(key), to)}
    kept = {key: value for key, value in content.items() if key not in _CODE}
    return {**kept, **raised}


def _below(value: Any, to: int) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value < to
