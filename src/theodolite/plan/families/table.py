"""The families. Read off transformers 5.24's config and modeling files; a test compares each with them.

A family of which transformers knows nothing is read as its convention has it: half-split pairs, one rope dict, no
defaults. What that would misread is refused (`strangers.py`).
"""

from __future__ import annotations

from dataclasses import replace

from theodolite.plan.families.family import Config, Family, Pattern, listed, positive, whole
from theodolite.plan.families.layers import every, stated_turns, upper_windowed, windowed
from theodolite.plan.families.widths import HEAD_DIMS

_SLIDING_FULL = ("sliding_attention", "full_attention")


def _query_pre_attn_scalar(config: Config) -> float:
    return float(positive(config, "query_pre_attn_scalar") ** -0.5)


def _attention_multiplier(config: Config) -> float:
    return float(positive(config, "attention_multiplier"))


def _half_head(config: Config) -> float:
    return float((positive(config, "head_dim") / 2) ** -0.5)


def _one(config: Config) -> float:
    return 1.0


def _llama4_types(config: Config, count: int) -> list[str]:
    chunked = config.get("attention_chunk_size") is not None
    turning = stated_turns(config, count) or [True] * count
    return ["chunked_attention" if turned and chunked else "full_attention" for turned in turning]


def _exaone_types(config: Config, count: int) -> list[str]:
    if config.get("sliding_window") is None:
        return ["full_attention"] * count
    pattern = config.get("sliding_window_pattern", 4)
    if isinstance(pattern, str) and pattern:
        return ["full_attention" if pattern[i % len(pattern)] == "G" else "sliding_attention" for i in range(count)]
    return every("sliding_window_pattern", 4)(config, count)


def _modernbert_types(config: Config, count: int) -> list[str]:
    step = whole({"global_attn_every_n_layers": 3, **config}, "global_attn_every_n_layers")
    return ["sliding_attention" if i % step else "full_attention" for i in range(count)]


def _recurrent_gemma_types(config: Config, count: int) -> list[str]:
    blocks = listed(config, "block_types", str) or ["recurrent", "recurrent", "attention"]
    return ["sliding_attention" if blocks[i % len(blocks)] == "attention" else "recurrent" for i in range(count)]


def _mllama_types(config: Config, count: int) -> list[str]:
    crossing = set(listed(config, "cross_attention_layers", int) or ())
    return ["cross_attention" if i in crossing else "full_attention" for i in range(count)]


def _indexed(key: str, others: str) -> Pattern:
    """`others` except at the layers that the config lists."""

    def pattern(config: Config, count: int) -> list[str]:
        full = set(listed(config, key, int) or ())
        return ["full_attention" if i in full else others for i in range(count)]

    return pattern


_GEMMA3 = Family(
    # Gemma 3's text configs of 4B and more state neither base nor head width, and 4B's not even the heads.
    defaults={"num_attention_heads": 8, "max_position_embeddings": 131072, "query_pre_attn_scalar": 256},
    default_bases={"full_attention": 1e6, "sliding_attention": 1e4},
    pattern=every("sliding_window_pattern", 6),
    nested=_SLIDING_FULL,
    bases={"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
    scaled=("full_attention",),
    score_scale=_query_pre_attn_scalar,
)
_GEMMA3N = replace(_GEMMA3, defaults={}, score_scale=_one, pattern=every("sliding_window_pattern", 5))
_GEMMA4 = Family(
    defaults={"global_head_dim": 512},
    pattern=every("sliding_window_pattern", 6),
    nested=_SLIDING_FULL,
    score_scale=_one,
)
_MODERNBERT = Family(
    pattern=_modernbert_types,
    nested=_SLIDING_FULL,
    bases={"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"},
)
_ENCODER = Family(causal=False)
_LATENT = Family(interleaved=True, latent=True)
_PHI3 = Family(pattern=windowed, aliases={"yarn": "longrope"})
_MISTRAL = Family(pattern=windowed)
_MINISTRAL = Family(pattern=windowed, rope_keys=("llama_4_scaling_beta", "max_position_embeddings"))
_QWEN = Family(pattern=upper_windowed)
_QWEN_VL = replace(_QWEN, mrope_section=(16, 24, 24))
_QWEN3_VL = Family(mrope_interleaved=True, mrope_section=(24, 20, 20), rope_keys=("interleaved",))
_QWEN3_NEXT = Family(partial_rotary_factor=0.25, pattern=every("full_attention_interval", 4, others="linear_attention"))
_QWEN3_5 = replace(_QWEN3_NEXT, mrope_interleaved=True, mrope_section=(11, 11, 10))
_GRANITE = Family(score_scale=_attention_multiplier)
_GRANITE_SWA = replace(_GRANITE, sinks=True)
_HALF = Family(partial_rotary_factor=0.5)
_GLM = Family(interleaved=True, partial_rotary_factor=0.5)
_QUARTER = Family(partial_rotary_factor=0.25)
_INTERLEAVED = Family(interleaved=True)
# The base of GPT-J is a number in its authors' code and no key of its config.
_GPTJ = Family(interleaved=True, default_bases={"": 1e4}, fixed=True)
_HUNYUAN = Family(rope_keys=("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"))
_EXAONE = Family(pattern=_exaone_types, unrotated=("full_attention",))
_COHERE2 = Family(interleaved=True, pattern=every("sliding_window_pattern", 4), unrotated=("full_attention",))

# Families that transformers' convention describes in full.
_PLAIN = (
    "llama", "apertus", "apertus1p5", "arcee", "aria_text", "bitnet", "chameleon", "csm", "csm_depth_decoder_model",
    "cwm", "dbrx", "deepseek_ocr2_text", "diffllama", "doge", "dots1", "emu3", "emu3_text_model", "evolla", "exaone",
    "falcon_h1", "flex_olmo", "fuyu", "gemma", "got_ocr2", "gpt_neox_japanese", "higgs_audio_v2", "hy_v3", "idefics",
    "internlm3", "iquestcoder", "jais2", "jetmoe", "lfm2_moe", "minimax", "minimax_m2", "ministral", "olmo", "olmo2",
    "olmo_hybrid", "olmoe", "seed_oss", "solar_open",
)  # fmt: skip

_ROWS: dict[str, Family] = {
    **dict.fromkeys(_PLAIN, Family()),
    **dict.fromkeys(("laguna", "mellum", "lfm3", "mimo_v2_flash"), Family(nested=_SLIDING_FULL)),
    **dict.fromkeys(("cohere", "ernie4_5", "ernie4_5_moe", "helium"), _INTERLEAVED),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "longcat_flash", "axk1"), _LATENT),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "youtu"), _LATENT),
    **dict.fromkeys(("mistral", "mixtral", "starcoder2", "phimoe"), _MISTRAL),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), _QWEN),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "paddleocr_vl"), _QWEN_VL),
    **dict.fromkeys(("cosmos3_edge", "qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe"), _QWEN3_VL),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _QWEN3_5),
    **dict.fromkeys(("gemma4", "gemma4_unified"), _GEMMA4),
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared", "hyperclovax"), _GRANITE),
    **dict.fromkeys(("granite4_vision", "granite_docling"), _GRANITE),
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), _GRANITE_SWA),
    **dict.fromkeys(("glm4_moe", "nemotron", "persimmon", "phi", "sarvam_moe"), _HALF),
    **dict.fromkeys(("stablelm", "gpt_neox"), _QUARTER),
    **dict.fromkeys(("eurobert", "jina_embeddings_v3", "gte", "nomic_bert"), _ENCODER),
    **dict.fromkeys(("phi3", "phi4_multimodal"), _PHI3),
    **dict.fromkeys(("glm", "glm4"), _GLM),
    **dict.fromkeys(("gptj", "codegen"), _GPTJ),
    **dict.fromkeys(("exaone4", "exaone_moe", "kolibri1"), _EXAONE),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), _HUNYUAN),
    "afmoe": Family(pattern=every("global_attn_every_n_layers", 4), unrotated=("full_attention",)),
    "bailing_hybrid": replace(_LATENT, pattern=every("layer_group_size", 6, others="linear_attention")),
    "bamba": replace(_HALF, pattern=_indexed("attn_layer_indices", "linear_attention")),
    "cohere2": _COHERE2,
    "esm": Family(causal=False, causal_if=("is_decoder", True), default_bases={"": 1e4}),
    # Falcon's configs were released before the key existed; its authors' code had this number.
    "falcon": Family(default_bases={"": 1e4}, defaults={"max_position_embeddings": 2048}),
    "flint": Family(unrotated=("full_attention",), sinks=True),
    "gemma2": Family(pattern=every("sliding_window_pattern", 2), score_scale=_query_pre_attn_scalar),
    "gemma3": _GEMMA3,
    "gemma3n": _GEMMA3N,
    "glm4v": replace(_GLM, partial_rotary_factor=1.0, mrope_section=(8, 12, 12)),
    "glm4v_moe": replace(_HALF, mrope_section=(8, 12, 12)),
    "glm_ocr": replace(_INTERLEAVED, mrope_section=(8, 12, 12)),
    "gpt_oss": Family(pattern=every("sliding_window_pattern", 2), sinks=True),
    "granitemoehybrid": replace(_GRANITE, rotates_if=("position_embedding_type", "rope")),
    "lfm2": Family(pattern=_indexed("full_attn_idxs", "conv")),
    # The model hands its full layers no angles at all.
    "lara_mini": Family(unrotated=("full_attention",)),
    "llama4": Family(
        interleaved=True,
        pattern=_llama4_types,
        defaults={"no_rope_layer_interval": 4, "attn_temperature_tuning": True, "attn_scale": 0.1, "floor_scale": 8192},
    ),
    "minicpm3": Family(latent=True),
    "ministral3": _MINISTRAL,
    "mistral4": replace(_MINISTRAL, interleaved=True, latent=True),
    "mllama_text_model": Family(pattern=_mllama_types),
    "modernbert": replace(_MODERNBERT, causal=False),
    "modernbert-decoder": _MODERNBERT,
    "olmo3": Family(
        pattern=every("sliding_window_pattern", 4),
        nested=_SLIDING_FULL,
        bases={"full_attention": "rope_theta", "sliding_attention": "rope_theta"},
        scaled=("full_attention",),
    ),
    "qwen3_next": _QWEN3_NEXT,
    "qwen4_exp": replace(_QWEN3_5, partial_rotary_factor=1.0),
    "recurrent_gemma": replace(_HALF, pattern=_recurrent_gemma_types),
    "roformer": Family(
        interleaved=True, causal=False, causal_if=("is_decoder", True), default_bases={"": 1e4}, fixed=True
    ),
    "smollm3": Family(defaults={"no_rope_layer_interval": 4}),
    "vaultgemma": Family(score_scale=_query_pre_attn_scalar),
    "zaya": Family(nested=("hybrid", "hybrid_sliding")),
    "zamba2": Family(score_scale=_half_head, rotates_if=("use_mem_rope", True)),
}
FAMILIES: dict[str, Family] = {
    name: replace(row, defaults={**HEAD_DIMS.get(name, {}), **row.defaults}) for name, row in _ROWS.items()
}

# Families whose positions have a part that a plan has no words for yet; a wrong reading would be silent.
UNREADABLE: dict[str, str] = {
    "chatglm": "its base is scaled by rope_ratio in its authors' code: use the conversion to 'glm'",
    "cohere2_moe": "its first layers turn or not by a rule of their own, which has not been read yet",
    "deepseek_v4": "it turns values too, and the output back, which a plan cannot say",
    "diffusion_gemma": "it reads a prompt causally and a canvas both ways, which one plan cannot say",
    "ernie4_5_vl_moe": "its three axes are laid out in a way of its own, which a plan cannot say",
    "gemma4_assistant": "it drafts with the keys of another model, which a plan cannot say",
    "gemma4_unified_assistant": "it drafts with the keys of another model, which a plan cannot say",
    "inkling": "its biases are made from the layer's input, which a plan cannot say",
    "inkling2": "its biases are made from the layer's input, which a plan cannot say",
    "mistral_large4": "its frequencies are learned and stand in the weights, not in the config",
    "nanochat": "its rotation turns the other way, which a plan cannot say",
    "qwen": "its authors' code stretches base and scores by the length, which the config does not state",
}


def unreadable(model_type: str) -> str | None:
    """Why a family cannot be read, or None."""
    return UNREADABLE.get(model_type, UNREADABLE.get(model_type.removesuffix("_text")))


def known(model_type: str) -> bool:
    """Whether the family has a row."""
    return model_type in FAMILIES or model_type.removesuffix("_text") in FAMILIES


def family_of(model_type: str) -> Family:
    """The row of a family; a text model inside another (`qwen3_vl_text`) has its parent's."""
    return FAMILIES.get(model_type) or FAMILIES.get(model_type.removesuffix("_text")) or Family()
