"""The rotation as an operator of torch: one node of a compiled graph, for calls where that beats what a compiler makes.

`torch.ops.theodolite.rotate(x, cos, sin, positions, interleaved, rotary_dim, trailing, conjugate)` takes the canonical
form: x (B, H, S, D), tables (1 or B, Ht, L, P), positions (1 or B, S) or None. It gives no gradient to tables.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from theodolite.kernels import native
from theodolite.kernels.layout import Layout
from theodolite.kernels.operands import Tables
from theodolite.kernels.rows import require_rows
from theodolite.kernels.running import run

_ARGUMENTS = (
    "Tensor cos, Tensor sin, Tensor? positions, bool interleaved, SymInt rotary_dim, bool trailing, bool conjugate"
)
# Elements of x from which on the operator is quicker than what inductor makes of the formula, as measured; and the same
# where inductor does badly: part of a head, pairs of neighbours in float16 or with a gradient.
WORTH = 2**22
WORTH_HARD = 2**19
# A graph cannot ask.
NATIVE = native.load() is not None

torch.library.define("theodolite::rotate", f"(Tensor x, {_ARGUMENTS}) -> Tensor")
torch.library.define("theodolite::rotate_", f"(Tensor(a!) x, {_ARGUMENTS}) -> ()")


@torch.library.impl("theodolite::rotate", "CompositeExplicitAutograd")
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, *layout: Any) -> Tensor:
    out = torch.empty_like(x)
    run([x], [out], Tables(cos, sin, positions), Layout(*layout), True)
    return out


@torch.library.impl("theodolite::rotate_", "CompositeExplicitAutograd")
def _rotate_in_place(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, *layout: Any) -> None:
    run([x], [x], Tables(cos, sin, positions), Layout(*layout), True)


@torch.library.register_fake("theodolite::rotate")  # type: ignore[untyped-decorator]
def _rotate_fake(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, *layout: Any) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("theodolite::rotate_")  # type: ignore[untyped-decorator]
def _rotate_in_place_fake(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, *layout: Any) -> None:
    return None


torch.library.define("theodolite::rows_within", "(Tensor positions, SymInt rows) -> Tensor")


@torch.library.impl("theodolite::rows_within", "CompositeExplicitAutograd")
def _rows_within(positions: Tensor, rows: int) -> Tensor:
    """The same positions, looked at when a graph runs: an index out of range ends the process where inductor's threads
    find it."""
    require_rows(positions, rows)
    return positions.clone()


@torch.library.register_fake("theodolite::rows_within")  # type: ignore[untyped-decorator]
def _rows_within_fake(positions: Tensor, rows: int) -> Tensor:
    return torch.empty_like(positions)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, positions, *layout = inputs
    ctx.save_for_backward(cos, sin, positions)
    ctx.layout = Layout(*layout)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if any(ctx.needs_input_grad[1:3]):
        raise RuntimeError("cos, sin: theodolite::rotate gives tables no gradient; theodolite.kernels.rotate does")
    cos, sin, positions = ctx.saved_tensors
    layout = ctx.layout._replace(conjugate=not ctx.layout.conjugate)
    return torch.ops.theodolite.rotate(grad, cos, sin, positions, *layout), *(None,) * 7


torch.library.register_autograd("theodolite::rotate", _backward, setup_context=_save)


def pays(x: Tensor, tables: Tables, layout: Layout) -> bool:
    """Whether a compiled graph should hold the operator for `x` (B, H, S, D): it is large, on the CPU, and the native
    rotation is there."""
    if not (torch.compiler.is_compiling() and NATIVE) or torch.compiler.is_exporting():
        return False
    if x.device.type != "cpu" or tables.cos.requires_grad or tables.sin.requires_grad:
        return False
    hard = layout.rotary_dim < x.shape[-1] or (layout.interleaved and (x.requires_grad or x.dtype == torch.float16))
    return bool(x.numel() >= (WORTH_HARD if hard else WORTH))
