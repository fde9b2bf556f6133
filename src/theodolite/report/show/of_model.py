"""The views of a model's own positions: its rotations, its ALiBi, T5's buckets, or what it adds to its embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from theodolite.plan.layer_json import usual_length
from theodolite.plan.model import LayerPlan, ModelPlan
from theodolite.plan.rotary import Rotary
from theodolite.report.inspection import ranges
from theodolite.report.show.pictures import (
    MOST_POSITIONS,
    Pictures,
    bias_pictures,
    index_pictures,
    rotation_pictures,
    scaled_plans,
    vector_pictures,
)
from theodolite.report.show.settings import Settings

if TYPE_CHECKING:
    from theodolite.plan.open import Opened

_MOST_ROTATIONS = 8
READS = frozenset({"length", "trained", "scaling", "position", "heads", "dim", "channels"})
"""The settings that a model's own positions leave open."""
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
WIDTHS = ("hidden_size", "d_model", "n_embd")


def pictures_of_model(opened: Opened, settings: Settings) -> Pictures:
    """The views of the first of these that the model has: rotations, a bias of the distance, sinusoids.

    Raises:
        ValueError: it has none of them, or a scaling that is asked for does not go with it.
    """
    plan = opened.plan
    if plan.rotaries:
        return _rotations(plan, settings)
    if settings.scaling is not None:
        raise ValueError(f"scaling: got {settings.scaling!r}, and {opened.name!r} has no rotation")
    bias = next((layer for layer in plan.layers if layer.bias is not None), None)
    if bias is not None and bias.bias is not None and bias.bias.kind in ("alibi", "t5"):
        return _bias(opened, bias, bias.bias.kind, settings)
    if plan.embed is not None and plan.embed.kind == "sinusoidal":
        import torch

        from theodolite.encodings import build_embed

        encoding = build_embed(plan.embed, dim=stated(opened, WIDTHS) or settings.dim)
        table = encoding.table(torch.arange(settings.tokens(256, MOST_POSITIONS))).detach().numpy()
        return vector_pictures(f"{opened.name}: sinusoidal", table, settings)
    raise ValueError(_nothing(opened))


def _bias(opened: Opened, layer: LayerPlan, kind: str, settings: Settings) -> Pictures:
    from theodolite.encodings import T5Bias, build

    # T5's heads share its buckets.
    heads = 1 if kind == "t5" else settings.heads or stated(opened, HEADS)
    if heads is None:
        raise ValueError(f"heads: {opened.name!r} does not state how many there are; give --heads")
    made = build(layer, num_heads=heads).bias
    seen = replace(settings, bidirectional=not layer.mask.causal)
    if isinstance(made, T5Bias):
        return index_pictures(f"{opened.name}: T5's buckets", "bucket", lambda far: made.bucket(-far), seen)
    assert made is not None
    return bias_pictures(f"{opened.name}: ALiBi", made, seen)


def stated(opened: Opened, names: tuple[str, ...]) -> int | None:
    """A whole number above 0 that the file states under one of these names, at its top or in its language part."""
    parts: list[Mapping[str, Any]] = [opened.raw]
    if opened.part is not None:
        parts.insert(0, opened.raw[opened.part])
    for part in parts:
        for name in names:
            value = part.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1024 * 1024:
                return value
    return None


def named_rotaries(plan: ModelPlan) -> dict[str, Rotary]:
    """The distinct rotations of a model by the layers that have them; "as shipped" where there is one."""
    if len(plan.rotaries) == 1:
        return {"as shipped": plan.rotaries[0]}
    named = {}
    for rotary in plan.rotaries:
        layers = [number for number, layer in enumerate(plan.layers) if layer.rotate == rotary]
        named[f"layers {ranges(layers)}"] = rotary
    return named


def _rotations(plan: ModelPlan, settings: Settings) -> Pictures:
    trained = usual_length(plan) or settings.trained
    plans = scaled_plans(plan, settings, "none")
    named: dict[str, Rotary] = {}
    for scaling, scaled in plans.items():
        for layers, rotary in named_rotaries(scaled).items():
            named[scaling if len(plan.rotaries) == 1 else f"{layers}, {scaling}"] = rotary
    if len(plans) == 1:
        named = named_rotaries(plan)
    # Layers that a scaling leaves alone stand once.
    once: dict[Rotary, str] = {}
    for name, rotary in named.items():
        once.setdefault(rotary, name)
    shown = list(once.items())[:_MOST_ROTATIONS]
    return rotation_pictures({name: rotary for rotary, name in shown}, settings, trained=trained)


def _nothing(opened: Opened) -> str:
    kinds = {layer.bias.kind for layer in opened.plan.layers if layer.bias is not None}
    if opened.plan.embed is not None:
        kinds.add(f"{opened.plan.embed.kind} vectors")
    what = (
        f"its positions ({', '.join(sorted(kinds))}) are in its weights" if kinds else "it has no positions of its own"
    )
    return f"model: nothing to draw of {opened.name!r}: {what}; `theodolite show --list` says what can be drawn"
