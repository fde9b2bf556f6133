"""`theodolite check`: does a loaded model do with positions what its config says, however it is called?"""

from __future__ import annotations

import argparse
import json
import shutil
from typing import TYPE_CHECKING, Any

from theodolite.cli.loading import add_device, loading_errors, require_device, require_packages

if TYPE_CHECKING:
    from theodolite.conformance.load import Loaded
    from theodolite.conformance.verdict import Verdict

_EXAMPLES = """examples:
  theodolite check                                       the model that comes with the package
  theodolite check ./my-model
  theodolite check openai-community/gpt2 --json
  theodolite check Qwen/Qwen3-0.6B --dtype bfloat16 --device cuda

The exit status is 0 where no check failed (notes and skipped checks are no failures), 1 where one did, 2 for bad input.
"""
CLEAN, FAILED = 0, 1
_NARROWEST, _USUAL = 60, 110


def add_parser(verbs: Any) -> None:
    """Add the verb and its options."""
    parser = verbs.add_parser(
        "check",
        help="run a model and measure whether its positions hold in padding, packing, chunks, caches and casts",
        description="Load a causal language model and measure whether it does with positions what its config says:\n"
        "tables, rotation, shifts, padding, packing, chunks, decoding, batches, casts, and past the stated length.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        nargs="?",
        default="SmolLM2-135M-Instruct",
        metavar="MODEL",
        help="a folder with config.json and safetensors, a .gguf file, or a name on the hub (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--dtype",
        default="float32",
        help="float32, float64, bfloat16, float16: what it is loaded and checked in; the more exact, the more is seen "
        "(default: %(default)s)",
    )
    add_device(parser)
    parser.set_defaults(run=run, errors=loading_errors, interrupted="interrupted")


def run(options: argparse.Namespace) -> int:
    """Load, check, print each verdict when it is there."""
    require_packages("a check", "survey", "transformers", "psutil")
    from theodolite.conformance.model import iterate

    loaded = _load(options)
    if options.json:
        verdicts = tuple(iterate(loaded.model, loaded.plan))
        print(json.dumps(_as_json(loaded, verdicts), allow_nan=False))
    else:
        verdicts = _print(loaded)
    return FAILED if any(verdict.failed for verdict in verdicts) else CLEAN


def _load(options: argparse.Namespace) -> Loaded:
    from theodolite.conformance.load import load
    from theodolite.models.load import choose_device, choose_dtype
    from theodolite.models.source import resolve, weights_bytes
    from theodolite.report.figures import plain
    from theodolite.survey.memory import require_memory

    require_device(options.device)
    chosen = choose_device(options.device)
    dtype = choose_dtype(options.dtype, chosen)
    try:
        source = resolve(options.model)
        if source.kind != "hub":
            instead = "--dtype bfloat16, a smaller model, or another machine"
            require_memory(weights_bytes(source, dtype), f"Loading {source.name}", chosen, instead=instead)
        return load(options.model, dtype=dtype, device=chosen)
    except (RuntimeError, ValueError, OSError) as error:
        # Names and keys in it are a stranger's.
        raise ValueError(plain(str(error))) from error


def _print(loaded: Loaded) -> tuple[Verdict, ...]:
    from theodolite.conformance.model import iterate
    from theodolite.report.verdicts import head, lines, summary

    width = max(_NARROWEST, shutil.get_terminal_size((_USUAL, 24)).columns)
    print("\n".join(head(loaded.name, _words(loaded), _dtype(loaded), loaded.model.device.type, width)), flush=True)
    found = []
    for verdict in iterate(loaded.model, loaded.plan):
        found.append(verdict)
        print("\n".join(lines(verdict, width)), flush=True)
    print(f"\n{summary(found)}")
    return tuple(found)


def _words(loaded: Loaded) -> str:
    from theodolite.plan.describe import describe

    stated = loaded.plan.max_position_embeddings
    length = "no stated length" if stated is None else f"stated length {stated:,} tokens"
    positions = "rotary positions" if loaded.plan.rotaries else describe(loaded.plan)
    return f"{loaded.plan.model_type}, {len(loaded.plan.layers)} layers, {positions}, {length}"


def _dtype(loaded: Loaded) -> str:
    return str(loaded.model.dtype).removeprefix("torch.")


def _as_json(loaded: Loaded, verdicts: tuple[Verdict, ...]) -> dict[str, Any]:
    return {
        "model": loaded.name,
        "model_type": loaded.plan.model_type,
        "dtype": _dtype(loaded),
        "device": loaded.model.device.type,
        "passed": not any(verdict.failed for verdict in verdicts),
        "verdicts": [verdict.as_json() for verdict in verdicts],
    }
