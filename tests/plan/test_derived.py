"""Numbers that follow from a rotation, against whole distances one by one and against arithmetic of many digits."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch

from theodolite.plan import NTK, DynamicNTK, Linear, Llama3, LongRoPE, PlanError, Rotary, YaRN
from theodolite.plan.derived import FURTHEST, angle_errors, derive, first_negative_mean, to_bfloat16, workable

LLAMA3 = Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def rounded(value: mpmath.mpf, bits: int) -> mpmath.mpf:
    """The nearest number of so many binary digits, ties to even: float32 has 24 and bfloat16 8."""
    with mpmath.workprec(bits):
        return +value


def exact_errors(theta: float, dim: int, length: int, first: int, *, cast: str) -> tuple[float, float]:
    """Errors of cos and sin over all pairs and the positions from `first` on, in 60 digits."""
    largest = [mpmath.mpf(0), mpmath.mpf(0)]
    with mpmath.workdps(60):
        for pair in range(dim // 2):
            frequency = mpmath.mpf(theta) ** (-mpmath.mpf(2 * pair) / dim)
            single = rounded(frequency, 24)
            used = rounded(single, 8) if cast == "inv_freq" else single
            for position in range(first, length):
                given = rounded(mpmath.mpf(position), 8) if cast == "positions" else mpmath.mpf(position)
                angle, exact = rounded(given * used, 24), position * frequency
                for i, turn in enumerate((mpmath.cos, mpmath.sin)):
                    largest[i] = max(largest[i], abs(turn(angle) - turn(exact)))
    return float(largest[0]), float(largest[1])


class TestAngleErrors:
    """A table that is wrong by so much is what people have; the number must be neither better nor worse than it is."""

    @pytest.mark.parametrize(("theta", "dim", "length"), [(1e4, 10, 701), (5e5, 6, 1700), (1e6, 8, 131073)])
    def test_against_sixty_digits(self, theta: float, dim: int, length: int) -> None:
        # The last thousand positions, as many as are taken; of a long text the last thirty are enough for a bound.
        first = max(0, length - 1024)
        errors = angle_errors(Rotary(head_dim=dim, rope_theta=theta).inv_freq(), length)
        assert errors.position == length - 1
        # Of float64: half a unit in the last place of the angle and of its cosine, and of the frequency's.
        tolerance = 4 * length * 2.0**-53
        for cast, found in (
            ("none", errors.float32),
            ("inv_freq", errors.bfloat16_inv_freq),
            ("positions", errors.bfloat16_positions),
        ):
            assert found == pytest.approx(exact_errors(theta, dim, length, first, cast=cast), abs=tolerance), cast

    def test_small_positions_are_whole_in_bfloat16(self) -> None:
        """257 is the first whole number that bfloat16 has not."""
        inv_freq = Rotary(head_dim=8, rope_theta=1e4).inv_freq()
        exact, apart = angle_errors(inv_freq, 257), angle_errors(inv_freq, 258)
        assert exact.bfloat16_positions == exact.float32
        assert apart.bfloat16_positions[1] > 100 * apart.float32[1]

    def test_one_position_has_no_error(self) -> None:
        errors = angle_errors(Rotary(head_dim=8, rope_theta=1e4).inv_freq(), 1)
        assert errors.position == 0
        assert errors.float32 == errors.bfloat16_inv_freq == errors.bfloat16_positions == (0.0, 0.0)

    def test_bfloat16_rounds_as_torch_does(self) -> None:
        values = np.concatenate(
            [np.random.default_rng(0).standard_normal(9999) * 1e5, [0.0, 255.0, 257.0, 259.0, 1e-30, -3e38]]
        ).astype(np.float32)
        assert np.array_equal(to_bfloat16(values), torch.from_numpy(values).bfloat16().float().numpy())


class TestFirstNegative:
    """The distance at which far tokens begin to look less alike than chance."""

    @pytest.mark.parametrize(
        ("theta", "dim"), [(1e4, 128), (1e5, 64), (1e4, 6), (3.0, 4), (5e5, 128)], ids=lambda value: f"{value:g}"
    )
    def test_against_every_distance(self, theta: float, dim: int) -> None:
        inv_freq = Rotary(head_dim=dim, rope_theta=theta).inv_freq()
        found, searched = first_negative_mean(inv_freq)
        expected = None
        for distance in range(60_000):
            if np.cos(distance * inv_freq).sum() < 0:
                expected = distance
                break
        assert found == expected
        assert searched >= 60_000

    def test_none_within_a_million(self) -> None:
        assert first_negative_mean(np.array([1e-7, 1e-9])) == (None, FURTHEST)
        assert first_negative_mean(np.array([])) == (None, 0)

    def test_a_wide_head_is_searched_less_far(self) -> None:
        found, searched = first_negative_mean(np.full(2**15, 1e-9))
        assert found is None
        assert searched == 4096

    def test_a_block_past_the_first_is_counted_from_its_begin(self) -> None:
        # cos turns negative after a quarter of a turn.
        for quarter in (1023.5, 1024.5, 5000.5, 300_000.5):
            found, _ = first_negative_mean(np.array([math.pi / 2 / quarter]))
            assert found == math.ceil(quarter)


class TestDerived:
    """What is printed beside a plan is of the frequencies that the plan has, scaled ones included."""

    def test_plain(self) -> None:
        found = derive(Rotary(head_dim=64, rope_theta=1e5), 8192)
        assert found.shortest_wavelength == pytest.approx(2 * math.pi, rel=1e-14)
        assert found.longest_wavelength == pytest.approx(2 * math.pi * 1e5 ** (62 / 64), rel=1e-14)
        turns = [8192 * 1e5 ** (-i / 32) / (2 * math.pi) for i in range(32)]
        assert found.unturned_pairs == sum(turn < 1 for turn in turns) == 12
        assert (found.pairs, found.effective_factor, found.length) == (32, 1.0, 8192)

    @pytest.mark.parametrize(
        ("scaling", "factor"),
        [
            (Linear(factor=3.0), 3.0),
            (NTK(factor=5.0), 5.0),
            (YaRN(factor=4.0, original_max_position_embeddings=2048), 4.0),
            (LLAMA3, 8.0),
            (DynamicNTK(factor=2.0, original_max_position_embeddings=4096), 3.0),
            (LongRoPE(short_factor=(1.0,) * 64, long_factor=(1.0, *(2.0,) * 62, 7.0),
                      original_max_position_embeddings=4096), 7.0),
        ],
    )  # fmt: skip
    def test_the_slowest_pair_is_slowed_by_the_factor(self, scaling: Linear, factor: float) -> None:
        found = derive(Rotary(head_dim=128, rope_theta=5e5, scaling=scaling), 8192)
        assert found.effective_factor == pytest.approx(factor, rel=1e-12)

    def test_pairs_that_stand_still_are_not_counted_as_turning(self) -> None:
        found = derive(Rotary(head_dim=16, rope_theta=1e4, live_pairs=3), 4096)
        assert found.pairs == 8
        assert found.longest_wavelength == pytest.approx(2 * math.pi * 1e4 ** (4 / 16), rel=1e-14)
        assert found.unturned_pairs == 0
        still = derive(Rotary(head_dim=16, rope_theta=1e4, live_pairs=0), 4096)
        assert (still.shortest_wavelength, still.longest_wavelength, still.errors) == (None, None, None)

    def test_without_a_length(self) -> None:
        found = derive(Rotary(head_dim=16, rope_theta=1e4), None)
        assert (found.length, found.unturned_pairs, found.errors) == (None, None, None)
        # Frequencies that need one are those of the original length.
        dynamic = DynamicNTK(factor=2.0, original_max_position_embeddings=512)
        scaled = derive(Rotary(head_dim=16, rope_theta=1e4, scaling=dynamic), None)
        assert scaled.longest_wavelength == found.longest_wavelength

    def test_absurd_divisors_give_no_nan(self) -> None:
        tiny = LongRoPE(short_factor=(1e-300,) * 4, long_factor=(1e-300,) * 4, original_max_position_embeddings=64)
        found = derive(Rotary(head_dim=8, rope_theta=1e4, scaling=tiny), 4096)
        assert (found.first_negative, found.searched, found.errors) == (None, 0, None)
        assert math.isfinite(derive(Rotary(head_dim=2048, rope_theta=1.7e308), 4096).longest_wavelength or math.nan)

    @pytest.mark.parametrize("length", [0, -1, 2.5])
    def test_a_length_that_is_none(self, length: int) -> None:
        with pytest.raises(PlanError, match="length: got"):
            derive(Rotary(head_dim=8, rope_theta=1e4), length)


class TestManyRotations:
    """Each takes a while to work out, and a file states thousands of them in a few bytes."""

    def test_the_first_are_worked_out(self) -> None:
        usual = [Rotary(head_dim=128, rope_theta=1e4 + i) for i in range(100)]
        assert workable(usual) == usual[:32]
        assert workable(usual[:5]) == usual[:5]
        wide = [Rotary(head_dim=2**16, rope_theta=1e4 + i) for i in range(5)]
        assert workable(wide) == wide[:3]
        assert workable([]) == []
