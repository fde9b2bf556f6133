"""What `rotate` is given, checked, and brought into the one form that implementations take."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from theodolite.kernels.layout import Layout

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_EXACT = (torch.float32, torch.float64)
# Others are converted first.
ROW_DTYPES = (torch.int32, torch.int64)
_STORED = (torch.int8, torch.float16, torch.bfloat16)


class Tables(NamedTuple):
    """cos and sin, (1 or B, Ht, L, P), and the rows that tokens have of them, (1 or B, S), or None for one after
    the other."""

    cos: Tensor
    sin: Tensor
    positions: Tensor | None


def layout_of(x: Tensor, interleaved: bool, rotary_dim: int | None, trailing: bool, conjugate: bool) -> Layout:
    """Which channels of `x` turn."""
    rotary_dim = x.shape[-1] if rotary_dim is None else rotary_dim
    return Layout(interleaved, rotary_dim, trailing, conjugate)


def canonical(x: Tensor, heads_first: bool) -> Tensor:
    """A view (B, H, S, D) of (B, H, S, D), (B, S, H, D), (H, T, D) or (T, H, D)."""
    x = x if heads_first else x.transpose(-3, -2)
    return x if x.dim() == 4 else x.unsqueeze(0)


def canonical_tables(cos: Tensor, sin: Tensor, positions: Tensor | None, device: torch.device) -> Tables:
    """Views, on the device of what is turned."""
    cos, sin = (_four(table).to(device) for table in (cos, sin))
    if positions is not None:
        positions = positions[None] if positions.dim() == 1 else positions
        positions = positions if positions.dtype in ROW_DTYPES else positions.long()
        positions = positions.to(device)
    return Tables(cos, sin, positions)


def _four(table: Tensor) -> Tensor:
    if table.dim() == 4:
        return table
    return table[None, None] if table.dim() == 2 else table[:, None]


def check(
    name: str,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    *,
    rotary_dim: int | None,
    heads_first: bool,
    stored_tables: bool,
) -> None:
    """Refuse what does not fit together.

    Raises:
        ValueError: it names the argument.
    """
    forms = "(B, H, S, D) or (B, S, H, D)" if isinstance(x, Tensor) and x.dim() != 3 else "(H, T, D) or (T, H, D)"
    if not isinstance(x, Tensor) or x.dim() not in (3, 4):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: got {type(x).__name__}; it must be a tensor")
        raise ValueError(
            f"{name}: got shape {tuple(x.shape)}; it must have four dimensions, (B, H, S, D) or (B, S, H, D), or three "
            "where sequences are packed, (H, T, D) or (T, H, D)"
        )
    if x.dtype not in _DTYPES:
        raise ValueError(f"{name}: got {x.dtype}; it must be float16, bfloat16, float32 or float64")
    rotary_dim = x.shape[-1] if rotary_dim is None else rotary_dim
    if not 0 < rotary_dim <= x.shape[-1] or rotary_dim % 2:
        raise ValueError(
            f"rotary_dim: got {rotary_dim}; it must be even, above 0 and at most the {x.shape[-1]} channels of {name}"
        )
    heads, tokens = x.shape[-3:-1] if heads_first else (x.shape[-2], x.shape[-3])
    batch = x.shape[0] if x.dim() == 4 else 1
    if positions is not None:
        _check_positions(name, x, positions, batch, tokens, heads_first)
    for table_name, table in (("cos", cos), ("sin", sin)):
        if not isinstance(table, Tensor):
            raise ValueError(f"{table_name}: got a {type(table).__name__}; it must be a tensor")
        if not _fits(table, batch, heads, None if positions is not None else tokens, rotary_dim):
            layout, rows = forms.split(" or ")[not heads_first], "L" if positions is not None else tokens
            row = f"({rows}, {rotary_dim // 2})"
            raise ValueError(
                f"{table_name}: got shape {tuple(table.shape)}; for {name} of shape {tuple(x.shape)} read as {layout} "
                f"and rotary_dim {rotary_dim} it must be {row} or ({batch}, {row[1:]}, or ({batch}, Ht, {row[1:]} "
                f"where Ht divides {heads}; or have {rotary_dim} columns, where each channel has its own"
                + _cure(table, x, None if positions is not None else tokens, rotary_dim, heads_first)
            )
        if table.is_meta and not x.is_meta:
            raise ValueError(f"{table_name}: it is on the meta device and has no values for {name} on {x.device}")
        if table.dtype not in (*_EXACT, *_STORED):
            raise ValueError(
                f"{table_name}: got {table.dtype}; tables are float32 or float64, or with stored_tables=True int8, "
                f"float16 or bfloat16{'; of complex ones give .real and .imag' if table.is_complex() else ''}"
            )
        if table.dtype in _STORED and not stored_tables:
            raise ValueError(
                f"{table_name}: got {table.dtype}; tables are float32 or float64, whatever the dtype of {name}: make "
                "them so and do not cast them, nor the module that holds them. stored_tables=True takes tables that "
                "are meant to be coarse"
            )
    if cos.shape != sin.shape:
        raise ValueError(f"sin: got shape {tuple(sin.shape)}; it must be that of cos, {tuple(cos.shape)}")
    if cos.dtype != sin.dtype:
        raise ValueError(f"sin: got {sin.dtype}; it must be that of cos, {cos.dtype}")


def check_pair(q: Tensor, k: Tensor, rotary_dim: int | None) -> None:
    """Refuse queries and keys on two devices, or with heads of two widths where none says how many channels turn.

    Raises:
        ValueError: as said.
    """
    if k.device != q.device:
        raise ValueError(f"k: it is on {k.device}, and q on {q.device}; both must be on one")
    if rotary_dim is None and q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"k: got {k.shape[-1]} channels a head, and q has {q.shape[-1]}; say with rotary_dim how many turn"
        )


def _check_positions(name: str, x: Tensor, positions: Tensor, batch: int, tokens: int, heads_first: bool) -> None:
    if not isinstance(positions, Tensor) or positions.is_floating_point() or positions.dtype == torch.bool:
        kind = positions.dtype if isinstance(positions, Tensor) else f"a {type(positions).__name__}"
        raise ValueError(f"positions: got {kind}; give a tensor of integers, the row of each token in cos and sin")
    rows = positions.shape[:-1]
    if positions.shape[-1:] != (tokens,) or len(rows) > 1 or rows not in ((), (1,), (batch,)):
        raise ValueError(
            f"positions: got shape {tuple(positions.shape)}; for {name} of shape {tuple(x.shape)} and "
            f"heads_first={heads_first} it must be ({tokens},) or ({batch}, {tokens})"
            + (_other_order(positions.shape[-1], x, heads_first) if positions.dim() else "")
        )


def _other_order(tokens: int, x: Tensor, heads_first: bool) -> str:
    """A hint where the other order of heads and tokens would fit."""
    if tokens != x.shape[-3 if heads_first else -2]:
        return ""
    return f"; or is it {'(B, S, H, D)' if heads_first else '(B, H, S, D)'}? then say heads_first={not heads_first}"


def _cure(table: Tensor, x: Tensor, tokens: int | None, rotary_dim: int, heads_first: bool) -> str:
    """What was probably meant by a table that does not fit."""
    if table.dim() not in (2, 3, 4):
        return ""
    rows, columns = table.shape[-2:]
    if tokens is not None and rows != tokens:
        other = _other_order(rows, x, heads_first)
        return other or ("; positions= picks the rows of a longer table" if rows > tokens else "")
    if columns not in (rotary_dim // 2, rotary_dim) and 0 < 2 * columns < x.shape[-1]:
        return f"; where part of a head turns, say rotary_dim={2 * columns}"
    return ""


def _fits(table: Tensor, batch: int, heads: int, rows: int | None, rotary_dim: int) -> bool:
    """Whether it is (L, P), (1 or B, L, P) or (1 or B, Ht, L, P), with P of R/2 or R.

    The rank decides what is compared with what: an exported graph keeps each comparison as a condition.
    """
    rank = table.dim()
    if rank not in (2, 3, 4) or table.shape[-1] not in (rotary_dim // 2, rotary_dim):
        return False
    if rows is not None and table.shape[-2] != rows:
        return False
    if rank == 4 and (table.shape[1] == 0 or heads % table.shape[1] != 0):
        return False
    return rank == 2 or table.shape[0] == 1 or table.shape[0] == batch
