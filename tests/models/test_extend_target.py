"""A model's own scaling is kept and widened, and never written over by a weaker one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from theodolite.models.extend import over_llama3, require_counted_over_stated, stretched
from theodolite.plan import (
    NTK,
    DynamicNTK,
    LayerPlan,
    Linear,
    Llama3,
    LongRoPE,
    Mask,
    ModelPlan,
    PlanError,
    Rotary,
    Scaling,
    YaRN,
)


def model(scaling: Scaling | None = None, *, length: int | None = 8192, **more: Any) -> ModelPlan:
    rotary = Rotary(head_dim=16, rope_theta=10000.0, scaling=scaling or Scaling())
    layers = (LayerPlan(rotate=rotary), LayerPlan(), LayerPlan(rotate=rotary))
    return ModelPlan(model_type="llama", max_position_embeddings=length, layers=layers, **more)


def yarn(factor: float, original: int = 8192) -> YaRN:
    return YaRN(factor=factor, original_max_position_embeddings=original)


def llama3(factor: float, original: int = 8192) -> Llama3:
    return Llama3(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=original)


class TestLength:
    """A factor too small for what is promised is the fault that no engine reports."""

    @pytest.mark.parametrize("scaling", [yarn(2.0), Linear(factor=2.0), NTK(factor=2.0), llama3(2.0)])
    def test_it_reaches_to_the_token_and_no_further(self, scaling: Scaling) -> None:
        before, after = model(), model(scaling)
        assert stretched(before, after, 16384, name="x:2") == replace(after, max_position_embeddings=16384)
        said = r"scaling: got 'x:2'; it stretches to 16,384 tokens, and 16,385 are wanted: x:3"
        with pytest.raises(PlanError, match=said):
            stretched(before, after, 16385, name="x:2")

    @pytest.mark.parametrize("to", [8192, 100])
    def test_it_is_more_than_before(self, to: int) -> None:
        with pytest.raises(PlanError, match=f"to: got {to}; the model states 8,192 tokens already; give more"):
            stretched(model(), model(yarn(2.0)), to, name="yarn:2")

    @pytest.mark.parametrize("to", [0, -1, 2.5, 2**41])
    def test_it_is_a_number_of_tokens(self, to: Any) -> None:
        with pytest.raises(PlanError, match="to"):
            stretched(model(), model(yarn(2.0)), to, name="yarn:2")

    def test_a_model_without_a_length(self) -> None:
        with pytest.raises(PlanError, match="the model's config must say its length, to be extended"):
            stretched(model(length=None), model(yarn(2.0), length=None), 16384, name="yarn:2")

    def test_dynamic_keeps_the_length_from_which_it_grows(self) -> None:
        after = model(DynamicNTK(factor=2.0, original_max_position_embeddings=8192))
        assert stretched(model(), after, 100_000, name="dynamic:2") == after

    def test_what_was_searched_has_no_end_of_its_own(self) -> None:
        numbers = (1.0,) * 4 + (3.0,) * 4
        after = model(LongRoPE(short_factor=numbers, long_factor=numbers, original_max_position_embeddings=8192))
        found = stretched(model(), after, 20_000, name="search:x")
        assert found.max_position_embeddings == 20_000
        # What is left to others is derived from the lengths, and by each in its own way.
        assert found.rotaries[0].scaling == replace(after.rotaries[0].scaling, attention_factor_given=1.0)

    def test_the_layer_that_reaches_least_decides(self) -> None:
        after = model(yarn(4.0))
        short = LayerPlan(rotate=replace(after.layers[0].rotate, scaling=yarn(2.0)))
        mixed = replace(after, layers=(short, *after.layers[1:]))
        with pytest.raises(PlanError, match="it stretches to 16,384 tokens, and 20,000 are wanted"):
            stretched(model(), mixed, 20_000, name="yarn:4")


class TestFound:
    """A search chooses factor, base and ramp together, by what the model does with them: no ratio is asked of it."""

    @pytest.mark.parametrize("scaling", [yarn(1.7), yarn(1.0), replace(yarn(1.2), original_max_position_embeddings=64)])
    def test_a_factor_below_the_ratio_of_lengths(self, scaling: YaRN) -> None:
        before, after = model(), model(scaling)
        found = stretched(before, after, 16384, name="search:x", found=True)
        assert found == replace(after, max_position_embeddings=16384)
        with pytest.raises(PlanError, match="tokens, and 16,384 are wanted"):
            stretched(before, after, 16384, name="yarn:1.7")

    def test_less_than_the_model_s_own(self) -> None:
        before, after = model(yarn(4.0), length=32768), model(yarn(3.5), length=32768)
        assert stretched(before, after, 65536, name="search:x", found=True).max_position_embeddings == 65536

    def test_the_length_is_still_more_than_before(self) -> None:
        with pytest.raises(PlanError, match="the model states 8,192 tokens already"):
            stretched(model(), model(yarn(1.7)), 8192, name="search:x", found=True)


class TestCountedOverStated:
    """Of a model that was extended already, a factor may be meant over either of two lengths."""

    @pytest.mark.parametrize(
        ("native", "wanted", "told"),
        [
            (yarn(2.0), yarn(8.0), r"YaRN 2 from 8,192 tokens already .* this would be YaRN 8 from 8,192 tokens"),
            (Linear(factor=2.0), Linear(factor=8.0), "linear scaling 2 already .* this would be linear scaling 8"),
            (llama3(2.0), llama3(8.0), "Llama 3 scaling 2 from 8,192 tokens already"),
        ],
    )
    def test_a_factor_that_would_do_over_the_trained_length(self, native: Scaling, wanted: Scaling, told: str) -> None:
        before, after = model(native, length=16384), model(wanted, length=16384)
        with pytest.raises(PlanError, match=f"{told}.*; x:2 is enough for 32,768 tokens"):
            require_counted_over_stated(before, after, 32768, name="x:4")
        # Over the trained length it would not do for these, so it is meant over the stated one.
        require_counted_over_stated(before, after, 32769, name="x:4")

    def test_what_is_just_enough_is_meant(self) -> None:
        before = model(yarn(1.5), length=12288)
        require_counted_over_stated(before, model(yarn(3.0), length=12288), 16384, name="yarn:2")
        require_counted_over_stated(model(yarn(2.0), length=16384), model(yarn(4.0), length=16384), 32768, name="x:2")

    def test_over_a_model_without_a_scaling_there_is_one_length(self) -> None:
        require_counted_over_stated(model(), model(yarn(8.0)), 16384, name="yarn:8")
        # Qwen 2.5 states the trained length beside its YaRN.
        require_counted_over_stated(model(yarn(4.0)), model(yarn(8.0)), 16384, name="yarn:8")


class TestNative:
    """A model that carries a scaling was trained with it."""

    @pytest.mark.parametrize(
        ("native", "wanted", "length", "to"),
        [
            (yarn(4.0), yarn(8.0), 32768, 65536),
            (Linear(factor=4.0), Linear(factor=8.0), 8192, 16384),
            (llama3(8.0), llama3(16.0), 65536, 131072),
        ],
    )
    def test_widened(self, native: Scaling, wanted: Scaling, length: int, to: int) -> None:
        before, after = model(native, length=length), model(wanted, length=length)
        assert stretched(before, after, to, name="x:2").max_position_embeddings == to
        with pytest.raises(PlanError, match=f"it stretches to {to:,} tokens, and {to + 1:,} are wanted: x:3"):
            stretched(before, after, to + 1, name="x:2")

    @pytest.mark.parametrize(("native", "weaker"), [(yarn(4.0), yarn(2.0)), (Linear(factor=4.0), Linear(factor=2.0))])
    def test_never_weakened(self, native: Scaling, weaker: Scaling) -> None:
        said = r"scaling: got 'x:2'; the model carries (yarn|linear) 4 already, and this would be 2"
        with pytest.raises(PlanError, match=said):
            stretched(model(native), model(weaker), 12000, name="x:2")

    def test_a_native_one_that_reaches_is_enough(self) -> None:
        before = model(yarn(4.0))
        assert stretched(before, before, 32768, name="yarn:4").max_position_embeddings == 32768
        with pytest.raises(PlanError, match="it stretches to 32,768 tokens"):
            stretched(before, before, 32769, name="yarn:4")

    def test_a_layer_with_a_window_that_is_not_scaled_does_not_count(self) -> None:
        window = LayerPlan(
            rotate=Rotary(head_dim=16, rope_theta=5000.0), mask=Mask(sliding_window=512), layer_type="sliding_attention"
        )
        before, after = model(), model(Linear(factor=2.0))
        before, after = (replace(plan, layers=(window, *plan.layers)) for plan in (before, after))
        assert stretched(before, after, 16384, name="linear:2").layers == after.layers


class TestLlama3:
    """Llama 3.1's scaling takes no other on top, so its own factor is what can grow."""

    def test_slow_pairs_are_divided_by_more_and_fast_ones_left(self) -> None:
        before = model(llama3(8.0), length=131072)
        after = over_llama3(before, 2.0)
        assert after is not None
        (old,), (new,) = before.rotaries, after.rotaries
        ratio = old.inv_freq() / new.inv_freq()
        assert ratio[0] == 1.0
        assert ratio[-1] == pytest.approx(2.0, rel=1e-12)
        assert new.scaling == llama3(16.0)
        assert [layer.rotate is None for layer in after.layers] == [False, True, False]

    def test_none_where_there_is_none(self) -> None:
        assert over_llama3(model(yarn(2.0)), 2.0) is None
