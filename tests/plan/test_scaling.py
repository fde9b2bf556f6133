"""Frequencies of every scaling, against the printed formulas in 50 digits and against published values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests import oracle
from theodolite.plan import NTK, DynamicNTK, Linear, Llama3, LongRoPE, PlanError, Rotary, Scaling, YaRN
from theodolite.plan.huggingface.rope_writing import write_rope_dict
from theodolite.plan.scaling import YaRNByLength, plain_inv_freq

# float64: an exponent rounded once weighs ln(theta) <= 18.5 times 2^-53; a handful of other roundings beside it.
NEAR = 32 * 2.0**-53

thetas = st.floats(1e2, 1e8)
dims = st.integers(2, 128).map(lambda pairs: 2 * pairs)
factors = st.floats(1.0, 256.0)
lengths = st.integers(8, 2**20)


@st.composite
def scalings(draw, factor=factors):
    kind = draw(st.sampled_from([Linear, NTK, DynamicNTK, YaRN, Llama3]))
    value = draw(factor)
    if kind in (Linear, NTK):
        return kind(factor=value)
    length = draw(lengths)
    if kind is DynamicNTK:
        return DynamicNTK(factor=value, original_max_position_embeddings=length)
    slow = draw(st.floats(0.5, 4.0))
    fast = slow + draw(st.floats(0.01, 60.0))
    if kind is Llama3:
        return Llama3(
            factor=value, low_freq_factor=slow, high_freq_factor=fast, original_max_position_embeddings=length
        )
    return YaRN(
        factor=value,
        original_max_position_embeddings=length,
        beta_fast=fast,
        beta_slow=slow,
        truncate=draw(st.booleans()),
        ramp=draw(st.sampled_from(["index", "rotations"])),
    )


class TestPlain:
    """theta^(-2i/dim), in float64: rounded to float32 it is already wrong at 8 K."""

    @settings(max_examples=50, deadline=None)
    @given(rope_theta=thetas, dim=dims)
    def test_against_fifty_digits(self, rope_theta, dim):
        assert oracle.worst_ratio(plain_inv_freq(rope_theta, dim), oracle.plain(rope_theta, dim)) <= NEAR

    def test_powers_of_ten(self):
        assert plain_inv_freq(10000.0, 8) == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=NEAR)
        assert plain_inv_freq(10000.0, 8).dtype == np.float64


class TestWhatEveryScalingKeeps:
    """Slower pairs stay slower, factor 1 is no scaling, and nothing turns faster than it was trained to."""

    @settings(max_examples=200, deadline=None)
    @given(scaling=scalings(), rope_theta=thetas, dim=dims, length=st.integers(1, 2**22))
    def test_frequencies_never_increase(self, scaling, rope_theta, dim, length):
        assume(dim > 2)
        inv_freq = scaling.inv_freq(rope_theta, dim, length=length)
        assert inv_freq.shape == (dim // 2,)
        assert (np.diff(inv_freq) <= 0).all()
        plain = plain_inv_freq(rope_theta, dim)
        assert (inv_freq <= plain * (1 + NEAR)).all()
        assert (inv_freq > 0).all()

    @settings(max_examples=100, deadline=None)
    @given(scaling=scalings(factor=st.just(1.0)), rope_theta=thetas, dim=dims)
    def test_factor_one_is_the_identity(self, scaling, rope_theta, dim):
        length = getattr(scaling, "original_max_position_embeddings", 1)
        plain = plain_inv_freq(rope_theta, dim)
        np.testing.assert_allclose(scaling.inv_freq(rope_theta, dim, length=length), plain, rtol=NEAR)
        assert scaling.attention_factor() == 1.0

    @settings(max_examples=100, deadline=None)
    @given(scaling=scalings(), first=st.integers(1, 2**20), second=st.integers(1, 2**20))
    def test_settled_once_is_settled(self, scaling, first, second):
        settled = scaling.at_length(first)
        assert not settled.depends_on_length
        assert settled.at_length(second) == settled
        assert settled.attention_factor() == scaling.attention_factor()
        np.testing.assert_array_equal(settled.inv_freq(1e4, 64), scaling.inv_freq(1e4, 64, length=first))


class TestNTK:
    """The fastest pair is left alone and the slowest is divided by the factor, exactly."""

    @settings(max_examples=50, deadline=None)
    @given(rope_theta=thetas, dim=dims, factor=factors)
    def test_ends_and_formula(self, rope_theta, dim, factor):
        inv_freq = NTK(factor=factor).inv_freq(rope_theta, dim)
        plain = plain_inv_freq(rope_theta, dim)
        assert inv_freq[0] == plain[0] == 1.0
        assert plain[-1] / inv_freq[-1] == pytest.approx(factor, rel=2 * NEAR)
        assert oracle.worst_ratio(inv_freq, oracle.ntk(rope_theta, dim, factor)) <= NEAR

    def test_is_a_larger_base_and_nothing_else(self):
        ntk = NTK(factor=4)
        np.testing.assert_array_equal(ntk.inv_freq(1e4, 128), plain_inv_freq(ntk.scaled_theta(1e4, 128), 128))

    def test_one_pair_cannot_be_both_ends(self):
        with pytest.raises(PlanError, match=r"rotary_dim: got 2; NTK scaling needs at least two pairs"):
            NTK(factor=2).inv_freq(1e4, 2)


class TestDynamicNTK:
    """A function of the length asked for: peers keep the base of the longest sequence seen so far."""

    SCALING = DynamicNTK(factor=2, original_max_position_embeddings=2048)

    @pytest.mark.parametrize(
        ("length", "base"), [(1, 10000), (2048, 10000), (2049, 10009.9), (4096, 30527.7), (8192, 72195.9)]
    )
    def test_published_bases(self, length, base):
        # The values are printed to one decimal.
        assert self.SCALING.at_length(length).scaled_theta(10000, 128) == pytest.approx(base, abs=0.05)

    @pytest.mark.parametrize(("factor", "ratio"), [(2, 3), (4, 5)])
    def test_multiplier_at_twice_the_length(self, factor, ratio):
        scaling = DynamicNTK(factor=factor, original_max_position_embeddings=2048)
        assert scaling.at_length(4096).factor == pytest.approx(ratio, rel=NEAR)

    def test_factor_one_is_the_ratio_of_lengths(self):
        assert DynamicNTK(factor=1, original_max_position_embeddings=100).at_length(250).factor == 2.5

    def test_short_after_long_is_fresh(self):
        before = self.SCALING.inv_freq(1e4, 128, length=3000)
        self.SCALING.inv_freq(1e4, 128, length=4096)
        np.testing.assert_array_equal(self.SCALING.inv_freq(1e4, 128, length=3000), before)

    def test_without_a_length_it_says_so(self):
        with pytest.raises(PlanError, match="length: got None; the frequencies of 'dynamic' depend on the length"):
            self.SCALING.inv_freq(1e4, 128)


class TestYaRN:
    """Fast pairs kept, slow pairs divided, the ramp and the temperature as the engines have them."""

    @settings(max_examples=60, deadline=None)
    @given(
        rope_theta=st.floats(1e3, 1e8), dim=dims, factor=factors, length=st.integers(256, 2**20), truncate=st.booleans()
    )
    def test_against_fifty_digits(self, rope_theta, dim, factor, length, truncate):
        scaling = YaRN(factor=factor, original_max_position_embeddings=length, truncate=truncate)
        low, high = (dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope_theta)) for turns in (32, 1))
        # Where an end is a whole number to rounding, or the two meet, the formula itself is unstable.
        assume(
            all(abs(end - round(end)) > 1e-9 for end in (low, high)) and high - low > 1e-3 and high > 0 and low < dim
        )
        true = oracle.yarn(rope_theta, dim, factor, length, truncate=truncate)
        # The blend weighs an error of the ramp (a few roundings of its ends over its width) by the factor.
        bound = NEAR + factor * 64 * 2.0**-53 * dim / (high - low)
        assert oracle.worst_ratio(scaling.inv_freq(rope_theta, dim), true) <= bound

    def test_ramp_ends_of_gpt_oss(self):
        scaling = YaRN(factor=32, original_max_position_embeddings=4096, truncate=False)
        assert scaling.ramp_ends(150000, 64) == pytest.approx((8.092779115512402, 17.39802450158856), rel=NEAR)

    def test_truncating_moves_a_frequency_by_three_quarters(self):
        exact, rounded = (
            YaRN(factor=32, original_max_position_embeddings=4096, truncate=truncate).inv_freq(150000, 64)
            for truncate in (False, True)
        )
        assert np.max(np.maximum(exact / rounded, rounded / exact)) == pytest.approx(1.76, abs=0.005)
        assert rounded[17] / exact[17] == pytest.approx(1.76, abs=0.005)

    def test_equal_betas_are_a_step(self):
        scaling = YaRN(factor=32, original_max_position_embeddings=4096, beta_fast=1, beta_slow=1)
        ratio = plain_inv_freq(50000, 64) / scaling.inv_freq(50000, 64)
        assert ratio == pytest.approx([1.0] * 20 + [32.0] * 12, rel=NEAR)

    @pytest.mark.parametrize("ramp", ["index", "rotations"])
    @pytest.mark.parametrize("factor", [4, 32])
    def test_fastest_kept_and_slowest_divided(self, ramp, factor):
        scaling = YaRN(factor=factor, original_max_position_embeddings=4096, ramp=ramp)
        ratio = plain_inv_freq(10000, 128) / scaling.inv_freq(10000, 128)
        assert ratio[0] == 1.0
        assert ratio[-1] == pytest.approx(factor, rel=NEAR)

    @pytest.mark.parametrize("factor", [4, 32])
    def test_frequencies_are_blended_not_wavelengths(self, factor):
        scaling = YaRN(factor=factor, original_max_position_embeddings=4096)
        low, high = scaling.ramp_ends(10000, 128)
        plain = plain_inv_freq(10000, 128)
        for pair in range(64):
            divided = min(max((pair - low) / (high - low), 0.0), 1.0)
            expected = plain[pair] / factor * divided + plain[pair] * (1 - divided)
            assert scaling.inv_freq(10000, 128)[pair] == pytest.approx(expected, rel=NEAR)

    @pytest.mark.parametrize(
        ("rope_theta", "dim", "length", "factor", "ratio"),
        [(1e4, 128, 4096, 16, 3.0), (1e6, 128, 32768, 4, 1.7), (1.5e5, 64, 4096, 32, 4.3)],
    )
    def test_how_far_the_paper_and_its_code_differ(self, rope_theta, dim, length, factor, ratio):
        code, paper = (
            YaRN(factor=factor, original_max_position_embeddings=length, ramp=ramp).inv_freq(rope_theta, dim)
            for ramp in ("index", "rotations")
        )
        assert np.max(code / paper) == pytest.approx(ratio, abs=0.05)

    @settings(max_examples=40, deadline=None)
    @given(rope_theta=thetas, dim=dims, factor=factors, length=lengths)
    def test_linear_in_rotations_is_by_parts(self, rope_theta, dim, factor, length):
        scaling = YaRN(factor=factor, original_max_position_embeddings=length, ramp="rotations")
        true = oracle.by_parts(rope_theta, dim, factor, 1, 32, length)
        # As above: rotations near beta_fast are off by 32 roundings over a width of 31, weighed by the factor.
        assert oracle.worst_ratio(scaling.inv_freq(rope_theta, dim), true) <= NEAR * (1 + 2 * factor)

    @pytest.mark.parametrize("length", [1, 6, 10**9])
    @pytest.mark.parametrize("rope_theta", [2.0, 10.0])
    def test_no_ramp_falls(self, length, rope_theta):
        low, high = YaRN(factor=4, original_max_position_embeddings=length).ramp_ends(rope_theta, 64)
        assert low < high

    def test_all_pairs_fast_are_all_kept(self):
        scaling = YaRN(factor=4, original_max_position_embeddings=10**9)
        np.testing.assert_array_equal(scaling.inv_freq(10.0, 64), plain_inv_freq(10.0, 64))


class TestAttentionFactor:
    """One number, by one rule: reports about it contradict each other, and position 0 cannot show it."""

    @pytest.mark.parametrize(
        ("factor", "m", "squared"),
        [
            (2, 1.069315, 1.143),
            (4, 1.138629, 1.296),
            (8, 1.2079441541679836, 1.459),
            (16, 1.277259, 1.631),
            (32, 1.346574, 1.813),
            (40, 1.368888, 1.874),
        ],
    )
    def test_published_values(self, factor, m, squared):
        given = YaRN(factor=factor, original_max_position_embeddings=4096).attention_factor()
        assert given == pytest.approx(m, abs=5e-7)
        assert given**2 == pytest.approx(squared, abs=6e-4)

    @pytest.mark.parametrize(
        ("settings_", "expected"),
        [
            ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
            ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
            ({"mscale": 1.0, "mscale_all_dim": 0.5}, (1 + 0.1 * math.log(16)) / (1 + 0.05 * math.log(16))),
            ({"mscale": 1.0}, 1 + 0.1 * math.log(16)),
            ({"mscale": 0.5, "mscale_all_dim": 0.0}, 1 + 0.1 * math.log(16)),
            ({"attention_factor_given": 1.5, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.5),
        ],
    )
    def test_which_rule(self, settings_, expected):
        scaling = YaRN(factor=16, original_max_position_embeddings=4096, **settings_)
        assert scaling.attention_factor() == pytest.approx(expected, rel=NEAR)

    @pytest.mark.parametrize(("coefficient", "squared"), [(0.707, 1.589626), (1.0, 1.873854)])
    def test_deepseeks_softmax_correction_is_another_number(self, coefficient, squared):
        scaling = YaRN(factor=40, original_max_position_embeddings=4096, mscale=coefficient, mscale_all_dim=coefficient)
        assert scaling.attention_factor() == 1.0
        assert scaling.magnitude(coefficient) ** 2 == pytest.approx(squared, abs=5e-7)

    @pytest.mark.parametrize("scaling", [Scaling(), Linear(factor=4), NTK(factor=4)])
    def test_the_others_have_none(self, scaling):
        assert scaling.attention_factor() == 1.0


class TestLlama3:
    """By wavelength, with the factor that the config gives: 8 for 3.1, 32 for 3.2."""

    @pytest.mark.parametrize(("dim", "factor", "counts"), [(128, 8, (29, 6, 29)), (64, 32, (15, 3, 14))])
    def test_how_many_pairs_are_kept_blended_and_divided(self, dim, factor, counts):
        scaling = Llama3(factor=factor, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192)
        ratio = plain_inv_freq(5e5, dim) / scaling.inv_freq(5e5, dim)
        kept, divided = int((ratio == 1).sum()), int(np.isclose(ratio, factor, rtol=NEAR, atol=0).sum())
        assert (kept, dim // 2 - kept - divided, divided) == counts
        assert ratio[-1] == pytest.approx(factor, rel=NEAR)

    @settings(max_examples=60, deadline=None)
    @given(rope_theta=thetas, dim=dims, factor=factors, length=lengths)
    def test_is_by_parts_without_a_temperature(self, rope_theta, dim, factor, length):
        llama = Llama3(factor=factor, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=length)
        yarn = YaRN(factor=factor, original_max_position_embeddings=length, beta_fast=4, beta_slow=1, ramp="rotations")
        # A rounding of the blend is one of the plain frequency, of which the result may be only 1/factor.
        plain = plain_inv_freq(rope_theta, dim)
        assert (np.abs(llama.inv_freq(rope_theta, dim) - yarn.inv_freq(rope_theta, dim)) <= NEAR * plain).all()
        assert llama.attention_factor() == 1.0
        true = oracle.by_parts(rope_theta, dim, factor, 1, 4, length)
        assert oracle.worst_ratio(llama.inv_freq(rope_theta, dim), true) <= NEAR * (1 + 2 * factor)


def longrope(short, long, **options):
    return LongRoPE(
        short_factor=short, long_factor=long, original_max_position_embeddings=options.pop("length", 4096), **options
    )


class TestLongRoPE:
    """One divisor per pair, from the list that the sequence's own length chooses."""

    def test_published_attention_factor(self):
        assert longrope((1.0,), (1.0,), factor=32).attention_factor() == pytest.approx(1.190238, abs=5e-7)
        assert longrope((1.0,), (1.0,), factor=1).attention_factor() == 1.0
        assert longrope((1.0,), (1.0,)).attention_factor() == 1.0
        assert longrope((1.0,), (1.0,), factor=32, attention_factor_given=1.1).attention_factor() == 1.1

    @settings(max_examples=40, deadline=None)
    @given(rope_theta=thetas, dim=dims, factor=factors)
    def test_all_ones_is_none_and_all_equal_is_linear(self, rope_theta, dim, factor):
        ones, equal = (longrope((value,) * (dim // 2), (value,) * (dim // 2)) for value in (1.0, factor))
        np.testing.assert_array_equal(ones.inv_freq(rope_theta, dim), plain_inv_freq(rope_theta, dim))
        np.testing.assert_array_equal(equal.inv_freq(rope_theta, dim), Linear(factor=factor).inv_freq(rope_theta, dim))

    @pytest.mark.parametrize(("length", "divisor"), [(1, 2.0), (4096, 2.0), (4097, 3.0), (100_000, 3.0)])
    def test_the_list_is_chosen_by_length(self, length, divisor):
        scaling = longrope((2.0,) * 4, (3.0,) * 4)
        assert scaling.depends_on_length
        expected = plain_inv_freq(1e4, 8) / divisor
        np.testing.assert_array_equal(scaling.inv_freq(1e4, 8, length=length), expected)
        np.testing.assert_array_equal(scaling.at_length(length).inv_freq(1e4, 8), expected)

    def test_settled_is_settled(self):
        settled = longrope((2.0,) * 4, (3.0,) * 4, factor=4).at_length(8000)
        assert not settled.depends_on_length
        assert settled.at_length(10) == settled
        assert settled.attention_factor() == longrope((2.0,) * 4, (3.0,) * 4, factor=4).attention_factor()

    def test_one_divisor_per_pair(self):
        with pytest.raises(PlanError, match=r"short_factor: got '4 numbers'; one per pair is needed: 8"):
            longrope((2.0,) * 4, (3.0,) * 4).inv_freq(1e4, 16, length=1)


class TestYaRNByLength:
    """A sequence within the trained length is not scaled at all; a longer one is YaRN's, attention factor included."""

    YARN = YaRN(factor=4, original_max_position_embeddings=4096, beta_fast=20.0, attention_factor_given=1.3)
    SCALING = YaRNByLength(yarn=YARN)

    @pytest.mark.parametrize("length", [1, 4095, 4096])
    def test_up_to_the_original_length(self, length):
        np.testing.assert_array_equal(self.SCALING.inv_freq(1e4, 64, length=length), plain_inv_freq(1e4, 64))
        settled = self.SCALING.at_length(length)
        assert settled == Scaling()
        assert settled.attention_factor() == 1.0
        assert Rotary(head_dim=64, rope_theta=1e4, scaling=self.SCALING).at_length(length) == Rotary(
            head_dim=64, rope_theta=1e4
        )

    @pytest.mark.parametrize("length", [4097, 2**20])
    def test_past_it(self, length):
        inv_freq = self.SCALING.inv_freq(1e4, 64, length=length)
        np.testing.assert_array_equal(inv_freq, self.YARN.inv_freq(1e4, 64))
        assert not np.array_equal(inv_freq, plain_inv_freq(1e4, 64))
        settled = self.SCALING.at_length(length)
        assert settled == self.YARN
        assert not settled.depends_on_length
        assert settled.attention_factor() == self.SCALING.attention_factor() == 1.3

    def test_without_a_length_it_says_so(self):
        assert self.SCALING.depends_on_length
        for ask in (lambda: self.SCALING.inv_freq(1e4, 64), lambda: self.SCALING.at_length(None)):
            with pytest.raises(PlanError, match="length: got None; the frequencies of 'yarn-by-length' depend on"):
                ask()
        with pytest.raises(PlanError, match="length: got 0"):
            self.SCALING.at_length(0)

    def test_a_config_has_no_words_for_it(self):
        plan = Rotary(head_dim=64, rope_theta=1e4, scaling=self.SCALING)
        with pytest.raises(PlanError, match="scaling: got 'yarn-by-length'; a config has no name for it"):
            write_rope_dict(plan)
        assert write_rope_dict(plan.at_length(5000))["rope_type"] == "yarn"

    def test_a_factor_on_all_scores_is_no_choice_by_length(self):
        latent = YaRN(factor=40, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)
        with pytest.raises(PlanError, match=r"mscale_all_dim: got 1\.0; it multiplies the scores of all sequences"):
            YaRNByLength(yarn=latent)


L = {"original_max_position_embeddings": 4096}


class TestRefusals:
    """A setting out of range is an error that names it, never a warning."""

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: Linear(factor=0.5), "factor: got 0.5; it must be at least 1: a factor divides positions"),
            (lambda: NTK(factor=0), "factor: got 0; it must be a finite number above 0"),
            (lambda: Linear(factor=float("nan")), "factor: got nan"),
            (lambda: Linear(factor=float("inf")), "factor: got inf"),
            (lambda: Linear(factor=True), "factor: got True"),
            (lambda: Linear(factor=None), "factor: got None; it must be given"),
            (
                lambda: YaRN(factor=2, original_max_position_embeddings=None),
                "original_max_position_embeddings: got None",
            ),
            (lambda: Linear(factor="4"), "factor: got '4'"),
            (
                lambda: DynamicNTK(factor=2, original_max_position_embeddings=0),
                "original_max_position_embeddings: got 0",
            ),
            (
                lambda: DynamicNTK(factor=2, original_max_position_embeddings=2.5),
                "original_max_position_embeddings: got 2.5",
            ),
            (lambda: YaRN(factor=2, beta_fast=1, beta_slow=32, **L), "beta_fast: got 1; it must be at least beta_slow"),
            (lambda: YaRN(factor=2, beta_slow=0, **L), "beta_slow: got 0"),
            (lambda: YaRN(factor=2, ramp="wavelength", **L), "ramp: got 'wavelength'; allowed: 'index', 'rotations'"),
            (lambda: YaRN(factor=2, attention_factor_given=0, **L), "attention_factor: got 0"),
            *[
                (lambda value=value: YaRN(factor=2, truncate=value, **L), "truncate: got .*; it must be true or false")
                for value in ("false", 0, 1, None)
            ],
            *[
                (lambda name=name, value=value: YaRN(factor=2, **{name: value}, **L), f"{name}: got .* from 0 to 100")
                for name in ("mscale", "mscale_all_dim")
                for value in (-1, float("nan"), 1e300, "1", True)
            ],
            (lambda: Linear(factor=1e300), "factor: got 1e[+]300; it must be at most 1,099,511,627,776: no sequence"),
            (lambda: Linear(factor=10**400), "factor: got 1000.*; it must be a finite number above 0"),
            (
                lambda: YaRN(factor=2.0**30, original_max_position_embeddings=8192),
                r"factor: got 1073741824.0; times original_max_position_embeddings \(8192\) it must be at most",
            ),
            (
                lambda: NTK(factor=1e6).scaled_theta(1e300, 4),
                "factor: got 1000000.0; the base 1e[+]300 times its power",
            ),
            (
                lambda: Llama3(factor=2, low_freq_factor=4, high_freq_factor=1, **L),
                "high_freq_factor: got 1; it must be above low_freq_factor",
            ),
            (lambda: YaRNByLength(yarn=4), "yarn: got 4; it must be a YaRN, for example YaRN"),
            (lambda: longrope((1.0,), (1.0, 2.0)), "long_factor: got 2; it must be as long as short_factor"),
            (lambda: longrope((0.0,), (1.0,)), "short_factor: got 0.0"),
            (lambda: longrope((1.0,), (1.0,), length=1), "original_max_position_embeddings: got 1; .* at least 2"),
        ],
    )
    def test_names_the_field(self, make, text):
        with pytest.raises(PlanError, match=text):
            make()
