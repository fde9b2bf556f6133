"""By what keys were turned, row by row: what a cache compares, so that keys of two frequencies are never mixed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from theodolite.encodings.policy import Policy
from theodolite.encodings.rotate.axial import PatchRotate
from theodolite.encodings.rotate.base import Rotate
from theodolite.encodings.rotate.length_base import LengthBase
from theodolite.encodings.rotate.lengths import Lengths, row_lengths
from theodolite.encodings.rotate.parts import RotateByChannel, RotateByHead
from theodolite.encodings.rotate.per_head import PerHeadRotary
from theodolite.encodings.rotate.rotary import RotaryEmbedding
from theodolite.plan import Rotary


class Turning(NamedTuple):
    """By what keys are turned, and values too where `values`; `lengths` of the rows where frequencies follow them."""

    rotate: Rotate | None
    lengths: tuple[int, ...] | None
    values: bool

    def plans(self, rows: int) -> list[Rotary] | None:
        """The plan of each row, settled; None of what is no `RotaryEmbedding`."""
        if not isinstance(self.rotate, RotaryEmbedding):
            return None
        plan = self.rotate.rotary
        return [plan] * rows if self.lengths is None else [_settled(plan, length) for length in self.lengths]

    def same_rotation(self, other: Turning) -> bool:
        """Whether both turn alike, but for the lengths."""
        keys = [None if turning.rotate is None else turning.rotate.table_key for turning in (self, other)]
        return keys[0] == keys[1] and self.values == other.values

    def __str__(self) -> str:
        rotation = "nothing" if self.rotate is None else str(self.rotate.table_key)
        lengths = "" if self.lengths is None else f" at lengths {list(self.lengths)}"
        return f"{rotation}{lengths}{', values too' if self.values else ''}"


@lru_cache(maxsize=1024)
def _settled(rotary: Rotary, length: int) -> Rotary:
    """`rotary.at_length(length)`: of one length all layers ask."""
    return rotary.at_length(length)


def turning_of(policy: Policy, lengths: Lengths | None, rows: int) -> Turning:
    """How a policy turns keys and values of `rows` rows.

    Raises:
        ValueError: lengths that are not one for each row, nor one for all.
    """
    rotate = policy.rotate
    values = policy.rotate_values and rotate is not None
    if lengths is None or not _follows_length(rotate):
        return Turning(rotate, None, values)
    numbers = row_lengths(lengths)
    if len(numbers) not in (1, rows):
        raise ValueError(f"lengths: got {len(numbers)} for {rows} rows; give one for each")
    return Turning(rotate, tuple(numbers if len(numbers) == rows else numbers * rows), values)


def _follows_length(rotate: Rotate | None) -> bool:
    """Whether its frequencies depend on the length of a sequence; of one that does not say, they may."""
    if rotate is None or isinstance(rotate, PatchRotate):
        return False
    if isinstance(rotate, (RotateByHead, RotateByChannel)):
        return any(_follows_length(part) for part in rotate.parts)
    if isinstance(rotate, PerHeadRotary):
        return any(plan.depends_on_length for plan in rotate.rotaries)
    plan = getattr(rotate, "rotary", None)
    return isinstance(rotate, LengthBase) or not isinstance(plan, Rotary) or plan.depends_on_length


def plans_of(what: str, turning: Turning, rows: int) -> list[Rotary]:
    plans = turning.plans(rows)
    if plans is None:
        name = "nothing" if turning.rotate is None else type(turning.rotate).__name__
        raise ValueError(
            f"{what}: the keys were turned by {name}, and are turned again from a RotaryEmbedding alone; use "
            "Cache(turned=False)"
        )
    return plans


def rows_alike(
    before: list[Rotary], after: list[Rotary], rows: Iterable[int]
) -> Iterable[tuple[tuple[Rotary, Rotary], list[int]]]:
    """The rows that go from one plan to another, together."""
    found: dict[tuple[Rotary, Rotary], list[int]] = {}
    for row in rows:
        found.setdefault((before[row], after[row]), []).append(row)
    return found.items()
