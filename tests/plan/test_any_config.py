"""Whatever a config holds: a plan or a PlanError that names what is wrong, soon and in few words."""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import pytest

from theodolite.plan import ModelPlan, PlanError
from theodolite.plan.gguf import read_metadata
from theodolite.plan.huggingface import read_config

SMALL = {
    "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096,
    "rope_theta": 1e4,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "truncate": True, "mscale": 1.0,
    "mscale_all_dim": 1.0, "attention_factor": 1.0, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
CONFIGS: list[dict[str, Any]] = [
    {"model_type": "llama", **SMALL, "rope_scaling": YARN, "head_dim": 16},
    {"model_type": "llama", **SMALL, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {
        "model_type": "phi3", **SMALL, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 2048,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    },
    {"model_type": "qwen2", **SMALL, "use_sliding_window": True, "sliding_window": 512, "max_window_layers": 2},
    {"model_type": "qwen2_vl_text", **SMALL, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    {
        "model_type": "gemma3_text", **SMALL, "head_dim": 16, "sliding_window": 512, "query_pre_attn_scalar": 256,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_local_base_freq": 1e4,
    },
    {"model_type": "smollm3", **SMALL, "no_rope_layers": [1, 1, 1, 0], "no_rope_layer_interval": 4},
    {"model_type": "llama4_text", **SMALL, "no_rope_layers": [], "attention_chunk_size": 512},
    {"model_type": "deepseek_v3", **SMALL, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "rope_scaling": YARN},
    {"model_type": "granite_swa", **SMALL, "attention_multiplier": 0.1, "layer_rope_theta": [1e4, 0, 1e4, 0]},
    {"model_type": "modernbert", **SMALL, "global_rope_theta": 1e5, "local_rope_theta": 1e4, "local_attention": 64},
    {"model_type": "roberta", **SMALL, "pad_token_id": 1},
    {"model_type": "deberta-v2", **SMALL, "relative_attention": True, "max_relative_positions": -1},
    {"model_type": "jamba", **SMALL, "layers_block_type": ["mamba", "attention"] * 2},
    {"model_type": "gpt_neo", **SMALL, "attention_layers": ["global", "local"] * 2, "window_size": 8},
]  # fmt: skip
METADATA: list[dict[str, Any]] = [
    {
        "general.architecture": "qwen2", "qwen2.block_count": 4, "qwen2.context_length": 4096,
        "qwen2.embedding_length": 64, "qwen2.attention.head_count": 4, "qwen2.rope.freq_base": 1e4,
        "qwen2.rope.dimension_count": 16, "qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 1024, "qwen2.rope.scaling.attn_factor": 1.1,
    },
    {
        "general.architecture": "gemma3", "gemma3.block_count": 6, "gemma3.context_length": 4096,
        "gemma3.embedding_length": 64, "gemma3.attention.head_count": [4, 4], "gemma3.attention.sliding_window": 8,
        "gemma3.rope.freq_base_swa": 1e4,
    },
]  # fmt: skip


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = {"text_config": value, "a": 1}
    return value


STRANGE: list[Any] = [
    None, True, False, 0, -1, 1, 3, 2**31, 2**70, 10**400, 10**5000, 0.0, -0.5, 0.5, 1e-320, 1e300, float("nan"),
    float("inf"), "", "yarn", "x" * 10_000, [], [None], [0], ["a"], [1] * 4, [1e308] * 8, [-8, 16], {}, {"a": 1},
    {"rope_type": "yarn"}, nested(5), nested(5000),
]  # fmt: skip


def places(config: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in it, at any depth."""
    found = []
    for key, value in config.items() if isinstance(config, dict) else enumerate(config):
        found.append((config, key))
        if isinstance(value, (dict, list)):
            found += places(value)
    return found


def is_a_plan_or_refused(read: Any, given: dict[str, Any]) -> None:
    begun = time.perf_counter()
    found: ModelPlan | PlanError
    try:
        found = read(given, source="a file")
    except PlanError as error:
        found = error
    if isinstance(found, PlanError):
        assert " in a file: got " in str(found)
        assert len(str(found)) < 1500
    else:
        assert all((rotary.inv_freq(length=1) >= 0).all() for rotary in found.rotaries)
    # A machine that is shared may stand still for a moment.
    assert time.perf_counter() - begun < 5


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["model_type"])
def test_a_config_with_a_strange_value(config: dict[str, Any]) -> None:
    read_config(config)
    for i in range(len(places(config))):
        for strange in STRANGE:
            given = copy.deepcopy(config)
            container, key = places(given)[i]
            container[key] = strange
            is_a_plan_or_refused(read_config, given)


@pytest.mark.parametrize("metadata", METADATA, ids=["qwen2", "gemma3"])
def test_metadata_with_a_strange_value(metadata: dict[str, Any]) -> None:
    read_metadata(metadata)
    for key in metadata:
        for strange in STRANGE:
            is_a_plan_or_refused(read_metadata, {**metadata, key: strange})


def test_configs_with_several_strange_values() -> None:
    random_ = random.Random(0)
    keys = sorted({key for config in CONFIGS for key in config})
    for _ in range(500):
        given = copy.deepcopy(random_.choice(CONFIGS))
        for container, key in random_.sample(places(given), 2):
            container[key] = random_.choice(STRANGE)
        for key in random_.sample(keys, random_.randint(0, 2)):
            given[key] = random_.choice(STRANGE)
        is_a_plan_or_refused(read_config, given)


LLAMA = {"model_type": "llama", **SMALL}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "num_hidden_layers": 10**9}, "num_hidden_layers in f: got 1000000000; it must be a whole number of "
         "at most 100,000"),
        ({**LLAMA, "num_hidden_layers": 2.5}, "num_hidden_layers in f: got 2.5; it must be a whole number"),
        ({**LLAMA, "hidden_size": 65}, "hidden_size in f: got 65; without a head_dim it must be a multiple of"),
        ({**LLAMA, "head_dim": 2**30}, "head_dim in f: got 1073741824; it must be a whole number of at most"),
        ({**LLAMA, "max_position_embeddings": float("nan")}, "max_position_embeddings in f: got nan; it must"),
        ({**LLAMA, "layer_types": "full"}, "layer_types in f: got 'full'; it must be a list"),
        ({**LLAMA, "layer_types": [1] * 4}, "layer_types in f: got [1, 1, 1, 1]; its entries must be of type str"),
        ({**LLAMA, "no_rope_layers": 5}, "no_rope_layers in f: got 5; it must be a list"),
        ({**LLAMA, "no_rope_layer_interval": 0}, "no_rope_layer_interval in f: got 0; it must be a whole number"),
        ({**LLAMA, "rope_scaling": 0}, "rope_scaling in f: got 0; it must be a mapping, or null"),
        ({**LLAMA, "rope_scaling": ""}, "rope_scaling in f: got ''; it must be a mapping, or null"),
        ({**LLAMA, "rope_scaling": []}, "rope_scaling in f: got []; it must be a mapping, or null"),
        ({**LLAMA, "rope_parameters": False}, "rope_parameters in f: got False; it must be a mapping, or null"),
        ({**LLAMA, "rope_scaling": {"type": 3}}, "rope_scaling.rope_type in f: got 3; it must be a name"),
        ({**LLAMA, "rope_scaling": {**YARN, "truncate": "no"}}, "rope_scaling.truncate in f: got 'no'; it must"),
        ({**LLAMA, "rope_scaling": {**YARN, "original_max_position_embeddings": 0}},
         "rope_scaling.original_max_position_embeddings in f: got 0; it must be a whole number of at least 1"),
        ({**LLAMA, "rope_theta": "x" * 9999}, "rope_theta in f: got '" + "x" * 198 + "…; it must be a finite number"),
        ({**LLAMA, "rope_theta": 10**5000}, "rope_theta in f: got a value of type int too large to print; it must be"),
        ({"model_type": "llama4_text", **SMALL, "no_rope_layers": [1, 0]}, "no_rope_layers in f: got '2 entries'"),
        ({"model_type": "qwen2", **SMALL, "use_sliding_window": "false"}, "use_sliding_window in f: got 'false'"),
        ({**LLAMA, "per_layer_config": 3}, "per_layer_config in f: got 3; it must be a mapping, or null"),
        ({**LLAMA, "per_layer_config": {"1": [8]}}, "per_layer_config.1 in f: got [8]; it must be a mapping"),
        ({**LLAMA, "model_type": "mpt", "attn_config": "alibi"}, "attn_config in f: got 'alibi'; it must be a mapping"),
        ({**LLAMA, "model_type": "mpt", "attn_config": {"alibi": "no"}}, "alibi in f: got 'no'; it must be true"),
        ({**LLAMA, "model_type": "falcon", "alibi": True, "num_attention_heads": 0}, "num_attention_heads in f: got 0"),
        ({**LLAMA, "model_type": "falcon", "alibi": True, "hidden_size": 3}, "hidden_size in f: got 3; it must be at "
         "least the number of heads (4)"),
        ({**LLAMA, "model_type": "nemotron_h", "hybrid_override_pattern": 7}, "hybrid_override_pattern in f: got 7"),
        ({"text_config": nested(5000)}, "config in f: got 'RecursionError: "),
    ],
)  # fmt: skip
def test_the_message_names_field_and_file(config: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        read_config(config, source="f")
    assert str(caught.value).startswith(message)


def test_many_layers_of_a_wide_head_are_read_soon() -> None:
    begun = time.perf_counter()
    plan = read_config({**LLAMA, "num_hidden_layers": 100_000, "head_dim": 2**16})
    assert len(plan.layers) == 100_000
    assert time.perf_counter() - begun < 10


class TestManyKinds:
    """Each kind of layer costs time, and a list of bases or of widths states thousands in a few bytes."""

    def test_kinds(self) -> None:
        given = {"model_type": "granite_swa", **SMALL, "attention_multiplier": 0.1, "sliding_window": 8}
        for count in (1024, 1025):
            bases = {"num_hidden_layers": count, "layer_rope_theta": [1e4 + i for i in range(count)]}
            config = {**given, **bases, "layer_types": ["sliding_attention"] * count}
            if count == 1024:
                assert len(read_config(config).rotaries) == count
            else:
                with pytest.raises(PlanError, match=r"num_hidden_layers in f: got '1,025 kinds of layer"):
                    read_config(config, source="f")

    def test_channels(self) -> None:
        widths = {str(i): {"head_dim": 2**16 - 2 * i} for i in range(33)}
        with pytest.raises(PlanError, match=r"num_hidden_layers in f: got '33 kinds of layer.* 2,097,152 channels"):
            read_config({**LLAMA, "num_hidden_layers": 33, "per_layer_config": widths}, source="f")

    def test_numbers(self) -> None:
        """LongRoPE's lists are compared for each layer."""
        lists = {"short_factor": [1.0] * 1024, "long_factor": [2.0] * 1024, "original_max_position_embeddings": 64}
        config = {**LLAMA, "head_dim": 2048, "rope_scaling": {"rope_type": "longrope", **lists}}
        assert len(read_config({**config, "num_hidden_layers": 4096}).layers) == 4096
        with pytest.raises(PlanError, match=r"long_factor in f: got '1,024 numbers for each of 4,097 layers'; at most"):
            read_config({**config, "num_hidden_layers": 4097}, source="f")
        divisors = {"rope_freqs.weight": [1.0] * 1024}
        keys = {f"llama.{name}": value for name, value in {
            "block_count": 4097, "embedding_length": 2048, "attention.head_count": 1, "rope.freq_base": 1e4,
        }.items()}  # fmt: skip
        with pytest.raises(PlanError, match=r"rope_freqs.weight in f: got '1,024 numbers for each of 4,097 layers'"):
            read_metadata({"general.architecture": "llama", **keys}, divisors=divisors, source="f")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rope.dimension_count", [16], "qwen2.rope.dimension_count in f: got [16]; it must be a whole number"),
        ("rope.dimension_sections", 2.5, "qwen2.rope.dimension_sections in f: got 2.5; it must be a list"),
        ("rope.dimension_sections", ["a"], "qwen2.rope.dimension_sections in f: got 'a'; it must be a whole number"),
        ("attention.scale", -1.0, "qwen2.attention.scale in f: got -1.0; it must be a finite number above 0"),
    ],
)
def test_the_message_names_the_key_of_the_metadata(name: str, value: Any, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        read_metadata({**METADATA[0], f"qwen2.{name}": value}, source="f")
    assert str(caught.value).startswith(message)


def test_the_largest_model_without_its_width() -> None:
    keys = {"block_count": 46, "context_length": 4096, "attention.head_count": 4, "attention.key_length": 16}
    given = {"general.architecture": "gemma2", **{f"gemma2.{name}": value for name, value in keys.items()}}
    with pytest.raises(PlanError, match=r"gemma2\.embedding_length in f: got None"):
        read_metadata(given, source="f")


def test_a_name_of_a_family_that_fills_a_screen() -> None:
    with pytest.raises(PlanError, match="a name of 101 characters; at most 100") as caught:
        read_config({"model_type": "x" * 101, **SMALL})
    assert len(str(caught.value)) < 300
