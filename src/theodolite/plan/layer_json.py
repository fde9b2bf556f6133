"""A plan as JSON has it: one entry a layer, null where a layer has no such thing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any

from theodolite.plan.bias import Bias
from theodolite.plan.derived import derive, settled_inv_freq, workable
from theodolite.plan.families.layers import CHUNKED, FULL, NO_ATTENTION, SLIDING
from theodolite.plan.model import LayerPlan, ModelPlan
from theodolite.plan.rotary import Rotary
from theodolite.plan.scaling import Scaling

_BIAS_FIELDS = {
    "alibi": ("bias_max", "slope_factor", "heads"),
    "t5": ("buckets", "max_distance"),
    "transformer-xl": ("max_distance",),
    "deberta": ("buckets", "max_distance", "terms", "layer_norm_eps", "share_att_key"),
}


# A plan has few distinct rotations, and some have one for each layer.
@lru_cache(maxsize=1024)
def _settled(rotary: Rotary, length: int | None) -> list[float]:
    return [float(one) for one in settled_inv_freq(rotary, length)]


def usual_length(plan: ModelPlan) -> int | None:
    """The length (tokens) that the plan states, or else the longest that a scaling says it was trained to."""
    if plan.max_position_embeddings is not None:
        return plan.max_position_embeddings
    originals = [getattr(rotary.scaling, "original_max_position_embeddings", None) for rotary in plan.rotaries]
    return max((length for length in originals if length is not None), default=None)


def seen_by(layers: Iterable[LayerPlan]) -> int | None:
    """Tokens that a query sees in those of the layers that see most, its own included; None where one sees all."""
    reaches = [layer.mask.reach for layer in layers]
    return None if None in reaches else max((reach + 1 for reach in reaches if reach is not None), default=None)


def attends(layer: LayerPlan) -> bool:
    """Whether the layer has attention: Mamba, DeltaNet and the like have none."""
    return layer != LayerPlan(layer_type=layer.layer_type) or layer.layer_type in (None, *FULL, *SLIDING, *CHUNKED)


def kind_of(layer: LayerPlan) -> str:
    """The model's own name of the layer's kind, or one by its mask."""
    if layer.layer_type is not None:
        return layer.layer_type
    if layer.mask.sliding_window is not None:
        return SLIDING[0]
    return CHUNKED[0] if layer.mask.chunk is not None else FULL[0]


def layer_json(layer: LayerPlan, length: int | None) -> dict[str, Any]:
    """One layer; frequencies are settled for sequences of `length` tokens.

    `score_scale` is null for the usual `head_dim ** -0.5`, `scaling` null for none.
    """
    rotary, mask = layer.rotate, layer.mask
    here = attends(layer) and layer.layer_type not in NO_ATTENTION
    return {
        "kind": kind_of(layer),
        **_rotary_json(rotary, length),
        "sliding_window": mask.sliding_window,
        "score_scale": layer.score_scale,
        "sinks": mask.sinks if here else None,
        "causal": mask.causal if here else None,
        "chunk": mask.chunk,
        "bias": None if layer.bias is None else bias_json(layer.bias),
        "temperature": None if layer.temperature is None else asdict(layer.temperature),
    }


def _rotary_json(rotary: Rotary | None, length: int | None) -> dict[str, Any]:
    names = ("rope_theta", "head_dim", "rotary_dim")
    further = ("interleaved", "trailing", "live_pairs", "mrope_section", "mrope_interleaved")
    if rotary is None:
        return dict.fromkeys((*names, "inv_freq", "attention_factor", "scaling", *further))
    return {
        **{name: getattr(rotary, name) for name in names},
        # The same list for all layers that have it: it may be long, and they many.
        "inv_freq": _settled(rotary, length),
        "attention_factor": rotary.attention_factor(),
        "scaling": scaling_json(rotary.scaling),
        **{name: getattr(rotary, name) for name in further},
        "mrope_section": None if rotary.mrope_section is None else list(rotary.mrope_section),
    }


def scaling_json(scaling: Scaling) -> dict[str, Any] | None:
    """A scaling under the names of a config, what is not given left out; None where there is none."""
    if type(scaling) is Scaling:
        return None
    return {"rope_type": scaling.rope_type, **dict(_scaling_fields(scaling))}


def _scaling_fields(scaling: Scaling) -> Iterator[tuple[str, Any]]:
    for field in fields(scaling):
        value = getattr(scaling, field.name)
        if isinstance(value, Scaling):
            value = scaling_json(value)
        elif isinstance(value, tuple):
            value = list(value)
        if value is not None:
            yield field.name.removesuffix("_given"), value


def bias_json(bias: Bias) -> dict[str, Any]:
    """A bias with the fields that its kind has."""
    return {"kind": bias.kind, **{name: getattr(bias, name) for name in _BIAS_FIELDS[bias.kind]}}


def embed_json(plan: ModelPlan) -> dict[str, Any] | None:
    """What is added to the embeddings, or None."""
    return None if plan.embed is None else asdict(plan.embed)


def derived_json(plan: ModelPlan) -> list[dict[str, Any]]:
    """The numbers that follow from each distinct rotation, with the layers that have it.

    Of very many rotations, those that are worked out soon enough (`workable`).
    """
    length = usual_length(plan)
    layers: dict[Rotary, list[int]] = {}
    for i, layer in enumerate(plan.layers):
        if layer.rotate is not None:
            layers.setdefault(layer.rotate, []).append(i)
    return [
        {
            "layers": layers[rotary],
            **asdict(derive(rotary, length, seen_by(plan.layers[number] for number in layers[rotary]))),
        }
        for rotary in workable(layers)
    ]
