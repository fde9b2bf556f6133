"""How the pictures look: one colour per scaling whatever stands beside it, and text that cannot break a figure."""

from __future__ import annotations

import colorsys
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from theodolite.report.figures import shortened

INK, MUTED, RULE, PAPER = "#1f2328", "#626970", "#d5d9de", "#ffffff"
WINDOW = "#7a828a"

# Hues after Okabe and Ito, which stay apart for colour-blind readers; the shipped model is ink.
_HUES = {
    "none": INK,
    "yarn": "#0072b2",
    "ntk": "#d55e00",
    "linear": "#009e73",
    "dynamic": "#b8588f",
    "longrope": "#3a9bd0",
    "llama3": "#c98a00",
    "self-extend": "#7f5aa2",
    "dca": "#a3423f",
    "rerope": "#5d7d2b",
    "leaky-rerope": "#8c6d1f",
    "sinks": "#00838f",
    "lm-infinite": "#4f5bd5",
}
_OTHER_HUES = ("#7f5aa2", "#8c6d1f", "#5d7d2b", "#a3423f")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.6, 1.4)), (0, (6, 1.5, 1.4, 1.5)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")

# Fonts for scripts that DejaVu lacks; those installed are used.
_WIDER_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans SC",
    "Source Han Sans SC",
    "PingFang SC",
    "Hiragino Sans GB",
    "Microsoft YaHei",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "Droid Sans Fallback",
    "Noto Sans CJK JP",
    "Arial Unicode MS",
    "Noto Sans",
)


def colour(name: str) -> str:
    """The colour of a scaling, from its name alone: the hue by kind, lighter for small factors and darker for large."""
    kind, _, factor = name.partition(":")
    hue = _HUES.get(kind) or _OTHER_HUES[sum(kind.encode()) % len(_OTHER_HUES)]
    number = re.fullmatch(r"\d+(\.\d+)?", factor)
    if kind == "none" or not number or float(factor) <= 0:
        return hue
    red, green, blue = (int(hue[i : i + 2], 16) / 255 for i in (1, 3, 5))
    h, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    shift = max(-0.14, min(0.16, 0.17 * (1.15 - math.log2(float(factor)))))
    turned = colorsys.hls_to_rgb(h, min(0.62, max(0.16, lightness + shift)), saturation)
    return "#" + "".join(f"{round(part * 255):02x}" for part in turned)


def line_styles(names: Sequence[str], chosen: str | None) -> dict[str, dict[str, Any]]:
    """Line properties per scaling: colour by name, dash by order within its kind, the two that matter drawn heavier."""
    seen: dict[str, int] = {}
    styles = {}
    for index, name in enumerate(names):
        kind = name.partition(":")[0]
        rank = seen.get(kind, 0)
        seen[kind] = rank + 1
        heavy = name in {"none", chosen}
        styles[name] = {
            "color": colour(name),
            "linestyle": "-" if heavy else _DASHES[rank % len(_DASHES)],
            "marker": _MARKERS[index % len(_MARKERS)],
            "markersize": 4.5 if heavy else 3.5,
            "linewidth": 2.4 if heavy else 1.4,
            "zorder": 4 if heavy else 3,
            "markeredgewidth": 0,
        }
    return styles


@lru_cache(maxsize=1)
def fonts() -> tuple[str, ...]:
    """DejaVu, which comes with matplotlib, and whichever wider fonts this machine has."""
    from matplotlib import font_manager

    installed = {entry.name for entry in font_manager.fontManager.ttflist}
    return ("DejaVu Sans", *(name for name in _WIDER_FONTS if name in installed))


@lru_cache(maxsize=1)
def _glyphs() -> frozenset[int]:
    from matplotlib import font_manager

    known: set[int] = set()
    for name in fonts():
        known |= set(font_manager.get_font(font_manager.findfont(name)).get_charmap())
    return frozenset(known)


def words(text: str, most: int = 60) -> str:
    """Text that can be drawn: one line, not too long, a box for each character that no font has."""
    return "".join(c if ord(c) in _glyphs() else "\N{WHITE SQUARE}" for c in shortened(text, most))


@contextmanager
def drawing() -> Iterator[None]:
    """matplotlib with its own defaults and ours on top, whatever the user's settings say."""
    from matplotlib import style

    ours = {
        "font.family": list(fonts()),
        "font.size": 9.5,
        "text.color": INK,
        # Names come from files: a dollar sign is a dollar sign.
        "text.parse_math": False,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "axes.labelsize": 9.5,
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.unicode_minus": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": RULE,
        "grid.linewidth": 0.6,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "figure.facecolor": PAPER,
        "savefig.facecolor": PAPER,
        "svg.hashsalt": "theodolite",
        "svg.fonttype": "path",
    }
    with style.context(["default", ours]):
        yield
