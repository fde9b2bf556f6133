"""What comes next stands after every token ever seen, whatever a cache has kept."""

from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.positions.decoding import next_positions, seen_after_draft, tokens_seen, tree_positions
from theodolite.positions.padding import from_attention_mask


class TestDecodeIsPrefill:
    """Taking tokens a few at a time gives the positions of taking them all at once."""

    MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])

    @pytest.mark.parametrize("prefill", [2, 3, 5])
    def test_one_by_one(self, prefill):
        whole = from_attention_mask(self.MASK)
        seen = tokens_seen(self.MASK[:, :prefill])
        steps = []
        for _ in range(prefill, 6):
            steps.append(next_positions(seen, new_tokens=1))
            seen = seen + 1
        assert torch.equal(torch.cat(steps, dim=1), whole[:, prefill:])
        assert torch.equal(
            next_positions(tokens_seen(self.MASK[:, :prefill]), new_tokens=6 - prefill), whole[:, prefill:]
        )

    def test_rows_of_different_length(self):
        # One past length for all rows is what made batched Whisper prompts wrong.
        positions = next_positions(torch.tensor([3, 0, 11], dtype=torch.int32), new_tokens=2)
        assert positions.tolist() == [[3, 4], [0, 1], [11, 12]]
        assert positions.dtype == torch.int64

    @settings(max_examples=60, deadline=None)
    @given(
        st.integers(1, 4).flatmap(
            lambda rows: st.tuples(
                st.lists(st.lists(st.integers(0, 2), min_size=5, max_size=5), min_size=rows, max_size=rows),
                st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=rows, max_size=rows),
            )
        )
    )
    def test_rows_that_take_different_numbers(self, masks):
        past, new = (torch.tensor(mask) for mask in masks)
        whole = from_attention_mask(torch.cat((past, new), dim=1))
        assert torch.equal(next_positions(tokens_seen(past), new_mask=new), whole[:, 5:])

    def test_one_row(self):
        seen = tokens_seen(torch.tensor([0, 1, 2, 1]))
        assert seen.shape == ()
        assert next_positions(seen, new_tokens=2).tolist() == [3, 4]
        assert next_positions(seen, new_mask=torch.tensor([0, 1])).tolist() == [0, 3]

    def test_a_left_padded_batch_with_a_cache(self):
        torch.manual_seed(7)
        config = transformers.GPT2Config(
            n_embd=32,
            n_layer=2,
            n_head=2,
            n_positions=32,
            vocab_size=97,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=2,
        )
        model = transformers.GPT2LMHeadModel(config).double().eval()
        ids = torch.randint(3, 97, (3, 6))
        with torch.no_grad():
            cache = transformers.DynamicCache()
            past = self.MASK[:, :4]
            model(ids[:, :4], attention_mask=past, position_ids=from_attention_mask(past), cache=cache)
            step = next_positions(tokens_seen(past), new_tokens=2)
            decoded = model(ids[:, 4:], attention_mask=self.MASK, position_ids=step, cache=cache).logits
            for row in range(3):
                alone = model(ids[row, self.MASK[row].bool()][None]).logits[0, -2:]
                # float64 through 2 layers: sums of 32 to 128 terms, 1e-16 each, of logits of order 1.
                torch.testing.assert_close(decoded[row], alone, rtol=0, atol=1e-12)


class TestPositionIsNotASlot:
    """A cache that drops keys has fewer rows than the text has tokens; an image has fewer positions than tokens."""

    def test_after_eviction(self):
        # Of 10 tokens a cache keeps 4: the next query is as far from the kept keys as if none had gone.
        mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]])
        query = next_positions(tokens_seen(mask), new_tokens=1)
        assert query.tolist() == [[10], [3]]
        keys = from_attention_mask(mask)[:, [1, 2, 9, 10]]
        assert (query - keys)[0].tolist() == [10, 9, 2, 1]

    def test_after_images(self):
        # 16 image tokens of a 4 x 4 grid move the text on by 4, so the delta of that row is -12.
        seen, delta = torch.tensor([26, 26]), torch.tensor([-12, 0])
        assert next_positions(seen, new_tokens=2, delta=delta).tolist() == [[14, 15], [26, 27]]
        ragged = next_positions(seen, new_mask=torch.tensor([[1, 1], [0, 1]]), delta=delta)
        assert ragged.tolist() == [[14, 15], [0, 26]]


class TestDrafts:
    """After a draft is judged the next token stands where the first rejected one stood, not one further."""

    def test_the_counter(self):
        # 5 tokens, a draft of 4, of which 2 stay: the next position is 7.
        assert seen_after_draft(torch.tensor([5]), accepted=torch.tensor([2]), drafted=4).tolist() == [7]

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=5), st.integers(1, 6))
    def test_rounds_of_drafts_leave_no_gap(self, rows, drafted):
        # Against a list of the positions that the kept tokens had.
        seen = torch.tensor([start for start, _ in rows])
        texts = [list(range(start)) for start, _ in rows]
        for turn in range(3):
            places = next_positions(seen, new_tokens=drafted)
            accepted = torch.tensor([min(drafted, keep + turn) for _, keep in rows])
            for text, place, keep in zip(texts, places.tolist(), accepted.tolist(), strict=True):
                text.extend(place[:keep])
            seen = seen_after_draft(seen, accepted=accepted, drafted=drafted)
        for text, count in zip(texts, seen.tolist(), strict=True):
            assert text == list(range(count))

    def test_refusals(self):
        seen = torch.tensor([5, 6])
        for accepted in ([2, 5], [-1, 2]):
            wrong = 5 if 5 in accepted else -1
            with pytest.raises(ValueError, match=f"accepted: got {wrong}; of 4 drafted it must be 0 to 4"):
                seen_after_draft(seen, accepted=torch.tensor(accepted), drafted=4)
        with pytest.raises(ValueError, match=r"accepted: got shape \(1,\); it must be \(2,\), as seen is"):
            seen_after_draft(seen, accepted=torch.tensor([1]), drafted=4)


def depth(parents: list[int], node: int) -> int:
    """Steps up to a root."""
    return 0 if parents[node] < 0 else 1 + depth(parents, parents[node])


class TestTrees:
    """Tokens that compete for one place have one position: the accepted text's length plus their depth."""

    def test_the_plain_case(self):
        parents = torch.tensor([-1, -1, 0, 0, 1, 2, 5])
        assert tree_positions(parents, seen=torch.tensor(5)).tolist() == [5, 5, 6, 6, 6, 7, 8]
        both = tree_positions(parents, seen=torch.tensor([5, 0]))
        assert both.tolist() == [[5, 5, 6, 6, 6, 7, 8], [0, 0, 1, 1, 1, 2, 3]]

    @settings(max_examples=120, deadline=None)
    @given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(0, 50))
    def test_any_tree(self, choices, seen):
        parents = [int(choice * node) - 1 if choice < 1 else node - 1 for node, choice in enumerate(choices)]
        positions = tree_positions(torch.tensor(parents), seen=torch.tensor(seen))
        assert positions.tolist() == [seen + depth(parents, node) for node in range(len(parents))]

    @pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64, 65])
    def test_a_line_is_a_draft(self, nodes):
        seen = torch.tensor([3, 8])
        line = tree_positions(torch.arange(nodes) - 1, seen=seen)
        assert torch.equal(line, next_positions(seen, new_tokens=nodes))

    def test_a_tree_for_each_row(self):
        parents = torch.tensor([[-1, 0, 1], [-1, -1, 0]], dtype=torch.int32)
        assert tree_positions(parents, seen=torch.tensor([1, 4])).tolist() == [[1, 2, 3], [4, 4, 5]]

    def test_refusals(self):
        with pytest.raises(ValueError, match="parents: token 1 has parent 2; it must be -1 or a token before it"):
            tree_positions(torch.tensor([-1, 2, 0]), seen=torch.tensor(0))
        with pytest.raises(ValueError, match="parents: token 2 has parent -2; it must be -1 or a token before it"):
            tree_positions(torch.tensor([[-1, 0, 0], [-1, 0, -2]]), seen=torch.tensor([0, 0]))
        with pytest.raises(
            ValueError, match=r"seen: got shape \(\) for parents of shape \(1, 2\); one per row is needed"
        ):
            tree_positions(torch.tensor([[-1, 0]]), seen=torch.tensor(0))


class TestOneTokenByDefault:
    """Decoding takes one token at a time, and a call that says no more means that."""

    def test_the_next(self):
        assert next_positions(torch.tensor([1, 2])).tolist() == [[1], [2]]
        assert next_positions(torch.tensor(9), delta=torch.tensor(-2)).tolist() == [7]


class TestInsideAGraph:
    """Nothing here makes a device wait, so a decoding step can be compiled and captured whole."""

    def test_compiled(self):
        def step(seen, accepted, parents):
            count = seen_after_draft(seen, accepted=accepted, drafted=4)
            return next_positions(count, new_tokens=2), tree_positions(parents, seen=count)

        arguments = torch.tensor([5, 9]), torch.tensor([4, 0]), torch.tensor([-1, 0, 0, 2])
        compiled = torch.compile(step, fullgraph=True, backend="eager")
        assert all(map(torch.equal, compiled(*arguments), step(*arguments)))
        assert all(out.device.type == "meta" for out in step(*(each.to("meta") for each in arguments)))


class TestRefusals:
    """Counts and masks of another shape are an error, not a broadcast."""

    def test_words(self):
        seen = torch.tensor([1, 2])
        with pytest.raises(ValueError, match="new_tokens, new_mask: got both; give one of the two"):
            next_positions(seen, new_tokens=1, new_mask=torch.ones(2, 1, dtype=torch.bool))
        with pytest.raises(
            ValueError, match=r"new_mask: got shape \(3, 1\) for seen of shape \(2,\); one row of tokens"
        ):
            next_positions(seen, new_mask=torch.ones(3, 1, dtype=torch.bool))
        with pytest.raises(ValueError, match=r"delta: got shape \(\); it must be \(2,\), as seen is"):
            next_positions(seen, new_tokens=1, delta=torch.tensor(3))
        with pytest.raises(ValueError, match=r"seen: got torch.float32; give integers"):
            next_positions(seen.float(), new_tokens=1)
        with pytest.raises(ValueError, match=r"seen: got shape \(1, 2\); it must be \(B,\), or \(\) for one row"):
            next_positions(seen[None], new_tokens=1)
        with pytest.raises(ValueError, match="new_tokens: got 0; it must be at least 1"):
            next_positions(seen, new_tokens=0)
        with pytest.raises(ValueError, match=r"attention_mask: got torch.float32; give booleans or integers"):
            tokens_seen(torch.ones(2, 3))
