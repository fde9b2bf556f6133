"""Whether a call is run or written down: a graph must hold the work on positions, not the tables of those seen."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from theodolite.positions.checks import can_read_at_once

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


def can_look(tensor: Tensor) -> bool:
    """Whether its values can be looked at now, without a device waiting and without a graph losing them."""
    return can_read_at_once(tensor) and not is_traced(tensor)


@torch.library.custom_op("theodolite::positions_within", mutates_args=())
def positions_within(positions: Tensor, least: float, most: float) -> Tensor:
    """The same positions, looked at when a graph runs.

    Raises:
        ValueError: one is below `least` or above `most`.
    """
    # float64 holds every position that is within.
    host = positions.detach().cpu().double()
    for worst in torch.stack(torch.aminmax(host)).tolist() if host.numel() else ():
        if not least <= worst <= most:
            raise ValueError(f"positions: got {worst:.0f}; they must be from {least:.0f} to {most:.0f}")
    return positions.clone()


@positions_within.register_fake
def _(positions: Tensor, least: float, most: float) -> Tensor:
    return torch.empty_like(positions)
