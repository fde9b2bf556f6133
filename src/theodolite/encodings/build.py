"""From what a plan says to the modules that do it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from theodolite import plan
from theodolite.encodings.bias.alibi import ALiBi, alibi_slopes
from theodolite.encodings.bias.base import Bias
from theodolite.encodings.bias.deberta import DisentangledBias, RelativeEmbeddings
from theodolite.encodings.bias.t5 import T5Bias
from theodolite.encodings.bias.transformer_xl import TransformerXLBias
from theodolite.encodings.embed.base import Embed
from theodolite.encodings.embed.learned import LearnedEmbedding
from theodolite.encodings.embed.sinusoidal import Sinusoidal
from theodolite.encodings.policy import Policy
from theodolite.encodings.rotate.rotary import RotaryEmbedding
from theodolite.encodings.scale.temperature import Temperature

_OTHER_WAYS = {
    plan.ModelPlan: "a whole model's; give one layer's: [build(layer, num_heads=...) for layer in plan.layers]",
    plan.Rotary: "a rotation alone; RotaryEmbedding(rotary) does it, or give LayerPlan(rotate=rotary)",
    plan.Bias: "a bias alone; give LayerPlan(bias=bias)",
    plan.Mask: "a mask alone; give LayerPlan(mask=mask)",
    plan.Embedding: "added to the embeddings once, in no layer: build_embed(plan.embed, dim=...) makes it",
    plan.Axial: "a rotation along several axes: AxialRotary(axial) does it",
}


def build(
    layer: plan.LayerPlan,
    *,
    num_heads: int | None = None,
    head_dim: int | None = None,
    hidden_size: int | None = None,
    key_proj: nn.Module | None = None,
    query_proj: nn.Module | None = None,
) -> Policy:
    """The policy that a layer's plan describes; what is learned is freshly initialised.

    Args:
        layer: one of `ModelPlan.layers`.
        num_heads: query heads of the whole model.
        head_dim: channels of a head, where a bias has vectors of that width (Transformer-XL, DeBERTa).
        hidden_size: width of the layer's input, where a bias has vectors of that width.
        key_proj: attention's own projection to keys, where a bias has it in common with attention (DeBERTa-v3's
            `share_att_key`).
        query_proj: attention's own projection to queries, likewise.

    Raises:
        ValueError: it is no layer's plan; a width or a projection is needed and not given. What no plan says, such as
            vectors shared between layers, is for the classes themselves to take.
    """
    if not isinstance(layer, plan.LayerPlan):
        raise ValueError(f"layer: got {_kind(layer)}, {_OTHER_WAYS.get(type(layer), 'give one of plan.layers')}")
    if num_heads is None:
        raise ValueError("num_heads: got None; give the query heads of the whole model")
    bias = None
    if layer.bias is not None:
        shared = {"key_proj": key_proj, "query_proj": query_proj}
        bias = _bias(layer, layer.bias, num_heads, head_dim, hidden_size, shared)
    return Policy(
        rotate=None if layer.rotate is None else RotaryEmbedding(layer.rotate),
        bias=bias,
        scale=None if layer.temperature is None else Temperature.from_plan(layer.temperature),
        score_scale=layer.score_scale,
        mask=layer.mask,
    )


def build_embed(embed: plan.Embedding, *, dim: int) -> Embed:
    """What a plan (its `embed`) adds to token embeddings of `dim` channels; a learned table is freshly initialised."""
    if isinstance(embed, plan.ModelPlan):
        raise ValueError(
            "embed: got a ModelPlan, a whole model's; give its embedding: build_embed(plan.embed, dim=...)"
        )
    if embed is None:
        raise ValueError("embed: got None; this model adds no positions to its embeddings")
    if not isinstance(embed, plan.Embedding):
        raise ValueError(f"embed: got {_kind(embed)}; give plan.embed")
    if embed.kind == "sinusoidal":
        return Sinusoidal(dim, layout=embed.layout, spacing=embed.spacing, offset=embed.offset)  # type: ignore[arg-type]
    if embed.rows is None:
        raise ValueError("rows: got None; a learned table needs the number of positions that it has")
    return LearnedEmbedding(embed.rows, dim, offset=embed.offset)


def _bias(
    layer: plan.LayerPlan,
    bias: plan.Bias,
    num_heads: int,
    head_dim: int | None,
    hidden_size: int | None,
    shared: Mapping[str, nn.Module | None],
) -> Bias:
    if bias.kind == "alibi":
        slopes = (slope * bias.slope_factor for slope in alibi_slopes(num_heads, bias_max=bias.bias_max))
        return ALiBi.from_slopes(slopes, symmetric=not layer.mask.causal)
    if bias.kind == "t5":
        buckets, furthest = _given("buckets", bias.buckets, bias), _given("max_distance", bias.max_distance, bias)
        return T5Bias(num_heads, num_buckets=buckets, max_distance=furthest, bidirectional=not layer.mask.causal)
    head_dim, hidden_size = _given("head_dim", head_dim, bias), _given("hidden_size", hidden_size, bias)
    if bias.kind == "transformer-xl":
        return TransformerXLBias(num_heads, head_dim, hidden_size=hidden_size, clamp_length=bias.max_distance)
    return _disentangled(bias, num_heads, head_dim, hidden_size, shared)


def _disentangled(
    bias: plan.Bias, num_heads: int, head_dim: int, hidden_size: int, shared: Mapping[str, nn.Module | None]
) -> DisentangledBias:
    span, furthest = _given("buckets", bias.buckets, bias) // 2, _given("max_distance", bias.max_distance, bias)
    projections = {
        f"pos_{name}": _shared(name, module)
        for (name, module), term in zip(shared.items(), ("c2p", "p2c"), strict=True)
        if bias.share_att_key and term in bias.terms
    }
    made = DisentangledBias(
        num_heads,
        head_dim,
        hidden_size=hidden_size,
        max_relative_positions=furthest,
        # As many vectors as distances: there are no buckets.
        position_buckets=None if span == furthest else span,
        pos_att_type=bias.terms,
        **projections,
    )
    if bias.layer_norm_eps is not None:
        # Put in afterwards, so that it is the bias's own to initialise.
        made.rel_embeddings = RelativeEmbeddings(span, hidden_size, layer_norm_eps=bias.layer_norm_eps)
    return made


def _shared(name: str, module: nn.Module | None) -> nn.Module:
    if module is None:
        raise ValueError(
            f"{name}: got None; this bias has attention's own projections (share_att_key): give its {name}"
        )
    return module


def _kind(given: Any) -> str:
    name = type(given).__name__
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _given(name: str, number: int | None, bias: plan.Bias) -> int:
    if number is None:
        raise ValueError(f"{name}: got None; a bias of kind {bias.kind!r} needs it")
    return number
