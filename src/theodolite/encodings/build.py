"""From what a plan says to the modules that do it."""

from __future__ import annotations

from theodolite import plan
from theodolite.encodings.bias.alibi import ALiBi, alibi_slopes
from theodolite.encodings.bias.base import Bias
from theodolite.encodings.bias.deberta import DisentangledBias
from theodolite.encodings.bias.t5 import T5Bias
from theodolite.encodings.bias.transformer_xl import TransformerXLBias
from theodolite.encodings.embed.base import Embed
from theodolite.encodings.embed.learned import LearnedEmbedding
from theodolite.encodings.embed.sinusoidal import Sinusoidal
from theodolite.encodings.policy import Policy
from theodolite.encodings.rotate.rotary import RotaryEmbedding
from theodolite.encodings.scale.temperature import Temperature


def build(
    layer: plan.LayerPlan, *, num_heads: int, head_dim: int | None = None, hidden_size: int | None = None
) -> Policy:
    """The policy that a layer's plan describes; what is learned is freshly initialised.

    Args:
        layer: one of `ModelPlan.layers`.
        num_heads: query heads of the whole model.
        head_dim: channels of a head, where a bias has vectors of that width (Transformer-XL, DeBERTa).
        hidden_size: width of the layer's input, where a bias has vectors of that width.

    Raises:
        ValueError: a width is needed and not given. What no plan says, such as vectors shared between layers, is
            for the classes themselves to take.
    """
    return Policy(
        rotate=None if layer.rotate is None else RotaryEmbedding(layer.rotate),
        bias=None if layer.bias is None else _bias(layer, layer.bias, num_heads, head_dim, hidden_size),
        scale=None if layer.temperature is None else Temperature.from_plan(layer.temperature),
        score_scale=layer.score_scale,
        mask=layer.mask,
    )


def build_embed(embed: plan.Embedding, *, dim: int) -> Embed:
    """What a plan adds to token embeddings of `dim` channels; a learned table is freshly initialised."""
    if embed.kind == "sinusoidal":
        return Sinusoidal(dim, layout=embed.layout, spacing=embed.spacing, offset=embed.offset)  # type: ignore[arg-type]
    if embed.rows is None:
        raise ValueError("rows: got None; a learned table needs the number of positions that it has")
    return LearnedEmbedding(embed.rows, dim, offset=embed.offset)


def _bias(
    layer: plan.LayerPlan, bias: plan.Bias, num_heads: int, head_dim: int | None, hidden_size: int | None
) -> Bias:
    if bias.kind == "alibi":
        slopes = (slope * bias.slope_factor for slope in alibi_slopes(num_heads, bias_max=bias.bias_max))
        return ALiBi.from_slopes(slopes, symmetric=not layer.mask.causal)
    if bias.kind == "t5":
        buckets, furthest = _given("buckets", bias.buckets, bias), _given("max_distance", bias.max_distance, bias)
        return T5Bias(num_heads, num_buckets=buckets, max_distance=furthest, bidirectional=not layer.mask.causal)
    head_dim, hidden_size = _given("head_dim", head_dim, bias), _given("hidden_size", hidden_size, bias)
    if bias.kind == "transformer-xl":
        return TransformerXLBias(num_heads, head_dim, hidden_size=hidden_size)
    span, furthest = _given("buckets", bias.buckets, bias) // 2, _given("max_distance", bias.max_distance, bias)
    return DisentangledBias(
        num_heads,
        head_dim,
        hidden_size=hidden_size,
        max_relative_positions=furthest,
        # As many vectors as distances: there are no buckets.
        position_buckets=None if span == furthest else span,
    )


def _given(name: str, number: int | None, bias: plan.Bias) -> int:
    if number is None:
        raise ValueError(f"{name}: got None; a bias of kind {bias.kind!r} needs it")
    return number
