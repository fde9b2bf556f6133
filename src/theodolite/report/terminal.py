"""The result on a terminal: one row per scaling, then what to take and what to paste."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from theodolite.report import schema
from theodolite.report.figures import (
    Band,
    Summary,
    band_edges,
    cost,
    distance_reached,
    length_held,
    meanings,
    percent,
    perplexity,
    perplexity_between,
    plain,
    recall_at,
    recall_columns,
    short_tokens,
    span,
    tokens,
)
from theodolite.report.files import needs

if TYPE_CHECKING:
    from rich.console import Console

Edges = tuple[int, int]
# Longer names of scalings are folded, and nothing of them is lost.
_NAME = 14
_BETWEEN = 2


def render(summary: Summary, console: Console) -> None:
    """Print a summary to a rich console, in as many columns as its width allows.

    Numbers are never broken or cut. Where the width is too small for every band of positions, neighbouring bands are
    shown as one (their perplexity is that of all their tokens).

    Raises:
        ValueError: the summary does not follow its schema.
        ImportError: rich is missing.
    """
    schema.validate(summary)
    with needs("rich", "to print tables"):
        from rich.text import Text

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), highlight=False)

    say(f"{plain(summary['model'])}: trained to {tokens(summary['trained_length'])} tokens", "bold")
    names = ", ".join(f"{plain(text['name'])} ({tokens(text['tokens'])} tokens)" for text in summary["texts"])
    say(f"surveyed to {tokens(summary['to'])}" + (f" on {names}" if names else ""))
    say("")
    groups = _groups_that_fit(summary, console.width)
    if groups is None:
        _print_lists(summary, say)
    else:
        console.print(_table(summary, groups))
    for note in _notes(summary):
        say(note, "dim")
    say("")
    chosen = summary["recommendation"]["name"]
    say(f"Recommended: {_shown(chosen)}" if chosen is not None else "Nothing is recommended", "bold")
    say(plain(summary["recommendation"]["why"]))
    for engine, setting in summary["settings"].items():
        say("")
        say(f"{plain(engine)}:", "bold")
        # Wrapped by the terminal if at all, so that it can be copied as one line.
        text = setting if isinstance(setting, str) else json.dumps(setting, ensure_ascii=False)
        for line in text.splitlines():
            console.print(Text(plain(line)), soft_wrap=True, highlight=False)
    say("")
    for name, sentence in summary["definitions"].items():
        say(f"{plain(name).replace('_', ' ')}: {plain(sentence)}", "dim")


def _columns(summary: Summary, groups: Sequence[Edges]) -> tuple[list[str], list[list[str]]]:
    """Column heads (two lines each) and rows; the last row is the truncated window where there is one."""
    recalls = recall_columns(summary)
    heads = ["\nscaling", "\nreaches", "holds\nto"]
    heads += [f"{'ppl' if index == 0 else ''}\n{span(edges)}" for index, edges in enumerate(groups)]
    heads += [f"recall\n{short_tokens(length)}" for length in recalls] + ["short\ncost"]
    rows = []
    for scaling in summary["scalings"]:
        row = [_shown(scaling["name"]), distance_reached(scaling), length_held(scaling)]
        row += _perplexities(scaling["bands"], groups)
        row += [percent(recall_at(scaling, length)) for length in recalls]
        rows.append([*row, cost(scaling["short_cost"] and scaling["short_cost"]["ratio"])])
    window = summary["truncated_window"]
    if window:
        row = [f"window {short_tokens(window['window'])}", "–", "–", *_perplexities(window["bands"], groups)]
        rows.append([*row, *("–" for _ in recalls), "–"])
    return heads, rows


def _perplexities(bands: Sequence[Band], groups: Sequence[Edges]) -> list[str]:
    return [perplexity(perplexity_between(bands, start, end)) for start, end in groups]


def _groups_that_fit(summary: Summary, width: int) -> list[Edges] | None:
    """The finest division into bands whose table fits, or None where none does.

    Bands within the trained length are joined first, for the ones past it are what the survey is about.
    """
    edges = band_edges(summary)
    inside = [edge for edge in edges if edge[1] <= summary["trained_length"]]
    beyond = [edge for edge in edges if edge[1] > summary["trained_length"]]
    options = [[*inside, *beyond]]
    options += [[*_joined(inside, 1), *_joined(beyond, count)] for count in range(len(beyond), 0, -1)]
    for groups in options:
        heads, rows = _columns(summary, groups)
        widths = [max(_width(cell) for cell in column) for column in zip(heads, *rows, strict=True)]
        widths[0] = min(widths[0], _NAME)
        if sum(widths) + _BETWEEN * (len(widths) - 1) <= width:
            return groups
    return None


def _joined(edges: Sequence[Edges], count: int) -> list[Edges]:
    """Neighbouring bands joined into at most `count`, as even as they come."""
    if not edges:
        return []
    count = min(count, len(edges))
    cuts = [round(index * len(edges) / count) for index in range(count + 1)]
    return [(edges[a][0], edges[b - 1][1]) for a, b in pairwise(cuts)]


def _width(cell: str) -> int:
    return max(len(line) for line in cell.split("\n"))


def _table(summary: Summary, groups: Sequence[Edges]) -> Any:
    from rich.box import Box
    from rich.table import Table
    from rich.text import Text

    heads, rows = _columns(summary, groups)
    lines = Box("    \n    \n -- \n    \n -- \n -- \n    \n    \n", ascii=True)
    table = Table(box=lines, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for index, head in enumerate(heads):
        numbers = [_width(head), *(_width(row[index]) for row in rows)]
        if index == 0:
            width = min(max(numbers), _NAME)
            table.add_column(Text(head), overflow="fold", min_width=width, max_width=width)
        else:
            table.add_column(Text(head, justify="right"), justify="right", no_wrap=True, min_width=max(numbers))
    chosen = summary["recommendation"]["name"]
    scalings = summary["scalings"]
    for index, row in enumerate(rows):
        is_window = index == len(scalings)
        mine = not is_window and scalings[index]["name"] == chosen
        style = "bold green" if mine else "cyan" if is_window else ""
        table.add_row(*(Text(cell) for cell in row), style=style, end_section=index == len(scalings) - 1)
    return table


def _print_lists(summary: Summary, say: Any) -> None:
    """One value a line, for a terminal too narrow for any table."""
    heads, rows = _columns(summary, band_edges(summary))
    for row in rows:
        say(row[0], "bold")
        for head, cell in zip(heads[1:], row[1:], strict=True):
            name = " ".join(head.split()) if not head.startswith("\n") or head == "\nreaches" else f"ppl {head.strip()}"
            say(f"  {name}: {cell}")
        say("")


def _notes(summary: Summary) -> list[str]:
    notes = ["ppl: perplexity by position (K = 1,024 tokens); –: not measured"]
    notes.append(
        f"reaches: how far back it copies in a text of {tokens(summary['to'])} tokens; where positions past the "
        "trained length spoil a model, they spoil what is near too"
    )
    alone = [cell["accuracy_alone"] for scaling in summary["scalings"] for cell in scaling["recall"]]
    if alone:
        notes.append(f"recall: mean over depths; {percent(sum(alone) / len(alone))} can be guessed with nothing read")
    window = summary["truncated_window"]
    if window:
        notes.append(
            f"window {short_tokens(window['window'])}: the model as shipped, seeing only the last "
            f"{tokens(window['window'])} tokens: what scaling must beat"
        )
    if meanings(summary):
        notes.append(meanings(summary))
    for scaling in summary["scalings"]:
        lengths = [tokens(one["length"]) for one in scaling["passes"] if one["length"] is not None]
        if scaling["depends_on_length"] and lengths:
            notes.append(f"{_shown(scaling['name'])}: frequencies depend on the length; passes at {', '.join(lengths)}")
    found: dict[str, dict[int, list[bool]]] = {}
    for cell in summary["passkey"] or ():
        found.setdefault(cell["scaling"], {}).setdefault(cell["length"], []).append(cell["exact"])
    for name, by_length in found.items():
        counts = ", ".join(f"{sum(some)} of {len(some)} at {tokens(length)}" for length, some in by_length.items())
        notes.append(f"passkey right, {_shown(name)}: {counts}")
    return notes


def _shown(name: str) -> str:
    return "as shipped" if name == "none" else plain(name)
