"""Documents that a model has read, and questions about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import TextStreamer

from theodolite.ask.documents import Document
from theodolite.ask.passages import Passage, most_attended
from theodolite.ask.prompt import Prompt, Turn, build_prompt
from theodolite.models import LoadError, patched
from theodolite.models.decode import decode, require_temperature, stop_tokens
from theodolite.models.kept import fill_prefix, kept_state, prefix_tensors, read_kept, write_kept
from theodolite.models.load import LoadedModel
from theodolite.models.reader import Reader
from theodolite.survey.bench import positions_digest
from theodolite.survey.scalings import Candidate
from theodolite.survey.texts import tokens_digest

_WHAT = "a saved reading of documents"

Progress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the model wrote: its text, its tokens (the one that ends it included), and where it looked."""

    text: str
    tokens: list[int]
    passages: list[Passage]


class Session:
    """A model that reads documents once and answers questions about them.

    Use it as a context: the model is patched and its attention replaced meanwhile, and as it was afterwards.

    Args:
        loaded: the model.
        documents: what it reads, in this order.
        candidate: the plan, and the map of distances if any, that it reads by; the model's own by default.
        room: how many tokens there will be at most, documents, questions and answers; frequencies that depend on the
            length are those of this one.
    """

    def __init__(
        self, loaded: LoadedModel, documents: Sequence[Document], *, candidate: Candidate | None = None, room: int
    ) -> None:
        candidate = candidate or Candidate(name="none", plan=loaded.plan)
        if not isinstance(candidate, Candidate):
            raise ValueError(f"candidate: got a {type(candidate).__name__}; give a Candidate(name=..., plan=...)")
        if not all(isinstance(document, Document) for document in documents):
            raise ValueError("documents: give Documents, as read_document has them")
        self.loaded, self.documents, self.room = loaded, tuple(documents), room
        self.plan, self.relative = candidate.plan.at_length(room), candidate.relative
        self.reader = Reader(loaded.model, self.plan, capacity=room, relative=self.relative)
        self.turns: list[Turn] = []
        # Tokens read, and at its end perhaps one that is still to be.
        self._line: list[int] = []
        self._changes = ExitStack()
        self._encoded: dict[Any, Any] = {}
        self._prompt = self.prompt("?")
        require_room(self._prompt, room)

    def __enter__(self) -> Session:
        with ExitStack() as changes:
            changes.enter_context(patched(self.loaded.model, self.plan))
            changes.enter_context(self.reader)
            self._changes = changes.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._changes.close()

    @property
    def document_tokens(self) -> int:
        """Tokens up to the end of the documents, with what the chat template writes before them."""
        return int(self._prompt.document.stop)

    @property
    def read(self) -> int:
        """Tokens of the documents that were read so far."""
        return min(self.reader.length, self.document_tokens)

    def read_documents(self, progress: Progress = lambda tokens: None) -> None:
        """Read what is not read yet of the documents; `progress` is told how many tokens are, after each chunk."""
        self._feed(self._prompt.tokens[: self.document_tokens], progress)

    def answer(
        self,
        question: str,
        *,
        count: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
        passages: int = 3,
        told: Callable[[str], None] = lambda text: None,
        progress: Progress = lambda tokens: None,
    ) -> Answer:
        """Ask; what was asked and answered before is part of the conversation.

        A tokenizer that does not tell which characters its tokens hold gives no passages.

        Args:
            count: the most tokens of the answer.
            temperature: 0 takes the most likely token each time, as `generate(do_sample=False)` of transformers does.
            seed: of what is drawn at a temperature above 0.
            passages: how many are quoted.
            told: is given the answer's text as it comes, in whole words.
            progress: as in `read_documents`.

        Raises:
            ValueError: an empty question, or a conversation that does not fit the room.
        """
        require_temperature(temperature)
        for name, number, least in (("count", count, 1), ("passages", passages, 0)):
            if number < least:
                raise ValueError(f"{name}: got {number}; give at least {least}")
        prompt = self.prompt(question)
        if len(prompt.tokens) + count > self.room:
            raise ValueError(
                f"room: {len(prompt.tokens):,} tokens of documents and conversation and {count:,} of an answer are "
                f"more than the {self.room:,} there is room for; begin a new conversation"
            )
        logits = self._feed(prompt.tokens, progress)
        assert logits is not None
        written: list[int] = []
        streamer = _Streamer(self.loaded.tokenizer, told)
        stop = stop_tokens(self.loaded.model, self.loaded.tokenizer)
        for token in decode(
            self.reader, logits, prompt.tokens, count=count, stop=stop, temperature=temperature, seed=seed
        ):
            written.append(token)
            self._line.append(token)
            streamer.put(torch.tensor([token]))
        streamer.end()
        text = self.loaded.tokenizer.decode(written, skip_special_tokens=True)
        self.turns.append(Turn(question, _said(text) or "…"))
        told_places = all(offsets is not None for offsets in prompt.offsets)
        found = self._passages(prompt, written, passages) if passages and told_places else []
        return Answer(text=text, tokens=written, passages=found)

    def fits(self, question: str, count: int) -> bool:
        """Whether there is room for a question and `count` tokens of its answer after the conversation so far."""
        return len(self.prompt(question).tokens) + count <= self.room

    def prompt(self, question: str) -> Prompt:
        """What the model is given for a question after the conversation so far; `tokens` are all that it reads."""
        turns = [*self.turns, Turn(question)]
        return build_prompt(self.loaded.tokenizer, self.documents, turns, memory=self._encoded)

    def forget_conversation(self) -> None:
        """Drop what was asked and answered; the documents stay read."""
        self.turns.clear()

    def save(self, path: str | Path) -> None:
        """Write what was read of the documents, for `resume`; complete or not at all."""
        line, own = self._line[: self.reader.length], self._prompt.tokens[: self.document_tokens]
        # A template may begin otherwise for a conversation: what it changed is not kept.
        read = _common(line, own)
        tensors = prefix_tensors(self.reader.prefix, len(self.plan.layers), read)
        write_kept(path, _WHAT, tensors, self._identity(), read=read, room=self.room)

    def resume(self, path: str | Path) -> None:
        """Take what `save` wrote for the same model, plan and text as read.

        Raises:
            LoadError: no such file, or one of another model, plan or text.
        """
        tensors, state = read_kept(path, _WHAT, self._identity())
        read = state.get("read")
        if not isinstance(read, int) or not 0 <= read <= self.document_tokens:
            raise LoadError(f"{path}: it is not as it was written; delete it")
        self.reader.forget()
        fill_prefix(self.reader.prefix, tensors, torch.arange(read), len(self.plan.layers), path, self.loaded.model)
        self._line = self._prompt.tokens[:read]

    def _feed(self, tokens: list[int], progress: Progress) -> Tensor | None:
        """Read `tokens` (as far as they are not read yet) after what they have in common with what was read."""
        line = self._line[: self.reader.length]
        common = _common(line, tokens)
        if common == len(tokens):
            # Of these the last one's logits are wanted, unless it is the documents alone.
            if len(tokens) == self.document_tokens:
                return None
            common -= 1
        self.reader.forget(common)
        self._line = list(tokens)
        logits = None
        progress(common)
        for start in range(common, len(tokens), self.reader.chunk):
            stop = min(start + self.reader.chunk, len(tokens))
            logits = self.reader.next_logits(torch.tensor(tokens[start:stop]), torch.arange(start, stop))
            progress(stop)
        return logits

    def _passages(self, prompt: Prompt, written: Sequence[int], count: int) -> list[Passage]:
        """Where the question and the answer looked, which is asked aside of what was read."""
        asked, line = len(prompt.tokens), [*prompt.tokens, *written]
        # What chose the answer's tokens are the ones before them.
        spoken = [(prompt.question.start, prompt.question.stop), (asked - 1, len(line) - 1)]
        with self.reader.as_of(prompt.question.start):
            return most_attended(self.reader, self.documents, prompt, spoken, line, count=count)

    def _identity(self) -> dict[str, Any]:
        tokens = torch.tensor(self._prompt.tokens[: self.document_tokens])
        return {
            "model": self.loaded.fingerprint,
            "dtype": str(self.loaded.model.dtype),
            "plan": positions_digest(self.plan),
            "map of distances": repr(self.relative),
            "text": tokens_digest(tokens),
        }


def kept_room(path: str | Path) -> int | None:
    """The room of the session that wrote a file, or None where it cannot be told."""
    room = kept_state(path).get("room")
    return room if isinstance(room, int) else None


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two lines begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _said(text: str) -> str:
    """An answer without what was thought before it, which templates leave out of a conversation too."""
    return text.rpartition("</think>")[2].partition("<think>")[0].strip()


def require_room(prompt: Prompt, room: int) -> None:
    """Raise where the documents alone take all the room."""
    if prompt.document.stop >= room:
        raise ValueError(f"room: the documents have {prompt.document.stop:,} tokens, and there is room for {room:,}")


class _Streamer(TextStreamer):  # type: ignore[misc]
    """The text of tokens as they come, given to a function."""

    def __init__(self, tokenizer: Any, told: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self.told = told

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Hand on what is whole."""
        if text:
            self.told(text)
