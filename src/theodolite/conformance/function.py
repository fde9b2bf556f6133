"""Is this function a rotary encoding, and the one that it claims to be? Needs torch only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from theodolite.conformance import function_calls, function_values
from theodolite.conformance.asked import Asked, Rotate
from theodolite.conformance.verdict import Verdict
from theodolite.plan import Rotary

_USUAL_LENGTH = 8192
_FURTHEST = 2**24 - 1

# History first, before other checks have made some; what is asked of numbers needs the pairs to be right.
CHECKS: tuple[tuple[str, Callable[[Asked], Verdict]], ...] = (
    ("history", function_calls.history),
    ("shapes and dtypes", function_calls.kinds),
    ("inputs", function_calls.inputs_untouched),
    ("axes", function_calls.axes),
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
        furthest: the largest position that is asked for (tokens); smaller for a table that ends.

    Raises:
        PlanError: the claim contradicts itself.
        TypeError: both a `rotary` and fields of one, a field that there is not, or no function.
    """
    if not callable(rotate):
        raise TypeError(f"rotate: got {type(rotate).__name__}; give a function rotate(q, k, positions)")
    if rotary is None:
        rotary = Rotary(**claims)
    elif claims:
        raise TypeError(f"rotary: it is given, and {', '.join(claims)} besides; give one of the two")
    if length is None:
        length = min(_USUAL_LENGTH, furthest + 1)
    if rotary.depends_on_length:
        rotary = rotary.at_length(length)
    asked = Asked(rotate, rotary, heads_first=heads_first, length=length, furthest=furthest)
    return tuple(_run(name, check, asked) for name, check in CHECKS)


def _run(name: str, check: Callable[[Asked], Verdict], asked: Asked) -> Verdict:
    try:
        # What is not finite is found by its value.
        with np.errstate(all="ignore"):
            return check(asked)
    except MemoryError:
        raise
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        return Verdict(name=name, outcome="fail", message=f"it could not be run: {type(error).__name__}: {said:.200}")
