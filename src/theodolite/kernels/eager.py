"""The rotation in plain torch: block by block, so that the scratch stays in the cache, and rounded once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from theodolite.kernels.blocks import SCRATCH, channels, joined, multiply, product_is_exact, split, steps, turn
from theodolite.kernels.layout import Layout
from theodolite.kernels.rows import require_rows

# What turns, as (out, x), with its rows of cos and sin.
Tile = tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]


def rotate_into(
    turns: Sequence[tuple[Tensor, Tensor]], cos: Tensor, sin: Tensor, positions: Tensor | None, layout: Layout
) -> None:
    """Turn each `x` of `turns`, pairs `(out, x)` of (B, H, S, D) in any strides, and write it to its `out`.

    Args:
        turns: `out` has the shape and dtype of `x`; it is `x` itself or shares no memory with any `x` or table.
        cos, sin: (1 or B, Ht, L, P), Ht 1 or a divisor of every H; P is R/2, or R for tables by channel. float64,
            float32, float16, bfloat16, or int8 in steps of 1/127.
        positions: (1 or B, S), int64 or int32, the row of each token; None where row s belongs to token s.
        layout: which channels turn, in which pairs, which way.

    Raises:
        ValueError: a position has no row. Nothing is written then.
    """
    if positions is not None and not positions.is_meta:
        require_rows(positions, cos.shape[2])
    turning = [_turning(out, x, cos.shape[1], layout) for out, x in turns if x.numel()]
    if not turning:
        return
    dtype = torch.float64 if turning[0][1].dtype == torch.float64 else torch.float32
    pairs = layout.rotary_dim // 2
    as_numbers = layout.interleaved and cos.shape[-1] == pairs and product_is_exact(cos.device, pairs, dtype)
    for tile, c, s in _tiles(turning, cos, sin, positions, layout.rotary_dim * dtype.itemsize):
        c, s = _widened(c, dtype), _widened(s, dtype)
        if cos.shape[1] > 1:
            c, s = c.unsqueeze(2), s.unsqueeze(2)
        if as_numbers:
            # Where both channels of a pair share an entry, the transpose is the angle's negative.
            table = torch.complex(c, -s if layout.conjugate else s)
            for out, x in tile:
                multiply(out, x, table)
        else:
            c, s = _by_channel(c, s, layout)
            for out, x in tile:
                turn(out, x, c, s, layout.interleaved, layout.conjugate)


def _turning(out: Tensor, x: Tensor, table_heads: int, layout: Layout) -> tuple[Tensor, Tensor]:
    """The channels that turn, as views in the form of `blocks`; the others are copied."""
    width, kept = layout.rotary_dim, x.shape[-1] - layout.rotary_dim
    if kept:
        start, rest = (kept, 0) if layout.trailing else (0, width)
        if out is not x:
            out.narrow(-1, rest, kept).copy_(x.narrow(-1, rest, kept))
        out, x = out.narrow(-1, start, width), x.narrow(-1, start, width)
    if table_heads == 1:
        return out, x
    return out.unflatten(1, (table_heads, -1)), x.unflatten(1, (table_heads, -1))


def _tiles(
    turning: list[tuple[Tensor, Tensor]], cos: Tensor, sin: Tensor, positions: Tensor | None, row: int
) -> Iterable[Tile]:
    """Parts of the batch and of the tokens, whose rows of a table, of `row` bytes a head, fill the scratch at most."""
    x = turning[0][1]
    batch, tokens, row = x.shape[0], x.shape[-2], row * cos.shape[1]
    shared = cos.shape[0] == 1 and (positions is None or positions.shape[0] == 1)
    if row * tokens * (1 if shared else batch) <= SCRATCH:
        if positions is not None:
            cos, sin = _picked(cos, positions), _picked(sin, positions)
        return [(turning, cos, sin)]
    batch_step, token_step = steps(row, 1 if shared else batch, tokens)
    return _cut(turning, cos, sin, positions, batch if shared else batch_step, token_step)


def _cut(
    turning: list[tuple[Tensor, Tensor]],
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    batch_step: int,
    token_step: int,
) -> Iterator[Tile]:
    flat = tuple(tensor for pair in turning for tensor in pair)
    if positions is None:
        for part in split((*flat, cos, sin), 0, batch_step):
            for *tile, c, s in split(part, -2, token_step):
                yield _paired(tile), c, s
        return
    for *rest, at, whole_cos, whole_sin in split((*flat, positions.unsqueeze(-1), cos, sin), 0, batch_step):
        for *tile, rows in split((*rest, at), -2, token_step):
            c, s = (_picked(table, rows.squeeze(-1)) for table in (whole_cos, whole_sin))
            yield _paired(tile), c, s


def _paired(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def _picked(table: Tensor, positions: Tensor) -> Tensor:
    """(1 or B, Ht, S, P) from (1 or B, Ht, L, P) and (1 or B, S)."""
    if positions.shape[0] == 1:
        return table.index_select(2, positions[0])
    batch = torch.arange(table.shape[0], device=table.device)[:, None]
    # The indices of batch and row stand apart, so torch puts what they pick first.
    return table[batch, :, positions].transpose(1, 2)


def _widened(table: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype of the arithmetic. An entry of int8 is rounded to float32 whatever follows."""
    if table.dtype == torch.int8:
        table = table.to(torch.float32).mul_(1 / 127)
    return table if table.dtype == dtype else table.to(dtype)


def _by_channel(cos: Tensor, sin: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """(..., R): what multiplies each channel for itself, and what multiplies it for its partner."""
    if 2 * cos.shape[-1] == layout.rotary_dim:
        return joined(cos, cos, layout.interleaved), joined(sin, sin, layout.interleaved)
    if layout.conjugate:
        return cos, sin
    first, second = channels(sin, layout.interleaved)
    return cos, joined(second, first, layout.interleaved)
