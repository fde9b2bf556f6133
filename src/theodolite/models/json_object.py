"""JSON that others wrote: an object, no deeper than any model's file is."""

from __future__ import annotations

import json
from typing import Any

_DEEPEST = 32


def parse_object(data: bytes) -> dict[str, Any]:
    """The object that UTF-8 text holds, with or without a byte order mark.

    Raises:
        ValueError: it is no JSON, no object, or nested deeper than 32.
    """
    try:
        found = json.loads(data.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError(f"it is nested deeper than {_DEEPEST}") from None
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object")
    if not _fits(found, _DEEPEST):
        raise ValueError(f"it is nested deeper than {_DEEPEST}")
    return found


def _fits(value: Any, levels: int) -> bool:
    if not isinstance(value, (dict, list)):
        return True
    return levels > 0 and all(
        _fits(inner, levels - 1) for inner in (value.values() if isinstance(value, dict) else value)
    )
