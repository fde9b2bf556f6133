"""Pictures of what turns the patches of images: one function for each page, named as the page is."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from draw.style import DIVERGING, INK, panels
from theodolite.encodings import AxialRotary, MixedRotary
from theodolite.encodings.rotate.base import Rotate
from theodolite.plan.axial import Axial
from theodolite.positions.fractional_grids import centred_patch_positions
from theodolite.positions.grids import patch_positions

__all__ = ["images_2d", "images_mixed"]

_SIZE = 25


def images_2d() -> Figure:
    """The score of one patch with all others, where q and k are alike."""
    figure, axes = panels(3, height=2.9)
    whole = patch_positions(_SIZE, _SIZE)[:, None]
    centred = centred_patch_positions(_SIZE, _SIZE, normalize_coords="separate")[:, None]
    encodings = {
        "rope-vit, base 100": (Axial.rope_vit(64), whole.flip(0)),
        "Qwen-VL, base 10,000": (Axial.qwen_vl(64), whole),
        "DINOv3, base 100": (Axial.dinov3(64), centred),
    }
    for one, (name, (axial, positions)) in zip(axes, encodings.items(), strict=True):
        image = _patch_scores(one, AxialRotary(axial), positions, head=0, heads=1)
        one.set_title(name)
    figure.colorbar(image, ax=axes, ticks=(-1, 0, 1), label="mean cosine of the pairs", shrink=0.9)
    return figure


def images_mixed() -> Figure:
    """The score of one patch with all others, for four heads as they are drawn at first."""
    figure, axes = panels(4, height=2.5)
    torch.manual_seed(22)
    rope, positions = MixedRotary(64, 4), patch_positions(_SIZE, _SIZE).flip(0)[:, None]
    with torch.no_grad():
        for head, one in enumerate(axes):
            image = _patch_scores(one, rope, positions, head=head, heads=4)
            one.set_title(f"head {head}")
    figure.colorbar(image, ax=axes, ticks=(-1, 0, 1), label="mean cosine", shrink=0.9)
    return figure


def _patch_scores(axes: Axes, rope: Rotate, positions: Tensor, *, head: int, heads: int) -> Any:
    """Draw q.k / D of the patch in the middle with every patch, q and k having 1 in every channel."""
    ones = torch.ones(1, heads, _SIZE**2, rope.rotary_dim)
    q, k = rope(ones, ones, positions)
    middle = _SIZE**2 // 2
    score = (q[:, head, middle, None] * k[:, head]).sum(-1).reshape(_SIZE, _SIZE) / rope.rotary_dim
    image = axes.imshow(score, cmap=DIVERGING, vmin=-1, vmax=1, interpolation="nearest")
    axes.plot(_SIZE // 2, _SIZE // 2, marker="+", color=INK, markersize=7)
    axes.set(xlabel="column", ylabel="row", xticks=(0, 12, 24), yticks=(0, 12, 24))
    axes.grid(False)
    return image
