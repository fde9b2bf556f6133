"""Which kind of layer stands where: types, masks, and which of them turn."""

from __future__ import annotations

from typing import Any

from theodolite.plan.errors import PlanError
from theodolite.plan.families.family import (
    MOST_LAYERS,
    Config,
    Family,
    Pattern,
    flag,
    get,
    is_stated,
    listed,
    need,
    whole,
)
from theodolite.plan.model import LayerPlan, Mask, Temperature

# transformers' names, with the older ones that it still reads.
FULL = ("full_attention", "attention", "hybrid", "indexed_attention", "deepseek_sparse_attention",
        "qwen_sparse_attention", "minimax_m3_sparse", "global_attention")  # fmt: skip
SLIDING = ("sliding_attention", "hybrid_sliding", "local_attention")
CHUNKED = ("chunked_attention",)
ATTENTION = (*FULL, *SLIDING, *CHUNKED)
NO_ATTENTION = ("linear_attention", "mamba", "mamba2", "conv", "moe", "recurrent", "mlp", "cross_attention")


def every(period_key: str, period: int, *, others: str = "sliding_attention", last: str = "full_attention") -> Pattern:
    """`others` except at every `period`-th layer, counted from 1; the config may state the period."""

    def pattern(config: Config, count: int) -> list[str]:
        step = whole({period_key: period, **config}, period_key)
        return [others if (i + 1) % step else last for i in range(count)]

    return pattern


def windowed(config: Config, count: int) -> list[str]:
    """All layers alike: a window on every one where the config has one (Mistral, Mixtral, Phi-3, StarCoder 2)."""
    sliding = config.get("sliding_window") is not None and flag(config, "use_sliding_window", True)
    return ["sliding_attention" if sliding else "full_attention"] * count


def upper_windowed(config: Config, count: int) -> list[str]:
    """A window from layer `max_window_layers` on, if `use_sliding_window` (Qwen 2 and 3)."""
    if not flag(config, "use_sliding_window") or config.get("sliding_window") is None:
        return ["full_attention"] * count
    first = whole(config, "max_window_layers", least=0, most=MOST_LAYERS)
    return ["sliding_attention" if i >= first else "full_attention" for i in range(count)]


def layer_types(config: Config, family: Family, count: int) -> tuple[str | None, ...]:
    """The name of each layer's kind; None throughout where the config and the family make no difference."""
    for name in ("layer_types", "layers_block_type"):
        given = listed(config, name, str, count=count)
        if given is not None:
            return tuple(given)
    if family.pattern is not None:
        return tuple(family.pattern(config, count))
    if config.get("sliding_window") is not None and flag(config, "use_sliding_window", True):
        raise PlanError(
            "sliding_window",
            config["sliding_window"],
            "which layers have it is not known in this family: give layer_types",
        )
    return (None,) * count


def stated_turns(config: Config, count: int) -> list[Any] | None:
    """Which layers the config itself says to turn; None where it does not say.

    In `no_rope_layers` 1 means that the layer *has* a rotation (Llama 4, SmolLM 3).
    """
    if config.get("no_rope_layers") not in (None, [], ()):
        return listed(config, "no_rope_layers", int, count=count)
    if config.get("no_rope_layer_interval") is None:
        return None
    step = whole(config, "no_rope_layer_interval")
    return [(i + 1) % step != 0 for i in range(count)]


def turns(config: Config, family: Family, types: tuple[str | None, ...]) -> tuple[bool, ...]:
    """Which layers have a rotation."""
    by_layer = stated_turns(config, len(types))
    bases = layer_bases(config, len(types))
    if family.rotates_if is not None and config.get(family.rotates_if[0]) != family.rotates_if[1]:
        return (False,) * len(types)
    unrotated = family.unrotated if config.get("sliding_window") is not None else ()
    return tuple(
        layer_type not in NO_ATTENTION
        and layer_type not in unrotated
        and (not by_layer or bool(by_layer[i]))
        and (not bases or bool(bases[i]))
        for i, layer_type in enumerate(types)
    )


def layer_bases(config: Config, count: int) -> list[Any] | None:
    """The base of each layer, 0 for one without rotation, where the config states them one by one (Granite)."""
    if config.get("layer_rope_theta") in (None, [], ()):
        return None
    return listed(config, "layer_rope_theta", (int, float), count=count)


def layer_plan(
    config: Config, family: Family, layer_type: str | None, rotate: Any, score_scale: float | None
) -> LayerPlan:
    """The policy of a layer of this kind, with this rotation."""
    if layer_type in NO_ATTENTION:
        return LayerPlan(layer_type=layer_type)
    return LayerPlan(
        rotate=rotate,
        score_scale=score_scale,
        temperature=_temperature(config, family, rotates=rotate is not None),
        mask=_mask(config, family, layer_type),
        layer_type=layer_type,
    )


def _mask(config: Config, family: Family, layer_type: str | None) -> Mask:
    key = "add_swa_attention_sink_bias" if layer_type in SLIDING else "add_full_attention_sink_bias"
    sinks = family.sinks or flag(config, key)
    causal = family.causal or is_stated(config, family.causal_if)
    causal = (
        causal and config.get("use_bidirectional_attention") not in (True, "all") and flag(config, "is_causal", True)
    )
    if layer_type is None or layer_type in FULL:
        return Mask(causal=causal, sinks=sinks)
    if layer_type in SLIDING:
        return Mask(causal=causal, sliding_window=_window(config, causal), sinks=sinks)
    if layer_type in CHUNKED:
        return Mask(causal=causal, chunk=whole(config, "attention_chunk_size"), sinks=sinks)
    raise PlanError("layer_types", layer_type, f"known kinds of layer: {', '.join(ATTENTION + NO_ATTENTION)}")


def _window(config: Config, causal: bool) -> int:
    """Keys on one side that a query sees, itself included (tokens)."""
    if config.get("sliding_window_size") is not None:
        # MiMo counts the keys before the query.
        return whole(config, "sliding_window_size") + 1
    if config.get("local_attention") is not None:
        # ModernBERT states the width of both sides together.
        return whole(config, "local_attention") // 2 + 1
    window = whole(config, "sliding_window")
    # Gemma's encoders state the width of both sides together.
    return window if causal else window // 2 + 1


def _temperature(config: Config, family: Family, *, rotates: bool) -> Temperature | None:
    rope = get(config, "rope_parameters") or get(config, "rope_scaling") or {}
    if "llama_4_scaling_beta" in family.rope_keys and rope.get("llama_4_scaling_beta") is not None:
        # Ministral 3: every layer, and no shift of the position.
        length = need(rope, "original_max_position_embeddings")
        return Temperature(beta=rope["llama_4_scaling_beta"], length=length)
    if not rotates and flag(config, "attn_temperature_tuning"):
        return Temperature(beta=need(config, "attn_scale"), length=need(config, "floor_scale"), shift=1)
    return None
