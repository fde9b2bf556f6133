"""xPos of the peers and ours: the same numbers at their centre, which moves with a call's length; ours does not."""

from __future__ import annotations

import pytest
import torch

from theodolite.encodings.rotate.xpos import XPos
from theodolite.plan import Rotary

rotary_embedding_torch = pytest.importorskip("rotary_embedding_torch")
x_transformers = pytest.importorskip("x_transformers.x_transformers")

DIM = 64
PLAN = Rotary(head_dim=DIM, rope_theta=10000.0, interleaved=True)


def inputs(tokens: int):
    generator = torch.Generator().manual_seed(0)
    # The first tokens of a longer call are those of a shorter one.
    q, k = torch.randn(2, 2, 256, 3, DIM, generator=generator)
    return q[:, :tokens].transpose(1, 2), k[:, :tokens].transpose(1, 2)


def by_rotary_embedding_torch(q, k):
    return rotary_embedding_torch.RotaryEmbedding(dim=DIM, use_xpos=True).rotate_queries_and_keys(q, k)


def by_x_transformers(q, k):
    freqs, scale = x_transformers.RotaryEmbedding(DIM, use_xpos=True).forward_from_seq_len(q.shape[2])
    turn = x_transformers.apply_rotary_pos_emb
    return turn(q, freqs, scale), turn(k, freqs, scale**-1)


PEERS = pytest.mark.parametrize("peer", [by_rotary_embedding_torch, by_x_transformers])


@PEERS
class TestAgree:
    """At the centre that a peer takes for a length, both give the same queries and keys."""

    @pytest.mark.parametrize("tokens", [1, 63, 128])
    def test_at_their_centre(self, peer, tokens):
        q, k = inputs(tokens)
        mine = XPos(PLAN, centre=tokens // 2)(q, k, torch.arange(tokens))
        for x, ours, theirs in zip((q, k), mine, peer(q, k), strict=True):
            # Their angles and powers are float32: three roundings of up to `tokens` radians, a few of the rest;
            # factors are below e^(0.00245 * 64) = 1.17.
            bound = 1.17 * 3 * (tokens + 3) * 2.0**-24 * x.double().norm(dim=-1, keepdim=True)
            assert ((ours.double() - theirs.double()).abs() <= bound).all()


@PEERS
class TestDiffer:
    """A peer's key 0 depends on how many tokens came with it, so a cached key does not fit a longer call's queries."""

    def test_with_the_length_of_the_call(self, peer):
        _, of_64 = peer(*inputs(64))
        _, of_128 = peer(*inputs(128))
        theirs = (of_64 - of_128[:, :, :64])[:, :, 0].norm() / of_64[:, :, 0].norm()
        assert theirs > 0.02
        rope = XPos(PLAN, centre=32)
        _, mine_64 = rope(*inputs(64), torch.arange(64))
        _, mine_128 = rope(*inputs(128), torch.arange(128))
        assert torch.equal(mine_64, mine_128[:, :, :64])

    def test_scores_of_a_cached_key(self, peer):
        # Prefill of 64 tokens, then one call that sees 128: the query of the one, the keys of the other.
        q_peer, k_all = peer(*inputs(128))
        _, k_peer = peer(*inputs(64))
        whole = torch.einsum("bhd,bhkd->bhk", q_peer[:, :, 127], k_all[:, :, :64])
        mixed = torch.einsum("bhd,bhkd->bhk", q_peer[:, :, 127], k_peer)
        assert (mixed - whole).norm() / whole.norm() > 0.02
        rope = XPos(PLAN, centre=32)
        _, k_whole = rope(*inputs(128), torch.arange(128))
        _, k_mine = rope(None, inputs(64)[1], torch.arange(64))
        assert torch.equal(k_mine, k_whole[:, :, :64])
