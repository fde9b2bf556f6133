"""What a search found, on a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theodolite.report.figures import plain
from theodolite.report.files import needs
from theodolite.survey.found import FOUND

if TYPE_CHECKING:
    from rich.console import Console


def render_search(result: dict[str, Any], console: Console) -> None:
    """Print a search's result: a row for the map found and each rival, whether it won, and what to paste.

    Raises:
        ImportError: rich is missing.
    """
    with needs("rich", "to print tables"):
        from rich.table import Table
        from rich.text import Text

    lengths = result["confirmed"]["lengths"]
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for entry in lengths:
        table.add_column(f"recall at {entry['length']:,}", justify="right")
    table.add_column(f"perplexity to {lengths[-1]['length']:,}", justify="right")
    table.add_column("short text, nats", justify="right")
    for name in (FOUND, *result["rivals"]):
        recalled = [f"{entry['recall'][name]:.1%}" for entry in lengths]
        perplexity = f"{lengths[-1]['perplexity'][name]:,.2f}"
        table.add_row(Text(plain(name)), *recalled, perplexity, f"{result['confirmed']['short'][name]:.4f}")
    console.print(Text(f"{plain(result['model'])} to {result['to']:,} tokens", style="bold"))
    console.print(table)
    console.print(Text(f"\n{plain(result['why'])}"), soft_wrap=True)
    console.print(Text(f"found: {plain(result['winner']['means'])}"), soft_wrap=True)
    said = json.dumps({"rope_parameters": result["winner"]["rope_parameters"]})
    console.print(Text(f"\n{plain(said)}"), soft_wrap=True)


def print_places(console: Console, out: Path, picture: Path) -> None:
    """Where the result lies."""
    # A path that is broken over lines cannot be copied.
    console.print(f"\nresult: {out / 'search.json'}\npicture: {picture}", soft_wrap=True, markup=False, highlight=False)
