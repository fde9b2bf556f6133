"""What terminal, pictures and page all read from a summary: one number each, and how numbers are written."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

Summary = Mapping[str, Any]
Scaling = Mapping[str, Any]
Band = Mapping[str, Any]

SHIPPED = "none"


def scaling_named(summary: Summary, name: str | None) -> Scaling | None:
    """The scaling of that name, or None."""
    return next((scaling for scaling in summary["scalings"] if scaling["name"] == name), None)


def shipped(summary: Summary) -> Scaling | None:
    """The model as shipped, where it was surveyed."""
    return scaling_named(summary, SHIPPED)


def recommended(summary: Summary) -> Scaling | None:
    """The scaling that the survey recommends, where it recommends one."""
    return scaling_named(summary, summary["recommendation"]["name"])


def perplexity_between(bands: Sequence[Band], start: int, end: int) -> float | None:
    """Perplexity of the tokens from `start` to `end`, or None unless whole bands cover them without a gap.

    The mean is taken over NLL, weighted by tokens: exact, since every token of a band is scored.
    """
    inside = sorted((band for band in bands if start <= band["from"] and band["to"] <= end), key=lambda b: b["from"])
    reached, nll = start, 0.0
    for band in inside:
        if band["from"] != reached:
            return None
        nll += math.log(band["perplexity"]) * (band["to"] - band["from"])
        reached = band["to"]
    return math.exp(nll / (end - start)) if inside and reached == end else None


def band_edges(summary: Summary) -> list[tuple[int, int]]:
    """All bands of positions that any pass measured, in order, each once."""
    sources = [scaling["bands"] for scaling in summary["scalings"]]
    if summary["truncated_window"]:
        sources.append(summary["truncated_window"]["bands"])
    return sorted({(band["from"], band["to"]) for bands in sources for band in bands})


def perplexity_in(bands: Sequence[Band], edges: tuple[int, int]) -> float | None:
    """Perplexity of exactly that band, or None where it was not measured."""
    return next((band["perplexity"] for band in bands if (band["from"], band["to"]) == edges), None)


def inside_and_last(summary: Summary, scaling: Scaling) -> tuple[float | None, float | None]:
    """Perplexity over the trained length, and in the last band past it."""
    bands, trained = scaling["bands"], summary["trained_length"]
    last = max((band for band in bands if band["to"] > trained), key=lambda band: band["to"], default=None)
    inside = [band for band in bands if band["to"] <= trained]
    edge = max((band["to"] for band in inside), default=0)
    return perplexity_between(inside, 0, edge) if edge else None, last["perplexity"] if last else None


def recall_lengths(summary: Summary) -> list[int]:
    """Lengths at which recall was measured, shortest first."""
    return sorted({cell["length"] for scaling in summary["scalings"] for cell in scaling["recall"]})


def recall_at(scaling: Scaling, length: int | None, key: str = "accuracy") -> float | None:
    """Mean over the depths at one length, or None where recall was not measured there."""
    values = [cell[key] for cell in scaling["recall"] if cell["length"] == length]
    return sum(values) / len(values) if values else None


def recall_columns(summary: Summary) -> list[int]:
    """The lengths that a table shows: the longest within the trained length, and the longest of all."""
    lengths = recall_lengths(summary)
    within = [length for length in lengths if length <= summary["trained_length"]]
    return sorted({*within[-1:], *lengths[-1:]})


def tokens(count: float) -> str:
    """12288 as `12,288`."""
    return f"{count:,.0f}"


def short_tokens(count: float) -> str:
    """12288 as `12K` (of 1,024), 10000 as `10,000`: the shorter form where nothing is lost."""
    return f"{count / 1024:.0f}K" if count >= 1024 and count % 1024 == 0 else tokens(count)


def span(edges: tuple[int, int]) -> str:
    """A band of positions as `8–10K`, or `8,000–9,500`."""
    start, end = short_tokens(edges[0]), short_tokens(edges[1])
    return f"{start.removesuffix('K')}–{end}" if end.endswith("K") and edges[0] % 1024 == 0 else f"{start}–{end}"


def percent(share: float | None) -> str:
    """0.694 as `69%`."""
    return "–" if share is None else f"{share * 100:.0f}%"


def perplexity(value: float | None, digits: int = 1) -> str:
    """Perplexity with the digits that matter at its size."""
    if value is None:
        return "–"
    if value < 100:
        return f"{value:.{digits}f}"
    return f"{value:,.0f}" if value < 1e5 else f"{value:.1e}".replace("e+0", "e").replace("e+", "e")


def cost(ratio: float | None) -> str:
    """A ratio of perplexities as `+3.1%`."""
    if ratio is None:
        return "–"
    change = (ratio - 1) * 100
    if abs(change) < 0.05:
        return "0%"
    return f"{change:+.1f}%" if abs(change) < 10 else f"{change:+,.0f}%"


def distance_reached(scaling: Scaling) -> str:
    """`reaches` as text: a distance, `nowhere`, or `–` where it was not measured."""
    if scaling["reaches"] is not None:
        return tokens(scaling["reaches"])
    return "nowhere" if scaling["reach"] else "–"


def length_held(scaling: Scaling) -> str:
    """`holds_to` as text: a length, `nowhere`, or `–` where no pass was run."""
    if scaling["holds_to"] is not None:
        return tokens(scaling["holds_to"])
    return "nowhere" if scaling["bands"] else "–"


def meanings(summary: Summary) -> str:
    """What each scaling stands for ("yarn: YaRN 2 from 8,192 tokens; ..."); empty for the shipped model alone."""
    return "; ".join(f"{plain(s['name'])}: {plain(s['means'])}" for s in summary["scalings"] if s["name"] != "none")


def plain(text: str) -> str:
    """One line of printable text: line breaks, control and direction characters can do no harm where it is shown."""
    return "".join(" " if c in "\n\r\t" else "\N{REPLACEMENT CHARACTER}" if _hidden(c) else c for c in text)


def _hidden(character: str) -> bool:
    return unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp"}


def shortened(text: str, most: int) -> str:
    """Text of at most `most` characters, its middle left out: names differ at their ends."""
    text = plain(text)
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return text[: most - 1 - tail] + "…" + text[len(text) - tail :]
