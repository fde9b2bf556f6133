"""One plain sentence on what positions a model has."""

from __future__ import annotations

from collections import Counter

from theodolite.plan.bias import Bias
from theodolite.plan.model import LayerPlan, ModelPlan
from theodolite.plan.rotary import Rotary
from theodolite.plan.scaling import NTK, DynamicNTK, Linear, Llama3, LongRoPE, Scaling, YaRN, YaRNByLength

_BIASES = {
    "alibi": "ALiBi biases on the scores",
    "t5": "T5's bucketed biases on the scores",
    "transformer-xl": "Transformer-XL's relative positions in the scores",
    "deberta": "DeBERTa's relative positions in the scores",
}


def describe(plan: ModelPlan) -> str:
    """What positions the model has, in one sentence.

    For example "rotary positions in all 30 layers (base 100,000, 64 channels), stated length 8,192 tokens", or
    "learned absolute positions, 1,024 rows".
    """
    parts = [*_embed(plan), *_rotations(plan), *_biases(plan)]
    if not parts:
        attending = any(
            layer != LayerPlan(layer_type=layer.layer_type) or not layer.layer_type for layer in plan.layers
        )
        nothing = (
            "no positions: its attention has the causal mask alone"
            if any(layer.mask.causal for layer in plan.layers)
            else "no positions: its attention sees both ways and no order"
        )
        parts = [nothing if attending else "no attention, so no positions"]
    elif plan.max_position_embeddings is not None and plan.embed is None:
        parts.append(f"stated length {plan.max_position_embeddings:,} tokens")
    if plan.part is not None:
        parts.append(f"in its {plan.part}")
    return ", ".join(parts)


def _embed(plan: ModelPlan) -> list[str]:
    if plan.embed is None:
        return []
    if plan.embed.kind == "sinusoidal":
        return ["sinusoidal absolute positions, computed"]
    offset = f" (the first {plan.embed.offset} of its table are not positions)" if plan.embed.offset else ""
    return [f"learned absolute positions, {plan.embed.rows:,} rows{offset}"]


def _biases(plan: ModelPlan) -> list[str]:
    biases: list[Bias] = list(dict.fromkeys(layer.bias for layer in plan.layers if layer.bias is not None))
    return [_BIASES[bias.kind] for bias in biases]


def _rotations(plan: ModelPlan) -> list[str]:
    counts: Counter[tuple[Rotary, int | None]] = Counter(
        (layer.rotate, layer.mask.reach) for layer in plan.layers if layer.rotate is not None
    )
    total = len(plan.layers)
    sentences = []
    for (rotary, reach), count in counts.items():
        layers = f"all {total}" if count == total else f"{count} of {total}"
        window = f" that see {reach + 1:,} tokens" if reach is not None else ""
        sentences.append(f"rotary positions in {layers} layers{window} ({_rotary(rotary)})")
    return sentences


def _rotary(rotary: Rotary) -> str:
    channels = f"{rotary.rotary_dim} channels"
    if rotary.live_pairs is not None:
        channels = f"{2 * rotary.live_pairs} of {rotary.head_dim} channels"
    elif rotary.rotary_dim != rotary.head_dim:
        channels = f"{rotary.rotary_dim} of {rotary.head_dim} channels"
    scaling = f", {describe_scaling(rotary.scaling)}" if type(rotary.scaling) is not Scaling else ""
    axes = f", {len(rotary.mrope_section)} axes" if rotary.mrope_section else ""
    return f"base {rotary.rope_theta:,.10g}, {channels}{axes}{scaling}"


def describe_scaling(scaling: Scaling) -> str:
    """The scaling's name and figures, for example "YaRN 2 from 8,192 tokens"."""
    if isinstance(scaling, Linear):
        return f"linear scaling {scaling.factor:g}"
    if isinstance(scaling, NTK):
        return f"NTK scaling {scaling.factor:g}"
    if isinstance(scaling, DynamicNTK):
        return f"dynamic NTK {scaling.factor:g} past {scaling.original_max_position_embeddings:,} tokens"
    if isinstance(scaling, (YaRN, Llama3)):
        name = "YaRN" if isinstance(scaling, YaRN) else "Llama 3 scaling"
        return f"{name} {scaling.factor:g} from {scaling.original_max_position_embeddings:,} tokens"
    if isinstance(scaling, YaRNByLength):
        return f"YaRN {scaling.yarn.factor:g} past {scaling.original_max_position_embeddings:,} tokens, none before"
    if isinstance(scaling, LongRoPE):
        return f"LongRoPE from {scaling.original_max_position_embeddings:,} tokens"
    return "no scaling"
