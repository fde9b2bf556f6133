"""From what was measured to what a comparison says, as plain data."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from theodolite.compare.batch import Data
from theodolite.compare.evaluation import Floats
from theodolite.compare.settings import Settings
from theodolite.compare.statistics import LEAST_SEEDS, Estimate, over_seeds, paired

if TYPE_CHECKING:
    from accelerate import Accelerator

    from theodolite.compare.run import Measured

DEFINITIONS = {
    "window": "mean loss (nats a token) of windows of this length that do not overlap, each read on its own: early "
    "tokens have little before them, and count in it",
    "sliding": "the same of the last quarter of the training length in each window, as where a window moves on by so "
    "much: every token that counts has nearly the whole length before it",
    "gain": "loss of those last tokens read with the training length before them, less their loss with all: above 0 "
    "where what is far helps, below where it harms",
    "right": "share of the asked tokens that are the likeliest of all, given the right ones before them",
    "exact": "share of the rows in which all that is asked is right",
    "loss": "of the asked tokens (nats)",
    "interval": "where the mean over all seeds lies with 95 %, by Student's t over the seeds that were tried",
    "difference": "the first policy less the second at equal seeds (weights, batches and rows in common): of a loss, "
    "the first is better below 0",
    "significant": f"{LEAST_SEEDS} seeds at least, and 0 outside of the interval",
    "kept_bytes": "what the forward of one step of training keeps for its backward, weights left out",
    "tokens_per_second": "of training, as it ran; what else the machine did is in it",
}

BySeed = dict[int, float]


def summarize(settings: Settings, data: Data, measured: Measured, accelerator: Accelerator) -> dict[str, Any]:
    """The result of a comparison, as `compare.json` has it: docs/compare.md says what each field is."""
    lengths = settings.lengths
    names = [spec.name for spec in settings.specs]
    figures = _Figures(settings, measured, nested=data.nested)
    return {
        "version": 1,
        "policies": names,
        "seeds": list(settings.seeds),
        "training_length": settings.training.length,
        "lengths": list(lengths),
        "data": {"name": data.name, "nested": data.nested, **data.identity},
        "settings": _settings(settings),
        "machine": _machine(accelerator),
        "cells": [_cell(run.spec.name, run.seed, run.result) for run in measured.runs.values()],
        "stops": _stops(settings),
        "quality": figures.quality(names),
        "differences": figures.differences(names),
        "by_position": figures.by_position(names),
        "gain": figures.gain(names),
        "extension": _extension(settings, measured),
        "definitions": DEFINITIONS,
    }


class _Figures:
    """Numbers by seed, of one policy at one length."""

    def __init__(self, settings: Settings, measured: Measured, *, nested: bool) -> None:
        self.settings, self.measured = settings, measured
        of_text: dict[str, Callable[[str, int], BySeed]] = {"window": self._window, "sliding": self._sliding}
        of_tasks: dict[str, Callable[[str, int], BySeed]] = {
            "right": self._right,
            "exact": self._exact,
            "loss": self._asked,
        }
        self.measures = of_text if nested else of_tasks

    def quality(self, names: list[str]) -> list[dict[str, Any]]:
        return [
            {"policy": name, "length": length, "measure": measure, **_estimate(found)}
            for measure, of in self.measures.items()
            for name in names
            for length in self.settings.lengths
            if (found := of(name, length))
        ]

    def differences(self, names: list[str]) -> list[dict[str, Any]]:
        return [
            {"policy": first, "against": second, "length": length, "measure": measure, **found}
            for measure, of in self.measures.items()
            for first, second in combinations(names, 2)
            for length in self.settings.lengths
            if (found := difference(of(first, length), of(second, length)))
        ]

    def by_position(self, names: list[str]) -> list[dict[str, Any]]:
        """Mean loss between edges (tokens before), over rows and seeds."""
        width = self.settings.tail
        found = []
        for name in names:
            rows = list(self._losses(name).values())
            if not rows:
                continue
            length = rows[0].shape[1]
            edges = list(range(0, length, width))
            means = [float(np.mean([row[:, a : a + width].mean(dtype=np.float64) for row in rows])) for a in edges]
            found.append({"policy": name, "edges": [*edges, length], "nats": means})
        return found

    def gain(self, names: list[str]) -> list[dict[str, Any]]:
        tail, lengths = self.settings.tail, self.settings.lengths[1:]
        found = []
        for name in names:
            for i, length in enumerate(lengths):
                by_seed = {
                    seed: float(near[:, i * tail : (i + 1) * tail].mean(dtype=np.float64)) - _tail(full, length, tail)
                    for seed in self.settings.seeds
                    if (near := self.measured.near.get((name, seed))) is not None
                    and (full := self.measured.losses.get((name, seed))) is not None
                }
                if by_seed:
                    found.append({"policy": name, "length": length, **_estimate(by_seed)})
        return found

    def _losses(self, name: str) -> dict[int, Floats]:
        return {seed: nll for (policy, seed), nll in self.measured.losses.items() if policy == name}

    def _window(self, name: str, length: int) -> BySeed:
        return {s: _head(nll, length) for s, nll in self._losses(name).items() if nll.shape[1] >= length}

    def _sliding(self, name: str, length: int) -> BySeed:
        tail = self.settings.tail
        return {s: _tail(nll, length, tail) for s, nll in self._losses(name).items() if nll.shape[1] >= length}

    def _right(self, name: str, length: int) -> BySeed:
        return self._answers(name, length, 0)

    def _exact(self, name: str, length: int) -> BySeed:
        return self._answers(name, length, 1)

    def _asked(self, name: str, length: int) -> BySeed:
        return self._answers(name, length, 2)

    def _answers(self, name: str, length: int, column: int) -> BySeed:
        return {
            seed: float(rows[:, column].mean(dtype=np.float64))
            for (policy, seed, at), rows in self.measured.answers.items()
            if (policy, at) == (name, length)
        }


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> dict[str, Any] | None:
    """The first less the second over the seeds that both have; None where there is none."""
    seeds = [seed for seed in first if seed in second]
    if not seeds:
        return None
    found = paired([first[seed] for seed in seeds], [second[seed] for seed in seeds])
    return {**_plain(found), "seeds": seeds, "significant": found.significant}


def _extension(settings: Settings, measured: Measured) -> list[dict[str, Any]]:
    """Each rotary policy under other frequencies, and the difference from what it is under its own."""
    tail = settings.tail
    found = []
    for key in dict.fromkeys((one.policy, one.scaling, one.style) for one in measured.extended):
        policy, scaling, style = key
        rows = {one.seed: one.nll for one in measured.extended if (one.policy, one.scaling, one.style) == key}
        as_trained = {seed: nll for (name, seed), nll in measured.losses.items() if name == policy}
        for length in settings.lengths:
            for measure, of in (("window", _head), ("sliding", lambda nll, n: _tail(nll, n, tail))):
                by_seed = {seed: of(nll, length) for seed, nll in rows.items()}
                plain = {seed: of(nll, length) for seed, nll in as_trained.items()}
                found.append(
                    {
                        "policy": policy,
                        "scaling": scaling,
                        "fine_tuned": style,
                        "length": length,
                        "measure": measure,
                        **_estimate(by_seed),
                        "against_as_trained": difference(by_seed, plain),
                    }
                )
    return found


def _head(nll: Floats, length: int) -> float:
    return float(nll[:, :length].mean(dtype=np.float64))


def _tail(nll: Floats, length: int, tail: int) -> float:
    return float(nll[:, length - tail : length].mean(dtype=np.float64))


def _estimate(by_seed: BySeed) -> dict[str, Any]:
    return {**_plain(over_seeds(list(by_seed.values()))), "seeds": list(by_seed)}


def _plain(found: Estimate) -> dict[str, Any]:
    interval = None if found.interval is None else [_round(end) for end in found.interval]
    return {"mean": _round(found.mean), "interval": interval, "by_seed": [_round(value) for value in found.by_seed]}


def _round(value: float) -> float:
    """Six digits behind the point: a hundredth of what any two runs differ by."""
    return round(value, 6)


def _cell(policy: str, seed: int, result: dict[str, Any]) -> dict[str, Any]:
    names = ("diverged", "parameters", "kept_bytes", "curve")
    return {"policy": policy, "seed": seed, **result["speed"], **{name: result[name] for name in names}}


def _stops(settings: Settings) -> list[dict[str, Any]]:
    length = settings.training.length
    return [
        {"policy": spec.name, "length": stop, "reason": f"it has no positions past {stop:,}"}
        for spec in settings.specs
        if (stop := spec.longest(length)) is not None and stop < settings.longest
    ]


def _settings(settings: Settings) -> dict[str, Any]:
    return {
        "size": asdict(settings.size),
        "training": asdict(settings.training),
        "rows": settings.rows,
        "tail": settings.tail,
        "scalings": settings.scalings,
        "aim": settings.aim,
        "fine_tuning": settings.fine_tuning,
        "fine_tuned": settings.fine_tuned if settings.fine_tuning else "",
        "styles": list(settings.styles),
    }


def _machine(accelerator: Accelerator) -> dict[str, Any]:
    """What it ran on, with nothing that says whose it is."""
    return {
        "device": accelerator.device.type,
        "processes": accelerator.num_processes,
        "threads": torch.get_num_threads(),
        "precision": accelerator.mixed_precision,
        "torch": torch.__version__,
        "architecture": platform.machine(),
    }
