"""What every picture here stands on: a figure in the project's look, its parts, and its bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

from theodolite.report.figures import short_tokens
from theodolite.report.files import needs
from theodolite.report.style import MUTED, RULE, drawing

Figure = Any
Axes = Any
Arguments = ParamSpec("Arguments")

HUES = ("#0072b2", "#d55e00", "#009e73", "#b8588f", "#c98a00", "#3a9bd0", "#7f5aa2", "#5d7d2b")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.6, 1.4)), (0, (6, 1.5, 1.4, 1.5)))
DIVERGING = "PuOr"
SEQUENTIAL = "cividis"
WIDTH = 8.0
KINDS = ("png", "svg", "pdf")
_DPI = 150


def drawn(view: Callable[Arguments, Figure]) -> Callable[Arguments, Figure]:
    """Draw in the project's look whatever the user's settings are; asks for matplotlib where it is missing."""

    @wraps(view)
    def draw(*arguments: Arguments.args, **settings: Arguments.kwargs) -> Figure:
        with needs("matplotlib", "to draw pictures"):
            import matplotlib.figure  # noqa: F401
        with drawing():
            figure = view(*arguments, **settings)
            # Ticks are made when they are first drawn, and would otherwise take the look of that moment.
            figure.draw_without_rendering()
        return figure

    return draw


def canvas(
    columns: int = 1, *, height: float = 3.5, rows: int = 1, widths: Sequence[float] | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure 8 inches wide, and its panels row by row."""
    from matplotlib.figure import Figure as Canvas

    figure: Figure = Canvas(figsize=(WIDTH, height), dpi=_DPI, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.09, h_pad=0.06)
    axes = figure.subplots(rows, columns, squeeze=False, gridspec_kw={"width_ratios": widths})
    return figure, list(axes.flat)


def encoded(figure: Figure, kind: str) -> bytes:
    """The picture as `png`, `svg` or `pdf`; the same figure gives the same bytes.

    Raises:
        ValueError: another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}; it must be one of {', '.join(KINDS)}")
    buffer = io.BytesIO()
    # No date and no version: the same numbers give the same bytes.
    left_out = {"png": ("Software",), "svg": ("Date",), "pdf": ("CreationDate", "Producer", "Creator")}[kind]
    with drawing():
        figure.savefig(buffer, format=kind, metadata=dict.fromkeys(left_out))
    return buffer.getvalue()


def kind_of_file(path: Path, option: str) -> str:
    """The kind of picture that a file's name asks for.

    Raises:
        ValueError: it ends in none of them, so that no other file is ever written over.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in KINDS:
        raise ValueError(f"{option}: got {str(path)!r}; the name must end in {', '.join('.' + one for one in KINDS)}")
    return kind


def hue(number: int) -> dict[str, Any]:
    """Colour and dash of the line with that number, so that lines differ without colour too."""
    return {"color": HUES[number % len(HUES)], "linestyle": DASHES[number % len(DASHES)]}


def image(axes: Axes, values: Any, *, extent: tuple[float, float, float, float] | None = None, **how: Any) -> Any:
    """A heat map without a grid over it; row 0 is at the top."""
    drawn_image = axes.imshow(values, aspect="auto", interpolation="nearest", extent=extent, **how)
    axes.grid(False)
    return drawn_image


def zero_line(axes: Axes) -> None:
    """A thin line at 0."""
    axes.axhline(0, color=MUTED, linewidth=0.8, zorder=1.5)


def token_ticks(axis: Any, count: float, *, most: int = 6) -> None:
    """Ticks of a linear axis of tokens from 0, at round numbers of two."""
    step = 1
    while count / step > most:
        step *= 2
    ticks = list(range(0, int(count) + 1, step))
    axis.set_ticks(ticks, labels=[short_tokens(tick) for tick in ticks])


def quiet_spines(axes: Axes) -> None:
    """All four edges, thin: a heat map ends where they are."""
    for spine in axes.spines.values():
        spine.set(visible=True, color=RULE, linewidth=0.8)
