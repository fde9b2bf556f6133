"""A plan as the metadata of a GGUF, with what llama.cpp's code does with them as the judge."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from theodolite.plan import (
    NTK,
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    ModelPlan,
    PlanError,
    Rotary,
    Scaling,
    YaRN,
    YaRNByLength,
    gguf_writing,
)
from theodolite.plan.gguf import read_metadata
from theodolite.plan.gguf_writing import Changes, changes_for, require_says

from .test_gguf import keys

L = 8192


def yarn(**more: Any) -> YaRN:
    return YaRN(**{"factor": 2.5, "original_max_position_embeddings": L, **more})


def llama3() -> Llama3:
    return Llama3(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=L)


def longrope(**more: Any) -> LongRoPE:
    numbers = tuple(1.0 + 0.3 * i for i in range(32))
    given = {"short_factor": numbers, "long_factor": numbers, "original_max_position_embeddings": L, **more}
    return LongRoPE(**given)


def float32(value: Any) -> Any:
    """What is left of a number in a file."""
    return struct.unpack("<f", struct.pack("<f", value))[0] if isinstance(value, float) else value


def applied(metadata: dict[str, Any], changes: Changes) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """The metadata and the divisors of the changed file."""
    found = {**metadata, **{name: float32(value) for name, value in changes.values.items()}}
    divisors = {name: [float32(float(number)) for number in numbers] for name, numbers in changes.divisors.items()}
    return {name: value for name, value in found.items() if value is not None}, divisors


def both(architecture: str, scaling: Scaling, to: int = 20000, **more: Any) -> tuple[dict[str, Any], ModelPlan]:
    """Metadata of a model, and its plan with a scaling on it."""
    metadata = keys(architecture, **more)
    return metadata, replace(read_metadata(metadata).with_scaling(scaling), max_position_embeddings=to)


def changed(
    architecture: str, scaling: Scaling, **more: Any
) -> tuple[dict[str, Any], dict[str, list[float]], ModelPlan]:
    metadata, after = both(architecture, scaling, **more)
    return *applied(metadata, changes_for(metadata, read_metadata(metadata), after)), after


def llama_cpp_frequencies(metadata: dict[str, Any], divisors: dict[str, list[float]]) -> tuple[np.ndarray, float]:
    """Frequencies per pair and the factor on cos and sin, as ggml's rope computes them from what llama.cpp loads."""
    architecture = metadata["general.architecture"]

    def get(name: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{name}", default)

    width = get("attention.key_length", get("embedding_length") // get("attention.head_count"))
    dims = get("rope.dimension_count", width)
    base, kind = get("rope.freq_base", 10000.0), get("rope.scaling.type", "linear")
    # A type of none takes no factor, and neither does longrope, whose files have none.
    scale = 1.0 if kind == "none" else 1.0 / get("rope.scaling.factor", 1.0)
    extrapolated = np.array([base ** (-2 * i / dims) for i in range(dims // 2)])
    lists = divisors.get("rope_freqs.weight") or divisors.get("rope_factors_long.weight")
    if lists is not None:
        extrapolated = extrapolated / np.array(lists)
    amplitude = get("rope.scaling.attn_factor", 1.0)
    if kind != "yarn":
        return extrapolated * scale, amplitude
    original = get("rope.scaling.original_context_length", get("context_length"))

    def dimension(rotations: float) -> float:
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(0, math.floor(dimension(get("rope.scaling.yarn_beta_fast", 32.0))))
    high = min(dims - 1, math.ceil(dimension(get("rope.scaling.yarn_beta_slow", 1.0))))
    ramp = 1 - np.clip((np.arange(dims // 2) - low) / max(0.001, high - low), 0, 1)
    return extrapolated * scale * (1 - ramp) + extrapolated * ramp, amplitude * (1 + 0.1 * math.log(1 / scale))


CASES = [
    ("llama", Linear(factor=2.7)),
    ("llama", NTK(factor=3.3)),
    ("llama", yarn()),
    ("llama", yarn(factor=4.0, beta_fast=24.0, beta_slow=2.0)),
    ("llama", yarn(attention_factor_given=1.31)),
    ("llama", llama3()),
    ("llama", longrope()),
    ("llama", longrope(attention_factor_given=1.17)),
    ("phi3", longrope(attention_factor_given=1.17)),
    ("arcee", longrope()),
    ("granite", llama3()),
    ("qwen3", yarn()),
    ("stablelm", yarn()),
]


class TestAsLlamaCppReads:
    """What is written is for llama.cpp, so its formulas are what counts."""

    @pytest.mark.parametrize(("architecture", "scaling"), CASES)
    def test_frequencies_and_amplitude(self, architecture: str, scaling: Scaling) -> None:
        more = {"rope__dimension_count": 32} if architecture == "stablelm" else {}
        more |= {"attention__scale": 0.125} if architecture == "granite" else {}
        metadata, divisors, after = changed(architecture, scaling, **more)
        (rotary,) = after.rotaries
        frequencies, amplitude = llama_cpp_frequencies(metadata, divisors)
        # Base and factor are kept in float32: half a unit in the last place of each.
        np.testing.assert_allclose(frequencies, rotary.inv_freq(length=20000), rtol=2.0**-23)
        assert amplitude == pytest.approx(rotary.attention_factor(), rel=2.0**-23)
        assert metadata[f"{architecture}.context_length"] == 20000

    @pytest.mark.parametrize(("architecture", "scaling"), CASES)
    def test_read_back(self, architecture: str, scaling: Scaling, monkeypatch: pytest.MonkeyPatch) -> None:
        more = {"attention__scale": 0.125} if architecture == "granite" else {}
        metadata, divisors, after = changed(architecture, scaling, **more)
        found = read_metadata(metadata, divisors=divisors)
        monkeypatch.setattr(gguf_writing, "read_file", lambda path: found)
        require_says(None, after)  # type: ignore[arg-type]

    def test_numbers_have_the_types_that_llama_cpp_asks_for(self) -> None:
        metadata, after = both("llama", yarn(factor=2))
        values = changes_for(metadata, read_metadata(metadata), after).values
        assert values == {
            "llama.context_length": 20000,
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 2.0,
            "llama.rope.scaling.original_context_length": L,
        }
        assert {name.removeprefix("llama."): type(value) for name, value in values.items()} == {
            "context_length": int,
            "rope.scaling.type": str,
            "rope.scaling.factor": float,
            "rope.scaling.original_context_length": int,
        }

    def test_both_lists_of_a_longrope_that_changes_with_the_length(self) -> None:
        given = longrope(short_factor=(1.0,) * 32, attention_factor_given=1.1)
        metadata, after = both("phi3", given)
        divisors = changes_for(metadata, read_metadata(metadata), after).divisors
        assert list(divisors) == ["rope_factors_long.weight", "rope_factors_short.weight"]
        np.testing.assert_allclose(divisors["rope_factors_long.weight"], given.long_factor, rtol=1e-14)
        np.testing.assert_allclose(divisors["rope_factors_short.weight"], given.short_factor, rtol=1e-14)

    def test_gemma_scales_the_layers_without_a_window(self) -> None:
        more = {"attention__sliding_window": 512, "attention__key_length": 64, "block_count": 7}
        metadata, divisors, after = changed("gemma3", Linear(factor=8.0), **more)
        found = read_metadata(metadata, divisors=divisors)
        assert found == after
        assert [type(rotary.scaling) for rotary in found.rotaries] == [Scaling, Linear]

    def test_deepseek_keeps_its_multiplier(self) -> None:
        more = {
            "attention__key_length_mla": 192, "rope__dimension_count": 64, "rope__scaling__type": "yarn",
            "rope__scaling__factor": 40.0, "rope__scaling__original_context_length": 4096,
            "rope__scaling__yarn_log_multiplier": float32(0.1),
        }  # fmt: skip
        metadata = keys("deepseek2", **more)
        before = read_metadata(metadata)
        wanted = replace(before.rotaries[0].scaling, factor=80.0)
        after = replace(before.with_scaling(wanted), max_position_embeddings=327680)
        found, _ = applied(metadata, changes_for(metadata, before, after))
        assert found["deepseek2.rope.scaling.yarn_log_multiplier"] == float32(0.1)
        assert read_metadata(found).layers[0].score_scale == pytest.approx(after.layers[0].score_scale, rel=1e-6)


class TestWhatIsTakenAway:
    """A key of the older scaling left behind would be read with the new one."""

    def test_older_keys_go(self) -> None:
        more = {
            "rope__scaling__type": "yarn", "rope__scaling__factor": 2.0, "rope__scaling__attn_factor": 0.9,
            "rope__scaling__yarn_beta_fast": 20.0, "rope__scaling__original_context_length": 4096,
        }  # fmt: skip
        metadata = keys("llama", **more)
        before = read_metadata(metadata)
        wanted = YaRN(factor=8.0, original_max_position_embeddings=4096)
        after = replace(before.with_scaling(wanted), max_position_embeddings=32768)
        values = changes_for(metadata, before, after).values
        assert values["llama.rope.scaling.attn_factor"] is None
        assert values["llama.rope.scaling.yarn_beta_fast"] is None
        assert "llama.rope.scaling.yarn_beta_slow" not in values
        assert read_metadata(applied(metadata, Changes(values=values))[0]) == after

    def test_the_oldest_name_of_a_linear_factor(self) -> None:
        metadata = keys("llama", rope__scale_linear=2.0)
        before = read_metadata(metadata)
        after = replace(before.with_scaling(Linear(factor=2.0)), max_position_embeddings=16384)
        found, _ = applied(metadata, changes_for(metadata, before, after))
        assert "llama.rope.scale_linear" not in found
        assert found["llama.rope.scaling.factor"] == 4.0
        assert read_metadata(found) == after

    def test_only_the_length_where_nothing_else_changes(self) -> None:
        metadata = keys("llama", rope__scaling__type="linear", rope__scaling__factor=4.0)
        before = read_metadata(metadata)
        after = replace(before, max_position_embeddings=12345)
        assert changes_for(metadata, before, after) == Changes(values={"llama.context_length": 12345})


class TestRefusals:
    """What llama.cpp has no words for is refused before a byte is written."""

    @pytest.mark.parametrize(
        ("architecture", "scaling", "said"),
        [
            (
                "llama",
                DynamicNTK(factor=2.0, original_max_position_embeddings=L),
                r"one base for all lengths; take ntk",
            ),
            ("llama", YaRNByLength(yarn=yarn()), "llama.cpp has one set of frequencies for all sequences"),
            ("llama", yarn(truncate=False), r"got \"ramp='index', truncate=False\"; llama.cpp takes YaRN's ramp"),
            ("llama", yarn(ramp="rotations"), "llama.cpp takes YaRN's ramp in the pair's index, its ends rounded"),
            ("qwen3", llama3(), r"got \"llama3 in architecture 'qwen3'\"; llama.cpp does not load divisors for it"),
            ("arcee", longrope(attention_factor_given=1.2), r"longrope in architecture 'arcee'"),
        ],
    )
    def test_scalings(self, architecture: str, scaling: Scaling, said: str) -> None:
        metadata, after = both(architecture, scaling)
        with pytest.raises(PlanError, match=said):
            changes_for(metadata, read_metadata(metadata), after)

    def test_layers_that_change_differently(self) -> None:
        metadata, after = both("llama", yarn())
        other = replace(after.layers[0], rotate=replace(after.layers[0].rotate, scaling=Linear(factor=3.0)))
        mixed = replace(after, layers=(other, *after.layers[1:]))
        with pytest.raises(PlanError, match="layers: got '2 different changes'; a GGUF has one scaling for all"):
            changes_for(metadata, read_metadata(metadata), mixed)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (
                lambda plan: replace(plan, max_position_embeddings=20001),
                "context_length: got 20001; the file says 20000",
            ),
            (lambda plan: replace(plan, layers=plan.layers[:-1]), "block_count: got 3; the file says 4"),
            (lambda plan: _scaled(plan, yarn(factor=2.5001)), "the file can only say"),
            (lambda plan: _scaled(plan, yarn(attention_factor_given=1.1)), "the file can only say"),
            (lambda plan: _scaled(plan, yarn(), rope_theta=100001.0), "the file can only say"),
            (lambda plan: _scaled(plan, yarn(), interleaved=False), "the file can only say"),
            (lambda plan: _scaled(plan, yarn(), score_scale=0.3), "the file can only say"),
        ],
    )
    def test_a_file_that_says_another_plan(self, change: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
        _, after = both("llama", yarn())
        monkeypatch.setattr(gguf_writing, "read_file", lambda path: after)
        require_says(None, after)  # type: ignore[arg-type]
        with pytest.raises(PlanError, match=said):
            require_says(None, change(after))  # type: ignore[arg-type]

    def test_a_file_of_another_score_scale(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, after = both("llama", yarn())
        stated = _scaled(after, yarn(), score_scale=0.3)
        monkeypatch.setattr(gguf_writing, "read_file", lambda path: stated)
        require_says(None, _scaled(after, yarn(), score_scale=0.3 * (1 + 2.0**-24)))  # type: ignore[arg-type]
        with pytest.raises(PlanError, match="the file can only say"):
            require_says(None, _scaled(after, yarn(), score_scale=0.3001))  # type: ignore[arg-type]


def _scaled(plan: ModelPlan, scaling: Scaling, score_scale: float | None = None, **rotary: Any) -> ModelPlan:
    def change(given: Rotary) -> Rotary:
        return replace(given, scaling=scaling, **rotary)

    layers = [replace(layer, rotate=change(layer.rotate), score_scale=score_scale) for layer in plan.layers]
    return replace(plan, layers=tuple(layers))
