"""One number for all scores: the published values, and where it equals an amplitude of cos and sin."""

from __future__ import annotations

import math

import pytest
import torch

from theodolite.encodings import rotary_tables
from theodolite.encodings.scale.constant import ConstantScale
from theodolite.kernels import rotate
from theodolite.plan import Linear, Rotary, YaRN


def yarn(factor, **options) -> YaRN:
    return YaRN(factor=factor, original_max_position_embeddings=64, **options)


class TestPublishedNumbers:
    """Digits printed by models and papers."""

    @pytest.mark.parametrize(
        ("factor", "mscale", "expected"), [(40, 0.707, 1.589626), (40, 1.0, 1.873854), (32, 1.0, 1.813260)]
    )
    def test_latent(self, factor, mscale, expected):
        """DeepSeek V2-Lite, DeepSeek V3 and Kimi K2."""
        scale = ConstantScale.latent(yarn(factor, mscale=mscale, mscale_all_dim=mscale))
        assert scale.value == pytest.approx(expected, abs=5e-7)
        # What is on cos and sin is another number.
        assert ConstantScale.squared_attention_factor(yarn(factor, mscale=mscale, mscale_all_dim=mscale)).value == 1.0

    def test_latent_is_1_where_nothing_is_said(self):
        assert ConstantScale.latent(yarn(40)).value == 1.0
        assert ConstantScale.latent(Linear(factor=4)).value == 1.0

    @pytest.mark.parametrize(("factor", "magnitude"), [(2, 1.069315), (4, 1.138629), (8, 1.207944), (32, 1.346574)])
    def test_yarn(self, factor, magnitude):
        scale = ConstantScale.squared_attention_factor(yarn(factor))
        assert scale.value == pytest.approx(magnitude**2, abs=2e-6)
        assert scale.value == (0.1 * math.log(factor) + 1) ** 2

    def test_drope(self):
        assert ConstantScale.drope(coefficient=0.412, factor=1).value == 1.0
        assert ConstantScale.drope(coefficient=0.412, factor=4).value == pytest.approx(1 + 0.412 * math.log(4))


class TestInPlaceOfAnAmplitude:
    """YaRN's temperature on cos and sin, or squared on the scores: the same scores."""

    @pytest.mark.parametrize("positions", [torch.arange(9, 40), torch.arange(62).view(2, 31) * 1009])
    def test_scores_are_equal(self, positions):
        q, k = (torch.randn(2, 3, 31, 16, dtype=torch.float64) for _ in range(2))
        scaling, bare = yarn(32.0, truncate=False), yarn(32.0, truncate=False, attention_factor_given=1.0)
        plans = [Rotary(head_dim=16, rope_theta=150_000.0, scaling=one) for one in (scaling, bare)]
        (q1, k1), (q2, k2) = (rotate(q, k, *rotary_tables(one, positions)) for one in plans)
        scores = ConstantScale.squared_attention_factor(scaling)(q2, positions) @ k2.mT
        # The tables are float32, so each of 16 products is off by the amplitude's rounding and the factor's own.
        bound = 16 * 8 * 2**-24 * (q1.abs().max() * k1.abs().max())
        assert ((q1 @ k1.mT) - scores).abs().max() <= bound
        assert ((q2 @ k2.mT) - scores).abs().max() > 0.1

    def test_not_where_some_channels_rest(self):
        q = torch.randn(1, 1, 5, 16, dtype=torch.float64)
        scaling, bare = yarn(32.0), yarn(32.0, attention_factor_given=1.0)
        plans = [Rotary(head_dim=16, rotary_dim=8, rope_theta=1e4, scaling=one) for one in (scaling, bare)]
        positions = torch.arange(5)
        (q1, k1), (q2, k2) = (rotate(q, q.clone(), *rotary_tables(one, positions), rotary_dim=8) for one in plans)
        scores = ConstantScale.squared_attention_factor(scaling)(q2, positions) @ k2.mT
        assert ((q1 @ k1.mT) - scores).abs().max() > 0.1


class TestRefusals:
    """What cannot work is said by name."""

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: ConstantScale(0.0), "value: got 0.0; it must be a finite number above 0"),
            (lambda: ConstantScale(math.nan), "value: got nan; it must be a finite number above 0"),
            (lambda: ConstantScale(None), "value: got None; it must be given"),
            (lambda: ConstantScale.drope(coefficient=0.4, factor=0.5), "factor: got 0.5; it must be a number from 1"),
            (lambda: ConstantScale.drope(coefficient=-1.0, factor=2), "coefficient: got -1.0; it must be a finite"),
        ],
    )
    def test_constructors(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()

    def test_same_everywhere(self):
        factors = ConstantScale(1.25).factors(torch.tensor([[0, 5], [2**40, 1]]))
        assert torch.equal(factors, torch.full((2, 1, 2), 1.25))
        assert ConstantScale(1.25).factors(torch.tensor([0.5], dtype=torch.float64)).dtype == torch.float32
