"""Each turning of queries and keys in a forward: what went into the function that turns, and what came out.

A function of a stranger names its arguments as it likes. Tables are told by what they are (the numbers that the rotary
module gave), and what is turned by what comes back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from theodolite.models.rotation import LayerRotation


@dataclass(frozen=True)
class Turning:
    """One call of the function that turns queries and keys in a layer: before and after, (B, H, S, D) on the CPU.

    Args:
        untold: why it cannot be told what was turned into what; both are empty then.
    """

    before: tuple[Tensor, ...]
    after: tuple[Tensor, ...]
    untold: str | None = None


class Record(Protocol):
    """Where a forward is written down: `watch.Seen`."""

    tables: dict[int, Any]
    turnings: dict[int, list[Turning]]
    made: list[Any]
    layer: int
    depth: int


def looked_at(seen: Record, original: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with a record of each call that is not made by another one that is looked at."""

    # Who looks at the parameters (a patch does) finds those of the original.
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if seen.depth:
            return original(*args, **kwargs)
        given = [(x, _kept(x)) for x in _tensors((args, kwargs)) if x.is_floating_point()]
        seen.depth += 1
        try:
            result = original(*args, **kwargs)
        finally:
            seen.depth -= 1
        tables = list(_tensors((seen.tables.get(seen.layer), seen.made)))
        before = [kept for x, kept in given if not any(_is_of(x, kept, table) for table in tables)]
        turning = _turning(getattr(original, "__name__", "the function"), before, result)
        seen.turnings.setdefault(seen.layer, []).append(turning)
        return result

    return call


def _turning(name: str, before: list[Tensor], result: Any) -> Turning:
    after = [_kept(x) for x in _tensors(result)]
    if before and [x.shape for x in before] == [x.shape for x in after]:
        return Turning(tuple(before), tuple(after))
    shapes = [" ".join(str(tuple(x.shape)) for x in found) or "nothing" for found in (before, after)]
    return Turning((), (), f"{name} is given {shapes[0]} besides tables and returns {shapes[1]}")


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)


def _is_of(x: Tensor, kept: Tensor, table: Tensor) -> bool:
    """Whether it is a table, a part or another view of one, or one of the same numbers in another shape or dtype."""
    if x.device == table.device and x.untyped_storage().data_ptr() == table.untyped_storage().data_ptr():
        return True
    if table.is_complex() or x.numel() != table.numel():
        return False
    same = table.detach().to(x.dtype).double().cpu().reshape(-1) == kept.reshape(-1)
    return bool(same.all())


def patched_turn(seen: Record, original: Callable[..., Any]) -> Callable[..., Any]:
    """The method by which a patched layer turns, with a record of each call."""

    def turn(rotation: LayerRotation, q: Any, k: Any, *, heads_first: bool) -> Any:
        before = tuple(_kept(x) for x in (q, k) if x is not None)
        result = original(rotation, q, k, heads_first=heads_first)
        after = tuple(_kept(x) for x in result if x is not None)
        seen.turnings.setdefault(seen.layer, []).append(Turning(before, after))
        return result

    return turn


def _kept(x: Tensor) -> Tensor:
    # A copy: a function that writes into its arguments must not change what was seen.
    return x.detach().double().cpu().clone()
