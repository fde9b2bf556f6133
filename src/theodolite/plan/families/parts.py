"""Encoder and decoder: which stacks a model has, and what its config says of the encoder."""

from __future__ import annotations

from typing import Any

from theodolite.plan.errors import PlanError
from theodolite.plan.families.family import Config, flag, whole
from theodolite.plan.model import ModelPlan, Part

# The names that the number of the encoder's layers has.
_ENCODER_LAYERS = ("encoder_layers", "num_layers", "num_hidden_layers")
_DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")


def require_own_part(plan: ModelPlan, part: Part | None) -> ModelPlan:
    """The plan of a model of one stack, if that is the part asked for."""
    own = "decoder" if any(layer.mask.causal for layer in plan.layers) else "encoder"
    if part not in (None, own):
        raise PlanError("part", part, f"{plan.model_type!r} has one stack of layers, {_article(own)}: leave part out")
    return plan


def part_of(config: Config, part: Part | None, *, encoder_alone: bool) -> Part:
    """The part of an encoder-decoder that is read; PlanError where this model lacks it.

    Args:
        encoder_alone: the family's code has an encoder without a decoder where neither key says decoder (T5).
    """
    if flag(config, "is_encoder_decoder", True):
        return part or "decoder"
    own: Part
    if flag(config, "is_decoder"):
        own = "decoder"
    elif encoder_alone:
        own = "encoder"
    else:
        return part or "decoder"
    if part not in (None, own):
        raise PlanError("part", part, f"is_encoder_decoder=False says that there is {_article(own)} alone")
    return own


def encoder_config(config: Config) -> Config:
    """The config as its encoder has it: the encoder's layers, and its length (`max_source_positions`) if it has one."""
    key = next((key for key in _ENCODER_LAYERS if config.get(key) is not None), "encoder_layers")
    changed: dict[str, Any] = {"num_hidden_layers": whole(config, key)}
    if config.get("max_source_positions") is not None:
        changed["max_position_embeddings"] = config["max_source_positions"]
    return {**{name: value for name, value in config.items() if name not in _DECODER_LAYERS}, **changed}


def refuse_unsaid_encoder(config: Config) -> None:
    """Raise PlanError for encoders whose attention has what a plan has no words for."""
    model_type = config.get("model_type")
    if model_type == "udop":
        raise PlanError("part", "encoder", "its biases follow rows and columns of a page too, which a plan cannot say")
    if model_type == "longt5" and config.get("encoder_attention_type", "local") != "local":
        kind = config["encoder_attention_type"]
        raise PlanError("encoder_attention_type", kind, "a plan can say 'local': tokens for whole blocks it cannot")
    if model_type == "bigbird_pegasus" and config.get("attention_type", "block_sparse") != "original_full":
        raise PlanError(
            "attention_type", config.get("attention_type"), "a plan can say 'original_full': random blocks it cannot"
        )


def _article(part: str) -> str:
    return f"an {part}" if part == "encoder" else f"a {part}"
