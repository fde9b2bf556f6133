"""What verbs that load a model have in common: the packages, the device, the memory, and what may go wrong."""

from __future__ import annotations

import argparse
import re
from importlib import import_module
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
