"""Is the cheap instrument right? Spread reach beside full passes, cell by cell.

For every scaling, text and length, recall is measured by a full pass at several distances from the end,
and predicted by every variant of the spread reach (and by the far reach, which serves all lengths at
once). The figure is Spearman's rank correlation of predicted with measured accuracy over all cells.

    python benchmarks/reach_study.py --out reach-study            (about an hour on 2 quiet cores; resumable)
    python benchmarks/reach_study.py --out benchmarks/results/reach-study --report    (the tables, as recorded)
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from theodolite.models import load, patched
from theodolite.plan import NTK, Linear, ModelPlan, Scaling, YaRN
from theodolite.runs import Store
from theodolite.survey.passes import full_pass
from theodolite.survey.reach import Spread, far_reach, spread_reach
from theodolite.survey.texts import builtin_text

TRAINED = 8192
LENGTHS = (8192, 12288, 16384)
TEXTS = ("moby-dick", "chinese-classics")
DEPTHS = (0.02, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95)
PASSAGES = 3
SCALINGS: dict[str, Scaling] = {
    "none": Scaling(),
    "linear 2": Linear(factor=2),
    "ntk 2": NTK(factor=2),
    "theta 5e5": NTK(factor=5 ** (62 / 64)),
    "yarn 1.5": YaRN(factor=1.5, original_max_position_embeddings=TRAINED),
    "yarn 2": YaRN(factor=2, original_max_position_embeddings=TRAINED),
    "yarn 4": YaRN(factor=4, original_max_position_embeddings=TRAINED),
}
VARIANTS = (
    Spread(tokens=1024, chunk=128, passages=4),
    Spread(tokens=2048, chunk=128, passages=2),
    Spread(tokens=2048, chunk=256, passages=4),
    Spread(tokens=4096, chunk=128, passages=1),
    Spread(tokens=4096, chunk=256, passages=2),
    Spread(tokens=4096, chunk=512, passages=4),
)
DEFAULT = Spread(tokens=4096, chunk=256, passages=2)
FAR_READ = 1024
FAR_DISTANCES = tuple(range(1024, 16384 + 1, 1024))


def variant_name(spread: Spread) -> str:
    return f"spread {spread.tokens} in {spread.chunk}s"


def cell(instrument: str, text: str, scaling: str, **more: Any) -> dict[str, Any]:
    return {"study": 1, "instrument": instrument, "text": text, "scaling": scaling, **more}


def measure(store: Store, model: Any, plan: ModelPlan, tokens: dict[str, Tensor]) -> None:
    for text in TEXTS:
        for name, scaling in SCALINGS.items():
            scaled = plan.with_scaling(scaling)
            with patched(model, scaled):
                for what, run in work(text, name, model, scaled, tokens[text]):
                    if what in store:
                        continue
                    begun = time.perf_counter()
                    cells = run()
                    seconds = round(time.perf_counter() - begun, 2)
                    store.put(what, {"cells": cells}, seconds=seconds)
                    print(text, name, what["instrument"], what.get("length", ""), f"{seconds:.1f} s", flush=True)


def work(text: str, name: str, model: Any, plan: ModelPlan, tokens: Tensor) -> Iterator[tuple[dict[str, Any], Any]]:
    longest = max(LENGTHS)
    yield (
        cell("pass", text, name, length=longest),
        lambda: full_pass(model, plan, tokens, length=longest, checkpoints=LENGTHS, depths=DEPTHS, passages=PASSAGES)[
            1
        ],
    )
    yield (
        cell("far 1024", text, name),
        lambda: far_reach(model, plan, tokens, read=FAR_READ, distances=list(FAR_DISTANCES), passages=6),
    )
    for length in LENGTHS:
        for spread in VARIANTS:
            yield (
                cell(variant_name(spread), text, name, length=length),
                lambda length=length, spread=spread: spread_reach(model, plan, tokens, length=length, spread=spread),
            )


def pairs(store: Store, instrument: str, text: str, name: str, length: int) -> list[tuple[float, float]]:
    """(predicted, measured) accuracy at each distance of the full pass, or nothing where either is missing."""
    measured = store.get(cell("pass", text, name, length=max(LENGTHS)))
    where = {} if instrument == "far 1024" else {"length": length}
    predicted = store.get(cell(instrument, text, name, **where))
    if measured is None or predicted is None:
        return []
    known = sorted((c["distance"], c["accuracy"]) for c in predicted.result["cells"])
    distances, accuracies = zip(*known, strict=True)
    return [
        (float(np.interp(c["distance"], distances, accuracies)), c["accuracy"])
        for c in measured.result["cells"]
        if c["length"] == length
    ]


def draw(store: Store, instrument: str, picture: Path) -> None:
    """Measured against predicted accuracy, a dot per cell, a panel per text and length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    panels = figure.subplots(len(TEXTS), len(LENGTHS), sharex=True, sharey=True)
    for row, text in zip(panels, TEXTS, strict=True):
        for panel, length in zip(row, LENGTHS, strict=True):
            panel.plot((0, 1), (0, 1), color="0.8", linewidth=1)
            everything = []
            for name in SCALINGS:
                points = pairs(store, instrument, text, name, length)
                everything += points
                panel.plot(*zip(*points, strict=True), "o", markersize=4, alpha=0.8, label=name)
            title = f"{text}, {length:,} tokens: {rank_correlation(everything):.2f}"
            panel.set(title=title, xlim=(0, 1), ylim=(0, 1), aspect="equal")
            panel.title.set_fontsize(9)
    figure.supxlabel(f"accuracy predicted by {instrument}")
    figure.supylabel("accuracy in the full pass")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(picture, dpi=110)


def rank_correlation(points: list[tuple[float, float]]) -> float:
    """Spearman's, ties at their mean rank."""
    columns = np.asarray(points).T
    ranks = [np.asarray([(np.sum(c < x) + (np.sum(c == x) - 1) / 2) for x in c]) for c in columns]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def seconds_of(store: Store, instrument: str) -> float:
    lines = [json.loads(line) for line in store.path.read_text().splitlines()]
    spent = [line["seconds"] for line in lines if line["cell"]["instrument"] == instrument]
    return float(np.median(spent)) if spent else float("nan")


def report(store: Store) -> None:
    instruments = ["far 1024", *map(variant_name, VARIANTS)]
    heads = " | ".join(f"{text}, {length:,}" for text in TEXTS for length in LENGTHS)
    print(f"| variant | all | {heads} | order of scalings | error | bias | s |")
    print("|---|---|" + "---|" * (len(TEXTS) * len(LENGTHS)) + "---|---|---|---|")
    for instrument in instruments:
        everything: list[tuple[float, float]] = []
        means: list[tuple[float, float]] = []
        columns = []
        for text in TEXTS:
            for length in LENGTHS:
                by_scaling = [pairs(store, instrument, text, name, length) for name in SCALINGS]
                points = [p for some in by_scaling for p in some]
                everything += points
                means += [tuple(np.mean(some, axis=0)) for some in by_scaling if some]
                columns.append(f"{rank_correlation(points):.2f}" if len(points) > 8 else "")
        if len(everything) < 8:
            continue
        differences = np.asarray([predicted - measured for predicted, measured in everything])
        error, bias = np.abs(differences).mean(), differences.mean()
        print(
            f"| {instrument} | {rank_correlation(everything):.2f} | "
            + " | ".join(columns)
            + f" | {rank_correlation(means):.2f} | {error:.2f} | {bias:+.2f} | {seconds_of(store, instrument):.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--report", action="store_true", help="print the tables of what is stored, measure nothing")
    parser.add_argument("--picture", type=Path, help="draw the default variant's predictions to this file")
    options = parser.parse_args()
    with Store(options.out) as store:
        if not options.report:
            loaded = load("SmolLM2-135M-Instruct")
            tokens = {
                name: loaded.tokenizer(builtin_text(name)[:200_000], return_tensors="pt").input_ids[0] for name in TEXTS
            }
            measure(store, loaded.model, loaded.plan, tokens)
        report(store)
        if options.picture:
            draw(store, variant_name(DEFAULT), options.picture)


if __name__ == "__main__":
    main()
