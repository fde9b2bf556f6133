"""The texts that a survey reads: two books that come with the package, and the user's own files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BUILTIN = ("moby-dick", "chinese-classics")


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text as the model reads it: `tokens` (T,) int64, and what identifies them."""

    name: str
    tokens: Tensor
    sha256: str


def builtin_text(name: str) -> str:
    """A book of the package, by name."""
    if name not in BUILTIN:
        raise ValueError(f"text: got {name!r}; the package has {', '.join(BUILTIN)}")
    return resources.files("theodolite").joinpath("texts", f"{name}.txt").read_text(encoding="utf-8")


def read_text(source: str) -> tuple[str, str]:
    """Name and content of a book of the package or of a UTF-8 file.

    Raises:
        ValueError: no such file, a folder, or no UTF-8 text.
    """
    if source in BUILTIN:
        return source, builtin_text(source)
    path = Path(source)
    if path.exists() and not path.is_dir() and not path.is_file():
        raise ValueError(f"text: {source!r} is no regular file")
    try:
        content = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"text: no file {source!r}; give a UTF-8 text file, or one of {', '.join(BUILTIN)}") from None
    except IsADirectoryError:
        raise ValueError(f"text: {source!r} is a folder; give its files (a model stands before --text)") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"text: {source!r} is not UTF-8 (byte {error.start}); convert it first") from None
    except OSError as error:
        raise ValueError(f"text: {source!r} cannot be read: {error.strerror}") from None
    return path.name, content


def tokens_digest(tokens: Tensor) -> str:
    """What identifies tokens (T,) int64, 64 hex digits."""
    return hashlib.sha256(tokens.contiguous().numpy().tobytes()).hexdigest()


def tokenize(tokenizer: Any, text: str, *, at_least: int) -> Tensor:
    """The first tokens of `text`, shape (T,): `at_least` so many if it has them, what is put in front included.

    A book is not tokenized to its end for the sake of its first pages.
    """
    size = at_least * 8
    while True:
        tokens: list[int] = tokenizer(text[:size], verbose=False)["input_ids"]
        # The last tokens of a part may differ from those of the whole: words are cut at its end.
        if size >= len(text):
            return torch.tensor(tokens, dtype=torch.int64)
        if len(tokens) >= at_least + 64:
            return torch.tensor(tokens[:at_least], dtype=torch.int64)
        size *= 2


def read_documents(
    sources: list[str],
    tokenizer: Any,
    *,
    tokens: int,
    most: int | None = None,
    join: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Document]:
    """The sources that have at least `tokens` tokens, each a document cut to `most`, by default to as many as that.

    With `join` they are one document.

    Those that are too short beside others that are not are left out, and `tell` is given a line that names them.

    Raises:
        ValueError: none is long enough; the message says how many tokens each has and how many are needed.
    """
    # One file by two paths is one document.
    distinct: dict[str | Path, str] = {}
    for source in sources:
        distinct.setdefault(source if source in BUILTIN else Path(source).resolve(), source)
    texts = [read_text(source) for source in distinct.values()]
    if join and len(texts) > 1:
        names = [name for name, _ in texts]
        name = " + ".join(names[:4]) + (f" + {len(names) - 4} more" if len(names) > 4 else "")
        texts = [(name, "\n\n".join(content for _, content in texts))]
    documents, short = [], []
    for name, content in texts:
        ids = tokenize(tokenizer, content, at_least=most or tokens)
        if len(ids) < tokens:
            short.append(f"{name} has {len(ids):,}")
        else:
            kept = ids[: most or tokens].contiguous()
            documents.append(Document(name=name, tokens=kept, sha256=tokens_digest(kept)))
    if not documents:
        hint = "" if join or len(texts) == 1 else "; --join makes one document of all files"
        raise ValueError(f"text: {tokens:,} tokens are needed for this length, and {'; '.join(short)}{hint}")
    if short:
        tell(f"left out, since {tokens:,} tokens are needed: {'; '.join(short)}")
    return documents
