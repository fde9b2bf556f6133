"""GGUF files, converted once to safetensors, since transformers takes ten times as long to read them."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from theodolite.models.errors import LoadError
from theodolite.models.gguf_header import read_header
from theodolite.models.gguf_positions import restate
from theodolite.models.quiet import quiet
from theodolite.models.source import Source, fingerprint

# Part of the key: raise it when the conversion itself changes.
_FORMAT = 1
_SPARE_BYTES = 100_000_000


def cache_folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """Where conversions are kept: `cache`, else $THEODOLITE_CACHE, else `theodolite` in $XDG_CACHE_HOME or ~/.cache."""
    if cache is not None:
        return Path(cache)
    if chosen := os.environ.get("THEODOLITE_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "theodolite"


def converted(
    source: Source, *, cache: str | os.PathLike[str] | None = None, progress: Callable[[str], None] | None = None
) -> Path:
    """The folder with the safetensors form of a GGUF file, made now if it is not there yet.

    It is keyed by the bytes of the file, appears whole or not at all, and is made once though several processes ask.
    Weights are kept in float32, in which the dequantised numbers are exact.

    Raises:
        LoadError: transformers cannot read the file, or reads other positions than it states, or the disk is full.
    """
    folder = cache_folder(cache)
    target = folder / f"{source.path.stem}-{fingerprint(source)[:16]}-v{_FORMAT}"
    if target.is_dir():
        return target
    parameters = _parameters(source.path)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder / f"{target.name}.lock"):
        if target.is_dir():
            return target
        # Alone here, so what lies about was left by a process that was killed.
        for left in folder.glob(f".{target.name}.*"):
            shutil.rmtree(left, ignore_errors=True)
        _require_space(folder, parameters * 4 + _SPARE_BYTES)
        if progress is not None:
            progress(f"converting {source.path.name} to safetensors, once")
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=folder))
        try:
            _convert(source.path, scratch)
            # The weights are written privately by some writers; the folder is as readable as any.
            scratch.chmod(0o755)
            _publish(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _parameters(path: Path) -> int:
    try:
        return read_header(path).parameters
    except ValueError as error:
        raise LoadError(str(error)) from None


def _convert(path: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with quiet(), _read_once():
            model: Any = AutoModelForCausalLM.from_pretrained(
                str(path.parent), gguf_file=path.name, dtype=torch.float32, trust_remote_code=False
            )
            # Dequantised by now, but save_pretrained refuses while these say otherwise.
            model.hf_quantizer = None
            del model.config.quantization_config
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).save_pretrained(folder)
            restate(path, folder / "config.json")
    except ImportError as error:
        raise ImportError(f"reading GGUF files needs more: pip install 'theodolite[survey]' ({error})") from error
    except LoadError:
        raise
    except (ValueError, KeyError, OSError, NotImplementedError, RuntimeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise LoadError(f"{path} cannot be read by transformers: {first}") from error


@contextmanager
def _read_once() -> Iterator[None]:
    """transformers parses the header anew for config, tokenizer and weights, and builds one map for each tensor."""
    import gguf

    slow = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in slow.items():
        setattr(gguf, name, functools.lru_cache(function))
    try:
        yield
    finally:
        for name, function in slow.items():
            setattr(gguf, name, function)


def _publish(scratch: Path, target: Path) -> None:
    for file in scratch.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    try:
        scratch.rename(target)
    except OSError:
        # Without locks another process may have been first; its result is as good.
        if not target.is_dir():
            raise


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise LoadError(
            f"{folder} has {free / 1e9:.1f} GB free and the conversion needs {needed / 1e9:.1f} GB; "
            "set THEODOLITE_CACHE to a larger place"
        )


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time inside the block, where the system has file locks; a killed one lets go."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
