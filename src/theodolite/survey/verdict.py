"""What the numbers say: bands with intervals, how far a scaling holds and reaches, and which one to take."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Nats = NDArray[np.float32]

HOLDS_WITHIN = 0.1
"""Nats that a band may lie above the reference on the same tokens and still hold: 10.5 % in perplexity."""

BETTER_BY = 0.05
"""Recall that a scaling must add to the shipped model's before it is recommended."""

SAME_WITHIN = 0.03
"""Recall within which two scalings count as equal, and the cheaper on short text is taken."""

_BLOCK = 32
_RESAMPLES = 1000

DEFINITIONS = {
    "reaches": (
        "At the length asked, the longest measured distance up to which copying holds, at every distance measured: "
        "accuracy at least halfway between what the shipped model guesses without the text and what it copies from "
        "near by. From the spread reach."
    ),
    "holds_to": (
        "The end of the last band of positions up to which every band's perplexity is within 10.5 % (0.1 nats) of the "
        "reference on the same tokens: the shipped model inside its trained length, the truncated window past it."
    ),
    "recall": (
        "At a length, passages from several depths are begun again with 12 tokens; the accuracy is the share of the "
        "next 32 tokens that were the most likely one. 'Alone' is the shipped model's, with nothing before the 12."
    ),
    "truncated_window": (
        "The shipped model that sees only the last tokens, up to its trained length, at positions from 0: the honest "
        "baseline, for whoever needs only the next token."
    ),
    "recommendation": (
        "Among the scalings that were read in full and hold to the length asked, the one that recalls most there, if "
        f"that is at least {BETTER_BY:.2f} more than the shipped model recalls; of scalings within {SAME_WITHIN:.2f}, "
        "the one that costs least on short text. Nothing is recommended that was not read in full."
    ),
}


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with the ends of its 95 % interval."""

    mean: float
    low: float
    high: float


def interval_of_mean(documents: list[Nats]) -> Interval:
    """The mean of all tokens, its 95 % interval by bootstrap over blocks of 32: neighbours are not independent."""
    blocks = [row[i : i + _BLOCK] for row in documents for i in range(0, len(row), _BLOCK)]
    sums = np.asarray([block.sum(dtype=np.float64) for block in blocks])
    sizes = np.asarray([len(block) for block in blocks])
    mean = float(sums.sum() / sizes.sum())
    drawn = np.random.default_rng(0).integers(len(blocks), size=(_RESAMPLES, len(blocks)))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return Interval(mean=mean, low=float(low), high=float(high))


def as_perplexity(nats: Interval) -> dict[str, Any]:
    """A perplexity with its interval, for a summary."""
    return {"perplexity": _round(np.exp(nats.mean)), "interval": [_round(np.exp(nats.low)), _round(np.exp(nats.high))]}


def band_edges(length: int, width: int, trained: int) -> list[tuple[int, int]]:
    """Bands of positions to `length`, `width` tokens each, counted anew from `trained`; the last of each are shorter.

    No band lies on both sides of the trained length, where the reference changes.
    """
    begins = (*range(0, min(trained, length), width), *range(trained, length, width))
    return list(pairwise((*begins, length)))


def band_rows(documents: list[Nats], begin: int, end: int) -> list[Nats]:
    """The tokens at positions `begin` to `end` of each document; entry i of a row is the token at position i + 1."""
    return [row[max(begin - 1, 0) : end - 1] for row in documents]


def bands(nll: list[Nats], *, length: int, width: int, window: list[Nats] | None, trained: int) -> list[dict[str, Any]]:
    """Perplexity by band of positions; `window[d]` starts at the token at position `trained`."""
    out = []
    for begin, end in band_edges(length, width, trained):
        rows = band_rows(nll, begin, end)
        value = interval_of_mean(rows)
        gain = None
        if window is not None and begin >= trained:
            pairs = zip(window, rows, strict=True)
            difference = interval_of_mean([w[begin - trained : end - trained] - row for w, row in pairs])
            gain = {"nats": _round(difference.mean), "interval": [_round(difference.low), _round(difference.high)]}
        out.append(
            {
                "from": begin,
                "to": end,
                **as_perplexity(value),
                "cumulative": _round(np.exp(mean_nats(band_rows(nll, 0, end)))),
                "gain_over_window": gain,
            }
        )
    return out


def mean_nats(rows: list[Nats]) -> float:
    """The mean over all tokens of all rows."""
    return float(sum(row.sum(dtype=np.float64) for row in rows) / sum(len(row) for row in rows))


def holds_to(
    own: list[dict[str, Any]], shipped: list[dict[str, Any]], window: list[dict[str, Any]] | None
) -> int | None:
    """The end of the last band, from the first on, within HOLDS_WITHIN of the reference; None where not even that.

    `own` and `shipped` are bands of the same edges; `window` are the truncated window's, past the trained length.
    """
    reference = {band["to"]: band["perplexity"] for band in (*shipped, *(window or ()))}
    end = 0
    for band in own:
        if np.log(band["perplexity"]) > np.log(reference[band["to"]]) + HOLDS_WITHIN:
            break
        end = band["to"]
    return end or None


def reaches(cells: list[dict[str, Any]], threshold: float | None) -> int | None:
    """The longest distance up to which accuracy stays at `threshold` or above; None for not even the nearest."""
    if threshold is None:
        return None
    end = 0
    for cell in sorted(cells, key=lambda c: c["distance"]):
        if cell["accuracy"] < threshold:
            break
        end = cell["distance"]
    return end or None


def copying_threshold(near: float, guessed: float) -> float | None:
    """Halfway between guessing and copying from near by; None for a model that does not copy at all."""
    return None if near < guessed + 0.1 else (near + guessed) / 2


def mean_accuracy(cells: list[dict[str, Any]]) -> float:
    """Mean accuracy over cells of equal weight."""
    return float(np.mean([cell["accuracy"] for cell in cells]))


def recall_at(scaling: dict[str, Any], length: int) -> float | None:
    """Mean recall over depths at a length, or None where it was not measured."""
    cells = [cell for cell in scaling["recall"] if cell["length"] == length]
    return mean_accuracy(cells) if cells else None


def recommend(
    scalings: list[dict[str, Any]], *, to: int, trained: int, window: dict[str, Any] | None, copies: bool = True
) -> dict[str, str]:
    """Which scaling to take, by the rule in DEFINITIONS, with the reason in numbers.

    `copies` says whether the shipped model copies from near by; of one that does not, recall says nothing.
    """
    shipped = scalings[0]
    if not copies:
        return {"name": "none", "why": _NO_COPYING}
    shipped_recall = recall_at(shipped, to)
    if shipped_recall is None:
        return {
            "name": "none",
            "why": "No scaling was read in full, so nothing else can be recommended than the model as shipped.",
        }
    holding = [s for s in scalings[1:] if s["holds_to"] == to and recall_at(s, to) is not None]
    best = max((recall_at(s, to) or 0.0 for s in holding), default=0.0)
    if best < shipped_recall + BETTER_BY:
        if shipped["holds_to"] == to:
            return {"name": "none", "why": _shipped_holds(shipped, to, best, bool(holding))}
        return {"name": "none", "why": _truncate(scalings, to, trained, shipped_recall)}
    near_best = [s for s in holding if (recall_at(s, to) or 0.0) >= best - SAME_WITHIN]
    chosen = min(near_best, key=lambda s: s["short_cost"]["ratio"])
    return {"name": chosen["name"], "why": _chosen(chosen, shipped, to, window)}


_NO_COPYING = (
    "This model does not continue passages even from near by, inside its trained length, so reach and recall say "
    "nothing about its positions, and no scaling can be recommended. Perplexity by position is all there is to go by."
)


def _chosen(chosen: dict[str, Any], shipped: dict[str, Any], to: int, window: dict[str, Any] | None) -> str:
    last, shipped_last = chosen["bands"][-1], shipped["bands"][-1]
    alone = float(np.mean([c["accuracy_alone"] for c in chosen["recall"] if c["length"] == to]))
    text = (
        f"{chosen['name']} holds to {to:,}: perplexity {last['perplexity']:.1f} over the last "
        f"{last['to'] - last['from']:,} tokens, where the shipped model has {shipped_last['perplexity']:.1f}. At "
        f"{to:,} tokens it recalls {recall_at(chosen, to):.0%} of what was read anywhere before, the shipped model "
        f"{recall_at(shipped, to):.0%}, and {alone:.0%} can be guessed without the text. On short text its perplexity "
        f"is {chosen['short_cost']['ratio'] - 1:+.1%}."
    )
    if window is None:
        return text
    truncated = window["bands"][-1]["perplexity"]
    verdict = (
        "so for the next token alone no scaling is needed: cut the text instead"
        if truncated <= last["perplexity"] * 1.02
        else "so the far context helps the next token too"
    )
    return f"{text} The shipped model seeing only the last {window['window']:,} tokens has {truncated:.1f}, {verdict}."


def _shipped_holds(shipped: dict[str, Any], to: int, best: float, any_holds: bool) -> str:
    own = recall_at(shipped, to) or 0.0
    other = f"the best scaling {best:.0%}" if any_holds else "and no scaling that was read in full does both"
    return f"The shipped model holds to {to:,} by itself and recalls {own:.0%} of what was read, {other}."


def _truncate(scalings: list[dict[str, Any]], to: int, trained: int, shipped_recall: float) -> str:
    tried = ", ".join(
        f"{s['name']} to {s['holds_to']:,}" if s["holds_to"] else f"{s['name']} nowhere"
        for s in scalings[1:]
        if s["bands"]
    )
    return (
        f"No scaling that was read in full both holds to {to:,} and recalls more than the shipped model "
        f"({shipped_recall:.0%}); they hold: {tried or 'none was read'}. Take the model as shipped and cut the text to "
        f"the last {trained:,} tokens."
    )


def _round(value: Any) -> float:
    return round(float(value), 6)
