"""Two levels of position: at both ends it is an encoding that exists already."""

from __future__ import annotations

import pytest
import torch

from theodolite.encodings import RotaryEmbedding
from theodolite.encodings.embed.bilevel import Bilevel
from theodolite.encodings.embed.learned import LearnedEmbedding
from theodolite.encodings.embed.sinusoidal import Sinusoidal
from theodolite.plan import Rotary
from theodolite.positions.packing import from_document_ids
from theodolite.positions.segments import Segments, segment_positions

TOKENS, WIDTH = 9, 8
ROPE = RotaryEmbedding(Rotary(head_dim=8, rope_theta=10000.0))
EMBEDS = [Sinusoidal(WIDTH), LearnedEmbedding(TOKENS, WIDTH)]


def inputs(batch=2, tokens=TOKENS):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(batch, tokens, WIDTH, generator=generator), torch.randn(batch, 3, tokens, 8, generator=generator)


@pytest.mark.parametrize("embed", EMBEDS, ids=["sinusoidal", "learned"])
class TestEnds:
    """One segment is the absolute encoding; segments of one token are the relative encoding."""

    def test_one_segment_is_the_absolute_encoding(self, embed):
        x, q = inputs()
        segments = segment_positions(starts=torch.zeros(2, TOKENS, dtype=torch.bool))
        assert torch.equal(Bilevel(embed)(x, segments), embed(x, torch.arange(TOKENS)))
        assert torch.equal(ROPE(q, None, segments.inter)[0], q)

    def test_segments_of_one_token_are_the_relative_encoding(self, embed):
        x, q = inputs()
        segments = segment_positions(starts=torch.ones(2, TOKENS, dtype=torch.bool))
        assert torch.equal(Bilevel(embed)(x, segments), x + embed.table(torch.zeros(1, dtype=torch.int64)))
        assert torch.equal(ROPE(q, None, segments.inter)[0], ROPE(q, None, torch.arange(TOKENS))[0])

    def test_between_each_token_has_its_place_in_its_segment(self, embed):
        x, _ = inputs()
        starts = torch.tensor([[1, 0, 0, 1, 0, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 1, 0]], dtype=torch.bool)
        out = Bilevel(embed)(x, segment_positions(starts=starts))
        for row, lengths in enumerate([(3, 2, 4), (1, 6, 2)]):
            first = 0
            for length in lengths:
                alone = embed(x[row : row + 1, first : first + length], torch.arange(length))
                assert torch.equal(out[row : row + 1, first : first + length], alone)
                first += length

    def test_documents_in_a_pack_are_as_alone(self, embed):
        x, _ = inputs(batch=1)
        out = embed(x, from_document_ids(torch.tensor([[7, 7, 7, 7, 2, 4, 4, 4, 4]])))
        for first, end in ((0, 4), (4, 5), (5, 9)):
            assert torch.equal(out[:, first:end], embed(x[:, first:end], torch.arange(end - first)))

    def test_only_at_the_starts_of_segments(self, embed):
        x, _ = inputs()
        starts = torch.tensor([1, 0, 0, 1, 0, 1, 0, 0, 0], dtype=torch.bool)
        out = embed(x, segment_positions(starts=starts).inter, mask=starts)
        assert torch.equal(out[:, ~starts], x[:, ~starts])
        assert torch.equal(out[:, starts], x[:, starts] + embed.table(torch.arange(3)))


class TestModule:
    """Thin: what is learned is the embedding's own."""

    def test_parameters(self):
        bilevel = Bilevel(LearnedEmbedding(TOKENS, WIDTH))
        assert list(bilevel.state_dict()) == ["embed.weight"]
        with torch.no_grad():
            bilevel.embed.weight.fill_(7.0)
        bilevel.reset_parameters()
        assert not (bilevel.embed.weight == 7.0).any()

    def test_mask_is_handed_on(self):
        x, _ = inputs()
        mask = torch.arange(TOKENS) < 4
        segments = segment_positions(starts=mask)
        embed = Sinusoidal(WIDTH)
        assert torch.equal(Bilevel(embed)(x, segments, mask=mask), embed(x, segments.intra, mask=mask))

    def test_compiled(self):
        torch._dynamo.reset()
        bilevel, (x, _) = Bilevel(Sinusoidal(WIDTH)), inputs()
        segments = Segments(torch.arange(TOKENS) % 4, torch.arange(TOKENS) // 4)
        compiled = torch.compile(bilevel, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, segments), bilevel(x, segments))

    def test_refusals(self):
        with pytest.raises(ValueError, match="embed: got a RotaryEmbedding; give an Embed"):
            Bilevel(ROPE)
        with pytest.raises(ValueError, match="segments: got a Tensor; give what segment_positions returns"):
            Bilevel(Sinusoidal(WIDTH))(inputs()[0], torch.arange(TOKENS))
