"""Positions that pick rows of a table: the words for those that it does not have."""

from __future__ import annotations

from torch import Tensor


def refuse_row(position: int, rows: int) -> None:
    """Refuse a position that a table of `rows` rows has no row for.

    Raises:
        ValueError: always.
    """
    has = f"{rows} rows, 0 to {rows - 1}" if rows else "no rows"
    raise ValueError(f"positions: got {position}; the tables have {has}")


def require_rows(positions: Tensor, rows: int) -> None:
    """Refuse positions that a table of `rows` rows has no row for; they are read on the host.

    Raises:
        ValueError: as said.
    """
    if positions.numel() == 0:
        return
    least, most = positions.aminmax()
    for position in (int(least), int(most)):
        if not 0 <= position < rows:
            refuse_row(position, rows)
