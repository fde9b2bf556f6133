"""One line for a test: raise where something does not conform."""

from __future__ import annotations

from typing import Any

from theodolite.conformance.verdict import raise_failures


def assert_conforms(subject: Any, *claim: Any, **claims: Any) -> None:
    """Raise AssertionError that names every failed check and its cause; notes and skipped checks pass.

    Args:
        subject: a causal language model of transformers (`check_model`), or a function or module that turns queries
            and keys (`check_rotate`).
        claim: a ModelPlan or a Rotary, where it is not to be read from the model or from `claims`.
        claims: what `check_rotate` takes by name.

    Raises:
        AssertionError: one line for each failure.
    """
    if callable(getattr(getattr(subject, "config", None), "to_dict", None)):
        from theodolite.conformance.model import check_model

        raise_failures(type(subject).__name__, check_model(subject, *claim, **claims))
    else:
        from theodolite.conformance.function import check_rotate

        name = getattr(subject, "__name__", type(subject).__name__)
        raise_failures(name, check_rotate(subject, *claim, **claims))
