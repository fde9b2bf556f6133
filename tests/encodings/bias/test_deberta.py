"""DeBERTa's bias: content to position and back, by exact buckets, in tables no larger than the tokens need."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.encodings.bias.content_cases import (
    BIASES,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    made,
    rows_of_positions,
    vectors,
    written_out,
)
from theodolite.encodings.bias.deberta import DisentangledBias, RelativeEmbeddings
from theodolite.encodings.bias.deberta_buckets import log_bucket


def bucket(distance: int, buckets: int, longest: int) -> int:
    """The printed formula, ceil decided by comparing whole powers."""
    half, far = buckets // 2, abs(distance)
    if far <= half:
        return distance
    step = 0
    while Fraction(far, half) ** (half - 1) > Fraction(longest - 1, half) ** step:
        step += 1
    return int(math.copysign(half + step, distance))


def oracle(bias, q_positions, k_positions, q, k):
    """[q.Kr[d] + k.Qr[d]] / sqrt(D (1 + terms)), pair by pair, in float64."""
    span, terms = bias.span, len(bias.pos_att_type)
    vectors = bias.rel_embeddings.weight.double()
    key, query = (
        None if p is None else (vectors @ p.weight.double().T + p.bias.double()).view(2 * span, HEADS, HEAD_DIM)
        for p in (bias.pos_key_proj, bias.pos_query_proj)
    )
    out = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.float64)
    for b in range(q.shape[0]):
        for i in range(q.shape[2]):
            for j in range(k.shape[2]):
                d = int(q_positions[b, i]) - int(k_positions[b, j])
                if bias.position_buckets is not None:
                    d = bucket(d, bias.position_buckets, bias.max_relative_positions)
                row = min(max(d + span, 0), 2 * span - 1)
                for h in range(q.shape[1]):
                    if key is not None:
                        out[b, h, i, j] += q[b, h, i].double() @ key[row, h]
                    if query is not None:
                        out[b, h, i, j] += k[b, h // (q.shape[1] // k.shape[1]), j].double() @ query[row, h]
    return out / math.sqrt(HEAD_DIM * (1 + terms))


def small(terms=("c2p", "p2c"), buckets=8, longest=40):
    return DisentangledBias(
        HEADS,
        HEAD_DIM,
        hidden_size=HIDDEN,
        max_relative_positions=longest,
        position_buckets=buckets,
        pos_att_type=terms,
    )


class TestBuckets:
    """Borders are whole numbers, decided exactly."""

    def test_golden_values(self):
        """DeBERTa-v3: 256 buckets up to 512 tokens."""
        relative = torch.tensor([0, 1, 128, 129, 200, 300, 511, 600, -129, -200, -600])
        out = log_bucket(relative, position_buckets=256, max_relative_positions=512)
        assert out.dtype == torch.int64
        # The peer says 270 for 600 tokens; both are beyond row 255 of the table, where the last row is taken.
        assert out.tolist() == [0, 1, 128, 129, 169, 207, 255, 256, -129, -169, -256]

    @pytest.mark.parametrize(("buckets", "longest"), [(4, 5), (8, 40), (7, 50), (20, 91), (6, 28), (32, 128)])
    def test_exact(self, buckets, longest):
        relative = torch.arange(-4 * longest, 4 * longest)
        expected = [max(-buckets, min(buckets, bucket(r, buckets, longest))) for r in relative.tolist()]
        out = log_bucket(relative, position_buckets=buckets, max_relative_positions=longest)
        assert out.tolist() == expected

    @pytest.mark.parametrize(
        ("buckets", "longest"),
        [(256, 512), (255, 4097), (16, 8 * 3**7 + 1), (256, 2**24), (1024, 2**31), (9, 2**40), (1024, 514), (5, 9)],
    )
    def test_either_side_of_every_border(self, buckets, longest):
        """r is in bucket half + t or below iff r^(half-1) half^t <= (max-1)^t half^(half-1)."""
        half = buckets // 2
        for step in range(0, buckets - half, max(1, buckets // 64)):
            low, high = half, 2**62
            while high - low > 1:
                middle = (low + high) // 2
                within = middle ** (half - 1) * half**step <= (longest - 1) ** step * half ** (half - 1)
                low, high = (middle, high) if within else (low, middle)
            out = log_bucket(torch.tensor([low, low + 1, -low, -low - 1]), **sizes(buckets, longest))
            assert out[0] <= half + step < out[1]
            assert out[2:].tolist() == (-out[:2]).tolist()

    def test_borders_side_by_side(self):
        # Of 20014 buckets up to 10009 tokens each holds one distance or none, and a rounded r / 10007 is steps off.
        half = 10_007
        distances = torch.arange(half - 5, half + 40)
        steps = [math.log1p(max(r - half, 0) / half) / math.log1p(1 / half) * (half - 1) for r in distances.tolist()]
        expected = [min(r, half) + math.ceil(step) for r, step in zip(distances.tolist(), steps, strict=True)]
        out = log_bucket(distances, **sizes(2 * half, half + 2))
        assert out.tolist() == [min(bucket, 2 * half) for bucket in expected]

    def test_beyond_all(self):
        far = [longest := 2**24, longest + 1, 2**62, 2**63 - 1]
        assert log_bucket(torch.tensor(far), **sizes(256, longest)).tolist() == [256] * 4

    def test_unsigned(self):
        relative = torch.tensor([0, 3, 200], dtype=torch.uint16)
        assert log_bucket(relative, position_buckets=8, max_relative_positions=40).tolist() == [0, 3, 8]

    @pytest.mark.parametrize(
        ("buckets", "longest", "message"),
        [
            (3, 40, "position_buckets: got 3; it must be at least 4"),
            (256, 129, "max_relative_positions: got 129; with 256 position_buckets it must be above 129"),
        ],
    )
    def test_refusals(self, buckets, longest, message):
        with pytest.raises(ValueError, match=message):
            log_bucket(torch.arange(3), position_buckets=buckets, max_relative_positions=longest)

    def test_fractions(self):
        with pytest.raises(ValueError, match=r"relative: got torch\.float32; give integers"):
            log_bucket(torch.arange(3.0), position_buckets=8, max_relative_positions=40)


def sizes(buckets, longest):
    return {"position_buckets": buckets, "max_relative_positions": longest}


class TestMemory:
    """What a distance costs does not grow with how far the buckets reach."""

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.numbers = max(self.numbers, out.numel() if isinstance(out, torch.Tensor) else 0)
            return out

    @torch.no_grad()
    def test_no_table_of_distances(self):
        bias, (q, k) = small(longest=20_000_000), vectors(5, 9, dtype=torch.float32)
        at = rows_of_positions(5, 9)
        with self.Largest() as largest:
            bias.dense(*at, q=q, k=k)
            bias.score_mod(*at, q=q, k=k)
        # q and k by the table: (B, H, S, 2 span).
        assert largest.numbers <= 2 * HEADS * 9 * 16

    def test_nothing_is_held_that_a_cast_could_spoil(self):
        bias = small()
        held = [value for module in bias.modules() for value in vars(module).values()]
        assert not any(isinstance(value, torch.Tensor) for value in held)
        assert not list(bias.buffers())


class TestTheFormula:
    """Both terms, each alone, with buckets and without, against loops."""

    @pytest.mark.parametrize("terms", [("c2p", "p2c"), ("c2p",), ("p2c",)])
    @pytest.mark.parametrize(("buckets", "longest"), [(8, 40), (None, 6), (None, 200)])
    @torch.no_grad()
    def test_rows_and_groups(self, terms, buckets, longest):
        bias, (q, k) = made("", torch.float64, lambda: small(terms, buckets, longest)), vectors(5, 9)
        at = rows_of_positions(5, 9)
        expected = oracle(bias, *at, q, k)
        # E and D products in float64 of numbers below 8, in two orders.
        torch.testing.assert_close(bias.dense(*at, q=q, k=k), expected, rtol=0, atol=1e-12)

    @torch.no_grad()
    def test_distances_of_all_buckets(self):
        bias, (q, k) = made("", torch.float64, small), vectors(3, 60)
        at = torch.tensor([[0, 400, 10**6]]).expand(2, -1), torch.arange(380, 440).expand(2, -1)
        torch.testing.assert_close(bias.dense(*at, q=q, k=k), oracle(bias, *at, q, k), rtol=0, atol=1e-12)

    @torch.no_grad()
    def test_float32(self):
        bias, (q, k) = made("deberta-v2"), vectors(5, 9, dtype=torch.float32)
        at = rows_of_positions(5, 9)
        # |Kr|, |Qr| are sums of E products and a bias; then D products, a scale and a sum.
        weights = max(p.weight.abs().sum(1).max() for p in (bias.pos_key_proj, bias.pos_query_proj))
        entry = float(bias.rel_embeddings.weight.abs().max() * weights) + 2
        bound = entry * float(q.abs().sum(-1).max() + k.abs().sum(-1).max()) * bias.scale
        atol = (HIDDEN + HEAD_DIM + 3) * 2**-24 * bound
        torch.testing.assert_close(bias.dense(*at, q=q, k=k).double(), oracle(bias, *at, q, k), rtol=0, atol=atol)

    @pytest.mark.parametrize(("terms", "divisor"), [(("c2p", "p2c"), 24), (("p2c",), 16)])
    def test_scale_of_the_scores(self, terms, divisor):
        assert small(terms).score_scale == pytest.approx(divisor**-0.5)


class TestForms:
    """The function for FlexAttention, the heads of a rank, a part of the tokens: the same numbers."""

    @pytest.mark.parametrize("terms", [("c2p", "p2c"), ("c2p",), ("p2c",)])
    @torch.no_grad()
    def test_score_mod(self, terms):
        bias, (q, k) = made("", torch.float64, lambda: small(terms)), vectors(5, 9)
        q_at, k_at = rows_of_positions(5, 9)
        for at in ((q_at, k_at), (q_at[0], k_at), (q_at, k_at[0])):
            mod = bias.score_mod(*at, q=q[:, 2:], k=k[:, 1:], heads=slice(2, 4))
            out = written_out(mod, 2, 2, 5, 9, score=1.0)
            torch.testing.assert_close(out, 1 + bias.dense(*at, q=q, k=k)[:, 2:], rtol=0, atol=1e-13)

    @pytest.mark.parametrize("name", ["deberta", "deberta-v2"])
    @torch.no_grad()
    def test_few_queries_and_few_keys(self, name):
        """With few tokens on one side, only the rows of the tables that they need are gathered."""
        bias, (q, k) = made(name, torch.float64), vectors(13, 17)
        q_at, k_at = rows_of_positions(13, 17)
        whole = bias.dense(q_at, k_at, q=q, k=k)
        for queries, keys in ((slice(12, 13), slice(None)), (slice(None), slice(3, 4)), (slice(4, 6), slice(9, 11))):
            part = bias.dense(q_at[:, queries], k_at[:, keys], q=q[:, :, queries], k=k[:, :, keys])
            torch.testing.assert_close(part, whole[:, :, queries, keys], rtol=0, atol=1e-13)

    @pytest.mark.parametrize("tokens", [1, 4])
    def test_gradients(self, tokens):
        bias, (q, k) = made("deberta-v2", torch.float64), vectors(tokens, 7)
        at = rows_of_positions(tokens, 7)
        names = [name for name, _ in bias.named_parameters()]

        def dense(q, k, *learned):
            return torch.func.functional_call(bias, dict(zip(names, learned, strict=True)), at, {"q": q, "k": k})

        leaves = [x.detach().requires_grad_() for x in (q, k, *bias.parameters())]
        # All five parameters and both vectors at once, in random directions.
        assert torch.autograd.gradcheck(dense, leaves, fast_mode=True)

    @pytest.mark.parametrize("learns", ["q", "k", "pos_key_proj", "pos_query_proj"])
    def test_one_side_frozen(self, learns):
        """Each term's gradient is its own, whichever of the two needs one."""
        bias, (q, k) = made("deberta-v2", torch.float64).requires_grad_(False), vectors(5, 9)
        at = rows_of_positions(5, 9)
        leaf = {"q": q, "k": k}.get(learns)
        leaf = (getattr(bias, learns).weight if leaf is None else leaf).requires_grad_()
        term = "c2p" if learns in ("q", "pos_key_proj") else "p2c"
        alone = made("", torch.float64, lambda: small((term,))).requires_grad_(False)
        alone.rel_embeddings, alone.pos_key_proj, alone.pos_query_proj = (
            bias.rel_embeddings,
            bias.pos_key_proj if term == "c2p" else None,
            bias.pos_query_proj if term == "p2c" else None,
        )
        weight = torch.randn(2, HEADS, 5, 9, dtype=torch.float64)
        one, other = (
            torch.autograd.grad((each.dense(*at, q=q, k=k) * weight).sum(), leaf)[0] / each.scale
            for each in (bias, alone)
        )
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


class TestWhatIsShared:
    """Vectors of distances belong to all layers, projections may be attention's own."""

    def test_nothing_of_others_is_initialised_again(self):
        table, key, query = nn.Embedding(16, HIDDEN), nn.Linear(HIDDEN, 32), nn.Linear(HIDDEN, 32, bias=False)
        before = [p.clone() for module in (table, key, query) for p in module.parameters()]
        bias = DisentangledBias(
            HEADS,
            HEAD_DIM,
            hidden_size=HIDDEN,
            max_relative_positions=40,
            position_buckets=8,
            rel_embeddings=table,
            pos_key_proj=key,
            pos_query_proj=query,
        )
        bias.reset_parameters()
        after = [p for module in (table, key, query) for p in module.parameters()]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        q, k = vectors(5, 9, dtype=torch.float32)
        bias.dense(*rows_of_positions(5, 9), q=q, k=k).square().sum().backward()
        assert all(p.grad.abs().max() > 0 for p in after)

    @torch.no_grad()
    def test_normalised_vectors(self):
        table = RelativeEmbeddings(8, HIDDEN, layer_norm_eps=1e-7)
        table.LayerNorm.weight.normal_()
        bias = made("deberta-v2")
        plain = nn.Embedding(16, HIDDEN)
        plain.weight.copy_(torch.nn.functional.layer_norm(table.weight, (HIDDEN,), table.LayerNorm.weight, eps=1e-7))
        at, (q, k) = rows_of_positions(5, 9), vectors(5, 9, dtype=torch.float32)
        bias.rel_embeddings = table
        out = bias.dense(*at, q=q, k=k)
        bias.rel_embeddings = plain
        assert torch.equal(out, bias.dense(*at, q=q, k=k))

    @torch.no_grad()
    def test_a_projection_that_is_not_plain_is_called(self):
        bias, (q, k) = made("deberta-v2"), vectors(5, 9, dtype=torch.float32)
        at = rows_of_positions(5, 9)
        plain = bias.dense(*at, q=q, k=k)
        bias.pos_key_proj = nn.Sequential(bias.pos_key_proj)
        assert torch.equal(bias.dense(*at, q=q, k=k), plain)


class TestRefusals:
    """What cannot work is said at once."""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"pos_att_type": ("p2p",)}, r'pos_att_type: got \(\'p2p\',\); give \("c2p", "p2c"\)'),
            ({"pos_att_type": ()}, "pos_att_type: got"),
            ({"pos_att_type": "c2p"}, "pos_att_type: got 'c2p'"),
            ({"pos_att_type": ("c2p", "c2p")}, "pos_att_type: got"),
            ({"position_buckets": 2}, "position_buckets: got 2; it must be at least 4"),
            ({"position_buckets": 100}, "max_relative_positions: got 40; with 100 position_buckets"),
            (
                {"max_relative_positions": -1},
                "max_relative_positions: got -1, which in a config stands for its max_position_embeddings; give that",
            ),
            ({"max_relative_positions": 0}, "max_relative_positions: got 0; it must be at least 1"),
            (
                {"pos_att_type": ("c2p",), "pos_query_proj": nn.Identity()},
                "pos_query_proj: it belongs to the term 'p2c', and pos_att_type is",
            ),
        ],
    )
    def test_arguments(self, arguments, message):
        given = {"hidden_size": HIDDEN, "max_relative_positions": 40, **arguments}
        with pytest.raises(ValueError, match=message):
            DisentangledBias(HEADS, HEAD_DIM, **given)

    def test_a_table_of_another_span(self):
        bias, (q, k) = BIASES["deberta-v2"](), vectors(5, 9)
        bias.rel_embeddings = nn.Embedding(80, HIDDEN)
        with pytest.raises(ValueError, match=r"rel_embeddings: got shape \(80, 12\); it must be \(16, E\)"):
            bias.dense(*rows_of_positions(5, 9), q=q, k=k)

    def test_fractions(self):
        q, k = vectors(5, 9)
        with pytest.raises(ValueError, match=r"q_positions: got torch\.float64; give integers"):
            BIASES["deberta"]().dense(torch.arange(5.0, dtype=torch.float64), torch.arange(9), q=q, k=k)
