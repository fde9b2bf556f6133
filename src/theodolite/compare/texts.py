"""Text to train and test on: the user's own files or the books of the package, as bytes or as a vocabulary's tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from theodolite.compare.batch import Batch
from theodolite.compare.draws import draws
from theodolite.plan import PlanError
from theodolite.survey.texts import read_text, tokens_digest

BYTES = "bytes"
_HELD_OUT = 10
# No word is longer (characters).
_WORD = 200


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Rows of texts: cut anywhere for training; for tests end to end, from the last tenth, which training never sees.

    Args:
        name: of the texts.
        tokens: how they were cut into tokens, "bytes" or "bpe:4096" or a file's name.
        vocab_size: tokens that there are.
        training, test: of each text, (T,) int64.
    """

    name: str
    tokens: str
    vocab_size: int
    training: tuple[Tensor, ...]
    test: tuple[Tensor, ...]

    nested = True

    @classmethod
    def read(cls, sources: Sequence[str], *, tokens: str = BYTES) -> TextData:
        """Texts from UTF-8 files and books of the package.

        Args:
            tokens: "bytes"; "bpe:4096", a vocabulary that is trained on the training part; or a `tokenizer.json`.

        Raises:
            ValueError: no text, one that cannot be read, or one that has tokens that the vocabulary lacks.
        """
        if not sources:
            raise ValueError("text: none is given; give UTF-8 files, or books of the package such as moby-dick")
        texts = [read_text(source) for source in dict.fromkeys(sources)]
        parts = [_split(name, content) for name, content in texts]
        if tokens == BYTES:
            vocab_size, encode = 256, _bytes
        else:
            vocab_size, encode = _vocabulary(tokens, [training for training, _ in parts])
        return cls(
            name=" + ".join(name for name, _ in texts),
            tokens=tokens if Path(tokens).suffix != ".json" else Path(tokens).name,
            vocab_size=vocab_size,
            training=tuple(encode(training) for training, _ in parts),
            test=tuple(encode(test) for _, test in parts),
        )

    @property
    def identity(self) -> Mapping[str, Any]:
        return {
            "kind": "text",
            "tokens": self.tokens,
            "vocab_size": self.vocab_size,
            "training": [tokens_digest(part) for part in self.training],
            "test": [tokens_digest(part) for part in self.test],
            "training_tokens": sum(len(part) for part in self.training),
        }

    def training_batch(self, step: int, *, rows: int, length: int, seed: int) -> Batch:
        """Row r of a step begins at a place that depends on (seed, step, r) alone, any as likely as any other."""
        places = [max(0, len(part) - length) for part in self.training]
        ends = np.cumsum(places)
        at = draws("text", seed, step).integers(ends[-1], size=rows)
        return self._rows([self._place(place, ends) for place in at], self.training, length)

    def test_batch(self, start: int, *, rows: int, length: int) -> Batch:
        """Windows that do not overlap, in an order that mixes the texts and is the same for every policy and seed."""
        windows = self._windows(length)
        order = draws("test order", length, 0).permutation(len(windows))
        return self._rows([windows[i] for i in order[start : start + rows]], self.test, length)

    def require(self, *, length: int, longest: int, rows: int) -> None:
        if all(len(part) <= length for part in self.training):
            most = max(len(part) for part in self.training)
            raise ValueError(
                f"text: rows of {length:,} tokens and the one after are needed for training, and the first nine tenths "
                f"of {self.name} have {most:,}; give more text or a shorter --length"
            )
        windows = len(self._windows(longest))
        if windows < rows:
            held_out = sum(len(part) for part in self.test)
            raise ValueError(
                f"text: {rows} rows of {longest:,} tokens are needed for the test, and the last tenth of {self.name}, "
                f"{held_out:,} tokens, has {windows}; give more text, fewer --test-rows or shorter --times"
            )

    def _windows(self, length: int) -> list[tuple[int, int]]:
        """(text, first token) of each window that has a token after it."""
        return [(i, begin) for i, part in enumerate(self.test) for begin in range(0, len(part) - length, length)]

    def _place(self, place: int, ends: Any) -> tuple[int, int]:
        i = int(np.searchsorted(ends, place, side="right"))
        return i, int(place - (ends[i - 1] if i else 0))

    def _rows(self, places: list[tuple[int, int]], texts: tuple[Tensor, ...], length: int) -> Batch:
        rows = torch.stack([texts[i][begin : begin + length + 1] for i, begin in places]).long()
        return Batch(ids=rows[:, :-1], targets=rows[:, 1:], positions=torch.arange(length))


def _split(name: str, content: str) -> tuple[str, str]:
    """What is trained on and what is tested, parted between words where there are any."""
    cut = len(content) - len(content) // _HELD_OUT
    cut = next((i for i in range(cut, min(cut + _WORD, len(content))) if content[i].isspace()), cut)
    if not content[cut:].strip():
        raise ValueError(f"text: {name} has {len(content):,} characters; a tenth of them must be enough for a test")
    return content[:cut], content[cut:]


def _bytes(text: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(text.encode(), np.uint8).astype(np.int64))


def _vocabulary(tokens: str, training: list[str]) -> tuple[int, Any]:
    """How many tokens there are, and what makes them of a text."""
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            f"tokens: {tokens!r} needs tokenizers, which is not installed: pip install 'theodolite[compare]'"
        ) from error
    kind, _, size = tokens.partition(":")
    if kind == "bpe":
        tokenizer = _trained(tokenizers, tokens, size, training)
    elif Path(tokens).suffix == ".json":
        tokenizer = _opened(tokenizers, tokens)
    else:
        raise PlanError("tokens", tokens, "bytes, bpe:4096, or a tokenizer.json")

    unknown = _unknown(tokenizer)

    def encode(text: str) -> Tensor:
        found = tokenizer.encode(text, add_special_tokens=False)
        _require_covered(tokenizer, tokens, text, found, unknown)
        return torch.tensor(found.ids, dtype=torch.int64)

    # Some vocabularies have gaps in their numbers, and every number needs a place.
    return 1 + max(tokenizer.get_vocab().values(), default=-1), encode


def _trained(tokenizers: Any, tokens: str, size: str, training: list[str]) -> Any:
    """Byte pairs, with every byte in the vocabulary."""
    if not (size.isascii() and size.isdigit() and int(size) >= 257):
        raise PlanError("tokens", tokens, "a vocabulary of bpe has 257 tokens at least: bpe:4096")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=int(size), initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(training, trainer)
    return tokenizer


def _opened(tokenizers: Any, path: str) -> Any:
    if not Path(path).is_file():
        raise ValueError(f"tokens: no file {path!r}; give bytes, bpe:4096, or a tokenizer.json")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:
        # tokenizers raises nothing narrower.
        raise ValueError(f"tokens: {path!r} is no tokenizer.json ({error!s:.80})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _unknown(tokenizer: Any) -> int | None:
    """The token that stands for what is not in the vocabulary: Unigram has its number, and other models its text."""
    model = json.loads(tokenizer.to_str())["model"]
    number: int | None = model.get("unk_id")
    if number is None and model.get("unk_token") is not None:
        number = tokenizer.token_to_id(model["unk_token"])
    return number


def _require_covered(tokenizer: Any, tokens: str, text: str, found: Any, unknown: int | None) -> None:
    """Raise for characters that the vocabulary lacks: some tokenizers leave them out, some say "unknown"."""
    covered = np.zeros(len(text) + 1, np.int64)
    for token, (begin, end) in zip(found.ids, found.offsets, strict=True):
        if token != unknown:
            covered[begin] += 1
            covered[end] -= 1
    there = np.cumsum(covered)[:-1] > 0
    missing = [i for i in np.flatnonzero(~there) if not text[i].isspace()]
    if missing:
        # What is left out moves the places of what follows, so characters are asked one by one.
        left_out = (c for c in dict.fromkeys(text) if not c.isspace() and not tokenizer.encode(c).ids)
        example = text[missing[0]] if unknown in found.ids else next(left_out, text[missing[0]])
        raise ValueError(
            f"tokens: {tokens!r} lacks {len(missing):,} of {len(text):,} characters, such as {example!r}; give bytes "
            "or bpe:4096"
        )
