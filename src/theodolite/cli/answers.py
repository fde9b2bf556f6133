"""How an answer is shown: safe for a terminal, with its passages, or as JSON."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from theodolite.ask.choice import Choice
    from theodolite.ask.session import Answer, Session

# All but newline and tab; and what sets the direction of writing.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def whole(text: str) -> str:
    """Text without bytes that are no UTF-8, as a terminal or a pipe may give them."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def printable(text: str) -> str:
    """Text that does nothing to a terminal: a document may hold what clears its screen or turns its writing round."""
    return _CONTROL.sub("\ufffd", text)


def quote(answer: Answer) -> None:
    """Print the passages that were attended to."""
    # A file has a passage on one line.
    width = shutil.get_terminal_size((100, 24)).columns - 5 if sys.stdout.isatty() else 10**6
    if answer.passages:
        print("\nMost attended to:")
    for number, passage in enumerate(answer.passages, start=1):
        quoted = f"{passage.name}, {passage.place}: “{passage.text}”"
        lines = textwrap.wrap(printable(quoted), width, break_long_words=False, break_on_hyphens=False)
        print("\n".join([f"  {number}. {lines[0]}", *(f"     {line}" for line in lines[1:])]), flush=True)


def as_json(session: Session, question: str, answer: Answer, choice: Choice) -> dict[str, Any]:
    """All of a question and its answer, as JSON has it."""
    return {
        "model": session.loaded.name,
        "documents": [document.name for document in session.documents],
        "tokens": session.document_tokens,
        "scaling": choice.candidate.name,
        "why": choice.why,
        "question": question,
        "answer": answer.text,
        "passages": [vars(passage) for passage in answer.passages],
    }
