"""KERPLE: two kernels of the distance, with parameters that stay in their range."""

from __future__ import annotations

import math

import pytest
import torch

from theodolite.encodings.bias.alibi import ALiBi
from theodolite.encodings.bias.kerple import Kerple


def with_parameters(kind, r1, r2):
    bias = Kerple(len(r1), kind=kind).double()
    with torch.no_grad():
        bias.r1.copy_(torch.tensor(r1, dtype=torch.float64))
        bias.r2.copy_(torch.tensor(r2, dtype=torch.float64))
    return bias


def oracle(kind, r1, r2, q_positions, k_positions):
    """(H, Sq, Sk), by loops."""

    def value(a, b, r):
        return -a * math.log(1 + b * r) if kind == "log" else -a * r**b

    return torch.tensor(
        [[[value(a, b, abs(m - n)) for n in k_positions] for m in q_positions] for a, b in zip(r1, r2, strict=True)],
        dtype=torch.float64,
    )


class TestKernels:
    """The printed formulas."""

    @pytest.mark.parametrize("kind", ["log", "power"])
    def test_against_loops(self, kind):
        r1, r2 = [0.3, 1.7, 0.01], [0.2, 1.1, 1.9]
        q, k = [7, 0, 5000], [0, 9, 7, 4999, 5003]
        dense = with_parameters(kind, r1, r2)(torch.tensor(q), torch.tensor(k))[0]
        torch.testing.assert_close(dense, oracle(kind, r1, r2, q, k), rtol=1e-14, atol=1e-14)

    @pytest.mark.parametrize("kind", ["log", "power"])
    def test_float32_to_a_few_roundings(self, kind):
        bias = with_parameters(kind, [0.3, 1.7], [0.2, 1.1]).float()
        positions = torch.arange(0, 20000, 997)
        expected = oracle(kind, bias.r1.tolist(), bias.r2.tolist(), positions.tolist(), positions.tolist())
        # A product, a logarithm or power (exp of a logarithm up to 1.1 ln 20000 = 11) and a product.
        torch.testing.assert_close(bias(positions, positions)[0].double(), expected, rtol=16 * 2.0**-24, atol=0)

    @pytest.mark.parametrize("kind", ["log", "power"])
    def test_both_directions_and_any_start(self, kind):
        bias = Kerple(4, kind=kind)
        positions = torch.arange(9)
        dense = bias(positions, positions)
        # A power in a vector of the processor and one alone may differ by two roundings.
        torch.testing.assert_close(dense, dense.transpose(2, 3), rtol=2.0**-21, atol=0)
        assert torch.equal(bias(positions + 1000, positions + 1000), dense)
        assert (dense.diagonal(dim1=2, dim2=3) == 0).all()

    def test_power_one_is_alibi_with_slopes_that_learn(self):
        alibi = ALiBi(8, symmetric=True)
        kerple = Kerple(8, kind="power")
        with torch.no_grad():
            kerple.r1.copy_(alibi.slopes())
            kerple.r2.fill_(1.0)
        # The least slope, 1/256, is below the 0.01 that KERPLE holds to; all others are the same numbers.
        positions = torch.arange(5, 60)
        ours, theirs = kerple(positions, positions), alibi(positions, positions)
        torch.testing.assert_close(ours[:, :6], theirs[:, :6], rtol=2.0**-22, atol=0)
        assert torch.equal(kerple.r1 < 0.01, torch.tensor([False] * 6 + [True] * 2))
        torch.testing.assert_close(ours[:, 7], 0.01 / kerple.r1[7] * theirs[:, 7], rtol=2.0**-21, atol=0)

    @pytest.mark.parametrize("kind", ["log", "power"])
    def test_fractions(self, kind):
        bias = with_parameters(kind, [0.5], [0.7])
        dense = bias(torch.tensor([2.5], dtype=torch.float64), torch.tensor([1.0, 0.25], dtype=torch.float64))
        torch.testing.assert_close(dense[0], oracle(kind, [0.5], [0.7], [2.5], [1.0, 0.25]), rtol=1e-14, atol=0)


class TestRange:
    """A step of the optimizer may leave the range; the kernel must not."""

    @pytest.mark.parametrize(("kind", "most"), [("log", 5.0), ("power", 2.0)])
    def test_read_at_the_bound(self, kind, most):
        inside, outside = [0.01, 5.0, 0.4], [-3.0, 5.0, 0.4]
        positions = torch.arange(6)
        held = with_parameters(kind, inside, [0.01, most, 1.0])
        free = with_parameters(kind, outside, [-1.0, 5.0, 1.0])
        assert torch.equal(free(positions, positions), held(positions, positions))
        assert free.r1.tolist() == outside

    def test_the_gradient_is_that_at_the_bound(self):
        positions = torch.arange(6)
        grads = []
        for r1, r2 in ((-3.0, 7.0), (0.01, 2.0)):
            bias = with_parameters("power", [r1], [r2])
            bias(positions, positions).sum().backward()
            grads.append((bias.r1.grad, bias.r2.grad))
        assert grads[0] == grads[1]
        assert grads[0][0] < 0

    def test_clamping_after_a_step_as_the_authors_do(self):
        bias = with_parameters("power", [-3.0, 0.5], [7.0, 0.5])
        bias.clamp_parameters()
        assert bias.r1.tolist() == [0.01, 0.5]
        assert bias.r2.tolist() == [2.0, 0.5]
        free = with_parameters("log", [-3.0], [7.0])
        free.clamp_parameters()
        assert free.r2.tolist() == [7.0]

    @pytest.mark.parametrize(("kind", "most"), [("log", (2, 1)), ("power", (1, 2))])
    def test_initial_range(self, kind, most):
        torch.manual_seed(0)
        bias = Kerple(1000, kind=kind)
        for r, end in zip((bias.r1, bias.r2), most, strict=True):
            # 1000 draws come within 5 % of both ends.
            assert 0 <= r.min() < 0.05 * end
            assert 0.95 * end < r.max() <= end


class TestRefusals:
    """A kernel that there is not."""

    def test_kind(self):
        with pytest.raises(ValueError, match="kind: got 'gauss'; it must be one of log, power"):
            Kerple(4, kind="gauss")
