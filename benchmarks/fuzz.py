"""Files of strangers, many of them: configs, params.json, GGUF and safetensors headers, changed at random from a seed.

Each goes through the whole of `theodolite inspect` (text, JSON, every engine, both sides of a difference), and must
come out as a plan in finite numbers or as one line that names file and field, within 2 s of processor time and 200 MiB.
The exit status is 1 if any did not; each is printed with its number, which --only runs alone.

    python benchmarks/fuzz.py [--cases 20000] [--seed 0] [--only NUMBER]
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fuzz.cases import KINDS, case
from tests.fuzz.judge import Verdict, judged

HANGING_SECONDS = 60


def hanging(signal_number: int, frame: FrameType | None) -> None:
    """Break off a case that does not end."""
    raise RuntimeError(f"not done after {HANGING_SECONDS} s")


def run(seed: int, numbers: range) -> int:
    """Run the cases of these numbers, print what broke and a summary, and return how many broke."""
    counts: Counter[tuple[str, bool]] = Counter()
    slowest: list[tuple[float, int]] = []
    largest: list[tuple[int, int]] = []
    broken, begun = 0, time.perf_counter()
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, hanging)
    with tempfile.TemporaryDirectory() as folder:
        for number in numbers:
            if hasattr(signal, "SIGALRM"):
                signal.alarm(HANGING_SECONDS)
            drawn = case(seed, number)
            verdict: Verdict = judged(drawn, Path(folder))
            counts[drawn.kind, verdict.accepted] += 1
            slowest = sorted([*slowest, (verdict.seconds, number)], reverse=True)[:3]
            largest = sorted([*largest, (verdict.bytes, number)], reverse=True)[:3]
            if verdict.faults:
                broken += 1
                print(f"case {number} of seed {seed} ({drawn.kind}):", *verdict.faults, sep="\n  ", flush=True)
            if (number + 1) % 1000 == 0:
                print(f"  {number + 1 - numbers.start} done, {broken} broken", file=sys.stderr, flush=True)
            if len(numbers) == 1:
                print(f"{drawn.kind}, {'accepted' if verdict.accepted else verdict.refusal}")
                print(repr(drawn.data[:4000]))
    if hasattr(signal, "SIGALRM"):
        signal.alarm(0)
    print(f"{len(numbers)} cases of seed {seed} in {time.perf_counter() - begun:.0f} s")
    for kind in KINDS:
        print(f"  {kind:12} {counts[kind, True]:6} accepted {counts[kind, False]:6} refused")
    print("  slowest:", ", ".join(f"{seconds:.2f} s (case {number})" for seconds, number in slowest))
    print("  largest:", ", ".join(f"{taken / 2**20:.0f} MiB (case {number})" for taken, number in largest))
    print(f"  broken: {broken}")
    return broken


def main() -> int:
    """Parse, run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", type=int, help="run the case of this number alone, and show its file")
    options = parser.parse_args()
    first, count = (options.first, options.cases) if options.only is None else (options.only, 1)
    return 1 if run(options.seed, range(first, first + count)) else 0


if __name__ == "__main__":
    sys.exit(main())
