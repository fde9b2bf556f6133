"""Where cells are measured: one loaded model, the store of what is done, and someone who listens."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from theodolite.models import patched
from theodolite.models.load import LoadedModel
from theodolite.plan import ModelPlan
from theodolite.runs import Result, Store
from theodolite.survey.texts import Document

# Raised when an instrument measures something else than before under the same settings.
_VERSION = 1

Advance = Callable[[float], None]


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
        # Operations of attention over those of the weights, per token of context; attention runs at about half the speed.
        self._quadratic = 2 * len(loaded.plan.layers) * width / loaded.model.num_parameters()

    def reading(self, tokens: int, after: int = 0) -> float:
        """The work of reading `tokens` tokens after `after` others, in tokens of a short text."""
        return tokens + self._quadratic * tokens * (after + tokens / 2)

    def measure(
        self,
        what: str,
        instrument: str,
        plan: ModelPlan,
        document: Document,
        settings: dict[str, Any],
        work: float,
        run: Callable[[Any, Advance], Result | NDArray[np.float32] | tuple[NDArray[np.float32], Result]],
    ) -> tuple[Result, NDArray[np.float32] | None]:
        """The result of a cell, and its row of numbers where it has one.

        Args:
            what: a few words for who watches.
            plan: what the model is patched with; its frequencies must be settled.
            settings: with instrument, model, dtype, tokens and frequencies, all that the result depends on.
            work: how much is done when the cell is.
            run: given the patched model and a way to say how much is done, measures: a result, a row of
                numbers (kept in a file of its own), or a row and a result.
        """
        cell = {
            "version": _VERSION,
            "instrument": instrument,
            "model": self.loaded.fingerprint,
            "dtype": str(self.loaded.model.dtype).removeprefix("torch."),
            "text": document.sha256,
            "positions": positions_digest(plan),
            **settings,
        }
        found = self.store.get(cell)
        if found is None:
            self.listener.working(what)
            done = 0.0

            def advance(to: float) -> None:
                nonlocal done
                self.listener.advance(to - done)
                done = to

            begun = time.perf_counter()
            with patched(self.loaded.model, plan) as model:
                measured = run(model, advance)
            row, result = _apart(measured)
            seconds = round(time.perf_counter() - begun, 2)
            found = self.store.put(cell, {**result, "row": row is not None}, array=row, what=what, seconds=seconds)
            advance(work)
        else:
            self.listener.advance(work)
        result = {name: value for name, value in found.items() if name != "row"}
        return result, self.store.array(cell) if found["row"] else None


def positions_digest(plan: ModelPlan) -> str:
    """A hash of all that a patch takes from a plan whose frequencies are settled: angles, amplitude, score scale, masks."""
    digest = hashlib.sha256()
    for layer in plan.layers:
        rotate = layer.rotate
        if rotate is not None:
            digest.update(rotate.inv_freq().tobytes())
            digest.update(repr((rotate.attention_factor(), rotate.interleaved, rotate.trailing)).encode())
        digest.update(repr((layer.score_scale, layer.temperature, layer.mask)).encode())
    return digest.hexdigest()[:24]


def _apart(measured: Any) -> tuple[NDArray[np.float32] | None, Result]:
    if isinstance(measured, tuple):
        return measured[0], measured[1]
    if isinstance(measured, np.ndarray):
        return measured, {}
    return None, measured
