"""CoPE: positions that count what the query wants counted, over the keys that it sees."""

from __future__ import annotations

import math

import pytest
import torch

from tests.encodings.bias.content_cases import HEAD_DIM, HEADS, made, rows_of_positions, vectors
from theodolite.encodings.bias.cope import CoPE
from theodolite.positions import visible_in_documents


def oracle(bias, q_positions, k_positions, q, k, visible=None):
    """q.e[p], p the sum of gates from the key up to the query, interpolated; keys unseen are not counted."""
    embedding, most = bias.pos_emb[0].double(), bias.max_positions - 1
    out = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys = k[b, h // (q.shape[1] // k.shape[1])].double()
            for i in range(q.shape[2]):
                query = q[b, h, i].double()
                seen = [
                    j
                    for j in range(k.shape[2])
                    if k_positions[b, j] <= q_positions[b, i] and (visible is None or visible[b, h, i, j])
                ]
                for j in seen:
                    between = [t for t in seen if (k_positions[b, t], t) >= (k_positions[b, j], j)]
                    gates = [1 / (1 + math.exp(-float(query @ keys[t]) / math.sqrt(HEAD_DIM))) for t in between]
                    p = min(sum(gates), most)
                    below, above = math.floor(p), math.ceil(p)
                    at = [float(query @ embedding[:, whole]) for whole in (below, above)]
                    out[b, h, i, j] = at[1] * (p - below) + at[0] * (1 - (p - below))
    return out * (HEAD_DIM**-0.5 if bias.scale_positions else 1)


def seen(q_positions, k_positions):
    return (k_positions[:, None, None] <= q_positions[:, None, :, None]).expand(-1, HEADS, -1, -1)


def close(one, other, where, atol=1e-12):
    """Sums of D and Sk terms in float64; pairs that are not seen have no meaning."""
    torch.testing.assert_close(torch.where(where, one, 0).double(), torch.where(where, other, 0), rtol=0, atol=atol)


class TestTheFormula:
    """The printed listing, against loops."""

    @pytest.mark.parametrize("max_positions", [1, 3, 7, 64])
    @pytest.mark.parametrize("scale_positions", [False, True])
    @torch.no_grad()
    def test_rows_and_groups(self, max_positions, scale_positions):
        make = lambda: CoPE(HEADS, HEAD_DIM, max_positions, scale_positions=scale_positions)  # noqa: E731
        bias, (q, k) = made("", torch.float64, make), vectors(5, 9)
        at = rows_of_positions(5, 9)
        close(bias.dense(*at, q=q, k=k), oracle(bias, *at, q, k), seen(*at))

    @torch.no_grad()
    def test_float32(self):
        """p is off by the error of Sk gates; the bias by as much of the step between embeddings, and by q.e."""
        bias, (q, k) = made("cope"), vectors(5, 9, dtype=torch.float32)
        at = rows_of_positions(5, 9)
        q_size, k_size = q.abs().sum(-1).max(), k.abs().max()
        logit = float(q_size * k_size) * HEAD_DIM**-0.5
        dot = float(q_size * bias.pos_emb.abs().max())
        # A sigmoid's slope is at most 1/4; a sum of 9 numbers below 1 rounds 9 times.
        p = 9 * ((HEAD_DIM + 1) * logit / 4 + 2 + 9) * 2**-24
        atol = 2 * dot * p + (HEAD_DIM + 3) * dot * 2**-24
        close(bias.dense(*at, q=q, k=k), oracle(bias, *at, q, k), seen(*at), atol)

    @torch.no_grad()
    def test_open_gates_give_learned_relative_positions(self):
        """Where all count, p is the distance plus 1, since a key counts itself."""
        bias, q_at = made("cope"), torch.arange(100, 111)
        q = torch.rand(1, HEADS, 11, HEAD_DIM) + 1
        # Logits above 17, whose sigmoid is 1 in float32.
        k = torch.full((1, 2, 11, HEAD_DIM), 10.0)
        out = bias.dense(q_at, q_at, q=q, k=k)
        dots = q @ bias.pos_emb
        for i in range(11):
            for j in range(i + 1):
                assert torch.equal(out[0, :, i, j], dots[0, :, i, min(i - j + 1, 6)])

    @torch.no_grad()
    def test_shut_gates_leave_position_0(self):
        bias, at = made("cope"), torch.arange(11)
        q, k = torch.rand(1, HEADS, 11, HEAD_DIM) + 1, torch.full((1, 2, 11, HEAD_DIM), -100.0)
        dots = (q @ bias.pos_emb)[..., :1].expand(-1, -1, -1, 11)
        # Gates of e^-280 and less are 0.
        assert torch.equal(bias.dense(at, at, q=q, k=k), dots)


class TestWhatIsCounted:
    """The keys that attention sees, in the order of their positions."""

    @torch.no_grad()
    def test_the_order_in_memory_does_not_matter(self):
        """A cache that is a ring, or pages in any order."""
        bias, (q, k) = made("cope", torch.float64), vectors(5, 9)
        q_at, k_at = rows_of_positions(5, 9)
        shuffled = torch.tensor([4, 8, 0, 2, 7, 1, 5, 3, 6])
        whole = bias.dense(q_at, k_at, q=q, k=k)
        out = bias.dense(q_at, k_at[:, shuffled], q=q, k=k[:, :, shuffled])
        torch.testing.assert_close(out, whole[..., shuffled], rtol=0, atol=1e-13)

    @torch.no_grad()
    def test_keys_after_the_query_count_for_nothing(self):
        bias, (q, k) = made("cope", torch.float64), vectors(5, 9)
        q_at, k_at = torch.arange(4, 9), torch.arange(9)
        whole = bias.dense(q_at, k_at, q=q, k=k)
        for i in range(5):
            alone = bias.dense(q_at[i : i + 1], k_at[: 5 + i], q=q[:, :, i : i + 1], k=k[:, :, : 5 + i])
            # Prefill in chunks and decoding: the sums are over the same keys.
            torch.testing.assert_close(alone, whole[:, :, i : i + 1, : 5 + i], rtol=0, atol=1e-13)

    @torch.no_grad()
    def test_a_mask_of_any_kind(self):
        bias, (q, k) = made("cope", torch.float64), vectors(5, 9)
        at = rows_of_positions(5, 9)
        mask = torch.rand(2, HEADS, 5, 9, generator=torch.Generator().manual_seed(3)) < 0.6
        out = bias.dense(*at, q=q, k=k, visible=mask)
        close(out, oracle(bias, *at, q, k, mask), seen(*at) & mask)
        keys = mask[:, :1, :1]
        out = bias.dense(*at, q=q, k=k, visible=keys)
        close(out, oracle(bias, *at, q, k, keys.expand(mask.shape)), seen(*at) & keys)
        rows = mask[:, 0]
        assert torch.equal(
            bias.dense(*at, q=q, k=k, visible=rows),
            bias.dense(*at, q=q, k=k, visible=rows[:, None].expand(mask.shape)),
        )
        pairs = mask[:1, 0]
        assert torch.equal(
            bias.dense(*at, q=q, k=k, visible=pairs), bias.dense(*at, q=q, k=k, visible=pairs[None].expand(mask.shape))
        )

    @torch.no_grad()
    def test_documents_in_one_row(self):
        """Each document counts as if it were alone."""
        bias, (q, k) = made("cope", torch.float64), vectors(9, 9)
        at, document = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4]), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
        out = bias.dense(at, at, q=q, k=k, visible=visible_in_documents(document))
        for part in (slice(0, 4), slice(4, 9)):
            alone = bias.dense(at[part], at[part], q=q[:, :, part], k=k[:, :, part])
            there = (at[part][:, None] >= at[part][None]).expand(alone.shape)
            close(out[:, :, part, part], alone, there)

    @pytest.mark.parametrize(
        ("mask", "message"),
        [
            (torch.ones(5, 9), "visible: got torch.float32; give booleans"),
            (
                torch.ones(2, 9, dtype=torch.bool),
                r"visible: got shape \(2, 9\); it must be \(B, 5, 9\) .* visible_keys",
            ),
            (torch.ones(5, 9, dtype=torch.bool), r"visible: got shape \(5, 9\); .* and \[None\] of \(Sq, Sk\)"),
            (torch.ones(3, 5, 9, dtype=torch.bool), r"visible: got shape \(3, 5, 9\); it must be \(B, 5, 9\)"),
            (torch.ones(9, dtype=torch.bool), r"visible: got shape \(9,\); it must be"),
            (torch.ones(1, 2, 4, 5, 9, dtype=torch.bool), r"visible: got shape \(1, 2, 4, 5, 9\); it must be"),
        ],
    )
    def test_refused_masks(self, mask, message):
        q, k = vectors(5, 9)
        with pytest.raises(ValueError, match=message):
            made("cope").dense(*rows_of_positions(5, 9), q=q, k=k, visible=mask)


class TestForms:
    """One form only, with gradients for all that is learned and all that is read."""

    @torch.no_grad()
    def test_heads_of_a_rank(self):
        bias, (q, k) = made("cope", torch.float64), vectors(5, 9)
        at = rows_of_positions(5, 9)
        part = bias.dense(*at, q=q[:, 2:], k=k[:, 1:], heads=slice(2, 4))
        torch.testing.assert_close(part, bias.dense(*at, q=q, k=k)[:, 2:], rtol=0, atol=1e-13)
        assert bias.score_mod(*at, q=q, k=k) is None

    def test_gradients(self):
        bias, (q, k) = made("cope", torch.float64), vectors(4, 7)
        at = rows_of_positions(4, 7)

        def dense(q, k, table):
            return torch.func.functional_call(bias, {"pos_emb": table}, at, {"q": q, "k": k})

        leaves = [x.detach().requires_grad_() for x in (q, k, bias.pos_emb)]
        assert torch.autograd.gradcheck(dense, leaves)

    def test_begins_as_nothing(self):
        bias, (q, k) = CoPE(HEADS, HEAD_DIM, 7), vectors(5, 9)
        assert bias.pos_emb.shape == (1, HEAD_DIM, 7)
        assert bias.dense(*rows_of_positions(5, 9), q=q, k=k).abs().max() == 0

    def test_arguments(self):
        with pytest.raises(ValueError, match="max_positions: got 0; it must be at least 1"):
            CoPE(HEADS, HEAD_DIM, 0)
