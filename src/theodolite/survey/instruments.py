"""The instruments of a survey, each over all documents: what its cells depend on, and what they give together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from theodolite.plan import ModelPlan
from theodolite.positions import RelativeMap
from theodolite.survey.bench import Advance, Bench, Cells, Measured, positions_digest
from theodolite.survey.passages import LENGTH
from theodolite.survey.passes import Nats, full_pass, recall_starts, truncated_window
from theodolite.survey.passkey import passkey
from theodolite.survey.reach import Spread, alone, far_reach, spread_groups, spread_reach
from theodolite.survey.scalings import AS_SHIPPED, Candidate
from theodolite.survey.settings import Settings, checkpoints
from theodolite.survey.texts import Document
from theodolite.survey.verdict import copying_threshold, mean_accuracy

_FAR_READ = 1024
_FAR_PASSAGES = 6
_FAR_SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1, 1.25, 1.5, 2, 3, 4)
_SHORT = 2048
_PASSKEY_DEPTHS = (0.1, 0.5, 0.9)


@dataclass(frozen=True, kw_only=True)
class Read:
    """A candidate read in full: nll (to,) per document, recall by length and depth, and the passes that it took.

    `lengths` has None for one pass to the end, of a scaling whose frequencies are the same at all lengths.
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
        self.band = -(-self.trained // 4)
        self.short = min(_SHORT, self.trained // 4, to)
        self.far_read = min(_FAR_READ, self.trained // 8, to)
        self.form = _fitted(settings.spread, to)

    def spread(self, candidate: Candidate) -> Cells:
        """The spread reach at `to`: accuracy and nll by distance, nearest first."""
        form, plan, relative = self.form, candidate.plan.at_length(self.to), candidate.relative
        cell = {"instrument": "spread reach", "length": self.to, **asdict(form)}
        measured = self._over_documents(
            f"reach of {candidate.name}",
            cell,
            plan,
            self.bench.reading(form.tokens, relative),
            lambda model, tokens, _: Measured(
                cells=spread_reach(model, plan, tokens, length=self.to, spread=form, relative=relative)
            ),
            relative,
        )
        return mean_cells(measured)

    def far(self, candidate: Candidate) -> Cells:
        """The far reach on the first document, out to four times the trained length."""
        distances = sorted({max(round(self.trained * share), self.far_read) for share in _FAR_SHARES} | {self.to})
        # Each distance is the end of a sequence of another length, which may have frequencies of its own.
        alike: dict[str, tuple[ModelPlan, list[int]]] = {}
        for distance in distances:
            plan = candidate.plan.at_length(distance + self.far_read)
            alike.setdefault(positions_digest(plan), (plan, []))[1].append(distance)
        return [cell for plan, some in alike.values() for cell in self._far(candidate, plan, some)]

    def near(self) -> float:
        """How well the shipped model copies from near by, inside its trained length: the best that can be expected."""
        plan = self.shipped.at_length(2 * self.far_read)
        shipped = Candidate(name=AS_SHIPPED, plan=self.shipped)
        return float(self._far(shipped, plan, [self.far_read])[0]["accuracy"])

    def threshold(self) -> float | None:
        """Accuracy from which a distance counts as reached, by what the shipped model copies from near by.

        None for a model that does not copy even from there.
        """
        guessed = mean_accuracy(self.guesses(spread_groups(self.form, self.to)))
        return copying_threshold(self.near(), guessed)

    def _far(self, candidate: Candidate, plan: ModelPlan, distances: list[int]) -> Cells:
        relative = candidate.relative
        form: dict[str, Any] = {"read": self.far_read, "distances": distances, "passages": _FAR_PASSAGES}
        return self.bench.measure(
            f"far reach of {candidate.name}",
            {"instrument": "far reach", **form},
            plan,
            self.documents[0],
            self.bench.reading(self.far_read, relative),
            lambda model, tokens, _: Measured(cells=far_reach(model, plan, tokens, relative=relative, **form)),
            relative,
        ).cells

    def read(self, candidate: Candidate) -> Read:
        """The full pass to `to`, recall at every checkpoint, each with what can be guessed without the text.

        Where frequencies depend on the length, every checkpoint takes a pass with the frequencies of its length,
        except where they are those of the model as shipped, whose pass is then the same.
        """
        if not candidate.plan.depends_on_length:
            nll, recall = self._pass(candidate, candidate.plan, self.to, self.lengths)
            return Read(nll=nll, recall=self._with_guesses(recall), lengths=[None])
        shipped = Candidate(name=AS_SHIPPED, plan=self.shipped.at_length(self.to))
        recall = []
        lengths: list[int | None] = []
        for length in self.lengths:
            plan = candidate.plan.at_length(length)
            if candidate.relative is None and positions_digest(plan) == positions_digest(shipped.plan):
                nll, cells = self._pass(shipped, shipped.plan, self.to, self.lengths)
            else:
                nll, cells = self._pass(candidate, plan, length, [length])
                lengths.append(length)
            recall += [cell for cell in cells if cell["length"] == length]
        return Read(nll=nll, recall=self._with_guesses(recall), lengths=lengths or [None])

    def _pass(self, candidate: Candidate, plan: ModelPlan, length: int, stops: list[int]) -> tuple[list[Nats], Cells]:
        relative = candidate.relative
        recall = {"checkpoints": stops, "depths": self.settings.depths, "passages": self.settings.passages}

        def run(model: Any, tokens: Tensor, advance: Advance) -> Measured:
            row, cells = full_pass(
                model,
                plan,
                tokens,
                length=length,
                checkpoints=stops,
                depths=self.settings.depths,
                passages=self.settings.passages,
                relative=relative,
                progress=lambda read: advance(self.bench.reading(read, relative)),
            )
            return Measured(cells=cells, row=row)

        measured = self._over_documents(
            f"full pass of {candidate.name}, {length:,} tokens",
            {"instrument": "pass", "length": length, **recall},
            plan,
            self.bench.reading(length, relative),
            run,
            relative,
        )
        return _rows(measured), mean_cells(measured)

    def _with_guesses(self, recall: Cells) -> Cells:
        starts = [recall_starts(cell["length"], cell["depth"], self.settings.passages) for cell in recall]
        return [
            {**cell, "accuracy_alone": guess["accuracy"], "nll_alone": guess["nll"]}
            for cell, guess in zip(recall, self.guesses(starts), strict=True)
        ]

    def guesses(self, starts: list[list[int]]) -> Cells:
        """What the shipped model makes of groups of passages with nothing before them: accuracy and nll a group."""
        plan = self.shipped.at_length(LENGTH)
        measured = self._over_documents(
            "passages with nothing before them",
            {"instrument": "alone", "starts": starts},
            plan,
            0.0,
            lambda model, tokens, _: Measured(cells=alone(model, plan, tokens, starts)),
        )
        return mean_cells(measured)

    def window(self) -> list[Nats]:
        """The shipped model with the last tokens only: nll (to - trained,) per document."""
        plan, work, past = self.shipped.at_length(self.trained), self.window_work, self.to - self.trained
        form = {"length": self.to, "window": self.trained, "stride": self.band}
        measured = self._over_documents(
            f"truncated window of {self.trained:,} tokens",
            {"instrument": "window", **form},
            plan,
            work,
            lambda model, tokens, advance: Measured(
                row=truncated_window(model, plan, tokens, **form, progress=lambda scored: advance(work * scored / past))
            ),
        )
        return _rows(measured)

    @property
    def window_work(self) -> float:
        """The work of the truncated window on one document."""
        return -(-(self.to - self.trained) // self.band) * self.bench.reading(self.trained)

    def short_text(self, candidate: Candidate) -> list[Nats]:
        """The first tokens alone: nll (short,) per document."""
        plan, relative = candidate.plan.at_length(self.short), candidate.relative
        measured = self._over_documents(
            f"short text, {candidate.name}",
            {"instrument": "short text", "length": self.short},
            plan,
            self.bench.reading(self.short, relative),
            lambda model, tokens, _: Measured(
                row=full_pass(model, plan, tokens, length=self.short, relative=relative)[0]
            ),
            relative,
        )
        return _rows(measured)

    def passkey(self, candidate: Candidate) -> Cells:
        """Whether a number hidden in the first document is found, by length and depth."""
        return [self._passkey(candidate, length, depth) for length in self.lengths for depth in _PASSKEY_DEPTHS]

    def _passkey(self, candidate: Candidate, length: int, depth: float) -> dict[str, Any]:
        plan, relative, tokenizer = candidate.plan.at_length(length), candidate.relative, self.bench.loaded.tokenizer
        measured = self.bench.measure(
            f"passkey, {candidate.name}, {length:,} tokens",
            {"instrument": "passkey", "length": length, "depth": depth},
            plan,
            self.documents[0],
            self.bench.reading(length, relative),
            lambda model, tokens, _: Measured(
                cells=[passkey(model, tokenizer, plan, tokens, length=length, depth=depth, relative=relative)]
            ),
            relative,
        )
        return {"scaling": candidate.name, "length": length, "depth": depth, **measured.cells[0]}

    def _over_documents(
        self,
        what: str,
        cell: dict[str, Any],
        plan: ModelPlan,
        work: float,
        run: Callable[..., Measured],
        relative: RelativeMap | None = None,
    ) -> list[Measured]:
        return [self.bench.measure(what, cell, plan, document, work, run, relative) for document in self.documents]


def mean_cells(documents: list[Measured]) -> Cells:
    """Cells of several documents, which stand in the same order, as one: the measured numbers are averaged."""
    return [
        {**group[0], **{name: round(float(np.mean([cell[name] for cell in group])), 6) for name in ("nll", "accuracy")}}
        for group in zip(*(measured.cells for measured in documents), strict=True)
    ]


def _rows(documents: list[Measured]) -> list[Nats]:
    return [measured.row for measured in documents if measured.row is not None]


def _fitted(spread: Spread, length: int) -> Spread:
    """The same form for a length that is shorter than it wants."""
    chunk = max(LENGTH, min(spread.chunk, length // 4))
    return Spread(tokens=spread.tokens, chunk=chunk, passages=min(spread.passages, chunk // LENGTH))
