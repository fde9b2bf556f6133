"""How far cos and sin are from the true values, and what they cost: ours, and angles in float32 as most libraries have.

Errors: truth is angles of 50 digits (mpmath), base 10,000, 128 channels; 32 positions from each start on, and as many
drawn from all up to 2^24. Time: a whole table of 64 pairs, in multiples of the arithmetic of transformers, which is the
frequencies in float32 times the positions, then cos and sin (here of 64 columns, as ours; there both halves alike). The
two take turns in one process, and each figure is the median of the ratios. A length of 1 is a decoding step.

    python benchmarks/table_error.py [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import mpmath
import numpy as np
import torch
from torch import Tensor

from theodolite import Rotary, rotary_tables

STARTS = (8_192, 131_072, 1_048_576, 2**24 - 256)
FURTHEST = 2**24
PROMISE = 6e-8
THETA, DIM = 10_000, 128
LENGTHS = (1, 128, 4_096, 131_072)
# Long enough to be timed.
LEAST_SECONDS = 0.02

Tables = tuple[Tensor, Tensor]


def truth(positions: list[int]) -> np.ndarray:
    """cos and sin, shape (2, S, DIM/2), from 50-digit arithmetic."""
    with mpmath.workdps(50):
        frequencies = [mpmath.power(THETA, -mpmath.mpf(2 * i) / DIM) for i in range(DIM // 2)]
        angles = [[p * f for f in frequencies] for p in positions]
        return np.asarray([[[float(turn(a)) for a in row] for row in angles] for turn in (mpmath.cos, mpmath.sin)])


def single(positions: Tensor, inv_freq: Tensor) -> Tables:
    """The usual way: inverse frequencies and their product with the positions in float32, as a product of matrices."""
    angles = (inv_freq[None, :, None] @ positions[None, None, :].float()).transpose(1, 2)
    return angles.cos(), angles.sin()


def error(tables: Tables, true: np.ndarray) -> float:
    """The largest distance from the true values."""
    return float(np.abs(torch.stack([table.reshape(true.shape[1:]) for table in tables]).double().numpy() - true).max())


def ratio(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> tuple[float, float]:
    """The median of our time in multiples of theirs, and our least time in seconds."""
    times: dict[Callable[[], object], list[float]] = {ours: [], theirs: []}
    ours()
    start = time.perf_counter()
    ours()
    repeats = 1 + int(LEAST_SECONDS / (time.perf_counter() - start))
    for _ in range(rounds):
        for run, taken in times.items():
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            taken.append((time.perf_counter() - start) / repeats)
    pairs = zip(times[ours], times[theirs], strict=True)
    return statistics.median(own / other for own, other in pairs), min(times[ours])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 5 if parser.parse_args().quick else 21
    rotary = Rotary(head_dim=DIM, rope_theta=THETA)
    inv_freq = 1.0 / (THETA ** (torch.arange(0, DIM, 2, dtype=torch.float) / DIM))
    everywhere = torch.randint(-FURTHEST, FURTHEST, (32,), generator=torch.Generator().manual_seed(0))
    rows = {f"{start:,}": torch.arange(start, start + 256, 8) for start in STARTS} | {"any": everywhere}
    print(f"{'position':>12} {'theodolite':>12} {'float32 angles':>16}")
    for name, positions in rows.items():
        true = truth(positions.tolist())
        errors = error(rotary_tables(rotary, positions), true), error(single(positions, inv_freq), true)
        print(f"{name:>12} {errors[0]:>12.1e} {errors[1]:>16.1e}")
        if not errors[0] <= PROMISE:
            raise SystemExit(f"entries are off by {errors[0]:.1e}; the promise is {PROMISE:.0e}")
    print(f"{'positions':>12} {'time, of float32':>17}   ({torch.get_num_threads()} threads)")
    for length in LENGTHS:
        positions = torch.arange(length)
        ours, theirs = partial(rotary_tables, rotary, positions), partial(single, positions, inv_freq)
        own, seconds = ratio(ours, theirs, rounds)
        print(f"{length:>12,} {own:>17.2f}   ({seconds * 1e6:,.0f} microseconds)")


if __name__ == "__main__":
    main()
