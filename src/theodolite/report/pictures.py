"""Pictures of a survey's result: for the page (wide and narrow), for folders (PNG), and one for a README."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from theodolite.report import plots, schema
from theodolite.report.figures import Summary
from theodolite.report.files import needs, write_whole
from theodolite.report.style import drawing

# Each draws into an empty figure and says whether there was anything to draw.
PICTURES: Mapping[str, Callable[[Any, Summary, bool], bool]] = {
    "reach": plots.reach,
    "perplexity": plots.perplexity,
    "recall": plots.recall,
    "wavelengths": plots.wavelengths,
    "overview": plots.overview,
}
_DPI = 160


def draw(summary: Summary, folder: str | Path) -> dict[str, Path]:
    """Write `reach.png`, `perplexity.png`, `recall.png`, `wavelengths.png` and `overview.png` into `folder`.

    Returns:
        The file of each picture; a picture for which nothing was measured is left out.

    Raises:
        ValueError: the summary does not follow its schema.
        ImportError: matplotlib is missing.
    """
    schema.validate(summary)
    written = {}
    for name in PICTURES:
        image = render(summary, name, kind="png")
        if image is not None:
            written[name] = write_whole(Path(folder) / f"{name}.png", image)
    return written


def render(summary: Summary, name: str, *, kind: str, narrow: bool = False) -> bytes | None:
    """One picture as `png` or `svg` bytes, the same for the same summary; None where nothing was measured.

    `narrow` lays it out for a phone: panels below each other, text as large as the page's.
    """
    with needs("matplotlib", "to draw pictures"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    with drawing():
        figure = Figure(dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        if not PICTURES[name](figure, summary, narrow):
            return None
        buffer = io.BytesIO()
        # No date and no version: the same numbers give the same bytes.
        figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})
        return buffer.getvalue()
