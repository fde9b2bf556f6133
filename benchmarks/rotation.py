"""The rotation's cost: a layer's queries and keys against `copy_` of them and against transformers' eager rotation.

Correctness first: every way is held to the float64 oracle. Then the ways take turns in one process, and the least times
of each are divided by each other: on a machine with other work ratios hold, times do not. Results are allocated and
freed within the time; the allocator keeps its memory (glibc's page faults cost more than the rotation: docs/speed.md).

    python benchmarks/rotation.py [--threads 2] [--quick] [--check]

`--check` ends with status 1 if a ratio is worse than its gate.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from theodolite import Rotary, rotary_tables
from theodolite.kernels import rotate
from theodolite.kernels.choice import describe
from theodolite.kernels.reference import rotate_reference

HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128
Way = Callable[[], object]


class Case(NamedTuple):
    """Queries and keys as (B, H, S, D) views, their tables, and transformers' tables in the dtype it would have."""

    q: Tensor
    k: Tensor
    cos: Tensor
    sin: Tensor
    wide: tuple[Tensor, Tensor]


def make(tokens: int, dtype: torch.dtype, tokens_first: bool) -> Case:
    """`tokens_first` is memory as a projection leaves it, (B, S, H, D), which transformers views as (B, H, S, D)."""
    rotary = Rotary(head_dim=HEAD_DIM, rope_theta=10000.0)
    generator = torch.Generator().manual_seed(0)

    def heads(count: int) -> Tensor:
        x = torch.randn(1, count, tokens, HEAD_DIM, generator=generator).to(dtype)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if tokens_first else x

    cos, sin = rotary_tables(rotary, torch.arange(tokens))
    wide = tuple(torch.cat((table, table), dim=-1)[None].to(dtype) for table in (cos, sin))
    return Case(heads(HEADS), heads(KEY_HEADS), cos, sin, (wide[0], wide[1]))


def check(case: Case, interleaved: bool) -> float:
    """Hold the result to the oracle; the ratio of its root mean square error to that of rounding the true one."""
    turned, _ = rotate(case.q, case.k, case.cos, case.sin, interleaved=interleaved)
    true = rotate_reference(case.q, case.cos[None, None], case.sin[None, None], interleaved=interleaved)
    rounded = true.to(case.q.dtype).double()
    error = (turned.double() - true).abs()
    bound = 4 * 2.0**-24 * case.q.double().abs().max() + torch.finfo(case.q.dtype).eps * true.abs()
    if not (error <= bound).all():
        raise SystemExit(f"wrong by {float(error.max()):.2g}: nothing is timed")
    return float(error.square().mean().sqrt() / (rounded - true).square().mean().sqrt())


def times(ways: dict[str, Way], rounds: int, seconds: float = 0.02) -> dict[str, float]:
    """Seconds of a call of each: the least over rounds in which all take turns, each beginning once as first."""
    counts = {}
    for name, way in ways.items():
        way()
        start = time.perf_counter()
        way()
        counts[name] = max(1, int(seconds / (time.perf_counter() - start)))
    taken: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds):
        for shift in range(len(names)):
            name = names[(number + shift) % len(names)]
            way = ways[name]
            way()
            start = time.perf_counter()
            for _ in range(counts[name]):
                way()
            taken[name].append((time.perf_counter() - start) / counts[name])
    return {name: min(values) for name, values in taken.items()}


def forward(tokens: int, dtype: torch.dtype, tokens_first: bool, interleaved: bool, rounds: int) -> dict[str, float]:
    """Seconds of copying, of transformers, and of ours: into new tensors, into given ones, in place."""
    case = make(tokens, dtype, tokens_first)
    check(case, interleaved)
    q, k, cos, sin, wide = case
    q2, k2, out_q, out_k, own_q, own_k = (torch.empty_like(x) for x in (q, k, q, k, q, k))
    own_q.copy_(q), own_k.copy_(k)
    ways: dict[str, Way] = {
        "copy": lambda: (q2.copy_(q), k2.copy_(k)),
        "transformers": lambda: apply_rotary_pos_emb(q, k, *wide),
        "new": lambda: rotate(q, k, cos, sin, interleaved=interleaved),
        "out": lambda: rotate(q, k, cos, sin, interleaved=interleaved, out_q=out_q, out_k=out_k),
        "in place": lambda: rotate(own_q, own_k, cos, sin, interleaved=interleaved, inplace=True),
    }
    return times(ways, rounds)


def backward(tokens: int, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Seconds of forward and backward together."""
    case = make(tokens, dtype, tokens_first=True)
    q, k = case.q.requires_grad_(), case.k.requires_grad_()
    grads = torch.randn_like(q), torch.randn_like(k)

    def both(turn: Callable[[], tuple[Tensor, Tensor]]) -> Way:
        return lambda: torch.autograd.grad(turn(), (q, k), grads)

    with torch.enable_grad():
        return times(
            {
                "transformers": both(lambda: apply_rotary_pos_emb(q, k, *case.wide)),
                "new": both(lambda: rotate(q, k, case.cos, case.sin)),
            },
            rounds,
        )


def decoding(dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Seconds of a step: one token."""
    case = make(1, dtype, tokens_first=True)
    q, k, cos, sin, wide = case
    table = rotary_tables(Rotary(head_dim=HEAD_DIM, rope_theta=10000.0), torch.arange(4096))
    at = torch.tensor([77])
    cache = torch.empty(1, KEY_HEADS, 4096, HEAD_DIM, dtype=dtype)
    slot = cache[:, :, 77:78]
    ways: dict[str, Way] = {
        "transformers": lambda: apply_rotary_pos_emb(q, k, *wide),
        "new": lambda: rotate(q, k, cos, sin),
        "in place": lambda: rotate(q, k, cos, sin, inplace=True),
        "row picked": lambda: rotate(q, k, *table, positions=at),
        "into the cache": lambda: rotate(q, k, cos, sin, out_q=q, out_k=slot),
    }
    return times(ways, rounds)


def fused(tokens: int, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Seconds of turning the q and k slices of one projection in place, against dense ones of their own."""
    case = make(tokens, dtype, tokens_first=True)
    both = torch.cat((case.q, case.k, case.k), dim=1).transpose(1, 2).contiguous().transpose(1, 2)
    q, k = both[:, :HEADS], both[:, HEADS : HEADS + KEY_HEADS]
    q2, k2 = torch.empty_like(case.q), torch.empty_like(case.k)
    return times(
        {
            "copy": lambda: (q2.copy_(case.q), k2.copy_(case.k)),
            "dense": lambda: rotate(case.q, case.k, case.cos, case.sin, inplace=True),
            "slices": lambda: rotate(q, k, case.cos, case.sin, inplace=True),
        },
        rounds,
    )


def peak(run: Callable[[], object]) -> int:
    """The most bytes that were allocated at once while it ran."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    now = most = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def memory(dtype: torch.dtype) -> dict[str, float]:
    """Peak bytes of forward and of forward and backward, in multiples of the outputs; the gradients are outputs too."""
    case = make(2048, dtype, tokens_first=True)
    outputs = sum(x.numel() * x.element_size() for x in (case.q, case.k))
    rotate(case.q, case.k, case.cos, case.sin)
    q, k = case.q.requires_grad_(), case.k.requires_grad_()
    grads = torch.randn_like(q), torch.randn_like(k)
    found = {}
    with torch.enable_grad():
        ways: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
            "transformers": lambda: apply_rotary_pos_emb(q, k, *case.wide),
            "new": lambda: rotate(q, k, case.cos, case.sin),
        }
        for name, turn in ways.items():
            found[name] = peak(turn) / outputs
            found[f"{name}, with its gradient"] = peak(functools.partial(_kept, turn, q, k, grads)) / outputs
        plain_q, plain_k = q.detach(), k.detach()
        found["in place"] = peak(lambda: rotate(plain_q, plain_k, case.cos, case.sin, inplace=True)) / outputs
    return found


def _kept(turn: Callable[[], tuple[Tensor, Tensor]], q: Tensor, k: Tensor, grads: tuple[Tensor, Tensor]) -> object:
    # The outputs live on while gradients are made, as they do in training.
    turned = turn()
    return turned, torch.autograd.grad(turned, (q, k), grads)


class Report:
    """Prints ratios beside their gates, and remembers which are worse."""

    def __init__(self) -> None:
        self.missed: list[str] = []

    def line(self, what: str, value: float, gate: float | None = None, *, most: bool = True, unit: str = "x") -> None:
        """One ratio: at most its gate, or at least."""
        verdict = ""
        if gate is not None:
            good = value <= gate if most else value >= gate
            verdict = f"   {'at most' if most else 'at least'} {gate:g}: {'ok' if good else 'MISSED'}"
            if not good:
                self.missed.append(what)
        print(f"{what:66} {value:8.2f} {unit}{verdict}", flush=True)


def report_forward(report: Report, options: argparse.Namespace) -> None:
    for tokens in (128, 2048) if options.quick else (128, 512, 2048, 8192):
        for dtype in (torch.float32, torch.bfloat16):
            for tokens_first in (True, False):
                for interleaved in (False, True):
                    found = forward(tokens, dtype, tokens_first, interleaved, options.rounds)
                    name = f"{str(dtype)[6:]} S={tokens} {'(B,S,H,D)' if tokens_first else '(B,H,S,D)'} "
                    name += "interleaved" if interleaved else "halves"
                    small = {torch.float32: 1.6, torch.bfloat16: 2.0}[dtype] if tokens == 128 else None
                    new = 1.1 if tokens >= 2048 else small
                    report.line(f"{name}: new, of copy_", found["new"] / found["copy"], new)
                    report.line(f"{name}: given, of copy_", found["out"] / found["copy"])
                    inplace = 0.8 if tokens >= 2048 else None
                    report.line(f"{name}: in place, of copy_", found["in place"] / found["copy"], inplace)
                    if tokens_first and not interleaved:
                        gates = (
                            {torch.bfloat16: (8, 12), torch.float32: (7, 9)}[dtype] if tokens == 2048 else (None, None)
                        )
                        times_of = found["transformers"]
                        report.line(f"{name}: transformers, of new", times_of / found["new"], gates[0], most=False)
                        report.line(
                            f"{name}: transformers, of in place", times_of / found["in place"], gates[1], most=False
                        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="two lengths, fewer rounds")
    parser.add_argument("--check", action="store_true", help="status 1 if a gate is missed")
    options = parser.parse_args()
    options.rounds = min(options.rounds, 7) if options.quick else options.rounds
    torch.set_num_threads(options.threads)
    keep_memory()
    report = Report()
    print(f"{'; '.join(f'{what}: {state}' for what, state in describe())}; {options.threads} threads")
    with torch.no_grad():
        report_forward(report, options)
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype)[6:]
            both = backward(2048, dtype, options.rounds)
            ratio = both["transformers"] / both["new"]
            report.line(f"{name} S=2048: transformers forward and backward, of ours", ratio, 6, most=False)
            step = decoding(dtype, options.rounds)
            report.line(f"{name} decoding: new", step["new"] * 1e6, 8, unit="us")
            report.line(f"{name} decoding: in place", step["in place"] * 1e6, 5, unit="us")
            for way in ("row picked", "into the cache", "transformers"):
                report.line(f"{name} decoding: {way}", step[way] * 1e6, unit="us")
            slices = fused(2048, dtype, options.rounds)
            report.line(f"{name} S=2048: slices of a projection in place, of dense", slices["slices"] / slices["dense"])
            used = memory(dtype)
            # A page of the allocator's rounding is not the rotation's.
            report.line(f"{name}: peak memory forward, of the outputs", used["new"], 1.001)
            report.line(f"{name}: peak memory forward and backward", used["new, with its gradient"], 2.001)
            report.line(f"{name}: peak memory in place", used["in place"], 0.001)
            report.line(f"{name}: transformers, forward and backward", used["transformers, with its gradient"])
        report.line("bfloat16: rms error, of pure rounding", check(make(2048, torch.bfloat16, True), False), 1.05)
    if report.missed:
        print(f"missed: {'; '.join(report.missed)}")
    return int(bool(report.missed) and options.check)


def keep_memory() -> None:
    """Have glibc keep what is freed, so that page faults are not timed; elsewhere nothing."""
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return
    no_mmap, no_trim = -4, -1
    libc.mallopt(no_mmap, 0)
    libc.mallopt(no_trim, 2**31 - 1)


if __name__ == "__main__":
    sys.exit(main())
