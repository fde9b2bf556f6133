"""A function of all pairs in blocks: the same numbers and gradients, with scratch for a block only."""

from __future__ import annotations

import pytest
import torch

from theodolite.encodings.bias import blocks
from theodolite.encodings.bias.base import Bias, PairwiseBias


class Curve(PairwiseBias):
    """A learned function of the distance, with two parameters a head."""

    def __init__(self, num_heads: int, dtype=torch.float64) -> None:
        super().__init__(num_heads)
        self.a = torch.nn.Parameter(torch.linspace(0.5, 1, num_heads, dtype=dtype))
        self.b = torch.nn.Parameter(torch.linspace(0.1, 0.3, num_heads, dtype=dtype))

    def _parameters_of_pairs(self):
        return self.a, self.b

    def _value(self, q_position, k_position, head, a, b):
        return -a[head] * torch.log1p(b[head] * (q_position - k_position).abs())


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that a short sequence has several, the last one shorter."""
    monkeypatch.setattr(blocks, "_BLOCK", 4 * 9 * 3)


Q, K = torch.arange(40, 47), torch.arange(38, 47)


class TestBlocksChangeNothing:
    """Whoever has more memory gets the same numbers."""

    def test_values(self, small_blocks):
        curve = Curve(4)
        with torch.no_grad():
            plain = curve._value(Q[:, None], K[None], torch.arange(4)[:, None, None], curve.a, curve.b)
            assert torch.equal(curve.dense(Q, K)[0], plain)
        assert torch.equal(curve.dense(Q, K)[0], plain)

    def test_gradients(self, small_blocks):
        curve = Curve(4)

        def dense(a, b):
            return torch.func.functional_call(curve, {"a": a, "b": b}, (Q, K))

        assert torch.autograd.gradcheck(dense, (curve.a, curve.b))

    def test_one_frozen_parameter(self, small_blocks):
        curve = Curve(2)
        curve.a.requires_grad_(False)
        curve.dense(Q, K).sum().backward()
        assert curve.a.grad is None
        assert curve.b.grad.abs().min() > 0

    def test_rows(self, small_blocks):
        curve = Curve(2)
        rows = torch.stack((Q, Q + 3))
        assert torch.equal(curve.dense(rows, K)[1], curve.dense(Q + 3, K)[0])

    def test_rows_of_two_batches(self):
        with pytest.raises(ValueError, match="k_positions: got 3 rows; q_positions have 2"):
            Curve(2).dense(Q.expand(2, -1), K.expand(3, -1))

    @pytest.mark.parametrize("tokens", [0, 1])
    def test_no_token_and_one(self, small_blocks, tokens):
        assert Curve(2).dense(Q[:tokens], K).shape == (1, 2, tokens, 9)
        assert Curve(2).dense(Q, K[:tokens]).shape == (1, 2, 7, tokens)


class TestFunctionsOfLess:
    """BLOOM's bias is of the key alone: what does not depend on the query is still said for each."""

    @pytest.mark.parametrize("reads", ["key", "query", "neither", "no head"])
    def test_broadcast(self, small_blocks, reads):
        class Less(PairwiseBias):
            def __init__(self):
                super().__init__(4)
                self.slope = torch.nn.Parameter(torch.linspace(1, 2, 4, dtype=torch.float64))

            def _parameters_of_pairs(self):
                return (self.slope,)

            def _value(self, q_position, k_position, head, slope):
                at = {"key": k_position, "query": q_position, "neither": 1.0, "no head": k_position}[reads]
                return (slope[:1] if reads == "no head" else slope[head]) * at

        bias = Less()
        factor = {"key": K[None].expand(7, 9), "query": Q[:, None].expand(7, 9), "neither": torch.ones(7, 9)}
        pairs = factor.get(reads, factor["key"]).double()
        slope = bias.slope.detach()[:1].expand(4) if reads == "no head" else bias.slope.detach()
        for dense in (bias.dense(Q, K), torch.no_grad()(bias.dense)(Q, K)):
            assert torch.equal(dense[0].detach(), slope[:, None, None] * pairs)
        grad = torch.randn(1, 4, 7, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        bias.dense(Q, K).backward(grad)
        expected = (grad[0] * pairs).sum((1, 2))
        expected = torch.cat((expected.sum(0, keepdim=True), torch.zeros(3))) if reads == "no head" else expected
        assert (bias.slope.grad - expected).abs().max() < 1e-10

    def test_positions_made_in_inference_mode(self):
        with torch.inference_mode():
            at = torch.arange(40, 47)
        Curve(2).dense(at, at).sum().backward()


class TestShapeOfOnesOwn:
    """A bias of a user's own is checked as ours are."""

    @pytest.mark.parametrize("shape", [(7, 9), (1, 4, 9, 7), (1, 2, 7, 9)])
    def test_wrong_shapes_are_named(self, shape):
        class Own(Bias):
            def _dense(self, q_positions, k_positions, content, heads):
                return torch.zeros(shape)

        with pytest.raises(ValueError, match=r"_dense: Own gave shape .*; it must be \(B, \*\(4, 7, 9\)\)"):
            Own(4).dense(Q, K)


class TestHeadsOfARank:
    """Tensor parallelism: each rank asks for its own heads."""

    def test_slices_make_the_whole(self):
        curve = Curve(6)
        parts = [curve.dense(Q, K, heads=slice(start, start + 2)) for start in (0, 2, 4)]
        assert torch.equal(torch.cat(parts, dim=1), curve.dense(Q, K))

    @pytest.mark.parametrize("heads", [slice(0, 7), slice(3, 3), slice(0, 6, 2), slice(-2, None)])
    def test_heads_that_are_not_there(self, heads):
        with pytest.raises(ValueError, match=r"heads: got slice\(.*\); it must lie within the 6 heads"):
            Curve(6).dense(Q, K, heads=heads)


class TestScoreMod:
    """The function for FlexAttention gives the numbers of the tensor, pair by pair."""

    def test_equals_dense(self):
        curve = Curve(4)
        rows = torch.stack((Q, Q + 3))
        mod, dense = curve.score_mod(rows, K, heads=slice(1, 3)), curve.dense(rows, K, heads=slice(1, 3))
        for batch, head, i, j in ((0, 0, 0, 0), (1, 1, 6, 8), (1, 0, 3, 2)):
            at = [torch.tensor(index) for index in (batch, head, i, j)]
            assert mod(torch.tensor(1.0), *at) == 1 + dense[batch, head, i, j]
