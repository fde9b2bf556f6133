"""Questions over a long document with SmolLM2-135M: the second question, and decoding against transformers.

bfloat16. Correctness first: the second answer is that of a session that was asked nothing else; decoded logits are held
to those of transformers' own cache. Decoding steps of both take turns, each on a copy of the model; the least counts.

    python benchmarks/ask_cost.py question [--tokens 8000]
    python benchmarks/ask_cost.py decode [--tokens 64 2048 8000]
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from stream_cost import text
from transformers import DynamicCache

from theodolite.ask.documents import Document
from theodolite.ask.session import Session
from theodolite.models import DEFAULT_MODEL, load, patched
from theodolite.models.reader import Reader

SOONER, DECODE = 50, 1.0
FIRST, SECOND = "Who tells this story?", "Which ship does he sail on?"


def question(tokens: int) -> int:
    """How much sooner the second answer begins than the first."""
    loaded = load(DEFAULT_MODEL, dtype=torch.bfloat16)
    document = Document(name="book", text=loaded.tokenizer.decode(text(loaded.tokenizer, tokens)))
    room = tokens + 2048

    def begin(session: Session, asked: str) -> float:
        """Seconds until the first token, which a question of one token is."""
        started = time.perf_counter()
        session.answer(asked, count=1, passages=0)
        seconds = time.perf_counter() - started
        session.forget_conversation()
        return seconds

    with Session(loaded, [document], room=room) as session:
        first = begin(session, FIRST)
        later = [begin(session, asked) for asked in (SECOND, FIRST, SECOND)]
        found = session.answer(SECOND, count=32, passages=0).tokens
        read = session.document_tokens
    with Session(loaded, [document], room=room) as session:
        if session.answer(SECOND, count=32, passages=0).tokens != found:
            print("the second answer is not that of a session that was asked nothing else")
            return 1
    ratio = first / max(later)
    print(f"{read:,} tokens: first answer begins after {first:.2f} s, the next after", end=" ")
    print(f"{', '.join(f'{seconds * 1e3:.0f}' for seconds in later)} ms; the slowest of them {ratio:.0f} x sooner")
    return int(ratio < SOONER)


def decode(counts: list[int], steps: int) -> int:
    """One token after so many, with our cache and rotation and with transformers'."""
    ours, theirs = (load(DEFAULT_MODEL, dtype=torch.bfloat16) for _ in range(2))
    missed = 0
    for count in counts:
        line = text(ours.tokenizer, count + steps)
        cache: Any = DynamicCache(config=theirs.model.config)

        def step(at: int, size: int = 1, line: torch.Tensor = line, cache: Any = cache) -> torch.Tensor:
            with torch.inference_mode():
                part = line[None, at : at + size]
                out: torch.Tensor = theirs.model(input_ids=part, cache=cache, use_cache=True, logits_to_keep=1).logits
            return out[0, -1]

        for start in range(0, count, 1024):
            step(start, min(1024, count - start))
        taken: tuple[list[float], list[float]] = ([], [])
        apart = 0.0
        with patched(ours.model, ours.plan), Reader(ours.model, ours.plan, capacity=count + steps) as reader:
            reader.next_logits(line[:count], torch.arange(count))
            for at in range(count, count + steps):
                begun = time.perf_counter()
                found = reader.next_logits(line[at : at + 1], torch.tensor([at]))
                between = time.perf_counter()
                true = step(at)
                taken[0].append(between - begun)
                taken[1].append(time.perf_counter() - between)
                apart = max(apart, float((found - true).float().std() / true.float().std()))
        ratio = min(taken[0]) / min(taken[1])
        missed += ratio > DECODE
        print(
            f"after {count:,} tokens: {min(taken[0]) * 1e3:.1f} ms, transformers {min(taken[1]) * 1e3:.1f} ms, "
            f"{ratio:.2f} x; logits {apart:.3f} of their spread apart"
        )
        if apart > 0.1:
            print("the logits differ by more than bfloat16 explains")
            return 1
    return int(missed > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("question", "decode"))
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    if given.what == "question":
        return question((given.tokens or [8000])[0])
    return decode(given.tokens or [64, 2048, 8000], given.steps)


if __name__ == "__main__":
    sys.exit(main())
