"""One document as text in which every passage has a place that a reader can find."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from dataclasses import dataclass
from importlib import resources
from itertools import accumulate
from pathlib import Path

from theodolite.ask.encoded import decode, newlines, printable_name, refuse_binary

_HTML = re.compile(r"\s*(?:<\?xml[^>]*>\s*)?(?:<!--(?:(?!-->).)*-->\s*)*<(?:!doctype\s+html|html)\b", re.I | re.S)
_HTML_NAMES = (".html", ".htm", ".xhtml")
_MARKDOWN_NAMES = (".md", ".markdown")
_HEAD = 4096


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text, and what tells where in it a passage stands.

    Attributes:
        name: the file's name, without its folder.
        text: with \\n for newlines; never empty.
        headings: where in `text` each starts (characters, ascending), and its words.
        pages: where in `text` each page starts (characters, ascending); empty for what has no pages.
        labels: what the file calls each of `pages`, such as "iv".
        lines: whether lines of `text` are lines of the file, so that their numbers find something.
        notes: what a reader should know, such as pages that have no text.
    """

    name: str
    text: str
    headings: tuple[tuple[int, str], ...] = ()
    pages: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    lines: bool = True
    notes: tuple[str, ...] = ()

    def place(self, start: int, end: int) -> str:
        """Where the characters `start` to `end` (exclusive) of `text` stand, in words.

        "line 120" and "lines 120-123"; "line 120, under 'Chapter 3'" in Markdown; "under 'Chapter 3'" in HTML;
        "page 12", "pages 12-13", and "page 12 (labelled iv)" in PDF.

        Raises:
            ValueError: characters that the text does not have.
        """
        if not 0 <= start <= end <= len(self.text):
            raise ValueError(
                f"place: got characters {start} to {end}; {self.name!r} has {len(self.text)}, and start <= end"
            )
        last = max(start, end - 1)
        if self.pages:
            return self._page(start, last)
        heading = self._heading(start)
        if not self.lines:
            return heading or self._share(start)
        first = 1 + self.text.count("\n", 0, start)
        line = _numbered("line", first, first + self.text.count("\n", start, last))
        return f"{line}, {heading}" if heading.startswith("under") else line

    def _page(self, start: int, last: int) -> str:
        first, final = (bisect_right(self.pages, at) for at in (start, last))
        page = _numbered("page", first, final)
        labels = [self.labels[number - 1] if self.labels else str(number) for number in (first, final)]
        if labels == [str(first), str(final)]:
            return page
        return f"{page} (labelled {'-'.join(dict.fromkeys(labels))})"

    def _heading(self, start: int) -> str:
        if not self.headings:
            return ""
        index = bisect_right(self.headings, start, key=lambda heading: heading[0]) - 1
        words = self.headings[max(index, 0)][1]
        short = words if len(words) <= 80 else words[:79].rstrip() + "…"
        return f"under '{short}'" if index >= 0 else f"before '{short}'"

    def _share(self, start: int) -> str:
        return f"{100 * start // len(self.text)} % of the way in"


def read_document(path: str | os.PathLike[str], *, encoding: str | None = None) -> Document:
    """A document by its file, or one of the package's books by name ("moby-dick", "chinese-classics").

    A PDF is known by its first bytes, HTML by its name (.html, .htm, .xhtml) or its first tag, Markdown by its name
    (.md, .markdown); all else is plain text. Text is UTF-8, or UTF-16 or UTF-32 with a mark; HTML may name another.

    Args:
        path: the file.
        encoding: that of a text file, a name that Python knows; of no effect on a PDF.

    Raises:
        ValueError: no such file, no regular file, nothing to read in it, or nothing that is text.
        ImportError: what reads this format is not installed; the message says how to install it.
    """
    source = os.fspath(path)
    if source in books():
        book = resources.files("theodolite").joinpath("texts", f"{source}.txt")
        return Document(name=source, text=newlines(book.read_text(encoding="utf-8")))
    data = _content(source)
    place = Path(source)
    name, suffix = printable_name(place.name), place.suffix.lower()
    document = _read(data, name, suffix, encoding)
    if not document.text.strip():
        raise ValueError(f"document: {name!r} is empty; give a file with text")
    return document


def _read(data: bytes, name: str, suffix: str, encoding: str | None) -> Document:
    head = data[:_HEAD]
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"%PDF-") or (suffix == ".pdf" and b"%PDF-" in head):
        return _read_pdf(data, name)
    refuse_binary(data, name)
    declared = None
    if suffix in _HTML_NAMES or (suffix not in _MARKDOWN_NAMES and _HTML.match(head.decode("latin-1"))):
        from theodolite.ask.html_text import declared_encoding

        declared = declared_encoding(data)
    text = decode(data, name, encoding=encoding, declared=declared)
    if suffix in _MARKDOWN_NAMES:
        from theodolite.ask.markdown_text import markdown_headings

        return Document(name=name, text=text, headings=markdown_headings(text))
    if suffix in _HTML_NAMES or _HTML.match(text[:_HEAD]):
        from theodolite.ask.html_text import html_text

        words, headings = html_text(text, name)
        return Document(name=name, text=words, headings=headings, lines=False)
    return Document(name=name, text=text)


def _read_pdf(data: bytes, name: str) -> Document:
    from theodolite.ask.pdf_text import pdf_pages

    pages = pdf_pages(data, name)
    starts = tuple(accumulate((len(text) + 2 for text in pages.texts[:-1]), initial=0))
    return Document(
        name=name, text="\n\n".join(pages.texts), pages=starts, labels=pages.labels, lines=False, notes=pages.notes
    )


def _content(source: str) -> bytes:
    """The bytes of a regular file, or the reason why there are none."""
    if source == "-":
        raise ValueError("document: got '-', and standard input is not read; write it to a file first")
    path = Path(source)
    try:
        if path.is_dir():
            raise ValueError(f"document: {source!r} is a folder; give its files")
        if path.exists() and not path.is_file():
            raise ValueError(f"document: {source!r} is no regular file; write what it gives to a file first")
        return path.read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"document: no file {source!r}; give a file of text, Markdown, HTML or PDF, or one of {', '.join(books())}"
        ) from None
    except OSError as error:
        raise ValueError(f"document: {source!r} cannot be read: {error.strerror}") from None


def books() -> tuple[str, ...]:
    """The books of the package: `theodolite.survey` has their names too, and takes seconds to import."""
    folder = resources.files("theodolite").joinpath("texts")
    return tuple(sorted(entry.name[:-4] for entry in folder.iterdir() if entry.name.endswith(".txt")))


def _numbered(what: str, first: int, last: int) -> str:
    return f"{what} {first}" if first == last else f"{what}s {first}-{last}"
