"""Widths that are in a family's code: of a head where the config states none, and whether a part of it can turn.

Read off transformers 5.24; a test compares each family with its class and its model.
"""

from __future__ import annotations

_128 = (
    "afmoe", "cosmos3_edge", "cwm", "ernie4_5", "flint", "glm", "glm4", "helium", "higgs_audio_v2", "hy_v3",
    "internlm3", "iquestcoder", "kolibri1", "laguna", "lara_mini", "lfm3", "llama4", "mellum", "minimax_m2",
    "ministral3", "paddleocr_vl", "qwen3", "qwen3_vl", "seed_oss", "solar_open", "zaya",
)  # fmt: skip
_256 = (
    "gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "qwen3_5", "qwen3_5_moe", "qwen3_next",
    "qwen4_exp", "vaultgemma",
)  # fmt: skip

HEAD_DIMS: dict[str, dict[str, int]] = {
    **{key: {"head_dim": 128} for key in _128},
    **{key: {"head_dim": 256} for key in _256},
    **{key: {"head_dim": 64} for key in ("gpt_oss", "sarvam_moe")},
    "jetmoe": {"kv_channels": 128},
    "mimo_v2_flash": {"head_dim": 192},
}
"""A head's width by family, under the name that its configs have for it; elsewhere it is hidden_size over the heads."""

PARTIAL = frozenset((
    "bamba", "codegen", "glm", "glm4", "glm4_moe", "glm4v", "glm4v_moe", "glm_ocr", "gpt_neox", "gpt_neox_japanese",
    "gptj", "laguna", "mimo_v2_flash", "minimax_m2", "nemotron", "persimmon", "phi", "phi3", "phi4_multimodal",
    "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp", "recurrent_gemma", "stablelm", "zaya",
    # Their code is not in transformers.
    "exaone", "internlm3", "iquestcoder", "kimi_k2", "sarvam_moe",
))  # fmt: skip
"""Families whose code can turn a part of the head; that of the others turns all of it, whatever the config says."""
