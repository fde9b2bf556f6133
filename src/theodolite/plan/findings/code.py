"""Findings about what a family's code has: by itself where a config is silent, or whatever the config says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from theodolite.plan.families import family_of, known
from theodolite.plan.families.family import get
from theodolite.plan.families.widths import PARTIAL
from theodolite.plan.findings.finding import Finding
from theodolite.plan.model import ModelPlan
from theodolite.plan.rotary import Rotary

Config = Mapping[str, Any]


def code_findings(plan: ModelPlan, config: Config, ropes: Sequence[Config]) -> Iterator[Finding]:
    """Of a config that a plan was read from, and the rope dicts in it."""
    if not known(plan.model_type):
        yield _stranger(plan)
    yield from _parts(plan, config, ropes)
    yield from _axes(plan, ropes)
    yield from _widths(plan, config)
    yield from _local_base(plan, config, ropes)


def _stranger(plan: ModelPlan) -> Finding:
    return Finding(
        severity="note",
        field="model_type",
        message=f"of {plan.model_type!r} nothing is known, so it is read by the convention of transformers: a causal "
        "decoder whose pairs are two halves of the head; turned in neighbouring channels, every shape still fits",
        fix="compare with the model's own code: theodolite check does where transformers can load it",
        reference="huggingface/candle#3948",
    )


def _parts(plan: ModelPlan, config: Config, ropes: Sequence[Config]) -> Iterator[Finding]:
    partial = [rotary for rotary in plan.rotaries if rotary.rotary_dim < rotary.head_dim and not rotary.trailing]
    if not partial:
        return
    turning = f"{partial[0].rotary_dim} of {partial[0].head_dim} channels"
    stated = get(config, "partial_rotary_factor") or config.get("rotary_dim")
    if not stated and not any(rope.get("partial_rotary_factor") for rope in ropes):
        yield Finding(
            severity="note",
            field="partial_rotary_factor",
            message=f"{turning} turn by the family's own code, and the file does not say so; other code turns them "
            "all, and every shape still fits",
            fix=f"state partial_rotary_factor {partial[0].rotary_dim / partial[0].head_dim:g}",
            reference="vllm-project/vllm#43770",
        )
    elif known(plan.model_type) and plan.model_type.removesuffix("_text") not in PARTIAL:
        yield Finding(
            severity="warning",
            field="partial_rotary_factor",
            message=f"{turning} turn by it, as vLLM reads it, and transformers' code of {plan.model_type!r} does not: "
            "it turns them all, or fails on the widths where there is a scaling",
            fix="leave it out if all channels turned in training, or take a family whose code reads it",
            reference="vllm-project/vllm#12718",
        )


def _axes(plan: ModelPlan, ropes: Sequence[Config]) -> Iterator[Finding]:
    alternating = any(rotary.mrope_interleaved for rotary in plan.rotaries)
    if alternating and not any(rope.get("mrope_interleaved") for rope in ropes):
        yield Finding(
            severity="note",
            field="mrope_interleaved",
            message="the axes alternate pair by pair by the family's own code, and the file does not say so; read in "
            "blocks, text is right and images are not",
            fix="state mrope_interleaved true",
            reference="alibaba/MNN#4133",
        )


def _widths(plan: ModelPlan, config: Config) -> Iterator[Finding]:
    own = get(family_of(plan.model_type).defaults, "head_dim")
    hidden, heads = get(config, "hidden_size"), get(config, "num_attention_heads")
    if own is None or get(config, "head_dim") is not None or not hidden or not heads or hidden / heads == own:
        return
    yield Finding(
        severity="note",
        field="head_dim",
        message=f"the file does not state it: it is {own} by the family's own code, and {hidden / heads:.6g} in code "
        f"that divides hidden_size {hidden:,} by the {heads} heads",
        fix=f"state head_dim {own}",
        reference="marin-community/marin#2098",
    )


def _local_base(plan: ModelPlan, config: Config, ropes: Sequence[Config]) -> Iterator[Finding]:
    """The second base of a family that has one, where the config states the first alone."""
    family = family_of(plan.model_type)
    if get(config, "rope_theta") is None or any(rope.get("rope_theta") is not None for rope in ropes):
        return
    used: dict[str | None, Rotary] = {layer.layer_type: layer.rotate for layer in plan.layers if layer.rotate}
    for label, key in family.bases.items():
        if label in used and label in family.default_bases and key != "rope_theta" and config.get(key) is None:
            yield Finding(
                severity="note",
                field=key,
                message=f"the file does not state it: the layers of type {label} have the base "
                f"{used[label].rope_theta:,.10g} by the family's own code, and code with one base for all layers "
                "gives them rope_theta",
                fix=f"state {key} {used[label].rope_theta:.10g}",
                reference="vllm-project/vllm#29111",
            )
