"""A row in a padded batch stands where it would stand alone."""

from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

from theodolite.positions.padding import from_attention_mask


def oracle(row: list[int]) -> list[int]:
    """Count the real tokens, one by one."""
    seen, positions = 0, []
    for entry in row:
        positions.append(seen if entry else 0)
        seen += bool(entry)
    return positions


class TestWhereTokensStand:
    """Left padding shifts every row but the longest where positions are counted by column."""

    def test_left_right_holes_and_nothing(self):
        mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0]])
        expected = [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 0, 0, 0], [0, 0, 1, 0, 2], [0, 0, 0, 0, 0]]
        positions = from_attention_mask(mask)
        assert positions.tolist() == expected
        assert positions.dtype == torch.int64

    @settings(max_examples=60, deadline=None)
    @given(
        st.integers(0, 9).flatmap(
            lambda width: st.lists(st.lists(st.integers(0, 3), min_size=width, max_size=width), min_size=1, max_size=4)
        ),
        st.sampled_from([torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64]),
    )
    def test_any_mask_of_any_kind(self, rows, dtype):
        # Numbers above 1 name documents: they are real tokens and are not added up.
        mask = torch.tensor(rows).to(dtype)
        assert from_attention_mask(mask).tolist() == [oracle(row) for row in rows]
        assert from_attention_mask(mask[0]).tolist() == oracle(rows[0])

    def test_negative_document_numbers_are_tokens_too(self):
        assert from_attention_mask(torch.tensor([-1, 0, 7])).tolist() == [0, 0, 1]

    def test_many_tokens_in_a_small_dtype(self):
        assert from_attention_mask(torch.ones(70_001, dtype=torch.int8))[-1] == 70_000

    def test_start_and_padded(self):
        mask = torch.tensor([[0, 1, 1]])
        assert from_attention_mask(mask, start=5, padded=4).tolist() == [[4, 5, 6]]

    def test_the_mask_is_left_alone(self):
        mask = torch.tensor([[0, 2, 1]])
        from_attention_mask(mask)
        assert mask.tolist() == [[0, 2, 1]]

    def test_device_and_graph(self):
        meta = from_attention_mask(torch.ones(2, 3, dtype=torch.int64, device="meta"))
        assert (meta.device.type, meta.shape, meta.dtype) == ("meta", (2, 3), torch.int64)
        compiled = torch.compile(from_attention_mask, fullgraph=True, backend="eager")
        mask = torch.tensor([[0, 1, 1], [1, 1, 0]])
        assert torch.equal(compiled(mask), from_attention_mask(mask))

    def test_export_serves_other_lengths(self):
        class Positions(torch.nn.Module):
            def forward(self, mask):
                return from_attention_mask(mask)

        dims = {0: torch.export.Dim("B"), 1: torch.export.Dim("S")}
        program = torch.export.export(Positions(), (torch.ones(2, 4, dtype=torch.int64),), dynamic_shapes=(dims,))
        mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1], [1] * 7, [0] * 7])
        assert torch.equal(program.module()(mask), from_attention_mask(mask))


class TestAgainstTransformers:
    """The ids that transformers makes for itself, in the places where it does."""

    MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0], [1, 0, 1, 1, 0]])

    @pytest.mark.parametrize("padding_idx", [1, 3])
    def test_roberta(self, padding_idx):
        input_ids = torch.where(self.MASK.bool(), 20, padding_idx)
        theirs = RobertaEmbeddings.create_position_ids_from_input_ids(input_ids, padding_idx)
        mask = input_ids != padding_idx
        assert torch.equal(from_attention_mask(mask, start=padding_idx + 1, padded=padding_idx), theirs)

    def test_opt(self):
        table = OPTLearnedPositionalEmbedding(8, 3)
        rows = from_attention_mask(self.MASK, start=table.offset, padded=table.offset - 1)
        assert torch.equal(table(self.MASK), torch.nn.functional.embedding(rows, table.weight))

    def test_generate(self):
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, bos_token_id=1, eos_token_id=2)
        )
        inputs = {"input_ids": torch.ones_like(self.MASK), "attention_mask": self.MASK}
        theirs = model._prepare_position_ids_for_generation(inputs["input_ids"], inputs)
        assert torch.equal(from_attention_mask(self.MASK), theirs)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=64,
        vocab_size=97,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config).double().eval()


class TestBatchRowIsSingleRun:
    """One pad on the left took GPT-2's loss from 4.5 to 13.6; with these positions a row cannot tell its company."""

    ROWS = ([5, 9, 31], [44, 3, 8, 71, 20, 6, 15], [12])

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_logits(self, model, side):
        width = max(map(len, self.ROWS))
        ids, mask = torch.zeros(3, width, dtype=torch.int64), torch.zeros(3, width, dtype=torch.int64)
        for row, tokens in enumerate(self.ROWS):
            place = slice(width - len(tokens), None) if side == "left" else slice(0, len(tokens))
            ids[row, place], mask[row, place] = torch.tensor(tokens), 1
        with torch.no_grad():
            batch = model(ids, attention_mask=mask, position_ids=from_attention_mask(mask)).logits
            shifted = model(ids, attention_mask=mask, position_ids=torch.arange(width).expand(3, -1)).logits
            for row, tokens in enumerate(self.ROWS):
                alone = model(torch.tensor([tokens])).logits[0]
                real = mask[row].bool()
                # float64 through 2 layers: sums of 32 to 128 terms, 1e-16 each, of logits of order 1.
                torch.testing.assert_close(batch[row, real], alone, rtol=0, atol=1e-12)
                if side == "left" and len(tokens) < width:
                    assert (shifted[row, real] - alone).abs().max() > 1e-2

    def test_forward_and_generate_agree(self, model):
        rows = [torch.tensor([row]) for row in self.ROWS]
        width = max(map(len, self.ROWS))
        ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
        mask = (ids != 0).long()
        options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
        batch = model.generate(ids, attention_mask=mask, position_ids=from_attention_mask(mask), **options)[:, width:]
        for row, tokens in enumerate(rows):
            alone = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
            assert torch.equal(batch[row], alone[0, tokens.shape[1] :])


class TestRefusals:
    """A mask of another kind gives wrong positions without a word, so it is not taken."""

    @pytest.mark.parametrize("values", [[1.0, 0.0], [0.0, 0.0], [0.0, -torch.inf]])
    def test_float_masks(self, values):
        message = (
            r"attention_mask: got torch.float32; give booleans or integers, 0 for padding\. "
            r"A float mask may be an additive one, where 0 keeps a token"
        )
        with pytest.raises(ValueError, match=message):
            from_attention_mask(torch.tensor([values]))

    @pytest.mark.parametrize("shape", [(2, 1, 5, 5), (2, 5, 5)])
    def test_masks_of_queries_by_keys(self, shape):
        with pytest.raises(
            ValueError, match=r"attention_mask: got shape \(2, .*must be \(S,\) or \(B, S\).*what each sees"
        ):
            from_attention_mask(torch.ones(shape, dtype=torch.bool))

    def test_others(self):
        with pytest.raises(ValueError, match="attention_mask: got None; give one for each token, 0 for padding"):
            from_attention_mask(None)
        with pytest.raises(ValueError, match=r"attention_mask: got shape \(\); it must be \(S,\) or \(B, S\)"):
            from_attention_mask(torch.tensor(1))
        with pytest.raises(ValueError, match="padded: got -1; it must be at least 0"):
            from_attention_mask(torch.tensor([1]), padded=-1)
        with pytest.raises(ValueError, match="start: got a float; give a Python int"):
            from_attention_mask(torch.tensor([1]), start=1.0)
