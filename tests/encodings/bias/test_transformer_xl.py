"""Transformer-XL's bias: the printed formula, at any position, without the garbage of the shift."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.encodings.bias.content_cases import HEAD_DIM, HEADS, HIDDEN, made, rows_of_positions, vectors
from theodolite.encodings.bias.transformer_xl import TransformerXLBias


def oracle(bias, q_positions, k_positions, q, k, clamp=math.inf):
    """(q.W R_r + u.k + v.W R_r) / sqrt(D), pair by pair, R_r = [sin | cos], in float64."""
    batch, heads, q_tokens, width = q.shape
    weight = bias.r_net.weight.double().view(heads, width, -1)
    hidden = weight.shape[-1]
    out = torch.empty(batch, heads, q_tokens, k.shape[2], dtype=torch.float64)
    for b in range(batch):
        for i in range(q_tokens):
            for j in range(k.shape[2]):
                r = float(q_positions[b % len(q_positions), i]) - float(k_positions[b % len(k_positions), j])
                r = min(max(r, -clamp), clamp)
                angles = [r * 10000.0 ** (-2 * pair / hidden) for pair in range(hidden // 2)]
                sinusoid = [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
                sinusoid = torch.tensor(sinusoid, dtype=torch.float64)
                for h in range(heads):
                    projected = weight[h] @ sinusoid
                    key = k[b, h // (heads // k.shape[1]), j].double()
                    first = (q[b, h, i].double() + bias.r_r_bias[h].double()) @ projected
                    out[b, h, i, j] = (first + bias.r_w_bias[h].double() @ key) / math.sqrt(width)
    return out


def wide(clamp=None):
    """Wide enough for the way by a table of distances to be the cheaper one."""
    return TransformerXLBias(HEADS, HEAD_DIM, hidden_size=4 * HIDDEN, clamp_length=clamp)


def tolerance(bias, q):
    """Sines are float32: an entry of R is two products of them, off by 2 (2^-24 + 2^-24) at most, and all add up."""
    weight = bias.r_net.weight.double().view(HEADS, HEAD_DIM, -1)
    projected = torch.einsum("bhsd,hde->bhse", q.double() + bias.r_r_bias.double()[:, None], weight)
    return float(projected.abs().sum(-1).max()) * HEAD_DIM**-0.5 * 4 * 2**-24


def close(one, other, atol):
    torch.testing.assert_close(one.double(), other, rtol=0, atol=atol)


class TestTheFormula:
    """All four terms of the paper's score but q.k, against loops."""

    @pytest.mark.parametrize("kv_heads", [4, 2, 1])
    @torch.no_grad()
    def test_rows_and_groups(self, kv_heads):
        bias, (q, k) = made("transformer-xl", torch.float64), vectors(5, 9, kv_heads=kv_heads)
        at = rows_of_positions(5, 9)
        close(bias.dense(*at, q=q, k=k), oracle(bias, *at, q, k), tolerance(bias, q))

    @torch.no_grad()
    def test_float32_far_from_the_start(self):
        """Products of sums: D, E and the two terms, each with an error of half a unit in 2^-24."""
        bias, (q, k) = made("transformer-xl"), vectors(5, 9, dtype=torch.float32)
        at = [positions + 2**24 - 2000 for positions in rows_of_positions(5, 9)]
        steps = (HEAD_DIM + HIDDEN + 4) / 4
        out = bias.dense(*at, q=q, k=k)
        assert out.dtype == torch.float32
        close(out, oracle(bias, *at, q, k), tolerance(bias, q) * (1 + steps) + 2**-24 * 40)

    @torch.no_grad()
    def test_fractions_of_positions(self):
        bias, (q, k) = made("transformer-xl", torch.float64), vectors(4, 6)
        at = torch.tensor([[0.25, 1.5, 7.0, 9.75]], dtype=torch.float64), torch.arange(6) / 2
        close(bias.dense(at[0][0], at[1], q=q, k=k), oracle(bias, at[0], at[1][None], q, k), tolerance(bias, q))

    @pytest.mark.parametrize("clamp", [1, 3, 100])
    @torch.no_grad()
    def test_clamped_both_ways(self, clamp):
        make = lambda: TransformerXLBias(HEADS, HEAD_DIM, hidden_size=HIDDEN, clamp_length=clamp)  # noqa: E731
        bias, (q, k) = made("", torch.float64, make), vectors(5, 9)
        at = rows_of_positions(5, 9)
        close(bias.dense(*at, q=q, k=k), oracle(bias, *at, q, k, clamp=clamp), tolerance(bias, q))

    @torch.no_grad()
    def test_only_the_difference_of_positions_counts(self):
        bias, (q, k) = made("transformer-xl", torch.float64), vectors(5, 9)
        at = rows_of_positions(5, 9)
        moved = bias.dense(*(positions + 70001 for positions in at), q=q, k=k)
        close(moved, bias.dense(*at, q=q, k=k), 2 * tolerance(bias, q))


class TestTheTwoWays:
    """A table of distances and the addition theorem give the same numbers; the cheaper is taken."""

    @pytest.mark.parametrize("clamp", [None, 3, 100])
    @pytest.mark.parametrize("kv_heads", [4, 2])
    @torch.no_grad()
    def test_a_table_of_distances(self, clamp, kv_heads):
        bias, (q, k) = made("", torch.float64, lambda: wide(clamp)), vectors(13, 17, kv_heads=kv_heads)
        at = rows_of_positions(13, 17)
        assert bias._distances(*at, 2) == ((-3, 4) if clamp == 3 else (-13, 17))
        expected = oracle(bias, *at, q, k, clamp=clamp or math.inf)
        close(bias.dense(*at, q=q, k=k), expected, tolerance(bias, q))
        # The same positions as fractions go the other way.
        close(bias.dense(*(x.double() for x in at), q=q, k=k), expected, tolerance(bias, q))

    @torch.no_grad()
    def test_what_has_no_table(self):
        bias, (q_at, k_at) = wide(), rows_of_positions(13, 17)
        assert bias._distances(q_at[:, -1:], k_at, 2) is None
        assert bias._distances(q_at * 100, k_at, 2) is None
        assert bias._distances(q_at.float(), k_at, 2) is None
        assert bias._distances(q_at[:, :0], k_at, 2) is None

    def test_gradients(self):
        bias, (q, k) = made("", torch.float64, wide), vectors(9, 11)
        at = rows_of_positions(9, 11)
        assert bias._distances(*at, 2) is not None
        results = []
        for positions in (at, tuple(x.double() for x in at)):
            leaves = [x.detach().requires_grad_() for x in (q, k, bias.r_net.weight, bias.r_w_bias, bias.r_r_bias)]
            learned = dict(zip(("r_net.weight", "r_w_bias", "r_r_bias"), leaves[2:], strict=True))
            out = torch.func.functional_call(bias, learned, positions, {"q": leaves[0], "k": leaves[1]})
            results.append(torch.autograd.grad(out.square().sum(), leaves))
        for one, other in zip(*results, strict=True):
            # Sines are float32; what is summed is of the size of the gradient, over at most 2 x 4 x 9 x 11 pairs.
            atol = 4 * 2**-24 * 30 * float(other.abs().max())
            torch.testing.assert_close(one, other, rtol=0, atol=atol)


class TestHowItIsCalled:
    """Chunks, shards and decoding are the same rows and columns."""

    @torch.no_grad()
    def test_a_part_of_the_queries_and_of_the_keys(self):
        bias, (q, k) = made("transformer-xl", torch.float64), vectors(7, 9)
        q_at, k_at = rows_of_positions(7, 9)
        whole = bias.dense(q_at, k_at, q=q, k=k)
        last = bias.dense(q_at[:, -1:], k_at[:, 3:], q=q[:, :, -1:], k=k[:, :, 3:])
        # Sums of E and D terms in float64, in another order.
        close(last, whole[:, :, -1:, 3:], 1e-13)

    @torch.no_grad()
    def test_heads_of_a_rank(self):
        bias, (q, k) = made("transformer-xl", torch.float64), vectors(5, 9)
        at = rows_of_positions(5, 9)
        part = bias.dense(*at, q=q[:, 2:], k=k[:, 1:], heads=slice(2, 4))
        close(part, bias.dense(*at, q=q, k=k)[:, 2:], 1e-13)

    def test_no_function_of_pairs(self):
        bias, (q, k) = made("transformer-xl"), vectors(5, 9)
        assert bias.score_mod(*rows_of_positions(5, 9), q=q, k=k) is None
        assert bias.slopes() is None
        assert bias.score_scale is None
        assert bias.scale == HEAD_DIM**-0.5


class TestSharedVectors:
    """u and v of one layer are those of all, as in the paper's models."""

    def test_one_parameter_gathers_the_gradient_of_all_layers(self):
        u, v = (nn.Parameter(torch.full((HEADS, HEAD_DIM), value)) for value in (0.1, 0.2))
        layers = [TransformerXLBias(HEADS, HEAD_DIM, hidden_size=HIDDEN, r_w_bias=u, r_r_bias=v) for _ in range(2)]
        assert layers[0].r_w_bias is layers[1].r_w_bias is u
        assert u[0, 0] == torch.tensor(0.1)
        assert len(list(nn.ModuleList(layers).parameters())) == 4
        layers[0].reset_parameters()
        assert v[0, 0] == torch.tensor(0.2)

    def test_gradients(self):
        bias, (q, k) = made("transformer-xl clamped", torch.float64), vectors(4, 7)
        at = rows_of_positions(4, 7)

        def dense(q, k, weight, u, v):
            learned = {"r_net.weight": weight, "r_w_bias": u, "r_r_bias": v}
            return torch.func.functional_call(bias, learned, at, {"q": q, "k": k})

        leaves = [x.detach().requires_grad_() for x in (q, k, bias.r_net.weight, bias.r_w_bias, bias.r_r_bias)]
        # All three parameters and both vectors at once, in random directions.
        assert torch.autograd.gradcheck(dense, leaves, fast_mode=True)


class TestRefusals:
    """What cannot work is said at once."""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"hidden_size": 7}, "hidden_size: got 7; it must be even"),
            ({"hidden_size": 0}, "hidden_size: got 0; it must be at least 2"),
            ({"clamp_length": 0}, "clamp_length: got 0; it must be at least 1"),
            ({"r_w_bias": nn.Parameter(torch.zeros(2, 8))}, r"r_w_bias: got shape \(2, 8\); it must be \(4, 8\)"),
            ({"head_dim": 0}, "head_dim: got 0; it must be at least 1"),
        ],
    )
    def test_arguments(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            TransformerXLBias(HEADS, **{"head_dim": HEAD_DIM, "hidden_size": HIDDEN, **arguments})

    def test_both_are_read(self):
        q, _ = vectors(5, 9)
        with pytest.raises(ValueError, match="k: got None; TransformerXLBias reads q, k"):
            made("transformer-xl").dense(*rows_of_positions(5, 9), q=q)
