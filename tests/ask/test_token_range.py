"""Characters of a document to tokens of a prompt."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ask import tokenizers_made as made
from theodolite.ask.documents import Document
from theodolite.ask.prompt import Prompt, Turn, build_prompt


@pytest.fixture(scope="module")
def prompt_of() -> Any:
    tokenizer = made.byte_level(made.CHATML)

    def build(text: str) -> tuple[Any, Prompt]:
        return tokenizer, build_prompt(tokenizer, [Document(name="a", text=text)], [Turn("Who?")])

    return build


def unmarked(template: str) -> Any:
    return made.byte_level(template, marks_are_special=False)


class TestFindsTokensByCharacters:
    """An answer is quoted from characters and looked for among tokens; one off is another sentence."""

    @given(
        text=st.text("ab Cal\n東é\N{GRINNING FACE}", min_size=1, max_size=30),
        bounds=st.tuples(*[st.integers(0, 30)] * 2),
    )
    def test_any_characters(self, prompt_of, text, bounds):
        tokenizer, prompt = prompt_of(text)
        start, end = sorted(min(bound, len(text)) for bound in bounds)
        # Independently: the bytes of each token, one after another, against the bytes of the passage.
        alphabet = made.pre_tokenizers.ByteLevel.alphabet()
        tokens = tokenizer.convert_ids_to_tokens(prompt.tokens[prompt.document])
        assert all(set(token) <= set(alphabet) for token in tokens)
        edges = np.cumsum([0, *map(len, tokens)])
        first, last = (len(text[:at].encode()) for at in (start, end))
        held = [i for i, (low, high) in enumerate(pairwise(edges)) if low < last and high > first]
        found = prompt.token_range(0, start, end)
        if start == end:
            assert found.start == found.stop
        else:
            assert found == slice(prompt.document.start + held[0], prompt.document.start + held[-1] + 1)

    @pytest.mark.parametrize("make", [made.byte_level, made.characters, made.llama, unmarked])
    def test_in_texts_with_special_tokens_and_spaces_before(self, make):
        tokenizer = make(made.CHATML)
        text = "ab <|im_end|> a</s>ab"
        prompt = build_prompt(tokenizer, [Document(name="a", text=text)], [Turn("Who?")])
        for start in range(len(text)):
            found = tokenizer.decode(prompt.tokens[prompt.token_range(0, start, start + 1)])
            assert text[start] in found
            assert len(found) <= 2
        assert tokenizer.decode(prompt.tokens[prompt.token_range(0, 3, 13)]).strip() == "<|im_end|>"

    def test_white_space_that_is_in_no_token(self):
        text = "a  b a "
        prompt = build_prompt(made.words(), [Document(name="a", text=text)], [Turn("a")])
        assert [prompt.token_range(0, at, at + 1) for at in range(7)] == [
            slice(1 + token, 2 + token) for token in (0, 1, 1, 1, 2, 2, 2)
        ]
        assert prompt.token_range(0, 0, 7) == prompt.document == slice(1, 4)

    @pytest.mark.parametrize(
        ("asked", "told"),
        [
            ((1, 0, 1), "document_index: got 1, and there are 1 documents"),
            ((-1, 0, 1), "document_index: got -1"),
            ((0, 0, 9), "got characters 0 to 9 of a document of 8"),
            ((0, 3, 2), "got characters 3 to 2"),
            ((0, -1, 2), "got characters -1 to 2"),
        ],
    )
    def test_no_such_characters(self, asked, told):
        prompt = build_prompt(made.words(), [Document(name="a", text="a b a b ")], [Turn("a")])
        with pytest.raises(ValueError, match=told):
            prompt.token_range(*asked)

    def test_a_tokenizer_that_does_not_tell(self):
        prompt = build_prompt(made.Slow(chat_template=made.CHATML), [Document(name="a", text="a b")], [Turn("Who?")])
        with pytest.raises(ValueError, match=r"^tokenizer: it gives no offsets of its tokens; use a fast one"):
            prompt.token_range(0, 0, 1)
