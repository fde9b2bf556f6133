"""Pictures of a comparison: loss against length, by position, in training, and what it costs."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

from theodolite.report.compare_words import main_measure, quality, unit
from theodolite.report.figures import plain, short_tokens
from theodolite.report.files import needs
from theodolite.report.panels import End, doubling_axis, heading, label_ends, length_axis, mark_trained, percent_axis
from theodolite.report.style import MUTED, drawing, words

Result = dict[str, Any]
Axes = Any
Figure = Any

# After Okabe and Ito and Tol, which stay apart for colour-blind readers.
_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#b8588f", "#c98a00"),
    *("#7f5aa2", "#3a9bd0", "#a3423f", "#5d7d2b", "#626970"),
)
_MARKERS = "os^DvPX<>h"
_DPI = 150


def render(result: Result, draw: Callable[[Figure, Result], bool], *, kind: str = "svg") -> bytes | None:
    """A picture as bytes, the same result as the same bytes; None where there is nothing to draw.

    Raises:
        ImportError: matplotlib is missing.
    """
    with needs("matplotlib", "to draw pictures"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    with drawing():
        figure = Figure(figsize=(8.4, 4.6), dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        if not draw(figure, result):
            return None
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return buffer.getvalue()


def by_length(figure: Figure, result: Result) -> bool:
    """The loss of windows (or the share of rows right) by length, with intervals."""
    return _lengths(figure.subplots(), result)


def by_position(figure: Figure, result: Result) -> bool:
    """The loss by position in rows of the longest length."""
    axes, ends = figure.subplots(), []
    for entry in result["by_position"]:
        middles = [(a + b) / 2 for a, b in zip(entry["edges"], entry["edges"][1:], strict=False)]
        style = _style(result, entry["policy"])
        axes.plot(middles, entry["nats"], **style | {"marker": None})
        ends.append(End(middles[-1], entry["nats"][-1], entry["policy"], style["color"]))
    if not ends:
        return False
    _positions(axes, result["lengths"][-1])
    axes.set_ylabel("nats a token")
    _fit(axes, [nats for entry in result["by_position"] for nats in entry["nats"]])
    mark_trained(axes, result["training_length"])
    label_ends(axes, _inside(axes, ends), height=3.4)
    return True


def by_cost(figure: Figure, result: Result) -> bool:
    """Speed and memory of training against the loss at the training length and at the longest."""
    cells: dict[str, dict[str, Any]] = {}
    for cell in result["cells"]:
        best = cells.get(cell["policy"])
        if best is None or cell["tokens_per_second"] > best["tokens_per_second"]:
            cells[cell["policy"]] = cell
    at = quality(result, result["training_length"])
    if not at:
        return False
    speed, memory = figure.subplots(1, 2)
    for axes, field, one, label in (
        (speed, "tokens_per_second", 1e3, "thousand tokens a second, in training"),
        (memory, "kept_bytes", 2**20, "kept for the backward of a step, MiB"),
    ):
        for name, found in at.items():
            x, style = cells[name][field] / one, _style(result, name)
            axes.plot([x], [found["mean"]], **style | {"linestyle": "none", "markersize": 8})
            axes.annotate(words(name, 18), (x, found["mean"]), xytext=(6, 4), textcoords="offset points", fontsize=8)
        axes.set_xlabel(label)
        axes.margins(x=0.25, y=0.12)
    speed.set_ylabel(f"{unit(result)} at the training length")
    return True


def by_gain(figure: Figure, result: Result) -> bool:
    """What the text past the training length is worth, by length."""
    axes, ends = figure.subplots(), []
    for name in dict.fromkeys(entry["policy"] for entry in result["gain"]):
        mine = [entry for entry in result["gain"] if entry["policy"] == name]
        style = _style(result, name)
        lengths, means = [e["length"] for e in mine], [e["mean"] for e in mine]
        axes.errorbar(lengths, means, yerr=_halves(mine), **style, capsize=2)
        ends.append(End(lengths[-1], means[-1], name, style["color"]))
    if not ends:
        return False
    axes.axhline(0, color=MUTED, linewidth=0.8)
    doubling_axis(axes, result["lengths"][0], result["lengths"][-1], "tokens of context (log scale)")
    axes.set_ylabel("nats gained by all context over the trained length's")
    label_ends(axes, ends, height=3.4)
    return True


def by_step(figure: Figure, result: Result) -> bool:
    """The training loss, its seeds one line each."""
    axes, names = figure.subplots(), []
    shown: list[float] = []
    for cell in result["cells"]:
        style = _style(result, cell["policy"]) | {"marker": None, "linewidth": 1.0, "alpha": 0.8}
        label = words(cell["policy"], 22) if cell["policy"] not in names else None
        names.append(cell["policy"])
        axes.plot([step for step, _ in cell["curve"]], [loss for _, loss in cell["curve"]], **style, label=label)
        shown += [loss for _, loss in cell["curve"]]
    if not shown:
        return False
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats a token")
    axes.legend(loc="upper right", fontsize=8, ncols=2)
    return True


def overview(figure: Figure, result: Result) -> bool:
    """For a README: loss against length, and by position where the data are text."""
    figure.set_size_inches(11.0, 4.6)
    left, right = figure.subplots(1, 2)
    if not _lengths(left, result):
        return False
    if result["by_position"]:
        for entry in result["by_position"]:
            middles = [(a + b) / 2 for a, b in zip(entry["edges"], entry["edges"][1:], strict=False)]
            right.plot(middles, entry["nats"], **_style(result, entry["policy"]) | {"marker": None})
        _positions(right, result["lengths"][-1])
        _fit(right, [nats for entry in result["by_position"] for nats in entry["nats"]])
        right.set_ylabel("nats a token")
        mark_trained(right, result["training_length"])
    else:
        right.remove()
    seeds = len(result["seeds"])
    heading(
        figure,
        f"Trained at {result['training_length']:,} tokens of {plain(result['data']['name'])}, {seeds} "
        f"seed{'s' * (seeds > 1)} each",
        11.0,
    )
    return True


def _lengths(axes: Axes, result: Result) -> bool:
    ends, values = [], []
    measure = main_measure(result)
    for name in result["policies"]:
        mine = [q for q in result["quality"] if (q["policy"], q["measure"]) == (name, measure)]
        if not mine:
            continue
        style = _style(result, name)
        lengths, means = [q["length"] for q in mine], [q["mean"] for q in mine]
        axes.errorbar(lengths, means, yerr=_halves(mine), **style, capsize=2)
        ends.append(End(lengths[-1], means[-1], name, style["color"]))
        values += [end for q in mine for end in q["interval"] or (q["mean"],)]
    if not ends:
        return False
    doubling_axis(axes, result["lengths"][0], result["lengths"][-1], "tokens of a window (log scale)")
    if measure == "exact":
        percent_axis(axes, "rows answered right")
    else:
        axes.set_ylabel("nats a token")
        _fit(axes, values)
    mark_trained(axes, result["training_length"])
    label_ends(axes, _inside(axes, ends), height=3.4)
    return True


def _style(result: Result, name: str) -> dict[str, Any]:
    index = result["policies"].index(name)
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "markersize": 4.5,
        "linewidth": 1.8,
        "linestyle": "-" if index < len(_COLOURS) else (0, (5, 1.6)),
    }


def _halves(entries: list[dict[str, Any]]) -> list[float] | None:
    """Half of each interval, or nothing where there is but one seed."""
    if any(entry["interval"] is None for entry in entries):
        return None
    return [(entry["interval"][1] - entry["interval"][0]) / 2 for entry in entries]


def _positions(axes: Axes, longest: int) -> None:
    if longest >= 4096:
        length_axis(axes, longest, "position")
        return
    step = max(1, longest // 8)
    axes.set_xlim(0, longest * 1.01)
    axes.set_xticks(range(0, longest + 1, step), [short_tokens(n) if n else "0" for n in range(0, longest + 1, step)])
    axes.set_xlabel("position")


def _fit(axes: Axes, values: list[float]) -> None:
    """Show all that is of interest: a model that is lost would press the others onto a line."""
    values = sorted(value for value in values if math.isfinite(value))
    low, high = values[0], values[-1]
    middle = values[len(values) // 2]
    top = min(high, low + 6 * max(middle - low, 0.1))
    axes.set_ylim(low - 0.06 * (top - low) - 0.01, top + 0.06 * (top - low) + 0.01)


def _inside(axes: Axes, ends: list[End]) -> list[End]:
    """Ends of lines, held to the panel where a line leaves it."""
    top = axes.get_ylim()[1]
    return [end._replace(y=min(end.y, top)) for end in ends]
