"""What is added to scores: as a matrix of queries by keys, and by distance, head by head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from theodolite.report.panels import doubling_axis, heading, legend
from theodolite.report.show.canvas import (
    SEQUENTIAL,
    WIDTH,
    Figure,
    canvas,
    drawn,
    hue,
    image,
    quiet_spines,
    token_ticks,
)
from theodolite.report.style import words

__all__ = ["bias_by_distance", "bias_matrix"]

_MOST_PANELS, _MOST_LINES = 4, 8


@drawn
def bias_matrix(
    bias: ArrayLike,
    *,
    name: str,
    labels: Sequence[str],
    causal: bool = True,
    what: str = "bias",
    positions: ArrayLike | None = None,
) -> Figure:
    """The bias of every query and key, one panel a head; what a causal mask hides is left white.

    Each panel has its own scale of colours, beside it: slopes of heads differ a hundredfold.

    Args:
        bias: (H, S, S), 1 to 4 heads, queries by keys; what is not a number is left white.
        name: what it is, for the heading.
        labels: a title for each panel.
        causal: leave out keys after the query.
        what: what the colours are.
        positions: (S,), where they stand, at even steps; 0, 1, 2 ... by default.

    Raises:
        ValueError: another shape, or another number of labels.
    """
    values = np.asarray(bias, dtype=np.float64)
    if values.ndim != 3 or values.shape[1] != values.shape[2] or not 0 < len(values) <= _MOST_PANELS:
        raise ValueError(f"bias: got shape {values.shape}; it must be (heads, S, S) with 1 to {_MOST_PANELS} heads")
    if len(labels) != len(values):
        raise ValueError(f"labels: got {len(labels)}; there are {len(values)} heads")
    size = values.shape[1]
    last = size - 1 if positions is None else int(np.asarray(positions)[-1])
    hidden = np.triu(np.ones((size, size), dtype=bool), 1) if causal else np.zeros((size, size), dtype=bool)
    columns = 2 if len(values) in (2, 4) else len(values)
    rows = math.ceil(len(values) / columns)
    figure, panels = canvas(columns, rows=rows, height=(4.6, 3.4, 2.6)[columns - 1] if rows == 1 else 6.4)
    half = last / (2 * max(1, size - 1))
    extent = (-half, last + half, last + half, -half)
    for axes, matrix, label in zip(panels, values, labels, strict=True):
        shown = image(axes, np.ma.masked_where(hidden | ~np.isfinite(matrix), matrix), extent=extent, cmap=SEQUENTIAL)
        axes.set_aspect("equal")
        axes.set_title(words(label, 40), fontsize=9.5)
        for axis in (axes.xaxis, axes.yaxis):
            token_ticks(axis, last, most=4)
        quiet_spines(axes)
        figure.colorbar(shown, ax=axes, shrink=0.8, format="{x:,.6g}")
    for axes in panels[::columns]:
        axes.set_ylabel("query (position)")
    for axes in panels[-columns:]:
        axes.set_xlabel("key (position)")
    heading(figure, f"{name}: {what} for every query and key", WIDTH)
    return figure


@drawn
def bias_by_distance(
    lines: Mapping[str, ArrayLike],
    *,
    distances: ArrayLike,
    name: str,
    what: str = "bias",
    log: bool = False,
    steps: bool = False,
) -> Figure:
    """The bias by distance, one line a head (or whatever the names say).

    Args:
        lines: by name, (N,) each; not a number where a line has none. 8 at most.
        distances: (N,), query minus key, tokens.
        name: what it is, for the heading.
        what: what the numbers are, for the axis.
        log: a logarithmic axis of distance + 1, for what changes slowly far away; no distance is below 0 then.
        steps: what has whole numbers alone is drawn in steps.

    Raises:
        ValueError: no line, more than 8, one of another length, or negative distances on a logarithmic axis.
    """
    at: NDArray[np.float64] = np.asarray(distances, dtype=np.float64)
    if not 0 < len(lines) <= _MOST_LINES:
        raise ValueError(f"lines: got {len(lines)}; give 1 to {_MOST_LINES}")
    if log and at.min() < 0:
        raise ValueError(f"distances: got {at.min():g}; a logarithmic axis needs distances of at least 0")
    figure, (axes,) = canvas(height=3.8)
    for number, (label, values) in enumerate(lines.items()):
        line = np.asarray(values, dtype=np.float64)
        if line.shape != at.shape:
            raise ValueError(f"lines: {label!r} has shape {line.shape}; the distances have {at.shape}")
        how = hue(number) | {"linewidth": 1.6, "drawstyle": "steps-mid" if steps else "default"}
        axes.plot(at + 1 if log else at, line, label=words(label, 40), **how)
    if log:
        doubling_axis(axes, 1, float(at.max()) + 1, "distance + 1 (tokens, log scale)")
    else:
        axes.set_xlim(at.min(), at.max())
        axes.set_xlabel("distance, query minus key (tokens)")
        if at.min() >= 0:
            token_ticks(axes.xaxis, float(at.max()), most=8)
    axes.yaxis.set_major_formatter("{x:,.6g}")
    axes.set_ylabel(words(what, 40))
    if len(lines) > 1:
        legend(figure, axes, WIDTH)
    heading(figure, f"{name}: {what} by distance", WIDTH)
    return figure
