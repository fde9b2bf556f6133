"""The model card of an extended model: what was changed, what was measured, how to serve it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from theodolite.models.extend.markdown import code, escaped, table
from theodolite.models.extend.serving import serving
from theodolite.models.extend.target import reach_of, widened
from theodolite.plan import DynamicNTK, ModelPlan
from theodolite.plan.describe import describe, describe_scaling
from theodolite.plan.findings import find


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


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a card tells.

    Args:
        model: the name of the model that was extended; `hub` where it is one of the hub.
        scaling: its name, as it was asked for.
        before, after: what the model says about positions.
        to: tokens.
        summary: of the survey that it rests on (docs/summary.md), or None.
        entry: what the survey found of this scaling, or None where it tried another.
        search: the result of the search that found it (docs/search.md), or None.
        measured_to: tokens up to which it was found to hold, or to copy; 0 for none.
        part: the key of the language model in a config of several parts.
        gguf: the name of the GGUF file that the weights are dequantised from, or None.
    """

    model: str
    hub: bool
    scaling: str
    before: ModelPlan
    after: ModelPlan
    to: int
    summary: Mapping[str, Any] | None = None
    entry: Mapping[str, Any] | None = None
    search: Searched | None = None
    measured_to: int = 0
    part: str | None = None
    gguf: str | None = None


def write_card(card: Card, *, name: str, files: str, layout: str | None = None) -> str:
    """The text of a README.md.

    Args:
        name: of the folder or the .gguf file that is described.
        files: a sentence on the other files, which is Markdown already.
        layout: the pair layout of the weights, where the family's own code reads the other.
    """
    served = serving(card.after, name=name, to=card.to, part=card.part, layout=layout)
    sections = (_head(card), _changed(card), _measured(card), _warned(card), served, _rest(card, files))
    return "\n\n".join(line for section in sections for line in section) + "\n"


def _head(card: Card) -> Iterator[str]:
    if card.hub:
        yield f"---\nbase_model: {json.dumps(card.model)}\n---"
    yield f"# {escaped(card.model)}, extended to {card.to:,} tokens"
    if card.gguf is None:
        weights = f"The weights are those of {escaped(card.model)}, unchanged and untrained."
    else:
        weights = (
            f"The weights are those of {escaped(card.gguf)}, dequantised to float32 and untrained: their numbers are "
            "the quantised file's, not those of the model that it was made from."
        )
    yield (
        f"{weights} Only what the files say about positions is new: the scaling {code(card.scaling)}, written by "
        "`theodolite extend`."
    )


def _changed(card: Card) -> Iterator[str]:
    before, after = card.before, card.after
    yield "## What was changed"
    rows = [
        ["length stated, tokens", f"{before.max_position_embeddings:,}", f"{after.max_position_embeddings:,}"],
        ["positions", escaped(describe(before)), escaped(describe(after))],
    ]
    if len(before.rotaries) == len(after.rotaries) == 1:
        old, new = before.rotaries[0], after.rotaries[0]
        rows.append(["base", f"{old.rope_theta:,.10g}", f"{new.rope_theta:,.10g}"])
        rows.append(["factor on cos and sin", f"{old.attention_factor():.6g}", f"{new.attention_factor():.6g}"])
    yield table(("", "before", "after"), rows)
    yield from _factor(card)
    if any(isinstance(rotary.scaling, DynamicNTK) for rotary in after.rotaries):
        yield (
            f"`max_position_embeddings` stays at {after.max_position_embeddings:,}: transformers grows the base of "
            f"dynamic NTK from that length. The model is meant for up to {card.to:,} tokens."
        )


def _factor(card: Card) -> Iterator[str]:
    """What the factor in the files is, where the scaling's name or the lengths let one expect another."""
    reach, own = reach_of(card.before, card.after), widened(card.before, card.after)
    if card.search is not None and reach is not None and reach < card.to:
        yield (
            "The factor is what the search found, beside its base and its ramp, and no ratio of lengths: times the "
            f"trained length it is {reach:,.0f} tokens, and {card.to:,} are stated. Engines that take a scaling to "
            "reach no further may refuse that length."
        )
    elif card.search is None and own is not None:
        yield (
            f"{code(card.scaling)} counts over the {card.before.max_position_embeddings:,} tokens that the model "
            f"stated with {describe_scaling(own[0])} of its own: the files say {describe_scaling(own[1])}."
        )


def _warned(card: Card) -> Iterator[str]:
    """What is read differently by others since the change."""
    known = find(card.before)
    found = [finding for finding in find(card.after) if finding.severity != "note" and finding not in known]
    if found:
        yield "## What to know"
        yield "\n".join(f"- {code(f.field)}: {escaped(f.message)}. To change it: {escaped(f.fix)}." for f in found)


def _searched(search: Searched) -> Iterator[str]:
    """What full passes gave of a frequency map that a search has found, beside the best named scalings."""
    texts = "; ".join(
        f"{escaped(name)}, {tokens:,} tokens, SHA-256 {code(sha256)}" for name, tokens, sha256 in search.texts
    )
    yield (
        f"Found by `theodolite search` {escaped(search.version)}, and confirmed by full passes in "
        f"{escaped(search.dtype)} over text that it did not see: {texts}."
    )
    heads = ("", *(f"recall at {length:,}" for length in search.lengths), "short text, nats a token")
    rows = [
        [code(name), *(f"{search.recall[length][name]:.1%}" for length in search.lengths), f"{short:.4f}"]
        for name, short in search.short.items()
    ]
    yield table(heads, rows)
    yield escaped(search.why)


def _measured(card: Card) -> Iterator[str]:
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


def _rest(card: Card, files: str) -> Iterator[str]:
    yield "## Files and licence"
    yield files
    yield (
        f"The weights are {escaped(card.model)}'s, and its licence holds for them here as it does there. This card "
        "says nothing of what the model may be used for: see the original's."
    )
