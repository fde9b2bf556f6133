"""A long document through SmolLM2-135M in chunks: against one forward of transformers, and whether memory stays flat.

bfloat16. Correctness first: chunked log-probabilities are held to those of one forward. Time is the least of the
rounds, all ways in turn; memory the most bytes alive at once beyond the weights, as torch's profiler counts them.

    python benchmarks/stream_cost.py prefill [--tokens 8192] [--chunk 2048]
    python benchmarks/stream_cost.py stream [--tokens 16384 65536] [--window 2048]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from bias_attention import peak, seconds
from torch import Tensor

from theodolite.models import DEFAULT_MODEL, Stream, load

TIME, MEMORY, FLAT, STEADY = 1.05, 0.35, 0.02, 0.10


def text(tokenizer: Any, count: int) -> Tensor:
    """The first `count` tokens of the books that the package carries, again and again."""
    books = sorted(Path(str(resources.files("theodolite"))).glob("texts/*.txt"))
    parts: list[int] = []
    while len(parts) < count:
        for book in books:
            parts += tokenizer(book.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    return torch.tensor(parts[:count])


def prefill(model: Any, plan: Any, tokens: Tensor, chunk: int, rounds: int) -> int:
    """A document in chunks against one forward."""

    def whole() -> Tensor:
        with torch.inference_mode():
            logits = model(input_ids=tokens[None], use_cache=True).logits[0]
            chosen = logits[:-1].gather(1, tokens[1:, None])[:, 0].float()
            sums = torch.cat([part.float().logsumexp(-1) for part in logits[:-1].split(256)])
            result: Tensor = chosen - sums
        return result

    def chunked() -> Tensor:
        return torch.cat([part.log_probs for part in Stream(model, plan, chunk=chunk).feed(tokens)])  # type: ignore[misc]

    true = whole()
    error = float((chunked() - true).abs().mean())
    print(f"log-probabilities: {error:.3f} apart on average, of {float(true.std()):.2f} that they spread")

    def read() -> None:
        for _ in Stream(model, plan, chunk=chunk).feed(tokens, states=True):
            pass

    ways: dict[str, Callable[[], object]] = {"one forward": whole, "in chunks": read, "with log-p": chunked}
    least = seconds(ways, rounds)
    most = {name: peak(call) for name, call in ways.items()}
    for name in ways:
        print(f"{name:<16}{least[name]:8.2f} s {most[name] / 2**20:9.0f} MiB")
    ratio, memory = least["in chunks"] / least["one forward"], most["in chunks"] / most["one forward"]
    print(f"time {ratio:.2f} x (at most {TIME}), memory {memory:.2f} x (at most {MEMORY})")
    return int(ratio > TIME or memory > MEMORY)


def flat(model: Any, plan: Any, tokenizer: Any, counts: list[int], window: int) -> int:
    """Memory and time a token of texts of several lengths, with a window."""
    each: list[float] = []
    sizes: list[int] = []
    for count in counts:
        tokens = text(tokenizer, count)

        def run(tokens: Tensor = tokens) -> None:
            for _ in Stream(model, plan, window=window, sinks=4).feed(tokens):
                pass

        if not each:
            run(tokens[: 2 * window])
        start = time.perf_counter()
        run()
        each.append((time.perf_counter() - start) / count)
        sizes.append(peak(run))
        print(f"{count:>8,} tokens: {1e3 * each[-1]:.3f} ms a token, {sizes[-1] / 2**20:.1f} MiB", flush=True)
    size_apart, time_apart = (max(found) / min(found) - 1 for found in (sizes, each))
    print(f"memory {100 * size_apart:.1f} % apart (at most 2), time {100 * time_apart:.0f} % (at most 10)")
    return int(size_apart > FLAT or time_apart > STEADY)


def main() -> int:
    """Load, check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prefill", "stream"])
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load(DEFAULT_MODEL)
    model = loaded.model.to(torch.bfloat16)
    if options.what == "prefill":
        tokens = text(loaded.tokenizer, (options.tokens or [8192])[0])
        return prefill(model, loaded.plan, tokens, options.chunk, options.rounds)
    return flat(model, loaded.plan, loaded.tokenizer, options.tokens or [16384, 65536], options.window)


if __name__ == "__main__":
    sys.exit(main())
