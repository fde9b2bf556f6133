"""Settings to paste: each must say the plan, in words that its engine has."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from theodolite.plan import (
    NTK,
    DynamicNTK,
    LayerPlan,
    Linear,
    Llama3,
    LongRoPE,
    Mask,
    ModelPlan,
    Rotary,
    Scaling,
    YaRN,
    YaRNByLength,
)
from theodolite.plan.describe import describe_scaling
from theodolite.plan.engines import settings
from theodolite.plan.huggingface import read_config

CONFIG: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8,
    "max_position_embeddings": 8192, "rope_theta": 100000.0,
}  # fmt: skip
PLAN = read_config(CONFIG)
YARN = YaRN(factor=2.0, original_max_position_embeddings=8192)


def of(scaling: Scaling, **more: Any) -> dict[str, Any]:
    return settings(PLAN.with_scaling(scaling), model="org/model", length=16384, **more)


def override(command: str) -> dict[str, Any]:
    """The JSON of a command line, as a shell hands it over."""
    line = command.splitlines()[-1]
    found: dict[str, Any] = json.loads(shlex.split(line)[-1])
    return found


class TestYaRN:
    def test_every_engine_says_it(self) -> None:
        rope = {
            "rope_type": "yarn", "rope_theta": 100000.0, "factor": 2.0, "original_max_position_embeddings": 8192,
        }  # fmt: skip
        keys = {"rope_parameters": rope, "max_position_embeddings": 16384}
        assert of(YARN) == {
            "transformers": keys,
            "vllm": f"vllm serve org/model --max-model-len 16384 --hf-overrides '{json.dumps(keys)}'",
            "sglang": (
                "python -m sglang.launch_server --model-path org/model --context-length 16384 "
                f"--json-model-override-args '{json.dumps(keys)}'"
            ),
            "llama.cpp": (
                "llama-server -m org/model.gguf -c 16384 --rope-freq-base 100000 --rope-scaling yarn --rope-scale 2 "
                "--yarn-orig-ctx 8192"
            ),
        }

    def test_betas_reach_llama_cpp(self) -> None:
        command = of(YaRN(factor=2.0, original_max_position_embeddings=8192, beta_fast=16.0, beta_slow=2.5))[
            "llama.cpp"
        ]
        assert command.endswith("--yarn-beta-fast 16 --yarn-beta-slow 2.5")

    def test_an_amplitude_of_its_own_is_said_in_both_names(self) -> None:
        """vLLM and SGLang have read `attn_factor`, a multiple of m(1), where transformers reads `attention_factor`."""
        scaling = YaRN(factor=2.0, original_max_position_embeddings=8192, mscale=1.0, mscale_all_dim=1.0)
        for engine in ("vllm", "sglang"):
            rope = override(of(scaling)[engine])["rope_parameters"]
            assert rope["attention_factor"] == 1.0
            assert rope["attn_factor"] * scaling.magnitude(1.0) == pytest.approx(1.0)
            assert "mscale" not in rope
        assert of(scaling)["llama.cpp"] == (
            "llama.cpp computes YaRN's attention factor itself (1.06931) and has no flag for this plan's (1)."
        )

    def test_llama_cpp_rounds_the_ramp(self) -> None:
        assert of(YaRN(factor=2.0, original_max_position_embeddings=8192, truncate=False))["llama.cpp"] == (
            "llama.cpp rounds the ends of YaRN's ramp to whole pairs, and this plan does not (truncate is false)."
        )

    def test_a_length_past_the_factor_is_remarked(self) -> None:
        command = settings(PLAN.with_scaling(YARN), model="m", length=20000)["vllm"]
        assert isinstance(command, str)
        assert command.startswith("# vLLM takes YaRN to reach 16384 tokens and may refuse a longer --max-model-len.\n")


class TestBases:
    def test_ntk_is_a_larger_base_everywhere(self) -> None:
        theta = 100000.0 * 2.0 ** (64 / 62)
        found = of(NTK(factor=2.0))
        assert found["transformers"]["rope_parameters"] == {"rope_type": "default", "rope_theta": theta}
        assert override(found["vllm"]) == found["transformers"]
        assert found["llama.cpp"].endswith(f"--rope-freq-base {theta!r} --rope-scaling none")

    def test_dynamic_is_settled_for_the_length_where_an_engine_is_static(self) -> None:
        found = of(DynamicNTK(factor=2.0, original_max_position_embeddings=8192))
        theta = 100000.0 * 3.0 ** (64 / 62)
        assert found["transformers"]["rope_parameters"] == {
            "rope_type": "dynamic", "rope_theta": 100000.0, "factor": 2.0,
        }  # fmt: skip
        # Raised with the length, it would move the point where the growth begins.
        assert found["transformers"]["max_position_embeddings"] == 8192
        for engine, name in (("vllm", "vLLM"), ("sglang", "SGLang")):
            remark = f"# {name} has one static table for dynamic NTK, so this is the base settled for 16384 tokens.\n"
            assert found[engine].startswith(remark)
            assert override(found[engine])["rope_parameters"]["rope_theta"] == pytest.approx(theta)
        assert found["llama.cpp"].startswith(
            "# llama.cpp has no dynamic NTK, so this is the base settled for 16384 tokens.\nllama-server "
        )

    def test_linear(self) -> None:
        assert of(Linear(factor=2.5))["llama.cpp"] == (
            "llama-server -m org/model.gguf -c 16384 --rope-freq-base 100000 --rope-scaling linear --rope-scale 2.5"
        )


class TestLists:
    LONG = LongRoPE(
        short_factor=(1.0,) * 32, long_factor=(2.0,) * 32, original_max_position_embeddings=8192, factor=2.0
    )

    def test_longrope_is_the_long_list_for_all_in_vllm(self) -> None:
        found = of(self.LONG)
        assert found["vllm"].startswith(
            "# vLLM chooses LongRoPE's list once, by --max-model-len: here the long factors for every sequence, short "
            "ones too.\n"
        )
        rope = override(found["vllm"])["rope_parameters"]
        assert rope["short_mscale"] == rope["long_mscale"] == self.LONG.attention_factor()
        assert found["transformers"]["original_max_position_embeddings"] == 8192

    def test_llama_cpp_reads_divisors_from_the_file(self) -> None:
        llama3 = Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
        for scaling in (self.LONG, llama3):
            command = of(scaling)["llama.cpp"]
            assert command.startswith(f"# llama.cpp has no flag for {scaling.rope_type!r}: it reads the divisors from")
            assert command.endswith("\nllama-server -m org/model.gguf -c 16384")


class TestShell:
    def test_names_with_blanks_and_quotes_stay_one_word(self) -> None:
        name = "my model's; rm -rf $HOME"
        found = settings(PLAN, model=name, length=8192)
        for engine in ("vllm", "sglang", "llama.cpp"):
            command = found[engine]
            assert isinstance(command, str)
            assert name in " ".join(shlex.split(command)).replace(".gguf", "")
            assert sum(name in word for word in shlex.split(command)) == 1

    def test_a_gguf_keeps_its_name(self) -> None:
        command = settings(PLAN, model="a/b.gguf", length=8192)["llama.cpp"]
        assert isinstance(command, str)
        assert " -m a/b.gguf " in command


class TestRoundTrip:
    @pytest.mark.parametrize(
        "scaling",
        [
            Scaling(),
            Linear(factor=3.0),
            YARN,
            TestLists.LONG,
            DynamicNTK(factor=2.0, original_max_position_embeddings=8192),
        ],
    )
    def test_the_override_says_the_plan(self, scaling: Scaling) -> None:
        plan = PLAN.with_scaling(scaling)
        found = settings(plan, model="m", length=16384)
        settled = plan.at_length(16384) if isinstance(scaling, DynamicNTK) else plan
        config = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
        for engine in ("vllm", "sglang"):
            command = found[engine]
            assert isinstance(command, str)
            read = read_config({**config, **override(command)}).rotaries[0]
            assert (read.inv_freq(length=16384) == settled.rotaries[0].inv_freq(length=16384)).all()
            assert read.attention_factor() == settled.rotaries[0].attention_factor()

    def test_a_text_part_is_named(self) -> None:
        found = of(YARN, part="text_config")
        assert list(found["transformers"]) == list(override(found["vllm"])) == ["text_config"]


class TestLayers:
    FAR = LayerPlan(rotate=Rotary(head_dim=8, rope_theta=1e6, scaling=Linear(factor=8.0)), layer_type="full_attention")
    LOCAL = LayerPlan(
        rotate=Rotary(head_dim=8, rope_theta=1e4), mask=Mask(sliding_window=512), layer_type="sliding_attention"
    )

    def test_layers_that_differ_are_nested(self) -> None:
        plan = ModelPlan(model_type="gemma3_text", max_position_embeddings=8192, layers=(self.LOCAL, self.FAR))
        found = settings(plan, model="m", length=16384)
        assert isinstance(found["transformers"], dict)
        assert list(found["transformers"]["rope_parameters"]) == ["sliding_attention", "full_attention"]
        assert found["llama.cpp"] == (
            "# Layers with a window keep what the GGUF says of them; the flags act on the others.\n"
            "llama-server -m m.gguf -c 16384 --rope-freq-base 1000000 --rope-scaling linear --rope-scale 8"
        )

    def test_one_rope_dict_cannot_say_layers_that_differ(self) -> None:
        plan = ModelPlan(model_type="gemma2", max_position_embeddings=8192, layers=(self.LOCAL, self.FAR))
        found = settings(plan, model="m", length=16384)
        assert found["vllm"] == (
            "A config has no words for this plan: layers: got 'gemma2'; they differ, and a config of this family has "
            "one rope dict for all."
        )

    def test_newer_llama_cpp_leaves_windowed_layers_alone(self) -> None:
        gemma2 = {**CONFIG, "model_type": "gemma2", "sliding_window": 512, "query_pre_attn_scalar": 64}
        plan = read_config(gemma2).with_scaling(YARN)
        command = settings(plan, model="m", length=16384)["llama.cpp"]
        assert isinstance(command, str)
        assert command.startswith("# Newer llama.cpp keeps what the GGUF says of layers with a window, and the flags ")

    def test_llama_cpp_has_one_set_of_flags(self) -> None:
        other = LayerPlan(rotate=Rotary(head_dim=8, rope_theta=1e5), layer_type="attention")
        plan = ModelPlan(model_type="llama", max_position_embeddings=8192, layers=(self.FAR, other))
        assert settings(plan, model="m", length=16384)["llama.cpp"] == (
            "llama.cpp has one set of rope flags for all layers that see everything, and those of this plan differ."
        )

    def test_no_rotation_is_nothing_to_set(self) -> None:
        plan = ModelPlan(model_type="bloom", max_position_embeddings=2048, layers=(LayerPlan(),))
        sentence = "bloom has no rotary positions, so there is nothing to set."
        found = settings(plan, model="m", length=16384)
        assert found == {
            "transformers": {"remark": sentence}, "vllm": sentence, "sglang": sentence, "llama.cpp": sentence,
        }  # fmt: skip

    def test_what_a_config_cannot_say_is_said(self) -> None:
        odd = YaRN(factor=2, original_max_position_embeddings=4096, ramp="rotations")
        found = settings(PLAN.with_scaling(odd), model="m", length=16384)
        assert found["vllm"] == (
            "A config has no words for this plan: ramp: got 'rotations'; every reader of a config takes the ramp in "
            "the pair's index."
        )
        assert found["llama.cpp"] == "llama.cpp takes YaRN's ramp in the pair's index, and this plan in rotations."

    def test_a_scaling_of_long_sequences_alone_is_no_engines(self) -> None:
        found = of(YaRNByLength(yarn=YARN))
        sentence = "A config has no words for this plan: scaling: got 'yarn-by-length'; a config has no name for it."
        assert found["transformers"] == {"remark": sentence}
        assert found["vllm"] == found["sglang"] == sentence
        assert found["llama.cpp"] == (
            "llama.cpp has one set of frequencies for all sequences, and this plan scales long ones alone."
        )
        assert describe_scaling(YaRNByLength(yarn=YARN)) == "YaRN 2 past 8,192 tokens, none before"
