"""Attention in pieces against a softmax written out in float64."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from theodolite.attention import Piece, attend, merge, pieces, with_sink

# Rounding of a float64 softmax over a few hundred keys: sums of that many terms, each a few units of 1.1e-16 off.
EXACT = 1e-12
# The same in float32 (6e-8 a step, scores up to 10, a few hundred keys).
ROUNDED = 2e-5


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    seen: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, one head, one query at a time, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    batch, heads, queries, _ = q.shape
    group = heads // k.shape[1]
    out = torch.empty(batch, heads, queries, v.shape[-1], dtype=torch.float64)
    lse = torch.empty(batch, heads, queries, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for s in range(queries):
                scores = (k[b, h // group] * q[b, h, s]).sum(-1) * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                visible = torch.ones(len(scores), dtype=torch.bool) if seen is None else seen[b % len(seen), s]
                weights = scores[visible].exp()
                whole = weights.sum() + (0 if sink is None else sink[h].double().exp())
                out[b, h, s] = (weights[:, None] * v[b, h // group][visible]).sum(0) / whole
                lse[b, h, s] = weights.sum().log()
    return out, lse


def qkv(
    queries: int,
    keys: int,
    *,
    batch: int = 2,
    heads: int = 4,
    groups: int = 2,
    width: int = 16,
    values: int = 16,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    shapes = (batch, heads, queries, width), (batch, groups, keys, width), (batch, groups, keys, values)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)  # type: ignore[return-value]


def lower(queries: int) -> Tensor:
    return torch.ones(queries, queries, dtype=torch.bool).tril()[None]


def some_seen(queries: int, keys: int, batch: int) -> Tensor:
    """A mask (B, S, T) with holes in which every query sees its first key at least."""
    seen = torch.rand(batch, queries, keys, generator=torch.Generator().manual_seed(5)) < 0.4
    seen[..., 0] = True
    return seen


def error(piece: Piece, out: Tensor, lse: Tensor) -> float:
    return max(float((piece.out.double() - out).abs().max()), float((piece.lse.double() - lse).abs().max()))


def in_two(q: Tensor, k: Tensor, v: Tensor, cut: int, *, scale: float) -> Piece:
    """The keys before and from `cut` apart, merged."""
    parts = slice(0, cut), slice(cut, k.shape[2])
    return merge(*(attend(q, k[:, :, part], v[:, :, part], scale=scale) for part in parts))


@pytest.fixture(params=["fused", "plain"])
def path(request: pytest.FixtureRequest) -> object:
    """Inside `no_grad` the CPU has a fused kernel; with gradients the plain path runs."""
    return torch.no_grad() if request.param == "fused" else torch.enable_grad()


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("values", [16, 5, 24], ids=["as wide", "narrower", "wider"])
class TestOracle:
    """Whatever the heads and widths, the softmax is the one that the words say."""

    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, EXACT), (torch.float32, ROUNDED)])
    def test_all_keys(self, path, heads, groups, values, dtype, tolerance):
        q, k, v = qkv(33, 51, heads=heads, groups=groups, values=values, dtype=dtype)
        with path:
            piece = attend(q, k, v, scale=0.3)
        assert piece.out.dtype == dtype
        assert error(piece, *oracle(q, k, v, scale=0.3)) < tolerance

    @pytest.mark.parametrize("tokens", [1, 63])
    def test_causal(self, path, heads, groups, values, tokens):
        q, k, v = qkv(tokens, tokens, heads=heads, groups=groups, values=values)
        with path:
            piece = attend(q, k, v, scale=0.3, causal=True)
        assert error(piece, *oracle(q, k, v, scale=0.3, seen=lower(tokens))) < EXACT

    @pytest.mark.parametrize("rows", [1, 2], ids=["one mask for all rows", "a mask a row"])
    def test_masked(self, path, heads, groups, values, rows):
        q, k, v = qkv(19, 40, heads=heads, groups=groups, values=values)
        seen = some_seen(19, 40, rows)
        with path:
            piece = attend(q, k, v, scale=0.3, mask=seen[:, None])
        assert error(piece, *oracle(q, k, v, scale=0.3, seen=seen)) < EXACT

    def test_softcap(self, path, heads, groups, values):
        q, k, v = qkv(17, 17, heads=heads, groups=groups, values=values)
        with path:
            whole = attend(q, k, v, scale=2.0, softcap=1.5)
            causal = attend(q, k, v, scale=2.0, softcap=1.5, causal=True)
        assert error(whole, *oracle(q, k, v, scale=2.0, softcap=1.5)) < EXACT
        assert error(causal, *oracle(q, k, v, scale=2.0, softcap=1.5, seen=lower(17))) < EXACT


class TestSink:
    """A sink takes weight from every key and adds nothing to the output, merged or not."""

    @pytest.mark.parametrize("size", [-30.0, 0.0, 6.0])
    def test_equals_one_more_logit(self, size):
        q, k, v = qkv(9, 21)
        sink = size + torch.arange(4.0, dtype=torch.float64)
        out, _ = oracle(q, k, v, scale=0.3, sink=sink)
        with torch.no_grad():
            whole = with_sink(attend(q, k, v, scale=0.3), sink)
            parts = [attend(q, k[:, :, part], v[:, :, part], scale=0.3) for part in (slice(0, 8), slice(8, 21))]
        assert float((whole - out).abs().max()) < EXACT
        assert float((with_sink(merge(*parts), sink) - out).abs().max()) < EXACT


class TestMerge:
    """However the keys are cut, the pieces add up to attention over all of them."""

    @settings(max_examples=30, deadline=None)
    @given(cuts=st.sets(st.integers(1, 59), max_size=5), order=st.randoms(use_true_random=False))
    def test_random_splits(self, cuts, order):
        q, k, v = qkv(7, 60)
        edges = [0, *sorted(cuts), 60]
        parts = [slice(begin, end) for begin, end in pairwise(edges)]
        order.shuffle(parts)
        with torch.no_grad():
            merged, *rest = (attend(q, k[:, :, part], v[:, :, part], scale=0.3) for part in parts)
            for piece in rest:
                merged = merge(merged, piece)
        assert error(merged, *oracle(q, k, v, scale=0.3)) < EXACT

    def test_a_piece_that_outweighs_the_other_by_far(self):
        q, k, v = qkv(3, 20)
        k[:, :, :10] *= 60
        with torch.no_grad():
            merged = merge(
                attend(q, k[:, :, :10], v[:, :, :10], scale=1.0), attend(q, k[:, :, 10:], v[:, :, 10:], scale=1.0)
            )
            whole = attend(q, k, v, scale=1.0)
        assert torch.isfinite(merged.out).all()
        # Scores of hundreds lose as much in the last place as they are large.
        assert float((merged.out - whole.out).abs().max()) < 1e3 * EXACT

    def test_bfloat16_is_rounded_once(self):
        q, k, v = qkv(5, 300, dtype=torch.bfloat16)
        out, _ = oracle(q, k, v, scale=0.3)
        with torch.no_grad():
            merged = merge(
                attend(q, k[:, :, :100], v[:, :, :100], scale=0.3), attend(q, k[:, :, 100:], v[:, :, 100:], scale=0.3)
            )
        # Weights, both outputs and the sum are each rounded to 8 bits (2**-9 relative); values are up to 4.
        assert float((merged.out.double() - out).abs().max()) < 4 * 4 * 2**-9


class TestPaths:
    """The fused kernel is a faster way to the same numbers, and is taken only where it knows how."""

    @pytest.mark.parametrize("tokens", [1, 255, 256, 257, 600])
    @pytest.mark.parametrize("causal", [True, False])
    def test_fused_equals_plain(self, tokens, causal):
        q, k, v = qkv(tokens, tokens, batch=1, values=12)
        with torch.no_grad():
            fused = attend(q, k, v, scale=0.3, causal=causal)
        with torch.enable_grad():
            plain = attend(q, k, v, scale=0.3, causal=causal)
        assert error(fused, plain.out, plain.lse) < EXACT

    def test_the_fused_kernel_is_taken_in_inference(self, monkeypatch):
        monkeypatch.setattr(pieces, "_attend_plain", lambda *arguments: pytest.fail("the plain path was taken"))
        with torch.inference_mode():
            attend(*qkv(4, 4), scale=1.0, causal=True)
            attend(*qkv(4, 4, values=3), scale=1.0)

    def test_gradients_of_the_plain_path(self):
        q, k, v = (x.requires_grad_() for x in qkv(5, 5, batch=1))
        assert torch.autograd.gradcheck(lambda *x: attend(*x, scale=0.3, causal=True), (q, k, v))

    def test_scale_matters(self):
        q, k, v = qkv(4, 9)
        assert error(attend(q, k, v, scale=0.3), *attend(q, k, v, scale=1 / math.sqrt(16))) > 1e-3


class TestQueriesThatSeeNothing:
    """A step of a ring, or a far group of a relative map, has no key for some queries: they count for nothing in it."""

    @pytest.mark.parametrize("learning", [False, True])
    def test_merged_with_what_they_see_elsewhere(self, learning: bool) -> None:
        q, k, v = (x.requires_grad_(learning) for x in qkv(8, 8))
        causal = torch.ones(8, 8, dtype=torch.bool).tril()
        near = causal & ~causal.tril(-3)
        whole = attend(q, k, v, scale=0.25, mask=causal[None, None])
        first = attend(q, k, v, scale=0.25, mask=near[None, None])
        second = attend(q, k, v, scale=0.25, mask=(causal & ~near)[None, None])
        assert (second.lse[:, :, :3] == -math.inf).all()
        assert (second.out[:, :, :3] == 0).all()
        for merged in (merge(first, second), merge(second, first)):
            torch.testing.assert_close(merged.out, whole.out, rtol=0, atol=ROUNDED)
        nothing = Piece(second.out[:, :, :3], second.lse[:, :, :3])
        twice = merge(nothing, nothing)
        assert (twice.out == 0).all()
        assert (twice.lse == -math.inf).all()
        assert (with_sink(nothing, torch.zeros(4)) == 0).all()
        if learning:
            grads = torch.autograd.grad(merge(first, second).out.square().sum(), (q, k, v), retain_graph=True)
            true = torch.autograd.grad(whole.out.square().sum(), (q, k, v))
            for mine, other in zip(grads, true, strict=True):
                torch.testing.assert_close(mine, other, rtol=0, atol=10 * ROUNDED)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("keys", [1, 46, 600])
    def test_of_any_dtype_and_size(self, dtype: torch.dtype, keys: int) -> None:
        q, k, v = (torch.randn(1, 2, count, 16).to(dtype) for count in (50, keys, keys))
        seen = torch.arange(50)[:, None] >= 20 + torch.arange(keys)
        with torch.inference_mode():
            piece = attend(q, k, v, scale=0.25, mask=seen[None, None])
        assert (piece.lse[:, :, :20] == -math.inf).all()
        assert (piece.out[:, :, :20] == 0).all()
        assert piece.lse[:, :, 20:].isfinite().all()
