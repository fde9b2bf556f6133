"""Tiny models as files: a folder of safetensors and a GGUF file, both with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .tiny import tiny

WORDS = 97


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of one token a character, saved to a folder."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {chr(32 + i): 4 + i for i in range(WORDS - 4)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def write_folder(folder: Path, family: str = "llama", **changes: Any) -> Any:
    """Save a tiny model with its tokenizer, and return it."""
    model = tiny(family, **changes)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def write_gguf(path: Path, *, scaling: str | None = None, divisors: tuple[float, ...] = ()) -> Any:
    """Write the tiny Llama as a GGUF file in float32, q and k rows interleaved, and return the model.

    Args:
        scaling: a scaling of factor 4 over a window of 2048 tokens, which the file states and the model lacks.
        divisors: numbers for the tensor that llama.cpp divides frequencies by.
    """
    model = tiny("llama")
    config, weights = model.config, {k: v.detach().numpy() for k, v in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(WORDS)
    if scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(2048)
    words = ["<pad>", "<s>", "</s>", "<unk>"] + [chr(33 + i) for i in range(WORDS - 5)] + ["th"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3] * 4 + [1] * (WORDS - 4))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    for name, values in weights.items():
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(values))
    if divisors:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _gguf_name(name: str) -> str:
    for theirs, here in (
        ("model.layers.", "blk."), ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"), ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"), ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"), ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"),
        ("lm_head", "output"),
    ):  # fmt: skip
        name = name.replace(theirs, here)
    return name
