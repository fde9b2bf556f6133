"""The instruments of a survey, each over all documents: what its cells depend on, and what they give together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from theodolite.plan import ModelPlan
from theodolite.survey.bench import Bench, positions_digest
from theodolite.survey.passages import LENGTH
from theodolite.survey.passes import Nats, full_pass, recall_starts, truncated_window
from theodolite.survey.passkey import passkey
from theodolite.survey.reach import Spread, alone, far_reach, spread_reach
from theodolite.survey.scalings import Candidate
from theodolite.survey.settings import Settings, checkpoints
from theodolite.survey.texts import Document

Cells = list[dict[str, Any]]

_FAR_READ = 1024
_FAR_PASSAGES = 6
_FAR_SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1, 1.25, 1.5, 2, 3, 4)
_SHORT = 2048
_PASSKEY_DEPTHS = (0.1, 0.5, 0.9)


@dataclass(frozen=True, kw_only=True)
class Read:
    """A candidate read in full: nll (to,) per document, recall by length and depth, and the passes that it took.

    `lengths` has None for the one pass of a scaling whose frequencies do not depend on the length.
    """

    nll: list[Nats]
    recall: Cells
    lengths: list[int | None]


class Instruments:
    """Measures candidates on documents. `shipped` is the model's own plan; lengths are in tokens."""

    def __init__(
        self, bench: Bench, shipped: ModelPlan, documents: list[Document], settings: Settings, to: int
    ) -> None:
        assert shipped.max_position_embeddings is not None
        self.bench, self.shipped, self.documents, self.settings, self.to = bench, shipped, documents, settings, to
        self.trained = shipped.max_position_embeddings
        self.lengths = checkpoints(self.trained, to)
        self.band = max(LENGTH, self.trained // 4)
        self.short = min(_SHORT, self.trained // 4)
        self.far_read = min(_FAR_READ, self.trained // 8)
        self.form = _fitted(settings.spread, to)

    def spread(self, candidate: Candidate) -> Cells:
        """The spread reach at `to`: accuracy and nll by distance, nearest first."""
        form, plan = self.form, candidate.plan.at_length(self.to)
        settings = {"length": self.to, "tokens": form.tokens, "chunk": form.chunk, "passages": form.passages}
        results = [
            self.bench.measure(
                f"reach of {candidate.name}",
                "spread reach",
                plan,
                document,
                settings,
                self.bench.reading(form.tokens),
                lambda model, _, d=document: {
                    "cells": spread_reach(model, plan, d.tokens, length=self.to, spread=form)
                },
            )[0]["cells"]
            for document in self.documents
        ]
        return mean_cells(results)

    def far(self, candidate: Candidate) -> Cells:
        """The far reach on the first document, out to four times the trained length."""
        document, cells = self.documents[0], []
        for plan, distances in self._far_plans(candidate):
            settings = {"read": self.far_read, "distances": distances, "passages": _FAR_PASSAGES}
            cells += self.bench.measure(
                f"far reach of {candidate.name}",
                "far reach",
                plan,
                document,
                settings,
                self.bench.reading(self.far_read),
                lambda model, _, plan=plan, distances=distances: {
                    "cells": far_reach(
                        model, plan, document.tokens, read=self.far_read, distances=distances, passages=_FAR_PASSAGES
                    )
                },
            )[0]["cells"]
        return cells

    def near(self) -> float:
        """How well the shipped model copies from near by, inside its trained length: the best that can be expected."""
        plan, document = self.shipped.at_length(2 * self.far_read), self.documents[0]
        settings = {"read": self.far_read, "distances": [self.far_read], "passages": _FAR_PASSAGES}
        result, _ = self.bench.measure(
            "copying from near by",
            "far reach",
            plan,
            document,
            settings,
            self.bench.reading(self.far_read),
            lambda model, _: {
                "cells": far_reach(
                    model, plan, document.tokens, read=self.far_read, distances=[self.far_read], passages=_FAR_PASSAGES
                )
            },
        )
        return float(result["cells"][0]["accuracy"])

    def _far_plans(self, candidate: Candidate) -> Iterable[tuple[ModelPlan, list[int]]]:
        distances = sorted({max(round(self.trained * share), self.far_read) for share in _FAR_SHARES} | {self.to})
        if not candidate.plan.depends_on_length:
            return [(candidate.plan, distances)]
        # Each distance is the end of a sequence of another length, which has frequencies of its own.
        return [(candidate.plan.at_length(distance + self.far_read), [distance]) for distance in distances]

    def read(self, candidate: Candidate) -> Read:
        """The full pass to `to`, recall at every checkpoint, each with what can be guessed without the text.

        Where frequencies depend on the length, every checkpoint takes a pass with the frequencies of its length,
        except where they are those of the model as shipped, whose pass is then the same.
        """
        if candidate.plan.depends_on_length:
            nll, recall, lengths = self._read_by_length(candidate)
        else:
            nll, recall = self._pass(candidate.name, candidate.plan, self.to, self.lengths)
            lengths = [None]
        return Read(nll=nll, recall=self._with_guesses(recall), lengths=lengths)

    def _read_by_length(self, candidate: Candidate) -> tuple[list[Nats], Cells, list[int | None]]:
        shipped = self.shipped.at_length(self.to)
        recall: Cells = []
        lengths: list[int | None] = []
        for length in self.lengths:
            plan = candidate.plan.at_length(length)
            if positions_digest(plan) == positions_digest(shipped):
                nll, cells = self._pass("none", shipped, self.to, self.lengths)
            else:
                nll, cells = self._pass(candidate.name, plan, length, [length])
                lengths.append(length)
            recall += [cell for cell in cells if cell["length"] == length]
        return nll, recall, lengths

    def _pass(self, name: str, plan: ModelPlan, length: int, stops: list[int]) -> tuple[list[Nats], Cells]:
        depths, passages = self.settings.depths, self.settings.passages
        settings = {"length": length, "checkpoints": stops, "depths": list(depths), "passages": passages}
        rows, recalls = [], []
        for document in self.documents:
            result, row = self.bench.measure(
                f"full pass of {name}, {length:,} tokens",
                "pass",
                plan,
                document,
                settings,
                self.bench.reading(length),
                lambda model, advance, d=document: _pass_and_recall(
                    full_pass(
                        model,
                        plan,
                        d.tokens,
                        length=length,
                        checkpoints=stops,
                        depths=depths,
                        passages=passages,
                        progress=lambda tokens: advance(self.bench.reading(tokens)),
                    )
                ),
            )
            assert row is not None
            rows.append(row)
            recalls.append(result["recall"])
        return rows, mean_cells(recalls)

    def _with_guesses(self, recall: Cells) -> Cells:
        passages = self.settings.passages
        starts = [recall_starts(cell["length"], cell["depth"], passages) for cell in recall]
        guesses = self.guesses(starts)
        return [
            {**cell, "accuracy_alone": guess["accuracy"], "nll_alone": guess["nll"]}
            for cell, guess in zip(recall, guesses, strict=True)
        ]

    def guesses(self, starts: list[list[int]]) -> Cells:
        """What the shipped model makes of groups of passages with nothing before them: accuracy and nll a group."""
        plan = self.shipped.at_length(LENGTH)
        return mean_cells(
            [
                self.bench.measure(
                    "passages with nothing before them",
                    "alone",
                    plan,
                    document,
                    {"starts": starts},
                    0.0,
                    lambda model, _, d=document: {"cells": alone(model, plan, d.tokens, starts)},
                )[0]["cells"]
                for document in self.documents
            ]
        )

    def window(self) -> list[Nats]:
        """The shipped model with the last tokens only: nll (to - trained,) per document."""
        plan = self.shipped.at_length(self.trained)
        settings = {"length": self.to, "window": self.trained, "stride": self.band}
        rows = []
        for document in self.documents:
            _, row = self.bench.measure(
                f"truncated window of {self.trained:,} tokens",
                "window",
                plan,
                document,
                settings,
                self.window_work,
                lambda model, advance, d=document: truncated_window(
                    model,
                    plan,
                    d.tokens,
                    length=self.to,
                    window=self.trained,
                    stride=self.band,
                    progress=lambda tokens: advance(self.window_work * tokens / (self.to - self.trained)),
                ),
            )
            assert row is not None
            rows.append(row)
        return rows

    @property
    def window_work(self) -> float:
        """The work of the truncated window on one document."""
        return -(-(self.to - self.trained) // self.band) * self.bench.reading(self.trained)

    def short_text(self, candidate: Candidate) -> list[Nats]:
        """The first tokens alone: nll (short,) per document."""
        plan = candidate.plan.at_length(self.short)
        rows = []
        for document in self.documents:
            _, row = self.bench.measure(
                f"short text, {candidate.name}",
                "short text",
                plan,
                document,
                {"length": self.short},
                self.bench.reading(self.short),
                lambda model, _, d=document: full_pass(model, plan, d.tokens, length=self.short)[0],
            )
            assert row is not None
            rows.append(row)
        return rows

    def passkey(self, candidate: Candidate) -> Cells:
        """Whether a number hidden in the first document is found, by length and depth."""
        document, cells = self.documents[0], []
        for length in self.lengths:
            plan = candidate.plan.at_length(length)
            for depth in _PASSKEY_DEPTHS:
                result, _ = self.bench.measure(
                    f"passkey, {candidate.name}, {length:,} tokens",
                    "passkey",
                    plan,
                    document,
                    {"length": length, "depth": depth},
                    self.bench.reading(length),
                    lambda model, _, plan=plan, length=length, depth=depth: passkey(
                        model, self.bench.loaded.tokenizer, plan, document.tokens, length=length, depth=depth
                    ),
                )
                cells.append({"scaling": candidate.name, "length": length, "depth": depth, **result})
        return cells


def mean_cells(documents: list[Cells]) -> Cells:
    """Cells of several documents, which stand in the same order, as one: the measured numbers are averaged."""
    return [
        {**group[0], **{name: round(float(np.mean([cell[name] for cell in group])), 6) for name in ("nll", "accuracy")}}
        for group in zip(*documents, strict=True)
    ]


def _fitted(spread: Spread, length: int) -> Spread:
    """The same form for a length that is shorter than it wants."""
    chunk = max(LENGTH, min(spread.chunk, length // 4))
    return Spread(tokens=spread.tokens, chunk=chunk, passages=min(spread.passages, chunk // LENGTH))


def _pass_and_recall(measured: tuple[Nats, Cells]) -> tuple[Nats, dict[str, Any]]:
    return measured[0], {"recall": measured[1]}
