"""What tables that are worked out in float64 on the CPU have in common."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from theodolite.encodings.rotate.tables import require_plan
from theodolite.plan import Rotary
from theodolite.plan.scaling import Float64
from theodolite.positions.checks import LARGEST_POSITION

# Rows worked on at once: the float64 scratch stays at a few MiB.
_BLOCK = 4096


def host_positions(name: str, positions: Tensor) -> Float64:
    """The values in float64.

    Raises:
        ValueError: beyond 2**24 either way, where float64 angles are no longer exact to 6e-8; `name` is for the text.
    """
    host: Float64 = positions.detach().cpu().numpy().astype(np.float64)
    if host.size and not np.abs(host).max() <= LARGEST_POSITION:
        worst = host.flat[np.argmax(np.abs(host))]
        raise ValueError(f"{name}: got {worst:.0f}; the tables are exact up to 2**24 = {LARGEST_POSITION}")
    return host


def row_blocks(rows: int) -> Iterator[slice]:
    """Slices that cover `rows` rows."""
    return (slice(start, start + _BLOCK) for start in range(0, rows, _BLOCK))


def require_settled(name: str, rotary: Rotary) -> None:
    """Refuse what is no plan, and one whose frequencies depend on the length.

    Raises:
        ValueError: as said.
    """
    require_plan(name, rotary)
    if rotary.depends_on_length:
        raise ValueError(
            f"{name}: {rotary.scaling.rope_type!r} has frequencies that depend on the length of the sequence; "
            "settle them with rotary.at_length(tokens)"
        )


def axes_of(rotary: Rotary) -> int:
    """How many axes its positions have; 0 for positions without that dimension."""
    return len(rotary.mrope_section) if rotary.mrope_section else 0
