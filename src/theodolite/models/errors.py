"""The one exception of loading, and the boundary at which what others raise becomes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_LONGEST = 300


class LoadError(RuntimeError):
    """A model cannot be loaded; the message is one sentence that says why and what would help."""


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Whatever is raised inside the block becomes a LoadError: `what`, and the first line of what was raised.

    transformers raises anything at all over a config or file that is not as it expects. A lack of memory is passed on.
    """
    try:
        yield
    except (LoadError, MemoryError):
        raise
    except Exception as error:
        raise LoadError(f"{what}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """What an exception says, in one line of at most 300 characters; its name where it says nothing by itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A heading, as validators write one, is nothing without the line below it.
    said = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    if not isinstance(error, (OSError, ValueError, RuntimeError)) or not said:
        said = f"{type(error).__name__}: {said}".removesuffix(": ")
    return said if len(said) <= _LONGEST else f"{said[: _LONGEST - 4]} ..."
