"""The parts that every picture shares: axes of tokens, logarithmic ticks, the trained length, labels at line ends."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from theodolite.report.figures import short_tokens, tokens
from theodolite.report.style import INK, MUTED, words

Axes = Any
_POINTS_PER_INCH = 72


class End(NamedTuple):
    """Where a line ends, and what it is called."""

    x: float
    y: float
    name: str
    colour: str
    heavy: bool = False


def title(axes: Axes, text: str, *, width: float, above: float = 16, size: float = 10.5) -> None:
    """A title of several lines where the panel, `width` inches wide, needs them."""
    characters = max(20, int(width * _POINTS_PER_INCH / (size * 0.63)))
    axes.set_title(wrapped(words(text, 240), characters), pad=above, fontsize=size)


def heading(figure: Any, text: str, width: float, *, bold: bool = True) -> None:
    """The sentence over a whole figure, `width` inches wide."""
    characters = int(width * _POINTS_PER_INCH / (11 * (0.62 if bold else 0.55)))
    text = wrapped(words(text, 240), characters)
    figure.suptitle(text, x=0.01, ha="left", fontsize=11, fontweight="bold" if bold else "normal")


def legend(figure: Any, axes: Axes, width: float) -> None:
    """The names below a figure, `width` inches wide, in rows that read from left to right."""
    handles, labels = axes.get_legend_handles_labels()
    fitting = max(1, int(width * 13) // (max(len(text) for text in labels) + 8))
    rows = math.ceil(len(labels) / fitting)
    columns = math.ceil(len(labels) / rows)
    # A legend fills column by column.
    order = [index for column in range(columns) for index in range(column, len(labels), columns)]
    handles, labels = [handles[index] for index in order], [labels[index] for index in order]
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, handlelength=2.6)


def length_axis(axes: Axes, end: float, label: str) -> None:
    """A linear axis of tokens from 0 to `end`, its ticks at round numbers of 1,024."""
    step = 1024
    while end / step > 6.5:
        step *= 2
    if end < step:
        step = max(1, int(end) // 4)
    ticks = list(range(0, int(end) + 1, step))
    axes.set_xlim(0, end * 1.01)
    axes.set_xticks(ticks, [short_tokens(tick) if tick else "0" for tick in ticks])
    axes.set_xlabel(label)


def doubling_axis(axes: Axes, low: float, high: float, label: str) -> None:
    """A logarithmic axis of tokens, its ticks at powers of two."""
    axes.set_xscale("log", base=2)
    low, high = low / 1.06, max(high, low * 2) * 1.06
    axes.set_xlim(low, high)
    powers = [2**p for p in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    powers = powers[:: max(1, math.ceil(len(powers) / 7))]
    axes.set_xticks(powers, [short_tokens(power) for power in powers])
    axes.xaxis.set_minor_locator(_no_ticks())
    axes.set_xlabel(label)


def log_axis(axes: Axes, low: float, high: float, label: str) -> None:
    """A logarithmic y axis with plain numbers for ticks, as many as can be read."""
    axes.set_yscale("log")
    low, high = low / 1.12, high * 1.12
    axes.set_ylim(low, high)
    ticks: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7), tuple(1 + k / 10 for k in range(90))):
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [s * 10.0**d for d in decades for s in steps if low <= s * 10.0**d <= high]
        if len(ticks) >= 4:
            break
    ticks = ticks[:: max(1, math.ceil(len(ticks) / 9))]
    axes.set_yticks(ticks, [f"{tick:,.4g}" if tick < 1e4 else _large(tick) for tick in ticks])
    axes.yaxis.set_minor_locator(_no_ticks())
    axes.set_ylabel(label)


def percent_axis(axes: Axes, label: str) -> None:
    """A y axis of shares from 0 to 100 %."""
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100%"])
    axes.set_ylabel(label)


def mark_trained(axes: Axes, length: int, *, text: bool = True) -> None:
    """A dotted line at the trained length, named above the panel where no data are; none where it is off the panel."""
    if length > axes.get_xlim()[1]:
        return
    axes.axvline(length, color=INK, linewidth=1.1, linestyle=(0, (1.2, 2.2)), zorder=2)
    if text:
        axes.annotate(
            f"trained length {tokens(length)}",
            xy=(length, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8.5,
            color=MUTED,
        )


def label_ends(axes: Axes, ends: Sequence[End], *, height: float, most: int = 16, size: float = 9) -> None:
    """Names to the right of the panel, each at its line's end, moved apart where they would touch.

    `height` is the panel's height in inches, about.
    """
    if not ends:
        return
    transform = axes.transScale + axes.transLimits
    ordered = sorted(ends, key=lambda end: float(transform.transform((end.x, end.y))[1]))
    wanted = [min(1.0, max(0.0, float(transform.transform((end.x, end.y))[1]))) for end in ordered]
    for end, place in zip(ordered, spread(wanted, size * 1.3 / (height * _POINTS_PER_INCH)), strict=True):
        axes.annotate(
            words(end.name, most),
            xy=(end.x, end.y),
            xytext=(1.035, place),
            textcoords="axes fraction",
            va="center",
            ha="left",
            fontsize=size,
            fontweight="bold" if end.heavy else "normal",
            color=end.colour,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": end.colour, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 2},
        )


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Sorted places between 0 and 1, moved to stand `gap` apart; those that touch stay centred where they were."""
    blocks: list[list[float]] = []
    for place in places:
        blocks.append([place])
        while len(blocks) > 1 and _start(blocks[-2], gap) + len(blocks[-2]) * gap > _start(blocks[-1], gap):
            last = blocks.pop()
            blocks[-1] += last
    return [_start(block, gap) + index * gap for block in blocks for index in range(len(block))]


def _start(block: list[float], gap: float) -> float:
    """Where a block of labels begins so that it is centred on what it names, within the panel if it can be."""
    height = (len(block) - 1) * gap
    return max(0.0, min(1.0 - height, sum(block) / len(block) - height / 2))


def wrapped(text: str, characters: int) -> str:
    """Text in as few lines as fit, the lines as even as they can be."""
    lines = len(textwrap.wrap(text, characters))
    while characters > 20 and len(textwrap.wrap(text, characters - 1)) == lines:
        characters -= 1
    return textwrap.fill(text, characters)


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _large(value: float) -> str:
    return f"{value:,.0f}" if value < 1e6 else f"{value / 1e6:,.4g}M" if value < 1e9 else f"{value:.0e}"
