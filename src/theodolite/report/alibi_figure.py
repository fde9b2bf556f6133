"""ALiBi by distance as lines of an SVG: straight, for both axes are logarithms. Loads neither torch nor matplotlib."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from theodolite.plan.bias import Bias, alibi_slopes
from theodolite.plan.layer_json import usual_length
from theodolite.plan.model import ModelPlan
from theodolite.report.figures import tokens

_WIDTH, _HEIGHT = 760, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 668, 12, 274
_MOST_HEADS, _ASSUMED, _UNSTATED = 8, 8, 8192


def alibi_figure(plan: ModelPlan) -> dict[str, Any] | None:
    """Lines, ticks and words of the figure: what each of some heads takes from a score; None without ALiBi.

    Places are pixels of a box of 760 by 320. Heads are evenly chosen, 8 at most; of a model that states no number of
    heads the slopes of 8 are drawn, and the words say so.
    """
    bias = next((layer.bias for layer in plan.layers if layer.bias is not None and layer.bias.kind == "alibi"), None)
    if bias is None:
        return None
    furthest = max(2, (usual_length(plan) or _UNSTATED) - 1)
    heads = bias.heads or _ASSUMED
    slopes = [bias.slope_factor * slope for slope in alibi_slopes(heads, bias.bias_max)]
    shown = sorted({round(place) for place in np.linspace(0, heads - 1, min(heads, _MOST_HEADS))})
    low, high = math.log(min(slopes)), math.log(max(slopes) * furthest)

    def x(distance: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * math.log(distance) / math.log(furthest), 2)

    def y(taken: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * (math.log(taken) - low) / (high - low), 2)

    def line(head: int) -> dict[str, Any]:
        near, far = slopes[head], slopes[head] * furthest
        return {"x1": x(1), "y1": y(near), "x2": x(furthest), "y2": y(far), "name": f"head {head}"}

    powers = range(math.ceil(low / math.log(10)), math.floor(high / math.log(10)) + 1)
    doublings = range(0, int(math.log2(furthest)) + 1, max(1, math.ceil((math.log2(furthest) + 1) / 9)))
    gone = math.log(1000)
    return {
        "box": f"0 0 {_WIDTH} {_HEIGHT}",
        "left": _LEFT, "right": _RIGHT, "top": _TOP, "bottom": _BOTTOM,
        "lines": [line(head) for head in shown],
        "across": [{"at": x(2**power), "name": tokens(2**power)} for power in doublings],
        "up": [{"at": y(10.0**power), "name": f"{10.0**power:g}"} for power in powers],
        "gone": y(gone) if low <= math.log(gone) <= high else None,
        "words": _words(bias, slopes),
    }  # fmt: skip


def _words(bias: Bias, slopes: list[float]) -> str:
    heads = f"{len(slopes)} heads" + ("" if bias.heads else " (assumed: the file states none)")
    return f"{heads}, slopes {max(slopes):.4g} to {min(slopes):.4g} per token"
