"""How long a text trains in the same memory, with checkpoints and without: SmolLM2-135M, and a stack of `Attention`.

The model is patched with YaRN and reads moby-dick, one row, float32 weights under autocast in bfloat16. Its loss is
that of all tokens, taken 256 at a time with a checkpoint around each part, in both ways alike: the logits of 4,096
tokens alone would be 768 MiB in float32, and the layers would not show beside them. The stack has 24 layers of 4 heads
of 64 channels under T5, with a norm before each. Memory is the most that the process of one forward and backward had
resident, weights, gradients and the interpreter included; an optimiser adds the same to both ways. Each measurement is
a process of its own, whose allocator returns what is freed. Correctness first: gradients of both ways must be equal.

    python benchmarks/training_length.py             (5 to 10 minutes on 2 cores, as busy as they are)
    python benchmarks/training_length.py --check     (status 1 if less than twice the length fits)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from theodolite.attention import Attention
from theodolite.encodings import Policy, T5Bias
from theodolite.models import DEFAULT_MODEL, load, patch
from theodolite.plan import YaRN
from theodolite.survey.texts import builtin_text, tokenize

# Tokens without checkpoints, and with them: at least twice as many must fit.
PLAIN = {"model": 1024, "stack": 2048}
CHECKPOINTED = {"model": (2048, 4096), "stack": (3072, 4096)}
GATE = 2.0
# For the allocator of Linux to return what is freed: else it keeps holes among blocks of up to 32 MiB.
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
LOSS_ROWS = 256
CHECKED = 300
Step = Callable[[int], Tensor]


class Stack(nn.Module):
    """Attention under T5, a norm before each layer."""

    def __init__(self, layers: int = 24, heads: int = 4, head_dim: int = 64) -> None:
        super().__init__()
        self.width = heads * head_dim
        self.norms = nn.ModuleList(nn.LayerNorm(self.width) for _ in range(layers))
        self.layers = nn.ModuleList(
            Attention(self.width, heads, Policy(bias=T5Bias(heads, bidirectional=False), score_scale=head_dim**-0.5))
            for _ in range(layers)
        )
        self.checkpointed = False

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, S, width) to the same."""
        for norm, layer in zip(self.norms, self.layers, strict=True):
            given = norm, layer, x, positions
            x = checkpoint(self._block, *given, use_reentrant=False) if self.checkpointed else self._block(*given)
        return x

    @staticmethod
    def _block(norm: nn.Module, layer: nn.Module, x: Tensor, positions: Tensor) -> Tensor:
        result: Tensor = x + layer(norm(x), positions)
        return result


def stack(checkpointed: bool) -> tuple[nn.Module, Step]:
    """The stack and its loss over so many tokens."""
    torch.manual_seed(0)
    module = Stack()
    module.checkpointed = checkpointed

    def loss(tokens: int) -> Tensor:
        x = torch.randn(1, tokens, module.width, generator=torch.Generator().manual_seed(tokens))
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = module(x, torch.arange(tokens))
        return out.float().square().mean()

    return module, loss


def model(checkpointed: bool) -> tuple[nn.Module, Step]:
    """SmolLM2, patched, and its loss over so many tokens of a book."""
    loaded = load(DEFAULT_MODEL, dtype=torch.float32, device="cpu")
    module = loaded.model.train()
    patch(module, loaded.plan.with_scaling(YaRN(factor=4.0, original_max_position_embeddings=8192)))
    if checkpointed:
        module.activation_checkpointing_enable()
    text = tokenize(loaded.tokenizer, builtin_text("moby-dick"), at_least=1 + max(CHECKPOINTED["model"]))

    def loss(tokens: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            states = module.model(input_ids=text[None, :tokens], use_cache=False).last_hidden_state[0]
            parts = zip(states.split(LOSS_ROWS), text[1 : tokens + 1].split(LOSS_ROWS), strict=True)
            sums = [checkpoint(loss_of, module.lm_head, *part, use_reentrant=False) for part in parts]
        total: Tensor = torch.stack(sums).sum() / tokens
        return total

    return module, loss


def loss_of(lm_head: nn.Module, states: Tensor, next_tokens: Tensor) -> Tensor:
    """Cross entropy (nats) of tokens, summed, of last hidden states (S, E)."""
    return cross_entropy(lm_head(states).float(), next_tokens, reduction="sum")


WAYS = {"model": model, "stack": stack}


def measure(what: str, checkpointed: bool, tokens: int) -> dict[str, float]:
    """Bytes resident at the most, in this process."""
    module, loss = WAYS[what](checkpointed)
    before = _reset_peak()
    value = loss(tokens)
    value.backward()  # type: ignore[no-untyped-call]
    if any(parameter.grad is None for parameter in module.parameters()):
        raise SystemExit(f"{what}: a parameter got no gradient; memory means nothing")
    return {"before": before, "peak": _peak(), "loss": float(value.detach())}


def require_equal_gradients(what: str) -> dict[str, float]:
    """Both ways in this process; the gradients must have the same bits."""
    found: list[list[Tensor]] = []
    for checkpointed in (False, True):
        module, loss = WAYS[what](checkpointed)
        found.append(list(torch.autograd.grad(loss(CHECKED), list(module.parameters()))))
    if not all(torch.equal(a, b) for a, b in zip(*found, strict=True)):
        raise SystemExit(f"{what}: checkpoints change a gradient; memory means nothing")
    return {"equal": float(len(found[0]))}


def _reset_peak() -> float:
    """Bytes resident now, from which the peak counts anew."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _peak()


def _peak() -> float:
    return 1024.0 * int(Path("/proc/self/status").read_text(encoding="ascii").split("VmHWM:")[1].split()[0])


def in_own_process(*asked: str, threads: int) -> dict[str, float]:
    """What a fresh process found."""
    command = [sys.executable, __file__, "--threads", str(threads), "--one", *asked]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **RETURNED})
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(what: str, threads: int) -> bool:
    """Measure both ways, print, and tell whether twice the length fits; only what was measured counts."""
    equal = in_own_process(what, "check", "0", threads=threads)["equal"]
    print(f"{what}: {equal:.0f} gradients are equal, bit by bit, with checkpoints and without", flush=True)
    peaks: dict[str, list[tuple[int, float]]] = {}
    for way, lengths in (("plain", [PLAIN[what]]), ("checkpointed", CHECKPOINTED[what])):
        for tokens in lengths:
            found = in_own_process(what, way, str(tokens), threads=threads)
            peaks.setdefault(way, []).append((tokens, found["peak"]))
            sizes = f"{found['peak'] / 2**20:8,.0f} MiB, of which {found['before'] / 2**20:6,.0f} before it starts"
            print(f"{what:<6}{way:<13}{tokens:>7,} tokens {sizes}   loss {found['loss']:.4f}", flush=True)
    tokens, memory = peaks["plain"][-1]
    fits = [count for count, peak in peaks["checkpointed"] if peak <= memory]
    ratio = max(fits, default=0) / tokens
    verdict = "ok" if ratio >= GATE else "MISSED"
    print(f"{what}: in the {memory / 2**20:,.0f} MiB of {tokens:,} tokens, {ratio:.1f} x the length fits: {verdict}")
    return ratio >= GATE


def main() -> int:
    """Measure each, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(WAYS), help="both by default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--one", nargs=3, metavar=("WHAT", "WAY", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one is not None:
        what, way, tokens = options.one
        found: Any = require_equal_gradients(what) if way == "check" else None
        print(json.dumps(found or measure(what, way == "checkpointed", int(tokens))))
        return 0
    kept = [compare(what, options.threads) for what in ([options.only] if options.only else WAYS)]
    return 0 if all(kept) or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
