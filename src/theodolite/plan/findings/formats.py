"""Findings about files that are no configs: a GGUF's metadata, params.json, the pair layout stated beside a config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from theodolite.plan.findings.finding import Finding
from theodolite.plan.model import ModelPlan
from theodolite.plan.scaling import Llama3


def gguf_findings(plan: ModelPlan, keys: Mapping[str, Any]) -> Iterator[Finding]:
    """Of a GGUF's metadata."""
    architecture = keys.get("general.architecture")
    if plan.rotaries and keys.get(f"{architecture}.rope.freq_base") is None:
        yield Finding(
            severity="warning",
            field=f"{architecture}.rope.freq_base",
            message="no base is stated, and llama.cpp takes 10000; a model of another base repeats itself after a "
            "thousand tokens",
            fix="convert it again from a config that states the base, or give --rope-freq-base",
            reference="ggml-org/llama.cpp#2773",
        )


def params_findings(plan: ModelPlan, params: Mapping[str, Any]) -> Iterator[Finding]:
    """Of a params.json."""
    factors = [rotary.scaling.factor for rotary in plan.rotaries if isinstance(rotary.scaling, Llama3)]
    # Another scaling that is stated beside it takes its place.
    if factors and params.get("use_scaled_rope") and params.get("rope_scaling_factor") is None:
        yield Finding(
            severity="warning",
            field="use_scaled_rope",
            message=f"the file does not state the factor; Meta's code has {factors[0]:g} written into it, and the "
            "config.json of Llama 3.2 1B and 3B has 32",
            fix="compare with the config.json of the same model, and state rope_scaling_factor",
            reference="meta-llama/llama-models#241",
        )


def layout_finding(plan: ModelPlan, layout: str) -> Finding:
    """Of a checkpoint whose rows stand for other pairs than the family's code turns."""
    other = "half" if layout == "interleaved" else "interleaved"
    return Finding(
        severity="error",
        field="pair_layout.json",
        message=f"the rows of q and k stand for {layout} pairs, and the code of {plan.model_type} turns the other "
        "ones: run by transformers or an engine, every position but the first is wrong, and nothing errors",
        fix=f"theodolite convert layout IN OUT --to {other}, or code that turns {layout} pairs",
        reference="huggingface/candle#3948",
    )
