"""Attention under a bias against attention without one, and against a dense mask: time and peak memory.

8 heads of 64 channels, one row, float32, causal. Correctness first: results and gradients are held to the dense mask.
Then the ways take turns in one process and the least times of each are divided. Memory is what is alive at once beyond
the inputs, as torch's profiler counts it.

    python benchmarks/bias_attention.py [--tokens 4096 8192] [--threads 2] [--check]

`--check` ends with status 1 if a ratio is worse than its gate.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from theodolite.attention import attend_by_policy
from theodolite.encodings import ALiBi, Fire, Kerple, Policy, T5Bias

HEADS, HEAD_DIM = 8, 64
FORWARD, BACKWARD, MEMORY = 1.3, 0.5, 0.1
Way = Callable[[], Tensor]


def policies() -> dict[str, Policy]:
    """Those with a gate, and two that are learned in other ways."""
    torch.manual_seed(0)
    return {
        "ALiBi": Policy(bias=ALiBi(HEADS)),
        "T5": Policy(bias=T5Bias(HEADS, bidirectional=False), score_scale=HEAD_DIM**-0.5),
        "KERPLE": Policy(bias=Kerple(HEADS)),
        "FIRE": Policy(bias=Fire(HEADS)),
    }


def ways(policy: Policy, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Way]:
    """Without a bias, under a dense mask that is built, and ours."""
    positions, scale = torch.arange(q.shape[2]), HEAD_DIM**-0.5
    return {
        "none": lambda: scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale),
        "dense": lambda: scaled_dot_product_attention(
            q, k, v, attn_mask=policy.attn_mask(positions, positions), scale=scale
        ),
        "ours": lambda: attend_by_policy(policy, q, k, v, positions),
    }


def backward(way: Way, wanted: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward of everything that asks for a gradient."""

    def both() -> tuple[Tensor, ...]:
        out = way()
        return torch.autograd.grad(out.sum(), wanted, allow_unused=True)

    return both


def seconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The least of each, all taking turns."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def peak(call: Callable[[], object]) -> int:
    """The most bytes alive at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    live = most = 0
    kineto = seen.profiler
    for event in kineto.kineto_results.events() if kineto is not None else ():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


def main() -> int:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    missed = []

    def tell(what: str, value: float, most: float | None) -> None:
        verdict = "" if most is None else f"   at most {most:g}: {'ok' if value <= most else 'MISSED'}"
        print(f"{what:<64}{value:8.2f} x{verdict}", flush=True)
        if most is not None and value > most:
            missed.append(what)

    for tokens in options.tokens:
        q, k, v = (torch.randn(1, HEADS, tokens, HEAD_DIM).requires_grad_() for _ in range(3))
        for name, policy in policies().items():
            gated = name in ("ALiBi", "T5")
            wanted = [q, k, v, *policy.parameters()]
            calls = ways(policy, q, k, v)
            both = {kind: backward(way, wanted if kind != "none" else wanted[:3]) for kind, way in calls.items()}
            for mine, true in zip(both["ours"](), both["dense"](), strict=True):
                error = (mine - true).abs().max() / true.abs().max()
                if not error < 1e-4:
                    raise SystemExit(
                        f"{name}: a gradient is off by {float(error):.2g} of its largest: nothing is timed"
                    )
            with torch.no_grad():
                forward = seconds({kind: calls[kind] for kind in ("none", "ours", "dense")}, options.rounds)
            told = f"{name}, {tokens} tokens: "
            tell(told + "forward, of no bias", forward["ours"] / forward["none"], FORWARD if gated else None)
            tell(told + "forward, dense mask of no bias", forward["dense"] / forward["none"], None)
            taken = seconds({kind: both[kind] for kind in ("ours", "dense", "none")}, max(1, options.rounds - 1))
            tell(told + "and backward, of the dense mask", taken["ours"] / taken["dense"], BACKWARD if gated else None)
            tell(told + "and backward, of no bias", taken["ours"] / taken["none"], None)
            bytes_of = {kind: peak(both[kind]) for kind in ("ours", "dense")}
            tell(told + "memory, of the dense mask", bytes_of["ours"] / bytes_of["dense"], MEMORY if gated else None)
            print(f"{told}{bytes_of['ours'] / 2**20:.0f} MiB against {bytes_of['dense'] / 2**20:.0f}")
    print(f"missed: {'; '.join(missed)}" if missed else "every ratio is within its gate")
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
