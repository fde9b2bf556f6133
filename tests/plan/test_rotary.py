"""Which channels turn, in what pairs, and how fast."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from theodolite.plan import NTK, DynamicNTK, LongRoPE, PlanError, Rotary, YaRN
from theodolite.plan.scaling import plain_inv_freq

NEAR = 32 * 2.0**-53


class TestPartialAndProportional:
    """Two things that share a config key: a full spectrum in fewer channels, or a spectrum cut short."""

    def test_partial_squeezes_the_spectrum(self):
        part = Rotary(head_dim=256, rope_theta=1e6, rotary_dim=128)
        np.testing.assert_array_equal(part.inv_freq(), plain_inv_freq(1e6, 128))
        assert part.inv_freq()[1] == pytest.approx(0.805842, abs=5e-7)

    def test_proportional_cuts_it(self):
        gemma = Rotary(head_dim=512, rope_theta=1e6, live_pairs=64)
        plain = plain_inv_freq(1e6, 512)
        np.testing.assert_array_equal(gemma.inv_freq()[:64], plain[:64])
        assert (gemma.inv_freq()[64:] == 0).all()
        assert gemma.inv_freq()[1] == pytest.approx(0.947464, abs=5e-7)

    @pytest.mark.parametrize(("head_dim", "live", "longest"), [(512, 64, 188), (128, 32, 5063)])
    def test_longest_live_wavelength(self, head_dim, live, longest):
        wavelengths = Rotary(head_dim=head_dim, rope_theta=1e6, live_pairs=live).wavelengths()
        assert wavelengths[live - 1] == pytest.approx(longest, abs=0.5)
        assert np.isinf(wavelengths[live:]).all()

    @pytest.mark.parametrize(("rope_theta", "longest"), [(1e4, 54_410), (5e5, 2.56e6), (1e6, 5.06e6)])
    def test_longest_wavelength_of_plain_rope(self, rope_theta, longest):
        assert Rotary(head_dim=128, rope_theta=rope_theta).wavelengths()[-1] == pytest.approx(longest, rel=2e-3)

    @given(pairs=st.integers(2, 64), live=st.integers(0, 64))
    def test_where_they_agree(self, pairs, live):
        live = min(live, pairs)
        whole = Rotary(head_dim=2 * pairs, rope_theta=1e4)
        cut = Rotary(head_dim=2 * pairs, rope_theta=1e4, live_pairs=live)
        assert (cut.inv_freq() == whole.inv_freq()).all() == (live == pairs)
        if 1 < live < pairs:
            part = Rotary(head_dim=2 * pairs, rope_theta=1e4, rotary_dim=2 * live)
            assert (part.inv_freq() != cut.inv_freq()[:live]).any()

    def test_all_channels_by_default(self):
        assert Rotary(head_dim=64, rope_theta=1e4).rotary_dim == 64


class TestAxes:
    """The order of sections is silent when it is wrong: text is right, images loop."""

    def test_blocks(self):
        axes = Rotary(head_dim=128, rope_theta=1e6, mrope_section=(16, 24, 24)).axis_of_pairs()
        assert axes == (0,) * 16 + (1,) * 24 + (2,) * 24

    def test_alternating(self):
        axes = Rotary(head_dim=128, rope_theta=5e6, mrope_section=(24, 20, 20), mrope_interleaved=True).axis_of_pairs()
        assert [axes.count(axis) for axis in range(3)] == [24, 20, 20]
        assert axes == tuple(pair % 3 if pair < 60 else 0 for pair in range(64))

    def test_alternating_in_a_partial_head(self):
        axes = Rotary(
            head_dim=256, rope_theta=1e7, rotary_dim=64, mrope_section=(11, 11, 10), mrope_interleaved=True
        ).axis_of_pairs()
        assert [axes.count(axis) for axis in range(3)] == [11, 11, 10]
        assert [pair for pair, axis in enumerate(axes) if axis == 1] == list(range(1, 32, 3))

    def test_one_axis_without_sections(self):
        assert Rotary(head_dim=8, rope_theta=1e4).axis_of_pairs() == (0,) * 4


class TestLength:
    """A settled encoding is another encoding; the unsettled one refuses to give frequencies."""

    UNSETTLED = Rotary(head_dim=64, rope_theta=1e4, scaling=DynamicNTK(factor=2, original_max_position_embeddings=32))

    def test_settles(self):
        assert self.UNSETTLED.depends_on_length
        settled = self.UNSETTLED.at_length(64)
        assert not settled.depends_on_length
        assert settled.at_length(9) == settled
        np.testing.assert_array_equal(settled.inv_freq(), self.UNSETTLED.inv_freq(length=64))

    def test_refuses(self):
        with pytest.raises(PlanError, match="length: got None; the frequencies of 'dynamic'"):
            self.UNSETTLED.inv_freq()

    def test_the_rest_of_the_plan_stays(self):
        part = Rotary(head_dim=64, rope_theta=1e4, rotary_dim=32, interleaved=True, scaling=self.UNSETTLED.scaling)
        settled = part.at_length(64)
        assert (settled.rope_theta, settled.rotary_dim, settled.interleaved) == (1e4, 32, True)

    def test_attention_factor_is_the_scalings(self):
        scaling = YaRN(factor=4, original_max_position_embeddings=64)
        assert Rotary(head_dim=64, rope_theta=1e4, scaling=scaling).attention_factor() == scaling.attention_factor()


class TestData:
    """Plans are compared, hashed and used as keys."""

    def test_equal_plans_are_one_key(self):
        one, other = (Rotary(head_dim=64, rope_theta=1e4, mrope_section=[8, 12, 12]) for _ in range(2))
        assert one == other
        assert len({one, other}) == 1

    def test_frozen(self):
        with pytest.raises(AttributeError):
            Rotary(head_dim=64, rope_theta=1e4).rope_theta = 5e5


LONG_TINY = LongRoPE(short_factor=(1.0,) * 32, long_factor=(1e-320,) * 32, original_max_position_embeddings=64)


class TestRefusals:
    """A missing base is the most common silent fault: there is no default to fall back on."""

    def test_no_base(self):
        with pytest.raises(TypeError, match="rope_theta"):
            Rotary(head_dim=64)

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"rope_theta": 0}, "rope_theta: got 0; it must be a finite number above 0"),
            ({"rope_theta": 1.0}, "rope_theta: got 1.0; the base must be above 1"),
            ({"rope_theta": None}, "rope_theta: got None"),
            ({"head_dim": 0}, "head_dim: got 0"),
            ({"head_dim": 63}, "rotary_dim: got 63; it must be even and at most head_dim"),
            ({"rotary_dim": 66}, r"rotary_dim: got 66; it must be even and at most head_dim \(64\)"),
            ({"rotary_dim": 31}, "rotary_dim: got 31"),
            ({"rotary_dim": -2}, "rotary_dim: got -2"),
            ({"live_pairs": 33}, "live_pairs: got 33; between 0 and 32"),
            ({"mrope_section": (8, 12)}, r"mrope_section: got \[8, 12\]; its sum must be the number of pairs \(32\)"),
            (
                {"mrope_section": (2, 15, 15), "mrope_interleaved": True},
                r"mrope_section: got \[2, 15, 15\]; alternating axes have no room for it",
            ),
            (
                {"scaling": LongRoPE(short_factor=(1.0,), long_factor=(2.0,), original_max_position_embeddings=8)},
                "short_factor: got '1 numbers'; one per pair is needed: 32",
            ),
            ({"scaling": NTK(factor=1e9), "rope_theta": 1e305}, "factor: got 1000000000.0; the base"),
            ({"scaling": LONG_TINY}, "scaling: got LongRoPE.*; its frequencies must be finite and not negative"),
            (
                {"scaling": YaRN(factor=2, original_max_position_embeddings=64, attention_factor_given=1e9)},
                "attention_factor: got 1000000000.0; it must be above 0 and at most 255",
            ),
            ({"mrope_section": (16.0, 16)}, "mrope_section: got 16.0; it must be a whole number"),
            ({"head_dim": 2**40}, "head_dim: got 1099511627776; it must be a whole number of at most 65,536"),
        ],
    )
    def test_names_the_field(self, options, text):
        with pytest.raises(PlanError, match=text):
            Rotary(**{"head_dim": 64, "rope_theta": 1e4, **options})
