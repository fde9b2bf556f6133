"""LeRoPE and Mistral Large 4's rotary module of transformers."""

from __future__ import annotations

import pytest
import torch

from theodolite.encodings.rotate.learned import LeRoPE
from theodolite.plan import Rotary, YaRN

mistral = pytest.importorskip("transformers.models.mistral_large4.modeling_mistral_large4")
configuration = pytest.importorskip("transformers.models.mistral_large4.configuration_mistral_large4")

DIM = 16
SCALINGS = {
    "default": ({"rope_type": "default"}, {}),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"scaling": YaRN(factor=4, original_max_position_embeddings=64)},
    ),
}


def both(scaling: str):
    """Their module and ours, with the same learned numbers."""
    theirs, ours = SCALINGS[scaling]
    config = configuration.MistralLarge4TextConfig(
        qk_rope_head_dim=DIM, max_position_embeddings=256, rope_parameters={"rope_theta": 10000.0, **theirs}
    )
    peer = mistral.MistralLarge4TextRotaryEmbedding(config)
    with torch.no_grad():
        peer.alpha.copy_(0.3 * torch.randn(DIM // 2, generator=torch.Generator().manual_seed(0)))
    mine = LeRoPE(Rotary(head_dim=DIM, rope_theta=10000.0, interleaved=True, **ours))
    # Its state dict is what is learned, under the same name.
    mine.load_state_dict(peer.state_dict(), strict=True)
    return peer, mine


@pytest.mark.parametrize("scaling", SCALINGS)
class TestMistralLarge4:
    """The same tables, queries, keys and gradients from the same checkpoint."""

    def test_tables(self, scaling):
        peer, mine = both(scaling)
        positions = torch.stack([torch.arange(200), torch.arange(50, 250)])
        cos, sin = peer(torch.zeros(1), positions)
        tables = mine.tables(positions)
        # Their frequencies and angles are float32: a few roundings of up to 250 * e radians; the amplitude is 1.14.
        for theirs, ours in zip((cos, sin), tables, strict=True):
            assert (theirs[..., : DIM // 2] - ours).abs().max() <= 1.14 * 4 * 250 * 2.72 * 2.0**-24

    def test_queries_and_keys(self, scaling):
        peer, mine = both(scaling)
        positions = torch.arange(9)[None] + 20
        generator = torch.Generator().manual_seed(1)
        q, k = torch.randn(2, 1, 2, 9, DIM, generator=generator)
        theirs = mistral.apply_rotary_pos_emb_interleave(q, k, *peer(q, positions))
        for x, one, other in zip((q, k), theirs, mine(q, k, positions), strict=True):
            # Interleaved in, even channels before odd ones out.
            ordered = torch.cat([other[..., 0::2], other[..., 1::2]], -1)
            bound = 1.14 * 4 * (30 * 2.72 + 1) * 2.0**-24 * x.norm(dim=-1, keepdim=True)
            assert ((one - ordered).abs() <= bound).all()

    def test_gradient(self, scaling):
        peer, mine = both(scaling)
        positions = torch.arange(9)[None] + 20
        weight = torch.randn(9, DIM // 2, generator=torch.Generator().manual_seed(2))
        cos, sin = peer(torch.zeros(1), positions)
        ((cos + 2 * sin)[0, :, : DIM // 2] * weight).sum().backward()
        tables = mine.tables(positions)
        ((tables.cos + 2 * tables.sin)[0] * weight).sum().backward()
        # Nine terms of up to 28 * e radians, times an error of the angle of as much in float32.
        size = 1.14 * 3 * 28 * 2.72 * weight.abs().sum(0)
        assert ((mine.alpha.grad - peer.alpha.grad).abs() <= 4 * (28 * 2.72 + 9) * 2.0**-24 * size).all()
        assert mine.alpha.grad.abs().max() > 1

    def test_begins_as_theirs(self, scaling):
        peer, mine = both(scaling)
        mine.reset_parameters()
        with torch.no_grad():
            peer.alpha.zero_()
        positions = torch.arange(64)[None]
        ours = mine.tables(positions)
        for theirs, table in zip(peer(torch.zeros(1), positions), ours, strict=True):
            assert (theirs[..., : DIM // 2] - table).abs().max() <= 1.14 * 4 * 64 * 2.0**-24
