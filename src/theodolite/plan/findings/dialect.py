"""Findings about a config's words: keys that have moved, stand in one place only, or were renamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from theodolite.plan.families import family_of
from theodolite.plan.families.family import NAMES
from theodolite.plan.findings.code import code_findings
from theodolite.plan.findings.finding import Finding
from theodolite.plan.huggingface.reading import text_part
from theodolite.plan.model import ModelPlan

Config = Mapping[str, Any]
_FALLBACK = 10000.0
"""The base that readers take where they find none."""


def dialect_findings(plan: ModelPlan, raw: Config) -> Iterator[Finding]:
    """Of the config that a plan was read from."""
    if not plan.rotaries:
        return
    config = text_part(raw)
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    yield from _bases(plan, config, new or {}, old or {})
    if old and not new:
        yield Finding(
            severity="note",
            field="rope_scaling",
            message="it is the older key; transformers 5 calls it rope_parameters, with the base in it, and code that "
            "reads the new key alone leaves the model unscaled",
            fix="save the config with transformers 5, and keep rope_theta at the top level for older readers",
            reference="huggingface/transformers#32182",
        )
    for name, rope in (*_dicts("rope_parameters", new), *_dicts("rope_scaling", old)):
        yield from _names(name, rope)
    yield from code_findings(plan, config, [rope for _, rope in (*_dicts("", new), *_dicts("", old))])


def _dicts(name: str, rope: Any) -> list[tuple[str, Config]]:
    """One rope dict, or one for each kind of layer."""
    if not isinstance(rope, Mapping):
        return []
    nested = [(f"{name}.{label}", inner) for label, inner in rope.items() if isinstance(inner, Mapping)]
    return nested or [(name, rope)]


def _bases(plan: ModelPlan, config: Config, new: Config, old: Config) -> Iterator[Finding]:
    family = family_of(plan.model_type)
    beside = [key for key in {*NAMES["rope_theta"], *family.bases.values()} if config.get(key) is not None]
    within = [name for name, rope in _dicts("rope_parameters", new) if rope.get("rope_theta") is not None]
    within_old = [name for name, rope in _dicts("rope_scaling", old) if rope.get("rope_theta") is not None]
    others = sorted({rotary.rope_theta for rotary in plan.rotaries} - {_FALLBACK})
    if not others or config.get("layer_rope_theta"):
        return
    bases = ", ".join(f"{base:,.10g}" for base in others)
    if within and not beside:
        yield Finding(
            severity="note",
            field="rope_theta",
            message=f"the base {bases} stands in rope_parameters alone, and code that looks for a top-level "
            "rope_theta falls back to 10000 without a word",
            fix="state rope_theta at the top level too, where the file is for more than transformers 5"
            if len(others) == 1
            else "use code that reads one base for each kind of layer",
            reference="deepspeedai/DeepSpeed#8345",
        )
    elif within_old and not beside:
        yield Finding(
            severity="warning",
            field="rope_scaling.rope_theta",
            message=f"the base {bases} stands in the older rope_scaling alone, where neither older code looks nor "
            "transformers 5 writes it",
            fix="state rope_theta at the top level",
            reference="deepspeedai/DeepSpeed#8345",
        )
    elif new and beside and not within:
        yield Finding(
            severity="warning",
            field=beside[0],
            message=f"the base {bases} stands at the top level, and rope_parameters beside it has none; code that "
            "reads the latter alone falls back to 10000 or fails",
            fix="state rope_theta in rope_parameters too",
            reference="sgl-project/sglang#14745",
        )
    elif not beside and not within and not within_old:
        yield Finding(
            severity="warning",
            field="rope_theta",
            message=f"the file states no base; {bases} is the default of the family's own code, and other code falls "
            "back to 10000",
            fix="state rope_theta",
            reference="deepspeedai/DeepSpeed#8345",
        )


def _names(name: str, rope: Config) -> Iterator[Finding]:
    rope_type, older = rope.get("rope_type"), rope.get("type")
    if older is not None and rope_type is None:
        yield Finding(
            severity="warning",
            field=f"{name}.type",
            message=f"'type' is the older name of rope_type; code that reads the newer alone fails, or leaves "
            f"{older!r} out",
            fix=f"rope_type {older!r}, and 'type' beside it for older readers",
            reference="huggingface/transformers#32166",
        )
    for given in dict.fromkeys(found for found in (rope_type, older) if found is not None):
        if given == "su":
            yield Finding(
                severity="warning",
                field=f"{name}.rope_type",
                message="'su' is the first name of LongRoPE, and newer readers do not know it",
                fix="rope_type 'longrope'",
                reference="huggingface/transformers#32916",
            )
        if given == "mrope":
            yield Finding(
                severity="warning",
                field=f"{name}.rope_type",
                message="'mrope' says what the axes are and takes the place of the scaling's name, so a scaling beside "
                "it is lost in some engines",
                fix="rope_type 'default', or the scaling's name; mrope_section alone says the axes",
                reference="huggingface/transformers#33401",
            )
