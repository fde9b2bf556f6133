"""Families whose positions are not rotary: learned or computed rows, biases on the scores, or nothing at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from theodolite.plan.bias import Bias, Embedding
from theodolite.plan.errors import PlanError
from theodolite.plan.families.family import MOST_LAYERS, Config, flag, get, listed, need, whole
from theodolite.plan.families.layers import NO_ATTENTION
from theodolite.plan.model import LayerPlan, Mask, ModelPlan


@dataclass(frozen=True, kw_only=True)
class Unrotated:
    """How a family without rotation states its positions.

    Args:
        embed: "learned", "sinusoidal" or None.
        spacing: of the frequencies of a sinusoidal embedding, whose sines all stand before its cosines.
        offset: row of position 0; "padding" for `pad_token_id + 1`, which then takes its rows from the stated number.
        bias: "alibi", "t5", "transformer-xl", "deberta" or None.
        causal: queries see only what stands before them.
        score_scale: the multiplier of q.k where it is not `head_dim ** -0.5`.
    """

    embed: str | None = None
    spacing: str = "paper"
    offset: int | str = 0
    bias: str | None = None
    causal: bool = True
    score_scale: float | None = None


_LEARNED = Unrotated(embed="learned")
_LEARNED_2 = Unrotated(embed="learned", offset=2)
_BERT = Unrotated(embed="learned", causal=False)
_ROBERTA = Unrotated(embed="learned", offset="padding", causal=False)
_T5 = Unrotated(bias="t5", score_scale=1.0)
_XL = Unrotated(bias="transformer-xl")
_DEBERTA = Unrotated(embed="learned", bias="deberta", causal=False)
_NOTHING = Unrotated()

UNROTATED: dict[str, Unrotated] = {
    **dict.fromkeys(
        ("gpt2", "gpt_bigcode", "openai-gpt", "imagegpt", "decision_transformer", "clip_text_model"), _LEARNED
    ),
    **dict.fromkeys(("whisper", "blenderbot-small", "blenderbot", "bigbird_pegasus", "git"), _LEARNED),
    "gpt_neo": Unrotated(embed="learned", score_scale=1.0),
    **dict.fromkeys(("opt", "bart", "mbart", "biogpt", "plbart", "mvp", "trocr"), _LEARNED_2),
    **dict.fromkeys(
        ("bert", "electra", "albert", "distilbert", "mobilebert", "convbert", "squeezebert", "big_bird"), _BERT
    ),
    **dict.fromkeys(
        (
            "megatron-bert",
            "layoutlm",
            "ernie",
            "rembert",
            "nystromformer",
            "splinter",
            "xlm",
            "bert-generation",
            "roc_bert",
        ),
        _BERT,
    ),
    **dict.fromkeys(("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer", "data2vec-text"), _ROBERTA),
    **dict.fromkeys(("roberta-prelayernorm", "xmod", "luke", "ibert", "markuplm"), _ROBERTA),
    "mpnet": Unrotated(embed="learned", offset="padding", bias="t5", causal=False),
    **dict.fromkeys(("ctrl", "marian", "pegasus"), Unrotated(embed="sinusoidal")),
    "xglm": Unrotated(embed="sinusoidal", spacing="tensor2tensor", offset=2),
    **dict.fromkeys(("m2m_100", "fsmt"), Unrotated(embed="sinusoidal", spacing="tensor2tensor", offset="padding")),
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano", "udop"), _T5),
    "bloom": Unrotated(bias="alibi"),
    "mpt": Unrotated(bias="alibi"),
    "xlnet": _XL,
    "transfo-xl": _XL,
    "deberta": _DEBERTA,
    "deberta-v2": _DEBERTA,
    **dict.fromkeys(
        ("jamba", "nemotron_h", "kimi_linear", "zamba", "mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), _NOTHING
    ),
}
_NO_ATTENTION_FAMILIES = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")


def read_unrotated(config: Config) -> ModelPlan | None:
    """The plan of a family without rotation; None if the family is not one of them, or rotates as configured."""
    model_type = config.get("model_type")
    row = _row(config, model_type)
    if row is None:
        return None
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
    if model_type == "mpt" and not (config.get("attn_config") or {}).get("alibi", True):
        return _LEARNED
    if model_type == "esm":
        return None if config.get("position_embedding_type", "rotary") == "rotary" else _ROBERTA
    if model_type == "kimi_linear" and config.get("rope_scaling"):
        raise PlanError("rope_scaling", config["rope_scaling"], "this family has no rotation to scale")
    row = UNROTATED.get(model_type)
    kind = config.get("position_embedding_type")
    if row is not None and row.embed == "learned" and kind not in (None, "absolute"):
        if kind != "alibi":
            raise PlanError("position_embedding_type", kind, "known: 'absolute', 'alibi'")
        return Unrotated(bias="alibi", causal=row.causal)
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
        if not flag(config, "relative_attention"):
            return None
        furthest = whole({"max_relative_positions": -1, **config}, "max_relative_positions", least=-1)
        if furthest < 1:
            furthest = need(config, "max_position_embeddings")
        span = whole({"position_buckets": -1, **config}, "position_buckets", least=-1)
        return Bias(kind="deberta", buckets=2 * (span if span > 0 else furthest), max_distance=furthest)
    if row.bias == "alibi" and model_type == "mpt":
        return Bias(kind="alibi", bias_max=(config.get("attn_config") or {}).get("alibi_bias_max", 8))
    if row.bias == "alibi" and model_type == "falcon":
        width, heads = need(config, "hidden_size"), need(config, "num_attention_heads")
        return Bias(kind="alibi", slope_factor=float(width // heads) ** -0.5)
    return None if row.bias is None else Bias(kind=row.bias)


def _layers(config: Config, row: Unrotated, model_type: Any) -> tuple[LayerPlan, ...]:
    # An encoder-decoder is described by its decoder.
    key = next((key for key in ("num_decoder_layers", "decoder_layers") if config.get(key) is not None), None)
    types = listed(config, "layer_types", str) or listed(config, "layers_block_type", str)
    pattern = types or config.get("hybrid_override_pattern")
    count = len(pattern) if key is None and pattern else whole(config, key or "num_hidden_layers", most=MOST_LAYERS)
    if model_type in _NO_ATTENTION_FAMILIES:
        return (LayerPlan(layer_type=str(model_type)),) * count
    if types and len(types) != count:
        raise PlanError("layer_types", f"{len(types)} entries", f"one per layer is needed: there are {count}")
    local = listed(config, "attention_layers", str, count=count) or ["global"] * count
    bias = _bias(config, row, model_type)
    return tuple(
        LayerPlan(layer_type=layer_type)
        if layer_type in NO_ATTENTION
        else LayerPlan(
            bias=bias,
            score_scale=row.score_scale,
            # GPT-Neo's local layers see a window; its other families have none.
            mask=Mask(causal=row.causal, sliding_window=need(config, "window_size") if local[i] == "local" else None),
            layer_type=layer_type,
        )
        for i, layer_type in enumerate(types or [None] * count)
    )
