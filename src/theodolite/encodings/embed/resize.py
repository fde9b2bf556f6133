"""Learned tables of another length or grid, made from a trained one. Plain functions on tensors (rows, E).

Everything is computed in float64 on the CPU and rounded once to the dtype of the table. A new tensor is returned, on
the device of the old one, without a gradient.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from theodolite.positions.checks import require_count

Method = Literal["stretch", "corners", "centers", "tile", "last", "hierarchical"]
Mode = Literal["bicubic", "bilinear"]


def resize_table(
    table: Tensor, num_positions: int, *, method: Method = "stretch", keep: int = 0, alpha: float = 0.4
) -> Tensor:
    """A table (num_positions, E) from `table` (n, E), whose first `keep` rows stay as they are.

    Args:
        table: (n, E), row p for position p.
        num_positions: rows of the new table.
        method: where the rows after the first `keep` come from, n' and m' being how many there are before and after:

            - "stretch": new row j' is old row j' n'/m', linearly between neighbours; the last rows go on along the last
              step. A whole m'/n' leaves every old row in place at its multiple (Long-CLIP, arXiv 2403.15378: 77 to
              248 with keep=20; what linear scaling is to rotations).
            - "corners": first and last stay first and last (`align_corners=True`).
            - "centers": rows are cells of equal width (`align_corners=False`; ends repeat).
            - "tile": the old ones over and over (Longformer, arXiv 2004.05150, section 5).
            - "last": the last one is repeated (PreSumm).
            - "hierarchical": row i n + j is alpha u_i + (1 - alpha) u_j with u = (p - alpha p_0) / (1 - alpha),
              which leaves the first n in place and reaches to n^2 (Su, kexue.fm/archives/7947). `keep` has no say.
        keep: first rows that stay; as many as `num_positions` cuts the table there.
        alpha: of "hierarchical" only; between 0 and 1, and not 0.5, where (i, j) and (j, i) would be the same.

    Raises:
        ValueError: numbers that do not fit together, or a table on the meta device.
    """
    _require_table(table)
    require_count("num_positions", num_positions, least=1)
    require_count("keep", keep, least=0)
    if method not in get_args(Method):
        raise ValueError(f"method: got {method!r}; it must be one of {', '.join(map(repr, get_args(Method)))}")
    rows = len(table)
    if keep > min(rows, num_positions):
        raise ValueError(f"keep: got {keep}; the table has {rows} rows, and is to have {num_positions}")
    if keep == num_positions:
        return table.detach()[:keep].clone()
    wide = table.detach().to("cpu", torch.float64)
    if method == "hierarchical":
        new = _hierarchical(wide, num_positions, keep, alpha)
    else:
        if keep == rows:
            raise ValueError(f"keep: got {keep}, all rows of the table; none is left to make the others of")
        tail = _between(wide, _sources(method, rows, num_positions, keep))
        new = torch.cat((wide[:keep], tail))
    return new.to(table.dtype).to(table.device)


def resize_grid_table(
    table: Tensor,
    *,
    old: tuple[int, int],
    new: tuple[int, int],
    prefix: int,
    mode: Mode = "bicubic",
    antialias: bool = False,
) -> Tensor:
    """A table for another grid of patches, (prefix + h' w', E), from `table` (prefix + h w, E), rows in raster order.

    Both grids are given, so no size is guessed from a count or rounded from a factor.

    Args:
        old: (h, w) that the table was trained for.
        new: (h', w') to come.
        prefix: rows before the grid that stay as they are: 1 with a class token, 0 without, more with registers.
        mode: bicubic (ViT, DINOv2, CLIP, BEiT, SigLIP in transformers) or bilinear (SigLIP 2), `align_corners=False`.
        antialias: filter where the grid shrinks (timm, DINOv2 with registers, SigLIP 2).

    Raises:
        ValueError: the table does not have prefix + h w rows.
    """
    _require_table(table)
    require_count("prefix", prefix, least=0)
    if mode not in get_args(Mode):
        raise ValueError(f"mode: got {mode!r}; it must be {' or '.join(map(repr, get_args(Mode)))}")
    height, width = _require_grid("old", old)
    _require_grid("new", new)
    if len(table) != prefix + height * width:
        raise ValueError(
            f"old: a grid of {height} x {width} and prefix={prefix} make {prefix + height * width} rows; the table has "
            f"{len(table)}"
        )
    wide = table.detach().to("cpu", torch.float64)
    grid = wide[prefix:].reshape(1, height, width, -1).permute(0, 3, 1, 2)
    grid = functional.interpolate(grid, size=tuple(new), mode=mode, align_corners=False, antialias=antialias)
    rows = torch.cat((wide[:prefix], grid[0].flatten(1).T))
    return rows.to(table.dtype).to(table.device)


def _sources(method: str, rows: int, num_positions: int, keep: int) -> Tensor:
    """Which row of the old table, with a fraction, each new row after the first `keep` comes from: float64."""
    new = torch.arange(num_positions - keep, dtype=torch.float64, device="cpu")
    before, after = rows - keep, num_positions - keep
    # Products before quotients: what falls on an old row does so exactly.
    if method == "stretch":
        return keep + new * before / after
    if method == "corners":
        return keep + new * (before - 1) / max(after - 1, 1)
    if method == "centers":
        return (keep + (new + 0.5) * before / after - 0.5).clamp(keep, rows - 1)
    if method == "tile":
        return keep + new % before
    return (keep + new).clamp(max=rows - 1)


def _between(table: Tensor, sources: Tensor) -> Tensor:
    """Linear between neighbouring rows, and beyond the last along the last step: (len(sources), E)."""
    low = sources.floor().clamp(max=max(len(table) - 2, 0)).to(torch.int64)
    high = (low + 1).clamp(max=len(table) - 1)
    share = (sources - low)[:, None]
    return (1 - share) * table[low] + share * table[high]


def _hierarchical(table: Tensor, num_positions: int, keep: int, alpha: float) -> Tensor:
    rows = len(table)
    if keep:
        raise ValueError(f"keep: got {keep}; method 'hierarchical' keeps all {rows} rows: leave it out")
    if not 0 < alpha < 1 or alpha == 0.5:
        raise ValueError(f"alpha: got {alpha!r}; it must be between 0 and 1, and not 0.5")
    if num_positions > rows**2:
        raise ValueError(f"num_positions: got {num_positions}; method 'hierarchical' reaches {rows}^2 = {rows**2}")
    base = (table - alpha * table[0]) / (1 - alpha)
    new = torch.arange(num_positions, device="cpu")
    made = alpha * base[new // rows] + (1 - alpha) * base[new % rows]
    made[:rows] = table[:num_positions]
    return made


def _require_table(table: Tensor) -> None:
    if not isinstance(table, Tensor) or table.dim() != 2 or not len(table) or not table.is_floating_point():
        given = f"{table.dtype} of shape {tuple(table.shape)}" if isinstance(table, Tensor) else type(table).__name__
        raise ValueError(f"table: got {given}; it must be (rows, E), floating point")
    if table.is_meta:
        raise ValueError("table: it is on the meta device and has no values; load it first")


def _require_grid(name: str, grid: tuple[int, int]) -> tuple[int, int]:
    whole = isinstance(grid, (tuple, list)) and len(grid) == 2
    if not whole or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in grid):
        raise ValueError(f"{name}: got {grid!r}; it must be (height, width) in patches, two whole numbers above 0")
    return grid[0], grid[1]
