"""Rotations side by side: some heads by one and some by another, or some channels of every head."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from theodolite.encodings.rotate.base import K, Q, Rotate
from theodolite.encodings.rotate.lengths import Lengths
from theodolite.encodings.rotate.operands import require_heads
from theodolite.kernels.outputs import require_apart


class _Parts(Rotate):
    """Cuts queries and keys along one dimension, turns each part by its own rotation, and joins them."""

    def __init__(self, parts: Sequence[tuple[Rotate | None, int]], unit: str) -> None:
        _check_pairs(parts, unit)
        super().__init__(rotary_dim=sum(part.rotary_dim for part, _ in parts if isinstance(part, Rotate)))
        for part, count in parts:
            if part is not None and not isinstance(part, Rotate):
                raise ValueError(
                    f"parts: got a {type(part).__name__}; a part is a Rotate module, or None to turn nothing"
                )
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"parts: got {count!r} {unit}; it must be a whole number of at least 1")
        # ModuleList has no place for None.
        self._turning = nn.ModuleList(part for part, _ in parts if part is not None)
        self._turns = tuple(part is not None for part, _ in parts)
        self.counts = tuple(count for _, count in parts)

    @property
    def parts(self) -> tuple[Rotate | None, ...]:
        """The rotation of each part, None where nothing turns."""
        turning = iter(self._turning)
        return tuple(cast(Rotate, next(turning)) if turns else None for turns in self._turns)

    @property
    def table_key(self) -> Hashable:
        return type(self), self.counts, tuple(part and part.table_key for part in self.parts)

    def tables(
        self,
        positions: Tensor,
        *,
        lengths: Lengths | None = None,
        amplitude: bool = True,
        device: torch.device | str | None = None,
    ) -> tuple[Any, ...]:
        """The tables of each part, None for one that does not turn."""
        options: dict[str, Any] = {"lengths": lengths, "amplitude": amplitude, "device": device}
        return tuple(
            None if part is None else part.tables(self._positions_of(number, positions), **options)
            for number, part in enumerate(self.parts)
        )

    def apply_tables(
        self, q: Q, k: K, tables: tuple[Any, ...], *, heads_first: bool = True, inplace: bool = False
    ) -> tuple[Q, K]:
        """Turn q (B, H, S, D) and k (B, Hkv, S, D), each part by its own tables."""
        dim = self._dim(heads_first)
        options: dict[str, Any] = {"heads_first": heads_first, "inplace": inplace}
        if inplace and q is not None and k is not None:
            # Their parts may be apart where the whole are not.
            require_heads("q", q)
            require_heads("k", k)
            require_apart(q, k)
        pieces = zip(self._cut("q", q, dim), self._cut("k", k, dim), strict=True)
        turned = [
            pair if part is None else part.apply_tables(*pair, table, **options)
            for part, pair, table in zip(self.parts, pieces, tables, strict=True)
        ]
        return cast(
            tuple[Q, K],
            tuple(
                whole if whole is None or inplace else torch.cat([pair[side] for pair in turned], dim=dim)
                for side, whole in enumerate((q, k))
            ),
        )

    def turn(self, x: Tensor, tables: tuple[Any, ...], *, heads_first: bool = True, conjugate: bool = False) -> Tensor:
        dim = self._dim(heads_first)
        turned = [
            piece if part is None else part.turn(piece, table, heads_first=heads_first, conjugate=conjugate)
            for part, piece, table in zip(self.parts, self._cut("x", x, dim), tables, strict=True)
        ]
        return torch.cat(turned, dim=dim)

    def reset_parameters(self) -> None:
        for part in self.parts:
            if part is not None:
                part.reset_parameters()

    def _positions_of(self, number: int, positions: Tensor) -> Tensor:
        return positions

    def _dim(self, heads_first: bool) -> int:
        raise NotImplementedError

    def _size(self, size: int) -> int:
        """How large one count is along a dimension of this size; 0 where it does not fit."""
        raise NotImplementedError

    def _cut(self, name: str, x: Tensor | None, dim: int) -> list[Any]:
        """Views of x, one for each part."""
        if x is None:
            return [None] * len(self.counts)
        require_heads(name, x)
        unit = self._size(x.shape[dim])
        if unit == 0:
            raise ValueError(
                f"{name}: got shape {tuple(x.shape)}; its parts are {list(self.counts)} along dimension {dim}"
            )
        ends = accumulate((unit * count for count in self.counts), initial=0)
        return [x.narrow(dim, start, stop - start) for start, stop in pairwise(ends)]


def _check_pairs(parts: object, unit: str) -> None:
    needed = f"give pairs of a rotation, or None, and its {unit}"
    if not isinstance(parts, Sequence):
        raise ValueError(f"parts: got a {type(parts).__name__}; {needed}, in a list")
    if not parts:
        raise ValueError(f"parts: got none; {needed}")
    for pair in parts:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(f"parts: got a {type(pair).__name__} among them; {needed}")


class RotateByHead(_Parts):
    """Heads with rotations of their own: `RotateByHead([(rope, 6), (None, 2)])` turns six key heads of eight.

    Args:
        parts: a rotation, or None, and how many key-value heads in a row have it. Grouped queries follow their keys.
    """

    def __init__(self, parts: Sequence[tuple[Rotate | None, int]]) -> None:
        super().__init__(parts, "heads")

    def _dim(self, heads_first: bool) -> int:
        return -3 if heads_first else -2

    def _size(self, size: int) -> int:
        # No divmod: a compiler with sizes as symbols has none.
        heads = sum(self.counts)
        return 0 if size % heads else size // heads


class RotateByChannel(_Parts):
    """Channels of every head with rotations of their own, each with pairs of its own.

    `RotateByChannel([(by_row, 32), (by_column, 32)])` is Gemma 4's image encoder: each half of the head turns alone.

    Args:
        parts: a rotation, or None, and how many channels in a row have it; they make up the head.
        axis_of_parts: which axis of positions (axes, B, S) each part follows; by default all follow the same
            positions, (S,) or (B, S).
    """

    def __init__(
        self, parts: Sequence[tuple[Rotate | None, int]], *, axis_of_parts: Sequence[int] | None = None
    ) -> None:
        super().__init__(parts, "channels")
        if axis_of_parts is not None and len(axis_of_parts) != len(parts):
            raise ValueError(
                f"axis_of_parts: got {list(axis_of_parts)}; one for each of the {len(parts)} parts is needed"
            )
        self.axis_of_parts = None if axis_of_parts is None else tuple(axis_of_parts)

    @property
    def table_key(self) -> Hashable:
        return super().table_key, self.axis_of_parts

    def _positions_of(self, number: int, positions: Tensor) -> Tensor:
        if self.axis_of_parts is None:
            return positions
        if positions.dim() != 3 or positions.shape[0] <= max(self.axis_of_parts):
            raise ValueError(
                f"positions: got shape {tuple(positions.shape)}; it must be (axes, B, S) with at least "
                f"{max(self.axis_of_parts) + 1} axes"
            )
        return positions[self.axis_of_parts[number]]

    def _dim(self, heads_first: bool) -> int:
        return -1

    def _size(self, size: int) -> int:
        return 1 if size == sum(self.counts) else 0
