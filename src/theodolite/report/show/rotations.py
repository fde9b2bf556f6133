"""Rotary encodings: how scores fall with distance, how far each pair turns, and where the hands of a position stand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from theodolite.plan.derived import settled_inv_freq
from theodolite.plan.rotary import Rotary
from theodolite.report.figures import tokens
from theodolite.report.panels import doubling_axis, heading, legend, log_axis, mark_trained
from theodolite.report.show.canvas import (
    WIDTH,
    Axes,
    Figure,
    canvas,
    drawn,
    hue,
    zero_line,
)
from theodolite.report.style import INK, MUTED, line_styles, words

__all__ = ["coverage", "decay", "scores", "wavelengths"]

Rotaries = Mapping[str, Rotary]
_MOST_TOGETHER = 64


@drawn
def decay(rotaries: Rotaries, *, length: int, trained: int | None = None) -> Figure:
    """The score of a query and a key that are alike, by distance, under each scaling.

    A score goes up and down from one distance to the next. The lines are its mean over distances that lie together, 4
    groups to each doubling, and the band is the range in each group.

    Args:
        rotaries: what is compared, by name; names of scalings ("yarn:4") have colours of their own.
        length: the distances end before it, and frequencies are settled for it (tokens).
        trained: the trained length, which is marked (tokens).

    Raises:
        ValueError: no rotation, or fewer than 2 tokens.
    """
    _require(rotaries, length)
    figure, (axes,) = canvas(height=4.0)
    decay_panel(axes, rotaries, length=length, styles=styles_of(list(rotaries)), trained=trained)
    axes.set_ylabel("q.k / head_dim, q and k all ones")
    legend(figure, axes, WIDTH)
    heading(figure, "How the score of a query and a key that are alike changes with their distance", WIDTH)
    return figure


@drawn
def wavelengths(rotaries: Rotaries, *, length: int, trained: int | None = None) -> Figure:
    """Tokens for a full turn, pair by pair, against the trained length: what is above it never showed a whole turn.

    Args:
        rotaries, trained: as in `decay`.
        length: frequencies are settled for it (tokens).

    Raises:
        ValueError: no rotation, or fewer than 2 tokens.
    """
    _require(rotaries, length)
    figure, (axes,) = canvas(height=4.0)
    end = trained or length
    note = f"{tokens(end)} tokens: pairs above it (hollow) never turned once"
    wavelength_panel(axes, rotaries, length=length, trained=end, styles=styles_of(list(rotaries)), note=note)
    legend(figure, axes, WIDTH)
    heading(figure, "Tokens for a full turn of each pair of channels", WIDTH)
    return figure


@drawn
def coverage(rotaries: Rotaries, *, length: int) -> Figure:
    """How often each pair turns within so many tokens; below 1 it meets only a part of the circle.

    Args:
        rotaries: as in `decay`.
        length: tokens; frequencies are settled for it.

    Raises:
        ValueError: no rotation, or fewer than 2 tokens.
    """
    _require(rotaries, length)
    figure, (axes,) = canvas(height=4.0)
    coverage_panel(axes, rotaries, length=length, trained=length, styles=styles_of(list(rotaries)))
    legend(figure, axes, WIDTH)
    heading(figure, f"Turns of each pair of channels within {tokens(length)} tokens", WIDTH)
    return figure


def scores(rotary: Rotary, distances: NDArray[np.int64], *, length: int) -> NDArray[np.float64]:
    """q.k / head_dim by distance where q and k have 1 in every channel, float64, shape of `distances`.

    That is the mean of cosines over the pairs of the head; a channel that stands still counts as 1, and the pairs that
    the rotation speaks of are multiplied by the square of the attention factor.
    """
    inv_freq = settled_inv_freq(rotary, length)
    turned = np.cos(np.multiply.outer(distances, inv_freq)).sum(-1) * rotary.attention_factor() ** 2
    return np.asarray((2 * turned + rotary.head_dim - rotary.rotary_dim) / rotary.head_dim)


def mean_cosines(rotary: Rotary, distances: NDArray[np.int64], *, length: int | None) -> NDArray[np.float64]:
    """The mean of cosines over the pairs that turn, by distance, as `theodolite inspect` speaks of it."""
    inv_freq = settled_inv_freq(rotary, length)
    return np.asarray(np.cos(np.multiply.outer(distances, inv_freq[inv_freq > 0])).mean(-1))


def styles_of(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The look of each line: scalings have their own colours, and other names take them in turn."""
    known = line_styles(names, None)
    scalings = all(name.partition(":")[0] in _SCALINGS for name in names)
    return {
        name: hue(number)
        | ({key: known[name][key] for key in ("color", "zorder")} if scalings else {})
        | {"linewidth": 2.0 if name == "none" else 1.5}
        for number, name in enumerate(names)
    }


_SCALINGS = frozenset({"none", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope"})


def decay_panel(
    axes: Axes,
    rotaries: Rotaries,
    *,
    length: int,
    styles: Mapping[str, dict[str, Any]],
    trained: int | None,
    measure: Any = scores,
) -> None:
    """Means and ranges of `measure(rotary, distances, length=...)` over a logarithmic axis of distances."""
    together = groups(length)
    middles = np.array([math.sqrt(one[0] * one[-1]) for one in together])
    starts = np.cumsum([0, *(len(one) for one in together[:-1])])
    distances = np.concatenate(together)
    for name, rotary in rotaries.items():
        made = measure(rotary, distances, length=length)
        mean = np.add.reduceat(made, starts) / np.diff([*starts, len(made)])
        low, high = np.minimum.reduceat(made, starts), np.maximum.reduceat(made, starts)
        axes.fill_between(middles, low, high, color=styles[name]["color"], alpha=0.14, linewidth=0)
        axes.plot(middles, mean, label=words(name, 40), **styles[name])
    zero_line(axes)
    doubling_axis(axes, 1, length, "distance (tokens, log scale)")
    if trained is not None:
        mark_trained(axes, trained)


def groups(length: int) -> list[NDArray[np.int64]]:
    """Whole distances from 1 to `length - 1` in groups, 4 to each doubling; of long groups 64 distances, evenly."""
    edges = np.unique(np.floor(2 ** (np.arange(0, 4 * math.log2(length) + 1) / 4)).astype(np.int64))
    edges = np.append(edges[edges < length], length)
    spans = pairwise(edges.tolist())
    return [np.unique(np.linspace(a, b - 1, min(_MOST_TOGETHER, b - a)).round().astype(np.int64)) for a, b in spans]


def wavelength_panel(
    axes: Axes,
    rotaries: Rotaries,
    *,
    length: int,
    trained: int,
    styles: Mapping[str, dict[str, Any]],
    note: str,
    within: Mapping[str, int] | None = None,
) -> None:
    """Wavelengths by pair; those longer than the trained length, which never turned, are hollow.

    Args:
        within: tokens in place of the trained length, by name, where layers see fewer.
    """
    seen = [float(trained)]
    for name, rotary in rotaries.items():
        pairs, waves = turning(rotary, length)
        style, end = styles[name], (within or {}).get(name, trained)
        axes.plot(pairs, waves, label=words(name, 40), **style)
        for marked, face in ((waves <= end, style["color"]), (waves > end, "white")):
            marker = {"marker": "o", "linestyle": "none", "markersize": 3.6, "markerfacecolor": face}
            axes.plot(pairs[marked], waves[marked], **style | marker, markeredgewidth=1)
        seen += waves.tolist()
    log_axis(axes, min(seen), min(max(seen), 1e15), "tokens for a full turn")
    axes.axhline(trained, color=INK, linewidth=1.1, linestyle=(0, (1.2, 2.2)), zorder=2)
    _note(axes, note, trained)
    axes.set_xlabel("pair of channels, fastest first")


def coverage_panel(
    axes: Axes,
    rotaries: Rotaries,
    *,
    length: int,
    trained: int,
    styles: Mapping[str, dict[str, Any]],
    within: Mapping[str, int] | None = None,
) -> None:
    """Turns by pair within the trained length, with a line at one turn; `within` as in `wavelength_panel`."""
    seen = [1.0]
    for name, rotary in rotaries.items():
        pairs, waves = turning(rotary, length)
        turns = (within or {}).get(name, trained) / waves
        axes.plot(pairs, turns, label=words(name, 40), **styles[name])
        seen += turns.tolist()
    narrow = any(end < trained for end in (within or {}).values())
    what = f"turns in {tokens(trained)} tokens" + (", or the window" if narrow else "")
    log_axis(axes, max(min(seen), 1e-12), max(seen), what)
    axes.axhline(1, color=INK, linewidth=1.1, linestyle=(0, (1.2, 2.2)), zorder=2)
    axes.axhspan(axes.get_ylim()[0], 1, color=MUTED, alpha=0.1, linewidth=0, zorder=0)
    _note(axes, "one whole turn", 1)
    axes.set_xlabel("pair of channels, fastest first")


def turning(rotary: Rotary, length: int | None) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The pairs that turn and their wavelengths (tokens), frequencies settled for `length`."""
    inv_freq = settled_inv_freq(rotary, length)
    pairs = np.flatnonzero(inv_freq > 0)
    return pairs, np.asarray(2 * math.pi / inv_freq[pairs])


def _note(axes: Axes, text: str, height: float) -> None:
    axes.annotate(
        text,
        xy=(0, height),
        xycoords=("axes fraction", "data"),
        xytext=(4, 3),
        textcoords="offset points",
        fontsize=8.5,
        color=MUTED,
    )


def _require(rotaries: Rotaries, length: int) -> None:
    if not rotaries:
        raise ValueError("rotaries: got none; give at least one, by name")
    if isinstance(length, bool) or not isinstance(length, int) or length < 2:
        raise ValueError(f"length: got {length!r}; it must be a whole number of at least 2 tokens")
