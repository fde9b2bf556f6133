"""Which axis each pair follows, and how fast: every family's printed formula, any number of axes, any scaling."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from mpmath import mp, mpf

from tests import oracle
from theodolite.plan import NTK, DynamicNTK, Linear, LongRoPE, PlanError, Rotary, Scaling, YaRN
from theodolite.plan.axial import Axial

# A power in float64 and a handful of products: a few units of 2**-53 of the frequency.
RELATIVE = 8 * 2.0**-53


def own(rope_theta: float, *axes: int) -> tuple[list[mpf], list[int]]:
    """Each axis has theta^(-2i/dim) over its own channels, one axis behind the other."""
    spectra = [oracle.plain(rope_theta, dim) for dim in axes]
    return [f for spectrum in spectra for f in spectrum], [
        axis for axis, spectrum in enumerate(spectra) for _ in spectrum
    ]


def turns(head_dim: int, rope_theta: float) -> tuple[list[mpf], list[int]]:
    """2 pi / theta^(4i/d) for i < d/4, for rows and again for columns."""
    with mp.workdps(oracle.DIGITS):
        quarter = [2 * mp.pi / mp.power(mpf(rope_theta), mpf(4 * i) / head_dim) for i in range(head_dim // 4)]
    return quarter * 2, [0] * len(quarter) + [1] * len(quarter)


def dealt(head_dim: int, rope_theta: float) -> tuple[list[mpf], list[int]]:
    """Rows have theta^(-4i/d), columns theta^(-(4i+2)/d)."""
    whole = oracle.plain(rope_theta, head_dim)
    return whole[0::2] + whole[1::2], [0] * (head_dim // 4) + [1] * (head_dim // 4)


FORMULAS = {
    "qwen": (Axial.qwen_vl(80), own(1e4, 40, 40)),
    "pixtral": (Axial.pixtral(64), dealt(64, 1e4)),
    "gemma 4": (Axial.gemma4(64), own(100, 32, 32)),
    "llama 4": (Axial.llama4(88), own(1e4, 44, 44)),
    "dinov3": (Axial.dinov3(64), turns(64, 100)),
    "dinov3, a head where transformers has a pair too many": (Axial.dinov3(196), turns(196, 100)),
    "eva02": (Axial.eva02(64), own(1e4, 32, 32)),
    "rope-vit": (Axial.rope_vit(64), own(100, 32, 32)),
    "flux": (Axial(head_dim=128, rope_theta=1e4, axes_dim=(16, 56, 56), interleaved=True), own(1e4, 16, 56, 56)),
    "minimax m3": (Axial(head_dim=80, rope_theta=1e4, axes_dim=(26, 26, 26)), own(1e4, 26, 26, 26)),
    "one axis": (Axial(head_dim=64, rope_theta=5e5, axes_dim=(64,)), own(5e5, 64)),
}


class TestFormulas:
    """Frequencies and axes of each family, in the order of its pairs, against 50 digits."""

    @pytest.mark.parametrize("family", FORMULAS)
    def test_inv_freq_and_axes(self, family):
        axial, (frequencies, axes) = FORMULAS[family]
        assert oracle.worst_ratio(axial.inv_freq().tolist(), frequencies) <= RELATIVE
        assert axial.inv_freq().dtype == np.float64
        assert list(axial.axis_of_pairs()) == axes
        assert axial.rotary_dim == 2 * len(axes)

    @pytest.mark.parametrize("family", FORMULAS)
    def test_alternating_is_another_order_of_the_same(self, family):
        axial, _ = FORMULAS[family]
        if len(set(axial.axes_dim)) > 1 or axial.halves_per_axis:
            with pytest.raises(PlanError):
                dataclasses.replace(axial, alternating=True)
            return
        other, axes = dataclasses.replace(axial, alternating=True), len(axial.axes_dim)
        assert other.axis_of_pairs() == tuple(pair % axes for pair in range(axial.rotary_dim // 2))
        for axis in range(axes):
            alone = axial.inv_freq()[np.asarray(axial.axis_of_pairs()) == axis]
            assert np.array_equal(other.inv_freq()[axis::axes], alone)

    def test_one_spectrum_dealt_out_by_turns_is_that_of_one_axis(self):
        axial = Axial(head_dim=64, rope_theta=1e4, shared_spectrum=True, alternating=True)
        assert np.array_equal(axial.inv_freq(), Rotary(head_dim=64, rope_theta=1e4).inv_freq())

    @pytest.mark.parametrize(
        ("axial", "layout"),
        [
            (Axial.qwen_vl(64), (False, False)),
            (Axial.pixtral(64), (False, False)),
            (Axial.gemma4(64), (False, True)),
            (Axial.llama4(64), (True, False)),
            (Axial.dinov3(64), (False, False)),
            (Axial.eva02(64), (True, False)),
            (Axial.rope_vit(64), (True, False)),
        ],
    )
    def test_where_the_pairs_stand(self, axial, layout):
        assert (axial.interleaved, axial.halves_per_axis) == layout


class TestPeriods:
    """A base may leave most pairs all but still: what they do is said in units of position."""

    def test_closed_form(self):
        """DINOv3: base^(4i/d), for coordinates in turns."""
        expected = [100 ** (4 * pair / 64) for pair in range(16)] * 2
        assert np.allclose(Axial.dinov3(64).periods(), expected, rtol=1e-14, atol=0)
        assert np.allclose(Axial.qwen_vl(8).periods(), [2 * math.pi, 2 * math.pi * 100] * 2, rtol=1e-14, atol=0)

    def test_most_of_dinov3_s_pairs_make_less_than_one_turn(self):
        extent = 2
        assert (Axial.dinov3(64).periods() > extent).sum() == 2 * 13

    @pytest.mark.parametrize("head_dim", [8, 64, 100])
    def test_log_spaced_between_two(self, head_dim):
        """min (max/min)^t with t from 0 to 1 in equal steps, as the authors' code and timm have it."""
        axial, pairs = Axial.dinov3(head_dim, min_period=0.4, max_period=25), head_dim // 4
        expected = [0.4 * (25 / 0.4) ** (pair / (pairs - 1)) for pair in range(pairs)] * 2
        assert np.allclose(axial.periods(), expected, rtol=1e-14, atol=0)
        assert axial.axis_of_pairs() == (0,) * pairs + (1,) * pairs


class TestScaling:
    """Each axis may be stretched by itself; a scaling sees the channels of its axis."""

    def test_ntk_changes_the_base_of_each_axis(self):
        """theta * factor^(m/(m-2)), m the channels of the axis: its slowest pair is divided by just its factor."""
        axial = Axial(head_dim=64, rope_theta=1e4, scaling=(NTK(factor=2), NTK(factor=6)))
        frequencies = oracle.ntk(1e4, 32, 2) + oracle.ntk(1e4, 32, 6)
        assert oracle.worst_ratio(axial.inv_freq().tolist(), frequencies) <= 4 * RELATIVE
        ratio = Axial.qwen_vl(64).inv_freq() / axial.inv_freq()
        assert np.allclose(ratio[[0, 15, 16, 31]], [1, 2, 1, 6], rtol=1e-13, atol=0)

    def test_one_for_all(self):
        axial = Axial(head_dim=64, rope_theta=1e4, scaling=Linear(factor=3))
        assert np.array_equal(axial.inv_freq(), Axial.qwen_vl(64).inv_freq() / 3)

    def test_one_axis_alone(self):
        axial = Axial(
            head_dim=128, rope_theta=1e4, axes_dim=(16, 56, 56), scaling=(Scaling(), Linear(factor=2), Scaling())
        )
        plain = Axial(head_dim=128, rope_theta=1e4, axes_dim=(16, 56, 56)).inv_freq()
        divided = np.asarray(axial.axis_of_pairs()) == 1
        assert np.array_equal(axial.inv_freq(), np.where(divided, plain / 2, plain))

    def test_a_shared_spectrum_is_stretched_as_a_whole(self):
        axial = Axial(head_dim=64, rope_theta=1e4, shared_spectrum=True, scaling=(Scaling(), NTK(factor=4)))
        expected = oracle.plain(1e4, 64)[0::2] + oracle.ntk(1e4, 64, 4)[1::2]
        assert oracle.worst_ratio(axial.inv_freq().tolist(), expected) <= 4 * RELATIVE

    def test_yarn_by_the_extent_of_the_axis_in_patches(self):
        yarn = YaRN(factor=4, original_max_position_embeddings=64)
        axial = Axial(head_dim=64, rope_theta=1e4, scaling=yarn)
        alone = Rotary(head_dim=32, rope_theta=1e4, scaling=yarn)
        assert np.array_equal(axial.inv_freq(), np.tile(alone.inv_freq(), 2))
        assert axial.attention_factor() == alone.attention_factor() == 0.1 * math.log(4) + 1

    def test_with_a_multiplier(self):
        axial = dataclasses.replace(Axial.dinov3(64), scaling=Linear(factor=2))
        assert np.array_equal(axial.inv_freq(), Axial.dinov3(64).inv_freq() / 2)

    def test_settled_lists(self):
        factors = tuple(1 + pair / 8 for pair in range(16))
        longrope = LongRoPE(short_factor=factors, long_factor=factors, original_max_position_embeddings=64)
        axial = Axial(head_dim=64, rope_theta=1e4, scaling=(Scaling(), longrope))
        assert np.array_equal(axial.inv_freq()[16:], Axial.qwen_vl(64).inv_freq()[16:] / factors)


class TestValues:
    """The same encoding is the same value, however it was said."""

    def test_equal_and_hashable(self):
        yarn = YaRN(factor=4, original_max_position_embeddings=64)
        one = Axial(head_dim=64, rope_theta=1e4, scaling=yarn)
        other = Axial(head_dim=64, rope_theta=1e4, axes_dim=[32, 32], scaling=[yarn, yarn])
        assert one == other
        assert hash(one) == hash(other)
        assert one != Axial.qwen_vl(64)
        assert Axial.qwen_vl(64) == Axial(head_dim=64, rope_theta=1e4)
        with pytest.raises(dataclasses.FrozenInstanceError):
            one.rope_theta = 5.0


class TestRefusals:
    """What cannot work is refused, in words that name the argument."""

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"head_dim": None}, "head_dim: got None; it must be given"),
            ({"head_dim": 64.0}, r"head_dim: got 64\.0; it must be a whole number of at least 1"),
            ({"head_dim": 66}, "head_dim: got 66; for two halves it must be a multiple of 4: say axes_dim"),
            ({"rope_theta": None}, "rope_theta: got None; it must be given"),
            ({"rope_theta": 1}, "rope_theta: got 1; the base must be above 1"),
            ({"rope_theta": math.inf}, "rope_theta: got inf; it must be a finite number above 0"),
            ({"multiplier": None}, "multiplier: got None; it must be given"),
            ({"multiplier": 1e7}, r"multiplier: got 10000000\.0; it must be at most 1e\+06"),
            ({"multiplier": -1}, "multiplier: got -1; it must be a finite number above 0"),
            ({"interleaved": 1}, "interleaved: got 1; it must be true or false"),
            ({"axes_dim": 32}, "axes_dim: got 32; it must be a list, one number of channels for each axis"),
            ({"axes_dim": (32, 0)}, "axes_dim: got 0; it must be a whole number of at least 2"),
            ({"axes_dim": (32, None)}, "axes_dim: got None; it must be given"),
            ({"axes_dim": (31, 33)}, r"axes_dim: got \[31, 33\]; each must be even"),
            ({"axes_dim": (32, 34)}, r"axes_dim: got \[32, 34\]; their sum must be at most head_dim \(64\)"),
            ({"scaling": "ntk"}, "scaling: got 'ntk'; it must be a Scaling"),
            ({"scaling": (NTK(factor=2),)}, "scaling: got .*; one for each of the 2 axes is needed"),
            ({"scaling": (NTK(factor=2), None)}, "scaling: got None; it must be a Scaling"),
            (
                {"scaling": DynamicNTK(factor=2, original_max_position_embeddings=64)},
                "scaling: got DynamicNTK.*; its frequencies depend on a length: settle it with scaling.at_length",
            ),
            (
                {"scaling": YaRN(factor=2, original_max_position_embeddings=64), "multiplier": 2 * math.pi},
                "scaling: got YaRN.*; it counts turns over whole positions, .*: give Linear or NTK",
            ),
            (
                {"scaling": (Scaling(), YaRN(factor=2, original_max_position_embeddings=64))},
                r"attention_factor: got \[1.0, 1.06.*\]; it must be the same for all axes",
            ),
            ({"scaling": NTK(factor=2), "axes_dim": (62, 2)}, "rotary_dim: got 2; NTK scaling needs"),
            ({"axes_dim": (16, 48), "shared_spectrum": True}, "shared_spectrum: got True; the axes must have equally"),
            ({"axes_dim": (16, 48), "alternating": True}, r"alternating: .*equally many channels, not \[16, 48\]"),
            ({"halves_per_axis": True, "interleaved": True}, "halves_per_axis: got True; interleaved says otherwise"),
            ({"halves_per_axis": True, "alternating": True}, "halves_per_axis: got True; alternating says otherwise"),
        ],
    )  # fmt: skip
    def test_text(self, options, text):
        with pytest.raises(PlanError, match=text):
            Axial(**{"head_dim": 64, "rope_theta": 1e4, **options})

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"rope_theta": 100, "min_period": 1, "max_period": 2}, "rope_theta: got 100; min_period and max_period"),
            ({"min_period": 1}, "min_period, max_period: got .*; both must be given, or rope_theta"),
            ({"max_period": 1}, "min_period, max_period: got .*; both must be given, or rope_theta"),
            ({"min_period": 0, "max_period": 2}, "min_period: got 0; it must be a finite number above 0"),
            ({"min_period": 2, "max_period": 2}, r"max_period: got 2; it must be above min_period \(2\)"),
            ({"min_period": 1e-200, "max_period": 1e200}, r"max_period: got 1e\+200; .* at most 1e\+100 times as long"),
        ],
    )  # fmt: skip
    def test_text_of_dinov3(self, options, text):
        with pytest.raises(PlanError, match=text):
            Axial.dinov3(64, **options)

    def test_one_pair_cannot_be_spaced(self):
        with pytest.raises(PlanError, match="head_dim: got 4; it must be a whole number of at least 8"):
            Axial.dinov3(4, min_period=1, max_period=2)
