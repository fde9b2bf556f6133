"""Is this function a rotary encoding, and the one that it claims to be? Needs torch only."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from theodolite.conformance import function_calls, function_form, function_values
from theodolite.conformance.asked import Asked, Rotate
from theodolite.conformance.verdict import Verdict, skipped
from theodolite.plan import Rotary

_USUAL_LENGTH = 8192
_FURTHEST = 2**24 - 1
_LARGEST = 2**53

# History first, before other checks have made some; what is asked of numbers needs the pairs to be right.
CHECKS: tuple[tuple[str, Callable[[Asked], Verdict]], ...] = (
    ("history", function_calls.history),
    ("shapes and dtypes", function_calls.kinds),
    ("inputs", function_calls.inputs_untouched),
    ("axes", function_calls.axes),
    (function_form.BOTH, function_form.both),
    ("position 0", function_values.position_zero),
    ("width", function_values.width),
    ("pairs", function_values.pairs),
    ("norms", function_values.norms),
    ("angles", function_values.angles),
    ("relative", function_values.relative),
    ("far angles", function_values.far_angles),
    ("half precision", function_values.half_precision),
    ("positions obeyed", function_calls.positions_obeyed),
    ("batch", function_calls.batch),
    ("decode", function_calls.decode),
    ("autocast", function_calls.autocast),
    ("gradient", function_calls.gradient),
    ("cast and back", function_calls.cast),
)

# Asked of queries, and then of keys in their place; the others look at both.
_OF_KEYS = {"position 0", "width", "pairs", "norms", "angles", "far angles", "half precision"}


def check_rotate(
    rotate: Rotate,
    rotary: Rotary | None = None,
    *,
    heads_first: bool = True,
    length: int | None = None,
    furthest: int = _FURTHEST,
    **claims: Any,
) -> tuple[Verdict, ...]:
    """Check a function that turns queries and keys against what it claims to be.

    Args:
        rotate: `rotate(q, k, positions)` returns q and k; q (B, H, S, D), k (B, Hkv, S, D), positions (S,) or (B, S)
            of integers. A module is called the same way.
        rotary: the claim; or its fields by name: `head_dim=64, rope_theta=10000.0, interleaved=True`.
        heads_first: otherwise q and k are (B, S, H, D).
        length: tokens within which float32 arithmetic is good enough (8,192); frequencies that depend on the length of
            a sequence are settled for it.
        furthest: the largest position that is asked for (tokens), at least 15; for a table that ends, its rows less
            one.

    A function that cannot be called, or ends before `furthest`, gets one verdict that says so; what can still be asked
    of it is asked up to there.

    Raises:
        PlanError: the claim contradicts itself.
        TypeError: both a `rotary` and fields of one, a field that there is not, no function, or no whole number.
        ValueError: `length` or `furthest` is too small, or `length` passes `furthest`.
    """
    if not callable(rotate):
        raise TypeError(f"rotate: got {type(rotate).__name__}; give a function rotate(q, k, positions)")
    if rotary is None:
        rotary = Rotary(**claims)
    elif claims:
        raise TypeError(f"rotary: it is given, and {', '.join(claims)} besides; give one of the two")
    furthest = _whole("furthest", furthest, function_form.LEAST)
    if length is None:
        length = min(_USUAL_LENGTH, furthest + 1)
    length = _whole("length", length, function_form.LEAST + 1)
    if length > furthest + 1:
        most = furthest + 1
        raise ValueError(f"length: got {length:,}, and positions end at {furthest:,}; give at most {most:,}")
    if rotary.depends_on_length:
        rotary = rotary.at_length(length)
    return tuple(_verdicts(Asked(rotate, rotary, heads_first=heads_first, length=length, furthest=furthest)))


def _whole(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: got {value!r}; give a whole number of tokens") from None
    if not least <= number <= _LARGEST:
        raise ValueError(f"{name}: got {number:,}; give at least {least}, and at most 2^53")
    return number


def _verdicts(asked: Asked) -> Iterator[Verdict]:
    refused = function_form.call(asked)
    if refused is not None:
        yield refused
        yield from (skipped(name, "the function cannot be called as it must be") for name, _ in CHECKS)
        return
    # Of the one of the two whose fault is known already, no more is asked.
    keys: Asked | None = None
    only_keys = ended = False
    for name, check in CHECKS:
        verdict = _run(check, keys if only_keys and name in _OF_KEYS and keys else asked)
        if isinstance(verdict, Exception) and not ended:
            ended = True
            found = function_form.end(asked)
            if found is not None:
                yield found[0]
                asked = asked.with_ends(furthest=found[1])
                keys = None if keys is None else asked.of_keys()
                verdict = _run(check, asked)
        verdict = _told(name, verdict)
        if name == function_form.BOTH:
            only_keys = function_form.of_queries(verdict)
            keys = asked.of_keys() if verdict.cause is None or only_keys else None
        if keys is not None and name in _OF_KEYS and not verdict.failed:
            of_keys = _told(name, _run(check, keys))
            verdict = _worded(of_keys) if of_keys.failed else verdict
        yield verdict


def _run(check: Callable[[Asked], Verdict], asked: Asked) -> Verdict | Exception:
    try:
        # What is not finite is found by its value.
        with np.errstate(all="ignore"):
            return check(asked)
    except MemoryError:
        raise
    except Exception as error:
        return error


def _worded(verdict: Verdict) -> Verdict:
    """What was asked of keys in the place of queries, in their name."""
    return replace(verdict, message="keys: " + verdict.message.replace("queries", "keys").replace("a query", "a key"))


def _told(name: str, found: Verdict | Exception) -> Verdict:
    if isinstance(found, Verdict):
        return found
    return Verdict(name=name, outcome="fail", message=f"it could not be run: {function_form.said(found)}")
