"""Configs of released families and params.json files, changed in one or several places."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from importlib import import_module
from random import Random
from typing import Any

from tests.fuzz.strange import ESCAPES, Raw, damaged, json_text, near, strange
from tests.plan.test_any_config import CONFIGS

# By name, for a type checker would go on into them and has no need to.
_FAMILIES, _PARAMS_OF = (import_module(f"tests.cli.{name}") for name in ("test_inspect_families", "test_inspect"))
CONFIG_MAPPING, RELEASED = _FAMILIES.CONFIG_MAPPING, _FAMILIES.RELEASED
META: dict[str, Any] = _PARAMS_OF.META
MISTRAL: dict[str, Any] = _PARAMS_OF.MISTRAL

# Keys that speak of positions: most of a config's others are never looked at.
_SPEAKING = (
    "model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings",
    "rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "global_rope_theta", "local_rope_theta",
    "partial_rotary_factor", "rotary_dim", "rotary_pct", "layer_types", "layers_block_type", "sliding_window",
    "sliding_window_pattern", "use_sliding_window", "max_window_layers", "no_rope_layers", "no_rope_layer_interval",
    "layer_rope_theta", "qk_rope_head_dim", "qk_nope_head_dim", "rope_interleave", "query_pre_attn_scalar",
    "attention_multiplier", "attention_chunk_size", "attn_temperature_tuning", "attn_scale", "floor_scale",
    "local_attention", "global_attn_every_n_layers", "full_attention_interval", "sliding_window_size", "is_causal",
    "add_swa_attention_sink_bias", "use_bidirectional_attention", "original_max_position_embeddings", "text_config",
    "position_embedding_type", "alibi", "attn_config", "n_layer", "n_positions", "n_embd", "n_head", "pad_token_id",
    "relative_attention", "position_buckets", "max_relative_positions", "pos_att_type", "norm_rel_ebd", "is_decoder",
    "is_encoder_decoder", "num_decoder_layers", "relative_attention_num_buckets", "relative_attention_max_distance",
    "clamp_len", "attention_window", "attention_layers", "window_size", "hybrid_override_pattern", "architectures",
    "per_layer_config", "global_head_dim", "attn_layer_indices", "full_attn_idxs", "cross_attention_layers",
    "block_types", "layer_group_size", "thinker_config", "llm_config", "encoder_layers", "use_mem_rope", "kv_channels",
)  # fmt: skip
_PARAMS = (
    "dim", "n_layers", "n_heads", "head_dim", "hidden_dim", "rope_theta", "use_scaled_rope", "rope_scaling_factor",
    "rope_high_freq_factor", "nope_layer_interval", "max_position_embeddings", "max_seq_len", "sliding_window", "yarn",
    "llama_4_scaling", "attention_chunk_size", "attn_temperature_tuning", "attn_scale", "floor_scale", "multiple_of",
    "model_type", "qk_rope_head_dim", "rope_twist",
)  # fmt: skip
_PARAMS_YARN = {"original_max_position_embeddings": 16384, "factor": 16, "apply_scale": False, "beta": 32, "alpha": 2}
_SOME_PARAMS: tuple[dict[str, Any], ...] = (
    META, MISTRAL,
    {**META, "use_scaled_rope": False, "rope_scaling_factor": 32.0, "max_seq_len": 8192},
    {**META, "attention_chunk_size": 8192, "nope_layer_interval": 4, "attn_temperature_tuning": True, "n_layers": 48},
    {**MISTRAL, "max_position_embeddings": 262144, "yarn": _PARAMS_YARN, "sliding_window": [None, 1024],
     "llama_4_scaling": {"original_max_position_embeddings": 16384, "beta": 0.1}},
    {**MISTRAL, "sliding_window": 4096},
)  # fmt: skip
_TYPES = (
    "default",
    "linear",
    "dynamic",
    "yarn",
    "longrope",
    "llama3",
    "proportional",
    "su",
    "mrope",
    "ntk",
    "Yarn",
    "",
)
_ROPE_KEYS = (
    "rope_type", "type", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
    "mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor",
    "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "alpha", "short_mscale", "long_mscale",
    "llama_4_scaling_beta", "full_attention", "sliding_attention", "finetuned", "max_position_embeddings",
)  # fmt: skip


@cache
def configs() -> tuple[str, ...]:
    """The configs to start from, as JSON."""
    released = [
        json.dumps(CONFIG_MAPPING[family.split()[0]](**changes).to_dict(), default=str)
        for family, (changes, _, _) in RELEASED.items()
    ]
    return (*released, *map(json.dumps, CONFIGS))


def config_file(random: Random) -> tuple[bytes, bytes]:
    """A config.json that was changed, and the one that it was made from."""
    text = random.choice(configs())
    return _changed(json.loads(text), random, _SPEAKING), text.encode()


def params_file(random: Random) -> tuple[bytes, bytes]:
    """A params.json that was changed, and the one that it was made from."""
    given = random.choice(_SOME_PARAMS)
    return _changed(copy.deepcopy(given), random, _PARAMS), json.dumps(given).encode()


def _changed(config: dict[str, Any], random: Random, keys: tuple[str, ...]) -> bytes:
    drawn = random.random()
    # Some are whole but for their bytes.
    for _ in range(0 if drawn < 0.08 else 1 if drawn < 0.6 else random.randint(2, 6)):
        random.choices(_CHANGES, _WEIGHTS)[0](config, random, keys)
    text = json_text(config)
    if random.random() < 0.03:
        # The same key a second time.
        text = f"{text[:-1]}, {json.dumps(random.choice(keys))}: {json_text(strange(random))}}}"
    data = text.encode("utf-8", "surrogatepass")
    return damaged(data, random) if drawn < 0.08 or random.random() < 0.04 else data


def _place(config: dict[str, Any], random: Random, keys: tuple[str, ...]) -> tuple[Any, Any]:
    """A container in it and one of its keys, most often one that speaks of positions."""
    container: Any = config
    while True:
        own = list(container) if isinstance(container, dict) else list(range(len(container)))
        speaking = [key for key in own if key in keys or key in _ROPE_KEYS]
        key = random.choice(speaking if speaking and random.random() < 0.9 else own)
        inner = container[key]
        if not (isinstance(inner, (dict, list)) and inner and random.random() < 0.75):
            return container, key
        container = inner


def _replace(config: dict[str, Any], random: Random, keys: tuple[str, ...]) -> None:
    if config:
        container, key = _place(config, random, keys)
        container[key] = strange(random)


def _slip(config: dict[str, Any], random: Random, keys: tuple[str, ...]) -> None:
    if config:
        container, key = _place(config, random, keys)
        container[key] = near(container[key], random)


def _delete(config: dict[str, Any], random: Random, keys: tuple[str, ...]) -> None:
    if config:
        container, key = _place(config, random, keys)
        del container[key]


def _add(config: dict[str, Any], random: Random, keys: tuple[str, ...]) -> None:
    name = random.choice(ESCAPES) if random.random() < 0.1 else random.choice(keys)
    config[name] = strange(random) if random.random() < 0.5 else random.choice((1, 2, 4, 64, 1024, 1e4, True, [1], "x"))


def _rope(config: dict[str, Any], random: Random, keys: tuple[str, ...]) -> None:
    """A rope dict, likely or not."""
    name = random.choice(("rope_scaling", "rope_parameters", "yarn"))
    length = config.get("max_position_embeddings")
    original = length // 4 if isinstance(length, int) and length >= 4 else 4096
    pairs = random.choice((8, 16, 32, 48, 64))
    rope: dict[str, Any] = {random.choice(("rope_type", "type")): random.choice(_TYPES)}
    likely: dict[str, Any] = {
        "factor": 4.0, "original_max_position_embeddings": original, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "short_factor": [1.0] * pairs, "long_factor": [4.0] * pairs, "rope_theta": config.get("rope_theta", 1e4),
        "attention_factor": 1.1, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1,
        "mrope_section": [pairs // 4, pairs - 2 * (pairs // 4), pairs // 4], "partial_rotary_factor": 0.5,
    }  # fmt: skip
    for key, value in likely.items():
        drawn = random.random()
        if drawn < 0.35:
            rope[key] = value
        elif drawn < 0.41:
            rope[key] = near(value, random)
        elif drawn < 0.45:
            rope[key] = strange(random)
    if random.random() < 0.1:
        rope[random.choice(_ROPE_KEYS)] = strange(random)
    if random.random() < 0.15:
        rope = {"full_attention": rope, "sliding_attention": random.choice((None, rope, {}))}
    config[name] = rope


def _layers(config: dict[str, Any], random: Random, keys: tuple[str, ...]) -> None:
    """A list of one entry a layer, or many layers."""
    count = config.get("num_hidden_layers", config.get("n_layers", 4))
    count = count if isinstance(count, int) and 0 < count < 200 else 4
    many = random.choice((count, count, count - 1, count + 1, 3000))
    kinds = ["full_attention", "sliding_attention", "linear_attention", "chunked_attention", "mamba", "x"]
    name, entries = random.choice((
        ("layer_types", kinds), ("no_rope_layers", [0, 1, 1, True, 2]), ("sliding_window", [None, 512, 1024]),
        ("layer_rope_theta", [0, 1e4, 5e5, 1, Raw("NaN")]), ("attention_layers", ["global", "local"]),
        ("layer_types", ["full_attention"]), ("layer_rope_theta", list(range(10_000, 10_000 + 50 * many, 50))),
    ))  # fmt: skip
    config[name] = entries[:many] if len(entries) > 5 and len(entries) >= many else random.choices(entries, k=many)
    if random.random() < 0.5:
        config["n_layers" if "n_layers" in config else "num_hidden_layers"] = many


def _wrap(config: dict[str, Any], random: Random, keys: tuple[str, ...]) -> None:
    """The whole inside a part, or a part beside it."""
    part = random.choice(("text_config", "thinker_config", "llm_config", "language_config"))
    whole = dict(config)
    if random.random() < 0.6:
        config.clear()
    config[part] = whole
    if random.random() < 0.5:
        config["model_type"] = random.choice(("qwen2_vl", "gemma3", "llava", "x", None))


def _family(config: dict[str, Any], random: Random, keys: tuple[str, ...]) -> None:
    """The keys of one family under the name of another."""
    if "model_type" in config:
        config["model_type"] = json.loads(random.choice(configs())).get("model_type")


_Change = Callable[[dict[str, Any], Random, tuple[str, ...]], None]
_CHANGES: tuple[_Change, ...] = (_replace, _slip, _delete, _add, _rope, _layers, _wrap, _family)
_WEIGHTS = (30, 22, 8, 12, 16, 5, 2, 5)
