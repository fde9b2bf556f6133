"""How the pictures look, and what several of them measure.

They are 8 inches wide, to be read at 800 pixels. The hues are Okabe and Ito's, which stay apart for colour-blind
readers, and lines differ in dash too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from theodolite.encodings.rotate.base import Rotate
from theodolite.report import style
from theodolite.report.style import INK, MUTED

__all__ = ["DASHES", "DIVERGING", "HUES", "INK", "MUTED", "counted", "drawing", "panels", "save", "scores"]

HUES = ("#0072b2", "#d55e00", "#009e73", "#b8588f", "#c98a00", "#3a9bd0")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.6, 1.4)), (0, (6, 1.5, 1.4, 1.5)), (0, (9, 2)), (0, (1, 2.5)))
DIVERGING = "PuOr"
_WIDTH, _DPI = 8.0, 160


@contextmanager
def drawing() -> Iterator[None]:
    """The look of the report, with powers of ten on axes: no text here comes from a file."""
    with style.drawing(), matplotlib.rc_context({"text.parse_math": True}):
        yield


def panels(columns: int = 1, *, height: float = 3.5, widths: tuple[float, ...] | None = None) -> tuple[Figure, Any]:
    """A figure and its panels: the axes themselves where there is one, else a list of them."""
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, gridspec_kw={"width_ratios": widths})[0]
    return figure, axes[0] if columns == 1 else list(axes)


def save(figure: Figure, path: Path) -> None:
    """Write the picture; the same numbers give the same bytes."""
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})


def counted(axes: Axes, *ticks: int) -> None:
    """Ticks at these numbers of tokens: 1K is 1,024."""
    axes.set_xticks(ticks, [str(tick) if tick < 1024 else f"{tick // 1024}K" for tick in ticks])
    axes.minorticks_off()


def scores(rope: Rotate, distances: Tensor, *, width: int, heads: int = 1) -> Tensor:
    """q.k / width by distance where q and k have 1 in every channel, (heads, N): the mean of the cosines of the pairs.

    The query stands at each of the distances, the key at 0.
    """
    q, _ = rope(torch.ones(1, heads, len(distances), width), None, distances)
    _, k = rope(None, torch.ones(1, heads, 1, width), torch.zeros(1, dtype=torch.int64))
    return (q * k).sum(-1)[0] / width
