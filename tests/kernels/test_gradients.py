"""Gradients of the rotation: the same rotation the other way, to any order, for every layout."""

from __future__ import annotations

import itertools

import pytest
import torch

from theodolite.encodings import rotary_tables
from theodolite.kernels import rotate
from theodolite.kernels.reference import rotate_reference
from theodolite.plan import Rotary

LAYOUTS = list(itertools.product([False, True], [None, 4], [False, True]))


def tables(tokens: int, pairs: int):
    return rotary_tables(Rotary(head_dim=2 * pairs, rope_theta=100.0), torch.arange(3, 3 + tokens))


def leaf(*shape: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype).requires_grad_()


class TestAgainstNumbers:
    """Finite differences in float64, once and twice."""

    @pytest.mark.parametrize(("interleaved", "rotary_dim", "trailing"), LAYOUTS)
    @pytest.mark.parametrize("conjugate", [False, True])
    def test_first_and_second_order(self, interleaved, rotary_dim, trailing, conjugate):
        cos, sin = tables(5, (rotary_dim or 8) // 2)
        options = {
            "interleaved": interleaved,
            "rotary_dim": rotary_dim,
            "trailing": trailing,
            "conjugate": conjugate,
        }

        def turned(q, k):
            return rotate(q, k, cos, sin, **options)

        inputs = leaf(2, 2, 5, 8), leaf(2, 1, 5, 8)
        assert torch.autograd.gradcheck(turned, inputs)
        assert torch.autograd.gradgradcheck(turned, inputs)

    def test_in_place(self):
        cos, sin = tables(5, 4)
        assert torch.autograd.gradcheck(lambda q: rotate(q * 1, None, cos, sin, inplace=True)[0], leaf(2, 2, 5, 8))

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_equals_the_gradient_of_the_oracle(self, interleaved):
        cos, sin = tables(63, 8)
        q, grad = leaf(2, 3, 63, 16), torch.randn(2, 3, 63, 16, dtype=torch.float64)
        (mine,) = torch.autograd.grad(rotate(q, None, cos, sin, interleaved=interleaved)[0], q, grad)
        (true,) = torch.autograd.grad(rotate_reference(q, cos, sin, interleaved=interleaved), q, grad)
        assert (mine - true).abs().max() <= 4 * 2.0**-53 * grad.abs().max()


class TestBackward:
    """Gradients come in every stride and dtype that autograd makes."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_expanded_gradients(self, dtype):
        cos, sin = tables(9, 8)
        q = leaf(2, 3, 9, 16, dtype=dtype)
        rotate(q, None, cos, sin)[0].sum().backward()
        expected = rotate(torch.ones_like(q), None, cos, sin, conjugate=True)[0]
        assert q.grad.dtype == dtype
        assert torch.equal(q.grad, expected)

    def test_passing_channels_pass_their_gradient(self):
        q, grad = leaf(1, 2, 9, 16), torch.randn(1, 2, 9, 16, dtype=torch.float64)
        rotate(q, None, *tables(9, 2), rotary_dim=4)[0].backward(grad)
        assert torch.equal(q.grad[..., 4:], grad[..., 4:])

    def test_tokens_first(self):
        cos, sin = tables(9, 8)
        q, grad = leaf(2, 3, 9, 16), torch.randn(2, 3, 9, 16, dtype=torch.float64)
        (expected,) = torch.autograd.grad(rotate(q, None, cos, sin)[0], q, grad)
        turned = rotate(q.transpose(1, 2), None, cos, sin, heads_first=False)[0]
        (given,) = torch.autograd.grad(turned, q, grad.transpose(1, 2))
        assert torch.equal(given, expected)

    def test_only_what_asks_gets_one(self):
        cos, sin = tables(9, 8)
        q, k = leaf(1, 2, 9, 16), leaf(1, 2, 9, 16).detach()
        out = rotate(q, k, cos, sin)
        assert out[0].requires_grad
        assert not out[1].requires_grad

    def test_tables_made_in_inference_mode(self):
        with torch.inference_mode():
            cos, sin = tables(9, 8)
        q = leaf(1, 2, 9, 16)
        rotate(q, None, cos, sin)[0].sum().backward()
        assert q.grad is not None


class TestInPlace:
    """Writing in place is asked for, never a surprise, and autograd knows of it."""

    def test_a_leaf_is_refused_untouched(self):
        q = leaf(1, 2, 9, 16)
        before = q.detach().clone()
        with pytest.raises(RuntimeError, match="q: a leaf that requires a gradient cannot be turned in place"):
            rotate(q, None, *tables(9, 8), inplace=True)
        assert torch.equal(q.detach(), before)
        with torch.no_grad():
            assert rotate(q, None, *tables(9, 8), inplace=True)[0] is q

    def test_an_intermediate_is_returned_itself(self):
        cos, sin = tables(9, 8)
        q = leaf(1, 2, 9, 16)
        (expected,) = torch.autograd.grad(rotate(q * 2, None, cos, sin)[0].square().sum(), q)
        middle = q * 2
        out = rotate(middle, None, cos, sin, inplace=True)[0]
        assert out is middle
        (given,) = torch.autograd.grad(out.square().sum(), q)
        assert torch.equal(given, expected)

    def test_slices_of_a_fused_projection(self):
        cos, sin = tables(9, 8)
        weight = leaf(1, 9, 6, 16)

        def loss(inplace):
            fused = weight * 2
            q, k, v = fused[:, :, :3], fused[:, :, 3:4], fused[:, :, 4:]
            q, k = rotate(q, k, cos, sin, heads_first=False, inplace=inplace)
            return (q.square().sum(2) * k.sum(2)).sum() + v.sum()

        (expected,) = torch.autograd.grad(loss(False), weight)
        (given,) = torch.autograd.grad(loss(True), weight)
        assert torch.equal(given, expected)

    def test_what_was_saved_before_is_guarded(self):
        q = leaf(1, 2, 9, 16)
        middle = q * 2
        square = middle.square()
        rotate(middle, None, *tables(9, 8), inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            square.sum().backward()


class TestLearnedTables:
    """Learned frequencies need the gradient of cos and sin; peers that detach the table train nothing."""

    @pytest.mark.parametrize(("interleaved", "rotary_dim", "trailing"), LAYOUTS)
    @pytest.mark.parametrize("heads_first", [False, True])
    @pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 2, 5)])
    def test_gradients_of_cos_and_sin(self, interleaved, rotary_dim, trailing, heads_first, shape):
        options = {"interleaved": interleaved, "rotary_dim": rotary_dim, "trailing": trailing}

        def turned(q, k, cos, sin):
            if not heads_first:
                q, k = q.transpose(1, 2), k.transpose(1, 2)
            return rotate(q, k, cos, sin, heads_first=heads_first, **options)

        table = (*shape, (rotary_dim or 8) // 2)
        inputs = leaf(2, 4, 5, 8), leaf(2, 2, 5, 8), leaf(*table), leaf(*table)
        assert torch.autograd.gradcheck(turned, inputs)

    def test_per_head_tables_in_place(self):
        cos, sin = torch.randn(2, 1, 2, 5, 4, dtype=torch.float64)
        assert torch.autograd.gradcheck(lambda q: rotate(q * 1, None, cos, sin, inplace=True)[0], leaf(2, 4, 5, 8))

    def test_half_precision_queries(self):
        cos, sin = (torch.rand(5, 4, requires_grad=True) for _ in "cs")
        q, _ = rotate(torch.randn(1, 2, 5, 8).bfloat16(), None, cos, sin)
        q.float().sum().backward()
        assert q.dtype == torch.bfloat16
        assert cos.grad.dtype == sin.grad.dtype == torch.float32
