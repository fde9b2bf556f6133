"""The model card of an extended model: what was changed, what was measured, how to serve it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from theodolite.models.extend.markdown import code, escaped, table
from theodolite.models.extend.measured import Searched, measured
from theodolite.models.extend.serving import serving
from theodolite.models.extend.target import reach_of, widened
from theodolite.plan import DynamicNTK, ModelPlan
from theodolite.plan.describe import describe, describe_scaling
from theodolite.plan.findings import Finding, find


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

    @property
    def free_factor(self) -> bool:
        """Whether a search has chosen a factor that is less than the ratio of the lengths."""
        reach = None if self.search is None else reach_of(self.before, self.after)
        return reach is not None and reach < self.to

    def findings(self, found: Iterable[Finding]) -> tuple[Finding, ...]:
        """What inspect finds, without the fault that a free factor would be if it stood for a ratio."""
        return tuple(
            replace(finding, severity="warning")
            if self.free_factor and (finding.field, finding.severity) == ("factor", "error")
            else finding
            for finding in found
        )


def write_card(card: Card, *, name: str, files: str, layout: str | None = None) -> str:
    """The text of a README.md.

    Args:
        name: of the folder or the .gguf file that is described.
        files: a sentence on the other files, which is Markdown already.
        layout: the pair layout of the weights, where the family's own code reads the other.
    """
    served = serving(card.after, name=name, to=card.to, part=card.part, layout=layout)
    sections = (_head(card), _changed(card), measured(card), _warned(card), served, _rest(card, files))
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
    if card.free_factor:
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
    if card.free_factor:
        # What the factor is has been said above.
        found = [finding for finding in found if finding.field != "factor"]
    if found:
        yield "## What to know"
        yield "\n".join(f"- {code(f.field)}: {escaped(f.message)}. To change it: {escaped(f.fix)}." for f in found)


def _rest(card: Card, files: str) -> Iterator[str]:
    yield "## Files and licence"
    yield files
    yield (
        f"The weights are {escaped(card.model)}'s, and its licence holds for them here as it does there. This card "
        "says nothing of what the model may be used for: see the original's."
    )
