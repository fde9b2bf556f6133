"""Where the headings of a Markdown text are."""

from __future__ import annotations

import re
from itertools import pairwise

try:
    from markdown_it import MarkdownIt
except ImportError as error:
    raise ImportError("reading Markdown needs markdown-it-py: pip install 'theodolite[ask]'") from error

# Its last line would make a heading of the line before.
_FRONT_MATTER = re.compile(r"---[ \t]*\n(?=[\w\"'-]+.*:)(?:(?!---|\.\.\.).*\n){1,1000}(?:---|\.\.\.)[ \t]*(?:\n|\Z)")

_NEWLINE = re.compile("\n")


def markdown_headings(text: str) -> tuple[tuple[int, str], ...]:
    """The headings of `text`: where each starts in it, and its words without their markup.

    Those in quotations and lists, which end with them, and the front matter of a page are left out.
    """
    front = _FRONT_MATTER.match(text)
    skipped = front.end() if front else 0
    # Words are parsed for the headings alone: it takes longer than all else.
    blocks = MarkdownIt("commonmark").disable("inline")
    words = MarkdownIt("commonmark")
    starts = [skipped]
    starts += (match.end() for match in _NEWLINE.finditer(text, skipped))
    found = []
    tokens = blocks.parse(text[skipped:])
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open" and opening.level == 0 and opening.map is not None:
            parsed = words.parseInline(inline.content)[0].children or []
            label = "".join(
                " " if child.type.endswith("break") else _words(child.type, child.content) for child in parsed
            )
            if label.strip():
                found.append((starts[opening.map[0]], " ".join(label.split())))
    return tuple(found)


def _words(kind: str, content: str) -> str:
    return content if kind in ("text", "code_inline", "text_special", "image") else ""
