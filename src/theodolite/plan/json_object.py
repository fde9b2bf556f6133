"""JSON that others wrote: an object, no deeper than any model's file is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DEEPEST = 32
MOST_VALUES = 2**20
"""Values of a file, at most: each takes up to a hundred bytes of memory, and the largest configs have ten thousand."""
_MARKS = (b",", b"[", b"{")


def parse_object(data: bytes, *, most: int = MOST_VALUES) -> dict[str, Any]:
    """The object that UTF-8 text holds, with or without a byte order mark.

    Raises:
        ValueError: it is no JSON, no object, nested deeper than 32, or has more than `most` values.
    """
    if holds_more(data, most):
        raise ValueError(f"it holds more than {most:,} values")
    try:
        found = json.loads(data.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST}") from None
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object")
    if not fits(found):
        raise ValueError(f"it is nested deeper than {DEEPEST}")
    return found


def read_object(path: Path, *, largest: int, most: int = MOST_VALUES) -> dict[str, Any]:
    """The object that a file of at most `largest` bytes holds.

    Raises:
        ValueError: it is larger, or as `parse_object`.
        OSError: it cannot be read.
    """
    if path.stat().st_size > largest:
        raise ValueError(f"it is larger than {largest:,} bytes")
    return parse_object(path.read_bytes(), most=most)


def holds_more(data: bytes, most: int = MOST_VALUES) -> bool:
    """Whether JSON text has more values, told before any of them is made: each has a comma or a bracket before it."""
    return sum(map(data.count, _MARKS)) > most


def fits(value: Any, levels: int = DEEPEST) -> bool:
    """Whether objects and lists are nested no deeper than so many levels."""
    if not isinstance(value, (dict, list)):
        return True
    return levels > 0 and all(
        fits(inner, levels - 1) for inner in (value.values() if isinstance(value, dict) else value)
    )
