"""Families whose positions are not rotary: learned or computed rows, biases on the scores, or nothing at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from theodolite.plan.bias import Bias, Embedding
from theodolite.plan.errors import PlanError, require_whole
from theodolite.plan.families.deberta import read_deberta
from theodolite.plan.families.family import (
    MOST_LAYERS,
    WIDEST,
    Config,
    flag,
    get,
    is_stated,
    listed,
    mapped,
    need,
    whole,
)
from theodolite.plan.families.layers import NO_ATTENTION
from theodolite.plan.families.parts import encoder_config, part_of, refuse_unsaid_encoder, require_own_part
from theodolite.plan.model import LayerPlan, Mask, ModelPlan, Part


@dataclass(frozen=True, kw_only=True)
class Unrotated:
    """How a family without rotation states its positions.

    Args:
        embed: "learned", "sinusoidal" or None.
        spacing: of the frequencies of a sinusoidal embedding, whose sines all stand before its cosines.
        offset: row of position 0; "padding" for `pad_token_id + 1`, which then takes its rows from the stated number.
        bias: "alibi", "t5", "transformer-xl", "deberta" or None.
        causal: queries see only what stands before them.
        causal_if: the key and the value with which they do in a family where else they see both ways.
        score_scale: the multiplier of q.k where it is not `head_dim ** -0.5`.
        two_stacks: an encoder and a decoder; what is said here of the embedding is true of both.
        encoder_embed: of the encoder where it differs, likewise with `encoder_spacing`.
    """

    embed: str | None = None
    spacing: str = "paper"
    offset: int | str = 0
    bias: str | None = None
    causal: bool = True
    causal_if: tuple[str, Any] | None = None
    score_scale: float | None = None
    two_stacks: bool = False
    encoder_embed: str | None = None
    encoder_spacing: str = "paper"


_IF_DECODER = ("is_decoder", True)
_LEARNED = Unrotated(embed="learned")
_LEARNED_2 = Unrotated(embed="learned", offset=2)
_BART = Unrotated(embed="learned", offset=2, two_stacks=True)
# Of BERT's kind some are decoders when the config says so, and some see both ways whatever it says.
_BERT = Unrotated(embed="learned", causal=False)
_BERT_OR_DECODER = Unrotated(embed="learned", causal=False, causal_if=_IF_DECODER)
_ROBERTA = Unrotated(embed="learned", offset="padding", causal=False)
_ROBERTA_OR_DECODER = Unrotated(embed="learned", offset="padding", causal=False, causal_if=_IF_DECODER)
_SINUSOIDAL = Unrotated(embed="sinusoidal")
_T5 = Unrotated(bias="t5", score_scale=1.0, two_stacks=True)
_DEBERTA = Unrotated(embed="learned", bias="deberta", causal=False)
_NOTHING = Unrotated()

UNROTATED: dict[str, Unrotated] = {
    **dict.fromkeys(
        ("gpt2", "gpt_bigcode", "openai-gpt", "imagegpt", "decision_transformer", "clip_text_model"), _LEARNED
    ),
    "git": _LEARNED,
    "whisper": Unrotated(embed="learned", two_stacks=True, encoder_embed="sinusoidal", encoder_spacing="tensor2tensor"),
    **dict.fromkeys(("blenderbot-small", "blenderbot", "bigbird_pegasus"), Unrotated(embed="learned", two_stacks=True)),
    "gpt_neo": Unrotated(embed="learned", score_scale=1.0),
    **dict.fromkeys(("opt", "biogpt", "trocr"), _LEARNED_2),
    **dict.fromkeys(("bart", "mbart", "plbart", "mvp"), _BART),
    **dict.fromkeys(
        ("albert", "distilbert", "mobilebert", "convbert", "squeezebert", "layoutlm", "nystromformer", "splinter"),
        _BERT,
    ),
    **dict.fromkeys(
        ("bert", "electra", "big_bird", "megatron-bert", "ernie", "rembert", "bert-generation", "roc_bert"),
        _BERT_OR_DECODER,
    ),
    "xlm": Unrotated(embed="learned", causal=False, causal_if=("causal", True)),
    **dict.fromkeys(("longformer", "luke", "ibert", "markuplm"), _ROBERTA),
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "roberta-prelayernorm", "xmod"),
        _ROBERTA_OR_DECODER,
    ),
    "mpnet": Unrotated(embed="learned", offset="padding", bias="t5", causal=False),
    "ctrl": _SINUSOIDAL,
    **dict.fromkeys(("marian", "pegasus"), replace(_SINUSOIDAL, two_stacks=True)),
    "xglm": Unrotated(embed="sinusoidal", spacing="tensor2tensor", offset=2),
    **dict.fromkeys(
        ("m2m_100", "fsmt"),
        Unrotated(embed="sinusoidal", spacing="tensor2tensor", offset="padding", two_stacks=True),
    ),
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano", "udop"), _T5),
    "bloom": Unrotated(bias="alibi"),
    "mpt": Unrotated(bias="alibi"),
    "xlnet": Unrotated(bias="transformer-xl", causal=False, causal_if=("attn_type", "uni")),
    "transfo-xl": Unrotated(bias="transformer-xl"),
    "deberta": _DEBERTA,
    "deberta-v2": _DEBERTA,
    **dict.fromkeys(
        ("jamba", "nemotron_h", "kimi_linear", "zamba", "mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), _NOTHING
    ),
}
_NO_ATTENTION_FAMILIES = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")


def read_unrotated(config: Config, part: Part | None = None) -> ModelPlan | None:
    """The plan of a family without rotation; None if the family is not one of them, or rotates as configured.

    Args:
        part: "encoder" or "decoder" of a model that has both; its decoder by default.
    """
    model_type = config.get("model_type")
    row = _row(config, model_type)
    if row is None:
        return None
    if not row.two_stacks:
        return require_own_part(_plan(config, row, model_type), part)
    part = part_of(config, part, encoder_alone=row.bias == "t5")
    if part == "encoder":
        refuse_unsaid_encoder(config)
        config = encoder_config(config)
        row = replace(row, causal=False)
        if row.encoder_embed is not None:
            row = replace(row, embed=row.encoder_embed, spacing=row.encoder_spacing)
    return replace(_plan(config, row, model_type), part=part)


def _plan(config: Config, row: Unrotated, model_type: Any) -> ModelPlan:
    if row.causal and not flag(config, "is_causal", True):
        raise PlanError("is_causal", False, "not all of these families' code heeds it, so it is not read")
    if is_stated(config, row.causal_if):
        row = replace(row, causal=True)
    embed = _embedding(config, row, model_type)
    stated = get(config, "max_position_embeddings")
    return ModelPlan(
        model_type=str(model_type),
        # What a token can stand at, not the rows of the table: 514 rows of RoBERTa hold 512 tokens.
        max_position_embeddings=embed.rows if embed is not None and embed.rows else stated,
        layers=_layers(config, row, model_type),
        embed=embed,
    )


def _row(config: Config, model_type: Any) -> Unrotated | None:
    if model_type == "falcon":
        return Unrotated(bias="alibi") if flag(config, "alibi") else None
    if model_type == "mpt" and not flag(mapped(config, "attn_config"), "alibi", True):
        return _LEARNED
    if model_type == "esm":
        return None if config.get("position_embedding_type", "rotary") == "rotary" else _ROBERTA_OR_DECODER
    if model_type == "kimi_linear" and config.get("rope_scaling"):
        raise PlanError("rope_scaling", config["rope_scaling"], "this family has no rotation to scale")
    row = UNROTATED.get(model_type)
    kind = config.get("position_embedding_type")
    if row is not None and row.embed == "learned" and kind not in (None, "absolute"):
        if kind != "alibi":
            raise PlanError("position_embedding_type", kind, "known: 'absolute', 'alibi'")
        return Unrotated(bias="alibi", causal=row.causal, causal_if=row.causal_if)
    return row


def _embedding(config: Config, row: Unrotated, model_type: Any) -> Embedding | None:
    if row.embed is None or not flag(config, "position_biased_input", True):
        return None
    offset = whole(config, "pad_token_id", least=0) + 1 if row.offset == "padding" else int(row.offset)
    if row.embed == "sinusoidal":
        return Embedding(kind="sinusoidal", offset=offset, layout="halves", spacing=row.spacing)
    stated = whole(config, "max_position_embeddings")
    return Embedding(kind="learned", rows=stated - offset if row.offset == "padding" else stated, offset=offset)


def _bias(config: Config, row: Unrotated, model_type: Any) -> Bias | None:
    if row.bias == "t5":
        return Bias(
            kind="t5",
            buckets=need(config, "relative_attention_num_buckets"),
            max_distance=config.get("relative_attention_max_distance", 128),
        )
    if row.bias == "deberta":
        return read_deberta(config)
    if row.bias == "transformer-xl":
        if flag(config, "bi_data"):
            raise PlanError("bi_data", True, "half of the batch runs backwards, which a plan cannot say")
        clamp = whole({"clamp_len": -1, **config}, "clamp_len", least=-1)
        return Bias(kind="transformer-xl", max_distance=clamp if clamp > 0 else None)
    if row.bias == "alibi":
        return _alibi(config, model_type)
    return None if row.bias is None else Bias(kind=row.bias)


def _alibi(config: Config, model_type: Any) -> Bias:
    heads = None if get(config, "num_attention_heads") is None else whole(config, "num_attention_heads", most=WIDEST)
    if model_type == "mpt":
        return Bias(kind="alibi", heads=heads, bias_max=mapped(config, "attn_config").get("alibi_bias_max", 8))
    if model_type == "falcon":
        width, heads = (whole(config, key, most=WIDEST) for key in ("hidden_size", "num_attention_heads"))
        if width < heads:
            raise PlanError("hidden_size", width, f"it must be at least the number of heads ({heads})")
        return Bias(kind="alibi", heads=heads, slope_factor=float(width // heads) ** -0.5)
    if heads is not None and get(config, "hidden_size") is not None:
        width = whole(config, "hidden_size", most=WIDEST)
        if width % heads:
            raise PlanError("hidden_size", width, f"it must be a multiple of the heads ({heads})")
    return Bias(kind="alibi", heads=heads)


def _layers(config: Config, row: Unrotated, model_type: Any) -> tuple[LayerPlan, ...]:
    # An encoder-decoder is described by its decoder.
    key = next((key for key in ("num_decoder_layers", "decoder_layers") if config.get(key) is not None), None)
    types = listed(config, "layer_types", str) or listed(config, "layers_block_type", str)
    pattern = types or config.get("hybrid_override_pattern")
    if not isinstance(pattern, (str, list, type(None))):
        raise PlanError("hybrid_override_pattern", pattern, "it must be a text of one letter a layer")
    require_whole(least=0, most=MOST_LAYERS, layers=len(pattern or ()))
    count = len(pattern) if key is None and pattern else whole(config, key or "num_hidden_layers", most=MOST_LAYERS)
    if model_type in _NO_ATTENTION_FAMILIES:
        return (LayerPlan(layer_type=str(model_type)),) * count
    if types and len(types) != count:
        raise PlanError("layer_types", f"{len(types)} entries", f"one per layer is needed: there are {count}")
    windows = _windows(config, row, model_type, count)
    bias = _bias(config, row, model_type)
    return tuple(
        LayerPlan(layer_type=layer_type)
        if layer_type in NO_ATTENTION
        else LayerPlan(
            bias=bias,
            score_scale=row.score_scale,
            mask=Mask(causal=row.causal, sliding_window=windows[i]),
            layer_type=layer_type,
        )
        for i, layer_type in enumerate(types or [None] * count)
    )


def _windows(config: Config, row: Unrotated, model_type: Any, count: int) -> list[int | None]:
    """Keys on one side that a query sees, itself included, layer by layer."""
    if model_type == "longt5" and not row.causal:
        return [whole(config, "local_radius") + 1] * count
    if model_type == "longformer":
        # The width of both sides together. Which tokens see all others the task decides, not the config.
        widths = config.get("attention_window")
        if not isinstance(widths, (list, tuple)):
            return [whole(config, "attention_window") // 2 + 1] * count
        listed(config, "attention_window", int, count=count)
        return [whole({"attention_window": width}, "attention_window") // 2 + 1 for width in widths]
    # GPT-Neo's local layers see a window; its other families have none.
    local = listed(config, "attention_layers", str, count=count) or ["global"] * count
    return [need(config, "window_size") if kind == "local" else None for kind in local]
