"""What tables that are worked out in float64 on the CPU have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from theodolite.plan import Rotary
from theodolite.positions.checks import LARGEST_POSITION

# Entries worked on at once, at least and at most: the float64 scratch is a MiB, or, where a table is long, an eighth of
# it, at most 16 MiB. In smaller parts torch's threads would wait for each other more often than they work.
BLOCK = 2**16
_LARGEST_BLOCK = 2**20
_PARTS = 16


def host_positions(name: str, positions: Tensor) -> Tensor:
    """The values in float64, on the CPU.

    Raises:
        ValueError: beyond 2**24 either way, where float64 angles are no longer exact to 6e-8; `name` is for the text.
    """
    host = positions.cpu().double()
    if host.numel() and not host.abs().max().item() <= LARGEST_POSITION:
        _refuse(name, host.flatten()[host.abs().argmax()].item())
    return host


def one_position(name: str, position: Tensor) -> float:
    """The value of a tensor of one element.

    Raises:
        ValueError: as in `host_positions`.
    """
    value = float(position.item())
    if not abs(value) <= LARGEST_POSITION:
        _refuse(name, value)
    return value


def _refuse(name: str, position: float) -> None:
    raise ValueError(f"{name}: got {position:.0f}; the tables are exact up to 2**24 = {LARGEST_POSITION}")


def row_blocks(rows: int, pairs: int) -> Iterator[slice]:
    """Slices that cover `rows` rows of `pairs` entries, as many at once as are worked on at once."""
    entries = min(max(BLOCK, rows * pairs // _PARTS), _LARGEST_BLOCK)
    step = max(1, entries // max(1, pairs))
    return (slice(start, start + step) for start in range(0, rows, step))


def cos_sin(angles: Tensor, amplitude: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """cos and sin, times `amplitude`, rounded once: each entry is a function of its angle alone, whatever is beside it.

    Args:
        angles: in radians, float64, on the CPU; they are written over.
        dtype: of the result.
    """
    cos, sin = angles.cos(), angles.sin_()
    if amplitude != 1.0:
        cos, sin = cos.mul_(amplitude), sin.mul_(amplitude)
    return cos.to(dtype), sin.to(dtype)


def cos_sin_by_block(
    angles: Callable[[slice, Tensor], Tensor], rows: int, pairs: int, amplitude: float
) -> tuple[Tensor, Tensor]:
    """`cos_sin` of a table that may be long, (rows, pairs) each.

    Args:
        angles: writes those of some rows to a tensor, and returns it.
    """
    cos, sin = (torch.empty((rows, pairs), dtype=torch.float32, device="cpu") for _ in range(2))
    scratch: Tensor | None = None
    for block in row_blocks(rows, pairs):
        if scratch is None:
            # Once: memory that is given back and asked for again is found again page by page.
            scratch = torch.empty((2, min(block.stop, rows), pairs), dtype=torch.float64, device="cpu")
        turning, turned = scratch[:, : min(block.stop, rows) - block.start]
        turning = angles(block, turning)
        for table, turn in ((cos, torch.cos), (sin, torch.sin)):
            turn(turning, out=turned)
            table[block] = turned if amplitude == 1.0 else turned.mul_(amplitude)
    return cos, sin


def require_plan(name: str, rotary: object) -> None:
    """Refuse what is not a plan, a module that holds one above all.

    Raises:
        ValueError: as said.
    """
    if isinstance(rotary, Rotary):
        return
    kind = type(rotary).__name__
    if isinstance(rotary, nn.Module) and isinstance(getattr(rotary, "rotary", None), Rotary):
        learned = any(True for _ in rotary.parameters())
        more = "its frequencies are learned, and its .rotary is where they began" if learned else "give its .rotary"
        raise ValueError(f"{name}: got a {kind}, a module; it must be a Rotary, the plan: {more}")
    raise ValueError(f"{name}: got a {kind}; it must be a Rotary, for example Rotary(head_dim=64, rope_theta=10000.0)")


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
