"""Are positions right in this model, or in this function? Checks by measurement, each with its cause where known.

`check_rotate` and `check_model` return verdicts, `assert_conforms` raises for those that fail. Checking a function
needs torch only.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "Verdict": "theodolite.conformance.verdict",
    "check_rotate": "theodolite.conformance.function",
    "check_model": "theodolite.conformance.model",
    "assert_conforms": "theodolite.conformance.asserting",
}

__all__ = ["Verdict", "assert_conforms", "check_model", "check_rotate"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'theodolite.conformance' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
