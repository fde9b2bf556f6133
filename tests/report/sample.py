"""Summaries that look like a survey's, built around figures measured on SmolLM2-135M-Instruct and Moby-Dick."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from theodolite.plan import NTK, DynamicNTK, Linear, Rotary, YaRN
from theodolite.plan.scaling import Scaling

TRAINED = 8192
TEXTS = [
    {"name": "moby-dick.txt", "tokens": 65536, "sha256": "3f1d0c9f4f0bd8a1" * 4},
    {"name": "论语（中文）.txt", "tokens": 65536, "sha256": "a4c21b9e55d07f38" * 4},
]
# Perplexity by band of 2,048 positions, and reach as (distance, nll, accuracy).
PERPLEXITY = {
    "none": [47.71, 40.08, 48.40, 36.07, 31.20, 52.55, 238.68, 987.95],
    "linear": [93.11, 91.41, 114.21, 88.12, 73.79, 67.03, 69.68, 81.24],
    "ntk": [48.60, 41.02, 49.71, 37.60, 32.75, 33.90, 41.10, 97.20],
    "dynamic": [47.71, 40.08, 48.40, 36.07, 32.81, 33.42, 34.90, 52.10],
    "yarn": [49.56, 41.34, 49.96, 37.56, 32.37, 31.32, 30.31, 37.74],
}
WINDOW = [47.71, 40.08, 48.40, 36.07, 31.05, 30.92, 29.90, 35.94]
DISTANCES = [1000, 2000, 4000, 6000, 7500, 8000, 10000, 12000, 16000, 32000]
REACH = {
    "none": [
        (0.50, 0.88),
        (0.44, 0.91),
        (0.78, 0.82),
        (1.27, 0.74),
        (4.70, 0.24),
        (5.01, 0.21),
        (4.89, 0.16),
        (5.62, 0.14),
        (7.88, 0.03),
        (6.94, 0.08),
    ],
    "yarn": [
        (0.68, 0.85),
        (0.70, 0.85),
        (0.99, 0.78),
        (2.14, 0.62),
        (1.15, 0.75),
        (1.18, 0.73),
        (0.95, 0.81),
        (2.82, 0.48),
        (4.97, 0.22),
        (7.17, 0.05),
    ],
    "linear": [
        (3.81, 0.26),
        (4.03, 0.26),
        (4.05, 0.25),
        (4.54, 0.20),
        (4.67, 0.20),
        (4.73, 0.19),
        (5.00, 0.15),
        (5.61, 0.16),
        (5.68, 0.16),
        (7.64, 0.06),
    ],
    "ntk": [
        (0.61, 0.86),
        (0.66, 0.86),
        (0.88, 0.80),
        (1.20, 0.75),
        (1.60, 0.68),
        (1.90, 0.64),
        (2.70, 0.50),
        (3.80, 0.32),
        (5.20, 0.18),
        (7.00, 0.06),
    ],
    "dynamic": [
        (0.60, 0.86),
        (0.68, 0.85),
        (0.90, 0.79),
        (1.30, 0.73),
        (1.70, 0.66),
        (2.00, 0.62),
        (2.90, 0.47),
        (4.10, 0.29),
        (5.60, 0.15),
        (7.10, 0.06),
    ],
}
RECALL = {
    2048: [0.84, 0.93, 0.79, 0.89, 0.89, 0.93],
    4096: [0.72, 0.75, 0.57, 0.71, 0.73, 0.82],
    8192: [0.19, 0.38, 0.42, 0.69, 0.93, 0.89],
    12288: [0.16, 0.21, 0.18, 0.19, 0.35, 0.28],
}
RECALL_YARN = {
    2048: [0.82, 0.90, 0.80, 0.88, 0.88, 0.92],
    4096: [0.74, 0.76, 0.63, 0.72, 0.75, 0.82],
    8192: [0.58, 0.61, 0.60, 0.66, 0.80, 0.88],
    12288: [0.60, 0.69, 0.84, 0.57, 0.60, 0.80],
}
DEPTHS = [0.02, 0.1, 0.3, 0.5, 0.7, 0.9]
MAPS: dict[str, dict[str, Any]] = {
    "self-extend": {"kind": "self_extend", "window": 4096, "group_size": 3},
    "self-extend:4:window=1024": {"kind": "self_extend", "window": 1024, "group_size": 4},
    "leaky-rerope": {"kind": "leaky_rerope", "window": 4096, "factor": 3.0},
    "dca": {"kind": "dca", "chunk_size": 6144, "local_size": 512, "pinned": None},
}
ALONE, NLL_ALONE = 0.25, 3.9


def rotary_scaling(name: str) -> Scaling:
    """The plan behind a name such as `yarn:1.5`."""
    kind, _, factor = name.partition(":") if name not in MAPS else ("none", "", "")
    made: dict[str, Scaling] = {
        "none": Scaling(),
        "linear": Linear(factor=float(factor or 2)),
        "ntk": NTK(factor=float(factor or 2)),
        "dynamic": DynamicNTK(factor=float(factor or 2), original_max_position_embeddings=TRAINED),
        "yarn": YaRN(factor=float(factor or 2), original_max_position_embeddings=TRAINED),
    }
    return made[kind]


def nudged(name: str, value: float) -> float:
    """The value for factor 2, moved for the other factors so that lines differ."""
    factor = name.partition(":")[2] if name not in MAPS else ""
    return value * (1 + 0.05 * math.log2(float(factor) / 2)) if factor else value


def bands(name: str, to: int) -> list[dict[str, Any]]:
    made, total = [], 0.0
    for index, value in enumerate(PERPLEXITY[kind_of(name)][: to // 2048]):
        value = round(nudged(name, value), 2)
        total += math.log(value)
        gain = math.log(WINDOW[index] / value)
        made.append(
            {
                "from": index * 2048,
                "to": (index + 1) * 2048,
                "perplexity": value,
                "interval": [round(value * 0.94, 2), round(value * 1.06, 2)],
                "cumulative": round(math.exp(total / (index + 1)), 2),
                "gain_over_window": {"nats": gain, "interval": [gain - 0.02, gain + 0.02]} if index > 3 else None,
            }
        )
    return made


def recall(name: str, to: int) -> list[dict[str, Any]]:
    cells, kind = [], kind_of(name)
    for length, values in (RECALL_YARN if kind in {"yarn", "ntk", "dynamic"} else RECALL).items():
        for depth, value in zip(DEPTHS, values, strict=True):
            accuracy = round(nudged(name, value if kind != "linear" else 0.15), 3)
            cells.append(
                {
                    "length": length,
                    "depth": depth,
                    "distance": round(length * (1 - depth)),
                    "accuracy": accuracy,
                    "accuracy_alone": ALONE,
                    "nll": round(5.5 * (1 - accuracy), 3),
                    "nll_alone": NLL_ALONE,
                }
            )
    return [cell for cell in cells if cell["length"] <= to]


def kind_of(name: str) -> str:
    """The scaling whose figures stand for `name`: a map has those of yarn."""
    return "yarn" if name in MAPS else name.partition(":")[0]


def means(name: str) -> str:
    """A scaling in words."""
    if name in MAPS:
        return f"a map of distances: {name}"
    kind, _, factor = name.partition(":")
    return "no scaling" if kind == "none" else f"{kind} scaling {factor or 2}"


def scaling(name: str, to: int, *, passed: bool) -> dict[str, Any]:
    """One entry; a map of distances says what it is in `relative`."""
    relative = MAPS.get(name)
    kind, factor = kind_of(name), name.partition(":")[2]
    plan = Rotary(head_dim=64, rope_theta=100000.0, scaling=rotary_scaling(name))
    reach = [
        {"distance": distance, "nll": nll, "accuracy": round(nudged(name, accuracy), 3)}
        for distance, (nll, accuracy) in zip(DISTANCES, REACH[kind], strict=True)
    ]
    near = [point for point in reach if point["distance"] <= to]
    reaches = max((p["distance"] for p in near if p["accuracy"] >= 0.5), default=None)
    plain = Rotary(head_dim=64, rope_theta=100000.0).inv_freq()
    held = {"none": 10240, "linear": None}.get(kind, to)
    return {
        "name": name,
        "means": means(name),
        "rope_parameters": {"unsaid": "a map of distances"}
        if relative
        else {"rope_type": "default" if kind == "none" else kind, "rope_theta": 100000.0}
        | ({"factor": float(factor)} if factor else {}),
        "relative": relative,
        "depends_on_length": kind == "dynamic",
        "inv_freq": {"plain": plain.tolist(), "scaled": np.asarray(plan.inv_freq(length=to)).tolist()},
        "reach": near,
        "reaches": reaches,
        "far_reach": reach,
        "short_cost": {
            "tokens": 2048,
            "perplexity": PERPLEXITY[kind][0],
            "shipped": 47.71,
            "ratio": PERPLEXITY[kind][0] / 47.71,
        },
        "passes": [{"length": n} for n in ((TRAINED, to) if kind == "dynamic" else (None,))] if passed else [],
        "bands": bands(name, to) if passed else [],
        "holds_to": held if passed else None,
        "recall": recall(name, to) if passed else [],
    }


def summary(
    *,
    names: tuple[str, ...] = ("none", "linear:1.5", "ntk:1.5", "dynamic", "yarn:1.5", "yarn:2"),
    passed: tuple[str, ...] = ("none", "dynamic", "yarn:1.5", "yarn:2"),
    to: int = 12288,
    model: str = "SmolLM2-135M-Instruct",
) -> dict[str, Any]:
    """A summary; `passed` are the scalings with full passes."""
    best = "yarn:1.5" if "yarn:1.5" in names else names[-1]
    return {
        "schema": "theodolite.survey/1",
        "theodolite": "0.1.0",
        "model": model,
        "model_details": {
            "model_type": "llama",
            "fingerprint": "5e1fa3c0d2b94877" * 4,
            "parameters": 134515008,
            "dtype": "bfloat16",
            "device": "cpu",
            "layers": 30,
            "head_dim": 64,
            "rope_theta": 100000.0,
            "positions": "30 layers, each rotary over 64 of 64 channels, base 100,000, trained to 8,192 positions.",
        },
        "trained_length": TRAINED,
        "to": to,
        "texts": TEXTS,
        "definitions": {
            "reaches": "The longest distance up to which the model copies at least half of the tokens right.",
            "holds_to": "The longest length up to which no band's perplexity is more than 10% above the window's.",
            "recall": "Passages read earlier are started again; accuracy is the share of the continuation's tokens "
            "that the model ranks first. Alone: the same tokens with nothing read before them.",
            "recommendation": "Among the scalings with a full pass that hold to the length asked, the one with the "
            "best recall there; ties go to the one that costs least on short text.",
            "truncated_window": "The shipped model, seeing only the last 8,192 tokens, on the same tokens.",
        },
        "truncated_window": {
            "window": TRAINED,
            "stride": 2048,
            "bands": [
                {"from": i * 2048, "to": (i + 1) * 2048, "perplexity": v, "interval": [v * 0.94, v * 1.06]}
                for i, v in enumerate(WINDOW[: to // 2048])
                if i > 3
            ],
        },
        "scalings": [scaling(name, to, passed=name in passed) for name in names],
        "passkey": None,
        "recommendation": {
            "name": best,
            "why": f"{best} holds to {to:,} tokens and recalls most of what it read there, where the shipped model "
            "recalls no more than can be guessed.",
        },
        "settings": {
            "transformers": {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 100000.0,
                    "factor": 1.5,
                    "original_max_position_embeddings": TRAINED,
                },
                "max_position_embeddings": to,
            },
            "vllm": '--hf-overrides \'{"rope_parameters": {"rope_type": "yarn", "rope_theta": 100000.0, '
            '"factor": 1.5, "original_max_position_embeddings": 8192}, "max_position_embeddings": 12288}\' '
            "--max-model-len 12288",
            "sglang": '--json-model-override-args \'{"rope_parameters": {"rope_type": "yarn", '
            '"factor": 1.5, "original_max_position_embeddings": 8192}}\' --context-length 12288',
            "llama.cpp": "--rope-scaling yarn --rope-scale 1.5 --yarn-orig-ctx 8192 --ctx-size 12288",
            "theodolite": "theodolite ask --model SmolLM2-135M-Instruct --scaling yarn:1.5 DOCUMENT QUESTION",
        },
    }


def with_passkey(made: dict[str, Any]) -> dict[str, Any]:
    """The same summary with passkey cells for the shipped model and the recommendation."""
    rows = []
    for name in ("none", made["recommendation"]["name"]):
        for length in (4096, made["to"]):
            for depth in (0.1, 0.5, 0.9):
                lost = name == "none" and length > TRAINED
                cell = {"scaling": name, "length": length, "depth": depth, "nll": 6.1 if lost else 0.12}
                rows.append(cell | {"exact": not lost})
    return made | {"passkey": rows}
