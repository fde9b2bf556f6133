"""Verdicts of checks in words: one paragraph each, then the count. Plain lines of text."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Sequence

from theodolite.conformance.verdict import Verdict
from theodolite.report.figures import plain

_OUTCOME, _NAME = 6, 24
_ORDER = ("fail", "note", "pass", "skip")
_WORDS = {"fail": "failed", "note": "noted", "pass": "passed", "skip": "skipped"}


def head(name: str, plan_words: str, dtype: str, device: str, width: int) -> list[str]:
    """What is checked, and how."""
    told = f"{plan_words}; checked in {dtype} on {device}; differences of logits in standard deviations"
    return [plain(name), *textwrap.wrap(plain(told), width), ""]


def lines(verdict: Verdict, width: int) -> list[str]:
    """One verdict, in lines of at most `width` characters where the words allow it."""
    indent = " " * (_OUTCOME + _NAME)
    first = f"{verdict.outcome:<{_OUTCOME}}{verdict.name:<{_NAME}}"
    if len(verdict.name) >= _NAME:
        first = f"{verdict.outcome:<{_OUTCOME}}{verdict.name}: "
    printed = _wrapped(verdict.message, width, first, indent)
    if verdict.outcome in ("pass", "skip"):
        return printed
    measured = _measured(verdict)
    rows = (
        ("measured", measured),
        ("cause", verdict.cause),
        ("change", verdict.cure),
        ("see", verdict.reference),
    )
    for label, told in rows:
        if told:
            printed += _wrapped(told, width, f"{indent}{label}: ", f"{indent}  ")
    return printed


def _measured(verdict: Verdict) -> str | None:
    if verdict.deviation is None:
        return None
    told = f"{_number(verdict.deviation)}"
    if verdict.tolerance:
        told += f", where rounding costs up to {_number(verdict.tolerance)}"
    if verdict.starts_at is not None:
        told += f"; from position {verdict.starts_at:,}"
    return told


def _number(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "not a number"


def summary(verdicts: Sequence[Verdict]) -> str:
    """ "15 passed, 2 noted" """
    counts: Counter[str] = Counter(verdict.outcome for verdict in verdicts)
    return ", ".join(f"{counts[outcome]} {_WORDS[outcome]}" for outcome in _ORDER if counts[outcome])


def _wrapped(text: str, width: int, first: str, later: str) -> list[str]:
    return textwrap.wrap(
        plain(text),
        max(width, len(later) + 30),
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
