"""What was measured of an extended model: the section of its card."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from theodolite.models.extend.markdown import code, escaped, table

if TYPE_CHECKING:
    from theodolite.models.extend.card import Card


class Searched(Protocol):
    """What a search gave, as `survey.found.Confirmation` has it: that room stands below this one."""

    @property
    def version(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def lengths(self) -> tuple[int, ...]: ...

    @property
    def recall(self) -> Mapping[int, Mapping[str, float]]: ...

    @property
    def short(self) -> Mapping[str, float]: ...

    @property
    def texts(self) -> tuple[tuple[str, int, str], ...]: ...

    @property
    def why(self) -> str: ...


def _searched(search: Searched) -> Iterator[str]:
    """What full passes gave of a frequency map that a search has found, beside the best named scalings."""
    texts = "; ".join(
        f"{escaped(name)}, {tokens:,} tokens, SHA-256 {code(sha256)}" for name, tokens, sha256 in search.texts
    )
    yield (
        f"Found by `theodolite search` {escaped(search.version)}, and put to full passes in "
        f"{escaped(search.dtype)} over text that it did not see: {texts}."
    )
    heads = ("", *(f"recall at {length:,}" for length in search.lengths), "short text, nats a token")
    rows = [
        [code(name), *(f"{search.recall[length][name]:.1%}" for length in search.lengths), f"{short:.4f}"]
        for name, short in search.short.items()
    ]
    yield table(heads, rows)
    yield escaped(search.why)


def measured(card: Card) -> Iterator[str]:
    """Paragraphs of Markdown: what a search or a survey found of the scaling, or that there is none."""
    yield "## What was measured"
    summary, entry = card.summary, card.entry
    if card.search is not None:
        yield from _searched(card.search)
    if summary is None or entry is None:
        if card.search is not None:
            return
        yield (
            "Nothing: no survey of this scaling stands behind this length. `theodolite survey` with "
            f"{code(f'--scaling none,{card.scaling} --to {card.to}')} measures it."
        )
        return
    if card.measured_to < card.to:
        yield (
            f"**Not to this length.** The survey found this scaling to hold to {card.measured_to:,} tokens, and "
            f"{card.to:,} are stated: what lies between is not measured."
        )
    details = summary["model_details"]
    texts = "; ".join(
        f"{escaped(text['name'])}, {text['tokens']:,} tokens, SHA-256 {code(text['sha256'])}"
        for text in summary["texts"]
    )
    yield (
        f"By `theodolite survey` {escaped(summary['theodolite'])}, to {summary['to']:,} tokens, in "
        f"{escaped(details['dtype'])} on {escaped(details['device'])}. Text: {texts}."
    )
    yield from _bands(summary, entry)
    yield from _recall(summary, entry)
    cost = entry["short_cost"]
    facts = [
        f"Holds to: {_tokens(entry['holds_to'])}. {escaped(summary['definitions']['holds_to'])}",
        f"Reaches: {_tokens(entry['reaches'])}. {escaped(summary['definitions']['reaches'])}",
    ]
    if cost:
        facts.append(
            f"On {cost['tokens']:,} tokens of short text: perplexity {cost['perplexity']:.2f}, as shipped "
            f"{cost['shipped']:.2f}, which is a ratio of {cost['ratio']:.4f}."
        )
    yield "\n".join(f"- {fact}" for fact in facts)


def _tokens(count: int | None) -> str:
    return "nowhere, or not measured" if count is None else f"{count:,} tokens"


def _bands(summary: Mapping[str, Any], entry: Mapping[str, Any]) -> Iterator[str]:
    """Perplexity by position; each column from its own bands."""
    if not entry["bands"]:
        return
    window = summary["truncated_window"] or {"bands": []}
    shipped = _named(summary, "none")
    columns = [{(b["from"], b["to"]): b["perplexity"] for b in s["bands"]} for s in (shipped, window, entry)]
    rows = [
        [f"{begin:,} to {end:,}", *(_perplexity(column.get((begin, end))) for column in columns)]
        for begin, end in sorted(columns[-1])
    ]
    yield "Perplexity by position in the text:"
    yield table(("tokens", "as shipped", "as shipped, on a moving window", escaped(entry["name"])), rows)


def _perplexity(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def _recall(summary: Mapping[str, Any], entry: Mapping[str, Any]) -> Iterator[str]:
    lengths = sorted({cell["length"] for cell in entry["recall"]})
    if not lengths:
        return
    shipped = _named(summary, "none")
    rows = [
        [
            f"{length:,}",
            *(_share(s["recall"], length, "accuracy") for s in (shipped, entry)),
            _share(entry["recall"], length, "accuracy_alone"),
        ]
        for length in lengths
    ]
    yield f"Recall, the mean over depths. {escaped(summary['definitions']['recall'])}"
    yield table(("tokens read", "as shipped", escaped(entry["name"]), "guessed alone"), rows)


def _share(cells: list[Mapping[str, Any]], length: int, key: str) -> str:
    values = [cell[key] for cell in cells if cell["length"] == length]
    return f"{math.fsum(values) / len(values):.0%}" if values else "–"


def _named(summary: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    empty: dict[str, Any] = {"bands": [], "recall": []}
    return next((s for s in summary["scalings"] if s["name"] == name), empty)
