"""What a check says: one frozen record, whatever was checked."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["pass", "note", "fail", "skip"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of one check.

    Args:
        name: of the check.
        outcome: "pass"; "note" (right as it is, and broken by a step that people take); "fail"; "skip" (not asked, and
            the message says why).
        message: one or two plain sentences.
        deviation: the largest difference that was measured; None where nothing was.
        tolerance: what rounding may cost there, in the unit of `deviation`.
        starts_at: the first position (tokens) that is off; None where none is, or where it has no meaning.
        cause: why, where the numbers tell.
        cure: what to do about it.
        reference: a public thread on the same fault, "owner/repo#N", or a paper.
    """

    name: str
    outcome: Outcome
    message: str
    deviation: float | None = None
    tolerance: float | None = None
    starts_at: int | None = None
    cause: str | None = None
    cure: str | None = None
    reference: str | None = None

    @property
    def failed(self) -> bool:
        """Whether it is a failure; notes and skipped checks are none."""
        return self.outcome == "fail"

    def as_json(self) -> dict[str, Any]:
        """All fields, with text for the numbers that JSON does not have."""
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in vars(self).items()
        }

    def __str__(self) -> str:
        told = [f"{self.name}: {self.outcome}.", _stopped(self.message)]
        told += [f"Cause: {_stopped(self.cause)}"] if self.cause else []
        told += [f"Change: {_stopped(self.cure)}"] if self.cure else []
        told += [f"See {self.reference}."] if self.reference else []
        return " ".join(told)


def _stopped(sentence: str) -> str:
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A known fault that explains what was measured.

    Args:
        words: what is wrong, as the end of "the cause is that ...".
        reference: a public thread on it.
    """

    words: str
    reference: str | None = None


def judged(
    name: str,
    deviation: float,
    tolerance: float,
    right: str,
    wrong: str,
    *,
    at: int | None = None,
    cause: Cause | None = None,
) -> Verdict:
    """Pass where the deviation is within the tolerance, else a failure."""
    if deviation <= tolerance:
        return Verdict(name=name, outcome="pass", message=right, deviation=deviation, tolerance=tolerance)
    return Verdict(
        name=name,
        outcome="fail",
        message=wrong,
        deviation=deviation,
        tolerance=tolerance,
        starts_at=at,
        cause=cause.words if cause else None,
        reference=cause.reference if cause else None,
    )


def exact(name: str, message: str) -> Verdict:
    """A pass where the two that were compared are the same to the bit."""
    return Verdict(name=name, outcome="pass", message=message, deviation=0.0, tolerance=0.0)


def skipped(name: str, why: str) -> Verdict:
    """A check that was not asked, and why."""
    return Verdict(name=name, outcome="skip", message=why)


def failures(verdicts: Iterable[Verdict]) -> tuple[Verdict, ...]:
    """Those that failed."""
    return tuple(verdict for verdict in verdicts if verdict.failed)


def raise_failures(what: str, verdicts: Iterable[Verdict]) -> None:
    """Raise AssertionError with one line for each failure, if there is one."""
    failed = failures(verdicts)
    if failed:
        count = f"{len(failed)} check{'s' if len(failed) > 1 else ''} failed"
        raise AssertionError("\n".join([f"{what}: {count}", *map(str, failed)]))
