"""What a search tried and found, in one picture: the trials, the frequency maps, and recall by distance."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from theodolite.report.files import needs, write_whole
from theodolite.report.panels import heading, length_axis, log_axis, mark_trained, percent_axis, title
from theodolite.report.style import INK, MUTED, colour, drawing, words
from theodolite.survey.found import FOUND

FILE = "search.png"
_FOUND_COLOUR = "#c2185b"
_SPACES = {"yarn": "#7fb2d6", "pairs": "#d6a27f"}
_WIDE, _HIGH, _DPI = 12.6, 4.6, 150

Result = dict[str, Any]
Axes = Any


def draw_search(result: Result, folder: str | Path) -> Path:
    """Write `search.png` of a search's result into `folder`; the same result gives the same bytes.

    Raises:
        ImportError: matplotlib is missing.
    """
    with needs("matplotlib", "to draw pictures"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    with drawing():
        figure = Figure(figsize=(_WIDE, _HIGH), dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        trials, maps, recall = figure.subplots(1, 3)
        draw_trials(trials, result)
        draw_maps(maps, result)
        draw_recall(recall, result)
        won = "found a better map" if result["won"] else "found no map that is better beyond doubt"
        heading(figure, f"{result['model']} to {result['to']:,} tokens: the search {won}", _WIDE)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return write_whole(Path(folder) / FILE, buffer.getvalue())


def draw_trials(axes: Axes, result: Result) -> None:
    """Every map that was tried: what it loses on short text against how badly it copies."""
    named = [trial for trial in result["trials"] if trial["space"] == "named"]
    for space, shade in _SPACES.items():
        tried = [trial for trial in result["trials"] if trial["space"] == space]
        if tried:
            label = f"{space}: {len(tried)} tried"
            axes.plot(*_places(tried), "o", color=shade, markersize=3.5, alpha=0.8, label=label, zorder=2)
    winner = [trial for trial in result["trials"] if trial["name"] == result["winner"]["name"]]
    axes.plot(*_places(winner), "*", color=_FOUND_COLOUR, markersize=14, label=FOUND, zorder=5)
    # The model as shipped cannot copy from far, and would press all others together.
    for trial in named[1:] or named:
        x, y = trial["short"], trial["copying"]
        axes.plot([x], [y], "D", color=colour(trial["name"]), markersize=5.5, zorder=4)
        axes.annotate(words(trial["name"], 20), (x, y), xytext=(5, 4), textcoords="offset points", fontsize=8)
    shown = [trial for trial in result["trials"] if trial["space"] != "named"] + (named[1:] or named)
    _fit(axes, shown)
    axes.set_xlabel("short text, nats a token")
    axes.set_ylabel("copying from all distances, nats a token")
    axes.legend(loc="upper right", fontsize=8)
    title(axes, "What was tried", width=_WIDE / 3)


def draw_maps(axes: Axes, result: Result) -> None:
    """The divisor of each pair's own frequency, of the map found and of its rivals."""
    own = result["winner"]["shipped_inv_freq"]
    by_name = {trial["name"]: trial for trial in result["trials"]}
    highest = 1.0
    for name, label in ((result["winner"]["name"], FOUND), *((rival, rival) for rival in result["rivals"])):
        divisors = [before / after for before, after in zip(own, by_name[name]["inv_freq"], strict=True) if after > 0]
        highest = max(highest, *divisors)
        axes.plot(divisors, **_line(label), marker=None)
        factor = by_name[name]["attention_factor"]
        axes.plot([], [], **_line(label), label=f"{words(label, 20)}, amplitude {factor:.3f}")
    log_axis(axes, 1.0, max(highest, 1.5), "divisor of the frequency")
    axes.set_xlabel("pair of channels, fastest first")
    axes.legend(loc="upper left", fontsize=8)
    title(axes, "Frequency maps", width=_WIDE / 3)


def draw_recall(axes: Axes, result: Result) -> None:
    """Recall by distance in the last full passes, on text that the search did not see."""
    last = result["confirmed"]["lengths"][-1]
    for name in (FOUND, *result["rivals"]):
        distances = [band["distance"] for band in last["bands"]]
        line = _line(name)
        axes.plot(
            distances,
            [band["accuracy"][name] for band in last["bands"]],
            **line,
            marker="o",
            markersize=4,
            label=f"{words(name, 20)}, {last['recall'][name]:.1%}",
        )
    length_axis(axes, max(last["length"], result["trained_length"]), "tokens back")
    percent_axis(axes, "tokens recalled")
    mark_trained(axes, result["trained_length"])
    axes.legend(loc="lower left", fontsize=8)
    title(axes, f"Full passes over {last['length']:,} unseen tokens", width=_WIDE / 3)


def _line(name: str) -> dict[str, Any]:
    if name == FOUND:
        return {"color": _FOUND_COLOUR, "linewidth": 2.4, "zorder": 4}
    return {"color": colour(name) if name != "none" else INK, "linewidth": 1.6, "zorder": 3}


def _places(trials: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    return [trial["short"] for trial in trials], [trial["copying"] for trial in trials]


def _fit(axes: Axes, trials: list[dict[str, Any]]) -> None:
    """Limits that show the better nine tenths: a few steps of a search go far astray."""
    for values, limit in zip(_places(trials), (axes.set_xlim, axes.set_ylim), strict=True):
        ordered = sorted(values)
        low, high = ordered[0], ordered[int(0.9 * (len(ordered) - 1))]
        room = 0.12 * (high - low) or 0.1
        limit(low - room, high + 2 * room)
    axes.tick_params(colors=MUTED)
