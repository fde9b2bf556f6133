"""Where cells are measured: one loaded model, the store of what is done, and someone who listens."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from theodolite.models import patched
from theodolite.models.load import LoadedModel
from theodolite.plan import ModelPlan
from theodolite.positions import RelativeMap
from theodolite.runs import Finished, Store
from theodolite.survey.maps import record
from theodolite.survey.passes import Nats
from theodolite.survey.texts import Document

# Raised when an instrument measures something else than before under the same settings.
_VERSION = 1
# The time of reading at mapped distances over that of plain reading: 1.2 to 1.6.
_MAPPED = 1.4

Advance = Callable[[float], None]
Cells = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What an instrument gives: a few cells of plain data, and a long row of numbers where it has one."""

    cells: Cells = field(default_factory=list)
    row: Nats | None = None


class Listener(Protocol):
    """Who is told how far the work has come; amounts are of `Bench.reading` and mean nothing by themselves."""

    def expect(self, total: float) -> None:
        """So much is to be done in all."""

    def working(self, what: str) -> None:
        """This is being measured now."""

    def advance(self, done: float) -> None:
        """So much more is done."""

    def finished(self, line: str) -> None:
        """A figure is there."""


class Bench:
    """Measures a cell, or takes it from the store where it was measured before."""

    def __init__(self, loaded: LoadedModel, store: Store, listener: Listener) -> None:
        self.loaded = loaded
        self.store = store
        self.listener = listener
        config = loaded.model.config.get_text_config()
        width = config.num_attention_heads * max(rotary.head_dim for rotary in loaded.plan.rotaries)
        # Operations of attention over those of the weights, per token of context, at about half their speed.
        self._quadratic = 2 * len(loaded.plan.layers) * width / loaded.model.num_parameters()

    def reading(self, tokens: int, relative: RelativeMap | None = None) -> float:
        """The work of reading `tokens` tokens, at mapped distances if so, in tokens of a short text."""
        plainly = tokens + self._quadratic * tokens * tokens / 2
        return float(plainly if relative is None else _MAPPED * plainly)

    def measure(
        self,
        what: str,
        cell: dict[str, Any],
        plan: ModelPlan,
        document: Document,
        work: float,
        run: Callable[[Any, Tensor, Advance], Measured],
        relative: RelativeMap | None = None,
    ) -> Measured:
        """The result of a cell, measured now if it is not in the store.

        Args:
            what: a few words for who watches.
            cell: with the model, its dtype, the document and the plan, all that the result depends on.
            plan: what the model is patched with; its frequencies must be settled.
            work: how much is done when the cell is.
            run: given the patched model, the document's tokens and a way to say how much is done, measures.
            relative: the map of distances that `run` reads at, if any.
        """
        cell = {
            "version": _VERSION,
            "model": self.loaded.fingerprint,
            "dtype": str(self.loaded.model.dtype).removeprefix("torch."),
            "text": document.sha256,
            "positions": positions_digest(plan),
            **cell,
        }
        if relative is not None:
            # Only where there is one, so that what was measured without keeps its key.
            cell["relative"] = record(relative)
        found = self.store.get(cell)
        if found is None:
            found = self._run(what, cell, plan, document, work, run)
        else:
            self.listener.advance(work)
        return Measured(cells=found.result["cells"], row=found.array)

    def _run(
        self,
        what: str,
        cell: dict[str, Any],
        plan: ModelPlan,
        document: Document,
        work: float,
        run: Callable[[Any, Tensor, Advance], Measured],
    ) -> Finished:
        done = 0.0

        def advance(to: float) -> None:
            nonlocal done
            self.listener.advance(to - done)
            done = to

        self.listener.working(what)
        begun = time.perf_counter()
        with patched(self.loaded.model, plan) as model:
            measured = run(model, document.tokens, advance)
        seconds = round(time.perf_counter() - begun, 2)
        advance(work)
        return self.store.put(cell, {"cells": measured.cells}, array=measured.row, what=what, seconds=seconds)


def positions_digest(plan: ModelPlan) -> str:
    """A hash of what a patch takes from a plan whose frequencies are settled: angles, amplitudes, scales, masks."""
    digest = hashlib.sha256()
    for layer in plan.layers:
        rotate = layer.rotate
        if rotate is not None:
            digest.update(rotate.inv_freq().tobytes())
            digest.update(repr((rotate.attention_factor(), rotate.interleaved, rotate.trailing)).encode())
        digest.update(repr((layer.score_scale, layer.temperature, layer.mask)).encode())
    return digest.hexdigest()[:24]
