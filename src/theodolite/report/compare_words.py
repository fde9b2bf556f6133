"""What a comparison shows, in sentences that are made of its figures alone."""

from __future__ import annotations

from typing import Any

from theodolite.report.figures import plain, tokens

Result = dict[str, Any]

LEAST_SEEDS = 3


def main_measure(result: Result) -> str:
    """What policies are ranked by: the loss of windows, or the share of rows that are right."""
    return "window" if result["data"]["nested"] else "exact"


def unit(result: Result) -> str:
    return "nats a token" if result["data"]["nested"] else "rows right"


def shown(result: Result, value: float) -> str:
    return f"{value:.3f}" if result["data"]["nested"] else f"{value:.1%}"


def quality(result: Result, length: int, measure: str | None = None) -> dict[str, dict[str, Any]]:
    """The figures of all policies that have any at a length, best first."""
    measure = main_measure(result) if measure is None else measure
    found = {q["policy"]: q for q in result["quality"] if (q["length"], q["measure"]) == (length, measure)}
    sign = -1 if measure in ("right", "exact") else 1
    return dict(sorted(found.items(), key=lambda item: sign * item[1]["mean"]))


def difference(result: Result, first: str, second: str, length: int, measure: str | None = None) -> dict[str, Any]:
    """The first less the second at a length, whichever of the two stands first in the result."""
    measure = main_measure(result) if measure is None else measure
    for d in result["differences"]:
        if (d["length"], d["measure"]) != (length, measure):
            continue
        if (d["policy"], d["against"]) == (first, second):
            found: dict[str, Any] = d
            return found
        if (d["policy"], d["against"]) == (second, first):
            interval = d["interval"] and [-d["interval"][1], -d["interval"][0]]
            return {**d, "policy": first, "against": second, "mean": -d["mean"], "interval": interval}
    raise KeyError(f"no difference of {first} and {second} at {length}")


def sentences(result: Result) -> list[str]:
    """What the run shows, a sentence each."""
    said = [
        _at(result, result["training_length"], f"At the training length, {tokens(result['training_length'])} tokens")
    ]
    longest = result["lengths"][-1]
    if longest != result["training_length"]:
        said.append(_at(result, longest, f"At {tokens(longest)} tokens"))
    said += [_stopped(result), _diverged(result), *_extended(result)]
    seeds = len(result["seeds"])
    if seeds < LEAST_SEEDS:
        said.append(f"With {seeds} seed{'s' * (seeds > 1)} nothing is claimed: give {LEAST_SEEDS} at least.")
    return [sentence for sentence in said if sentence]


def _at(result: Result, length: int, where: str) -> str:
    found = quality(result, length)
    if not found:
        return ""
    best, *others = found
    alike, apart = [], []
    for name in others:
        d = difference(result, name, best, length)
        if d["significant"]:
            apart.append(f"{plain(name)} {_signed(result, d['mean'])} ({_between(result, d['interval'])})")
        else:
            alike.append(plain(name))
    parts = [f"{where}, {plain(best)} is best, {shown(result, found[best]['mean'])} {unit(result)}"]
    if alike:
        parts.append(f"within noise of that: {', '.join(alike)}")
    if apart:
        parts.append(f"beyond noise: {', '.join(apart)}")
    return "; ".join(parts) + "."


def _stopped(result: Result) -> str:
    stops = [f"{plain(stop['policy'])} at {tokens(stop['length'])}" for stop in result["stops"]]
    return f"It ends there, having no positions past: {', '.join(stops)}." if stops else ""


def _diverged(result: Result) -> str:
    cells = [
        f"{plain(cell['policy'])} (seed {cell['seed']}: {plain(cell['diverged'])})"
        for cell in result["cells"]
        if cell["diverged"]
    ]
    return f"Diverged, and left out of all means: {', '.join(cells)}." if cells else ""


def _extended(result: Result) -> list[str]:
    """For each rotary policy, the best scaling of it at the longest length, untrained and trained on."""
    said = []
    longest = result["lengths"][-1]
    here = [e for e in result["extension"] if (e["length"], e["measure"]) == (longest, "window")]
    for policy in dict.fromkeys(e["policy"] for e in here):
        for tuned in (False, True):
            mine = [e for e in here if e["policy"] == policy and (e["fine_tuned"] is not None) == tuned]
            if not mine:
                continue
            best = min(mine, key=lambda e: e["mean"])
            name = plain(best["scaling"]) + (f", {best['fine_tuned']}" if tuned else "")
            after = "after fine-tuning" if tuned else "as it was trained"
            d = best["against_as_trained"]
            against = f" ({_signed(result, d['mean'])} against none)" if d else ""
            said.append(
                f"{plain(policy)} {after} goes furthest under {name}: {best['mean']:.3f} nats a token at "
                f"{tokens(longest)}{against}."
            )
    return said


def _signed(result: Result, value: float) -> str:
    return f"{value:+.3f}" if result["data"]["nested"] else f"{value:+.1%}"


def _between(result: Result, interval: list[float]) -> str:
    return f"{_signed(result, interval[0])} to {_signed(result, interval[1])}"
