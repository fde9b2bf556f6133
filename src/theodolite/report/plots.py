"""What each picture shows. Every function draws into an empty figure and says whether there was anything to draw."""

from __future__ import annotations

import math
from typing import Any

from theodolite.report import sentences
from theodolite.report.figures import Summary, recall_lengths, tokens
from theodolite.report.heatmaps import recall
from theodolite.report.panels import (
    Axes,
    End,
    doubling_axis,
    heading,
    label_ends,
    legend,
    length_axis,
    log_axis,
    mark_trained,
    percent_axis,
    title,
)
from theodolite.report.style import MUTED, WINDOW, line_styles, words

__all__ = ["overview", "perplexity", "reach", "recall", "wavelengths"]

Figure = Any
_WIDE, _NARROW = 8.4, 3.9


def reach(figure: Figure, summary: Summary, narrow: bool) -> bool:
    """Copying accuracy by distance: the spread prefill, and the far sweep where one was run."""
    wanted = [key for key in ("reach", "far_reach") if any(s[key] for s in summary["scalings"])]
    if not wanted:
        return False
    width = _NARROW if narrow else _WIDE
    rows, columns = (len(wanted), 1) if narrow else (1, len(wanted))
    figure.set_size_inches(width, (2.9 * rows + 1.2) if narrow else 4.3)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, key in zip(panels, wanted, strict=True):
        _reach_lines(axes, summary, key)
        longest = max(p["distance"] for s in summary["scalings"] for p in s[key])
        if key == "reach":
            length_axis(axes, max(longest, summary["trained_length"]), "tokens back")
            title(axes, "Spread over the whole length", width=width / columns, above=18, size=9.5)
        else:
            shortest = min(p["distance"] for s in summary["scalings"] for p in s[key])
            doubling_axis(axes, shortest, max(longest, summary["trained_length"]), "tokens back (log scale)")
            title(axes, "Far sweep: positions skipped", width=width / columns, above=18, size=9.5)
        percent_axis(axes, "tokens copied right")
        mark_trained(axes, summary["trained_length"])
    legend(figure, panels[0], width)
    heading(figure, sentences.reach_title(summary), width)
    return True


def perplexity(figure: Figure, summary: Summary, narrow: bool) -> bool:
    """Perplexity by band of positions, with intervals, beside the truncated window."""
    width, height = (_NARROW, 4.4) if narrow else (_WIDE, 4.6)
    figure.set_size_inches(width, height)
    axes = figure.subplots()
    if not _perplexity_panel(axes, summary, height=height - 1.4):
        return False
    heading(figure, sentences.perplexity_title(summary), width)
    return True


def wavelengths(figure: Figure, summary: Summary, narrow: bool) -> bool:
    """Wavelength of every pair before and after, and by how much each scaling stretches it."""
    if not any(any(s["inv_freq"]["plain"]) for s in summary["scalings"]):
        return False
    width = _NARROW if narrow else _WIDE
    rows, columns = (2, 1) if narrow else (1, 2)
    figure.set_size_inches(width, 7.2 if narrow else 4.3)
    left, right = figure.subplots(rows, columns, squeeze=False).flat
    styles = line_styles([s["name"] for s in summary["scalings"]], summary["recommendation"]["name"])
    seen: list[float] = []
    for scaling in summary["scalings"]:
        pairs = zip(scaling["inv_freq"]["plain"], scaling["inv_freq"]["scaled"], strict=True)
        turning = [(index, a, b) for index, (a, b) in enumerate(pairs) if a > 0 and b > 0]
        index = [i for i, _, _ in turning]
        turns = [2 * math.pi / scaled for _, _, scaled in turning]
        seen += turns
        style = styles[scaling["name"]] | {"markersize": 2.6}
        left.plot(index, turns, label=words(sentences.label(scaling["name"]), 22), **style)
        right.plot(index, [plain / scaled for _, plain, scaled in turning], **style)
    log_axis(left, min(seen), max([*seen, summary["trained_length"]]), "tokens for a full turn")
    left.axhline(summary["trained_length"], color=MUTED, linewidth=1.1, linestyle=(0, (1.2, 2.2)), zorder=2)
    left.annotate(
        f"trained length {tokens(summary['trained_length'])}",
        xy=(0, summary["trained_length"]),
        xycoords=("axes fraction", "data"),
        xytext=(4, 3),
        textcoords="offset points",
        fontsize=8.5,
        color=MUTED,
    )
    right.set_ylim(bottom=min(0.95, right.get_ylim()[0]))
    right.set_ylabel("stretched, times")
    for axes, text in ((left, "Wavelength"), (right, "Stretch")):
        axes.set_xlabel("pair of channels, fastest first")
        title(axes, text, width=width / columns, above=6, size=9.5)
    legend(figure, left, width)
    heading(figure, sentences.wavelengths_title(summary), width)
    return True


def overview(figure: Figure, summary: Summary, narrow: bool) -> bool:
    """Two panels for a README's first screen: what is lost by position, and what is still found."""
    width, height = 10.0, 5.0
    figure.set_size_inches(width, height)
    left, right = figure.subplots(1, 2)
    told = _perplexity_panel(left, summary, height=height - 1.9)
    title(left, sentences.perplexity_title(summary), width=width / 2 - 0.6, above=20, size=11)
    ends = _recall_lines(right, summary)
    if ends:
        title(right, sentences.recall_title(summary), width=width / 2 - 0.6, above=20, size=11)
        right.set_ylabel("tokens recalled")
    else:
        ends = _reach_lines(right, summary, "reach")
        title(right, sentences.reach_title(summary), width=width / 2 - 0.6, above=20, size=11)
    if not ends and not told:
        return False
    length_axis(right, max([*(end.x for end in ends), summary["to"]]), "tokens back")
    percent_axis(right, "tokens recalled" if recall_lengths(summary) else "tokens copied right")
    mark_trained(right, summary["trained_length"])
    label_ends(right, ends, height=height - 1.9)
    if not told:
        left.remove()
    if not ends:
        right.remove()
    heading(
        figure,
        f"{words(summary['model'], 48)}, trained to {tokens(summary['trained_length'])} tokens, "
        f"surveyed to {tokens(summary['to'])}",
        width,
        bold=False,
    )
    return True


def _reach_lines(axes: Axes, summary: Summary, key: str) -> list[End]:
    """One line per scaling; returns where the lines end."""
    chosen = summary["recommendation"]["name"]
    styles = line_styles([s["name"] for s in summary["scalings"]], chosen)
    ends = []
    for scaling in summary["scalings"]:
        points = sorted(scaling[key], key=lambda point: point["distance"])
        # A scaling without points still has its place in the legend.
        name, style = sentences.label(scaling["name"]), styles[scaling["name"]]
        axes.plot([p["distance"] for p in points], [p["accuracy"] for p in points], label=words(name, 22), **style)
        if points:
            heavy = scaling["name"] in {"none", chosen}
            ends.append(End(points[-1]["distance"], points[-1]["accuracy"], name, style["color"], heavy))
    return ends


def _recall_lines(axes: Axes, summary: Summary) -> list[End]:
    """Recall by distance at the longest length, with what can be guessed; returns where the lines end."""
    lengths, chosen = recall_lengths(summary), summary["recommendation"]["name"]
    styles = line_styles([s["name"] for s in summary["scalings"]], chosen)
    ends, alone = [], []
    for scaling in summary["scalings"]:
        cells = [cell for cell in scaling["recall"] if lengths and cell["length"] == lengths[-1]]
        if not cells:
            continue
        alone += [cell["accuracy_alone"] for cell in cells]
        distances = sorted({cell["distance"] for cell in cells})
        means = []
        for distance in distances:
            here = [cell["accuracy"] for cell in cells if cell["distance"] == distance]
            means.append(sum(here) / len(here))
        style = styles[scaling["name"]]
        axes.plot(distances, means, **style)
        heavy = scaling["name"] in {"none", chosen}
        ends.append(End(distances[-1], means[-1], sentences.label(scaling["name"]), style["color"], heavy))
    if alone:
        guess = sum(alone) / len(alone)
        axes.axhline(guess, color=WINDOW, linewidth=1.3, linestyle=(0, (5, 3)), zorder=2)
        ends.append(End(max(end.x for end in ends), guess, "guessed", WINDOW))
    return ends


def _perplexity_panel(axes: Axes, summary: Summary, *, height: float) -> bool:
    chosen = summary["recommendation"]["name"]
    styles = line_styles([s["name"] for s in summary["scalings"]], chosen)
    lines = [(s["name"], sentences.label(s["name"]), s["bands"], styles[s["name"]]) for s in summary["scalings"]]
    window = summary["truncated_window"]
    if window:
        dashed = {"color": WINDOW, "linestyle": (0, (5, 3)), "linewidth": 2.0, "zorder": 2.5}
        lines.append(("", "truncated", window["bands"], dashed))
    lines = [line for line in lines if line[2]]
    if not lines:
        return False
    ends, low, high, last = [], math.inf, 0.0, summary["to"]
    for key, name, bands, style in lines:
        bands = sorted(bands, key=lambda band: band["from"])
        middles = [(band["from"] + band["to"]) / 2 for band in bands]
        values = [band["perplexity"] for band in bands]
        bounds = [[max(band["interval"][side], 1e-9) for band in bands] for side in (0, 1)]
        if len(lines) <= 3 or key in {"none", chosen, ""}:
            axes.fill_between(middles, *bounds, color=style["color"], alpha=0.12, linewidth=0, zorder=1.5)
        axes.plot(middles, values, **style)
        low, high = min(low, *values), max(high, *values)
        last = max(last, bands[-1]["to"])
        ends.append(End(middles[-1], values[-1], name, style["color"], key in {"none", chosen}))
    length_axis(axes, last, "position in the text, tokens")
    log_axis(axes, low, high, "perplexity (log scale)")
    mark_trained(axes, summary["trained_length"])
    label_ends(axes, ends, height=height)
    return True
