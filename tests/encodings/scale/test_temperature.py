"""Temperatures that learn nothing, against the printed formulas in double precision and whole numbers."""

from __future__ import annotations

import math

import pytest
import torch

from theodolite import plan
from theodolite.encodings.scale.temperature import LogN, LogScale, PowerScale, Temperature, tokens_seen

# Odd places, the ends of steps, and past what float32 can count (2^24).
POSITIONS = [0, 1, 7, 511, 512, 2047, 8190, 8191, 8192, 16383, 16384, 127_999, 128_000, 1_000_003, 2**24 - 1, 2**24 + 1]
UNIT = 2.0**-24


def steps(m: int, beta: float, length: int, shift: int) -> float:
    return 1 + beta * math.log(1 + (m + shift) // length)


def logarithm(m: int, alpha: float, length: int) -> float:
    return 1 + alpha * math.log(max(1.0, (m + 1) / length))


def log_n(m: int, train_length: int) -> float:
    return max(1.0, math.log(m + 1) / math.log(train_length))


def power(m: int, exponent: float, length: int) -> float:
    return (1 + (m + 1) / length) ** exponent


CASES = {
    "Llama 4": (Temperature(beta=0.1, length=8192, shift=1), lambda m: steps(m, 0.1, 8192, 1)),
    "Ministral 3": (Temperature(beta=0.1, length=16384), lambda m: steps(m, 0.1, 16384, 0)),
    "a step a token": (Temperature(beta=0.37, length=1), lambda m: steps(m, 0.37, 1, 0)),
    "Inkling 2": (LogScale(), lambda m: logarithm(m, 0.1, 128_000)),
    "Inkling 2, short": (LogScale(alpha=0.2, length=7), lambda m: logarithm(m, 0.2, 7)),
    "log n": (LogN(512), lambda m: log_n(m, 512)),
    "log n from 2": (LogN(2), lambda m: log_n(m, 2)),
    "Beam": (PowerScale(), lambda m: power(m, 0.1, 2048)),
}


class TestFormulas:
    """float32 throughout: a quotient, a logarithm, a product and a sum, each within two units."""

    @pytest.mark.parametrize("case", CASES)
    def test_equals_the_printed_one(self, case):
        scale, oracle = CASES[case]
        factors = scale.factors(torch.tensor(POSITIONS))
        assert factors.dtype == torch.float32
        assert factors.shape == (1, 1, len(POSITIONS))
        for m, factor in zip(POSITIONS, factors[0, 0].double().tolist(), strict=True):
            expected = oracle(m)
            # What the logarithm carries in: at most twice the factor, and an argument off by two units.
            assert abs(factor - expected) <= UNIT * (8 * expected + 4)

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.int16, torch.uint16])
    def test_any_integer(self, case, dtype):
        """Small integers must not wrap: 255 + 1 is no 0."""
        scale, _ = CASES[case]
        positions = torch.tensor([0, 3, 100, torch.iinfo(dtype).max if dtype.itemsize < 4 else 255])
        assert torch.equal(scale.factors(positions.to(dtype)), scale.factors(positions))

    @pytest.mark.parametrize("case", CASES)
    def test_never_falls_and_is_finite_at_padding(self, case):
        scale, _ = CASES[case]
        factors = scale.factors(torch.arange(-5, 20_000))[0, 0]
        assert factors.isfinite().all()
        assert (factors.diff() >= 0).all()
        assert torch.equal(factors[:5], factors[5].expand(5))


class TestFirstChange:
    """Llama 4 counts from 1 and Mistral from 0: the first change is at m = 8191, against m = length."""

    def test_llama4(self):
        factors = Temperature(beta=0.1, length=8192, shift=1).factors(torch.tensor([8190, 8191, 16382, 16383]))[0, 0]
        assert factors[0] == 1
        assert factors[1] == factors[2] == pytest.approx(1 + 0.1 * math.log(2), abs=4 * UNIT)
        assert factors[3] == pytest.approx(1 + 0.1 * math.log(3), abs=4 * UNIT)

    def test_mistral(self):
        factors = Temperature(beta=0.1, length=16384).factors(torch.tensor([16383, 16384]))[0, 0]
        assert factors[0] == 1
        assert factors[1] == pytest.approx(1 + 0.1 * math.log(2), abs=4 * UNIT)

    @pytest.mark.parametrize("length", [2**25 + 1, 8192 * 4097 + 1, 2**31 - 1])
    def test_exact_where_float32_cannot_count(self, length):
        """In float32 the last position of a step and the first of the next are the same; whole numbers are not."""
        edges = torch.tensor([2 * length - 2, 2 * length - 1])
        assert edges.float().diff() == 0
        factors = Temperature(beta=1.0, length=length, shift=1).factors(edges)[0, 0]
        assert factors.tolist() == pytest.approx([1 + math.log(2), 1 + math.log(3)], abs=8 * UNIT)

    @pytest.mark.parametrize("length", [512, 3, 128_000])
    def test_log_n_and_log_scale_are_1_for_the_first_tokens(self, length):
        for scale in (LogN(length), LogScale(length=length)):
            factors = scale.factors(torch.tensor([0, length // 2, length - 1, length]))[0, 0]
            assert factors[:3].tolist() == [1, 1, 1]
            assert factors[3] >= 1
            assert factors[3].double() == pytest.approx(1 + scale.alpha * math.log1p(1 / length), rel=4 * UNIT)


class TestIdentities:
    """Different names for one thing, and limits."""

    def test_log_n_is_inklings_with_one_over_ln_l(self):
        positions = torch.tensor(POSITIONS)
        inkling = LogScale(alpha=1 / math.log(512), length=512)
        assert torch.equal(LogN(512).factors(positions), inkling.factors(positions))

    def test_nothing_at_all(self):
        positions = torch.tensor(POSITIONS)
        for scale in (Temperature(beta=0.0, length=3), LogScale(alpha=0.0, length=3), PowerScale(exponent=0.0)):
            assert torch.equal(scale.factors(positions), torch.ones(1, 1, len(POSITIONS)))

    def test_from_a_plan(self):
        said = plan.Temperature(beta=0.1, length=8192, shift=1)
        scale = Temperature.from_plan(said)
        assert scale.plan == said
        assert torch.equal(scale.factors(torch.tensor([8191])), CASES["Llama 4"][0].factors(torch.tensor([8191])))

    def test_tokens_seen(self):
        assert tokens_seen(torch.tensor([-1, 0, 5])).tolist() == [1, 1, 6]
        assert tokens_seen(torch.tensor([-1, 0, 5, 6]), after=6).tolist() == [0, 0, 0, 1]
        assert tokens_seen(torch.tensor([0.5, 2.25], dtype=torch.float64)).tolist() == [1.5, 3.25]


class TestPositionsAndNotCacheLengths:
    """After a cache has dropped tokens, the query still stands where it stands."""

    def test_the_last_token_alone(self):
        scale = Temperature(beta=0.1, length=8, shift=1)
        q, positions = torch.randn(2, 3, 41, 4), torch.arange(41)
        whole = scale(q, positions)
        for token in range(41):
            alone = scale(q[:, :, token : token + 1], positions[token : token + 1])
            assert torch.equal(alone, whole[:, :, token : token + 1])
        # A cache of the last 5 tokens would say position 4, where nothing has changed yet.
        assert scale.factors(torch.tensor([4])) == 1
        assert scale.factors(torch.tensor([40])) > 1.15

    def test_rows_that_stand_elsewhere(self):
        scale = LogN(4)
        positions = torch.tensor([[3], [70_000], [0]])
        batch = scale.factors(positions)
        assert batch.shape == (3, 1, 1)
        for row in range(3):
            assert torch.equal(batch[row : row + 1], scale.factors(positions[row]))


class TestRefusals:
    """What cannot work is said by name."""

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: Temperature(beta=0.1, length=0), "length: got 0; it must be a whole number of at least 1"),
            (lambda: Temperature(beta=0.1, length=8.0), "length: got 8.0; it must be a whole number"),
            (lambda: Temperature(beta=0.1, length=None), "length: got None; it must be given"),
            (lambda: Temperature(beta=0.1, length=8, shift=-1), "shift: got -1; it must be a whole number of at least"),
            (lambda: Temperature(beta=math.nan, length=8), "beta: got nan; it must be a finite number"),
            (lambda: LogScale(alpha="0.1"), "alpha: got '0.1'; it must be a finite number"),
            (lambda: LogScale(length=0), "length: got 0; it must be a whole number of at least 1"),
            (lambda: LogN(1), "train_length: got 1; it must be a whole number of at least 2"),
            (lambda: LogN(None), "train_length: got None; it must be given"),
            (lambda: PowerScale(exponent=math.inf), "exponent: got inf; it must be a finite number"),
        ],
    )
    def test_constructors(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()

    def test_fractions_have_no_steps(self):
        with pytest.raises(ValueError, match=r"positions: got torch.float64; give integers"):
            Temperature(beta=0.1, length=8).factors(torch.arange(4.0, dtype=torch.float64))

    def test_fractions_have_logarithms(self):
        positions = torch.tensor([7.5, 63.25], dtype=torch.float64)
        factors = LogN(4).factors(positions)[0, 0].double()
        for position, factor in zip(positions.tolist(), factors.tolist(), strict=True):
            assert factor == pytest.approx(math.log(position + 1) / math.log(4), rel=8 * UNIT)
