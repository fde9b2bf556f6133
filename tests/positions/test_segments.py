"""Two-level positions: the token in its segment, the segment in its document."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.positions.packing import from_document_ids
from theodolite.positions.padding import from_attention_mask
from theodolite.positions.segments import segment_positions, starts_after


def oracle(starts: list[int], ids: list[int], mask: list[int]) -> tuple[list[int], list[int]]:
    """Walk along: a new document or a flag that has not been used yet opens a segment at the next real token."""
    intra, inter = [], []
    token, segment, document = 0, -1, None
    new_segment = new_document = True
    for start, number, real in zip(starts, ids, mask, strict=True):
        new_segment |= bool(start)
        if number != document:
            new_document, document = True, number
        if not real or number < 0:
            intra.append(0)
            inter.append(0)
            continue
        if new_document:
            token, segment = 0, 0
        elif new_segment:
            token, segment = 0, segment + 1
        new_segment = new_document = False
        intra.append(token)
        inter.append(segment)
        token += 1
    return intra, inter


ROWS = st.lists(st.tuples(st.integers(0, 1), st.integers(-1, 2), st.integers(0, 2)), min_size=1, max_size=14)


class TestBothLevels:
    """The pair names one token of one segment, and a segment is counted the same wherever its row is padded."""

    def test_the_plain_case(self):
        intra, inter = segment_positions(starts=torch.tensor([1, 0, 0, 1, 1, 0]))
        assert intra.tolist() == [0, 1, 2, 0, 0, 1]
        assert inter.tolist() == [0, 0, 0, 1, 2, 2]
        assert intra.dtype == inter.dtype == torch.int64

    @settings(max_examples=150, deadline=None)
    @given(ROWS)
    def test_any_row_with_documents_and_padding(self, row):
        starts, ids, mask = (torch.tensor(column) for column in zip(*row, strict=True))
        intra, inter = segment_positions(starts=starts, document_ids=ids, attention_mask=mask)
        assert (intra.tolist(), inter.tolist()) == oracle(starts.tolist(), ids.tolist(), mask.tolist())

    def test_rows_do_not_meet(self):
        rows = torch.tensor([[0, 1, 0], [0, 0, 1]], dtype=torch.bool)
        both = segment_positions(starts=rows)
        for row in range(2):
            alone = segment_positions(starts=rows[row])
            assert torch.equal(both.intra[row], alone.intra)
            assert torch.equal(both.inter[row], alone.inter)

    def test_ends(self):
        ends = torch.tensor([[0, 0, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0, 1]])
        starts = torch.tensor([[1, 0, 0, 1, 0, 1, 1], [1, 1, 0, 0, 0, 0, 0]])
        assert all(map(torch.equal, segment_positions(ends=ends), segment_positions(starts=starts)))

    def test_left_padding_changes_nothing(self):
        alone = segment_positions(starts=torch.tensor([0, 0, 1, 0]))
        padded = segment_positions(
            starts=torch.tensor([0, 0, 0, 0, 0, 1, 0]), attention_mask=torch.tensor([0, 0, 0, 1, 1, 1, 1])
        )
        assert padded.intra.tolist() == [0, 0, 0, *alone.intra.tolist()]
        assert padded.inter.tolist() == [0, 0, 0, *alone.inter.tolist()]

    def test_graph(self):
        arguments = {"starts": torch.tensor([[0, 1, 0]]), "document_ids": torch.tensor([[0, 0, 1]])}
        compiled = torch.compile(segment_positions, fullgraph=True, backend="eager")(**arguments)
        assert all(map(torch.equal, compiled, segment_positions(**arguments)))
        assert segment_positions(ends=torch.empty(2, 0, dtype=torch.bool)).inter.shape == (2, 0)
        ids = torch.tensor([[7, 5, 7, 1]])
        find = torch.compile(starts_after, fullgraph=True, backend="eager")
        assert torch.equal(find(ids, separators=[5, 7]), starts_after(ids, separators=[5, 7]))

    @pytest.mark.parametrize("strict", [False, True])
    def test_export_serves_other_lengths(self, strict):
        class Positions(torch.nn.Module):
            def forward(self, ids):
                return *segment_positions(starts=starts_after(ids, separators=[1])), from_document_ids(ids)

        dims = {0: torch.export.Dim("B"), 1: torch.export.Dim("S")}
        traced = torch.export.export(
            Positions(), (torch.tensor([[1, 1, 2], [2, 1, 1]]),), dynamic_shapes=(dims,), strict=strict
        )
        for ids in (torch.tensor([[3, 1, 1, 2, 2, 1, 4]] * 3), torch.tensor([[1, 2]] * 4)):
            assert all(map(torch.equal, traced.module()(ids), Positions()(ids)))


class TestIdentities:
    """Bilevel encoding contains the absolute and the relative one."""

    MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 1]])

    def test_one_segment_is_the_absolute_position(self):
        intra, inter = segment_positions(starts=torch.zeros_like(self.MASK), attention_mask=self.MASK)
        assert torch.equal(intra, from_attention_mask(self.MASK))
        assert not inter.any()

    def test_segments_of_one_token_are_the_token_positions(self):
        intra, inter = segment_positions(starts=torch.ones_like(self.MASK), attention_mask=self.MASK)
        assert torch.equal(inter, from_attention_mask(self.MASK))
        assert not intra.any()

    def test_documents_alone_are_the_packed_positions(self):
        ids = torch.tensor([[3, 3, 4, 4, 4, -1], [0, 1, 1, 1, 0, 0]])
        intra, inter = segment_positions(starts=torch.zeros_like(ids), document_ids=ids)
        assert torch.equal(intra, from_document_ids(ids))
        assert not inter.any()


class TestSeparators:
    """A full stop closes its own segment; the token after it opens the next."""

    def test_against_the_published_definition(self):
        # BiPE's released code: the segment is the number of separators before the token, and the place in it the
        # number of tokens since the last of them.
        generator = torch.Generator().manual_seed(11)
        ids = torch.randint(0, 6, (3, 40), generator=generator)
        intra, inter = segment_positions(starts=starts_after(ids, separators=[2, 5]))
        for row in range(3):
            for token in range(40):
                before = [place for place in range(token) if ids[row, place] in (2, 5)]
                assert inter[row, token] == len(before)
                assert intra[row, token] == token - (before[-1] + 1 if before else 0)

    def test_which_tokens(self):
        starts = starts_after(torch.tensor([[9, 1, 9, 9, 3]]), separators=(9,))
        assert starts.tolist() == [[True, True, False, True, True]]

    def test_refusals(self):
        with pytest.raises(ValueError, match="separators: got none; give the ids of the tokens that end a segment"):
            starts_after(torch.tensor([1]), separators=[])
        with pytest.raises(ValueError, match=r"token_ids: got torch.float32; give integers"):
            starts_after(torch.tensor([1.0]), separators=[1])


class TestRefusals:
    """Flags that do not fit the tokens are an error, not a broadcast."""

    def test_words(self):
        flags = torch.tensor([[1, 0]])
        with pytest.raises(ValueError, match="starts, ends: got none; give one of the two"):
            segment_positions()
        with pytest.raises(ValueError, match="starts, ends: got both; give one of the two"):
            segment_positions(starts=flags, ends=flags)
        with pytest.raises(ValueError, match=r"starts: got torch.float32; give booleans or integers"):
            segment_positions(starts=flags.float())
        with pytest.raises(ValueError, match=r"ends: got torch.float32; give booleans or integers"):
            segment_positions(ends=flags.float())
        with pytest.raises(
            ValueError, match=r"document_ids: got shape \(1, 1\); it must be \(1, 2\), as the flags are"
        ):
            segment_positions(starts=flags, document_ids=torch.tensor([[0]]))
        with pytest.raises(ValueError, match=r"attention_mask: got shape \(2,\); it must be \(1, 2\)"):
            segment_positions(starts=flags, attention_mask=torch.tensor([1, 1]))
