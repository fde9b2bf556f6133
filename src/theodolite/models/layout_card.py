"""A remark in the README.md of a checkpoint that was written in another pair layout, above what it said before."""

from __future__ import annotations

import html
import re
from pathlib import Path

_CARD = "README.md"
_BEGIN, _END = b"<!-- pair layout -->", b"<!-- end of pair layout -->"
_REMARK = re.compile(re.escape(_BEGIN) + rb".*?" + re.escape(_END) + rb"\n\n", re.DOTALL)
# What begins a link, emphasis, code or a mention within a line.
_SPECIAL = re.compile(r"([\\`*_\[\]|#~$@])")
# The metadata that the hub reads, which must come first.
_METADATA = re.compile(rb"\A---\r?\n.*?^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)


def remark(folder: Path, layout: str, note: str) -> None:
    """Put the remark into a folder's card, if it has one.

    Without the remark of an earlier conversion it is the card of the checkpoint that is there again, and gets none.
    """
    card = folder / _CARD
    if card.is_file():
        given = card.read_bytes()
        plain = without_remark(given)
        card.write_bytes(plain if plain != given else with_remark(given, layout, note))


def with_remark(card: bytes, layout: str, note: str) -> bytes:
    """The card with a remark on top, after its metadata: what layout the weights are in, and who reads that."""
    found = _METADATA.match(card)
    at = found.end() if found else 0
    told = (
        f"> **Queries and keys of this checkpoint were moved to {layout} pairs** by `theodolite convert layout`. "
        f"{_shown(note)} What follows is the card of the checkpoint that it was made from: its words on the weights "
        "and on how to run them are about that one."
    )
    return b"".join([card[:at], _BEGIN, b"\n", told.encode(), b"\n", _END, b"\n\n", card[at:]])


def without_remark(card: bytes) -> bytes:
    """The card without such a remark."""
    return _REMARK.sub(b"", card, count=1)


def _shown(note: str) -> str:
    """A sentence with a stranger's name of a family in it, as Markdown that does nothing."""
    return html.escape(_SPECIAL.sub(r"\\\1", " ".join(note.split())), quote=False)
