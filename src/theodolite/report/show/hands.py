"""The angles of a position as hands of clocks, one dial for each pair of channels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from theodolite.plan.derived import settled_inv_freq
from theodolite.report.figures import tokens
from theodolite.report.panels import heading
from theodolite.report.show.canvas import WIDTH, Axes, Figure, canvas, drawn
from theodolite.report.show.rotations import Rotaries, styles_of
from theodolite.report.style import INK, MUTED, RULE, words

__all__ = ["clock_hands"]

_COLUMNS, _MOST, _RADIUS = 8, 32, 0.4
PALE = "#b3b9c0"
_FURTHEST = 2**24


@drawn
def clock_hands(rotaries: Rotaries, *, position: int, length: int | None = None) -> Figure:
    """Where the hands of a position stand: at position 0 all point up, and they turn clockwise.

    A dial is a pair of channels, fastest first; of more than 32 pairs so many are drawn, evenly chosen. Each rotation
    has a hand of its own colour. Under a dial stand the turns that the first rotation has made; a dial whose hand has
    not been round once is shaded as far as it has come.

    Args:
        rotaries: what is compared, by name; they need the same number of pairs.
        position: tokens, 0 to 2**24.
        length: frequencies are settled for it; by default for the position itself.

    Raises:
        ValueError: no rotation, different numbers of pairs, or a position out of range.
    """
    counts = {rotary.rotary_dim // 2 for rotary in rotaries.values()}
    if len(counts) != 1:
        raise ValueError(f"rotaries: got {sorted(counts)} pairs; give at least one, all with as many pairs")
    if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position <= _FURTHEST:
        raise ValueError(f"position: got {position!r}; it must be a whole number from 0 to {_FURTHEST:,}")
    (count,) = counts
    shown = np.unique(np.linspace(0, count - 1, min(count, _MOST)).round().astype(int))
    columns = min(_COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure, (axes,) = canvas(height=1.18 * rows + 0.5 + 0.3 * (len(rotaries) > 1))
    axes.set_axis_off()
    axes.set_aspect("equal")
    axes.set(xlim=(-0.5, _COLUMNS - 0.5), ylim=(-1.18 * (rows - 1) - 0.7, 0.45))
    looks = _looks(list(rotaries))
    turns = {
        name: settled_inv_freq(rotary, length or max(1, position)) * position / (2 * math.pi)
        for name, rotary in rotaries.items()
    }
    for place, pair in enumerate(shown):
        centre = float(place % columns), -1.18 * (place // columns)
        of_pair = {name: float(made[pair]) for name, made in turns.items()}
        _dial(axes, centre, int(pair), next(iter(of_pair.values())))
        for name, made in of_pair.items():
            _hand(axes, centre, made, **looks[name])
    if len(rotaries) > 1:
        from matplotlib.lines import Line2D

        handles = [Line2D([], [], label=words(n, 40), **looks[n]) for n in rotaries]
        figure.legend(handles=handles, loc="outside lower left", ncols=min(len(handles), 6), handlelength=1.6)
    first = f" ({words(next(iter(rotaries)), 24)})" if len(rotaries) > 1 else ""
    heading(figure, f"Hands at position {tokens(position)}; below each dial its pair, and its turns{first}", WIDTH)
    return figure


def _looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Of one hand its own colour; of several the unscaled one is broad and pale, so that the others stand out on it."""
    styles = styles_of(names)
    if len(names) == 1:
        return {names[0]: {"color": styles[names[0]]["color"], "linewidth": 2.2}}
    pale = {"color": PALE, "linewidth": 4.4, "zorder": 1.5}
    return {name: pale if name == "none" else {"color": styles[name]["color"], "linewidth": 1.7} for name in names}


def _dial(axes: Axes, centre: tuple[float, float], pair: int, turns: float) -> None:
    from matplotlib.patches import Circle, Wedge

    x, y = centre
    axes.add_patch(Circle(centre, _RADIUS, facecolor="white", edgecolor=MUTED, linewidth=0.9))
    if 0 < turns < 1:
        # Wedges are counted from the right and against the clock.
        axes.add_patch(Wedge(centre, _RADIUS, 90 - 360 * turns, 90, facecolor=RULE, linewidth=0))
    axes.plot((x, x), (y + _RADIUS * 0.86, y + _RADIUS), color=MUTED, linewidth=0.9)
    axes.text(x, y - _RADIUS - 0.06, f"{pair}: {turns_text(turns)}", ha="center", va="top", fontsize=8, color=INK)


def _hand(axes: Axes, centre: tuple[float, float], turns: float, **look: Any) -> None:
    x, y = centre
    angle = 2 * math.pi * turns
    tip = (x + 0.92 * _RADIUS * math.sin(angle), y + 0.92 * _RADIUS * math.cos(angle))
    axes.plot((x, tip[0]), (y, tip[1]), solid_capstyle="round", **look)


def turns_text(turns: float) -> str:
    """Turns with the digits that matter: 163, 16.3, 0.016."""
    if turns == 0:
        return "0"
    if turns < 1e-4:
        return f"{turns:.0e}".replace("e-0", "e-")
    return f"{turns:,.0f}" if turns >= 100 else f"{turns:.{max(0, 2 - math.floor(math.log10(turns)))}f}"
