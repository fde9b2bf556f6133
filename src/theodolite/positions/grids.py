"""Where the patches of images and videos stand, in the conventions of the models that rotate by them.

Every function gives coordinates as (axes, S), S patches in the order in which the model takes them. Whole coordinates
are int64; tokens without a place (class, registers) are added by `with_special_tokens`, and never guessed from a count.
Conventions with fractions are in `theodolite.positions.fractional_grids`.

| model | coordinates |
|---|---|
| Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4V (vision) | `patches_of_grids(grid_thw, spatial_merge_size=2)` |
| Pixtral | `patches_of_grids([(1, h, w), ...], spatial_merge_size=1)` |
| rope-vit | `patch_positions(rows, columns).flip(0)`: x is the column, y the row |
| Gemma 4 (vision) | `padded_patch_positions(sizes, patches=...)` |
| Llama 4 (vision) | `llama4_patch_positions(rows, columns)` |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from theodolite.positions.checks import can_read, integers_of, require_count, require_values

Grids = Tensor | Sequence[Sequence[int]]
"""(N, 3) integers: time, height and width in patches of each image (time 1) or video, before patches are merged."""


def patch_positions(rows: int, columns: int, *, device: torch.device | str | None = None) -> Tensor:
    """(row, column) of the patches of one image, row by row: (2, rows * columns), int64.

    Raises:
        ValueError: `rows` or `columns` is not an integer of at least 1.
    """
    require_count("rows", rows, least=1)
    require_count("columns", columns, least=1)
    axes = torch.meshgrid(torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij")
    return torch.stack(axes).flatten(1)


def patches_of_grids(
    grid_thw: Grids, *, spatial_merge_size: int, time: bool = False, device: torch.device | str | None = None
) -> Tensor:
    """(row, column) of all patches of several images and videos, one after the other: (2, S), int64.

    Patches that will be merged into one token stand together: block by block of `spatial_merge_size` squared, row by
    row inside a block. A video repeats its frame. Matches `get_vision_position_ids` of transformers 5.24.

    Args:
        grid_thw: (N, 3) integers: frames, height and width of each in patches.
        spatial_merge_size: patches on a side of a block; 1 is plain rows.
        time: put the frame's number before, for encoders that rotate by it too: (3, S).
        device: that of `grid_thw` by default, the CPU for a list.

    Raises:
        ValueError: a grid is not three positive integers, or does not divide into blocks; or the grids are on the meta
            device, so that nobody knows how many patches there are.
    """
    grids = grids_tensor("grid_thw", grid_thw, spatial_merge_size=spatial_merge_size, device=device)
    frames, heights, widths = grids.unbind(1)
    counts = frames * heights * widths
    owner = torch.repeat_interleave(torch.arange(len(grids), device=grids.device), counts)
    index = torch.arange(len(owner), device=grids.device) - (counts.cumsum(0) - counts)[owner]
    area, merge = (heights * widths)[owner], spatial_merge_size
    within = index % area
    block, inside = within // merge**2, within % merge**2
    blocks_in_row = (widths // merge)[owner]
    rows = block // blocks_in_row * merge + inside // merge
    columns = block % blocks_in_row * merge + inside % merge
    return torch.stack((index // area, rows, columns) if time else (rows, columns))


def llama4_patch_positions(rows: int, columns: int, *, device: torch.device | str | None = None) -> Tensor:
    """(column + 1, row + 1) of the patches, row by row, then the class token, last, at angle 0.

    Returns:
        (2, rows * columns + 1), int64. Llama 4's vision encoder in transformers 5.24 (there always square).
    """
    coordinates = patch_positions(rows, columns, device=device).flip(0) + 1
    return with_special_tokens(coordinates, after=1)


def padded_patch_positions(
    sizes: Sequence[tuple[int, int]], *, patches: int, device: torch.device | str | None = None
) -> Tensor:
    """(column, row) of the patches of each image, row by row, then -1 up to `patches`: (2, B, patches), int64.

    Gemma 4's vision encoder in transformers 5.24, whose `pixel_position_ids` are these with the axes last. A padding
    patch is one with -1 on both axes.

    Args:
        sizes: (rows, columns) of each image, B of them, in patches.
        patches: the length all are padded to.

    Raises:
        ValueError: an image has more than `patches`.
    """
    require_count("patches", patches, least=1)
    out = torch.full((2, len(sizes), patches), -1, device=device)
    for image, (rows, columns) in enumerate(sizes):
        coordinates = patch_positions(rows, columns, device=device).flip(0)
        if coordinates.shape[1] > patches:
            raise ValueError(
                f"patches: got {patches}; image {image} has {rows} x {columns} = {rows * columns}, and all must fit"
            )
        out[:, image, : coordinates.shape[1]] = coordinates
    return out


def with_special_tokens(positions: Tensor, *, before: int = 0, after: int = 0) -> Tensor:
    """The coordinates (axes, S) with tokens that have no place, at 0 on every axis, so that no rotation turns them.

    Args:
        before: class and register tokens in front of the patches.
        after: such tokens behind them.

    Returns:
        (axes, before + S + after), of the dtype and on the device of `positions`.
    """
    require_count("before", before, least=0)
    require_count("after", after, least=0)
    return torch.nn.functional.pad(positions, (before, after))


def special_tokens(tokens: int, *, rows: int, columns: int) -> int:
    """How many of an image's `tokens` are no patches of a grid of `rows` x `columns`.

    A count alone does not say: 196 tokens may be 14 x 14 patches, or 195 and a class token. The grid does.

    Raises:
        ValueError: there are fewer tokens than patches.
    """
    for name, number in (("tokens", tokens), ("rows", rows), ("columns", columns)):
        require_count(name, number, least=1)
    if tokens < rows * columns:
        raise ValueError(f"tokens: got {tokens}; a grid of {rows} x {columns} has {rows * columns} patches")
    return tokens - rows * columns


def grids_tensor(
    name: str, grid_thw: Grids, *, spatial_merge_size: int, device: torch.device | str | None = None
) -> Tensor:
    """The grids as (N, 3) int64, checked: three positive integers each, that divide into blocks.

    Raises:
        ValueError: they do not; the message says which.
    """
    require_count("spatial_merge_size", spatial_merge_size, least=1)
    given = integers_of(name, grid_thw, of="three integers for each: time, height, width")
    if not isinstance(grid_thw, Tensor) and not given.numel():
        given = given.reshape(0, 3)
    require_values(name, given)
    if given.dim() != 2 or given.shape[1] != 3:
        raise ValueError(f"{name}: got shape {tuple(given.shape)}; it must be (N, 3): time, height, width of each")
    grids = given.to(dtype=torch.int64, device=device)
    if can_read(grids):
        wrong = (grids < 1).any(1) | (grids[:, 1:] % spatial_merge_size != 0).any(1)
        if wrong.any():
            number = int(wrong.nonzero()[0])
            raise ValueError(
                f"{name}: grid {number} is {grids[number].tolist()}; time, height and width must be at least 1, "
                f"and height and width must divide by spatial_merge_size ({spatial_merge_size})"
            )
    return grids
