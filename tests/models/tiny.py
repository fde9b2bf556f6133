"""Tiny random models of many families: 2 to 4 layers, 64 channels, 97 tokens of vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from theodolite.plan import ModelPlan
from theodolite.plan.huggingface import read_config

VOCABULARY = 97
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Large enough that attention is far from uniform: positions must show in the logits.
    "initializer_range": 0.05,
}
_MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 1024}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.0 + 1.5 * i for i in range(8)],
    "original_max_position_embeddings": 4096,
}

# Config class and what differs from the common sizes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mistral": ("MistralConfig", {"sliding_window": 512, "head_dim": 16}),
    "gemma2": ("Gemma2Config", {"head_dim": 32, "sliding_window": 512, "query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 32, "sliding_window": 512, "sliding_window_pattern": 2}),
    "phi3": ("Phi3Config", {}),
    "phi3-longrope": ("Phi3Config", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 4096}),
    "phi": ("PhiConfig", {}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "glm": ("GlmConfig", {"head_dim": 16}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "olmo": ("OlmoConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": (
        "Olmo3Config",
        {
            "sliding_window": 512,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {**_YARN, "attention_factor": 1.2},
            },
        },
    ),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "deepseek_v3": ("DeepseekV3Config", _MLA),
    "deepseek_v3-yarn": (
        "DeepseekV3Config",
        {**_MLA, "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v2": ("DeepseekV2Config", {**_MLA, "topk_method": "greedy"}),
    "cohere": ("CohereConfig", {"logit_scale": 1.0}),
    "cohere2": (
        "Cohere2Config",
        {"logit_scale": 1.0, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512,
         "head_dim": 16},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 512},
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            "head_dim": 16,
            "no_rope_layers": [1, 0],
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "attention_chunk_size": 512,
            "floor_scale": 256,
        },
    ),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.2}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 512}),
    "stablelm": ("StableLmConfig", {}),
    "exaone4": ("Exaone4Config", {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {"num_hidden_layers": 4, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "linear_num_value_heads": 2,
         "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    ),
}  # fmt: skip


def tiny_config(family: str, **changes: Any) -> Any:
    """The config of a tiny model; `changes` override."""
    name, own = FAMILIES[family]
    return getattr(transformers, name)(**{**_COMMON, **own, **changes})


def tiny(family: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny random model in evaluation mode; the same weights at every call."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=dtype).eval()
    if "num_experts_per_tok" in FAMILIES[family][1]:
        # The grouped product of experts knows no float64.
        model.set_experts_implementation("eager")
    return model


def own_plan(model: Any) -> ModelPlan:
    """The plan that a model's own config says."""
    return read_config(model.config.to_dict(), source=model.config.model_type)


def tokens(count: int, *, batch: int = 1, seed: int = 1) -> torch.Tensor:
    """Random token ids (batch, count), none of them a special token."""
    return torch.randint(3, VOCABULARY, (batch, count), generator=torch.Generator().manual_seed(seed))


def logits(model: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    """The logits (batch, tokens, vocabulary) of one forward."""
    with torch.inference_mode():
        result: torch.Tensor = model(input_ids=ids, use_cache=False, **more).logits
    return result


def spread(values: torch.Tensor) -> float:
    """The size that differences between logits are measured by: their standard deviation."""
    return float(values.double().std())
