"""Findings about layers: scalings that some lack, windows, proportional rotation, a length that is not stated."""

from __future__ import annotations

from collections.abc import Iterator

from theodolite.plan.findings.finding import Finding
from theodolite.plan.model import LayerPlan, ModelPlan
from theodolite.plan.scaling import Scaling


def layer_findings(plan: ModelPlan, length_key: str) -> Iterator[Finding]:
    """Of the plan's layers; `length_key` is the key under which the file would state the length."""
    yield from _scaled_in_part(plan)
    yield from _windows(plan)
    for rotary in plan.rotaries:
        if rotary.live_pairs is not None:
            yield Finding(
                severity="note",
                field="rope_type",
                message=f"'proportional' turns {rotary.live_pairs} of {rotary.rotary_dim // 2} pairs, and each still "
                f"has its partner {rotary.rotary_dim // 2} channels away; read as partial rotation, pairs and "
                "frequencies are others",
                fix=f"inv_freq has {rotary.rotary_dim // 2} entries, the last "
                f"{rotary.rotary_dim // 2 - rotary.live_pairs} of them 0",
                reference="NVIDIA-NeMo/Megatron-Bridge#4195",
            )
    if plan.rotaries and plan.max_position_embeddings is None:
        yield Finding(
            severity="warning",
            field=length_key,
            message="no length is stated, so nothing says how far the positions were trained",
            fix=f"state {length_key}, the trained length in tokens",
            reference="karpathy/nanochat#520",
        )


def _scaled_in_part(plan: ModelPlan) -> Iterator[Finding]:
    turning = [(i, layer) for i, layer in enumerate(plan.layers) if layer.rotate is not None]
    bare = [(i, layer) for i, layer in turning if _is_bare(layer)]
    if not bare or len(bare) == len(turning):
        return
    scaled = len(turning) - len(bare)
    far = [i for i, layer in bare if layer.mask.reach is None]
    if far:
        yield Finding(
            severity="warning",
            field="scaling",
            message=f"{scaled} layers are scaled, and {len(far)} that see every distance are not (the first is layer "
            f"{far[0]}): past the trained length those meet angles that they were never shown",
            fix="scale every layer without a window",
            reference="Blaizzy/mlx-vlm#1709",
        )
    else:
        yield Finding(
            severity="note",
            field="scaling",
            message=f"{scaled} of {len(turning)} rotary layers are scaled, the {len(bare)} with a window are not; an "
            "engine that scales all of them, or none, stays fluent and loops after some thousand tokens",
            fix="nothing, where the engine has one table for each kind of layer",
            reference="Blaizzy/mlx-vlm#1709",
        )


def _is_bare(layer: LayerPlan) -> bool:
    return layer.rotate is not None and type(layer.rotate.scaling) is Scaling


def _windows(plan: ModelPlan) -> Iterator[Finding]:
    length = plan.max_position_embeddings
    if length is None:
        return
    for field, name in (("sliding_window", "sliding_window"), ("chunk", "attention_chunk_size")):
        sizes = {getattr(layer.mask, field) for layer in plan.layers} - {None}
        for size in sorted(size for size in sizes if size > length):
            yield Finding(
                severity="note",
                field=name,
                message=f"it is {size:,}, more than max_position_embeddings {length:,}: it hides nothing until the "
                "model is stretched, and then it does",
                fix="leave it out if every distance is meant",
                reference="huggingface/text-generation-inference#2033",
            )
