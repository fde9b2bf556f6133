"""The one exception of this room, and the checks that raise it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

LONGEST = 2**40
"""No sequence is longer (tokens): every length, and every factor times its length, must stay below it."""
_LONGEST_SHOWN = 200


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
        super().__init__(f"{_cut(field)}{where}: got {shown(given)}; {allowed}")


def shown(value: Any) -> str:
    """The value as messages have it: its repr, cut where it is long."""
    try:
        return _cut(repr(value))
    except (RecursionError, ValueError):
        # Nested too deep, or a whole number of thousands of digits.
        return f"a value of type {type(value).__name__} too large to print"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"


@contextmanager
def boundary(field: str, source: str | None) -> Iterator[None]:
    """Whatever goes wrong inside is a PlanError that names the file: what is read there may be anything."""
    try:
        yield
    except PlanError as error:
        if source is None or error.source is not None:
            raise
        raise PlanError(error.field, error.given, error.allowed, source=source) from error
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        raise PlanError(
            field,
            f"{type(error).__name__}: {error}",
            "a value in it is of the wrong type or out of range",
            source=source,
        ) from error


def require_given(**fields: Any) -> None:
    """Raise PlanError for the first field that is None."""
    for name, value in fields.items():
        if value is None:
            raise PlanError(name, value, "it must be given: there is no default")


def is_number(value: Any) -> bool:
    """Whether it is a finite number, small enough for a float; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def require_positive(**fields: float | int | None) -> None:
    """Raise PlanError for the first field that is not a finite number above zero; None passes."""
    for name, value in fields.items():
        if value is not None and not (is_number(value) and value > 0):
            raise PlanError(name, value, "it must be a finite number above 0")


def require_between(least: float, most: float, **fields: float | int | None) -> None:
    """Raise PlanError for the first field that is not a number between the two, ends included; None passes."""
    for name, value in fields.items():
        if value is not None and not (is_number(value) and least <= value <= most):
            raise PlanError(name, value, f"it must be a number from {least:g} to {most:g}")


def require_whole(*, least: int = 1, most: int = LONGEST, **fields: int | None) -> None:
    """Raise PlanError for the first field that is not a whole number between the two, ends included; None passes."""
    for name, value in fields.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise PlanError(name, value, f"it must be a whole number of at least {least}")
        if value > most:
            raise PlanError(name, value, f"it must be a whole number of at most {most:,}")


def require_bool(**fields: bool) -> None:
    """Raise PlanError for the first field that is neither true nor false."""
    for name, value in fields.items():
        if not isinstance(value, bool):
            raise PlanError(name, value, "it must be true or false")


def require_list(**fields: Any) -> None:
    """Raise PlanError for the first field that is no list; None passes."""
    for name, value in fields.items():
        if value is not None and not isinstance(value, (list, tuple)):
            raise PlanError(name, value, "it must be a list")


def require_one_of(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise PlanError unless value is one of the allowed."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise PlanError(name, value, "allowed: " + ", ".join(map(repr, allowed)))
