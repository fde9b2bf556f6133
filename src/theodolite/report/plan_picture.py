"""One picture of what a model says about positions: its layers, and how far its pairs turn. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from theodolite.plan.bias import alibi_slopes
from theodolite.plan.describe import describe, describe_scaling
from theodolite.plan.layer_json import attends, seen_by, usual_length
from theodolite.plan.model import LayerPlan, Mask, ModelPlan
from theodolite.plan.rotary import Rotary
from theodolite.plan.scaling import Scaling
from theodolite.report.files import write_whole
from theodolite.report.inspection import ranges
from theodolite.report.panels import doubling_axis, heading, log_axis, title
from theodolite.report.show.canvas import WIDTH, Axes, Figure, canvas, drawn, encoded, hue, kind_of_file
from theodolite.report.show.of_model import HEADS, named_rotaries, stated
from theodolite.report.show.rotations import coverage_panel, decay_panel, mean_cosines, wavelength_panel
from theodolite.report.style import INK, MUTED, RULE, WINDOW, words

if TYPE_CHECKING:
    from theodolite.plan.open import Opened

_MOST_ROTATIONS, _MOST_KINDS, _MOST_LAYERS, _MOST_HEADS = 6, 6, 512, 8
_UNSTATED = 8192
_FURTHEST = 2**20


def write(opened: Opened, path: Path) -> Path:
    """Draw a model's positions into a `.png`, `.svg` or `.pdf` file.

    Raises:
        ValueError: another kind of file, or a model of which nothing can be drawn.
        ImportError: matplotlib is missing.
    """
    kind = kind_of_file(path, "picture")
    return write_whole(path, encoded(plan_picture(opened), kind))


@drawn
def plan_picture(opened: Opened) -> Figure:
    """The layers of a model in a row, and below them what follows from its rotations, or its ALiBi by distance.

    Raises:
        ValueError: it has neither: learned numbers are in the weights, which are not read.
    """
    plan = opened.plan
    alibi = next((layer for layer in plan.layers if layer.bias is not None and layer.bias.kind == "alibi"), None)
    if not any(rotary.live_pairs != 0 for rotary in plan.rotaries) and alibi is None:
        raise ValueError(nothing_to_draw(opened))
    kinds = layer_kinds(plan)
    strip = 0.55 + 0.19 * min(len(kinds), _MOST_KINDS + 1)
    figure, unused = canvas(height=strip + (6.6 if plan.rotaries else 0) + (3.2 if alibi is not None else 0))
    unused[0].remove()
    heights = [strip, *((3.3, 3.3) if plan.rotaries else ()), *((3.2,) if alibi is not None else ())]
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    _layers(figure.add_subplot(grid[0, :]), plan, kinds)
    if plan.rotaries:
        places = (grid[1, 0], grid[1, 1], grid[2, :])
        _rotations([figure.add_subplot(place) for place in places], plan)
    if alibi is not None:
        _alibi(figure.add_subplot(grid[-1, :]), alibi, stated(opened, HEADS), usual_length(plan) or _UNSTATED)
    heading(figure, f"{words(opened.name, 60)}: {describe(plan)}", WIDTH, bold=False)
    return figure


def nothing_to_draw(opened: Opened) -> str:
    """Why there is no picture of a model, in a sentence."""
    plan = opened.plan
    kinds = sorted({layer.bias.kind for layer in plan.layers if layer.bias is not None})
    if plan.embed is not None and plan.embed.kind == "sinusoidal":
        return f"picture: {opened.name!r} adds sinusoidal positions: `theodolite show sinusoidal` draws them"
    learned = [*([] if plan.embed is None else ["learned absolute positions"]), *(f"{kind} biases" for kind in kinds)]
    if learned:
        what = f"has {' and '.join(learned)}, which are in its weights, and inspect reads none"
    else:
        what = "has no positions of its own"
    return f"picture: nothing to draw: {opened.name!r} {what}; leave --picture out"


Kind = tuple[Rotary | None, str | None, Mask, bool]


def layer_kinds(plan: ModelPlan) -> dict[Kind, list[int]]:
    """Layers with the same rotation, kind of bias and mask together, in the order of first use."""
    kinds: dict[Kind, list[int]] = {}
    for number, layer in enumerate(plan.layers):
        kinds.setdefault(_kind(layer), []).append(number)
    return kinds


def kind_text(kind: Kind) -> str:
    """What layers of a kind have, in a few words: "base 10,000, window of 512"."""
    rotary, bias, mask, attending = kind
    if not attending:
        return "no attention"
    parts = [] if rotary is None else [f"base {rotary.rope_theta:,.10g}"]
    if rotary is not None and type(rotary.scaling) is not Scaling:
        parts.append(describe_scaling(rotary.scaling))
    parts += [] if bias is None else [f"{bias} bias"]
    parts = parts or ["no positions of its own (NoPE)"]
    if mask.sliding_window is not None:
        parts.append(f"window of {mask.sliding_window:,}")
    if mask.chunk is not None:
        parts.append(f"chunk of {mask.chunk:,}")
    return ", ".join(parts)


def _kind(layer: LayerPlan) -> Kind:
    return layer.rotate, None if layer.bias is None else layer.bias.kind, layer.mask, attends(layer)


def _layers(axes: Axes, plan: ModelPlan, kinds: dict[Kind, list[int]]) -> None:
    """A row of cells, one a layer: its colour is its rotation, and a low cell sees a window or a chunk only."""
    from matplotlib.patches import Patch
    from matplotlib.transforms import ScaledTranslation

    count, looks = min(len(plan.layers), _MOST_LAYERS), {kind: _look(kind, plan) for kind in kinds}
    for number in range(count):
        kind = _kind(plan.layers[number])
        low = kind[2].reach is not None
        axes.bar(number, 0.5 if low else 1.0, width=0.9, align="center", linewidth=0.7, **looks[kind])
    axes.set(xlim=(-0.7, count - 0.3), ylim=(0, 1), yticks=[])
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.set_xticks(sorted({*range(0, count, max(1, -(-count // 12)))}))
    title(axes, "Layers; a low one sees a window or a chunk only", width=WIDTH, above=5, size=9.5)
    shown = list(kinds.items())[:_MOST_KINDS]
    handles = [Patch(linewidth=0.7, label=_row(kind, layers), **looks[kind]) for kind, layers in shown]
    if len(kinds) > len(shown):
        handles.append(Patch(alpha=0, label=f"and {len(kinds) - len(shown)} kinds more"))
    below = axes.transAxes + ScaledTranslation(0, -22 / 72, axes.figure.dpi_scale_trans)
    where = {"loc": "upper left", "bbox_to_anchor": (0, 0), "bbox_transform": below}
    axes.legend(handles=handles, borderaxespad=0, fontsize=8.5, **where)


def _row(kind: Kind, layers: Sequence[int]) -> str:
    return words(f"{ranges(layers)}: {kind_text(kind)}", 96)


def _look(kind: Kind, plan: ModelPlan) -> dict[str, Any]:
    rotary, bias, _, attending = kind
    if not attending:
        return {"facecolor": RULE, "edgecolor": RULE}
    if rotary is not None:
        colour = hue(plan.rotaries.index(rotary))["color"]
        return {"facecolor": colour, "edgecolor": colour, "hatch": None if bias is None else "///"}
    return {"facecolor": "white" if bias is None else WINDOW, "edgecolor": MUTED}


def _rotations(panels: Sequence[Axes], plan: ModelPlan) -> None:
    named = {name: rotary for name, rotary in named_rotaries(plan).items() if rotary.live_pairs != 0}
    shown = dict(list(named.items())[:_MOST_ROTATIONS])
    numbers = {rotary: number for number, rotary in enumerate(plan.rotaries)}
    styles = {name: hue(numbers[rotary]) | {"linewidth": 1.6} for name, rotary in shown.items()}
    stated_length = usual_length(plan)
    length = min(stated_length or _UNSTATED, _FURTHEST)
    waves, turns, cosines = panels
    note, within = f"{length:,} tokens", _seen(plan, shown, length)
    wavelength_panel(waves, shown, length=length, trained=length, styles=styles, note=note, within=within)
    title(waves, "Tokens for a turn; hollow: never a whole one", width=WIDTH / 2, above=5, size=9.5)
    coverage_panel(turns, shown, length=length, trained=length, styles=styles, within=within)
    title(turns, "Coverage: turns that each pair makes", width=WIDTH / 2, above=5, size=9.5)
    decay_panel(cosines, shown, length=length, styles=styles, trained=None, measure=mean_cosines)
    cosines.set_ylabel("mean cosine of the pairs")
    which = f"{length:,} tokens" + ("" if stated_length else ", for no length is stated")
    title(cosines, f"Decay: mean cosine by distance, to {which}", width=WIDTH, above=5, size=9.5)
    if len(named) > 1:
        cosines.legend(loc="upper right", ncols=2)
        if len(named) > len(shown):
            cosines.plot([], [], color="none", label=f"and {len(named) - len(shown)} more")
            cosines.legend(loc="upper right", ncols=2)


def _seen(plan: ModelPlan, named: dict[str, Rotary], length: int) -> dict[str, int]:
    """The tokens that a query of each rotation's layers sees, by name."""
    layers = {name: [layer for layer in plan.layers if layer.rotate == rotary] for name, rotary in named.items()}
    return {name: min(length, seen_by(mine) or length) for name, mine in layers.items()}


def _alibi(axes: Axes, layer: LayerPlan, heads: int | None, length: int) -> None:
    """The bias by distance of some of the heads; of 8 heads where the model does not say how many it has."""
    bias = layer.bias
    assert bias is not None
    count = heads or 8
    slopes = [bias.slope_factor * slope for slope in alibi_slopes(count, bias.bias_max)]
    shown = sorted({round(place) for place in np.linspace(0, count - 1, min(count, _MOST_HEADS))})
    distances = np.unique(np.geomspace(1, max(2, length), 400).round())
    for number, head in enumerate(shown):
        axes.plot(distances, slopes[head] * distances, label=f"head {head}", linewidth=1.5, **hue(number))
    doubling_axis(axes, 1, length, "distance (tokens, log scale)")
    log_axis(axes, min(slopes), max(slopes) * length, "taken from the score (log scale)")
    axes.axhline(math.log(1000), color=INK, linewidth=1.1, linestyle=(0, (1.2, 2.2)))
    said = f"ALiBi by distance, {count} heads{'' if heads else ' (assumed: it states none)'}"
    title(axes, f"{said}; above the dots a weight is under 1/1000", width=WIDTH, above=5, size=9.5)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
