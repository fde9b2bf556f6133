"""Which kind of layer stands where: types, masks, and which of them turn."""

from __future__ import annotations

from typing import Any

from theodolite.plan.errors import PlanError
from theodolite.plan.families.family import Config, Family, Pattern, get, need
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
        step = config.get(period_key, period)
        if step is None or isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise PlanError(period_key, step, "it must be a whole number of at least 1")
        return [others if (i + 1) % step else last for i in range(count)]

    return pattern


def windowed(config: Config, count: int) -> list[str]:
    """All layers alike: a window on every one where the config has one (Mistral, Mixtral, Phi-3, StarCoder 2)."""
    sliding = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    return ["sliding_attention" if sliding else "full_attention"] * count


def upper_windowed(config: Config, count: int) -> list[str]:
    """A window from layer `max_window_layers` on, if `use_sliding_window` (Qwen 2 and 3)."""
    if not config.get("use_sliding_window", False) or config.get("sliding_window") is None:
        return ["full_attention"] * count
    first = need(config, "max_window_layers")
    return ["sliding_attention" if i >= first else "full_attention" for i in range(count)]


def layer_types(config: Config, family: Family, count: int) -> tuple[str | None, ...]:
    """The name of each layer's kind; None throughout where the config and the family make no difference."""
    given = config.get("layer_types")
    if given is None and config.get("layers_block_type") is not None:
        given = config["layers_block_type"]
    if given is not None:
        if len(given) != count:
            raise PlanError(
                "layer_types", f"{len(given)} names", f"one per layer is needed: num_hidden_layers is {count}"
            )
        return tuple(given)
    if family.pattern is not None:
        return tuple(family.pattern(config, count))
    if config.get("sliding_window") is not None and config.get("use_sliding_window", True):
        raise PlanError(
            "sliding_window",
            config["sliding_window"],
            "which layers have it is not known in this family: give layer_types",
        )
    return (None,) * count


def turns(config: Config, family: Family, types: tuple[str | None, ...]) -> tuple[bool, ...]:
    """Which layers have a rotation. In `no_rope_layers` 1 means that the layer *has* one (Llama 4, SmolLM 3)."""
    by_layer = config.get("no_rope_layers")
    bases = config.get("layer_rope_theta")
    for name, given in (("no_rope_layers", by_layer), ("layer_rope_theta", bases)):
        if given and len(given) != len(types):
            raise PlanError(
                name, f"{len(given)} numbers", f"one per layer is needed: num_hidden_layers is {len(types)}"
            )
    if not by_layer and "no_rope_layer_interval" in config:
        step = config["no_rope_layer_interval"]
        by_layer = [(i + 1) % step != 0 for i in range(len(types))]
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
    sinks = family.sinks or bool(
        config.get("add_swa_attention_sink_bias" if layer_type in SLIDING else "add_full_attention_sink_bias", False)
    )
    causal = family.causal and config.get("use_bidirectional_attention") not in (True, "all")
    if layer_type is None or layer_type in FULL:
        return Mask(causal=causal, sinks=sinks)
    if layer_type in SLIDING:
        return Mask(causal=causal, sliding_window=_window(config, causal), sinks=sinks)
    if layer_type in CHUNKED:
        return Mask(causal=causal, chunk=need(config, "attention_chunk_size"), sinks=sinks)
    raise PlanError("layer_types", layer_type, f"known kinds of layer: {', '.join(ATTENTION + NO_ATTENTION)}")


def _window(config: Config, causal: bool) -> int:
    """Keys on one side that a query sees, itself included (tokens)."""
    if config.get("sliding_window_size") is not None:
        # MiMo counts the keys before the query.
        return int(config["sliding_window_size"]) + 1
    if config.get("local_attention") is not None:
        # ModernBERT states the width of both sides together.
        return int(config["local_attention"]) // 2 + 1
    window = int(need(config, "sliding_window"))
    # Gemma's encoders state the width of both sides together.
    return window if causal else window // 2 + 1


def _temperature(config: Config, family: Family, *, rotates: bool) -> Temperature | None:
    rope = get(config, "rope_parameters") or get(config, "rope_scaling") or {}
    if "llama_4_scaling_beta" in family.rope_keys and rope.get("llama_4_scaling_beta") is not None:
        # Ministral 3: every layer, and no shift of the position.
        length = need(rope, "original_max_position_embeddings")
        return Temperature(beta=rope["llama_4_scaling_beta"], length=length)
    if config.get("attn_temperature_tuning") and not rotates:
        return Temperature(beta=need(config, "attn_scale"), length=need(config, "floor_scale"), shift=1)
    return None
