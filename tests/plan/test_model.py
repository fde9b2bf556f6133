"""A policy per layer: what a scaling changes in a model, and what it must leave alone."""

from __future__ import annotations

from dataclasses import replace

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
    Mask,
    ModelPlan,
    PlanError,
    Rotary,
    Scaling,
    YaRN,
)

LLAMA3 = Llama3(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192)
LONGROPE = LongRoPE(short_factor=(1.0,) * 32, long_factor=(2.0,) * 32, original_max_position_embeddings=4096)
YARN = YaRN(factor=4, original_max_position_embeddings=8192)


def model(*layers: LayerPlan, length: int | None = 8192) -> ModelPlan:
    return ModelPlan(model_type="test", max_position_embeddings=length, layers=layers)


def layer(scaling: Scaling | None = None, *, rope_theta: float = 1e6, **mask) -> LayerPlan:
    rotary = Rotary(head_dim=64, rope_theta=rope_theta, scaling=scaling or Scaling())
    return LayerPlan(rotate=rotary, mask=Mask(**mask))


class TestWithScaling:
    """Extension keeps the base and the native scaling; a config that lost either took perplexity from 10 to 11,316."""

    @pytest.mark.parametrize("scaling", [Linear(factor=2), NTK(factor=2), YARN, LLAMA3])
    def test_keeps_the_base_and_all_else(self, scaling):
        before = replace(layer().rotate, rotary_dim=32, interleaved=True, trailing=True)
        after = model(LayerPlan(rotate=before)).with_scaling(scaling).layers[0].rotate
        assert after == replace(before, scaling=scaling)

    @pytest.mark.parametrize("scaling", [Linear(factor=8), DynamicNTK(factor=2, original_max_position_embeddings=8192)])
    def test_leaves_windowed_layers_alone(self, scaling):
        plan = model(layer(rope_theta=1e4, sliding_window=512), layer(), layer(rope_theta=1e4, chunk=8192))
        scaled = plan.with_scaling(scaling)
        assert scaled.layers[0] == plan.layers[0]
        assert scaled.layers[1].rotate.scaling == scaling
        assert scaled.layers[2] == plan.layers[2]

    def test_one_rotary_for_all_layers_is_scaled_in_all(self):
        plan = replace(model(layer(sliding_window=512), layer(), LayerPlan()), one_rotary=True)
        scaled = plan.with_scaling(YARN)
        assert [found.rotate and found.rotate.scaling for found in scaled.layers] == [YARN, YARN, None]
        with pytest.raises(PlanError, match="no rotary layer sees past its window"):
            replace(model(layer(sliding_window=512)), one_rotary=True).with_scaling(YARN)

    def test_the_score_scale_moves_along_in_latent_attention_alone(self):
        split = replace(YARN, mscale=1.0, mscale_all_dim=1.0)
        latent = LayerPlan(rotate=replace(layer().rotate, rotary_dim=16, trailing=True))
        scaled = model(latent, layer()).with_scaling(split)
        assert scaled.layers[0].score_scale == 64**-0.5 * split.magnitude(1.0) ** 2
        assert scaled.layers[0].rotate.attention_factor() == 1.0
        assert scaled.layers[1].score_scale is None
        assert model(latent).with_scaling(YARN).layers[0].score_scale is None

    def test_a_window_longer_than_the_model_is_none(self):
        plan = model(layer(sliding_window=8193))
        assert plan.with_scaling(Linear(factor=2)).layers[0].rotate.scaling == Linear(factor=2)

    def test_leaves_layers_without_rotation_alone(self):
        plan = model(layer(), LayerPlan())
        assert plan.with_scaling(Linear(factor=2)).layers[1] == LayerPlan()

    @pytest.mark.parametrize(
        ("native", "wanted", "result"),
        [
            (Scaling(), YARN, YARN),
            (LLAMA3, Scaling(), LLAMA3),
            (LLAMA3, LLAMA3, LLAMA3),
            (Linear(factor=8), Linear(factor=2), Linear(factor=16)),
            (YaRN(factor=2, original_max_position_embeddings=8192), YARN, YARN),
            (LONGROPE, replace(LONGROPE, long_factor=(3.0,) * 32), replace(LONGROPE, long_factor=(3.0,) * 32)),
        ],
    )
    def test_over_a_native_scaling(self, native, wanted, result):
        assert model(layer(native)).with_scaling(wanted).layers[0].rotate.scaling == result

    @pytest.mark.parametrize(
        ("native", "wanted"),
        [(LLAMA3, Linear(factor=2)), (YARN, NTK(factor=2)), (LONGROPE, YARN), (Linear(factor=8), YARN)],
    )
    def test_a_native_scaling_is_never_dropped(self, native, wanted):
        with pytest.raises(
            PlanError, match=f"scaling: got '{wanted.rope_type}'; the model already carries '{native.rope_type}'"
        ):
            model(layer(native)).with_scaling(wanted)

    @given(factor=st.floats(1, 64))
    def test_says_nothing_twice(self, factor):
        once = model(layer()).with_scaling(NTK(factor=factor))
        assert once.with_scaling(NTK(factor=factor)) == once

    def test_refuses_where_it_could_change_nothing(self):
        with pytest.raises(PlanError, match="a scaling needs rotary layers, and this model has none"):
            model(LayerPlan()).with_scaling(YARN)
        with pytest.raises(PlanError, match="no rotary layer sees past its window"):
            model(layer(sliding_window=512)).with_scaling(YARN)


class TestAtLength:
    """One length settles all layers, and is the only way to."""

    def test_settles_every_layer(self):
        plan = model(layer(DynamicNTK(factor=2, original_max_position_embeddings=4096)), LayerPlan(), layer(LONGROPE))
        assert plan.depends_on_length
        settled = plan.at_length(8192)
        assert not settled.depends_on_length
        assert settled.at_length(10) == settled
        assert settled.layers[1] == LayerPlan()
        assert settled.layers[2].rotate.scaling.short_factor == (2.0,) * 32

    def test_changes_nothing_in_a_fixed_plan(self):
        plan = model(layer(YARN), layer())
        assert not plan.depends_on_length
        assert plan.at_length(100_000) == plan


class TestRotaries:
    """Tables are made once for each distinct encoding, not once for each layer."""

    def test_each_once_in_order_of_first_use(self):
        local, wide = layer(rope_theta=1e4, sliding_window=512), layer()
        plan = model(local, local, wide, LayerPlan(), local, layer())
        assert plan.rotaries == (local.rotate, wide.rotate)


class TestMask:
    """The furthest distance decides whether a layer can meet a position that it was not trained on."""

    @pytest.mark.parametrize(
        ("mask", "reach"),
        [
            (Mask(), None),
            (Mask(sliding_window=512), 511),
            (Mask(chunk=8192), 8191),
            (Mask(sliding_window=512, chunk=128), 127),
        ],
    )
    def test_reach(self, mask, reach):
        assert mask.reach == reach

    @pytest.mark.parametrize("options", [{"sliding_window": 0}, {"chunk": -1}, {"sliding_window": 1.5}])
    def test_refusals(self, options):
        with pytest.raises(PlanError, match=f"{next(iter(options))}: got"):
            Mask(**options)
