"""The one exception of this room."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class PlanError(ValueError):
    """What a model says about positions is missing, unknown, contradictory or out of range.

    The message names the field, what was given, what is allowed, and the file where there is one.
    """

    def __init__(self, field: str, given: Any, allowed: str, *, source: str | None = None) -> None:
        self.field = field
        self.given = given
        self.allowed = allowed
        self.source = source
        where = f" in {source}" if source else ""
        super().__init__(f"{field}{where}: got {given!r}; {allowed}")


def require_given(**fields: Any) -> None:
    """Raise PlanError for the first field that is None."""
    for name, value in fields.items():
        if value is None:
            raise PlanError(name, value, "it must be given: there is no default")


def require_positive(**fields: float | int | None) -> None:
    """Raise PlanError for the first field that is not a finite number above zero; None passes."""
    for name, value in fields.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise PlanError(name, value, "it must be a finite number above 0")


def require_whole(**fields: int | None) -> None:
    """Raise PlanError for the first field that is not a whole number above zero; None passes."""
    for name, value in fields.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise PlanError(name, value, "it must be a whole number of at least 1")


def require_one_of(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise PlanError unless value is one of the allowed."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise PlanError(name, value, "allowed: " + ", ".join(map(repr, allowed)))
