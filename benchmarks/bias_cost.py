"""What a bias costs as a dense tensor: its making, and with its gradient, in multiples of attention without a bias.

1,024 tokens, 8 heads of 64 channels, width 512, float32, one thread, everything in one process. Correct first: each
dense form is compared with its score_mod at sample pairs, or, where it has none, with the same rows asked for alone.

    python benchmarks/bias_cost.py
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch

from theodolite.encodings import (
    ALiBi,
    Bias,
    CoPE,
    DisentangledBias,
    Fire,
    ForgettingGate,
    Kerple,
    LowRankBias,
    ShawBias,
    T5Bias,
    TransformerXLBias,
)

TOKENS, HEADS, HEAD_DIM, WIDTH, ROUNDS = 1024, 8, 64, 512, 10
BIASES: dict[str, Callable[[], Bias]] = {
    "ALiBi": lambda: ALiBi(HEADS),
    "forgetting gate": lambda: ForgettingGate(HEADS, WIDTH),
    "Shaw, clip 64": lambda: ShawBias(HEADS, HEAD_DIM, 64),
    "KERPLE, log": lambda: Kerple(HEADS),
    "low rank, 16 x 1,024": lambda: LowRankBias(HEADS, WIDTH, extent=TOKENS),
    "T5": lambda: T5Bias(HEADS, bidirectional=False),
    "CoPE, 64 positions": lambda: CoPE(HEADS, HEAD_DIM, 64),
    "Transformer-XL": lambda: TransformerXLBias(HEADS, HEAD_DIM, hidden_size=WIDTH),
    "DeBERTa, 256 buckets": lambda: DisentangledBias(
        HEADS, HEAD_DIM, hidden_size=WIDTH, max_relative_positions=512, position_buckets=256
    ),
    "FIRE": lambda: Fire(HEADS),
}


def best(run: Callable[[], Any]) -> float:
    """The least of several runs, in seconds, after one that is not counted."""
    run()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def content_of(bias: Bias, made: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What the bias reads."""
    state = bias.state(made["x"])
    states = {"q_state": state, "k_state": state}
    return {name: states[name] if name in states else made[name] for name in bias.reads}


def check(bias: Bias, at: torch.Tensor, content: dict[str, Any]) -> None:
    """The tensor says what the other form says, or what one query alone gets."""
    dense, mod = bias.dense(at, at, **content), bias.score_mod(at, at, **content)
    if mod is None:
        alone = {name: part[:, :, 700:701] if name == "q" else part for name, part in content.items()}
        assert torch.allclose(bias.dense(at[700:701], at, **alone), dense[:, :, 700:701], atol=1e-4)
        return
    rng = random.Random(0)
    for _ in range(20):
        head, query = rng.randrange(HEADS), rng.randrange(TOKENS)
        key = rng.randrange(query + 1)
        index = [torch.tensor(number) for number in (0, head, query, key)]
        assert torch.allclose(mod(torch.tensor(0.0), *index), dense[0, head, query, key], atol=1e-4)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, HEADS, TOKENS, HEAD_DIM) for _ in range(3))
    made, at, ones = {"q": q, "k": k, "x": torch.randn(1, TOKENS, WIDTH)}, torch.arange(TOKENS), torch.ones(())
    plain = best(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    print(f"{'':22} {'parameters':>10} {'made':>6} {'and its gradient':>17}   (causal attention: {plain * 1e3:.1f} ms)")
    for name, make in BIASES.items():
        bias = make()
        with torch.no_grad():
            content = content_of(bias, made)
            check(bias, at, content)
            forward = best(lambda bias=bias, content=content: bias.dense(at, at, **content))  # type: ignore[misc]
        parameters = sum(parameter.numel() for parameter in bias.parameters())
        line = f"{name:22} {parameters:>10,} {forward / plain:>6.1f}"
        if parameters:

            def both(bias: Bias = bias) -> None:
                dense = bias.dense(at, at, **content_of(bias, made))
                dense.backward(ones.expand_as(dense))

            line += f" {best(both) / plain:>17.1f}"
        print(line)


if __name__ == "__main__":
    main()
