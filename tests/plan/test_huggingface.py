"""The config.json of transformers: every dialect read, what is wrong refused by name, what is read written again."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from theodolite.plan import (
    NTK,
    DynamicNTK,
    LayerPlan,
    Linear,
    Llama3,
    LongRoPE,
    ModelPlan,
    PlanError,
    Rotary,
    Scaling,
    YaRN,
)
from theodolite.plan.huggingface import read_config, read_config_file, rope_parameters, write_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama(**changes: Any) -> dict[str, Any]:
    return {**LLAMA, **changes}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def rotary(config: dict[str, Any]) -> Rotary:
    (only,) = read_config(config).rotaries
    return only


class TestDialectsOfOneModelGiveOnePlan:
    """Half of the silent faults are a key that moved: one model in every spelling must be one plan."""

    def test_the_base_is_read_at_the_top_and_inside(self) -> None:
        flat = without(llama(), "rope_theta")
        inside = {**flat, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
        assert read_config(inside) == read_config(llama())
        assert rotary(inside).rope_theta == 500000.0

    @pytest.mark.parametrize(
        "scaling",
        [
            {"type": "linear", "factor": 2.0},
            {"rope_type": "linear", "factor": 2.0},
            {"type": "linear", "rope_type": "linear", "factor": 2.0},
        ],
    )
    def test_type_and_rope_type_are_one_key(self, scaling: dict[str, Any]) -> None:
        new = {**without(llama(), "rope_theta"), "rope_parameters": {**scaling, "rope_theta": 5e5}}
        assert rotary(llama(rope_scaling=scaling)) == rotary(new)
        assert rotary(new).scaling == Linear(factor=2.0)

    def test_su_is_longrope_and_mrope_is_no_scaling(self) -> None:
        lists = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "original_max_position_embeddings": 4096}
        scaling = rotary(llama(rope_scaling={"type": "su", **lists})).scaling
        assert isinstance(scaling, LongRoPE)
        axes = rotary(llama(rope_scaling={"type": "mrope", "mrope_section": [8, 12, 12]}))
        assert (axes.scaling, axes.mrope_section) == (Scaling(), (8, 12, 12))

    def test_a_head_dim_of_null_is_derived_and_a_stated_one_wins(self) -> None:
        assert rotary(llama(head_dim=None)).head_dim == 64
        assert rotary(llama(head_dim=128)).head_dim == 128

    def test_partial_factors_under_every_name(self) -> None:
        for key, value in (
            ("partial_rotary_factor", 0.25),
            ("rotary_pct", 0.25),
            ("rotary_emb_fraction", 0.25),
            ("rotary_dim", 16),
        ):
            assert rotary(llama(**{key: value})).rotary_dim == 16

    def test_a_text_model_inside_another_is_read(self) -> None:
        nested = {"model_type": "llava", "text_config": llama(), "vision_config": {"rope_theta": 100.0}}
        assert read_config(nested) == read_config(llama())

    def test_null_for_a_layer_type_is_no_rotation(self) -> None:
        config = {
            **without(llama(), "rope_theta"),
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 512,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": None,
            },
        }
        first, second = read_config(config).layers
        assert first.rotate is not None
        assert first.mask.sliding_window == 512
        assert second.rotate is None

    def test_an_unknown_family_is_read_as_half_split(self) -> None:
        assert rotary(llama(model_type="brand_new")) == rotary(llama())


class TestStrangers:
    """A family of which nothing is known is read as a Llama, until its config says that it is none."""

    BARE = without(llama(model_type="brand_new"), "max_position_embeddings")

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ({"patch_size": 14, "image_size": 224}, "model_type: got 'brand_new'; an image encoder: its rotation "
             "is over rows and columns; theodolite.plan.Axial has it"),
            ({"num_mel_bins": 80}, "model_type: got 'brand_new'; an encoder of sound: no reading of its positions"),
            ({"patch_length": 32}, "model_type: got 'brand_new'; a model of series of numbers: no reading"),
            ({"position_embeddings_type": "relative_key"}, "position_embeddings_type: got 'relative_key'; it"),
            ({"position_embedding_type": "absolute"}, "position_embedding_type: got 'absolute'; it speaks"),
            ({"relative_attention_num_buckets": 32}, "relative_attention_num_buckets: got 32; it speaks of positions"),
            ({"attn_type": "bi"}, "attn_type: got 'bi'; it speaks of positions"),
            ({"alibi": True}, "alibi: got True; it speaks of positions"),
            ({"is_encoder_decoder": True}, "is_encoder_decoder: got True; which layers are whose is not known"),
            ({"architectures": ["NewForMaskedLM"]}, r"architectures: got \['NewForMaskedLM'\]; an encoder sees"),
            ({"model_type": ""}, "model_type: got ''; the config must name its family"),
            ({"model_type": "step3p5"}, "model_type: got 'step3p5'; no reading of this family's positions is known"),
            ({"model_type": "gemma4_assistant", "text_config": LLAMA}, "model_type: got 'gemma4_assistant'; it drafts"),
        ],
    )  # fmt: skip
    def test_what_is_no_llama(self, keys: dict[str, Any], message: str) -> None:
        with pytest.raises(PlanError, match=message):
            read_config({**self.BARE, **keys})

    @pytest.mark.parametrize(
        "keys",
        [
            {"image_size": 448, "patch_size": 14, "vocab_size": 1000},
            {"position_embedding_type": "rope"},
            {"alibi": False},
            {"is_encoder_decoder": False, "architectures": ["NewForCausalLM"]},
            {"is_causal": True},
            {"patch_size": None},
        ],
    )
    def test_what_may_be_one(self, keys: dict[str, Any]) -> None:
        """A language model that sees images has their keys beside its own; false and null say nothing."""
        assert read_config({**self.BARE, **keys}) == read_config(self.BARE)


class TestNothingMissingIsGuessed:
    """A base of 10000 in place of a missing one is the commonest silent fault there is."""

    def test_a_missing_base_is_an_error_that_names_the_file(self) -> None:
        with pytest.raises(PlanError) as caught:
            read_config(without(llama(), "rope_theta"), source="models/x/config.json")
        assert str(caught.value) == (
            "rope_theta in models/x/config.json: got None; the base is missing, and no default is safe: "
            "state it (10000 in the first Llamas)"
        )

    def test_a_base_of_null_is_missing_too(self) -> None:
        with pytest.raises(PlanError, match="the base is missing"):
            read_config(llama(rope_theta=None))

    def test_a_stranger_without_rotation_is_called_one(self) -> None:
        with pytest.raises(PlanError, match="'stranger' is a family of which nothing is known"):
            read_config({**without(llama(), "rope_theta"), "model_type": "stranger"})

    @pytest.mark.parametrize(
        ("scaling", "field"),
        [
            ({"rope_type": "linear"}, "factor"),
            ({"rope_type": "dynamic"}, "factor"),
            ({"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings"),
            (without(LLAMA3, "original_max_position_embeddings"), "original_max_position_embeddings"),
            (without(LLAMA3, "high_freq_factor"), "high_freq_factor"),
            ({"rope_type": "longrope", "original_max_position_embeddings": 4096}, "short_factor"),
        ],
    )
    def test_a_missing_key_of_a_scaling_is_named(self, scaling: dict[str, Any], field: str) -> None:
        with pytest.raises(PlanError) as caught:
            read_config(llama(rope_scaling=scaling), source="config.json")
        assert caught.value.field == f"rope_scaling.{field}"
        assert "in config.json: got None;" in str(caught.value)

    def test_yarn_without_a_factor_has_the_implied_one(self) -> None:
        scaling = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
        assert rotary(llama(rope_scaling=scaling)).scaling == YaRN(factor=2.0, original_max_position_embeddings=4096)

    def test_the_original_length_may_stand_at_the_top(self) -> None:
        config = llama(rope_scaling={"rope_type": "yarn", "factor": 2.0}, original_max_position_embeddings=4096)
        assert rotary(config).scaling == YaRN(factor=2.0, original_max_position_embeddings=4096)


class TestWhatIsWrongIsRefusedByName:
    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (
                llama(rope_scaling={"type": "linear", "rope_type": "yarn", "factor": 2.0}),
                "rope_scaling.rope_type: got 'yarn'; it contradicts type='linear', and both name the scaling",
            ),
            (
                llama(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
                "rope_parameters.rope_theta: got 10000.0; rope_theta beside it says 500000.0",
            ),
            (
                llama(rotary_emb_base=10000),
                "rotary_emb_base: got 10000; it is another name of rope_theta, and beside it the base is 500000.0",
            ),
            (
                llama(layer_types=["full_attention"]),
                "layer_types: got '1 entries'; one per layer is needed: num_hidden_layers is 2",
            ),
            (
                llama(layer_types=["full_attention", "spiral_attention"]),
                "layer_types: got 'spiral_attention'; known kinds of layer: full_attention",
            ),
            (
                llama(rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}),
                "mrope_section: got [16, 24, 24]; its sum must be the number of pairs (32)",
            ),
            (
                llama(rope_scaling={"rope_type": "linear", "factor": 0.5}),
                "rope_scaling.factor: got 0.5; it must be at least 1: a factor divides positions",
            ),
            (
                llama(rope_scaling={"rope_type": "spiral", "factor": 2.0}),
                "rope_scaling.rope_type: got 'spiral'; allowed: 'default', 'linear', 'dynamic', 'yarn', 'longrope', "
                "'llama3', 'proportional'",
            ),
            (
                llama(rope_scaling={"rope_type": "linear", "factor": 2.0, "fractor": 3.0}),
                "rope_scaling.fractor: got 3.0; not a key of rope type 'linear'",
            ),
            (llama(rope_twist=3), "rope_twist: got 3; it speaks of rotation and no reading of it is known"),
            (
                llama(rope_scaling={"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4096}),
                "rope_scaling.original_max_position_embeddings: got 4096; rope type 'dynamic' grows from "
                "max_position_embeddings (8192), so the two must be equal",
            ),
            (
                llama(partial_rotary_factor=0.5, rotary_dim=16),
                "rotary_dim: got 16; partial_rotary_factor=0.5 beside it says 32 channels",
            ),
            (llama(partial_rotary_factor=1.5), "partial_rotary_factor: got 1.5; it must be at most 1"),
            (without(llama(), "model_type"), "model_type: got None; the config must name its family"),
            (llama(rope_scaling="yarn"), "rope_scaling: got 'yarn'; it must be a mapping, or null"),
            (
                llama(
                    rope_scaling={
                        "rope_type": "longrope",
                        "short_factor": [1.0] * 16,
                        "long_factor": [1.0] * 16,
                        "original_max_position_embeddings": 4096,
                    }
                ),
                "short_factor: got '16 numbers'; one per pair is needed: 32",
            ),
        ],
    )
    def test_the_message_names_field_value_and_what_is_allowed(self, config: dict[str, Any], message: str) -> None:
        with pytest.raises(PlanError) as caught:
            read_config(config)
        assert str(caught.value).startswith(message)
        with pytest.raises(PlanError) as caught:
            read_config(config, source="a/config.json")
        assert " in a/config.json: got " in str(caught.value)

    def test_a_stray_label_is_refused(self) -> None:
        config = {
            **without(llama(), "rope_theta"),
            "layer_types": ["full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e4},
                "slidng_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        }
        with pytest.raises(PlanError, match="no layer is of this type: full_attention"):
            read_config(config)

    def test_a_window_on_unknown_layers_is_refused(self) -> None:
        with pytest.raises(PlanError, match="which layers have it is not known in this family: give layer_types"):
            read_config(llama(model_type="brand_new", sliding_window=512))


class TestYaRNIsReadAsItIsMeant:
    def test_an_explicit_factor_wins_over_the_implied_one(self) -> None:
        """transformers once replaced it by max / original, 1.25 here, and the user's factor had no effect."""
        scaling = rotary(
            llama(
                max_position_embeddings=40960,
                rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            )
        ).scaling
        assert isinstance(scaling, YaRN)
        assert scaling.factor == 4.0
        assert scaling.attention_factor() == pytest.approx(1.138629, abs=5e-7)

    def test_truncate_is_honoured(self) -> None:
        """Rounding the ramp of gpt-oss changes one frequency by 76 %."""
        scaling = {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }
        read = rotary(llama(head_dim=64, rope_theta=150000.0, rope_scaling=scaling))
        assert isinstance(read.scaling, YaRN)
        low, high = read.scaling.ramp_ends(read.rope_theta, read.rotary_dim)
        assert (low, high) == pytest.approx((8.092779115512402, 17.39802450158856), rel=1e-14)
        rounded = rotary(llama(head_dim=64, rope_theta=150000.0, rope_scaling={**scaling, "truncate": True}))
        assert abs(rounded.inv_freq()[17] / read.inv_freq()[17] - 1) == pytest.approx(0.76, abs=0.01)

    @pytest.mark.parametrize(
        ("keys", "amplitude"),
        [
            ({}, 1.277259),
            ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
            ({"mscale": 1.0}, 1.277259),
            ({"mscale": 0.707, "mscale_all_dim": 0.0}, 1.277259),
            ({"attention_factor": 1.5, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.5),
        ],
    )
    def test_the_amplitude_is_a_ratio_only_when_both_numbers_are_given(
        self, keys: dict[str, float], amplitude: float
    ) -> None:
        rope = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, **keys}
        assert rotary(llama(rope_scaling=rope)).attention_factor() == pytest.approx(amplitude, abs=5e-7)

    def test_the_two_dicts_side_by_side(self) -> None:
        """Two dicts that differ in one key of six are told by that key."""
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
        base = {"rope_theta": 5e5, "rope_scaling": yarn}
        agreeing = rotary(llama(**base, rope_parameters={**yarn, "rope_theta": 5e5}))
        assert agreeing == rotary(llama(**base))
        with pytest.raises(PlanError) as caught:
            read_config(llama(**base, rope_parameters={**yarn, "rope_theta": 1e4}))
        assert str(caught.value) == "rope_theta: got 500000.0; rope_parameters beside it has rope_theta 10000.0"
        with pytest.raises(PlanError) as caught:
            read_config(llama(**base, rope_parameters={**yarn, "rope_theta": 5e5, "factor": 2.0}))
        assert str(caught.value) == "rope_scaling.factor: got 4.0; rope_parameters beside it has factor 2.0"

    def test_axes_and_scaling_are_separate_matters(self) -> None:
        """A type of "mrope" once shut out "yarn": the user's scaling was ignored, or turned linear."""
        yarn = {"factor": 4.0, "original_max_position_embeddings": 8192}
        plain = rotary(llama(rope_scaling={"rope_type": "yarn", **yarn}))
        for names in ({"type": "yarn"}, {"type": "mrope", "rope_type": "yarn"}):
            axes = rotary(llama(rope_scaling={**names, **yarn, "mrope_section": [8, 12, 12]}))
            assert axes.mrope_section == (8, 12, 12)
            assert (axes.inv_freq() == plain.inv_freq()).all()
            assert axes.attention_factor() == plain.attention_factor()

    def test_the_llama3_factor_comes_from_the_config(self) -> None:
        """A factor fixed to 8 turns Llama 3.2 to gibberish past 29 K: it is 32 there."""
        for head_dim, factor, kept, blended in ((64, 32.0, 15, 3), (128, 8.0, 29, 6)):
            read = rotary(llama(head_dim=head_dim, rope_scaling={**LLAMA3, "factor": factor}))
            ratios = rotary(llama(head_dim=head_dim)).inv_freq() / read.inv_freq()
            assert (abs(ratios - 1) < 1e-12).sum() == kept
            assert (abs(ratios - factor) < 1e-9).sum() == head_dim // 2 - kept - blended


class TestWriting:
    """What is written is read back: a config that said less than the plan would be a silent loss."""

    def test_a_config_that_says_the_plan_already_comes_back_key_for_key(self) -> None:
        config = llama(rope_scaling={"type": "linear", "factor": 2.0}, torch_dtype="bfloat16")
        assert write_config(read_config(config), config) == config

    def test_other_keys_stay_and_the_given_config_is_not_changed(self) -> None:
        config = llama(vocab_size=7)
        plan = read_config(config).with_scaling(YaRN(factor=2.0, original_max_position_embeddings=8192))
        written = write_config(plan, config)
        assert config == llama(vocab_size=7)
        assert written == {
            **without(config, "rope_theta"),
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 8192,
            },
        }
        assert read_config(written) == plan

    def test_the_legacy_dialect_keeps_the_base_at_the_top(self) -> None:
        plan = read_config(llama(partial_rotary_factor=0.5)).with_scaling(Linear(factor=4.0))
        written = write_config(plan, llama(), dialect="legacy")
        assert written == llama(rope_scaling={"rope_type": "linear", "factor": 4.0}, partial_rotary_factor=0.5)
        assert read_config(written) == plan

    def test_ntk_is_written_as_a_larger_base(self) -> None:
        plan = read_config(llama()).with_scaling(NTK(factor=4.0))
        written = write_config(plan, llama())
        assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0 * 4.0 ** (64 / 62)}
        assert rotary(written).inv_freq() == pytest.approx(plan.rotaries[0].inv_freq(), rel=1e-14)

    def test_an_extension_keeps_base_and_native_scaling(self) -> None:
        """A native llama3 once was replaced by a linear dict without its base: perplexity 10 became 11316."""
        plan = read_config(llama(rope_scaling=LLAMA3))
        with pytest.raises(PlanError, match="already carries 'llama3', which must not be lost"):
            plan.with_scaling(Linear(factor=2.0))
        assert rope_parameters(plan) == {**LLAMA3, "rope_theta": 500000.0}

    def test_a_model_of_several_parts_is_written_in_place(self) -> None:
        config = {"model_type": "llava", "text_config": llama(), "image_token_id": 9}
        plan = read_config(config).with_scaling(Linear(factor=2.0))
        written = write_config(plan, config)
        assert written["text_config"]["rope_parameters"] == {
            "rope_type": "linear",
            "rope_theta": 500000.0,
            "factor": 2.0,
        }
        assert "rope_parameters" not in written
        assert read_config(written) == plan

    @pytest.mark.parametrize(
        ("plan", "message"),
        [
            (
                ModelPlan(
                    model_type="llama",
                    max_position_embeddings=64,
                    layers=(
                        LayerPlan(
                            rotate=Rotary(
                                head_dim=8,
                                rope_theta=1e4,
                                scaling=YaRN(factor=2, original_max_position_embeddings=32, ramp="rotations"),
                            )
                        ),
                    ),
                ),
                "ramp: got 'rotations'; every reader of a config takes the ramp in the pair's index",
            ),
            (
                ModelPlan(
                    model_type="llama",
                    max_position_embeddings=64,
                    layers=(LayerPlan(rotate=Rotary(head_dim=8, rope_theta=1e4, interleaved=True)),),
                ),
                "layers[0].rotate: got Rotary(",
            ),
            (
                ModelPlan(
                    model_type="llama",
                    max_position_embeddings=64,
                    layers=(LayerPlan(rotate=Rotary(head_dim=8, rope_theta=1e4), score_scale=0.5),),
                ),
                "layers[0].score_scale: got 0.5; the config can only say None",
            ),
            (
                ModelPlan(
                    model_type="llama",
                    max_position_embeddings=64,
                    layers=(
                        LayerPlan(
                            rotate=Rotary(
                                head_dim=8,
                                rope_theta=1e4,
                                scaling=DynamicNTK(factor=2, original_max_position_embeddings=32),
                            )
                        ),
                    ),
                ),
                "layers[0].rotate: got Rotary(",
            ),
            (
                ModelPlan(model_type="llama", max_position_embeddings=64, layers=(LayerPlan(),)),
                "layers: got 'llama'; only rotary positions can be written into a config",
            ),
        ],
    )
    def test_what_a_config_cannot_say_is_refused(self, plan: ModelPlan, message: str) -> None:
        with pytest.raises(PlanError) as caught:
            write_config(plan)
        assert str(caught.value).startswith(message)

    def test_another_family_is_refused(self) -> None:
        with pytest.raises(PlanError, match="model_type: got 'qwen2'; the plan is one of 'llama'"):
            write_config(read_config(llama()), llama(model_type="qwen2"))

    @given(st.integers(1, 256), st.data())
    def test_a_partial_factor_gives_back_exactly_its_channels(self, pairs: int, data: st.DataObject) -> None:
        head_dim = 2 * pairs
        rotary_dim = 2 * data.draw(st.integers(1, pairs))
        plan = ModelPlan(
            model_type="llama",
            max_position_embeddings=64,
            layers=(LayerPlan(rotate=Rotary(head_dim=head_dim, rope_theta=1e4, rotary_dim=rotary_dim)),),
        )
        rope = rope_parameters(plan)
        assert int(head_dim * rope.get("partial_rotary_factor", 1.0)) == rotary_dim


factors = st.floats(1.0, 64.0)
lengths = st.integers(2, 1 << 20)


@st.composite
def scalings(draw: st.DrawFn, pairs: int, length: int) -> Scaling:
    divisors = st.lists(st.floats(0.5, 64.0), min_size=pairs, max_size=pairs).map(tuple)
    low = draw(st.floats(0.5, 2.0))
    return draw(
        st.one_of(
            st.just(Scaling()),
            st.builds(Linear, factor=factors),
            st.builds(DynamicNTK, factor=factors, original_max_position_embeddings=st.just(length)),
            st.builds(
                YaRN,
                factor=factors,
                original_max_position_embeddings=lengths,
                beta_fast=st.floats(8.0, 64.0),
                beta_slow=st.floats(0.5, 8.0),
                truncate=st.booleans(),
                attention_factor_given=st.none() | st.floats(0.5, 2.0),
                mscale=st.none() | st.floats(0.1, 2.0),
                mscale_all_dim=st.none() | st.floats(0.1, 2.0),
            ),
            st.builds(
                LongRoPE,
                short_factor=divisors,
                long_factor=divisors,
                original_max_position_embeddings=lengths,
                factor=factors,
                attention_factor_given=st.none() | st.floats(0.5, 2.0),
            ),
            st.builds(
                Llama3,
                factor=factors,
                low_freq_factor=st.just(low),
                high_freq_factor=st.floats(low + 0.5, 16.0),
                original_max_position_embeddings=lengths,
            ),
        )
    )


@st.composite
def plans(draw: st.DrawFn) -> ModelPlan:
    pairs, length = draw(st.integers(2, 16)), draw(lengths)
    turned = draw(st.integers(2, pairs))
    scaling = draw(scalings(turned, length))
    encoding = Rotary(head_dim=2 * pairs, rope_theta=draw(st.floats(10.0, 1e8)), rotary_dim=2 * turned, scaling=scaling)
    plain = type(scaling) in (Scaling, Linear)
    if plain and turned == pairs and draw(st.booleans()):
        encoding = Rotary(
            head_dim=2 * pairs,
            rope_theta=encoding.rope_theta,
            live_pairs=draw(st.integers(1, pairs)),
            scaling=scaling,
        )
    layer = LayerPlan(rotate=encoding)
    return ModelPlan(model_type="llama", max_position_embeddings=length, layers=(layer,) * draw(st.integers(1, 3)))


class TestRoundTrip:
    @given(plans())
    def test_reading_what_was_written_gives_the_plan(self, plan: ModelPlan) -> None:
        config = write_config(plan)
        assert read_config(config) == plan
        assert read_config(json.loads(json.dumps(config))) == plan
        assert write_config(plan, config) == config

    @given(plans())
    def test_the_legacy_dialect_loses_nothing(self, plan: ModelPlan) -> None:
        assert read_config(write_config(plan, dialect="legacy")) == plan


class TestFiles:
    def test_a_folder_or_its_config_is_read_and_named_in_errors(self, tmp_path: Any) -> None:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(llama()), encoding="utf-8")
        assert read_config_file(tmp_path) == read_config_file(file) == read_config(llama())
        file.write_text(json.dumps(llama(rope_theta=-1.0)), encoding="utf-8")
        with pytest.raises(PlanError) as caught:
            read_config_file(tmp_path)
        assert str(caught.value) == f"rope_theta in {file}: got -1.0; it must be a finite number above 0"
        for broken in ("{", "[" * 100_000, '{"a": ' + "1" * 5000 + "}"):
            file.write_text(broken, encoding="utf-8")
            with pytest.raises(PlanError, match="it must be JSON"):
                read_config_file(tmp_path)

    def test_a_byte_order_mark_is_no_part_of_the_text(self, tmp_path: Any) -> None:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(llama()), encoding="utf-8-sig")
        assert read_config_file(file) == read_config(llama())

    def test_reading_loads_neither_torch_nor_transformers(self) -> None:
        """`inspect` answers at once only as long as this holds."""
        code = (
            "import sys, theodolite.plan, theodolite.plan.huggingface, theodolite.plan.gguf, theodolite.plan.engines, "
            "theodolite.plan.describe; print([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules])"
        )
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert shown.strip() == "[]"


def test_the_shape_of_nested_parameters() -> None:
    config = {
        **without(llama(), "rope_theta"),
        "model_type": "mellum",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 512,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        },
    }
    plan = read_config(config)
    assert rope_parameters(plan) == config["rope_parameters"]
    scaled = plan.with_scaling(Linear(factor=8.0))
    assert rope_parameters(scaled)["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    assert rope_parameters(scaled)["full_attention"]["factor"] == 8.0
    assert read_config(write_config(scaled, config)) == scaled
    with pytest.raises(PlanError, match="it has one dict for all layers, and the layers of this plan differ"):
        write_config(scaled, config, dialect="legacy")
    assert math.isinf(Rotary(head_dim=8, rope_theta=1e4, live_pairs=1).wavelengths()[-1])
