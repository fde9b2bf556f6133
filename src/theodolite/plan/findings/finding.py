"""One thing that is wrong with a model's positions, or that others read differently."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from theodolite.plan.errors import require_one_of

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A finding.

    Args:
        severity: "error" for what contradicts itself; "warning" for what gives other results in some engine or at some
            length; "note" for what is right and has been misread.
        field: the key or quantity that it is about.
        message: what is there, and why it matters.
        fix: what to change.
        reference: a public thread ("owner/repo#number") or a paper ("arXiv:...").
    """

    severity: Severity
    field: str
    message: str
    fix: str
    reference: str

    def __post_init__(self) -> None:
        require_one_of("severity", self.severity, SEVERITIES)
