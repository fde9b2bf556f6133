"""The text of a PDF, page by page."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

try:
    from pypdf import PdfReader
    from pypdf.errors import DependencyError
except ImportError as error:
    raise ImportError("reading PDF needs pypdf: pip install 'theodolite[ask]'") from error

from theodolite.ask.encoded import newlines, whole_characters


class Pages(NamedTuple):
    """What each page of a PDF says, and how the file labels it; `notes` tell what is not there."""

    texts: tuple[str, ...]
    labels: tuple[str, ...]
    notes: tuple[str, ...]


def pdf_pages(data: bytes, name: str) -> Pages:
    """The pages of a PDF, in order.

    Raises:
        ValueError: it is damaged, needs a password, or is made of pictures.
        ImportError: it is encrypted, and the package that decrypts is missing.
    """
    with _silent():
        texts: list[str] = []
        broken: list[int] = []
        try:
            reader = PdfReader(io.BytesIO(data))
            locked = reader.is_encrypted and not reader.decrypt("")
            pages = [] if locked else list(reader.pages)
        except DependencyError as error:
            raise ImportError(f"{name!r} is encrypted; pip install 'theodolite[ask]' ({error})") from error
        # Broken files end in errors of any kind.
        except Exception as error:
            raise ValueError(
                f"document: {name!r} is a damaged PDF ({_told(error)}); get it anew or repair it"
            ) from None
        if locked:
            raise ValueError(f"document: {name!r} is a PDF that needs a password; remove it with qpdf --decrypt first")
        for number, page in enumerate(pages, 1):
            try:
                texts.append(_clean(page.extract_text()))
            except Exception:
                texts.append("")
                broken.append(number)
        labels = _labels(reader, len(pages))
    if not pages or len(broken) == len(pages):
        raise ValueError(f"document: {name!r} is a damaged PDF with no page that can be read; get it anew or repair it")
    if not any(texts):
        raise ValueError(
            f"document: {name!r} is a PDF of pictures, without text; add it with OCR first, such as ocrmypdf"
        )
    bare = [number for number, text in enumerate(texts, 1) if not text and number not in set(broken)]
    return Pages(tuple(texts), labels, tuple(_notes(name, bare, broken)))


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in words: "1-3, 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _notes(name: str, bare: list[int], broken: list[int]) -> Iterator[str]:
    for numbers, what in ((bare, "no text (pictures, or empty)"), (broken, "damage, and nothing was read")):
        if numbers:
            pages, has = ("page", "has") if len(numbers) == 1 else ("pages", "have")
            yield f"{name}: {pages} {ranges(numbers)} {has} {what}"


def _clean(text: str) -> str:
    """Text that is Unicode: fonts may give halves of surrogate pairs, and NUL for what they cannot say."""
    return newlines(whole_characters(text)).replace("\0", "").strip("\n\f ")


def _labels(reader: PdfReader, count: int) -> tuple[str, ...]:
    try:
        labels = tuple(" ".join(_clean(str(label)).split()) for label in reader.page_labels)
    except Exception:
        labels = ()
    return labels if len(labels) == count else tuple(map(str, range(1, count + 1)))


def _told(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


@contextmanager
def _silent() -> Iterator[None]:
    """pypdf logs each flaw of a file that it reads all the same."""
    logger = logging.getLogger("pypdf")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
