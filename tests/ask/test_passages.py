"""Passages: how a text is parted, and that what was looked at is found."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from theodolite.ask.documents import Document
from theodolite.ask.passages import split
from theodolite.ask.session import Session
from theodolite.survey.texts import builtin_text

BOOK = builtin_text("moby-dick")


class TestSplit:
    """Every word is in one passage, none is much longer than asked for, and they begin and end with words."""

    @given(st.text(alphabet="ab .!?\n。“”", max_size=3000))
    def test_any_text(self, text: str) -> None:
        passages = split(text)
        covered = 0
        for start, end in passages:
            assert start >= covered
            assert not text[covered:start].strip()
            assert text[start:end].strip() == text[start:end] != ""
            assert end - start <= 600
            covered = end
        assert not text[covered:].strip()

    def test_paragraphs_are_kept_together(self) -> None:
        paragraphs = [f"{number} " + "word " * 80 + "end." for number in range(9)]
        text = "\n\n".join(paragraphs)
        assert [text[start:end] for start, end in split(text)] == paragraphs

    def test_short_ones_are_joined(self) -> None:
        assert len(split("\n\n".join(["A heading", "One line.", "Another line."]))) == 1

    def test_long_ones_are_parted_at_sentences(self) -> None:
        text = " ".join(f"This is sentence {number} of one long paragraph." for number in range(60))
        passages = [text[start:end] for start, end in split(text)]
        assert len(passages) > 4
        assert all(passage.startswith("This is") and passage.endswith(".") for passage in passages)

    def test_closing_marks_stay(self) -> None:
        text = ("He cried out, “Stop at once!” Then he went away (to sea.) And so on. " * 20).strip()
        for _, end in split(text):
            assert text[end - 2 : end] in ("!”", ".)", "n.")
        text = "他说：「走吧。」然后走了。" * 80
        assert all(text[end - 1] in "」。" for _, end in split(text))

    def test_short_texts_have_several(self) -> None:
        text = "\n\n".join(f"Item {number}. " + "It was said at some length. " * 4 for number in range(8))
        assert len(split(text)) > 3

    def test_sentences_of_chinese(self) -> None:
        text = "学而时习之，不亦说乎？有朋自远方来，不亦乐乎！" * 60
        assert all(text[end - 1] in "？！" for _, end in split(text))

    def test_a_book_has_about_two_hundred(self) -> None:
        assert 150 < len(split(BOOK)) < 450

    @pytest.mark.parametrize(
        "text", ["a" * 100_000, "a" + " " * 5000 + "b", "a " * 50_000, "\n" * 100_000, ".\n\n" * 30_000, "“" * 100_000]
    )
    def test_takes_no_longer_than_it_must(self, text: str) -> None:
        # Ends at once, or the test run never does.
        split(text)


@pytest.mark.model
class TestFound:
    """Facts planted in a book: the sentence is among the three passages quoted."""

    FACTS = (
        ("The lighthouse of Marrow Point was built by Tobias Fenn.", "Who built the lighthouse of Marrow Point?"),
        ("Dr. Ilse Varga keeps seventeen parrots in her house.", "How many parrots does Dr. Ilse Varga keep?"),
        ("The comet Brill returns every fifty-three years.", "How often does the comet Brill return?"),
        ("The museum of Harn is closed on Tuesdays.", "On which day is the museum of Harn closed?"),
    )

    def test_planted(self, smollm2: Any) -> None:
        chance = random.Random(0)
        paragraphs = [p for p in re.split(r"\n\s*\n", BOOK) if 150 < len(p) < 600 and ". " in p]
        for fact, question in self.FACTS:
            chosen = chance.sample(paragraphs, 12)
            number = chance.randrange(12)
            first, rest = chosen[number].split(". ", 1)
            chosen[number] = f"{first}. {fact} {rest}"
            document = Document(name="book", text="\n\n".join(chosen))
            with Session(smollm2, [document], room=3000) as session:
                answer = session.answer(question, count=20)
            assert len(answer.passages) == 3
            for passage in answer.passages:
                assert passage.text == " ".join(document.text[passage.start : passage.end].split())
                assert len(passage.text) <= 600
            assert any(fact in passage.text for passage in answer.passages), (question, answer)


@pytest.fixture(scope="module")
def smollm2() -> Any:
    from theodolite import load

    return load("SmolLM2-135M-Instruct", dtype=torch.bfloat16, device="cpu")
