"""Models as they are released: their configs as transformers 5.24 writes them, and the plan that must come out."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from theodolite.cli import main

CONFIG_MAPPING = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING

S, F, R = "sliding_attention", "full_attention", "linear_attention"


def llama3(factor: float, theta: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": theta,
    }  # fmt: skip


def yarn(factor: float, original: int, theta: float, **more: Any) -> dict[str, Any]:
    return {
        "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, "rope_theta": theta, **more
    }  # fmt: skip


def default(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


def turning(theta: float, head_dim: int, rotary_dim: int | None = None, **more: Any) -> dict[str, Any]:
    return {"rope_theta": theta, "head_dim": head_dim, "rotary_dim": rotary_dim or head_dim, **more}


NOPE = {"rope_theta": None, "inv_freq": None, "attention_factor": None, "scaling": None}
LATENT = {"interleaved": True, "trailing": True}
MSCALES = {"mscale": 1.0, "mscale_all_dim": 1.0}
_LARGE_SCORES = 192**-0.5 * (0.1 * math.log(40) + 1) ** 2
_PHI3 = math.sqrt(1 + math.log(131072 / 4096) / math.log(4096))
_LONG = {"short_factor": [1.0 + i / 48 for i in range(48)], "long_factor": [1.0 + i for i in range(48)]}

# A family; what its config has beside the class's own values, as the released model has it; and of each kind of layer
# the pattern of the layers that are of it, and what the JSON must say of them.
RELEASED: dict[str, tuple[dict[str, Any], int, dict[str, dict[str, Any]]]] = {
    # Llama 3.1 8B and Llama 3.2 1B.
    "llama": (
        {"max_position_embeddings": 131072, "rope_parameters": llama3(8.0, 5e5)}, 131072,
        {"x": turning(5e5, 128, interleaved=False, attention_factor=1.0, sliding_window=None)},
    ),
    "llama 3.2": (
        {"max_position_embeddings": 131072, "rope_parameters": llama3(32.0, 5e5), "head_dim": 64}, 131072,
        {"x": turning(5e5, 64)},
    ),
    "llama4_text": (
        {}, 131072,
        {"xxx.": turning(5e5, 128, kind="chunked_attention", chunk=8192, interleaved=True, temperature=None),
         "...x": {**NOPE, "chunk": None, "temperature": {"beta": 0.1, "length": 8192, "shift": 1}}},
    ),
    "qwen3": (
        {"max_position_embeddings": 131072, "rope_parameters": yarn(4.0, 32768, 1e6)}, 131072,
        {"x": turning(1e6, 128, attention_factor=pytest.approx(0.1 * math.log(4) + 1, rel=1e-15))},
    ),
    "qwen3_next": (
        {"max_position_embeddings": 262144, "rope_parameters": default(1e7, partial_rotary_factor=0.25)}, 262144,
        {"xxx.": {**NOPE, "kind": R, "sinks": None}, "...x": turning(1e7, 256, 64, interleaved=False)},
    ),
    "qwen3_5_text": (
        {"max_position_embeddings": 262144,
         "rope_parameters": default(1e7, partial_rotary_factor=0.25, mrope_section=[11, 11, 10],
                                    mrope_interleaved=True)}, 262144,
        {"xxx.": {**NOPE, "kind": R},
         "...x": turning(1e7, 256, 64, mrope_section=[11, 11, 10], mrope_interleaved=True)},
    ),
    "qwen4_exp_text": (
        {"max_position_embeddings": 262144,
         "rope_parameters": default(1e7, partial_rotary_factor=0.25, mrope_section=[11, 11, 10],
                                    mrope_interleaved=True)}, 262144,
        {"...x": turning(1e7, 256, 64, mrope_section=[11, 11, 10], mrope_interleaved=True)},
    ),
    "deepseek_v3": (
        {"max_position_embeddings": 163840, "rope_parameters": yarn(40.0, 4096, 1e4, **MSCALES)}, 163840,
        {"x": turning(1e4, 192, 64, **LATENT, attention_factor=1.0,
                      score_scale=pytest.approx(_LARGE_SCORES, rel=1e-14))},
    ),
    "deepseek_v32": (
        {"max_position_embeddings": 163840, "rope_parameters": yarn(40.0, 4096, 1e4, **MSCALES)}, 163840,
        {"x": turning(1e4, 192, 64, **LATENT, score_scale=pytest.approx(_LARGE_SCORES, rel=1e-14))},
    ),
    # Kimi K2, which has DeepSeek's architecture and a step for a ramp.
    "kimi_k25": (
        {"text_config": {"model_type": "deepseek_v3", "max_position_embeddings": 131072,
                         "rope_parameters": yarn(32.0, 4096, 5e4, beta_fast=1.0, beta_slow=1.0, **MSCALES)}}, 131072,
        {"x": turning(5e4, 192, 64, **LATENT, attention_factor=1.0)},
    ),
    "kimi_linear": ({}, 0, {"xxx.xxx.xxx.xxx.": NOPE, "...x": NOPE}),
    "glm4_moe": (
        {"head_dim": 128, "max_position_embeddings": 131072,
         "rope_parameters": default(1e6, partial_rotary_factor=0.5)}, 131072,
        {"x": turning(1e6, 128, 64, interleaved=False)},
    ),
    "glm_moe_dsa": ({}, 202752, {"x": turning(1e4, 256, 64, **LATENT)}),
    "minimax_m2": (
        {"rope_parameters": default(5e6, partial_rotary_factor=0.5)}, 196608, {"x": turning(5e6, 128, 64)},
    ),
    "minimax": ({}, 131072, {"x.": turning(1e6, 128), ".x": {**NOPE, "kind": R}}),
    "gemma3_text": (
        {"num_hidden_layers": 12, "sliding_window": 1024,
         "rope_parameters": {S: default(1e4), F: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}}, 131072,
        {"xxxxx.": turning(1e4, 256, sliding_window=1024, scaling=None),
         ".....x": turning(1e6, 256, sliding_window=None, scaling={"rope_type": "linear", "factor": 8.0})},
    ),
    "gemma4_text": (
        {}, 131072,
        {"xxxxx.": turning(1e4, 256, sliding_window=512, live_pairs=None, score_scale=1.0),
         ".....x": turning(1e6, 512, sliding_window=None, live_pairs=64, score_scale=1.0)},
    ),
    "gpt_oss": (
        {}, 131072,
        {"x.": turning(150000.0, 64, sliding_window=128, sinks=True, attention_factor=1.3465735902799727),
         ".x": turning(150000.0, 64, sliding_window=None, sinks=True, attention_factor=1.3465735902799727)},
    ),
    "mistral4": (
        {}, 1048576,
        {"x": turning(1e4, 128, 64, **LATENT, temperature={"beta": 0.1, "length": 8192, "shift": 0},
                      score_scale=pytest.approx(128**-0.5 * (0.1 * math.log(128) + 1) ** 2, rel=1e-14))},
    ),
    "ministral3": (
        {}, 262144,
        {"x": turning(1e6, 128, attention_factor=1.0, temperature={"beta": 0.1, "length": 16384, "shift": 0})},
    ),
    "cohere2": (
        {}, 8192, {"xxx.": turning(1e4, 128, interleaved=True, sliding_window=4096), "...x": {**NOPE, "kind": F}},
    ),
    "exaone4": (
        {"max_position_embeddings": 131072, "rope_parameters": default(1e6)}, 131072,
        {"xxx.": turning(1e6, 128, sliding_window=4096), "...x": NOPE},
    ),
    "afmoe": ({}, 16384, {"xxx.": turning(1e4, 128, sliding_window=1024), "...x": NOPE}),
    "hy_v3": ({}, 131072, {"x": turning(11158840.0, 128)}),
    # The released file states its sinks; the class has no such key.
    "mimo_v2_flash": (
        {"add_swa_attention_sink_bias": True}, 131072,
        {".....x": turning(5e6, 192, 64, sinks=False),
         ".xxxx.": turning(1e4, 192, 64, sliding_window=129, sinks=True)},
    ),
    "laguna": (
        {"num_hidden_layers": 4, "layer_types": [F, S, S, S], "sliding_window": 512,
         "rope_parameters": {F: default(5e5, partial_rotary_factor=0.5), S: default(1e4)}}, 131072,
        {"x...": turning(5e5, 128, 64, sliding_window=None), ".xxx": turning(1e4, 128, sliding_window=512)},
    ),
    "lfm3": (
        {}, 128000,
        {"..x.": turning(1e6, 128, live_pairs=32),
         "....x...x...x...x...x...": turning(1e4, 128, sliding_window=256, live_pairs=None)},
    ),
    "granitemoehybrid": (
        {"layer_types": ["mamba", "attention"] * 16, "position_embedding_type": None}, 2048, {"x": NOPE},
    ),
    "granite_swa": (
        {"num_hidden_layers": 4, "layer_rope_theta": [0, 1e4, 1e4, 5e4], "layer_types": [F, S, S, S]}, 8192,
        {"x...": {**NOPE, "sinks": True, "sliding_window": None},
         ".xx.": turning(1e4, 128, sliding_window=128, sinks=True), "...x": turning(5e4, 128, sliding_window=128)},
    ),
    "nemotron_h": ({}, 4096, {"x": NOPE}),
    "olmo3": (
        {"max_position_embeddings": 65536, "rope_theta": 5e5,
         "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192,
                          "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0}}, 65536,
        {"xxx.": turning(5e5, 128, sliding_window=4096, scaling=None, attention_factor=1.0),
         "...x": turning(5e5, 128, sliding_window=None, attention_factor=1.2079441541679836)},
    ),
    "olmo_hybrid": ({}, 65536, {"xxx.": {**NOPE, "kind": R}, "...x": turning(1e4, 128)}),
    "smollm3": (
        {"max_position_embeddings": 65536, "rope_parameters": default(5e6)}, 65536,
        {"xxx.": turning(5e6, 128), "...x": NOPE},
    ),
    "apertus": ({}, 65536, {"x": turning(1.2e7, 128, attention_factor=1.0)}),
    "cwm": ({}, 131072, {"x...": turning(1e6, 128, sliding_window=None),
                         ".xxx": turning(1e6, 128, sliding_window=8192)}),
    "phi3": (
        {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": None,
         "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **_LONG}}, 131072,
        {"x": turning(1e4, 96, attention_factor=pytest.approx(_PHI3, rel=1e-15))},
    ),
    "longcat_flash": ({}, 131072, {"x": turning(1e7, 192, 64, **LATENT)}),
    "bailing_hybrid": ({}, 0, {"xxxxx.": {**NOPE, "kind": R}, ".....x": turning(6e6, 192, 64, **LATENT)}),
    "ernie4_5": ({}, 131072, {"x": turning(5e5, 128, interleaved=True)}),
    "seed_oss": ({"rope_parameters": default(1e7)}, 524288, {"x": turning(1e7, 128)}),
    "bloom": ({}, 0, {"x": {**NOPE, "bias": {"kind": "alibi", "bias_max": 8.0, "slope_factor": 1.0, "heads": 8}}}),
    "mpt": ({}, 2048, {"x": {**NOPE, "bias": {"kind": "alibi", "bias_max": 8, "slope_factor": 1.0, "heads": 16}}}),
    "modernbert": (
        {}, 8192,
        {"x..": turning(160000.0, 64, causal=False, sliding_window=None),
         ".xx": turning(1e4, 64, causal=False, sliding_window=65)},
    ),
}  # fmt: skip
# Families whose positions are not read, because a plan cannot say them or nobody has compared it with their code.
REFUSED = {
    "muse_spark_text": "no reading of this family's positions is known",
    "muse_glimmer_text": "no reading of this family's positions is known",
    "deepseek_v4": "it turns values too, and the output back",
    "glm5_next_text": "no reading of this family's positions is known",
    "mistral_large4": "its frequencies are learned and stand in the weights",
    "inkling_text": "its biases are made from the layer's input",
    "hy_v4": "no reading of this family's positions is known",
    "beam": "no reading of this family's positions is known",
}


def config_of(family: str, changes: dict[str, Any], folder: Path) -> str:
    path = folder / "config.json"
    written = CONFIG_MAPPING[family.split()[0]](**changes).to_dict()
    path.write_text(json.dumps(written, default=str), encoding="utf-8")
    return str(path)


class TestReleasedModels:
    """The families that people run: a wrong base, width or window in any of them is a silent fault."""

    @pytest.mark.parametrize("family", RELEASED)
    def test_the_plan(self, capsys: pytest.CaptureFixture[str], tmp_path: Path, family: str) -> None:
        changes, length, expected = RELEASED[family]
        assert main(["inspect", config_of(family, changes, tmp_path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["max_position_embeddings"] or 0) == length
        seen = 0
        for pattern, layer in expected.items():
            for i, entry in enumerate(found["layers"]):
                if pattern[i % len(pattern)] == "x":
                    assert {name: entry[name] for name in layer} == layer, (family, i)
                    seen += 1
        assert seen

    @pytest.mark.parametrize("family", RELEASED)
    def test_the_frequencies(self, capsys: pytest.CaptureFixture[str], tmp_path: Path, family: str) -> None:
        """The fastest pair turns a radian a token, and the slowest as its base and factor have it."""
        assert main(["inspect", config_of(family, RELEASED[family][0], tmp_path), "--json"]) == 0
        for layer in json.loads(capsys.readouterr().out)["layers"]:
            if layer["inv_freq"] is None:
                continue
            pairs, scaling = layer["rotary_dim"] // 2, layer["scaling"] or {"rope_type": "default"}
            assert len(layer["inv_freq"]) == pairs
            last = (layer["live_pairs"] or pairs) - 1
            slowest = layer["rope_theta"] ** (-2 * last / layer["rotary_dim"])
            fastest = 1.0
            if scaling["rope_type"] == "longrope":
                slowest, fastest = slowest / scaling["long_factor"][-1], 1 / scaling["long_factor"][0]
            else:
                slowest /= scaling.get("factor", 1.0)
                fastest /= scaling["factor"] if scaling["rope_type"] == "linear" else 1.0
            assert layer["inv_freq"][0] == pytest.approx(fastest, rel=1e-14)
            assert layer["inv_freq"][last] == pytest.approx(slowest, rel=1e-12)
            assert not any(layer["inv_freq"][last + 1 :])

    @pytest.mark.parametrize("family", REFUSED)
    def test_what_is_not_read_is_told(self, capsys: pytest.CaptureFixture[str], tmp_path: Path, family: str) -> None:
        assert main(["inspect", config_of(family, {}, tmp_path)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert REFUSED[family] in printed.err
        assert len(printed.err.splitlines()) == 1
