"""The rotation without a compiled kernel: in plain torch against transformers' eager one, compiled against `copy_`.

q is (1, 32, S, 128) and k (1, 8, S, 128), tokens first in memory, as transformers has them. Correctness first: every
result is held to float64. Then the ways take turns in one process, and their least times are divided by each other.
Results are allocated and freed within the time, by an allocator that keeps its memory (where glibc allows it).

    python benchmarks/plain_rotation.py [--threads 2] [--quick] [--check]

`--quick` leaves out long inputs and more than half of the rounds; `--check` ends with status 1 if a ratio misses its
gate in each of three tries.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from theodolite.encodings import rotary_tables
from theodolite.kernels.eager import rotate_into
from theodolite.kernels.layout import Layout
from theodolite.kernels.traced import rotate_traced
from theodolite.plan import Rotary

HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128
# How many times as fast as transformers, at least; how many times as long as `copy_`, at most.
EAGER_GATES = {("halves", "float32"): 2.0, ("halves", "bfloat16"): 1.4, ("interleaved", "float32"): 5.0}
COMPILED_GATE = 2.0
Way = Callable[[], object]


class Case(NamedTuple):
    """Queries, keys and the rows of a table, float32, one per token."""

    q: Tensor
    k: Tensor
    cos: Tensor
    sin: Tensor
    layout: Layout


def make(tokens: int, dtype: torch.dtype, interleaved: bool) -> Case:
    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(1, tokens, heads, HEAD_DIM, generator=generator).to(dtype).transpose(1, 2)
        for heads in (HEADS, KEY_HEADS)
    )
    cos, sin = rotary_tables(Rotary(head_dim=HEAD_DIM, rope_theta=10000.0), torch.arange(tokens))
    return Case(q, k, cos[None, None], sin[None, None], Layout(interleaved, HEAD_DIM, False, False))


def plain(case: Case) -> tuple[Tensor, Tensor]:
    turned = torch.empty_like(case.q), torch.empty_like(case.k)
    rotate_into(list(zip(turned, (case.q, case.k), strict=True)), case.cos, case.sin, None, case.layout)
    return turned


def in_place(case: Case) -> None:
    rotate_into([(case.q, case.q), (case.k, case.k)], case.cos, case.sin, None, case.layout)


def graph(case: Case, positions: Tensor | None) -> Way:
    """The compiled rotation of both, held to float64."""

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        first, second = (rotate_traced(x, cos, sin, positions, case.layout) for x in (q, k))
        return first, second

    compiled = torch.compile(turned, fullgraph=True, dynamic=False)
    inputs = case.q, case.k, case.cos, case.sin, positions
    check(case, compiled(*inputs))
    return lambda: compiled(*inputs)


def check(case: Case, turned: tuple[Tensor, Tensor]) -> None:
    """Two products and a sum in float32, then one rounding to the dtype."""
    for x, given in zip((case.q, case.k), turned, strict=True):
        pairs = x.double().unflatten(-1, (-1, 2)) if case.layout.interleaved else x.double().unflatten(-1, (2, -1)).mT
        (x1, x2), cos, sin = pairs.unbind(-1), case.cos.double(), case.sin.double()
        true = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)
        sizes = torch.stack(((x1 * cos).abs() + (x2 * sin).abs(), (x2 * cos).abs() + (x1 * sin).abs()), -1)
        bound = 2.1 * 2.0**-24 * sizes
        if x.dtype != torch.float32:
            bound = bound + torch.finfo(x.dtype).eps / 2 * (true.abs() + bound)
        true, bound = ((t if case.layout.interleaved else t.mT).flatten(-2) for t in (true, bound))
        if not ((given.double() - true).abs() <= bound).all():
            raise SystemExit(f"wrong by {float((given.double() - true).abs().max()):.2g}: nothing is timed")


def times(ways: dict[str, Way], rounds: int) -> dict[str, float]:
    """The least seconds of a call of each, over rounds in which all take turns."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds):
        for shift in range(len(names)):
            name = names[(number + shift) % len(names)]
            ways[name]()
            start = time.perf_counter()
            ways[name]()
            ways[name]()
            taken[name].append((time.perf_counter() - start) / 2)
    return {name: min(values) for name, values in taken.items()}


def eager(tokens: int, rounds: int) -> list[tuple[str, float, float | None, bool]]:
    """For each layout and dtype, how many times as fast as transformers: into new tensors, and in place."""
    found: list[tuple[str, float, float | None, bool]] = []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        cases = {layout: make(tokens, dtype, layout == "interleaved") for layout in ("halves", "interleaved")}
        q, k, cos, sin, _ = cases["halves"]
        wide = [torch.cat((table, table), -1)[0].to(dtype) for table in (cos, sin)]
        ways: dict[str, Way] = {"transformers": lambda q=q, k=k, wide=wide: apply_rotary_pos_emb(q, k, *wide)}  # type: ignore[misc]
        for layout, case in cases.items():
            check(case, plain(case))
            ways[layout] = lambda case=case: plain(case)  # type: ignore[misc]
            ways[f"{layout}, in place"] = lambda case=case: in_place(case)  # type: ignore[misc]
        taken = times(ways, rounds)
        for way in list(ways)[1:]:
            gate = EAGER_GATES.get((way, name)) if tokens == 2048 else None
            ratio = taken["transformers"] / taken[way]
            found.append((f"{way}, {name}, {tokens} tokens", ratio, gate, gate is None or ratio >= gate))
    return found


def compiled(tokens: int, rounds: int) -> list[tuple[str, float, float | None, bool]]:
    """For each layout and dtype, how many times as long as `copy_`: with rows in order, and picked by positions."""
    found: list[tuple[str, float, float | None, bool]] = []
    for dtype in (torch.float32, torch.bfloat16):
        q, k = make(tokens, dtype, False)[:2]
        q2, k2 = torch.empty_like(q), torch.empty_like(k)
        ways: dict[str, Way] = {"copy_": lambda q=q, k=k, q2=q2, k2=k2: (q2.copy_(q), k2.copy_(k))}  # type: ignore[misc]
        for layout in ("halves", "interleaved"):
            case = make(tokens, dtype, layout == "interleaved")
            ways[layout] = graph(case, None)
            ways[f"{layout}, by positions"] = graph(case, torch.arange(tokens)[None])
        taken = times(ways, rounds)
        for way in list(ways)[1:]:
            ratio = taken[way] / taken["copy_"]
            name = f"{way}, {str(dtype).removeprefix('torch.')}, {tokens} tokens"
            found.append((name, ratio, COMPILED_GATE, ratio <= COMPILED_GATE))
    return found


def keep_memory() -> None:
    """Ask glibc to take no memory by mmap and to give none back, so that no page is faulted in twice."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(-4, 0)
            libc.mallopt(-1, 2**31 - 1)


def table(title: str, run: Callable[[], list[tuple[str, float, float | None, bool]]], tries: int) -> bool:
    """Print the ratios; again, up to `tries` times, while one misses its gate."""
    met: set[str] = set()
    for number in range(tries):
        print(f"\n{title}" + (f", try {number + 1}" if number else ""))
        rows = run()
        for name, ratio, gate, reached in rows:
            print(f"  {name:48} {ratio:6.2f}" + ("" if gate is None else f"   (gate {gate})"))
            if reached:
                met.add(name)
        if len(met) == len(rows):
            return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    torch._dynamo.config.recompile_limit = 100
    # The compiler's own, of packages that it imports.
    warnings.simplefilter("ignore")
    keep_memory()
    rounds, tries = (6 if options.quick else 15), (3 if options.check else 1)
    good = [table("plain torch, times as fast as transformers", lambda: eager(2048, rounds), tries)]
    table("one token, times as fast as transformers", lambda: eager(1, 300), 1)
    for tokens in (2048,) if options.quick else (2048, 8192):
        good.append(table("compiled, times as long as copy_", lambda tokens=tokens: compiled(tokens, rounds), tries))  # type: ignore[misc]
    if options.check and not all(good):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
