"""What a full pass costs beside the plain forward of transformers over the same tokens: time and peak memory.

The plain forward is the usual one: all tokens at once, its cache kept as by default, all logits, and the cross
entropy of them in float32 as the library's own loss takes it. Each run is a process of its own, on the default
model in bfloat16; plain, pass, and pass with recall take turns. Nothing is printed unless their nll agree.

    python benchmarks/survey_pass.py                     (8,192 tokens; about 5 minutes on 2 quiet cores)
    python benchmarks/survey_pass.py --tokens 1024 --repeats 1
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from theodolite.models import DEFAULT_MODEL, load, patched
from theodolite.survey.passes import full_pass
from theodolite.survey.settings import DEPTHS, checkpoints
from theodolite.survey.texts import builtin_text, tokenize

WAYS = ("plain", "pass", "recall")
WARM_UP = 64
PASSAGES = 3
# A step of bfloat16 at logits of 16 to 32 is 2**-3, so the logit of a token is half of that off at most when it is
# rounded once; two ways may be that far apart on average, in both directions alike. (In float32 they agree to 1e-5.)
AGREE_EACH = 2**-4
AGREE_MEAN_ERRORS = 4

Nats = NDArray[np.float32]


def measure(way: str, count: int, dtype: str, nll_file: Path) -> dict[str, float]:
    """Seconds and bytes of one way, in this process; its nll goes to a file."""
    loaded = load(DEFAULT_MODEL, dtype=dtype, device="cpu")
    text = tokenize(loaded.tokenizer, builtin_text("moby-dick"), at_least=count + 1)
    with patched(loaded.model, loaded.plan) if way != "plain" else torch.inference_mode():
        after_loading = _reset_peak()
        _read(way, loaded, text[: WARM_UP + 1])
        begun = time.perf_counter()
        nll = _read(way, loaded, text)
        seconds = time.perf_counter() - begun
    np.save(nll_file, nll)
    return {"seconds": seconds, "bytes": _peak() - after_loading}


def _read(way: str, loaded: Any, text: torch.Tensor) -> Nats:
    count = len(text) - 1
    if way == "plain":
        logits = loaded.model(text[None, :-1]).logits
        nll: Nats = torch.nn.functional.cross_entropy(logits[0].float(), text[1:], reduction="none").numpy()
        return nll
    tried = checkpoints(loaded.plan.max_position_embeddings, count) if way == "recall" and count > WARM_UP else []
    return full_pass(
        loaded.model, loaded.plan, text, length=count, checkpoints=tried, depths=DEPTHS, passages=PASSAGES
    )[0]


def _reset_peak() -> float:
    """Bytes resident now, from which the peak counts anew; the peak so far where the system cannot reset it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> float:
    status = Path("/proc/self/status")
    if status.exists():
        return 1024.0 * int(status.read_text().split("VmHWM:")[1].split()[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else 1024 * peak)


def in_own_process(way: str, count: int, dtype: str, nll_file: Path) -> dict[str, float]:
    """`measure` in a fresh process."""
    asked = [sys.executable, __file__, "--tokens", str(count), "--dtype", dtype, "--one", way, str(nll_file)]
    done = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def require_agreement(nll: dict[str, Nats]) -> None:
    """Exit where the ways do not give the same nll."""
    for way in WAYS[1:]:
        difference = nll[way].astype(np.float64) - nll["plain"]
        each, mean = float(np.abs(difference).mean()), float(abs(difference.mean()))
        allowed = AGREE_MEAN_ERRORS * float(difference.std()) / math.sqrt(len(difference))
        print(f"nll, {way} against plain: {each:.4f} nats apart a token, {mean:.5f} in the mean")
        if not (each < AGREE_EACH and mean <= allowed):
            sys.exit("the ways do not agree; times of them mean nothing")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--one", nargs=2, metavar=("WAY", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one[0], options.tokens, options.dtype, Path(options.one[1]))))
        return
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        files = {way: Path(folder) / f"{way}.npy" for way in WAYS}
        for repeat in range(options.repeats):
            for way in WAYS:
                run = in_own_process(way, options.tokens, options.dtype, files[way])
                print(f"{repeat + 1}  {way:<7} {run['seconds']:7.2f} s  {run['bytes'] / 2**20:7.0f} MiB", flush=True)
                runs[way].append(run)
        require_agreement({way: np.load(file) for way, file in files.items()})
    report(runs, options.tokens)


def report(runs: dict[str, list[dict[str, float]]], count: int) -> None:
    """The ratios, each the median over repeats of runs that stood side by side."""

    def ratio(way: str, other: str, what: str) -> float:
        return float(np.median([a[what] / b[what] for a, b in zip(runs[way], runs[other], strict=True)]))

    print(f"\n{count:,} tokens, median of {len(runs['plain'])}")
    for name, value, target in (
        ("time, pass / plain", ratio("pass", "plain", "seconds"), 1.1),
        ("peak memory, pass / plain", ratio("pass", "plain", "bytes"), 0.6),
        ("time, pass with recall / pass", ratio("recall", "pass", "seconds"), 1.25),
    ):
        print(f"{name:<30} {value:5.2f}  (at most {target}: {'yes' if value <= target else 'NO'})")


if __name__ == "__main__":
    main()
