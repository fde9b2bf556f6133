"""Can a function be called as it must be, and does it do to keys what it does to queries? And where does it end?"""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.conformance.asked import ROUNDINGS, Asked, distance
from theodolite.conformance.verdict import Cause, Verdict, judged

CALL, BOTH, END = "call", "queries and keys", "last position"
LEAST = 15
"""The smallest position (tokens) up to which a function can be checked."""


def order(heads_first: bool) -> str:
    """The order of axes, in words."""
    return "(B, H, S, D)" if heads_first else "(B, S, H, D)"


def call(asked: Asked) -> Verdict | None:
    """Why the function cannot be asked anything; None where a call gives q and k of the shapes that went in."""
    wrong = _wrong(asked)
    if wrong is None:
        return None
    other = not asked.heads_first
    turned = Asked(asked.rotate, asked.rotary, heads_first=other, length=asked.length, furthest=asked.furthest)
    cure: str | None = f"return q and k, each in the shape {order(asked.heads_first)} that it came in"
    cause = None
    if _wrong(turned) is None:
        cause = f"it takes q and k of {order(other)}, and is given {order(asked.heads_first)}"
        cure = f"give heads_first={other}"
    elif "could not be run" in wrong or "not finite" in wrong:
        cure = None
    return Verdict(name=CALL, outcome="fail", message=wrong, cause=cause, cure=cure)


def _wrong(asked: Asked) -> str | None:
    """What is wrong with a call with 3 heads, 5 tokens, in the order of axes that is claimed."""
    q, k = asked.inputs(heads=3, tokens=5)
    if not asked.heads_first:
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
    wanted, given = q.shape, f"q and k of {tuple(q.shape)} and positions of (5,)"
    try:
        with torch.no_grad():
            found = asked.rotate(q, k, torch.arange(5))
    except MemoryError:
        raise
    except Exception as error:
        return f"it could not be run with {given}: {said(error)}"
    if isinstance(found, Tensor):
        return f"it must return q and k, and returns one tensor of {tuple(found.shape)}"
    if not isinstance(found, (tuple, list)) or not all(isinstance(x, Tensor) for x in found):
        parts = [type(x).__name__ for x in found] if isinstance(found, (tuple, list)) else []
        of = f" of {', '.join(parts)}" if parts else ""
        return f"it must return q and k, and returns a {type(found).__name__}{of}"
    if len(found) != 2:
        return f"it must return q and k, and returns {len(found)} tensors"
    for name, x in zip("qk", found, strict=True):
        if x.shape != wanted:
            return f"with {given}, it returns {name} of {tuple(x.shape)}"
        if not torch.isfinite(x).all():
            return f"with {given}, it returns {name} with numbers that are not finite"
    return None


def said(error: Exception) -> str:
    """The name of an exception and its first line."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]:.200}"


def end(asked: Asked) -> tuple[Verdict, int] | None:
    """Where a function that raises further out ends: the verdict, and the last position that it takes.

    None where it takes the furthest position, or not even those near.
    """
    error = _refused(asked, asked.furthest)
    if error is None or _refused(asked, LEAST) is not None:
        return None
    taken, refused = LEAST, asked.furthest
    while refused - taken > 1:
        middle = (taken + refused) // 2
        found = _refused(asked, middle)
        if found is None:
            taken = middle
        else:
            refused, error = middle, found
    verdict = Verdict(
        name=END,
        outcome="fail",
        message=f"it takes positions up to {taken:,}, and up to {asked.furthest:,} is asked for: {said(error)}",
        starts_at=refused,
        cause=f"its table ends after {taken + 1:,} rows",
        cure=f"give furthest={taken} (the last position, one less than the rows), or let the table grow",
    )
    return verdict, taken


def _refused(asked: Asked, position: int) -> Exception | None:
    q, k = asked.inputs(heads=2, tokens=1)
    try:
        with torch.no_grad():
            asked.turn(q, k, torch.tensor([position]))
    except MemoryError:
        raise
    except Exception as error:
        return error
    return None


def both(asked: Asked) -> Verdict:
    """Equal queries and keys are turned alike, and queries come back first."""
    q, k = asked.inputs(heads=2, tokens=6)
    positions = torch.tensor(asked.places(0, 1, 2, 7, 100, 1000))
    turned_q, turned_k = asked.turn(q.clone(), q.clone(), positions)
    first, second = asked.turn(q.clone(), k.clone(), positions)
    tolerance = ROUNDINGS * asked.amplitude
    off = (turned_q.double() - turned_k.double()).abs().amax((0, 1, 3)).nan_to_num(nan=float("inf"))
    if distance(first, turned_q) > tolerance >= distance(second, turned_q):
        error, words = distance(first, turned_q), "queries and keys come back exchanged"
        return judged(BOTH, error, tolerance, "", words, at=0, cause=Cause(words="it returns k before q"))
    error = float(off.max())
    bad = positions[off > tolerance]
    return judged(
        BOTH,
        error,
        tolerance,
        "equal queries and keys are turned alike",
        f"equal queries and keys come out {error:.2g} apart",
        at=int(bad[0]) if len(bad) else None,
        cause=_of_one(asked, q, (turned_q, turned_k), positions) if error > tolerance else None,
    )


def of_queries(verdict: Verdict) -> bool:
    """Whether the fault that `both` names is one of queries alone."""
    return verdict.cause is not None and verdict.cause.startswith("queries")


def _of_one(asked: Asked, x: Tensor, turned: tuple[Tensor, Tensor], positions: Tensor) -> Cause | None:
    """What befalls queries alone, or keys alone."""
    tolerance = 1e-3 * asked.amplitude
    for name, other, one in zip(("queries", "keys"), ("keys", "queries"), turned, strict=True):
        if torch.equal(one, x):
            return Cause(words=f"{name} are not turned", reference="huggingface/transformers#37344")
        if distance(one, asked.exact(x, -positions)) <= tolerance:
            return Cause(words=f"{name} turn the other way, and {other} do not", reference="huggingface/candle#3948")
    return None
