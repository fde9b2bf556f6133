"""Scalable softmax: what a head learns, and what its name promises."""

from __future__ import annotations

import math

import pytest
import torch

from theodolite.encodings.scale.ssmax import SSMax
from theodolite.encodings.scale.temperature import LogN


def learned(num_heads=3, dtype=torch.float32, bias=True) -> SSMax:
    scale = SSMax(num_heads, bias=bias).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in scale.parameters():
            parameter.copy_(torch.randn(num_heads, generator=generator, dtype=dtype))
    return scale


class TestFormula:
    """`s_h ln(m + 1) + b_h`, in the precision of the parameters."""

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 2**-24), (torch.float64, 2**-53)])
    def test_equals_the_printed_one(self, bias, dtype, unit):
        scale = learned(dtype=dtype, bias=bias)
        positions = [0, 1, 6, 4095, 1_000_003]
        factors = scale.factors(torch.tensor(positions))
        assert factors.dtype == dtype
        assert factors.shape == (1, 3, 5)
        for head in range(3):
            for at, m in enumerate(positions):
                s, b = scale.scale[head].item(), scale.bias[head].item() if bias else 0.0
                size = abs(s) * math.log(m + 1) + abs(b)
                # A logarithm, a product and a sum: within two units, one and one.
                assert abs(factors[0, head, at].item() - (s * math.log(m + 1) + b)) <= 4 * unit * size

    def test_is_softmax_to_the_base_n(self):
        """n^(s z_i) / sum n^(s z_j): the paper's definition (2501.19399, eq. 2), query by query."""
        scale = learned(num_heads=2, dtype=torch.float64, bias=False)
        generator = torch.Generator().manual_seed(0)
        q, k = (torch.randn(1, 2, 9, 4, generator=generator, dtype=torch.float64) for _ in range(2))
        masked = torch.ones(9, 9, dtype=torch.bool).triu(1)
        weights = (scale(q, torch.arange(9)) @ k.mT).masked_fill(masked, -math.inf).softmax(-1)
        for head in range(2):
            for m in range(9):
                z = [(q[0, head, m] @ k[0, head, n]).item() for n in range(m + 1)]
                powers = [(m + 1) ** (scale.scale[head].item() * one) for one in z]
                expected = [one / sum(powers) for one in powers]
                assert weights[0, head, m, : m + 1].tolist() == pytest.approx(expected, rel=1e-12)

    def test_log_n_with_a_fixed_head(self):
        """Past the trained length, s = 1 / ln L is log-n scaling."""
        scale = SSMax(2, initial_scale=1 / math.log(64))
        positions = torch.arange(64, 5000, 7)
        # Two ways to the same number, of at most four units each.
        difference = (scale.factors(positions) - LogN(64).factors(positions)).abs().max()
        assert difference <= 8 * 2**-24 * math.log(5000) / math.log(64)

    def test_begins_as_said(self):
        assert SSMax(2).scale.tolist() == pytest.approx([0.43, 0.43])
        assert SSMax(2).bias is None
        plain = SSMax(2, bias=True, initial_scale=0.0, initial_bias=1.0)
        assert torch.equal(plain.factors(torch.arange(50)), torch.ones(1, 2, 50))


class TestGradients:
    """Both parameters and the query learn."""

    def test_gradcheck(self):
        scale = learned(dtype=torch.float64)
        q = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
        positions = torch.tensor([[0, 3, 9, 100, 7], [5, 6, 7, 8, 9]])

        def run(q, s, b):
            return torch.func.functional_call(scale, {"scale": s, "bias": b}, (q, positions))

        assert torch.autograd.gradcheck(run, (q, scale.scale, scale.bias))


class TestHeadsOfARank:
    """Tensor parallelism: each rank asks for its own heads."""

    def test_slices_make_the_whole(self):
        scale, positions = learned(6), torch.arange(3, 14)
        parts = [scale.factors(positions, heads=slice(start, start + 2)) for start in (0, 2, 4)]
        assert torch.equal(torch.cat(parts, dim=1), scale.factors(positions))
        q = torch.randn(2, 2, 11, 4)
        assert torch.equal(scale(q, positions, heads=slice(2, 4)), q * parts[1][..., None])

    @pytest.mark.parametrize("heads", [slice(0, 7), slice(3, 3), slice(0, 6, 2), slice(-2, None)])
    def test_heads_that_are_not_there(self, heads):
        with pytest.raises(ValueError, match=r"heads: got slice\(.*\); it must lie within the 6 heads"):
            learned(6).factors(torch.arange(3), heads=heads)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: SSMax(0), "num_heads: got 0; it must be a whole number of at least 1"),
            (lambda: SSMax(2.0), "num_heads: got 2.0; it must be a whole number"),
            (lambda: SSMax(2, initial_scale=math.inf), "initial_scale: got inf; it must be a finite number"),
            (lambda: SSMax(2, bias=True, initial_bias=None), "initial_bias: got None; it must be a finite number"),
        ],
    )
    def test_constructors(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()
