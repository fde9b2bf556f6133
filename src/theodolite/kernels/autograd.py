"""The rotation as a step of autograd: it saves the tables only, for its gradient is the same rotation the other way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from theodolite.kernels.layout import Layout
from theodolite.kernels.operands import Tables
from theodolite.kernels.recording import is_plain, is_watched
from theodolite.kernels.running import Maybe, run
from theodolite.kernels.watched import run_watched


def turn(xs: Maybe, outs: Maybe, tables: Tables, layout: Layout, heads_first: bool) -> list[Tensor | None]:
    """`run`, recorded where q or k asks for a gradient.

    Args:
        xs: q and k, either may be None.
        outs: where each goes: itself in place, another tensor that no gradient passes through, or None for a new one.
    """
    asking = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in xs]
    if not any(asking):
        return _turn_unrecorded(xs, outs, tables, layout, heads_first)
    # What was made in inference mode cannot be saved.
    saved = [x.clone() if x is not None and x.is_inference() else x for x in tables]
    options = *saved, layout, heads_first
    if all(out is None for out in outs):
        turned = iter(_rotation(*sorted(xs, key=lambda x: x is None), *options, False))
        return [None if x is None else next(turned) for x in xs]
    # Autograd follows a view that is written in place only as a step's one output.
    return [
        _rotation(x, None, *options, out is x)[0]
        if asks and x is not None
        else _turn_unrecorded([x], [out], tables, layout, heads_first)[0]
        for x, out, asks in zip(xs, outs, asking, strict=True)
    ]


def _turn_unrecorded(xs: Maybe, outs: Maybe, tables: Tables, layout: Layout, heads_first: bool) -> list[Tensor | None]:
    made = [torch.empty_like(x) if out is None and x is not None else out for x, out in zip(xs, outs, strict=True)]
    run(xs, made, tables, layout, heads_first)
    written = [out for out in outs if out is not None]
    if written:
        # What autograd saved of them is not there any more.
        increment_version(written)
    return made


class _Rotation(torch.autograd.Function):
    # Autograd takes the first input for the one that is written in place.
    @staticmethod
    def forward(
        ctx: Any,
        first: Tensor,
        second: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        layout: Layout,
        heads_first: bool,
        inplace: bool,
    ) -> Tensor | tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin, positions)
        ctx.layout, ctx.heads_first = layout, heads_first
        ctx.set_materialize_grads(False)
        xs = (first,) if second is None else (first, second)
        outs = xs if inplace else tuple(torch.empty_like(x) for x in xs)
        run(xs, outs, Tables(cos, sin, positions), layout, heads_first)
        if inplace:
            ctx.mark_dirty(*xs)
            increment_version(xs)
        ctx.mark_non_differentiable(*(out for x, out in zip(xs, outs, strict=True) if not x.requires_grad))
        return outs if len(outs) > 1 else outs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        both = (*grads, None)[:2]
        wanted = [grad if needed else None for grad, needed in zip(both, ctx.needs_input_grad, strict=False)]
        if any(grad is not None for grad in wanted):
            layout = ctx.layout._replace(conjugate=not ctx.layout.conjugate)
            # Recorded again where a gradient of the gradient is asked for; batches of gradients are a transform.
            way = turn if is_plain(*wanted) and not is_watched() else run_watched
            wanted = way(wanted, (None, None), Tables(*ctx.saved_tensors), layout, ctx.heads_first)
        return (*wanted, *(None,) * 6)


_apply: Callable[..., Any] = _Rotation.apply


def _rotation(*arguments: Any) -> Sequence[Tensor]:
    turned = _apply(*arguments)
    return (turned,) if isinstance(turned, Tensor) else turned
