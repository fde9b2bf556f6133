"""What a frequency map costs: how badly passages are copied over all distances, and what is lost on short text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from theodolite.plan import ModelPlan
from theodolite.survey.bench import Bench, Cells, Measured
from theodolite.survey.instruments import Instruments
from theodolite.survey.passes import full_pass
from theodolite.survey.scalings import Candidate
from theodolite.survey.settings import Settings
from theodolite.survey.texts import Document, tokens_digest

SHORT_WEIGHT = 20.0
"""Nats of copying that a nat of short text is worth, where more is lost than a named scaling loses."""
_SHORT, _SHORTS = 1024, 3


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What a plan gives on some text: mean nats a token."""

    copying: float
    accuracy: float
    short: float
    cells: Cells

    def cost(self, short: float) -> float:
        """What a search makes small: nats of copying, and dearly those of short text above `short`."""
        return self.copying + SHORT_WEIGHT * max(0.0, self.short - short)


class Trials:
    """Measures plans on documents by the cheap instruments, each once: what the store has is not measured again.

    Args:
        shipped: the model's own plan.
        settings: of a survey; its spread is the form of the copying instrument.
        to: the length (tokens) over which passages are copied.
    """

    def __init__(self, bench: Bench, shipped: ModelPlan, settings: Settings, *, to: int) -> None:
        assert shipped.max_position_embeddings is not None
        self.bench, self.shipped, self.settings, self.to = bench, shipped, settings, to
        self.short = min(_SHORT, shipped.max_position_embeddings // 4)

    def instruments(self, documents: tuple[Document, ...]) -> Instruments:
        """Those of a survey, over these documents."""
        return Instruments(self.bench, self.shipped, list(documents), self.settings, self.to)

    @property
    def work(self) -> float:
        """The work of one plan on one document, as the bench counts it."""
        return self.bench.reading(self.settings.spread.tokens) + _SHORTS * self.bench.reading(self.short)

    def measure(self, plan: ModelPlan, documents: tuple[Document, ...], what: str) -> Measure:
        """Copying and short text of a plan, over all documents."""
        cells = self.instruments(documents).spread(Candidate(name=what, plan=plan))
        return Measure(
            copying=float(np.mean([cell["nll"] for cell in cells])),
            accuracy=float(np.mean([cell["accuracy"] for cell in cells])),
            short=self.short_text(plan, documents, what),
            cells=cells,
        )

    def short_text(self, plan: ModelPlan, documents: tuple[Document, ...], what: str) -> float:
        """Nats a token of short texts, several from each document."""
        settled = plan.at_length(self.short)
        rows = [self._short(settled, text, what) for document in documents for text in self._shorts(document)]
        return float(np.mean(np.concatenate(rows), dtype=np.float64))

    def _short(self, plan: ModelPlan, text: Document, what: str) -> Any:
        return self.bench.measure(
            f"short text, {what}",
            {"instrument": "short text", "length": self.short},
            plan,
            text,
            self.bench.reading(self.short),
            lambda model, tokens, _: Measured(row=full_pass(model, plan, tokens, length=self.short)[0]),
        ).row

    def _shorts(self, document: Document) -> list[Document]:
        """Short texts from even places of a document, one token longer than what is scored."""
        size = self.short + 1
        firsts = np.linspace(0, len(document.tokens) - size, _SHORTS).round().astype(int)
        return [_cut(document, int(first), size) for first in firsts]


def _cut(document: Document, first: int, size: int) -> Document:
    tokens: Tensor = document.tokens[first : first + size].contiguous()
    return Document(name=document.name, tokens=tokens, sha256=tokens_digest(tokens))


class Unsaid:
    """A listener to many small measurements: their work counts, and what they are is not told one by one."""

    def __init__(self, listener: Any) -> None:
        self._listener = listener
        self.advance: Callable[[float], None] = listener.advance

    def expect(self, total: float) -> None:
        """Nothing: who made this has told the total."""

    def working(self, what: str) -> None:
        """Nothing: they come by hundreds."""

    def finished(self, line: str) -> None:
        self._listener.finished(line)


def require_finite(value: float, what: str) -> float:
    """A number that an optimiser can take.

    Raises:
        FloatingPointError: it is none, so the model is broken, whatever its positions are.
    """
    if not np.isfinite(value):
        raise FloatingPointError(f"{what}: the model's outputs are not numbers; try another dtype")
    return value
