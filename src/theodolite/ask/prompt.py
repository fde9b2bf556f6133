"""A conversation about documents as token ids, in which what is quoted can never end a turn."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from theodolite.ask.documents import Document
from theodolite.ask.quoted import Encoder


@dataclass(frozen=True)
class Turn:
    """A question, and its answer as it shall stand in the conversation; None for the question that is open."""

    question: str
    answer: str | None = None


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Token ids of a conversation, and where in them the documents are.

    Attributes:
        tokens: the ids, with all special tokens that the model expects.
        document: the range of `tokens` with the documents, the lines with their names included.
        question: the range of the last question; without a template with those before it, and "Answer:".
        starts: for each document the first token of its text.
        characters: for each document the number of its characters.
        offsets: for each document (T, 2) int64: the first character of each token of its text and the one after its
            last; None where the tokenizer does not tell.
    """

    tokens: list[int]
    document: slice
    question: slice
    starts: tuple[int, ...]
    characters: tuple[int, ...]
    offsets: tuple[NDArray[np.int64] | None, ...] = field(repr=False, compare=False)

    def token_range(self, document_index: int, start_char: int, end_char: int) -> slice:
        """The tokens that hold the characters `start_char` to `end_char` (exclusive) of a document's text.

        Tokens at the ends may hold more. Characters that are in no token (white space that a tokenizer drops) give
        the token after them, or the last; no characters give an empty range.

        Raises:
            ValueError: no such document or characters, or a tokenizer that does not tell what its tokens hold.
        """
        if not 0 <= document_index < len(self.starts):
            raise ValueError(f"document_index: got {document_index}, and there are {len(self.starts)} documents")
        length = self.characters[document_index]
        if not 0 <= start_char <= end_char <= length:
            raise ValueError(f"token_range: got characters {start_char} to {end_char} of a document of {length}")
        offsets = self.offsets[document_index]
        if offsets is None:
            raise ValueError("tokenizer: it gives no offsets of its tokens; use a fast one (tokenizer.is_fast)")
        first = int(np.searchsorted(offsets[:, 1], start_char, side="right"))
        stop = int(np.searchsorted(offsets[:, 0], end_char, side="left"))
        if start_char == end_char:
            stop = first
        else:
            # The last token stands for white space after it.
            first = min(first, max(len(offsets) - 1, 0))
            stop = min(max(stop, first + 1), len(offsets))
        start = self.starts[document_index]
        return slice(start + first, start + stop)


class _Part(NamedTuple):
    """A run of text: written by the template or by this package, quoted, or a document's (then with its index)."""

    text: str
    quoted: bool
    document: int | None = None
    question: bool = False


def build_prompt(
    tokenizer: Any,
    documents: Sequence[Document],
    turns: Sequence[Turn],
    *,
    system: str | None = None,
    memory: dict[Any, Any] | None = None,
) -> Prompt:
    """The conversation `turns` about `documents`, ready for the model to answer the last of them.

    With a chat template the first user message holds the documents and the first question. Without one the text is
    "{document}\\n\\nQuestion: {question}\\nAnswer:". Several documents stand each under a line with its name. Special
    tokens in documents, questions and answers are text. The tokens up to the end of the documents are the same
    whatever is asked about them, as long as the template writes the same before them: a cache of them can be kept.

    Args:
        tokenizer: one of transformers.
        documents: at least one.
        turns: all but the last with their answers, as the model shall see them again.
        system: text of a message with the role `system`, put first; None gives none.
        memory: keeps the documents' tokens from one call to the next, with the same tokenizer.

    Raises:
        ValueError: nothing to ask or to ask about, a template that fails or changes what it is given, or a quoted
            text that this tokenizer cannot read as text.
    """
    _require(documents, turns)
    if getattr(tokenizer, "chat_template", None):
        parts = list(_chat(tokenizer, documents, turns, system))
    else:
        parts = list(_plain(documents, turns, system))
    encoder = Encoder(tokenizer, "".join(part.text for part in parts if not part.quoted))
    tokens = [] if getattr(tokenizer, "chat_template", None) else _beginning(tokenizer)
    starts, offsets, bounds, asked = [], [], [len(tokens), len(tokens)], slice(0, 0)
    # The line with the first document's name goes before it, where there are several.
    first = next(index for index, part in enumerate(parts) if part.document == 0) - (len(documents) > 1)
    for index, part in enumerate(parts):
        if index == first:
            bounds[0] = len(tokens)
        key = part.text, part.quoted, index > 0, encoder.controls
        if memory is not None and part.document is not None and key in memory:
            ids, told = memory[key]
        else:
            ids, told = encoder.encode(part.text, quoted=part.quoted, continues=index > 0)
        if memory is not None and part.document is not None:
            memory[key] = ids, told
        if part.question:
            asked = slice(len(tokens), len(tokens) + len(ids))
        if part.document is not None:
            starts.append(len(tokens))
            offsets.append(told)
        tokens += ids
        if part.document is not None:
            bounds[1] = len(tokens)
    return Prompt(
        tokens=tokens,
        document=slice(*bounds),
        question=asked,
        starts=tuple(starts),
        characters=tuple(len(document.text) for document in documents),
        offsets=tuple(offsets),
    )


def _require(documents: Sequence[Document], turns: Sequence[Turn]) -> None:
    if not documents:
        raise ValueError("documents: got none; give at least one")
    if not turns:
        raise ValueError("turns: got none; give at least one question")
    for number, turn in enumerate(turns, 1):
        if not turn.question.strip():
            raise ValueError(f"turns: question {number} is empty")
        if (turn.answer is None) != (number == len(turns)):
            what = "has no answer, and another follows" if turn.answer is None else "is the last and has its answer"
            raise ValueError(f"turns: question {number} {what}; the last question alone is open")


def _document_parts(documents: Sequence[Document]) -> list[_Part]:
    if len(documents) == 1:
        return [_Part(documents[0].text, True, 0)]
    parts = []
    for index, document in enumerate(documents):
        between = "\n\n" if index else ""
        parts.append(_Part(f"{between}Document {index + 1}: {document.name}\n", True))
        parts.append(_Part(document.text, True, index))
    return parts


def _plain(documents: Sequence[Document], turns: Sequence[Turn], system: str | None) -> Iterator[_Part]:
    if system:
        yield _Part(f"{system}\n\n", True)
    yield from _document_parts(documents)
    # In one piece, since many tokenizers put the space before a word into its token.
    yield _Part(
        "".join(
            f"\n\nQuestion: {turn.question}\nAnswer:" + ("" if turn.answer is None else f" {turn.answer}")
            for turn in turns
        ),
        True,
        question=True,
    )


def _chat(tokenizer: Any, documents: Sequence[Document], turns: Sequence[Turn], system: str | None) -> Iterator[_Part]:
    """What the template writes, and what is quoted in it: it is given words that stand for the quoted texts."""
    quoted: list[tuple[str, str, list[_Part]]] = []

    def word(what: str, parts: list[_Part]) -> str:
        quoted.append((what, secrets.token_hex(16), parts))
        return quoted[-1][1]

    messages = []
    if system is not None:
        messages.append({"role": "system", "content": word("the system message", [_Part(system, True)])})
    opening = word("the documents", _document_parts(documents)) + "\n\n"
    for number, turn in enumerate(turns, 1):
        question = word(f"question {number}", [_Part(turn.question, True, question=True)])
        messages.append({"role": "user", "content": opening + question})
        opening = ""
        if turn.answer is not None:
            answer = word(f"answer {number}", [_Part(turn.answer, True)])
            messages.append({"role": "assistant", "content": answer})
    rest = _rendered(tokenizer, messages)
    for what, name, parts in quoted:
        if rest.count(name) != 1:
            raise ValueError(
                f"tokenizer: its chat template loses, changes or repeats {what}; set tokenizer.chat_template to one "
                "that writes each message once, or to None for plain text"
            )
        written, _, rest = rest.partition(name)
        yield _Part(written, False)
        yield from parts
    yield _Part(rest, False)


def _rendered(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except ImportError:
        raise
    # A template may fail in any way that Jinja and its own code can.
    except Exception as error:
        first = messages[0]["role"]
        hint = "; it may take no system message" if first == "system" else ""
        told = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"tokenizer: its chat template refuses this conversation ({told}){hint}") from error
    return text


def _beginning(tokenizer: Any) -> list[int]:
    """The token that this tokenizer puts before every text, if it does."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("", verbose=False)["input_ids"][:1] == [bos] else []
