"""Whether a call is run at once, or one that torch watches: a graph, a transform, a mode, or another kind of tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

# Not public, some of them, and not in every version: where one is missing, nothing of its kind can be going on.
_compiling = torch.compiler.is_compiling
_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_tracing: Callable[[], object] = getattr(torch._C, "_get_tracing_state", lambda: None)
_transforms: Callable[[], object] = getattr(
    getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None
)
_has_storage: Callable[[Tensor], bool] = getattr(torch._C, "_has_storage", lambda _: True)
_PLAIN = (Tensor, nn.Parameter)


def is_watched() -> bool:
    """Whether torch.compile, export, torch.jit.trace, a dispatch mode (make_fx, fake tensors, counters), a transform of
    torch.func or forward-mode differentiation is at work: it must see plain operations of torch."""
    return bool(
        _compiling()
        or _modes()
        or _tracing() is not None
        or _transforms() is not None
        or forward_ad._current_level >= 0
    )


def is_transformed() -> bool:
    """Whether tensors may be stand-ins that have no memory to look at: in a graph, or under a transform."""
    return bool(_compiling() or _transforms() is not None)


def has_memory(*tensors: Tensor | None) -> bool:
    """Whether all have memory that can be looked at: no subclass (fake, distributed, functional), no stand-in for a
    batch, no zero that is not stored."""
    return all(x is None or (type(x) in _PLAIN and _has_storage(x) and not x._is_zerotensor()) for x in tensors)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether what stands in their memory is what they are: `has_memory`, and no view that torch negates when read."""
    return has_memory(*tensors) and not any(x is not None and x.is_neg() for x in tensors)
