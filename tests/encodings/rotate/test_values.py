"""Values that turn: outputs then carry how far each value stood, and nothing of where both stood."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests import oracle
from theodolite.encodings import RotaryEmbedding
from theodolite.encodings.rotate.per_head import PerHeadRotary
from theodolite.plan import Rotary, YaRN

PROMISE = 6e-8
PLAN = Rotary(head_dim=16, rope_theta=10000.0, scaling=YaRN(factor=4, original_max_position_embeddings=64))
# DeepSeek-V4's: the last channels of the head, pairs of neighbours.
TRAILING = replace(PLAN, rotary_dim=8, interleaved=True, trailing=True)
PLANS = pytest.mark.parametrize("plan", [PLAN, TRAILING])


def inputs(tokens: int = 9, heads: int = 2, kv_heads: int = 1):
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(2, kv_heads, tokens, 16, generator=generator, dtype=torch.float64)
    weights = torch.randn(2, heads, tokens, tokens, generator=generator, dtype=torch.float64).softmax(-1)
    return v, weights


def output(plan: Rotary, v, weights, q_positions, k_positions):
    """Attention with given weights, with values turned and the output turned back."""
    rope = RotaryEmbedding(plan)
    turned = rope.turn_values(v, rope.tables(k_positions, amplitude=False))
    return rope.turn_output_back(weights @ turned, rope.tables(q_positions, amplitude=False))


@PLANS
class TestRelative:
    """The output depends on distances alone, as the scores do."""

    def test_is_the_formula(self, plan):
        v, weights = inputs()
        at_q, at_k = [60, 3, 7, 90_000, 5, 6, 7, 8, 9], [0, 3, 70, 1, 200, 6, 7, 8, 1000]
        mine = output(plan, v, weights, torch.tensor(at_q), torch.tensor(at_k))
        inv_freq = [float(f) for f in oracle.yarn(1e4, plan.rotary_dim, 4, 64)]
        true = torch.zeros_like(mine)
        for m in range(9):
            for n in range(9):
                value = v[:, :, n].expand(-1, 2, -1).clone()
                for pair, frequency in enumerate(inv_freq):
                    first, second = (8 + 2 * pair, 9 + 2 * pair) if plan.trailing else (pair, pair + 8)
                    angle = torch.tensor((at_k[n] - at_q[m]) * frequency, dtype=torch.float64)
                    a, b = v[:, :, n, first], v[:, :, n, second]
                    value[..., first] = a * angle.cos() - b * angle.sin()
                    value[..., second] = b * angle.cos() + a * angle.sin()
                true[:, :, m] += weights[:, :, m, n, None] * value
        # Two rotations, of two entries each within the promise, of a mean of values.
        assert ((mine - true).abs() <= 4 * PROMISE * v.norm(dim=-1).max()).all()

    @pytest.mark.parametrize("shift", [1, 999, -40, 16_000_000])
    def test_moving_all_changes_nothing(self, plan, shift):
        v, weights = inputs()
        positions = torch.arange(100, 109)
        here = output(plan, v, weights, positions, positions)
        there = output(plan, v, weights, positions + shift, positions + shift)
        assert ((here - there).abs() <= 8 * PROMISE * v.norm(dim=-1).max()).all()

    def test_moving_values_alone_does(self, plan):
        v, weights = inputs()
        positions = torch.arange(100, 109)
        here = output(plan, v, weights, positions, positions)
        assert (here - output(plan, v, weights, positions, positions + 1)).abs().max() > 0.1


@PLANS
class TestIdentity:
    """A token that attends to itself alone gets its value back: the amplitude is no part of it."""

    def test_of_attention_to_oneself(self, plan):
        v, _ = inputs(kv_heads=2)
        positions = torch.tensor([0, 5, 70_000, 2**24, 1, 2, 3, 4, 9])
        back = output(plan, v, torch.eye(9, dtype=torch.float64).expand(2, 2, 9, 9), positions, positions)
        assert ((back - v).abs() <= 4 * PROMISE * v.norm(dim=-1, keepdim=True)).all()

    def test_channels_that_do_not_turn_pass_bit_for_bit(self, plan):
        v, _ = inputs()
        rope = RotaryEmbedding(replace(plan, rotary_dim=4))
        tables = rope.tables(torch.arange(9), amplitude=False)
        still = slice(0, 12) if plan.trailing else slice(4, 16)
        assert torch.equal(rope.turn_values(v, tables)[..., still], v[..., still])
        assert torch.equal(rope.turn_output_back(v, tables)[..., still], v[..., still])

    def test_tokens_first(self, plan):
        v, _ = inputs()
        rope = RotaryEmbedding(plan)
        tables = rope.tables(torch.arange(9), amplitude=False)
        for turn in (rope.turn_values, rope.turn_output_back):
            other = turn(v.transpose(1, 2), tables, heads_first=False).transpose(1, 2)
            assert torch.equal(other, turn(v, tables))

    def test_gradients(self, plan):
        v, weights = inputs(tokens=3)
        positions = torch.arange(20, 23)
        assert torch.autograd.gradcheck(
            lambda v, w: output(plan, v, w, positions, positions), (v.requires_grad_(), weights.requires_grad_())
        )


class TestPerHead:
    """Queries of a group turn their output back by the frequencies that turned the group's values."""

    def test_identity(self):
        rope = PerHeadRotary([PLAN, replace(PLAN, rope_theta=50.0)])
        v, _ = inputs(kv_heads=2)
        tables = rope.tables(torch.arange(50, 59), amplitude=False)
        back = rope.turn_output_back(rope.turn_values(v, tables).repeat_interleave(3, 1), tables)
        size = v.norm(dim=-1, keepdim=True).repeat_interleave(3, 1)
        assert ((back - v.repeat_interleave(3, 1)).abs() <= 4 * PROMISE * size).all()
