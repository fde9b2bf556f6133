"""Which heads a rank of tensor parallelism has, checked in the same words everywhere."""

from __future__ import annotations


def require_heads(name: str, number: int) -> None:
    """Refuse what is no number of heads.

    Raises:
        ValueError: not a whole number of at least 1.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"{name}: got {number!r}; it must be a whole number of at least 1")


def heads_of_rank(heads: slice | None, num_heads: int, *, kind: str = "heads") -> slice:
    """A slice with both ends given: all heads by default.

    Raises:
        ValueError: not within the heads, empty, or with a step.
    """
    if heads is None:
        return slice(0, num_heads)
    if isinstance(heads, slice):
        start, stop = heads.start or 0, num_heads if heads.stop is None else heads.stop
        if 0 <= start < stop <= num_heads and heads.step in (None, 1):
            return slice(start, stop)
    raise ValueError(f"heads: got {heads}; it must lie within the {num_heads} {kind}, step 1")
