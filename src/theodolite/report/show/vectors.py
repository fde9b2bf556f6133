"""Vectors of positions: the table as a heat map, single channels as curves, and how alike two positions are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from theodolite.report.panels import heading
from theodolite.report.show.canvas import (
    DIVERGING,
    WIDTH,
    Figure,
    canvas,
    drawn,
    hue,
    image,
    quiet_spines,
    token_ticks,
    zero_line,
)
from theodolite.report.style import words

__all__ = ["curves", "heat_map", "similarity"]

_MOST_CURVES = 12


@drawn
def heat_map(table: ArrayLike, *, name: str) -> Figure:
    """The table as a heat map: a column for each position, a row for each channel.

    Args:
        table: (S, D), a vector for each position from 0.
        name: what it is, for the heading.

    Raises:
        ValueError: it is no matrix of finite numbers.
    """
    values = _matrix("table", table)
    tokens, dim = values.shape
    figure, (axes,) = canvas(height=3.6)
    most = float(np.abs(values).max()) or 1.0
    extent = (-0.5, tokens - 0.5, dim - 0.5, -0.5)
    shown = image(axes, values.T, extent=extent, cmap=DIVERGING, vmin=-most, vmax=most)
    axes.set(xlabel="position (tokens)", ylabel="channel")
    token_ticks(axes.xaxis, tokens - 1, most=8)
    figure.colorbar(shown, ax=axes, ticks=(-most, 0, most), format="%.3g", shrink=0.9, label="value")
    heading(figure, f"{name}: {dim:,} channels at {tokens:,} positions", WIDTH)
    return figure


@drawn
def curves(table: ArrayLike, *, channels: Sequence[int], name: str) -> Figure:
    """Single channels by position, one below the other.

    Args:
        table: (S, D), a vector for each position from 0.
        channels: which of the D are drawn, 12 at most.
        name: what it is, for the heading.

    Raises:
        ValueError: it is no matrix of finite numbers; no channel, more than 12, or one that it does not have.
    """
    values = _matrix("table", table)
    tokens, dim = values.shape
    require_channels(channels, dim)
    figure, panels = canvas(rows=len(channels), height=0.9 + 0.62 * len(channels))
    most = (float(np.abs(values[:, list(channels)]).max()) or 1.0) * 1.12
    for number, (axes, channel) in enumerate(zip(panels, channels, strict=True)):
        axes.plot(np.arange(tokens), values[:, channel], **hue(number) | {"linestyle": "-"}, linewidth=1.3)
        axes.set(xlim=(0, max(1, tokens - 1)), ylim=(-most, most))
        axes.set_ylabel(f"channel\n{channel}", rotation=0, ha="right", va="center", fontsize=8.5)
        axes.tick_params(labelbottom=channel == channels[-1] and number == len(channels) - 1, labelsize=8)
        token_ticks(axes.xaxis, tokens - 1, most=8)
    panels[-1].set_xlabel("position (tokens)")
    heading(figure, f"{name}: single channels of {dim:,}", WIDTH)
    return figure


@drawn
def similarity(table: ArrayLike, *, name: str) -> Figure:
    """How alike two positions are: the cosine between their vectors for every two, and its mean by distance.

    Where the cosine is not the same for all pairs at a distance, a band shows its range.

    Args:
        table: (S, D), a vector for each position from 0.
        name: what it is, for the heading.

    Raises:
        ValueError: it is no matrix of finite numbers.
    """
    values = _matrix("table", table)
    tokens = len(values)
    alike = cosines(values)
    figure, (left, right) = canvas(2, height=3.7, widths=(1, 1.15))
    extent = (-0.5, tokens - 0.5, tokens - 0.5, -0.5)
    shown = image(left, alike, extent=extent, cmap=DIVERGING, vmin=-1, vmax=1)
    left.set_aspect("equal")
    left.set(xlabel="position (tokens)", ylabel="position (tokens)", title="every two positions")
    for axis in (left.xaxis, left.yaxis):
        token_ticks(axis, tokens - 1, most=4)
    quiet_spines(left)
    figure.colorbar(shown, ax=left, ticks=(-1, 0, 1), shrink=0.75)
    mean, low, high = by_distance(alike)
    distances = np.arange(tokens)
    right.fill_between(distances, low, high, color=hue(0)["color"], alpha=0.18, linewidth=0)
    right.plot(distances, mean, **hue(0))
    zero_line(right)
    right.set(xlabel="distance (tokens)", ylabel="cosine", title="by distance", xlim=(0, max(1, tokens - 1)))
    right.set_ylim(min(-0.05, float(low.min()) * 1.05), 1.05)
    token_ticks(right.xaxis, tokens - 1, most=6)
    heading(figure, f"{name}: how alike two positions are", WIDTH)
    return figure


def require_channels(channels: Sequence[int], dim: int) -> None:
    """Raise ValueError for no channel, more than 12, or one that a table of `dim` does not have."""
    if not 0 < len(channels) <= _MOST_CURVES or not all(0 <= channel < dim for channel in channels):
        raise ValueError(f"channels: got {list(channels)}; give 1 to {_MOST_CURVES} of them, each from 0 to {dim - 1}")


def cosines(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """The cosine between every two rows of (S, D), as (S, S); 0 beside a row of zeros."""
    lengths = np.linalg.norm(table, axis=1, keepdims=True)
    unit = np.divide(table, lengths, out=np.zeros_like(table), where=lengths > 0)
    return np.asarray(np.clip(unit @ unit.T, -1, 1))


def by_distance(matrix: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Mean, least and largest of each diagonal of (S, S), by distance 0 to S - 1."""
    diagonals = [np.diagonal(matrix, -distance) for distance in range(len(matrix))]
    return tuple(np.array([measure(one) for one in diagonals]) for measure in (np.mean, np.min, np.max))  # type: ignore[return-value]


def _matrix(name: str, given: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(given, dtype=np.float64)
    if values.ndim != 2 or not values.size:
        raise ValueError(f"{name}: got shape {values.shape}; it must be (positions, channels)")
    if not np.isfinite(values).all():
        raise ValueError(f"{name}: some of its numbers are not finite: {words(str(values.ravel()[:3]))}")
    return values
