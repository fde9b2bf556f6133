"""What verbs that load a model have in common: the packages, the device, the memory, and what may go wrong."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from theodolite.cli.progress import Progress
    from theodolite.models.load import LoadedModel


def loading_errors() -> tuple[type[BaseException], ...]:
    """What goes wrong by what the user gave, and is told in one line."""
    told = (ValueError, OSError, MemoryError, FloatingPointError, ImportError)
    try:
        from theodolite.models.errors import LoadError
    except ImportError:
        return told
    return (LoadError, *told)


def add_machine(parser: argparse.ArgumentParser) -> None:
    """The options for what a model is read in, and where."""
    parser.add_argument(
        "--dtype", default="auto", help="bfloat16, float32, float16 (default: what the device is fast at)"
    )
    add_device(parser)


def add_device(parser: argparse.ArgumentParser) -> None:
    """The option for where a model is run."""
    parser.add_argument("--device", help="cpu, cuda, mps, ... (default: the accelerator if there is one)")


def require_places(texts: Iterable[str], out: Path) -> None:
    """Raise, before a model is loaded, where a text cannot be read or results cannot be kept."""
    from theodolite.survey.texts import read_text

    for text in texts:
        read_text(text)
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: {str(out)!r} is a file; give a folder")


def require_room(loaded: LoadedModel, to: int, *, mapped: bool) -> None:
    """Raise where the memory has no room for reading `to` tokens."""
    from theodolite.survey.memory import require_memory, survey_bytes

    needed = survey_bytes(loaded.model, loaded.plan, length=to, mapped=mapped)
    shorter = "a shorter length (--to), another dtype, or another machine"
    require_memory(needed, f"Reading {to:,} tokens", loaded.model.device, instead=shorter)


def require_packages(what: str, extra: str, *packages: str) -> None:
    """Raise before any work is done where a package is missing that it needs; the extra has it."""
    for package in packages:
        try:
            import_module(package)
        except ImportError as error:
            raise ImportError(
                f"{what} needs {package} ({error}); install it with: pip install 'theodolite[{extra}]'"
            ) from error


def require_device(name: str | None) -> None:
    """Raise where torch has no such device, or this machine has none."""
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device: got {name!r}, which cannot be used here ({str(error).splitlines()[0]})") from None


def load_within_memory(name: str, dtype: str, device: str | None, progress: Progress) -> LoadedModel:
    """Load a model that the memory has room for."""
    from theodolite.models.load import choose_device, choose_dtype, load
    from theodolite.models.source import resolve, weights_bytes
    from theodolite.survey.memory import require_memory

    require_device(device)
    source, chosen = resolve(name), choose_device(device)
    wanted = choose_dtype(dtype, chosen)
    if source.kind != "hub":
        weights = weights_bytes(source, wanted)
        require_memory(weights, f"Loading {source.name}", chosen, instead="a smaller model, or another machine")
    return load(name, dtype=wanted, device=chosen, progress=progress.working)


def tokens_argument(text: str) -> int:
    """A number of tokens: 16384, 16,384, 16k (times 1,024)."""
    if not re.fullmatch(r"[0-9][0-9,_]{,999}[kK]?", text):
        raise argparse.ArgumentTypeError(f"got {text!r:.60}; a number of tokens is 16384 or 16k")
    scale = 1024 if text[-1:].lower() == "k" else 1
    return int(text.rstrip("kK").replace(",", "").replace("_", "")) * scale
