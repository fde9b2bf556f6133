"""Whether a call is run or written down: a graph must hold the work on positions, not what was made of those seen."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

# Neither is typed, and the second is not public.
_jit_traces: Callable[[], bool] = getattr(torch.jit, "is_tracing", lambda: False)
_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


def is_traced(*tensors: Tensor) -> bool:
    """Whether an operation on these is, or may be, recorded or faked, and must be one that the recorder sees.

    True under torch.compile, torch.export and torch.jit.trace, under any torch dispatch mode (make_fx, FakeTensorMode,
    counters), and for subclasses of tensors.
    """
    return (
        torch.compiler.is_compiling()
        or _jit_traces()
        or _modes() > 0
        or any(type(x) not in (Tensor, nn.Parameter) for x in tensors)
    )
