"""Where turned queries and keys are written, checked: nothing that is still to be read is written over."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from theodolite.kernels.memory import overlaps_itself, share_elements, stretches_meet
from theodolite.kernels.operands import canonical

# Not public: without it autograd refuses all the same, when it is too late.
_made_how: Callable[[Tensor], object] | None = getattr(torch._C._autograd, "_get_creation_meta", None)
# What is turned, or where it goes, by name: "q" and "k".
Named = dict[str, Tensor]
MaybeNamed = Mapping[str, "Tensor | None"]


def check_outputs(given: Named, outputs: Named, tables: Named) -> None:
    """Refuse outputs that are not like what is turned, or that autograd guards.

    Args:
        given: what is turned.
        outputs: where it goes, under the same names; in place the same tensors.
        tables: cos and sin.

    Raises:
        ValueError: a shape, dtype or device, or a table that requires a gradient.
        RuntimeError: a leaf that requires a gradient, a view that autograd guards, or an output that overlaps itself.
    """
    recording = torch.is_grad_enabled()
    for name, out in outputs.items():
        x, inplace = given[name], given[name] is out
        label = name if inplace else f"out_{name}"
        if not inplace:
            _check_like(label, out, name, x)
        for table_name, table in tables.items():
            if recording and table.requires_grad:
                raise ValueError(
                    f"{table_name}: it requires a gradient, which needs {name} as it was; use inplace=False"
                    if inplace
                    else f"{table_name}: it requires a gradient, which does not pass through {label}; leave that out"
                )
        if overlaps_itself(out):
            raise RuntimeError(f"{label}: it overlaps itself (an expanded tensor) and cannot be written")
        if recording and inplace and x.requires_grad and x.is_leaf:
            raise RuntimeError(f"{name}: a leaf that requires a gradient cannot be turned in place; use inplace=False")
        if recording and inplace and x.requires_grad and _may_not_be_written(x):
            raise RuntimeError(
                f"{name}: autograd lets no view that split, chunk, unbind or no_grad made be written in place; "
                "use inplace=False"
            )
        if recording and not inplace and (x.requires_grad or out.requires_grad):
            raise RuntimeError(f"{label}: gradients do not pass through it; leave it out, or use no_grad")


def check_memory(given: MaybeNamed, outputs: MaybeNamed, read: MaybeNamed, heads_first: bool) -> None:
    """`check_apart` of what is there, in any of the forms that `rotate` takes.

    Raises:
        ValueError: memory is shared.
    """
    views = {name: canonical(x, heads_first) for name, x in given.items() if x is not None}
    written = {
        name: views[name] if out is given[name] else canonical(out, heads_first)
        for name, out in outputs.items()
        if out is not None
    }
    check_apart(views, written, {name: x for name, x in read.items() if x is not None})


def check_apart(given: Named, outputs: Named, tables: Named) -> None:
    """Refuse outputs that share memory with anything but their own input, whose place they may take exactly.

    Args:
        given, outputs: as in `check_outputs`.
        tables: cos, sin, and positions where there are.

    Raises:
        ValueError: as said.
    """
    for name, out in outputs.items():
        inplace = given[name] is out
        label = name if inplace else f"out_{name}"
        for other, x in given.items():
            own = other == name and x.data_ptr() == out.data_ptr() and x.stride() == out.stride()
            if own or not share_elements(out, x):
                continue
            if inplace and outputs.get(other) is x:
                require_apart(given["q"], given["k"])
            raise ValueError(
                f"{label}: it shares elements with {other}, which is read after it is written; give memory of its own"
            )
        for other, second in outputs.items():
            if other > name and share_elements(out, second):
                raise ValueError(f"{label}: it shares elements with out_{other}")
        for table_name, table in tables.items():
            if stretches_meet(out, table):
                raise ValueError(f"{label}: it shares memory with {table_name}")


def require_apart(q: Tensor, k: Tensor) -> None:
    """Refuse queries and keys that share an element: in place it would be turned twice.

    Slices of a fused projection pass, whose elements stand in turn.

    Raises:
        ValueError: they do.
    """
    if q.is_meta or torch.compiler.is_compiling():
        return
    if share_elements(q, k):
        raise ValueError(
            "k: it shares elements with q, which in place would be turned twice; give slices that do not meet, or the "
            "tensor once, as q"
        )


def _may_not_be_written(x: Tensor) -> bool:
    """What autograd would say only after it is written."""
    if torch.compiler.is_compiling() or not x._is_view() or _made_how is None:
        return False
    return _made_how(x) != torch._C._autograd.CreationMeta.DEFAULT


def _check_like(label: str, out: object, name: str, x: Tensor) -> None:
    if isinstance(out, Tensor) and out.shape == x.shape and out.dtype == x.dtype and out.device == x.device:
        return
    kind = f"{out.dtype} {tuple(out.shape)} on {out.device}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
    raise ValueError(f"{label}: got {kind}; it must be as {name}: {x.dtype} {tuple(x.shape)} on {x.device}")
