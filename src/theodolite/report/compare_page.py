"""The page of a comparison: one HTML file that needs nothing beside it, what it shows first."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from theodolite.report import compare_plots
from theodolite.report.compare_table import tables
from theodolite.report.compare_words import sentences
from theodolite.report.figures import plain, tokens
from theodolite.report.files import needs, resource, write_whole

Result = dict[str, Any]

_PICTURES: dict[str, tuple[Callable[[Any, Result], bool], str, str]] = {
    "length": (
        compare_plots.by_length,
        "By length",
        "Windows of each length, every one read on its own; bars are 95 % intervals over seeds. A line that leaves the "
        "panel goes on rising.",
    ),
    "position": (
        compare_plots.by_position,
        "By position",
        "The mean loss at each place in rows of the longest length, over rows and seeds.",
    ),
    "gain": (
        compare_plots.by_gain,
        "What far context is worth",
        "How much less the last tokens of a window cost with all of it before them than with the training length "
        "alone. Below 0 what is far does harm.",
    ),
    "cost": (
        compare_plots.by_cost,
        "What it costs",
        "Speed is that of the quickest run of each policy. Memory is counted: what the forward of a step keeps for its "
        "backward.",
    ),
    "step": (compare_plots.by_step, "Training", "A line for each seed."),
}


class Picture(NamedTuple):
    """A picture as a data address."""

    address: str
    title: str
    caption: str


def write_comparison_page(result: Result, path: str | Path) -> Path:
    """Write the page of a comparison's result, whole or not at all.

    Raises:
        ImportError: jinja2 or matplotlib is missing.
    """
    with needs("jinja2", "to write the page"):
        from jinja2 import Environment, StrictUndefined
    # Every name comes from a file or a command line: all of it is escaped.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["plain"] = plain
    html = environment.from_string(resource("compare.html.j2")).render(
        result=result,
        css=resource("report.css"),
        tokens=tokens,
        sentences=sentences(result),
        tables=tables(result),
        pictures=list(_pictures(result)),
        details=_details(result),
    )
    return write_whole(Path(path), html.encode("utf-8", "replace"))


def draw_comparison(result: Result, folder: str | Path) -> Path:
    """Write `compare.png`, for a README, into `folder`.

    Raises:
        ImportError: matplotlib is missing.
    """
    drawn = compare_plots.render(result, compare_plots.overview, kind="png")
    return write_whole(Path(folder) / "compare.png", drawn or b"")


def _pictures(result: Result) -> Iterator[Picture]:
    for draw, title, caption in _PICTURES.values():
        svg = compare_plots.render(result, draw)
        if svg is not None:
            yield Picture("data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii"), title, caption)


def _details(result: Result) -> list[tuple[str, str]]:
    settings, machine = result["settings"], result["machine"]
    size, training = settings["size"], settings["training"]
    return [
        ("data", result["data"]["name"]),
        ("model", f"{size['num_layers']} layers of {size['hidden_size']} channels, {size['num_heads']} heads"),
        (
            "training",
            f"{training['steps']:,} steps of {training['rows']} rows of {training['length']:,} tokens, learning rate "
            f"{training['lr']:g}, {len(result['seeds'])} seeds",
        ),
        ("test", f"{settings['rows']} rows of {result['lengths'][-1]:,} tokens"),
        (
            "machine",
            f"{machine['device']}, {machine['processes']} process(es) of {machine['threads']} threads, precision "
            f"{machine['precision']}, torch {machine['torch']}",
        ),
    ]
