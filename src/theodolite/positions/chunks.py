"""Positions of a long sequence taken in chunks: cut from the positions of the whole, never made anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from theodolite.positions.checks import can_read, gatherable, integers_of, require_count, require_positions


class Chunk(NamedTuple):
    """Tokens `start` to `stop - 1` of a sequence and their positions (..., stop - start)."""

    start: int
    stop: int
    positions: Tensor


def chunk(positions: Tensor, *, start: int | Sequence[int] | Tensor, length: int) -> Tensor:
    """The positions of `length` tokens from token `start` on.

    Shapes (B batch, S tokens): (S,), (B, S) or (axes, B, S) gives (..., length) of the same dtype, a view where
    `start` is one number. What an image or a video did to the positions stays done, as no position is recomputed.

    Args:
        start: the first token; one for each row, (B,), where rows have gone different ways.
        length: how many tokens.

    Raises:
        ValueError: the chunk reaches past the positions, which would otherwise come out short. A tensor `start`
            is read to check it, on any device; a traced graph goes without.
    """
    require_positions("positions", positions, dims=(1, 2, 3))
    require_count("length", length, least=1)
    tokens = positions.shape[-1]
    if isinstance(start, int) or not isinstance(start, (Tensor, Sequence)):
        require_count("start", start, least=0)
        if start + length > tokens:
            raise ValueError(f"start: {start} and length {length} reach token {start + length}; there are {tokens}")
        return positions.narrow(-1, start, length)
    start = integers_of("start", start, of="one for each row")
    rows = positions.shape[-2] if positions.dim() > 1 else None
    if rows is None or tuple(start.shape) != (rows,):
        raise ValueError(
            f"start: got shape {tuple(start.shape)} for positions of shape {tuple(positions.shape)}; "
            "one per row of (B, S) is needed"
        )
    if can_read(start):
        for row, first in enumerate(start.tolist()):
            if first < 0 or first + length > tokens:
                raise ValueError(
                    f"start: {first} and length {length} in row {row} reach token {first + length}; there are {tokens}"
                )
    index = start.to(positions.device, torch.int64).unsqueeze(-1) + torch.arange(length, device=positions.device)
    taken = gatherable(positions).gather(-1, index.expand(*positions.shape[:-1], length))
    return taken.to(positions.dtype)


def chunks(positions: Tensor, *, sizes: int | Sequence[int]) -> Iterator[Chunk]:
    """The chunks one after another, each starting at the sum of those before.

    Args:
        positions: (S,), (B, S) or (axes, B, S).
        sizes: tokens of each chunk, which must sum to S; or one size for all, the last holding the rest.

    Raises:
        ValueError: at the call, not at the first chunk: sizes that do not sum to S, or below 1.
    """
    require_positions("positions", positions, dims=(1, 2, 3))
    tokens = positions.shape[-1]
    sizes = chunk_sizes(tokens, size=sizes) if isinstance(sizes, int) else tuple(sizes)
    for size in sizes:
        require_count("sizes", size, least=1)
    if sum(sizes) != tokens:
        raise ValueError(f"sizes: {list(sizes)} sum to {sum(sizes)}; there are {tokens} tokens")
    return _cut(positions, sizes)


def chunk_sizes(total: int, *, size: int) -> tuple[int, ...]:
    """The sizes of chunks of `size` tokens that cover `total`, the last holding the rest: 40 by 32 is (32, 8).

    Raises:
        ValueError: a `size` below 1 or a negative `total`.
    """
    require_count("total", total, least=0)
    require_count("size", size, least=1)
    whole, rest = divmod(total, size)
    return (size,) * whole + ((rest,) if rest else ())


def _cut(positions: Tensor, sizes: tuple[int, ...]) -> Iterator[Chunk]:
    start = 0
    for size in sizes:
        yield Chunk(start, start + size, chunk(positions, start=start, length=size))
        start += size
