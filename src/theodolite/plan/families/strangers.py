"""Families without a row: which are read as transformers' convention has it, and which that would misread."""

from __future__ import annotations

from theodolite.plan.errors import PlanError
from theodolite.plan.families.family import Config

# Families of transformers 5.24 whose configs look like a decoder's, and whose code does something else or has not
# been compared with a plan: other score scales, both directions, several axes, positions that are not tokens'.
UNREAD: frozenset[str] = frozenset(
    (
        "axk2", "beam", "blt", "blt_global_transformer", "blt_local_decoder", "blt_local_encoder", "blt_patcher",
        "clvp_encoder", "cohere_compass_text", "deepseek_ocr2_encoder", "dia_decoder", "dia_encoder", "dory",
        "dots3_note_text", "efficientloftr", "embedding_gemma2_text", "esmc", "glm5_next_text", "glm_image_text",
        "gradium_phonon_tts", "hrm_text", "hunyuan_vl_text", "hy_v4", "hy_v4_vl_text", "kyutai_speech_to_text",
        "minimax_m3_vl_text", "molmo2_text", "moonshine", "moonshine_streaming", "moshi", "muse_glimmer_assistant",
        "muse_glimmer_text", "muse_spark_text", "nemotron3_5_transcribe_word_timestamp", "neomme", "neucodec",
        "openai_privacy_filter", "pe_audio_encoder", "pe_audio_video_encoder", "pe_video_encoder", "pocket_tts",
        "qwen2_5_omni_dit", "qwen2_5_omni_talker", "qwen3_omni_moe_talker_code_predictor",
        "qwen3_omni_moe_talker_text", "sarvam_mla", "step3p5", "t5_gemma_module", "t5gemma2_decoder", "t5gemma2_text",
        "ultrabert", "unlimited_ocr_text", "voxtral_realtime_text",
    )
)  # fmt: skip

# Keys that an encoder of images, of sound or of series of numbers has, and a language model has not.
_IMAGE = ("patch_size", "image_size", "num_channels", "in_channels", "spatial_merge_size")
_SOUND = (
    "num_mel_bins", "n_mels", "sampling_rate", "feature_projection_input_dim", "feat_extract_norm", "conv_dim",
    "input_feat_per_channel", "audio_channels",
)  # fmt: skip
_SERIES = ("patch_length", "prediction_length")
# Parts of the names of keys that say how positions enter, if not by rotation alone.
_OTHER_POSITIONS = (
    "position_embedding_type",
    "position_embeddings_type",
    "relative_attention",
    "relative_position",
    "alibi",
    "attn_type",
    "sinusoid",
)
_ROTARY = (None, False, "", "rope", "rotary")


def refuse_misread(config: Config) -> None:
    """Raise PlanError for a family without a row that the convention of Llama's decoders does not describe."""
    model_type = config["model_type"]
    stated = {key for key, value in config.items() if value is not None}
    if stated.intersection(_IMAGE) and "vocab_size" not in stated:
        turning = any("rope" in key or "rotary" in key for key in stated)
        raise PlanError(
            "model_type",
            model_type,
            "an image encoder: its rotation is over rows and columns; theodolite.plan.Axial has it"
            if turning
            else "an image encoder: its positions are rows and columns, which a plan of tokens does not say",
        )
    for keys, kind in ((_SOUND, "an encoder of sound"), (_SERIES, "a model of series of numbers")):
        if stated.intersection(keys):
            raise PlanError("model_type", model_type, f"{kind}: no reading of its positions is known")
    if model_type in UNREAD:
        raise PlanError("model_type", model_type, "no reading of this family's positions is known, and none is guessed")
    for key in sorted(stated):
        if any(part in key for part in _OTHER_POSITIONS) and config[key] not in _ROTARY:
            raise PlanError(key, config[key], "it speaks of positions, and in this family no reading of it is known")
    if config.get("is_encoder_decoder"):
        raise PlanError("is_encoder_decoder", True, "which layers are whose is not known in this family")
    masked = [name for name in _names(config) if name.endswith(("ForMaskedLM", "Encoder", "EncoderModel"))]
    if masked:
        raise PlanError("architectures", masked, "an encoder sees both ways, and of this family nothing is known")


def _names(config: Config) -> list[str]:
    given = config.get("architectures")
    return [name for name in given if isinstance(name, str)] if isinstance(given, (list, tuple)) else []
