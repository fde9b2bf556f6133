"""rotary-embedding-torch and ours: equal where it is right, and right where it is not."""

from __future__ import annotations

import pytest
import torch

from theodolite.encodings import RotaryEmbedding
from theodolite.plan import NTK, Linear, Rotary

peer = pytest.importorskip("rotary_embedding_torch")

TOKENS = 63


def inputs(dtype=torch.float32, tokens=TOKENS, dim=64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, tokens, dim, generator=generator).to(dtype)


def ours(x, rotary, positions):
    return RotaryEmbedding(rotary)(x, x, positions)[0]


def bound(x, furthest):
    """Its angles are float32 products of float32 frequencies: three roundings of up to `furthest` radians, and as
    many of the rotation."""
    return 3 * (furthest + 1) * 2.0**-24 * x.double().norm(dim=-1, keepdim=True)


class TestAgree:
    """Near position 0, where float32 angles are still good, both turn the same pairs by the same angles."""

    @pytest.mark.parametrize("offset", [0, 5, 100])
    def test_rotation(self, offset):
        x = inputs()
        theirs = peer.RotaryEmbedding(dim=64).rotate_queries_or_keys(x, offset=offset)
        mine = ours(x, Rotary(head_dim=64, rope_theta=1e4, interleaved=True), torch.arange(offset, offset + TOKENS))
        assert ((mine - theirs).abs() <= bound(x, offset + TOKENS)).all()

    def test_partial_width(self):
        x = inputs()
        theirs = peer.RotaryEmbedding(dim=32).rotate_queries_or_keys(x)
        plan = Rotary(head_dim=64, rope_theta=1e4, rotary_dim=32, interleaved=True)
        mine = ours(x, plan, torch.arange(TOKENS))
        assert ((mine - theirs).abs() <= bound(x, TOKENS)).all()
        assert torch.equal(mine[..., 32:], theirs[..., 32:])

    @pytest.mark.parametrize(
        ("theirs", "scaling"),
        [({"interpolate_factor": 4.0}, Linear(factor=4)), ({"theta_rescale_factor": 4.0}, NTK(factor=4))],
    )
    def test_scalings(self, theirs, scaling):
        x = inputs()
        mine = ours(x, Rotary(head_dim=64, rope_theta=1e4, scaling=scaling, interleaved=True), torch.arange(TOKENS))
        theirs = peer.RotaryEmbedding(dim=64, **theirs).rotate_queries_or_keys(x)
        assert ((mine - theirs).abs() <= bound(x, TOKENS)).all()

    def test_tokens_first(self):
        x = inputs().transpose(1, 2)
        theirs = peer.RotaryEmbedding(dim=64, seq_before_head_dim=True).rotate_queries_or_keys(x)
        rope = RotaryEmbedding(Rotary(head_dim=64, rope_theta=1e4, interleaved=True))
        mine = rope(x, x, torch.arange(TOKENS), heads_first=False)[0]
        assert ((mine - theirs).abs() <= bound(x, TOKENS)).all()


class TestDiffer:
    """Where the peer is known to be wrong, ours is held to the float64 truth and the peer's error is shown."""

    def test_positions_in_bfloat16(self):
        # From a cold cache it counts in the dtype of the input: past 256, neighbours share a position.
        x = inputs(torch.bfloat16, tokens=2000)
        plan = Rotary(head_dim=64, rope_theta=1e4, interleaved=True)
        true = ours(x.double(), plan, torch.arange(2000))
        mine = ours(x, plan, torch.arange(2000)).double()
        theirs = peer.RotaryEmbedding(dim=64).rotate_queries_or_keys(x).double()
        # One rounding to bfloat16, and the float32 arithmetic before it.
        allowed = 2.0**-8 * true.abs() + 4 * 2.0**-24 * x.double().norm(dim=-1, keepdim=True)
        assert ((mine - true).abs() <= allowed).all()
        assert (theirs - true).abs().max() > 1.0

    def test_angles_in_float32(self):
        x = inputs(torch.float32)
        plan = Rotary(head_dim=64, rope_theta=1e4, interleaved=True)
        positions = torch.arange(1_000_000, 1_000_000 + TOKENS)
        true = ours(x.double(), plan, positions)
        mine = ours(x, plan, positions).double()
        theirs = peer.RotaryEmbedding(dim=64).rotate_queries_or_keys(x, offset=1_000_000).double()
        assert ((mine - true).abs() <= 4 * 2.0**-24 * x.double().norm(dim=-1, keepdim=True)).all()
        assert (theirs - true).abs().max() > 1e-2

    def test_state_dict(self):
        assert "freqs" in peer.RotaryEmbedding(dim=64).state_dict()
        rope = RotaryEmbedding(Rotary(head_dim=64, rope_theta=1e4, interleaved=True))
        assert rope.state_dict() == {}
        # Its checkpoints load, for what they hold follows from the plan.
        with pytest.warns(UserWarning, match="the checkpoint's freqs is not read"):
            rope.load_state_dict(peer.RotaryEmbedding(dim=64).state_dict(), strict=True)
        # Unless it does not: another base there, or frequencies that were learned, are not passed over.
        with pytest.raises(
            RuntimeError, match=r"freqs: the checkpoint's frequencies, 1 to 0\.000260989, are not those"
        ):
            rope.load_state_dict(peer.RotaryEmbedding(dim=64, theta=5000).state_dict(), strict=True)
