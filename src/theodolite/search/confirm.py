"""The dear instrument's word on what a search has found: full passes over text that it did not see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from theodolite.plan import ModelPlan
from theodolite.survey.bench import Advance, Bench, Measured
from theodolite.survey.passages import LENGTH
from theodolite.survey.passes import full_pass
from theodolite.survey.texts import Document

BANDS = 12
_PASSAGES = 6
_RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """What full passes gave of one plan.

    Args:
        recall: by length (tokens), accuracy of each passage cell, shape (documents, bands), nearest band last.
        perplexity: by length, over all tokens read up to it.
        short: nats a token of short text.
    """

    recall: dict[int, Any]
    perplexity: dict[int, float]
    short: float


def lengths_to_confirm(trained: int, to: int) -> list[int]:
    """1.5 and 2 times the trained length where `to` is no less, and `to`."""
    return sorted({length for length in (trained + trained // 2, 2 * trained) if length <= to} | {to})


def depths() -> list[float]:
    """The middles of equal bands of a text, 0 its beginning."""
    return [round((band + 0.5) / BANDS, 6) for band in range(BANDS)]


def read_in_full(
    bench: Bench, plan: ModelPlan, documents: tuple[Document, ...], lengths: list[int], what: str, short: float
) -> Confirmed:
    """Recall from all depths at each length, and perplexity; one pass where the frequencies are those of any length."""
    passages = min(_PASSAGES, max(1, lengths[0] // BANDS // LENGTH))
    groups = [[length] for length in lengths] if plan.depends_on_length else [lengths]
    recall: dict[int, Any] = {}
    perplexity: dict[int, float] = {}
    for stops in groups:
        found = _passes(bench, plan.at_length(stops[-1]), documents, stops, passages, what)
        for stop in stops:
            recall[stop] = np.asarray(
                [[cell["accuracy"] for cell in one.cells if cell["length"] == stop] for one in found]
            )
            rows = [one.row[:stop] for one in found if one.row is not None]
            perplexity[stop] = float(np.exp(np.mean(np.concatenate(rows), dtype=np.float64)))
    return Confirmed(recall=recall, perplexity=perplexity, short=short)


def _passes(
    bench: Bench, plan: ModelPlan, documents: tuple[Document, ...], stops: list[int], passages: int, what: str
) -> list[Measured]:
    """One pass a document to the last of `stops`, with recall at each of them."""
    length = stops[-1]
    form: dict[str, Any] = {"checkpoints": stops, "depths": depths(), "passages": passages}

    def run(model: Any, tokens: Tensor, advance: Advance) -> Measured:
        row, cells = full_pass(
            model, plan, tokens, length=length, progress=lambda read: advance(bench.reading(read)), **form
        )
        return Measured(cells=cells, row=row)

    return [
        bench.measure(
            f"full pass of {what}, {length:,} tokens of {document.name}",
            {"instrument": "pass", "length": length, **form},
            plan,
            document,
            bench.reading(length),
            run,
        )
        for document in documents
    ]


def gain(winner: Confirmed, rival: Confirmed, length: int) -> dict[str, float]:
    """How much more the winner recalls at a length, with its 95 % interval: pairs of cells, drawn anew."""
    difference = (winner.recall[length] - rival.recall[length]).ravel()
    drawn = np.random.default_rng(0).integers(len(difference), size=(_RESAMPLES, len(difference)))
    low, high = np.percentile(difference[drawn].mean(axis=1), (2.5, 97.5))
    return {"mean": _rounded(difference.mean()), "low": _rounded(low), "high": _rounded(high)}


def bands(length: int, found: dict[str, Confirmed]) -> list[dict[str, Any]]:
    """Recall by distance (tokens from the end of `length`), nearest first; `accuracy` by name."""
    return [
        {
            "distance": round(length * (1 - depth)),
            "accuracy": {name: _rounded(one.recall[length][:, band].mean()) for name, one in found.items()},
        }
        for band, depth in reversed(list(enumerate(depths())))
    ]


def _rounded(value: Any) -> float:
    return round(float(value), 6)
