"""Coordinates of image patches where fractions have a meaning: DINOv3's, and grids resized from another (EVA-02).

All are float64 on the CPU, whatever the default device: no other kind of device is sure to have float64, and rotary
tables are made on the CPU from there. Shapes: (axes, S), S patches row by row, axis 0 the row and axis 1 the column;
`.flip(0)` is (x, y). Class and register tokens are put in front with `with_special_tokens`, at 0.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from theodolite.positions.checks import require_count, require_positions
from theodolite.positions.grids import patch_positions

Normalize = Literal["separate", "max", "min"]


def centred_patch_positions(rows: int, columns: int, *, normalize_coords: Normalize) -> Tensor:
    """Centres of the patches, `2 (k + 1/2) / n - 1`: (2, rows * columns), float64.

    DINOv3, where its encoding multiplies them by 2 pi.

    Args:
        normalize_coords: what n is. "separate": the axis's own patches, so that both run from -1 to 1 (what
            transformers 5.24 has); "max" or "min": those of the longer or shorter axis, so that a patch is square.

    Raises:
        ValueError: `normalize_coords` is none of the three, or the grid is empty.
    """
    if normalize_coords not in get_args(Normalize):
        raise ValueError(f"normalize_coords: got {normalize_coords!r}; allowed: 'separate', 'max', 'min'")
    centres = patch_positions(rows, columns, device="cpu").to(torch.float64) + 0.5
    sizes = {"separate": (rows, columns), "max": (max(rows, columns),) * 2, "min": (min(rows, columns),) * 2}
    return centres / torch.tensor(sizes[normalize_coords], dtype=torch.float64, device="cpu")[:, None] * 2 - 1


def augmented_patch_positions(
    positions: Tensor,
    *,
    generator: torch.Generator,
    shift: float | None = None,
    jitter: float | None = None,
    rescale: float | None = None,
) -> Tensor:
    """Coordinates moved at random, for training: `(positions + shift) * jitter * rescale`, in that order.

    DINOv3: once for a whole batch in each forward. The numbers are drawn on the CPU from `generator` alone, in the
    order and the number in which transformers 5.24 draws them.

    Args:
        positions: (axes, S), float64, on the CPU.
        generator: a CPU generator; no global state is read.
        shift: each axis is moved by a uniform number of [-shift, shift]; None draws nothing.
        jitter: each axis is multiplied by a log-uniform number of [1/jitter, jitter]; None draws nothing.
        rescale: all axes are multiplied by the same log-uniform number of [1/rescale, rescale]; None draws nothing.

    Raises:
        ValueError: a negative `shift`, a `jitter` or `rescale` below 1, positions that are not float64 on the CPU.
    """
    require_positions("positions", positions, dims=(2,))
    if positions.dtype != torch.float64 or positions.device.type != "cpu":
        raise ValueError(f"positions: got {positions.dtype} on {positions.device}; give float64 on the CPU")
    for name, value, least in (("shift", shift, 0), ("jitter", jitter, 1), ("rescale", rescale, 1)):
        if value is not None and not (math.isfinite(value) and value >= least):
            raise ValueError(f"{name}: got {value}; give a finite number of at least {least}, or None for none")
    axes = positions.shape[0]
    if shift is not None:
        positions = positions + _uniform(axes, shift, generator)
    if jitter is not None:
        positions = positions * _uniform(axes, math.log(jitter), generator).exp()
    if rescale is not None:
        positions = positions * _uniform(1, math.log(rescale), generator).exp()
    return positions


def resized_patch_positions(
    rows: int, columns: int, *, trained_rows: int, trained_columns: int, offset: float = 0.0
) -> Tensor:
    """Coordinates in patches of the grid of training: `(k + offset) * trained / n`: (2, rows * columns), float64.

    EVA-02's index / fine-tuned * pretrained; timm's `ref_feat_shape` and `grid_offset`.

    Args:
        trained_rows, trained_columns: the grid of pretraining. At that size the coordinates are whole.
        offset: added to each index before it is resized.

    Raises:
        ValueError: a size is not an integer of at least 1, or `offset` is not finite.
    """
    require_count("trained_rows", trained_rows, least=1)
    require_count("trained_columns", trained_columns, least=1)
    if not math.isfinite(offset):
        raise ValueError(f"offset: got {offset}; give a finite number")
    index = patch_positions(rows, columns, device="cpu").to(torch.float64) + offset
    trained = torch.tensor((trained_rows, trained_columns), dtype=torch.float64, device="cpu")
    return index * trained[:, None] / torch.tensor((rows, columns), dtype=torch.float64, device="cpu")[:, None]


def _uniform(axes: int, limit: float, generator: torch.Generator) -> Tensor:
    """(axes, 1) numbers of [-limit, limit]."""
    return torch.empty(axes, 1, dtype=torch.float64, device="cpu").uniform_(-limit, limit, generator=generator)
