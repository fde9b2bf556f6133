"""Where an instrument reads: inside the text, each token once, at its own position."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from theodolite.survey.instruments import _fitted
from theodolite.survey.passages import CUE, LENGTH, SCORED, passages_at, positions_at, spread_starts
from theodolite.survey.passes import recall_starts
from theodolite.survey.reach import Spread, far_reach, spread_chunks
from theodolite.survey.settings import checkpoints
from theodolite.survey.verdict import band_edges, band_rows

spreads = st.builds(
    Spread, tokens=st.integers(44, 20_000), chunk=st.integers(44, 2048), passages=st.integers(1, 20)
)  # fmt: skip
lengths = st.integers(8 * LENGTH, 200_000)


class TestPassages:
    """A passage is a piece of the text as it stands there."""

    def test_cut_from_the_text(self):
        text = torch.arange(1000) * 7
        made = passages_at(text, [0, 31, 956])
        assert made.shape == (3, LENGTH) == (3, CUE + SCORED)
        assert torch.equal(made[1], text[31 : 31 + LENGTH])
        assert torch.equal(positions_at([5, 100])[:, [0, -1]], torch.tensor([[5, 48], [100, 143]]))

    @given(begin=st.integers(0, 10**6), size=st.integers(LENGTH, 10**5), count=st.integers(1, 50))
    def test_spread_starts_stay_inside_and_are_even(self, begin, size, count):
        starts = spread_starts(begin, begin + size, count)
        assert len(starts) == count
        assert starts == sorted(starts)
        assert begin <= starts[0]
        assert starts[-1] + LENGTH <= begin + size
        steps = {b - a for a, b in pairwise(starts)}
        # Rounded to whole tokens, steps of one length differ by one at most on either side.
        assert not steps or max(steps) - min(steps) <= 2

    def test_too_small_a_place_says_so(self):
        with pytest.raises(ValueError, match="tokens 10 to 53 are too few for a passage of 44"):
            spread_starts(10, 53, 1)


class TestSpread:
    """The chunks of the spread reach lie in the text, apart from each other, from its beginning to its end."""

    @given(spread=spreads, length=lengths)
    def test_chunks_lie_apart_inside_the_length(self, spread, length):
        form = _fitted(spread, length)
        chunks = spread_chunks(form, length)
        assert chunks[0] == 0
        assert chunks[-1] + form.chunk <= length
        assert all(b - a >= form.chunk for a, b in pairwise(chunks))
        if len(chunks) * form.chunk < length - form.chunk:
            assert chunks[-1] + form.chunk == length

    @given(spread=spreads, length=lengths)
    def test_no_more_is_read_than_asked(self, spread, length):
        form = _fitted(spread, length)
        assert len(spread_chunks(form, length)) <= max(2, spread.tokens // form.chunk)

    @given(spread=spreads, length=lengths)
    def test_passages_of_a_chunk_are_inside_it_and_do_not_overlap(self, spread, length):
        form = _fitted(spread, length)
        starts = spread_starts(0, form.chunk, form.passages)
        assert all(b - a >= LENGTH for a, b in pairwise(starts))
        assert starts[-1] + LENGTH <= form.chunk

    def test_the_default_form_at_the_default_length(self):
        chunks = spread_chunks(Spread(tokens=4096, chunk=256, passages=2), 12288)
        assert (len(chunks), chunks[0], chunks[1], chunks[-1]) == (16, 0, 802, 12032)

    def test_distances_below_what_is_read_are_refused(self):
        with pytest.raises(ValueError, match="distances: got 99; one below the 100 tokens read would set two tokens"):
            far_reach(None, None, torch.arange(100), read=100, distances=[200, 99], passages=1)  # type: ignore[arg-type]


class TestRecall:
    """Recall asks for what was read, and at a depth for what stands there."""

    @given(length=st.integers(3 * LENGTH, 10**6), depth=st.floats(0, 1), passages=st.integers(1, 8))
    def test_passages_were_read(self, length, depth, passages):
        assume(passages * LENGTH <= length)
        starts = recall_starts(length, depth, passages)
        assert starts[0] >= 0
        assert starts[-1] + LENGTH <= length
        assert all(b - a == LENGTH for a, b in pairwise(starts))
        middle = (starts[0] + starts[-1] + LENGTH) / 2
        half = passages * LENGTH / 2
        assert abs(middle - min(max(depth * length, half), length - half)) <= 1

    @given(trained=st.integers(8 * LENGTH, 10**6), to=st.integers(8 * LENGTH, 4 * 10**6))
    def test_checkpoints_rise_to_the_end(self, trained, to):
        stops = checkpoints(trained, to)
        assert stops == sorted(set(stops))
        assert stops[-1] == to
        assert stops[0] >= 3 * LENGTH
        assert len(stops) <= 6
        assert to <= trained or (trained in stops and stops[0] in (trained // 4, trained // 2))


class TestBands:
    """Bands cover every token once, and none lies on both sides of the trained length."""

    @given(length=st.integers(1, 10**5), width=st.integers(1, 10**4), trained=st.integers(1, 10**5))
    def test_edges(self, length, width, trained):
        assume(length / width < 2000)
        edges = band_edges(length, width, trained)
        assert edges[0][0] == 0
        assert edges[-1][1] == length
        assert all(a[1] == b[0] for a, b in pairwise(edges))
        assert all(0 < end - begin <= width for begin, end in edges)
        assert not any(begin < trained < end for begin, end in edges)

    def test_quarters_of_the_trained_length(self):
        assert band_edges(10, 2, 8) == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]
        assert band_edges(11, 2, 7) == [(0, 2), (2, 4), (4, 6), (6, 7), (7, 9), (9, 11)]

    @given(length=st.integers(2, 500), width=st.integers(1, 100), trained=st.integers(1, 500))
    def test_every_scored_token_is_in_the_band_of_its_position(self, length, width, trained):
        assume(width > 1)
        # Entry i is the token at position i + 1; the token at position 0 is predicted from nothing.
        row = torch.arange(1, length + 1).numpy()
        for begin, end in band_edges(length, width, trained):
            (inside,) = band_rows([row], begin, end)
            assert inside.tolist() == list(range(max(begin, 1), end))
