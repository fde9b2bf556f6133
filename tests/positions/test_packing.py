"""A document in a pack stands where it would stand alone."""

from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import find_packed_sequence_indices
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from theodolite.positions.packing import (
    cu_seqlens_of_documents,
    cu_seqlens_of_lengths,
    document_ids,
    from_cu_seqlens,
    from_document_ids,
)

LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=6)


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)])


class TestEachDocumentCountsFromZero:
    """Without the reset equal documents differ by where they fell in the pack."""

    def test_the_plain_case(self):
        positions = from_cu_seqlens(torch.tensor([0, 3, 7], dtype=torch.int32))
        assert positions.tolist() == [0, 1, 2, 0, 1, 2, 3]
        assert positions.dtype == torch.int64

    @settings(max_examples=80, deadline=None)
    @given(LENGTHS, st.integers(0, 4))
    def test_any_lengths(self, lengths, padding):
        cu = cumulative(lengths)
        total = sum(lengths) + padding
        expected = [place for length in lengths for place in range(length)] + [0] * padding
        numbers = [number for number, length in enumerate(lengths) for _ in range(length)] + [-1] * padding
        assert from_cu_seqlens(cu, total=total, trailing_padding=True).tolist() == expected
        assert document_ids(cu, total=total, trailing_padding=True).tolist() == numbers
        assert from_document_ids(torch.tensor(numbers, dtype=torch.int64)).tolist() == expected
        assert from_cu_seqlens(cu).tolist() == expected[: sum(lengths)]
        assert cu_seqlens_of_lengths(torch.tensor(lengths)).tolist() == cu.tolist()

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(0, 4))
    def test_back_to_cu_seqlens(self, lengths, padding):
        cu = cumulative(lengths)
        ids = document_ids(cu, total=sum(lengths) + padding, trailing_padding=True)
        back = cu_seqlens_of_documents(ids)
        assert back.tolist() == cu.tolist()
        assert back.dtype == torch.int32

    def test_without_reset(self):
        cu = torch.tensor([0, 3, 7])
        assert from_cu_seqlens(cu, reset=False).tolist() == list(range(7))
        padded = from_cu_seqlens(cu, total=9, reset=False, trailing_padding=True)
        assert padded.tolist() == [*range(7), 0, 0]

    def test_rows_of_ids(self):
        # The ids of the first row end as those of the second begin: a row still begins a document.
        ids = torch.tensor([[4, 4, 9, 9, 9], [9, 9, 4, -1, -1]], dtype=torch.int16)
        assert from_document_ids(ids).tolist() == [[0, 1, 0, 1, 2], [0, 1, 0, 0, 0]]
        assert cu_seqlens_of_documents(ids).tolist() == [0, 2, 5, 7, 8]

    def test_an_id_that_returns_is_another_run(self):
        assert from_document_ids(torch.tensor([0, 0, 1, 0, 0])).tolist() == [0, 1, 0, 0, 1]

    def test_nothing_at_all(self):
        empty = torch.empty(0, dtype=torch.int64)
        assert from_cu_seqlens(torch.tensor([0, 0])).tolist() == []
        assert from_document_ids(empty).tolist() == []
        assert cu_seqlens_of_lengths(empty).tolist() == [0]
        assert cu_seqlens_of_documents(empty).tolist() == [0]

    def test_device_and_graph(self):
        cu = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
        assert from_cu_seqlens(cu.to("meta"), total=7).device.type == "meta"
        for function in (from_cu_seqlens, document_ids):
            compiled = torch.compile(function, fullgraph=True, backend="eager")
            assert torch.equal(compiled(cu, total=7), function(cu))
        compiled = torch.compile(from_document_ids, fullgraph=True, backend="eager")
        assert compiled(torch.tensor([5, 5, -1])).tolist() == [0, 1, 0]


class TestAgainstTransformers:
    """The collator that packs, and the two places that find the documents again."""

    LENGTHS = (3, 1, 5, 2)

    def test_collator(self):
        collate = transformers.DataCollatorWithFlattening(
            return_tensors="pt", return_seq_idx=True, return_flash_attn_kwargs=True
        )
        batch = collate([{"input_ids": list(range(length))} for length in self.LENGTHS])
        cu = cu_seqlens_of_lengths(torch.tensor(self.LENGTHS))
        assert torch.equal(cu, batch["cu_seq_lens_q"])
        assert cu.dtype == batch["cu_seq_lens_q"].dtype
        assert torch.equal(from_cu_seqlens(cu), batch["position_ids"][0])
        assert torch.equal(document_ids(cu), batch["seq_idx"][0].long())

    def test_documents_found_in_positions(self):
        cu = cu_seqlens_of_lengths(torch.tensor(self.LENGTHS))
        positions = from_cu_seqlens(cu)[None]
        assert torch.equal(find_packed_sequence_indices(positions)[0], document_ids(cu))
        (found, _), _ = prepare_fa_kwargs_from_position_ids(positions)
        assert torch.equal(found, cu)


class TestPackedIsSeparate:
    """Documents in one pack give the logits that they give alone."""

    def test_logits_of_a_small_model(self):
        torch.manual_seed(5)
        config = transformers.LlamaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
            attn_implementation="eager",
        )
        model = transformers.LlamaForCausalLM(config).eval()
        cu = torch.tensor([0, 5, 8, 13])
        ids = torch.randint(0, 97, (1, 13))
        same = document_ids(cu)[:, None] == document_ids(cu)
        sees = same & torch.ones(13, 13, dtype=torch.bool).tril()
        mask = torch.zeros(1, 1, 13, 13).masked_fill(~sees, torch.finfo(torch.float32).min)
        with torch.no_grad():
            packed = model(ids, attention_mask=mask, position_ids=from_cu_seqlens(cu)[None]).logits[0]
            for start, end in ((0, 5), (5, 8), (8, 13)):
                alone = model(ids[:, start:end]).logits[0]
                # float32, sums of 32 terms through 2 layers, logits of order 1: 32 * 2 * 6e-8 * a few.
                torch.testing.assert_close(packed[start:end], alone, rtol=0, atol=2e-5)


class TestRefusals:
    """A wrong `cu_seqlens` would give positions that look right."""

    @pytest.mark.parametrize(
        ("cu", "options", "message"),
        [
            ([1, 3], {}, "cu_seqlens: starts at 1; it must start at 0"),
            ([0, 5, 3], {}, "cu_seqlens: falls from 5 to 3 at document 1; it may not fall"),
            ([0, 5], {"total": 4}, "cu_seqlens: ends at 5; it must end at the 4 tokens of the pack$"),
            (
                [0, 5],
                {"total": 7},
                r"ends at 5; .* 7 tokens of the pack \(tokens after .* need trailing_padding=True\)",
            ),
            ([0, 5], {"total": 4, "trailing_padding": True}, "cu_seqlens: ends at 5; it must end at the 4 tokens"),
            ([0], {}, r"cu_seqlens: got shape \(1,\); it must be \(documents \+ 1,\)"),
            ([[0, 5]], {}, r"cu_seqlens: got shape \(1, 2\); it must be \(documents \+ 1,\)"),
            ([0.0, 5.0], {}, "cu_seqlens: got torch.float32; give integers"),
            ([0, 5], {"total": -1}, "total: got -1; it must be at least 0"),
        ],
    )
    def test_cu_seqlens(self, cu, options, message):
        for function in (from_cu_seqlens, document_ids):
            with pytest.raises(ValueError, match=message):
                function(torch.tensor(cu), **options)

    def test_what_cannot_be_read(self):
        with pytest.raises(ValueError, match="total: cu_seqlens cannot be read here"):
            from_cu_seqlens(torch.zeros(3, dtype=torch.int64, device="meta"))

    def test_ids_and_lengths(self):
        with pytest.raises(ValueError, match=r"document_ids: got torch.bool; give integers"):
            from_document_ids(torch.tensor([True]))
        with pytest.raises(ValueError, match="document_ids: token 1 is padding and a document follows"):
            cu_seqlens_of_documents(torch.tensor([[0, -1], [1, 1]]))
        with pytest.raises(ValueError, match="lengths: document 1 has -2; no length is negative"):
            cu_seqlens_of_lengths(torch.tensor([3, -2]))
        with pytest.raises(ValueError, match="lengths: they sum to 2147483648; int32 holds up to 2147483647"):
            cu_seqlens_of_lengths(torch.tensor([2**30, 2**30]))
        with pytest.raises(ValueError, match=r"lengths: got shape \(1, 1\); it must be \(documents,\)"):
            cu_seqlens_of_lengths(torch.tensor([[1]]))
