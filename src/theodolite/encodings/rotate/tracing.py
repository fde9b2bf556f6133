"""Checks of positions that a graph makes when it runs."""

from __future__ import annotations

import torch
from torch import Tensor


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
