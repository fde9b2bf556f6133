"""What is turned, checked in the same words by every rotation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from theodolite.plan import Rotary
from theodolite.positions.checks import require_reachable


def require_heads(name: str, x: object) -> None:
    """Refuse what is no tensor of four dimensions.

    Raises:
        ValueError: as said.
    """
    needed = "it must have four dimensions, (B, H, S, D) or (B, S, H, D)"
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: got a {type(x).__name__}; give a tensor; {needed}")
    if x.dim() != 4:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}; {needed}")


def device_of(q: Tensor | None, k: Tensor | None) -> torch.device | None:
    """The device of those that are given.

    Raises:
        ValueError: one is no tensor of four dimensions.
    """
    for name, x in (("q", q), ("k", k)):
        if x is not None:
            require_heads(name, x)
    return q.device if q is not None else k.device if k is not None else None


def require_width(name: str, x: Tensor, head_dim: int, rotary_dim: int) -> None:
    """Refuse heads of another width than the plan's, which are neither whole nor the channels that turn alone.

    Raises:
        ValueError: as said.
    """
    if x.shape[-1] in (head_dim, rotary_dim):
        return
    alone = f", or {rotary_dim} where the channels that turn are given alone" if rotary_dim != head_dim else ""
    raise ValueError(f"{name}: got shape {tuple(x.shape)}; its last must be head_dim, {head_dim}{alone}")


def require_tables(name: str, x: Tensor, tables: Any) -> None:
    """Refuse tables that are none, or that have no values for `x`.

    Raises:
        ValueError: as said.
    """
    cos, sin = getattr(tables, "cos", None), getattr(tables, "sin", None)
    for part, table in (("cos", cos), ("sin", sin)):
        if not isinstance(table, Tensor):
            raise ValueError(
                f"tables: got a {type(tables).__name__} whose {part} is a {type(table).__name__}; give what `tables` "
                "of the same class made"
            )
        require_reachable(x, name, **{part: table})


def layout_of(rotary: Rotary) -> dict[str, Any]:
    """Where the channels that turn stand in a head: what `Rotate` is made with."""
    return {
        "head_dim": rotary.head_dim,
        "rotary_dim": rotary.rotary_dim,
        "interleaved": rotary.interleaved,
        "trailing": rotary.trailing,
    }
