"""Biases that read queries and keys: what they check, their precision, and their work in blocks of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from theodolite.encodings.bias.base import Bias, Content
from theodolite.encodings.bias.devices import require_beside
from theodolite.positions.checks import require_count, require_reachable

# Elements of scratch for a block: 1 MiB of float32, and for a large result a thirty-second part of its rows.
_BLOCK = 2**18
_PARTS = 32

RowFunction = Callable[..., Tensor]


class Vectors(NamedTuple):
    """q (B, H, Sq, D) and k (B, Hkv, Sk, D) in the precision of the work, with positions (1 or B, S) beside them.

    Positions are int64, where smaller integers could wrap in a difference, or as given where they are fractions.
    """

    q: Tensor
    k: Tensor
    q_positions: Tensor
    k_positions: Tensor


class ContentBias(Bias):
    """A bias made of queries or keys, which come before rotation and before scaling.

    Args:
        num_heads: heads of the whole model, over all ranks of tensor parallelism.
        head_dim: channels of a head of q and k.
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads)
        require_count("head_dim", head_dim, least=1)
        self.head_dim = head_dim

    @property
    def scale(self) -> float:
        """What multiplies q.k, and what this bias has in it already: `score_scale`, by default 1/sqrt(D)."""
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}"

    def _vectors(
        self, q_positions: Tensor, k_positions: Tensor, content: Content, heads: slice, *learned: Tensor
    ) -> Vectors:
        """q and k, checked, in float32 or in float64 where one of all is; without keys to read, k is q."""
        q = cast(Tensor, content.q)
        k = cast(Tensor, content.k) if "k" in self.reads else q
        for name, x, at in (("q", q, q_positions), ("k", k, q_positions if k is q else k_positions)):
            self._check_vectors(name, x, at, q.shape[0], heads.stop - heads.start)
        for name, at in (("q_positions", q_positions), ("k_positions", k_positions)):
            if at.shape[0] != 1 and at.shape[0] != q.shape[0]:
                raise ValueError(f"{name}: got {at.shape[0]} rows; q has {q.shape[0]}, give one for all or one each")
        for parameter in learned:
            require_beside(self, parameter, q=q, k=k)
        require_reachable(q, "q", q_positions=q_positions, k_positions=k_positions)
        dtype = working_dtype(q, k, *learned)
        q_at, k_at = ((at if at.is_floating_point() else at.long()).to(q.device) for at in (q_positions, k_positions))
        return Vectors(q.to(dtype), k.to(dtype), q_at, k_at)

    def _check_vectors(self, name: str, x: Tensor, positions: Tensor, batch: int, heads: int) -> None:
        # Sizes may be symbols while a graph is traced: they are put into words only where they are wrong.
        tokens = positions.shape[-1]
        if x.dim() != 4 or x.shape[0] != batch or x.shape[2] != tokens or x.shape[3] != self.head_dim:
            fits = f"({batch}, {heads}, {tokens}, {self.head_dim})"
            raise ValueError(f"{name}: got shape {tuple(x.shape)}; the positions and head_dim ask for {fits}")
        if x.shape[1] != heads and (name == "q" or heads % x.shape[1]):
            raise ValueError(f"{name}: got {x.shape[1]} heads; there are {heads} query heads (see `heads`)")


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 where one of the tensors is, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast has no say inside."""
    # The meta device has no autocast.
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def dots(x: Tensor, table: Tensor) -> Tensor:
    """`x[b, h, s] . table[h, n]`, (B, H, S, N), for x (B, Hx, S, D), whose heads are shared by groups where Hx < H.

    `table` is (H, N, D), or (1, N, D) where all heads share it.
    """
    batch, x_heads, tokens, width = x.shape
    if table.shape[0] == 1:
        return (x.reshape(-1, width) @ table[0].mT).view(batch, x_heads, tokens, table.shape[1])
    # Heads and groups are named apart, so that the product of a batch copies no table.
    groups = table.unflatten(0, (x_heads, -1))
    return torch.einsum("bgsd,grnd->bgrsn", x, groups).flatten(1, 2)


def dots_at(
    row_of: RowFunction,
    x: Tensor,
    x_at: Tensor,
    y_at: Tensor,
    table: Tensor,
    *extra: Tensor,
    add_to: Tensor | None = None,
) -> Tensor:
    """`x[b, h, s] . table[h, row_of(x_at[b, s], y_at[b, y], *extra)]`, (B, H, S, Y).

    Args:
        row_of: elementwise, a row of the table for a pair of positions.
        x, table: as in `dots`.
        x_at: (1 or B, S), where x stands.
        y_at: (1 or B, Y), where the others stand.
        extra: what `row_of` reads besides.
        add_to: as in `in_row_blocks`.
    """
    size, columns = table.shape[1], y_at.shape[-1]
    # With few columns, the rows of the table that they need are fewer than all.
    few = not torch.compiler.is_compiling() and 8 * columns <= size

    def block(x: Tensor, x_at: Tensor, y_at: Tensor, table: Tensor, *extra: Tensor) -> Tensor:
        index = row_of(x_at[:, 0], y_at[:, None], *extra)
        if few:
            return _dots_of_rows(x, table, index)
        every = dots(x, table)
        return every.gather(-1, index[:, None].expand(len(every), every.shape[1], -1, -1))

    heads = max(x.shape[1], table.shape[0])
    row_size = len(x) * heads * (columns * x.shape[-1] if few else max(size, columns))
    return in_row_blocks(block, [x, x_at[:, None, :, None]], [y_at, table, *extra], row_size=row_size, add_to=add_to)


def _dots_of_rows(x: Tensor, table: Tensor, index: Tensor) -> Tensor:
    rows = table[:, index].expand(-1, len(x), -1, -1, -1)
    if len(table) == 1:
        return torch.einsum("bhsd,bsyd->bhsy", x, rows[0])
    rows = rows.unflatten(0, (x.shape[1], -1))
    return torch.einsum("bgsd,grbsyd->bgrsy", x, rows).flatten(1, 2)


def in_row_blocks(
    function: RowFunction,
    rows: Sequence[Tensor],
    whole: Sequence[Tensor],
    *,
    row_size: int,
    add_to: Tensor | None = None,
) -> Tensor:
    """`function(*rows, *whole)`, (B, H, S, X), where a row of the result needs that row of `rows` alone.

    Eagerly it is worked out block by block, written into the result; its backward works each block out again
    rather than keeping what it computed. A compiler plans its memory itself.

    Args:
        function: keeps no state and closes over plain numbers only.
        rows: tensors whose dimension 2 is S.
        whole: tensors that every row reads.
        row_size: elements of scratch that one row takes.
        add_to: (B, H, X, S), to which the result is added, transposed and in place; this is then what is returned.
    """
    if torch.compiler.is_compiling():
        part = _call(function, rows, whole)
        return part if add_to is None else add_to + part.mT
    tensors = (*rows, *whole) if add_to is None else (*rows, *whole, add_to)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        result: Tensor = _apply(function, len(rows), row_size, add_to, *rows, *whole)
        return result
    return _forward(function, rows, whole, row_size, add_to)


def _call(function: RowFunction, rows: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
    with full_precision(rows[0].device):
        return function(*rows, *whole)


def _forward(
    function: RowFunction, rows: Sequence[Tensor], whole: Sequence[Tensor], row_size: int, add_to: Tensor | None
) -> Tensor:
    out: Tensor | None = None
    for start, block in _blocks(rows, row_size):
        part = _call(function, block, whole)
        stop = start + part.shape[2]
        if add_to is not None:
            add_to[..., start:stop] += part.mT
            continue
        if out is None:
            out = part.new_empty((*part.shape[:2], rows[0].shape[2], part.shape[3]))
        out[:, :, start:stop] = part
    if add_to is not None:
        return add_to
    # No row at all: the shape and dtype are those of an empty block.
    return _call(function, rows, whole).clone() if out is None else out


def _blocks(rows: Sequence[Tensor], row_size: int) -> list[tuple[int, list[Tensor]]]:
    tokens = rows[0].shape[2]
    step = max(1, _BLOCK // max(1, row_size), tokens // _PARTS)
    return [(start, [row[:, :, start : start + step] for row in rows]) for start in range(0, tokens, step)]


class _InRowBlocks(torch.autograd.Function):
    """Saves its inputs only."""

    @staticmethod
    def forward(
        ctx: Any, function: RowFunction, count: int, row_size: int, add_to: Tensor | None, *tensors: Tensor
    ) -> Tensor:
        ctx.function, ctx.count, ctx.row_size, ctx.adds = function, count, row_size, add_to is not None
        ctx.save_for_backward(*tensors)
        if add_to is not None:
            ctx.mark_dirty(add_to)
        return _forward(function, tensors[:count], tensors[count:], row_size, add_to)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad = grad_out.mT if ctx.adds else grad_out
        count, needed = ctx.count, ctx.needs_input_grad[4:]
        # Once: under a checkpoint each look at them is another recomputation.
        saved = ctx.saved_tensors
        rows, whole = saved[:count], saved[count:]
        total = [torch.zeros_like(x) if wanted else None for x, wanted in zip(saved, needed, strict=True)]
        wanted = [number for number, one in enumerate(total) if one is not None]
        for start, block in _blocks(rows, ctx.row_size) if wanted else []:
            stop = start + block[0].shape[2]
            with torch.enable_grad(), full_precision(grad.device):
                leaves = [x.detach().requires_grad_(needed[i]) for i, x in enumerate((*block, *whole))]
                part, at = ctx.function(*leaves), [leaves[i] for i in wanted]
                found = torch.autograd.grad(part, at, grad[:, :, start:stop], allow_unused=True)
            for i, one in zip(wanted, found, strict=True):
                sum_so_far = total[i]
                if one is not None and sum_so_far is not None:
                    (sum_so_far[:, :, start:stop] if i < count else sum_so_far).add_(one)
        return None, None, None, grad_out if ctx.adds else None, *total


_apply: Callable[..., Tensor] = _InRowBlocks.apply
