"""From what was measured to `summary.json`: plain data, with nothing in it that depends on when or how fast."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import theodolite
from theodolite.plan import ModelPlan, PlanError, Rotary
from theodolite.plan.describe import describe, describe_scaling
from theodolite.plan.huggingface import rope_parameters
from theodolite.survey import verdict
from theodolite.survey.apply import settings_of
from theodolite.survey.bench import Cells
from theodolite.survey.instruments import Instruments, Read
from theodolite.survey.maps import describe_map, record
from theodolite.survey.passes import Nats
from theodolite.survey.scalings import AS_SHIPPED, Candidate, default_factor, with_factor

SCHEMA = "theodolite.survey/1"


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that a survey measured; dictionaries are by name of candidate."""

    spread: dict[str, Cells]
    far: dict[str, Cells]
    threshold: float | None
    read: dict[str, Read]
    window: list[Nats] | None
    short: dict[str, list[Nats]]
    passkey: Cells | None


def summarize(instruments: Instruments, candidates: list[Candidate], measured: Findings) -> dict[str, Any]:
    """The summary of a survey; its fields are documented in docs/summary.md."""
    loaded, trained, to = instruments.bench.loaded, instruments.trained, instruments.to
    window: dict[str, Any] | None = None
    if measured.window is not None:
        window = {
            "window": trained,
            "stride": instruments.band,
            "bands": _window_bands(measured.window, trained=trained, to=to, width=instruments.band),
        }
    scalings = [_scaling(instruments, candidate, candidates[0].plan, measured) for candidate in candidates]
    shipped = scalings[0]
    for scaling in scalings:
        scaling["holds_to"] = verdict.holds_to(scaling["bands"], shipped["bands"], window["bands"] if window else None)
    recommendation = verdict.recommend(
        scalings, to=to, trained=trained, window=window, copies=measured.threshold is not None
    )
    # The model as shipped is set up for what it holds to, and the text cut to that; never for less than it was trained.
    holds = shipped["holds_to"] == to or recommendation["name"] != AS_SHIPPED
    length = max(to, trained) if holds else trained
    return {
        "schema": SCHEMA,
        "theodolite": theodolite.__version__,
        "model": loaded.name,
        "model_details": _details(instruments, candidates[0].plan),
        "trained_length": trained,
        "to": to,
        "texts": [
            {"name": document.name, "tokens": len(document.tokens), "sha256": document.sha256}
            for document in instruments.documents
        ],
        "definitions": verdict.DEFINITIONS,
        "truncated_window": window,
        "scalings": scalings,
        "passkey": measured.passkey,
        "recommendation": recommendation,
        "settings": _settings(instruments, candidates, recommendation["name"], length),
    }


def _scaling(instruments: Instruments, candidate: Candidate, shipped: ModelPlan, measured: Findings) -> dict[str, Any]:
    name, read = candidate.name, measured.read.get(candidate.name)
    plain, scaled = _changed_rotary(shipped, candidate.plan)
    own, base = (np.exp(verdict.mean_nats(rows)) for rows in (measured.short[name], measured.short[AS_SHIPPED]))
    return {
        "name": name,
        "means": describe_scaling(scaled.scaling) if candidate.relative is None else describe_map(candidate.relative),
        "rope_parameters": _rope_parameters(candidate),
        "relative": None if candidate.relative is None else record(candidate.relative),
        "depends_on_length": candidate.plan.depends_on_length,
        "inv_freq": {
            "plain": plain.inv_freq(length=instruments.to).tolist(),
            "scaled": scaled.inv_freq(length=instruments.to).tolist(),
        },
        "reach": measured.spread[name],
        "reaches": verdict.reaches(measured.spread[name], measured.threshold),
        "far_reach": measured.far.get(name, []),
        "short_cost": {
            "tokens": instruments.short,
            "perplexity": round(float(own), 6),
            "shipped": round(float(base), 6),
            "ratio": round(float(own / base), 6),
        },
        "passes": [] if read is None else [{"length": length} for length in read.lengths],
        "bands": []
        if read is None
        else verdict.bands(
            read.nll,
            length=instruments.to,
            width=instruments.band,
            window=measured.window,
            trained=instruments.trained,
        ),
        "holds_to": None,
        "recall": [] if read is None else [_recall_cell(cell) for cell in read.recall],
    }


def _recall_cell(cell: dict[str, Any]) -> dict[str, Any]:
    names = ("length", "depth", "distance", "accuracy", "accuracy_alone", "nll", "nll_alone")
    return {name: cell[name] for name in names}


def _window_bands(window: list[Nats], *, trained: int, to: int, width: int) -> list[dict[str, Any]]:
    bands = []
    for begin, end in verdict.band_edges(to, width, trained):
        if begin >= trained:
            value = verdict.interval_of_mean([row[begin - trained : end - trained] for row in window])
            bands.append({"from": begin, "to": end, **verdict.as_perplexity(value)})
    return bands


def _changed_rotary(shipped: ModelPlan, plan: ModelPlan) -> tuple[Rotary, Rotary]:
    """The first rotary encoding that a candidate changes, before and after; the first of all where it changes none."""
    pairs = [
        (old.rotate, new.rotate)
        for old, new in zip(shipped.layers, plan.layers, strict=True)
        if old.rotate is not None and new.rotate is not None
    ]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])


def _rope_parameters(candidate: Candidate) -> dict[str, Any]:
    if candidate.relative is not None:
        return {"unsaid": "rope_parameters has no words for a map of distances; the frequencies are the model's own"}
    try:
        return rope_parameters(candidate.plan)
    except PlanError as error:
        return {"unsaid": str(error)}


def _details(instruments: Instruments, shipped: ModelPlan) -> dict[str, Any]:
    loaded = instruments.bench.loaded
    return {
        "model_type": shipped.model_type,
        "fingerprint": loaded.fingerprint,
        "parameters": loaded.model.num_parameters(),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": loaded.model.device.type,
        "layers": len(shipped.layers),
        "head_dim": shipped.rotaries[0].head_dim,
        "rope_theta": shipped.rotaries[0].rope_theta,
        "positions": describe(shipped),
    }


def _settings(instruments: Instruments, candidates: list[Candidate], name: str, length: int) -> dict[str, Any]:
    chosen = next(candidate for candidate in candidates if candidate.name == name)
    named = with_factor(chosen, default_factor(instruments.trained, instruments.to))
    return settings_of(replace(chosen, name=named), model=instruments.bench.loaded.name, length=length)
