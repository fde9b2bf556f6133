"""Rotations side by side: each part turns as it would alone, and what has none passes."""

from __future__ import annotations

import pytest
import torch

from theodolite.encodings.rotate.parts import RotateByChannel, RotateByHead
from theodolite.encodings.rotate.rotary import RotaryEmbedding
from theodolite.encodings.shared import SharedTables
from theodolite.plan import DynamicNTK, Rotary


def rope(head_dim: int, rope_theta: float = 1e4, **options) -> RotaryEmbedding:
    return RotaryEmbedding(Rotary(head_dim=head_dim, rope_theta=rope_theta, **options))


def heads(*counts: int, tokens: int = 7, width: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, count, tokens, width, generator=generator) for count in counts]


POSITIONS = torch.stack((torch.arange(7), torch.arange(100, 107)))


class TestByHead:
    """MoICE, HARPE and hybrids: a head has the rotation of its part; a query has that of its key."""

    @pytest.mark.parametrize("heads_first", [True, False])
    def test_each_head_as_alone(self, heads_first):
        slow, fast = rope(16, 5e5), rope(16, rotary_dim=8, interleaved=True)
        both = RotateByHead([(slow, 1), (None, 1), (fast, 2)])
        q, k = heads(8, 4)
        alone_q = torch.cat((slow(q[:, :2], None, POSITIONS)[0], q[:, 2:4], fast(q[:, 4:], None, POSITIONS)[0]), 1)
        alone_k = torch.cat((slow(k[:, :1], None, POSITIONS)[0], k[:, 1:2], fast(k[:, 2:], None, POSITIONS)[0]), 1)
        if not heads_first:
            q, k, alone_q, alone_k = (x.transpose(1, 2) for x in (q, k, alone_q, alone_k))
        turned = both(q, k, POSITIONS, heads_first=heads_first)
        assert torch.equal(turned[0], alone_q)
        assert torch.equal(turned[1], alone_k)

    def test_only_queries_or_only_keys(self):
        both = RotateByHead([(rope(16), 1), (None, 1)])
        q, k = heads(4, 2)
        assert torch.equal(both(q, None, POSITIONS)[0], both(q, k, POSITIONS)[0])
        assert both(None, k, POSITIONS)[0] is None

    def test_in_place(self):
        both = RotateByHead([(rope(16), 1), (None, 1)])
        q, k = heads(4, 2)
        expected = both(q, k, POSITIONS)
        out = both.apply_tables(q, k, both.tables(POSITIONS), inplace=True)
        assert out[0] is q
        assert out[1] is k
        assert torch.equal(q, expected[0])
        assert torch.equal(k, expected[1])

    def test_values_and_back(self):
        both = RotateByHead([(rope(16), 1), (None, 1)])
        (v,) = heads(2)
        tables = both.tables(POSITIONS, amplitude=False)
        back = both.turn_output_back(both.turn_values(v, tables), tables)
        assert (back - v).abs().max() < 8 * 2**-24 * v.abs().max()
        assert not torch.equal(both.turn_values(v, tables)[:, :1], v[:, :1])

    def test_heads_that_do_not_divide(self):
        with pytest.raises(
            ValueError, match=r"q: got shape \(2, 3, 7, 16\); its parts are \[1, 1\] along dimension -3"
        ):
            RotateByHead([(rope(16), 1), (None, 1)])(heads(3)[0], None, POSITIONS)

    @pytest.mark.parametrize(
        ("parts", "text"),
        [
            ([], "parts: got none"),
            ([(None, 0)], "parts: got 0 heads; it must be a whole number of at least 1"),
            ([(Rotary(head_dim=8, rope_theta=1e4), 1)], "parts: got a Rotary; a part is a Rotate module"),
        ],
    )
    def test_refusals(self, parts, text):
        with pytest.raises(ValueError, match=text):
            RotateByHead(parts)


class TestByChannel:
    """Gemma 4's image encoder: each half of the head turns alone, by an axis of its own."""

    def test_halves_by_axis(self):
        half = rope(8, 100.0)
        both = RotateByChannel([(half, 8), (half, 8)], axis_of_parts=[0, 1])
        q, k = heads(4, 2)
        grid = torch.stack((POSITIONS, 2 * POSITIONS + 1))
        turned = both(q, k, grid)[0]
        assert torch.equal(turned[..., :8], half(q[..., :8], None, grid[0])[0])
        assert torch.equal(turned[..., 8:], half(q[..., 8:], None, grid[1])[0])

    def test_part_without_rotation_passes(self):
        part = RotateByChannel([(None, 8), (rope(8), 8)])
        (q,) = heads(4)
        turned = part(q, None, POSITIONS)[0]
        assert torch.equal(turned[..., :8], q[..., :8])
        # Two halves of which one turns is what the plan calls trailing.
        assert torch.equal(turned, rope(16, rotary_dim=8, trailing=True)(q, None, POSITIONS)[0])

    def test_wrong_axes(self):
        both = RotateByChannel([(rope(8), 8), (rope(8), 8)], axis_of_parts=[0, 1])
        with pytest.raises(
            ValueError, match=r"positions: got shape \(2, 7\); it must be \(axes, B, S\) with at least 2"
        ):
            both(*heads(4, 2), POSITIONS)
        with pytest.raises(ValueError, match=r"axis_of_parts: got \[0\]; one for each of the 2 parts is needed"):
            RotateByChannel([(rope(8), 8), (rope(8), 8)], axis_of_parts=[0])

    def test_wrong_width(self):
        with pytest.raises(
            ValueError, match=r"k: got shape \(2, 2, 7, 16\); its parts are \[8, 4\] along dimension -1"
        ):
            RotateByChannel([(rope(8), 8), (None, 4)])(None, heads(2)[0], POSITIONS)


class TestSharedTables:
    """One forward makes the tables of a rotation once, however many layers ask."""

    def test_equal_plans_share(self):
        tables = SharedTables(POSITIONS)
        assert tables.of(rope(16)) is tables.of(rope(16))
        assert tables.of(rope(16)) is not tables.of(rope(16, 5e5))
        assert tables.of(rope(16)) is not tables.of(rope(16), amplitude=False)

    def test_equal_parts_share(self):
        tables = SharedTables(POSITIONS)
        first, second = (RotateByHead([(rope(16), 1), (None, 1)]) for _ in "ab")
        assert tables.of(first) is tables.of(second)
        assert tables.of(first) is not tables.of(RotateByHead([(None, 1), (rope(16), 1)]))
        assert tables.of(first) is not tables.of(RotateByHead([(rope(16), 1), (None, 2)]))

    def test_lengths_reach_every_part(self):
        dynamic = rope(16, scaling=DynamicNTK(factor=2, original_max_position_embeddings=16))
        tables = SharedTables(POSITIONS, lengths=[7, 107])
        first = tables.of(RotateByHead([(dynamic, 1), (None, 1)]))[0]
        assert torch.equal(first.cos[1], dynamic.tables(POSITIONS, lengths=[7, 107]).cos[1])
