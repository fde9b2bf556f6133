"""The numbers of a survey as tables of text, for the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from theodolite.report.figures import (
    Band,
    Scaling,
    Summary,
    band_edges,
    cost,
    distance_reached,
    inside_and_last,
    length_held,
    meanings,
    percent,
    perplexity,
    perplexity_between,
    recall_at,
    recall_columns,
    recall_lengths,
    short_tokens,
    span,
    tokens,
)
from theodolite.report.sentences import AS_SHIPPED


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A value, with what belongs in small print below it."""

    text: str
    small: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row by name; `kind` is `best`, `window` or nothing."""

    name: str
    cells: Sequence[Cell]
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with a caption above and heads for its rows and columns."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Row]
    note: str = ""


def name_of(scaling: str) -> str:
    """A scaling's name in full."""
    return AS_SHIPPED if scaling == "none" else scaling


def at_a_glance(summary: Summary) -> Table:
    """One row per scaling, and the truncated window."""
    recalls = recall_columns(summary)
    last = max((edges for edges in band_edges(summary) if edges[1] > summary["trained_length"]), default=None)
    within = max((end for _, end in band_edges(summary) if end <= summary["trained_length"]), default=None)
    heads = ["scaling", "reaches", "holds to", *([f"perplexity\nat {span((0, within))}"] if within else [])]
    heads += [f"perplexity\nat {span(last)}"] if last else []
    heads += [f"recall\nat {short_tokens(length)}" for length in recalls] + ["cost on\nshort text"]
    rows = []
    for scaling in summary["scalings"]:
        inside, _ = inside_and_last(summary, scaling)
        texts = [distance_reached(scaling), length_held(scaling), *([perplexity(inside)] if within else [])]
        texts += [perplexity(_value(scaling["bands"], last))] if last else []
        texts += [percent(recall_at(scaling, length)) for length in recalls]
        texts.append(cost(scaling["short_cost"] and scaling["short_cost"]["ratio"]))
        rows.append(_row(summary, scaling, [Cell(text=text) for text in texts]))
    window = summary["truncated_window"]
    if window:
        texts = ["–", "–"]
        texts += [perplexity(perplexity_between(window["bands"], 0, within))] if within else []
        texts += [perplexity(_value(window["bands"], last))] if last else []
        texts += ["–"] * (len(recalls) + 1)
        rows.append(_window_row(window, [Cell(text=text) for text in texts]))
    return Table(
        caption="Every scaling at a glance",
        heads=heads,
        rows=rows,
        note=". ".join(["–: not measured", *filter(None, [meanings(summary)])]) + ".",
    )


def by_band(summary: Summary) -> list[Table]:
    """Perplexity by position, cumulative, and the gain over the truncated window."""
    edges = band_edges(summary)
    if not edges:
        return []
    heads = ["scaling", *(span(edge) for edge in edges)]
    passed = [scaling for scaling in summary["scalings"] if scaling["bands"]]
    window = summary["truncated_window"]
    rows = [_row(summary, s, [_perplexity_cell(_band(s["bands"], edge)) for edge in edges]) for s in passed]
    if window:
        rows.append(_window_row(window, [_perplexity_cell(_band(window["bands"], edge)) for edge in edges]))
    tables = [Table(caption="Perplexity by position, with its interval", heads=heads, rows=rows)]
    rows = []
    for scaling in passed:
        values = [_band(scaling["bands"], edge) for edge in edges]
        cells = [Cell(text=perplexity(band["cumulative"] if band else None, 2)) for band in values]
        rows.append(_row(summary, scaling, cells))
    if rows:
        tables.append(Table(caption="Perplexity of everything up to the end of the band", heads=heads, rows=rows))
    gained = [e for e in edges if any((_band(s["bands"], e) or {}).get("gain_over_window") for s in passed)]
    if gained:
        rows = [_row(summary, s, [_gain_cell(_band(s["bands"], edge)) for edge in gained]) for s in passed]
        note = "Nats per token. Above 0, the far context helps; below 0, truncation predicts better."
        heads = ["scaling", *(span(edge) for edge in gained)]
        tables.append(Table(caption="Gain over the truncated window", heads=heads, rows=rows, note=note))
    return tables


def reach(summary: Summary) -> list[Table]:
    """Copying by distance, both instruments."""
    tables = []
    for key, caption in (("reach", "Reach by distance, spread"), ("far_reach", "Reach by distance, far sweep")):
        distances = sorted({point["distance"] for s in summary["scalings"] for point in s[key]})
        rows = []
        for scaling in summary["scalings"]:
            points = {point["distance"]: point for point in scaling[key]}
            cells = [
                Cell(text=percent(points[d]["accuracy"]), small=f"{points[d]['nll']:.2f}") if d in points else _NONE
                for d in distances
            ]
            if points:
                rows.append(_row(summary, scaling, cells))
        if rows:
            heads = ["scaling", *(tokens(distance) for distance in distances)]
            note = "Share of tokens copied right, and below it their mean negative log-likelihood in nats per token."
            tables.append(Table(caption=caption, heads=heads, rows=rows, note=note))
    return tables


def recall(summary: Summary) -> list[Table]:
    """Recall by length and depth, one table per scaling that has a pass."""
    tables = []
    for scaling in summary["scalings"]:
        depths = sorted({cell["depth"] for cell in scaling["recall"]})
        rows = []
        for length in recall_lengths(summary):
            here = {cell["depth"]: cell for cell in scaling["recall"] if cell["length"] == length}
            cells = [_recall_cell(here[depth]) if depth in here else _NONE for depth in depths]
            if here:
                rows.append(Row(name=tokens(length), cells=cells))
        if rows:
            heads = ["tokens read", *(f"depth {depth:.2g}" for depth in depths)]
            note = "Accuracy and NLL in nats per token; in brackets, the same with nothing read before."
            caption = f"Recall, {name_of(scaling['name'])}"
            tables.append(Table(caption=caption, heads=heads, rows=rows, note=note))
    return tables


def passkey(summary: Summary) -> list[Table]:
    """Passkey cells, where they were asked for."""
    cells = summary["passkey"] or []
    depths = sorted({cell["depth"] for cell in cells})
    by_row: dict[tuple[str, int], dict[float, Any]] = {}
    for cell in cells:
        by_row.setdefault((cell["scaling"], cell["length"]), {})[cell["depth"]] = cell
    rows = []
    for (scaling, length), here in by_row.items():
        made = [
            Cell(text="found" if here[depth]["exact"] else "lost", small=f"{here[depth]['nll']:.2f}")
            if depth in here
            else _NONE
            for depth in depths
        ]
        rows.append(Row(name=f"{name_of(scaling)} at {tokens(length)}", cells=made))
    heads = ["scaling and length", *(f"depth {depth:.2g}" for depth in depths)]
    note = "Whether every digit of the key was ranked first, and below it the NLL in nats per digit."
    return [Table(caption="Passkey", heads=heads, rows=rows, note=note)] if rows else []


def parameters(summary: Summary) -> Table:
    """What each scaling is, exactly."""
    rows = []
    for scaling in summary["scalings"]:
        lengths = [tokens(one["length"]) for one in scaling["passes"] if one["length"] is not None]
        passes = f"at {', '.join(lengths)}" if lengths else "one" if scaling["passes"] else "none"
        # A map of distances is no matter of rope_parameters, which the model keeps.
        relative = scaling.get("relative")
        head = "relative" if relative else "rope_parameters"
        cells = [Cell(text=passes), Cell(text=f"{head}: {json.dumps(scaling[head], ensure_ascii=False)}")]
        rows.append(_row(summary, scaling, cells))
    return Table(caption="What each scaling is", heads=["scaling", "full passes", "exactly"], rows=rows)


_NONE = Cell(text="–")


def _row(summary: Summary, scaling: Scaling, cells: Sequence[Cell]) -> Row:
    best = scaling["name"] == summary["recommendation"]["name"]
    return Row(name=name_of(scaling["name"]), cells=cells, kind="best" if best else "")


def _window_row(window: Any, cells: Sequence[Cell]) -> Row:
    return Row(name=f"as shipped, window of {tokens(window['window'])}", cells=cells, kind="window")


def _band(bands: Sequence[Band], edges: tuple[int, int]) -> Band | None:
    return next((band for band in bands if (band["from"], band["to"]) == edges), None)


def _value(bands: Sequence[Band], edges: tuple[int, int]) -> float | None:
    band = _band(bands, edges)
    return band["perplexity"] if band else None


def _perplexity_cell(band: Band | None) -> Cell:
    if band is None:
        return _NONE
    low, high = band["interval"]
    return Cell(text=perplexity(band["perplexity"], 2), small=f"{perplexity(low)} to {perplexity(high)}")


def _gain_cell(band: Band | None) -> Cell:
    gain = band["gain_over_window"] if band else None
    if gain is None:
        return _NONE
    return Cell(text=f"{gain['nats']:+.3f}", small=f"{gain['interval'][0]:+.3f} to {gain['interval'][1]:+.3f}")


def _recall_cell(cell: Any) -> Cell:
    text = f"{percent(cell['accuracy'])} ({percent(cell['accuracy_alone'])})"
    return Cell(text=text, small=f"{cell['nll']:.2f} ({cell['nll_alone']:.2f})")
