"""JSON that others wrote: an object, no deeper than any model's file is."""

from __future__ import annotations

import json
from typing import Any

DEEPEST = 32


def parse_object(data: bytes) -> dict[str, Any]:
    """The object that UTF-8 text holds, with or without a byte order mark.

    Raises:
        ValueError: it is no JSON, no object, or nested deeper than 32.
    """
    try:
        found = json.loads(data.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST}") from None
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object")
    if not fits(found):
        raise ValueError(f"it is nested deeper than {DEEPEST}")
    return found


def fits(value: Any, levels: int = DEEPEST) -> bool:
    """Whether objects and lists are nested no deeper than so many levels."""
    if not isinstance(value, (dict, list)):
        return True
    return levels > 0 and all(
        fits(inner, levels - 1) for inner in (value.values() if isinstance(value, dict) else value)
    )
