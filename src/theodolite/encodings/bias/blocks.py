"""An elementwise function of all pairs, forward and backward, with scratch for a block of queries only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Elements of one scratch tensor: 1 MiB of float32.
_BLOCK = 2**18

PairFunction = Callable[..., Tensor]


def in_blocks(value: PairFunction, q: Tensor, k: Tensor, head: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """`value(q, k, head, *parameters)`, (B, H, Sq, Sk), for q (B, 1, Sq, 1), k (B, 1, 1, Sk) and head (1, H, 1, 1).

    Eagerly it is worked out in blocks of queries, written into the result; its backward works the blocks out
    again rather than keeping what they computed. A compiler fuses the plain formula itself.
    """
    if torch.compiler.is_compiling():
        return _of_all_pairs(value, q, k, head, parameters)
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters):
        result: Tensor = _apply(value, q, k, head, *parameters)
        return result
    return _forward(value, q, k, head, parameters)


def _forward(value: PairFunction, q: Tensor, k: Tensor, head: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    out: Tensor | None = None
    for start, block in _blocks(q, k, head):
        part = _of_all_pairs(value, block, k, head, parameters)
        if part.shape[2] == q.shape[2]:
            return part
        if out is None:
            out = part.new_empty((*part.shape[:2], q.shape[2], part.shape[3]))
        out[:, :, start : start + part.shape[2]] = part
    # No query at all: the shape and dtype are those of an empty block.
    return _of_all_pairs(value, q, k, head, parameters) if out is None else out


def _of_all_pairs(value: PairFunction, q: Tensor, k: Tensor, head: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """(B, H, rows, Sk), although a function may say the same for all queries, keys or heads."""
    part = value(q, k, head, *parameters)
    shape = torch.broadcast_shapes(part.shape, (max(q.shape[0], k.shape[0]), head.shape[1], q.shape[2], k.shape[3]))
    return part if part.shape == shape else part.expand(shape).contiguous()


def _blocks(q: Tensor, k: Tensor, head: Tensor) -> list[tuple[int, Tensor]]:
    row = max(1, max(q.shape[0], k.shape[0]) * head.shape[1] * k.shape[-1])
    step = max(1, _BLOCK // row)
    return [(start, q[:, :, start : start + step]) for start in range(0, q.shape[2], step)]


class _InBlocks(torch.autograd.Function):
    """Saves positions and parameters only."""

    @staticmethod
    def forward(ctx: Any, value: PairFunction, q: Tensor, k: Tensor, head: Tensor, *parameters: Tensor) -> Tensor:
        ctx.value = value
        ctx.save_for_backward(q, k, head, *parameters)
        return _forward(value, q, k, head, parameters)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, head, *parameters = ctx.saved_tensors
        wanted = [number for number, needed in enumerate(ctx.needs_input_grad[4:]) if needed]
        total: list[Tensor | None] = [None] * len(parameters)
        for start, block in _blocks(q, k, head):
            with torch.enable_grad():
                leaves = [parameter.detach().requires_grad_(i in wanted) for i, parameter in enumerate(parameters)]
                part = _of_all_pairs(ctx.value, block, k, head, leaves)
            found = torch.autograd.grad(
                part, [leaves[i] for i in wanted], grad[:, :, start : start + part.shape[2]], allow_unused=True
            )
            for i, one in zip(wanted, found, strict=True):
                before = total[i]
                total[i] = one if before is None else before if one is None else before + one
        return None, None, None, None, *total


_apply: Callable[..., Tensor] = _InBlocks.apply
