"""Points of the spaces, and the plans that they mean."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models.tiny import FAMILIES, tiny
from theodolite.plan import (
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
from theodolite.plan.huggingface import read_config, rope_parameters
from theodolite.search.pair_space import PairSpace
from theodolite.search.spaces import spaces
from theodolite.search.yarn_space import YaRNSpace
from theodolite.survey.found import with_found

TRAINED, TO = 8192, 16384
# All layers that turn have windows or chunks; those that see everything do not turn.
WINDOWED = {"mistral", "cohere2", "llama4", "starcoder2", "exaone4"}


def plan_of(scaling: Scaling | None = None, *, rotary_dim: int = 64, theta: float = 1e5, **layer) -> ModelPlan:
    rotary = Rotary(head_dim=64, rotary_dim=rotary_dim, rope_theta=theta, scaling=scaling or Scaling())
    layers = (LayerPlan(rotate=rotary, **layer),) * 2
    return ModelPlan(model_type="llama", max_position_embeddings=TRAINED, layers=layers, one_rotary=True)


def start_of(space) -> list[float]:
    return [coordinate.start for coordinate in space.coordinates]


def oracle_divisors(rises: list[float], turns: list[float], most: float) -> list[float]:
    """Point by point, from the words of the documentation."""
    count = len(turns)
    places = []
    for knot in (64.0, 32.0, 16.0, 8.0, 4.0, 2.0, 1.0, 0.25):
        for i in range(count - 1):
            if turns[i] > knot >= turns[i + 1] and turns[0] > knot > turns[-1]:
                places.append(i + math.log(turns[i] / knot) / math.log(turns[i] / turns[i + 1]))
    places.append(count - 1)
    heights, height = [], 0.0
    for rise in rises:
        height += rise
        heights.append(min(height, math.log(most)))
    divisors = []
    for pair in range(count):
        before = [(0.0, 0.0), *((p, h) for p, h in zip(places, heights, strict=True) if p <= pair)][-1]
        after = next(((p, h) for p, h in zip(places, heights, strict=True) if p >= pair), before)
        share = 0.0 if after[0] == before[0] else (pair - before[0]) / (after[0] - before[0])
        divisors.append(math.exp(before[1] + share * (after[1] - before[1])))
    return divisors


class TestYaRNSpace:
    """The plain type: what is found is a YaRN that every engine reads."""

    def test_the_start_is_yarn_for_the_length(self):
        plan = plan_of()
        space = YaRNSpace(plan, TO)
        found = space.plan_of(start_of(space)).scalable[0]
        usual = plan.with_scaling(YaRN(factor=2.0, original_max_position_embeddings=TRAINED)).scalable[0]
        np.testing.assert_allclose(found.inv_freq(), usual.inv_freq(), rtol=1e-12)
        # Six significant digits of 1.0693.
        assert found.attention_factor() == pytest.approx(usual.attention_factor(), abs=5e-6)

    def test_each_coordinate_is_what_it_is_called(self):
        space = YaRNSpace(plan_of(), TO)
        point = [math.log(1.3), math.log(3.0), math.log(20.0), math.log(2.0), 1.1]
        rotary = space.plan_of(point).scalable[0]
        assert rotary.rope_theta == 130000.0
        assert rotary.scaling == YaRN(
            factor=3.0,
            original_max_position_embeddings=TRAINED,
            beta_fast=20.0,
            beta_slow=2.0,
            attention_factor_given=1.1,
        )

    def test_a_native_factor_is_widened_and_never_taken_back(self):
        native = YaRN(factor=4.0, original_max_position_embeddings=2048, truncate=False)
        space = YaRNSpace(plan_of(native), TO)
        assert math.exp(start_of(space)[1]) == pytest.approx(8.0)
        lowest = space.plan_of([-9.0] * 5).scalable[0].scaling
        assert isinstance(lowest, YaRN)
        assert lowest.factor == 4.0
        assert not lowest.truncate
        assert lowest.original_max_position_embeddings == 2048

    def test_a_length_that_states_no_factor_is_not_stretched_twice(self):
        """Qwen 2.5 states the length without its native factor: 16,384 of 8,192 is 2, and 4 are there already."""
        native = YaRN(factor=4.0, original_max_position_embeddings=TRAINED)
        assert math.exp(start_of(YaRNSpace(plan_of(native), TO))[1]) == pytest.approx(4.0)

    def test_latent_attention_keeps_its_split_of_the_temperature(self):
        model = tiny("deepseek_v3", max_position_embeddings=4096)
        plan = read_config(model.config.to_dict())
        space = YaRNSpace(plan, 8192)
        assert [coordinate.name for coordinate in space.coordinates] == ["base", "factor", "beta_fast", "beta_slow"]
        point = start_of(space)
        usual = plan.with_scaling(space.plan_of(point).scalable[0].scaling)
        found = space.plan_of([0.1, *point[1:]])
        assert found.layers[0].score_scale == usual.layers[0].score_scale

    def test_only_layers_that_see_far_change(self):
        plan = plan_of()
        near = replace(plan.layers[0], mask=Mask(sliding_window=512))
        mixed = replace(plan, layers=(near, plan.layers[1]), one_rotary=False)
        space = YaRNSpace(mixed, TO)
        found = space.plan_of(start_of(space))
        assert found.layers[0] == near
        assert found.layers[1] != plan.layers[1]


class TestPairSpace:
    """LongRoPE's form: divisors that never decrease, the same at all lengths."""

    @given(st.data())
    def test_divisors(self, data):
        space = PairSpace(plan_of(rotary_dim=data.draw(st.sampled_from([8, 24, 64]))), TO)
        point = [data.draw(st.floats(-0.5, 2.5)) for _ in space.coordinates]
        divisors = space.divisors(point)
        turns = (TRAINED * space.rotary.inv_freq() / (2 * math.pi)).tolist()
        expected = oracle_divisors(space.inside(point)[:-1], turns, 8.0)
        # exp, log and a few sums of numbers below 3, in float64.
        np.testing.assert_allclose(divisors, expected, rtol=1e-12)
        assert divisors[0] == 1.0
        assert (np.diff(divisors) >= 0).all()
        assert divisors[-1] <= 8.0 * (1 + 1e-12)
        rotary = space.plan_of(point).scalable[0]
        # The divisors are written with six digits.
        np.testing.assert_allclose(rotary.inv_freq(), space.rotary.inv_freq() / divisors, rtol=5.1e-6)
        assert not rotary.depends_on_length
        assert rotary.attention_factor() == pytest.approx(space.inside(point)[-1], rel=5e-6)

    def test_it_begins_where_it_is_told(self):
        """At the knots; between them the two may differ, for the one is no straight line there."""
        plan = plan_of()
        given = YaRNSpace(plan, TO).plan_of([0.2, 1.0, 3.2, 0.1, 1.08])
        space = PairSpace(plan, TO, given)
        found = space.plan_of(start_of(space)).scalable[0]
        assert found.attention_factor() == pytest.approx(1.08)
        assert found.inv_freq()[-1] == pytest.approx(given.scalable[0].inv_freq()[-1], rel=1e-5)
        np.testing.assert_allclose(found.inv_freq(), given.scalable[0].inv_freq(), rtol=0.12)

    def test_without_a_start_slow_pairs_are_stretched_to_the_length_and_fast_ones_left(self):
        space = PairSpace(plan_of(), TO)
        divisors, turns = space.divisors(start_of(space)), TRAINED * space.rotary.inv_freq() / (2 * math.pi)
        assert divisors[turns > 64] == pytest.approx(1.0, abs=1e-12)
        assert divisors[turns < 0.25] == pytest.approx(2.0)

    @pytest.mark.parametrize(
        "native",
        [
            Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=2048),
            Linear(factor=2.0),
            YaRN(factor=4.0, original_max_position_embeddings=2048),
            LongRoPE(
                short_factor=(1.0,) * 32,
                long_factor=tuple(1.0 + i / 4 for i in range(32)),
                original_max_position_embeddings=2048,
                factor=4.0,
            ),
            DynamicNTK(factor=2.0, original_max_position_embeddings=2048),
        ],
    )
    def test_a_native_scaling_is_kept_below_what_is_searched(self, native):
        plan = plan_of(native)
        space = PairSpace(plan, TO)
        own = plan.scalable[0].inv_freq(length=TO)
        nothing = [0.0] * (len(space.coordinates) - 1)
        np.testing.assert_allclose(space.plan_of([*nothing, 1.0]).scalable[0].inv_freq(), own, rtol=5.1e-6)
        assert (space.plan_of(start_of(space)).scalable[0].inv_freq() <= own * (1 + 5.1e-6)).all()


class TestWhichModels:
    """A search says at once what it cannot search, and never writes what no config can say."""

    @pytest.mark.parametrize("family", sorted(set(FAMILIES) - WINDOWED))
    def test_families(self, family):
        plan = read_config(tiny(family).config.to_dict())
        have, lack = spaces(plan, 2 * plan.max_position_embeddings)
        assert set(have) | set(lack) == {"yarn", "pairs"}
        for kind in have.values():
            space = kind(plan, 2 * plan.max_position_embeddings)
            assert "rope_type" in str(rope_parameters(space.plan_of(start_of(space))))

    @pytest.mark.parametrize("family", sorted(WINDOWED))
    def test_families_whose_rotation_never_sees_far(self, family):
        plan = read_config(tiny(family).config.to_dict())
        with pytest.raises(PlanError, match="no rotary layer sees past its window"):
            spaces(plan, 2 * plan.max_position_embeddings)

    def test_several_encodings_that_see_far(self):
        plan = plan_of()
        other = replace(plan.layers[1], rotate=replace(plan.layers[1].rotate, rope_theta=1e4))
        with pytest.raises(PlanError, match="2 rotary encodings see far; one can be searched"):
            spaces(replace(plan, layers=(plan.layers[0], other), one_rotary=False), TO)

    def test_none_that_sees_far(self):
        plan = replace(plan_of(mask=Mask(sliding_window=128)), one_rotary=False)
        with pytest.raises(PlanError, match="no rotary layer sees past its window"):
            spaces(plan, TO)

    def test_latent_attention_has_no_divisors(self):
        plan = read_config(tiny("deepseek_v3").config.to_dict())
        have, lack = spaces(plan, 2 * plan.max_position_embeddings)
        assert list(have) == ["yarn"]
        assert "latent attention" in lack["pairs"]

    def test_native_llama3_has_no_yarn(self):
        native = Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=2048)
        have, lack = spaces(plan_of(native), TO)
        assert list(have) == ["pairs"]
        assert "llama3" in lack["yarn"]


class TestWithFound:
    def test_base_and_scaling_replace_the_models_own(self):
        scaling = LongRoPE(short_factor=(1.0,) * 32, long_factor=(1.0,) * 32, original_max_position_embeddings=TRAINED)
        found = with_found(plan_of(Linear(factor=2.0)), 2e5, scaling)
        assert found.scalable[0].rope_theta == 2e5
        assert found.scalable[0].scaling == scaling
