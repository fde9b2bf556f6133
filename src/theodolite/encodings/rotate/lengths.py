"""The lengths of the sequences that rows belong to, for frequencies that depend on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from theodolite.positions.checks import can_read_at_once, require_integers, require_positions

Lengths: TypeAlias = Sequence[int] | Tensor
"""The tokens of each row's whole sequence, B of them: numbers, or integers (B,). A tensor may have to be read."""


def row_lengths(lengths: Lengths) -> list[int]:
    """As Python numbers; a tensor on a device is waited for.

    Raises:
        ValueError: not whole numbers of at least 1, or a tensor without values.
        RuntimeError: a graph is being compiled.
    """
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError(
            "lengths: a plan's frequencies by length are plain numbers, worked out outside a graph; make the tables "
            "before and give them to apply_tables, or settle the length with rotary.at_length(tokens)"
        )
    if not isinstance(lengths, Tensor):
        return _checked(lengths)
    _require_row("lengths", lengths)
    if lengths.is_meta:
        raise ValueError("lengths: they are on the meta device and have no values; give numbers")
    return _checked(lengths.tolist())


def lengths_tensor(lengths: Lengths) -> Tensor:
    """As integers (B,), for frequencies that are traced: no value is read where a device would be waited for.

    Raises:
        ValueError: as in `row_lengths`.
    """
    if not isinstance(lengths, Tensor):
        return torch.tensor(_checked(lengths), dtype=torch.int64, device="cpu")
    _require_row("lengths", lengths)
    if can_read_at_once(lengths):
        _checked(lengths.tolist())
    return lengths


def for_each_row(positions: Tensor, rows: int, *, axes: int, name: str = "lengths") -> Tensor:
    """Positions with as many rows as `name` has: (S,) and (1, S) become (B, S), (axes, 1, S) becomes (axes, B, S).

    Raises:
        ValueError: they have rows already, and another number of them.
    """
    require_positions("positions", positions, dims=(3,) if axes else (1, 2))
    if positions.dim() == 1:
        positions = positions[None]
    given = positions.shape[-2]
    if given == rows:
        return positions
    if given != 1:
        raise ValueError(
            f"{name}: got {rows} for positions of shape {tuple(positions.shape)}; one per row of (B, S) is needed"
        )
    return positions.expand(*positions.shape[:-2], rows, positions.shape[-1])


def _require_row(name: str, lengths: Tensor) -> None:
    require_integers(name, lengths)
    if lengths.dim() != 1:
        raise ValueError(f"{name}: got shape {tuple(lengths.shape)}; it must be (B,), one for each row")


def _checked(lengths: Sequence[int]) -> list[int]:
    if isinstance(lengths, str) or not isinstance(lengths, Sequence):
        raise ValueError(f"lengths: got {lengths!r}; give a whole number for each row, in a list or a tensor (B,)")
    for length in lengths:
        if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < 1:
            raise ValueError(f"lengths: got {length!r}; each must be a whole number of at least 1 token")
    return [int(length) for length in lengths]
