"""A chunk's positions are a piece of the whole's, whatever the chunks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.positions.chunks import chunk, chunk_sizes, chunks
from theodolite.positions.padding import from_attention_mask


def shapes(tokens: int) -> list[torch.Tensor]:
    """Positions that no chunk could make anew: left padding, and three axes with an image in the middle."""
    mask = torch.ones(2, tokens, dtype=torch.int64)
    mask[0, : tokens // 3] = 0
    image = torch.arange(tokens).repeat(3, 2, 1)
    image[:, :, tokens // 2 :] -= tokens // 4
    image[1:, 1, tokens // 4 : tokens // 2] = 7
    return [torch.arange(tokens), from_attention_mask(mask), image]


class TestChunksAreTheWhole:
    """Evaluation scores fell as soon as a prefill chunk size was set: each chunk began at 0, or past its end."""

    @pytest.mark.parametrize("sizes", [32, (32, 8), 7, 40, 1, 100, (1, 38, 1)])
    def test_forty_tokens(self, sizes):
        for positions in shapes(40):
            parts = list(chunks(positions, sizes=sizes))
            assert torch.equal(torch.cat([part.positions for part in parts], dim=-1), positions)
            assert parts[0].start == 0
            assert parts[-1].stop == 40
            assert all(part.positions.shape[-1] == part.stop - part.start for part in parts)
            assert all(left.stop == right.start for left, right in pairwise(parts))

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    def test_any_sizes(self, sizes):
        positions = torch.randint(0, 10**6, (3, 2, sum(sizes)))
        parts = [part.positions for part in chunks(positions, sizes=sizes)]
        assert torch.equal(torch.cat(parts, dim=-1), positions)

    def test_a_chunk_starts_at_the_sum_of_those_before(self):
        assert [(part.start, part.stop) for part in chunks(torch.arange(42), sizes=(7,) * 6)] == [
            (7 * number, 7 * number + 7) for number in range(6)
        ]

    def test_fractions_stay_fractions(self):
        positions = torch.linspace(0, 1, 5, dtype=torch.float64)
        assert torch.equal(chunk(positions, start=1, length=2), positions[1:3])


class TestRowsOfDifferentLength:
    """Rows that have gone different ways are cut at different places."""

    def test_each_row_from_its_own_start(self):
        start = torch.tensor([3, 30], dtype=torch.int32)
        for positions in shapes(40)[1:]:
            piece = chunk(positions, start=start, length=10)
            assert torch.equal(piece[..., 0, :], positions[..., 0, 3:13])
            assert torch.equal(piece[..., 1, :], positions[..., 1, 30:40])

    def test_graph(self):
        positions, start = torch.arange(20).reshape(2, 10), torch.tensor([0, 4])
        compiled = torch.compile(chunk, fullgraph=True, backend="eager")
        assert torch.equal(compiled(positions, start=start, length=3), chunk(positions, start=start, length=3))
        assert torch.equal(compiled(positions, start=2, length=3), positions[:, 2:5])
        assert chunk(positions.to("meta"), start=start.to("meta"), length=3).shape == (2, 3)


class TestSizes:
    """The sizes cover the tokens exactly."""

    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, 200), st.integers(1, 60))
    def test_cover(self, total, size):
        sizes = chunk_sizes(total, size=size)
        assert sum(sizes) == total
        assert all(each == size for each in sizes[:-1])
        assert all(0 < each <= size for each in sizes)

    def test_forty_by_thirty_two(self):
        assert chunk_sizes(40, size=32) == (32, 8)


class TestRefusals:
    """A slice that runs over the end comes out short without a word; this does not."""

    def test_past_the_end(self):
        with pytest.raises(ValueError, match="start: 30 and length 11 reach token 41; there are 40"):
            chunk(torch.arange(40), start=30, length=11)
        with pytest.raises(ValueError, match="start: 9 and length 2 in row 1 reach token 11; there are 10"):
            chunk(torch.arange(20).reshape(2, 10), start=torch.tensor([0, 9]), length=2)
        with pytest.raises(ValueError, match="start: -1 and length 2 in row 0"):
            chunk(torch.arange(20).reshape(2, 10), start=torch.tensor([-1, 0]), length=2)
        with pytest.raises(ValueError, match="start: got -3; it must be at least 0"):
            chunk(torch.arange(40), start=-3, length=2)
        with pytest.raises(ValueError, match="length: got 0; it must be at least 1"):
            chunk(torch.arange(40), start=0, length=0)

    def test_sizes_at_the_call(self):
        with pytest.raises(ValueError, match=r"sizes: \[32, 7\] sum to 39; there are 40 tokens"):
            chunks(torch.arange(40), sizes=(32, 7))
        with pytest.raises(ValueError, match="sizes: got 0; it must be at least 1"):
            chunks(torch.arange(40), sizes=(40, 0))
        with pytest.raises(ValueError, match="size: got 0; it must be at least 1"):
            chunks(torch.arange(40), sizes=0)

    def test_shapes_and_dtypes(self):
        with pytest.raises(ValueError, match=r"start: got shape \(3,\) for positions of shape \(2, 10\); one per row"):
            chunk(torch.arange(20).reshape(2, 10), start=torch.tensor([0, 1, 2]), length=2)
        with pytest.raises(ValueError, match=r"start: got shape \(1,\) for positions of shape \(10,\)"):
            chunk(torch.arange(10), start=torch.tensor([0]), length=2)
        with pytest.raises(
            ValueError,
            match=r"positions: got torch.bfloat16; give integers, or float32 or float64 for fractions; "
            r"torch.bfloat16 cannot count past 256",
        ):
            chunk(torch.zeros(4, dtype=torch.bfloat16), start=0, length=1)
        with pytest.raises(ValueError, match=r"positions: got torch.float16; .* cannot count past 2048"):
            chunks(torch.zeros(4, dtype=torch.float16), sizes=2)
        with pytest.raises(
            ValueError, match=r"positions: got torch.bool; give integers, or float32 or float64 for frac\w+$"
        ):
            chunk(torch.zeros(4, dtype=torch.bool), start=0, length=1)
        with pytest.raises(
            ValueError, match="positions: they require a gradient, and positions give none; detach them"
        ):
            chunk(torch.zeros(4, requires_grad=True), start=0, length=1)
        with pytest.raises(
            ValueError, match=r"positions: got shape \(\); it must be \(S,\) or \(B, S\) or \(axes, B, S\)"
        ):
            chunk(torch.tensor(4), start=0, length=1)
        with pytest.raises(ValueError, match="positions: got a list; they must be a tensor, one number per token"):
            chunks([1, 2], sizes=1)

    @pytest.mark.parametrize(("dtype", "last"), [(torch.bfloat16, 256), (torch.float16, 2048)])
    def test_the_reason_given_for_half_precision_is_true(self, dtype, last):
        counts = torch.arange(last + 2)
        distinct = counts.to(dtype).unique()
        assert torch.equal(counts[: last + 1].to(dtype).long(), counts[: last + 1])
        assert len(distinct) == last + 1
