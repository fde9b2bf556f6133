"""A comparison on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from theodolite.report.compare_words import difference, main_measure, quality, sentences, shown, unit
from theodolite.report.figures import plain, tokens
from theodolite.report.files import needs

if TYPE_CHECKING:
    from rich.console import Console

Result = dict[str, Any]
Rows = list[list[str]]


def render_comparison(result: Result, console: Console) -> None:
    """Print a comparison: a row for each policy, scalings of the rotary ones, and what it shows in words.

    Raises:
        ImportError: rich is missing.
    """
    with needs("rich", "to print tables"):
        from rich.table import Table
        from rich.text import Text

    for heading, head, rows in tables(result):
        table = Table(box=None, pad_edge=False, title=Text(heading, style="bold"), title_justify="left")
        for i, column in enumerate(head):
            table.add_column(Text(column), justify="right" if i else "left", no_wrap=i == 0)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
        console.print()
    for sentence in sentences(result):
        console.print(Text(sentence), soft_wrap=True)


def tables(result: Result) -> list[tuple[str, list[str], Rows]]:
    """(heading, columns, rows) of each table, as a terminal and the page show them."""
    found = [_policies(result)]
    if result["extension"]:
        found.append(_extension(result))
    return found


def _policies(result: Result) -> tuple[str, list[str], Rows]:
    seeds = len(result["seeds"])
    heading = (
        f"{unit(result)} by length, {plain(result['data']['name'])}, {seeds} seed{'s' * (seeds > 1)} "
        f"(± half of a 95 % interval; * differs from the best beyond doubt)"
    )
    head = ["policy", *(_length(result, n) for n in result["lengths"]), "parameters", "kept, MiB", "speed"]
    at = {length: quality(result, length) for length in result["lengths"]}
    cells = {cell["policy"]: cell for cell in result["cells"]}
    speeds = _speeds(result)
    rows = []
    for name in result["policies"]:
        losses = [_cell(result, name, length, at[length]) for length in result["lengths"]]
        cell = cells[name]
        speed = f"{speeds[name] / speeds[result['policies'][0]]:.2f} x" if speeds.get(name) else "–"
        rows.append([plain(name), *losses, tokens(cell["parameters"]), f"{cell['kept_bytes'] / 2**20:.1f}", speed])
    return heading, head, rows


def _extension(result: Result) -> tuple[str, list[str], Rows]:
    heading = "trained rotary models under other frequencies, nats a token (* differs from none beyond doubt)"
    rows: Rows = []
    here = [e for e in result["extension"] if e["measure"] == "window"]
    for policy in dict.fromkeys(e["policy"] for e in here):
        as_trained = [quality(result, length).get(policy) for length in result["lengths"]]
        rows.append([plain(policy), "none", "", *("–" if q is None else f"{q['mean']:.3f}" for q in as_trained)])
        for scaling, style in dict.fromkeys((e["scaling"], e["fine_tuned"]) for e in here if e["policy"] == policy):
            mine = {
                e["length"]: e for e in here if (e["policy"], e["scaling"], e["fine_tuned"]) == (policy, scaling, style)
            }
            figures = [f"{mine[n]['mean']:.3f}{_mark(mine[n]['against_as_trained'])}" for n in result["lengths"]]
            rows.append([plain(policy), plain(scaling), style or "", *figures])
    return heading, ["policy", "scaling", "fine-tuned", *(_length(result, n) for n in result["lengths"])], rows


def _cell(result: Result, name: str, length: int, at: dict[str, dict[str, Any]]) -> str:
    if name not in at:
        stopped = any(stop["policy"] == name and stop["length"] < length for stop in result["stops"])
        return "stops" if stopped else "diverged"
    found, best = at[name], next(iter(at))
    mark = _mark(difference(result, name, best, length, main_measure(result))) if name != best else ""
    half = found["interval"] and (found["interval"][1] - found["interval"][0]) / 2
    return shown(result, found["mean"]) + (f" ±{_half(result, half)}" if half is not None else "") + mark


def _half(result: Result, half: float) -> str:
    return f"{half:.3f}" if result["data"]["nested"] else f"{half:.0%}"


def _mark(d: dict[str, Any] | None) -> str:
    return "*" if d is not None and d["significant"] else ""


def _length(result: Result, length: int) -> str:
    return f"{tokens(length)} (trained)" if length == result["training_length"] else tokens(length)


def _speeds(result: Result) -> dict[str, float]:
    """Tokens a second of the quickest run of each: others shared the machine with something."""
    found: dict[str, float] = {}
    for cell in result["cells"]:
        found[cell["policy"]] = max(found.get(cell["policy"], 0.0), cell["tokens_per_second"])
    return found
