"""Where words of a document stand."""

from __future__ import annotations

from theodolite.ask.documents import Document


def place(document: Document, words: str) -> str:
    """The place of the only passage with these words."""
    assert document.text.count(words) == 1
    start = document.text.index(words)
    return document.place(start, start + len(words))
