"""How long the rotation takes on a GPU, as a multiple of copying the queries and keys, beside what models use today.

Correct first: whatever of ours is further from float64 on the CPU than rounding allows ends the run, and whether the
device gives the bits of the CPU is told. Others are told how far off they are, in multiples of the same bound. Times
are medians with a cold cache; of decoding, calls back to back, once from the host and once within a CUDA graph.

    python benchmarks/cuda_rotation.py --out cuda_rotation.json
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from rotation_ways import Case, Turn, inputs, not_the_same_bits, others, ours, tables, worst_of
from torch import Tensor

from theodolite.kernels.triton_rotation import supported

TOKENS = (1, 2048, 8192, 32768)
DEVICE = "cuda"
NO_DEVICE = "There is no CUDA device here, and this measures the rotation on one."
Run = Callable[[], Any]


class Row(NamedTuple):
    """One measurement.

    `copies` are multiples of copying q and k (of two copies, where the gradient is taken too); `gigabytes` are GB/s if
    each is read and written once; `bounds` is the largest error in multiples of what rounding allows; `memory` the
    peak above what was there before, in multiples of q and k.
    """

    case: str
    what: str
    who: str
    ms: float
    copies: float
    gigabytes: float
    bounds: float
    memory: float


class Meter(Protocol):
    """What is measured with: milliseconds of a call, and bytes."""

    def cold(self, run: Run) -> float: ...

    def host(self, run: Run) -> float: ...

    def graph(self, run: Run) -> float: ...

    def peak(self, run: Run) -> float: ...


class CudaMeter:
    """The current CUDA device."""

    def cold(self, run: Run) -> float:
        """The device's time, the cache emptied before each call."""
        from triton.testing import do_bench  # type: ignore[import-untyped,import-not-found]

        return float(do_bench(run, warmup=25, rep=200, return_mode="median"))

    def host(self, run: Run, calls: int = 500) -> float:
        """Calls back to back: the longer of what the host and what the device needs."""
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / calls * 1e3)
        return sorted(times)[2]

    def graph(self, run: Run, calls: int = 100) -> float:
        """Calls back to back within a graph: the device alone. NaN where a call cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for _ in range(calls):
                    run()
        except RuntimeError as error:
            print(f"not captured: {error}", file=sys.stderr)
            return math.nan
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(10):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / (10 * calls)

    def peak(self, run: Run) -> float:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def measure(case: Case, meter: Meter, device: str, leave_out: Sequence[str] = ()) -> list[Row]:
    """All rows of a case, but for the ways whose name has a word of `leave_out`.

    Raises:
        ArithmeticError: something of ours is further from the exact rotation than rounding allows.
    """
    torch.compiler.reset()
    cos, sin = tables(case, device)
    mine = ours(case, cos, sin)
    turns = {**mine, **dict(others(case, cos, sin))}
    turns = {who: turn for who, turn in turns.items() if not any(word in who for word in leave_out)}
    errors = {who: worst_of(turn, case, device) for who, turn in turns.items()}
    for who, error in errors.items():
        if who in mine and not error <= 1:
            raise ArithmeticError(f"{who}, {case}: off by {error:.3g} times what rounding allows")
    q, k = inputs(case, device)
    outs = torch.empty_like(q), torch.empty_like(k)

    def copy() -> None:
        outs[0].copy_(q)
        outs[1].copy_(k)

    def row(what: str, who: str, ms: float, copied: float, copies: int = 1, peak: float = math.nan) -> Row:
        size = q.nbytes + k.nbytes
        speed = copies * 2 * size / ms / 1e6
        return Row(str(case), what, who, ms, ms / (copies * copied), speed, errors.get(who, 0.0), peak / size)

    rows, clocks = [], {"forward": meter.cold}
    if case.tokens == 1:
        clocks = {"decoding": meter.host, "decoding, in a graph": meter.graph}
    for what, clock in clocks.items():
        copied = clock(copy)
        rows.append(row(what, "copy_", copied, copied))
        rows += (row(what, who, clock(functools.partial(turn, q, k)), copied) for who, turn in turns.items())
    if case.tokens > 1:
        for who, turn in turns.items():
            # A leaf cannot be turned in place.
            if who != "theodolite, in place":
                run = _with_gradients(turn, q, k)
                rows.append(row("forward and backward", who, meter.cold(run), copied, 2, meter.peak(run)))
    return rows


def _with_gradients(turn: Turn, q: Tensor, k: Tensor) -> Run:
    leaves = tuple(x.clone().requires_grad_() for x in (q, k))
    grads = torch.randn_like(q), torch.randn_like(k)
    return lambda: torch.autograd.grad(turn(*leaves), leaves, grads)


def table(rows: Sequence[Row]) -> str:
    """The rows as text, a block for each case and what was measured of it."""
    lines = []
    for head in dict.fromkeys((row.case, row.what) for row in rows):
        lines.append(f"{head[1]}, {head[0]}")
        lines.append(f"  {'':<24}{'ms':>10}{'x copy':>9}{'GB/s':>8}{'x bound':>9}{'x q+k':>8}")
        for row in rows:
            if (row.case, row.what) == head:
                memory = "" if math.isnan(row.memory) else f"{row.memory:.2f}"
                numbers = f"{row.ms:>10.4f}{row.copies:>9.2f}{row.gigabytes:>8.0f}{row.bounds:>9.2g}{memory:>8}"
                lines.append(f"  {row.who:<24}{numbers}")
    return "\n".join(lines)


def machine() -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "runtime": str(torch.version.cuda or torch.version.hip),
        "rotation": "Triton" if supported(torch.empty(0, device="cuda")) else "plain torch",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time the rotation on a CUDA device.")
    parser.add_argument("--out", type=Path, help="a file for all numbers, as JSON")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="lengths; 1 is decoding")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(NO_DEVICE, file=sys.stderr)
        return 2
    record: dict[str, Any] = {"machine": machine(), "not the bits of the CPU": not_the_same_bits(DEVICE), "rows": []}
    print(json.dumps(record, indent=1))
    for tokens in given.tokens:
        for dtype in (torch.bfloat16, torch.float32):
            for interleaved in (False, True):
                rows = measure(Case(tokens, dtype, interleaved), CudaMeter(), DEVICE)
                print(table(rows), flush=True)
                record["rows"] += [row._asdict() for row in rows]
                # After each case, for a later one may fail.
                if given.out is not None:
                    given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
