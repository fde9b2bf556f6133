"""Shaw's bias: learned vectors for clipped distances, added for keys and for values."""

from __future__ import annotations

import math

import pytest
import torch

from tests.encodings.bias.content_cases import HEAD_DIM, HEADS, made, rows_of_positions, vectors, written_out
from theodolite.encodings.bias.shaw import ShawBias


def clipped(bias, q_position, k_position) -> int:
    return max(-bias.left, min(bias.right, int(k_position) - int(q_position))) + bias.left


def oracle(bias, q_positions, k_positions, q):
    out = torch.empty(*q.shape[:3], k_positions.shape[1], dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                for j in range(k_positions.shape[1]):
                    key = bias.relative_keys[clipped(bias, q_positions[b, i], k_positions[b, j])].double()
                    out[b, h, i, j] = q[b, h, i].double() @ key / math.sqrt(HEAD_DIM)
    return out


class TestTheFormula:
    """Equation 5 of the paper, against loops."""

    @pytest.mark.parametrize("clip", [1, 4, 30, (2, 5), (0, 3)])
    @torch.no_grad()
    def test_scores(self, clip):
        bias, (q, _) = made("", torch.float64, lambda: ShawBias(HEADS, HEAD_DIM, clip)), vectors(5, 9)
        at = rows_of_positions(5, 9)
        # D products in float64, of vectors whose length is below 8.
        torch.testing.assert_close(bias.dense(*at, q=q), oracle(bias, *at, q), rtol=0, atol=1e-13)

    @torch.no_grad()
    def test_float32(self):
        bias, (q, _) = made("shaw"), vectors(5, 9, dtype=torch.float32)
        at = rows_of_positions(5, 9)
        bound = float(q.abs().sum(-1).max() * bias.relative_keys.abs().max()) * HEAD_DIM**-0.5
        # One rounding for each of D products and sums, and one for the scale.
        atol = (HEAD_DIM + 1) * 2**-24 * bound
        torch.testing.assert_close(bias.dense(*at, q=q).double(), oracle(bias, *at, q), rtol=0, atol=atol)

    @torch.no_grad()
    def test_all_beyond_the_clip_is_one_distance(self):
        bias, (q, _) = made("shaw"), vectors(1, 9, dtype=torch.float32)
        out = bias.dense(
            torch.tensor([4096]), torch.tensor([0, 7, 4091, 4092, 4093, 4100, 4101, 2**24, 2**24 + 5]), q=q
        )
        assert torch.equal(out[..., :3], out[..., 3:4].expand(-1, -1, -1, 3))
        assert torch.equal(out[..., 6:], out[..., 5:6].expand(-1, -1, -1, 3))
        assert not torch.equal(out[..., 3], out[..., 4])


class ValuesOf(torch.nn.Module):
    """A module whose forward is `values`."""

    def __init__(self, bias):
        super().__init__()
        self.bias = bias

    def forward(self, *arguments):
        return self.bias.values(*arguments)


class TestValues:
    """Equation 3: what positions add to the output, without a vector for each pair."""

    @pytest.mark.parametrize("clip", [2, (3, 1)])
    @torch.no_grad()
    def test_against_loops(self, clip):
        bias = made("", torch.float64, lambda: ShawBias(HEADS, HEAD_DIM, clip))
        q_at, k_at = rows_of_positions(5, 9)
        weights = torch.softmax(torch.randn(2, HEADS, 5, 9, dtype=torch.float64), dim=-1)
        expected = torch.zeros(2, HEADS, 5, HEAD_DIM, dtype=torch.float64)
        for b in range(2):
            for i in range(5):
                for j in range(9):
                    value = bias.relative_values[clipped(bias, q_at[b, i], k_at[b, j])]
                    expected[b, :, i] += weights[b, :, i, j, None] * value
        # 9 weights that sum to 1, times values below 3.
        torch.testing.assert_close(bias.values(weights, q_at, k_at), expected, rtol=0, atol=1e-14)

    @torch.no_grad()
    def test_dtype_of_the_weights(self):
        bias, at = made("shaw"), (torch.arange(5), torch.arange(9))
        weights = torch.softmax(torch.randn(2, HEADS, 5, 9), dim=-1)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            rounded = weights.to(dtype)
            out = bias.values(rounded, *at)
            assert out.dtype == dtype
            assert torch.equal(out, bias.values(rounded.float(), *at).to(dtype))

    @torch.no_grad()
    def test_small_integers_do_not_wrap(self):
        bias, weights = made("shaw"), torch.rand(1, HEADS, 3, 5)
        at = torch.tensor([0, 1, 250]), torch.tensor([0, 2, 50, 110, 255])
        assert torch.equal(bias.values(weights, *(x.to(torch.uint8) for x in at)), bias.values(weights, *at))

    def test_gradients(self):
        bias, at = made("shaw", torch.float64), rows_of_positions(4, 7)
        weights = torch.rand(2, HEADS, 4, 7, dtype=torch.float64, requires_grad=True)
        table = bias.relative_values.detach().requires_grad_()

        def values(weights, table):
            return torch.func.functional_call(ValuesOf(bias), {"bias.relative_values": table}, (weights, *at))

        assert torch.autograd.gradcheck(values, (weights, table))

    def test_without(self):
        bias = ShawBias(HEADS, HEAD_DIM, 4, values=False)
        assert list(bias.state_dict()) == ["relative_keys"]
        assert bias.values(torch.rand(1, HEADS, 2, 2), torch.arange(2), torch.arange(2)) is None


class TestForms:
    """The function for FlexAttention, the heads of a rank, a part of the tokens: the same numbers."""

    @torch.no_grad()
    def test_score_mod(self):
        bias, (q, _) = made("shaw", torch.float64), vectors(5, 9)
        q_at, k_at = rows_of_positions(5, 9)
        for at in ((q_at, k_at), (q_at[0], k_at), (q_at, k_at[0])):
            mod = bias.score_mod(*at, q=q[:, 1:], heads=slice(1, 4))
            out = written_out(mod, 2, 3, 5, 9, score=1.0)
            torch.testing.assert_close(out, 1 + bias.dense(*at, q=q)[:, 1:], rtol=0, atol=1e-13)

    @torch.no_grad()
    def test_decoding(self):
        bias, (q, _) = made("shaw", torch.float64), vectors(7, 9)
        q_at, k_at = rows_of_positions(7, 9)
        last = bias.dense(q_at[:, -1:], k_at, q=q[:, :, -1:])
        torch.testing.assert_close(last, bias.dense(q_at, k_at, q=q)[:, :, -1:], rtol=0, atol=1e-13)

    def test_gradients(self):
        bias, (q, _) = made("shaw", torch.float64), vectors(4, 7)
        at = rows_of_positions(4, 7)

        def dense(q, table):
            return torch.func.functional_call(bias, {"relative_keys": table}, at, {"q": q})

        leaves = [x.detach().requires_grad_() for x in (q, bias.relative_keys)]
        assert torch.autograd.gradcheck(dense, leaves)


class TestRefusals:
    """What cannot work is said at once."""

    @pytest.mark.parametrize("clip", [0, -1, True, 2.5, (0, 0), (3, -1)])
    def test_clip(self, clip):
        with pytest.raises(ValueError, match=r"clip: got .*; give tokens, at least 1, or"):
            ShawBias(HEADS, HEAD_DIM, clip)

    def test_fractions(self):
        with pytest.raises(ValueError, match=r"k_positions: got torch\.float32; give integers"):
            made("shaw").dense(torch.arange(5), torch.arange(9.0), q=vectors(5, 9)[0])

    def test_weights_of_other_tokens(self):
        with pytest.raises(ValueError, match=r"weights: got shape \(1, 4, 2, 3\); the positions ask for"):
            made("shaw").values(torch.rand(1, 4, 2, 3), torch.arange(2), torch.arange(2))
