"""Recall as one heat map per scaling: length by depth."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from theodolite.report import sentences
from theodolite.report.figures import Scaling, Summary, percent, recall_lengths, short_tokens
from theodolite.report.panels import heading
from theodolite.report.style import INK, MUTED, words

_RAMP = ("#ffffff", "#d3e4f3", "#85b8dc", "#3381ba", "#08386b")


def recall(figure: Any, summary: Summary, narrow: bool) -> bool:
    """Share of tokens recalled by length and depth; white is what can be guessed with nothing read."""
    shown = [scaling for scaling in summary["scalings"] if scaling["recall"]]
    if not shown:
        return False
    lengths = recall_lengths(summary)
    depths = sorted({round(cell["depth"], 4) for scaling in shown for cell in scaling["recall"]})
    columns = 1 if narrow else min(len(shown), 3 if len(shown) != 4 else 2)
    rows = math.ceil(len(shown) / columns)
    width = 3.9 if narrow else 8.4
    numbered = len(depths) <= (12 if columns < 3 else 9)
    figure.set_size_inches(width, rows * (0.27 * max(len(lengths), 2) + 0.85) + 0.9)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    alone = [cell["accuracy_alone"] for scaling in shown for cell in scaling["recall"]]
    floor = min(0.95, sum(alone) / len(alone))
    image = None
    for axes, scaling in zip(panels, shown, strict=False):
        image = _map(axes, scaling, lengths, depths, floor, summary["trained_length"], numbered=numbered)
    for axes in panels[len(shown) :]:
        axes.remove()
    for index, axes in enumerate(panels[: len(shown)]):
        if index % columns == 0:
            axes.set_ylabel("tokens read")
        if index + columns >= len(shown):
            axes.set_xlabel("depth of the passage (0 is the start)")
    if not numbered:
        bar = figure.colorbar(image, ax=panels[: len(shown)], shrink=0.8, pad=0.02)
        bar.set_ticks([floor, 1], labels=[f"{percent(floor)}\nguessed", "100%"])
    heading(figure, sentences.recall_title(summary), width)
    return True


def _map(
    axes: Any,
    scaling: Scaling,
    lengths: list[int],
    depths: list[float],
    floor: float,
    trained: int,
    *,
    numbered: bool,
) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    total, count = np.zeros((len(lengths), len(depths))), np.zeros((len(lengths), len(depths)))
    for cell in scaling["recall"]:
        place = lengths.index(cell["length"]), depths.index(round(cell["depth"], 4))
        total[place] += cell["accuracy"]
        count[place] += 1
    values = np.ma.masked_where(count == 0, total / np.maximum(count, 1))
    ramp = LinearSegmentedColormap.from_list("recall", _RAMP).with_extremes(bad="#eceef0")
    image = axes.imshow(values, cmap=ramp, vmin=floor, vmax=1, origin="lower", aspect="auto")
    axes.grid(False)
    axes.set_xticks(np.arange(-0.5, len(depths)), minor=True)
    axes.set_yticks(np.arange(-0.5, len(lengths)), minor=True)
    axes.grid(True, which="minor", color="#ffffff", linewidth=1)
    axes.tick_params(which="both", length=0)
    every = max(1, math.ceil(len(depths) / 9))
    axes.set_xticks(range(0, len(depths), every), [f"{depth:.2g}" for depth in depths[::every]], fontsize=8.5)
    axes.set_yticks(range(len(lengths)), [short_tokens(length) for length in lengths], fontsize=8.5)
    for spine in axes.spines.values():
        spine.set(visible=True, color=MUTED, linewidth=0.6)
    if numbered:
        dark = floor + 0.66 * (1 - floor)
        for (row, column), value in np.ndenumerate(values.filled(np.nan)):
            if not np.isnan(value):
                ink = "#ffffff" if value > dark else INK
                axes.text(column, row, f"{value * 100:.0f}", ha="center", va="center", fontsize=8.5, color=ink)
    within = sum(1 for length in lengths if length <= trained)
    if 0 < within < len(lengths):
        axes.axhline(within - 0.5, color=INK, linewidth=1.6)
    alone = [cell["accuracy_alone"] for cell in scaling["recall"]]
    axes.set_title(words(sentences.label(scaling["name"]), 22), fontsize=9.5)
    axes.set_title(f"guessed: {percent(sum(alone) / len(alone))}", loc="right", fontsize=8.5, fontweight="normal")
    return image
