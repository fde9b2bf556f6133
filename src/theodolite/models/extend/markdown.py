"""Text of files and command lines, made harmless in Markdown."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

# What begins a link, a picture, HTML, emphasis, code, a formula, a mention, or ends a table's cell, within a line.
_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~&$@]|(?<=:)/(?=/)|(?<=www)\.)", re.IGNORECASE)
# Readers differ over a backslash before these.
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def one_line(text: str) -> str:
    """The text in one line, with nothing in it that acts on a page or a terminal."""
    return "".join(
        " " if c in "\n\r\t" else "\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in _HIDDEN else c for c in text
    )


def escaped(text: str) -> str:
    """The text as Markdown that shows it and does nothing else: no link, no HTML, no table cell's end."""
    return _SPECIAL.sub(lambda found: _ENTITIES.get(found[0], f"\\{found[0]}"), one_line(text))


def code(text: str) -> str:
    """The text as code within a line, fenced by more backticks than stand in it."""
    text = one_line(text)
    fence = "`" * (_longest_run(text) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    # A bar ends a table's cell, in code too.
    return f"{fence}{pad}{text}{pad}{fence}".replace("|", "\\|")


def block(text: str, language: str = "") -> str:
    """Lines of code, fenced by more backticks than stand in them."""
    lines = [one_line(line) for line in text.splitlines()]
    fence = "`" * max(3, _longest_run(text) + 1)
    return "\n".join([fence + language, *lines, fence])


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of cells that are Markdown already."""
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
