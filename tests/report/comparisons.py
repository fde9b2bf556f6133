"""Results of comparisons with known figures, for tables, sentences and pages."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from theodolite.compare.result import DEFINITIONS, difference
from theodolite.compare.statistics import over_seeds

LENGTHS = (128, 256, 512, 1024)
# Loss at each length; seeds differ by the same luck, so that differences between policies are sure.
LOSSES = {
    "rope": (2.0, 2.4, 3.0, 3.6),
    "alibi": (2.001, 1.98, 1.97, 1.96),
    "learned": (2.05,),
    "sinusoidal<b>": (2.02, 3.0, 4.0, 9.0),
}
LUCK = (-0.02, 0.0, 0.021)
# What is alike at the training length differs by chance alone.
CHANCE = {"alibi": (0.01, -0.012, 0.004)}


def by_seed(name: str, index: int, seeds: int) -> dict[int, float]:
    chance = CHANCE.get(name, (0.0, 0.0, 0.0)) if index == 0 else (0.0, 0.0, 0.0)
    return {seed: LOSSES[name][index] + LUCK[seed] + chance[seed] for seed in range(seeds)}


def comparison(*, seeds: int = 3, diverged: bool = False, extension: bool = True) -> dict[str, Any]:
    """Four policies on text; `learned` stops, `sinusoidal<b>` is lost."""
    names = list(LOSSES)
    found = {
        (name, length): by_seed(name, i, seeds)
        for name in names
        for i, length in enumerate(LENGTHS)
        if i < len(LOSSES[name])
    }
    quality = [
        {"policy": name, "length": length, "measure": measure, **_estimate(values)}
        for measure in ("window", "sliding")
        for (name, length), values in found.items()
    ]
    differences = [
        {"policy": a, "against": b, "length": length, "measure": measure, **d}
        for measure in ("window", "sliding")
        for a, b in combinations(names, 2)
        for length in LENGTHS
        if (d := difference(found.get((a, length), {}), found.get((b, length), {})))
    ]
    cells = [
        {
            "policy": name,
            "seed": seed,
            "tokens_per_second": 10_000 + 1000 * names.index(name) + seed,
            "seconds": 12.5,
            "diverged": "the loss was nan by step 7" if diverged and (name, seed) == ("rope", 1) else None,
            "parameters": 600_000 + names.index(name),
            "kept_bytes": (20 + names.index(name)) << 20,
            "curve": [[10, 4.0], [20, 3.0 - 0.1 * seed]],
        }
        for name in names
        for seed in range(seeds)
    ]
    return {
        "version": 1,
        "policies": names,
        "seeds": list(range(seeds)),
        "training_length": 128,
        "lengths": list(LENGTHS),
        "data": {"name": "book & <i>", "nested": True, "kind": "text"},
        "settings": {
            "size": {"hidden_size": 128, "num_layers": 3, "num_heads": 4, "qk_norm": False},
            "training": {"length": 128, "rows": 16, "steps": 1500, "lr": 0.003},
            "rows": 64,
            "tail": 32,
            "scalings": "linear,ntk",
            "aim": 1024,
            "fine_tuning": 150,
            "fine_tuned": "none,linear",
            "styles": ["plain"],
        },
        "machine": {
            "device": "cpu",
            "processes": 1,
            "threads": 2,
            "precision": "no",
            "torch": "2.13.0",
            "architecture": "x86_64",
        },
        "cells": cells,
        "stops": [{"policy": "learned", "length": 128, "reason": "it has no positions past 128"}],
        "quality": quality,
        "differences": differences,
        "by_position": [
            {
                "policy": name,
                "edges": list(range(0, LENGTHS[len(LOSSES[name]) - 1] + 1, 64)),
                "nats": [LOSSES[name][0] + 0.01 * i for i in range(LENGTHS[len(LOSSES[name]) - 1] // 64)],
            }
            for name in names
        ],
        "gain": [
            {"policy": name, "length": length, **_estimate({s: 0.1 + LUCK[s] for s in range(seeds)})}
            for name in ("rope", "alibi")
            for length in LENGTHS[1:]
        ],
        "extension": [
            {
                "policy": "rope",
                "scaling": scaling,
                "fine_tuned": style,
                "length": length,
                "measure": measure,
                **_estimate({s: value + LUCK[s] for s in range(seeds)}),
                "against_as_trained": difference(
                    {s: value + LUCK[s] for s in range(seeds)}, by_seed("rope", LENGTHS.index(length), seeds)
                ),
            }
            for scaling, style, value in (("linear", None, 4.25), ("ntk", None, 2.5), ("linear", "plain", 2.125))
            for measure in ("window", "sliding")
            for length in LENGTHS
        ]
        if extension
        else [],
        "definitions": DEFINITIONS,
    }


def task() -> dict[str, Any]:
    """The same as a task: shares of rows that are right."""
    result = comparison(extension=False)
    right = {"window": "exact", "sliding": "right"}
    shares = {name: [max(0.0, 1.2 - loss / 4) for loss in losses] for name, losses in LOSSES.items()}
    for q in result["quality"]:
        share = shares[q["policy"]][LENGTHS.index(q["length"])]
        q.update(measure=right[q["measure"]], **_estimate({s: share + LUCK[s] / 2 for s in range(3)}))
    by = {(q["policy"], q["length"], q["measure"]): dict(enumerate(q["by_seed"])) for q in result["quality"]}
    for d in result["differences"]:
        measure = right[d["measure"]]
        pair = (by[name, d["length"], measure] for name in (d["policy"], d["against"]))
        d.update(difference(*pair) or {}, measure=measure)
    result["data"] = {"name": "copy", "nested": False, "kind": "task"}
    result["by_position"], result["gain"] = [], []
    return result


def _estimate(values: dict[int, float]) -> dict[str, Any]:
    found = over_seeds(list(values.values()))
    interval = None if found.interval is None else list(found.interval)
    return {"mean": found.mean, "interval": interval, "by_seed": list(found.by_seed), "seeds": list(values)}
