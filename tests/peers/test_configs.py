"""Plans read from transformers' own config classes, against what its own rotary modules compute."""

from __future__ import annotations

import importlib
import inspect
import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from theodolite.plan import ModelPlan, Rotary, Scaling, YaRN
from theodolite.plan.engines import settings
from theodolite.plan.huggingface import read_config, write_config

transformers = pytest.importorskip("transformers")
CONFIG_MAPPING = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
MODEL_MAPPING_NAMES = importlib.import_module("transformers.models.auto.modeling_auto").MODEL_MAPPING_NAMES

TINY = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
LAYERED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 5e5,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)], "original_max_position_embeddings": 1024, "rope_theta": 1e4,
}  # fmt: skip
LATENT = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 16, "q_lora_rank": 16}

# A family, and what makes its config small and its positions interesting.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"rope_parameters": LLAMA3, "head_dim": 64, "max_position_embeddings": 131072}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5}}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e5}}),
    ("llama", {"rope_parameters": YARN}),
    ("llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16, "truncate": False}}),
    ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.25}}),
    ("llama", {"rope_theta": 7e5, "rope_scaling": {"type": "linear", "factor": 3.0}}),
    ("llama", {"rope_parameters": LONG, "max_position_embeddings": 4096}),
    ("mistral", {"sliding_window": None}),
    ("mixtral", {}),
    ("ministral3", {"head_dim": 16}),
    ("mistral4", LATENT),
    ("qwen2", {"rope_parameters": YARN}),
    ("qwen3", {"head_dim": 32, "rope_theta": 1e6}),
    ("qwen3_moe", {"head_dim": 32}),
    ("qwen3_next", {"head_dim": 64}),
    ("gemma", {"head_dim": 16}),
    ("gemma2", {"head_dim": 32}),
    ("gemma3_text", {"head_dim": 16}),
    ("gemma3_text", {"head_dim": 16, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("gemma3n_text", {"head_dim": 16}),
    ("gemma4_text", {"head_dim": 16, "global_head_dim": 32}),
    ("phi", {}),
    ("phi3", {"rope_scaling": {**LONG, "type": "su", "rope_type": "su"}, "max_position_embeddings": 8192}),
    ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 20000}),
    ("stablelm", {}),
    ("persimmon", {}),
    ("falcon", {"num_kv_heads": 2}),
    ("glm", {"head_dim": 32}),
    ("glm4", {"head_dim": 32}),
    ("glm4_moe", {"head_dim": 32}),
    ("cohere", {}),
    ("cohere2", {}),
    ("ernie4_5", {"head_dim": 16}),
    ("helium", {"head_dim": 16}),
    ("olmo2", {}),
    ("olmo3", {"rope_scaling": {**YARN, "attention_factor": 1.2}, "rope_theta": 1e4}),
    ("granite", {}),
    ("granite_swa", {"layer_types": ["full_attention"] * 4, "layer_rope_theta": [1e4, 0, 1e4, 0]}),
    ("smollm3", {}),
    ("exaone4", {"head_dim": 16}),
    ("gpt_oss", {"head_dim": 64}),
    ("deepseek_v2", LATENT),
    ("deepseek_v3", {**LATENT, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    ("deepseek_v3", {**LATENT, "rope_interleave": False}),
    ("minicpm3", {**LATENT, "rope_parameters": LONG}),
    ("llama4_text", {"head_dim": 16}),
    ("qwen2_vl_text", {"head_dim": 128, "hidden_size": 512}),
    ("qwen2_5_vl_text", {"hidden_size": 512}),
    ("qwen3_vl_text", {"head_dim": 128}),
    ("qwen3_5_text", {"head_dim": 256}),
    ("hunyuan_v1_dense", {"head_dim": 16, "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}}),
    ("mimo_v2_flash", {"head_dim": 192}),
    ("laguna", {"head_dim": 32, **LAYERED}),
    ("minimax_m2", {"head_dim": 32, "rotary_dim": 16}),
    ("modernbert", {}),
    ("modernbert-decoder", {}),
    ("eurobert", {}),
    ("nomic_bert", {}),
    ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    ("starcoder2", {}),
    ("nemotron", {"head_dim": 16}),
    ("apertus", {}),
    ("apertus1p5_text", {}),
    ("chameleon", {}),
    ("csm", {"head_dim": 16}),
    ("csm_depth_decoder_model", {"head_dim": 16}),
    ("deepseek_ocr2_text", {"head_dim": 16}),
    ("emu3_text_model", {}),
    ("evolla", {}),
    ("exaone", {"head_dim": 16}),
    ("granite4_vision_text", {"attention_multiplier": 0.3}),
    ("granite_docling_text", {"attention_multiplier": 0.3}),
    ("higgs_audio_v2", {"head_dim": 16}),
    ("internlm3", {"head_dim": 16}),
    ("iquestcoder", {"head_dim": 16}),
    ("sarvam_moe", {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                       "partial_rotary_factor": 0.5}}),
    ("cosmos3_edge_text", {"head_dim": 128}),
]  # fmt: skip


def build(name: str, changes: dict[str, Any]) -> Any:
    return CONFIG_MAPPING[name](**{**TINY, **changes})


def as_json(config: Any) -> dict[str, Any]:
    """The config as its file has it: a file knows no tuples and no integer keys."""
    text: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return text


# Families whose config has the model of another.
BORROWED = {"exaone": "llama", "internlm3": "llama", "iquestcoder": "llama", "sarvam_moe": "glm4_moe"}


def modeling(config: Any) -> Any:
    if config.model_type in BORROWED:
        other = BORROWED[config.model_type]
        assert MODEL_MAPPING_NAMES[config.model_type] == MODEL_MAPPING_NAMES[other]
        return importlib.import_module(f"transformers.models.{other}.modeling_{other}")
    return importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))


def frequencies(config: Any) -> dict[str | None, tuple[np.ndarray, float]]:
    """What transformers computes: (inv_freq, attention factor) by layer type, None where it has one for all."""
    found: dict[str | None, tuple[np.ndarray, float]] = {}
    for name, module in inspect.getmembers(modeling(config), inspect.isclass):
        others = [word for word in ("Vision", "Audio", "SaProt") if word in name and word not in type(config).__name__]
        if not name.endswith("RotaryEmbedding") or others:
            continue
        rotary = module(config)
        for key, buffer in rotary.named_buffers():
            label, dot, original = key.partition("inv_freq")
            if not dot or original or "original" in label:
                continue
            layer_type = label.removesuffix("_") or None
            factor = getattr(rotary, f"{label}attention_scaling")
            found[layer_type] = (buffer.double().numpy(), float(factor))
    return found


def same(rotary: Rotary, inv_freq: np.ndarray, factor: float) -> bool:
    """Equal to float32's rounding: theta^-x has a relative error of about x ln(theta) half-ulps, and a few more."""
    # At construction transformers has the table of a short sequence.
    ours = rotary.inv_freq(length=1)
    tolerance = (math.log(rotary.rope_theta) + 8) * 2.0**-23
    return (
        ours.shape == inv_freq.shape
        and np.allclose(ours, inv_freq, rtol=tolerance, atol=0)
        and math.isclose(rotary.attention_factor(), factor, rel_tol=1e-6)
    )


@pytest.mark.parametrize(("name", "changes"), CASES, ids=[f"{i}-{name}" for i, (name, _) in enumerate(CASES)])
def test_frequencies_and_amplitudes_are_those_of_transformers(name: str, changes: dict[str, Any]) -> None:
    config = build(name, changes)
    plan = read_config(as_json(config))
    theirs = frequencies(config)
    assert theirs
    assert plan.rotaries
    for layer in plan.layers:
        if layer.rotate is None:
            continue
        inv_freq, factor = theirs[layer.layer_type if layer.layer_type in theirs else None]
        assert same(layer.rotate, inv_freq, factor)


@pytest.mark.parametrize(("name", "changes"), CASES, ids=[f"{i}-{name}" for i, (name, _) in enumerate(CASES)])
def test_what_was_read_is_written_and_read_again(name: str, changes: dict[str, Any]) -> None:
    given = as_json(build(name, changes))
    plan = read_config(given)
    assert write_config(plan, given) == given
    bare = {key: value for key, value in given.items() if key not in ("rope_parameters", "rope_scaling")}
    if not any(type(rotary.scaling).__name__ == "NTK" for rotary in plan.rotaries) and "llama_4" not in str(given):
        assert read_config(write_config(plan, bare)) == plan


# Families with windows: one rope dict for all layers, or one per type.
WINDOWED: list[tuple[str, dict[str, Any]]] = [
    ("gemma2", {"head_dim": 32, "sliding_window": 32}),
    ("gpt_oss", {"head_dim": 64, "sliding_window": 32}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}),
    ("gemma3_text", {"head_dim": 16, "sliding_window": 32, "sliding_window_pattern": 2}),
    ("olmo3", {"sliding_window": 32}),
    ("modernbert", {"local_attention": 32}),
    ("modernbert-decoder", {"local_attention": 32}),
    ("laguna", {"head_dim": 32, **LAYERED}),
    ("smollm3", {}),
    ("deepseek_v3", LATENT),
]


@pytest.mark.parametrize(("name", "changes"), WINDOWED, ids=[name for name, _ in WINDOWED])
def test_settings_make_transformers_compute_the_plan(name: str, changes: dict[str, Any]) -> None:
    """A nested dict in a family that reads one is a KeyError there, or no scaling at all."""
    changes = {**changes, "max_position_embeddings": 4096}
    plan = read_config(as_json(build(name, changes)))
    scaled = plan.with_scaling(YaRN(factor=2.0, original_max_position_embeddings=4096))
    found = settings(scaled, model="m", length=8192)["transformers"]
    assert isinstance(found, dict)
    config = build(name, {**changes, **found})
    theirs = frequencies(config)
    for layer in scaled.layers:
        if layer.rotate is not None:
            assert same(layer.rotate, *theirs[layer.layer_type if layer.layer_type in theirs else None])
    assert read_config(as_json(config)).rotaries == scaled.rotaries


def test_the_settings_of_a_latent_model_move_its_score_scale() -> None:
    plan = read_config(as_json(build("deepseek_v3", {**LATENT, "max_position_embeddings": 4096})))
    split = YaRN(factor=4.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)
    scaled = plan.with_scaling(split)
    found = settings(scaled, model="m", length=8192)["transformers"]
    assert isinstance(found, dict)
    config = build("deepseek_v3", {**LATENT, **found})
    attention = modeling(config).DeepseekV3Attention(config, layer_idx=0)
    assert scaled.layers[0].score_scale == pytest.approx(attention.scaling, rel=1e-12)


# Modules whose rotation takes (q, k, cos, sin), with cos and sin of the half-split width.
LAYOUTS = [
    "llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi", "phi3", "gpt_neox", "stablelm", "falcon", "glm", "glm4",
    "glm4_moe", "ernie4_5", "helium", "olmo2", "granite", "smollm3", "exaone4", "deepseek_v3", "mistral4", "minicpm3",
    "hunyuan_v1_dense", "modernbert", "nomic_bert", "minimax_m2", "longcat_flash", "qwen3_next", "glm4_moe_lite",
    "apertus1p5_text", "chameleon", "csm", "deepseek_ocr2_text", "emu3_text_model", "evolla", "granite4_vision_text",
    "granite_docling_text", "higgs_audio_v2", "sarvam_moe", "cosmos3_edge_text",
]  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_scores_show_the_pair_layout(name: str) -> None:
    """Positions other than 0: there both layouts agree, which is why tables and first tokens prove nothing."""
    changes = next((changes for case, changes in CASES if case == name and "rope_interleave" not in changes), {})
    config = build(name, {**changes, **(LATENT if name in ("longcat_flash", "glm4_moe_lite") else {})})
    plan = read_config(as_json(config))
    rotary = plan.rotaries[0]
    module = modeling(config)
    rotate = getattr(module, "apply_rotary_pos_emb_interleave", None) or module.apply_rotary_pos_emb
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 2, 5, rotary.rotary_dim, generator=generator, dtype=torch.float64) for _ in range(2))
    angles = torch.outer(37.0 * torch.arange(5).double() + 3, torch.tensor(rotary.inv_freq(length=1)))
    table = torch.cat([angles, angles], dim=-1)[None]
    theirs = torch.matmul(
        *(turned if i == 0 else turned.mT for i, turned in enumerate(rotate(query, key, table.cos(), table.sin())))
    )
    assert torch.allclose(scores(query, key, angles, rotary.interleaved), theirs, atol=1e-6)
    assert not torch.allclose(scores(query, key, angles, not rotary.interleaved), theirs, atol=1e-2)


def scores(query: torch.Tensor, key: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    def turn(x: torch.Tensor) -> torch.Tensor:
        one, two = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        return torch.cat([one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()], dim=-1)

    return turn(query) @ turn(key).mT


class TestNoRotation:
    @pytest.mark.parametrize(
        "name", ["gpt2", "opt", "bert", "roberta", "t5", "bloom", "mpt", "xlnet", "deberta-v2", "mamba", "whisper"]
    )
    def test_config_classes_of_families_without_rotation_are_read(self, name: str) -> None:
        plan = read_config(as_json(CONFIG_MAPPING[name]()))
        assert plan.layers
        assert not plan.rotaries

    def test_opt_and_roberta_have_the_rows_that_their_tables_have(self) -> None:
        for name, kind in (("opt", "OPTLearnedPositionalEmbedding"), ("roberta", None)):
            config = build(name, {"vocab_size": 16, "ffn_dim": 16, "intermediate_size": 16, "num_hidden_layers": 1})
            embed = read_config(as_json(config)).embed
            assert embed is not None
            assert embed.rows is not None
            if kind is not None:
                table = getattr(modeling(config), kind)(config.max_position_embeddings, 4)
                assert table.weight.shape[0] == embed.rows + embed.offset
            else:
                assert embed.rows == config.max_position_embeddings - config.pad_token_id - 1


def test_the_score_scale_is_the_one_of_the_attention_module() -> None:
    latent = build("deepseek_v3", {**LATENT, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}})
    for config, module in (
        (latent, "DeepseekV3Attention"),
        (build("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 100}), "Gemma2Attention"),
        (build("granite", {"attention_multiplier": 0.3}), "GraniteAttention"),
        (build("granite4_vision_text", {"attention_multiplier": 0.3}), "Granite4VisionTextAttention"),
        (build("granite_docling_text", {"attention_multiplier": 0.3}), "GraniteDoclingTextAttention"),
        (build("gemma4_text", {"head_dim": 16}), "Gemma4TextAttention"),
    ):
        attention = getattr(modeling(config), module)(config, layer_idx=0)
        assert read_config(as_json(config)).layers[0].score_scale == pytest.approx(attention.scaling, rel=1e-12)


@pytest.mark.parametrize("name", ["smollm3", "cohere2", "exaone4", "afmoe", "lara_mini", "olmo_hybrid", "llama"])
def test_the_layers_that_turn_are_those_whose_module_rotates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list read the wrong way round rotates exactly the layers that must not be."""
    small = {"num_hidden_layers": 8, "vocab_size": 64, "intermediate_size": 64, "moe_intermediate_size": 16}
    experts = {
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 16,
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 16}
    config = build(name, {**small, **tokens, **(experts if name in ("afmoe", "lara_mini") else {})})
    module, calls = modeling(config), []
    rotate = module.apply_rotary_pos_emb
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda *a, **k: (calls.append(1), rotate(*a, **k))[1])
    model = importlib.import_module("transformers").AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model(input_ids=torch.arange(3, 12)[None])
    plan = read_config(as_json(config))
    assert len(calls) == sum(layer.rotate is not None for layer in plan.layers)


def test_a_nested_truncate_is_honoured_where_transformers_ignores_it() -> None:
    """transformers reads `truncate` from the top of the dict, so a nested false has no effect there."""
    nested = {
        "full_attention": {**YARN, "truncate": False},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = build("olmo3", {"rope_parameters": nested, "hidden_size": 256, **LAYERED})
    plan: ModelPlan = read_config(as_json(config))
    far = plan.layers[1].rotate
    assert far is not None
    theirs, factor = frequencies(config)["full_attention"]
    assert not same(far, theirs, factor)
    rounded = read_config(
        as_json(build("olmo3", {"rope_parameters": {**nested, "full_attention": YARN}, "hidden_size": 256, **LAYERED}))
    )
    assert rounded.layers[1].rotate is not None
    assert same(rounded.layers[1].rotate, theirs, factor)
    assert plan.layers[0].rotate is not None
    assert plan.layers[0].rotate.scaling == Scaling()
