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

from theodolite.models.errors import LoadError, refusing
from theodolite.models.gguf_positions import restate
from theodolite.models.quiet import quiet
from theodolite.models.source import Source, checked_header, fingerprint
from theodolite.models.weights import require_numbers, require_weights
from theodolite.plan.gguf_header import Header

# Part of the key: raise it when the conversion itself changes.
_FORMAT = 2
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
    source: Source,
    *,
    digest: str | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """The folder with the safetensors form of a GGUF file, made now if it is not there yet.

    It is keyed by the bytes of the file (`digest` is its `fingerprint`, where that is known already), appears whole
    or not at all, and is made once though several processes ask.
    Weights are kept in float32, in which the dequantised numbers are exact.

    Raises:
        LoadError: the file lacks weights, transformers cannot read it or reads other positions than it states, or
            the disk is full.
    """
    folder = cache_folder(cache)
    target = folder / f"{source.path.stem}-{(digest or fingerprint(source))[:16]}-v{_FORMAT}"
    if target.is_dir():
        return target
    header = checked_header(source.path)
    _require_layers(header, source.path)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder / f"{target.name}.lock"):
        if target.is_dir():
            return target
        # Alone here, so what lies about was left by a process that was killed.
        for left in folder.glob(f".{target.name}.*"):
            shutil.rmtree(left, ignore_errors=True)
        _require_space(folder, header.parameters * 4 + _SPARE_BYTES)
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


def _require_layers(header: Header, path: Path) -> None:
    """Raise unless the file states its layers and has weights for each of them."""
    count, blocks = header.stated("block_count"), header.blocks
    if type(count) is not int or count < 1:
        # transformers would take the number of layers that its config has by default.
        raise LoadError(f"{path} does not state how many layers it has (block_count: got {count!r:.80})")
    lacking = next((index for index in range(count) if index not in blocks), None)
    if lacking is not None:
        raise LoadError(f"{path} lacks weights: it states {count} layers and has nothing for blk.{lacking}")


def _require_all_read(header: Header, path: Path) -> None:
    count, last = header.stated("block_count"), max(header.blocks)
    if last >= count:
        raise LoadError(f"{path} states {count} layers and has weights of blk.{last}, which none of them reads")


def _convert(path: Path, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    header = checked_header(path)
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with quiet(), _read_once(), refusing(f"{path} cannot be read by transformers"):
        config = AutoConfig.from_pretrained(**place, trust_remote_code=False)
        require_numbers(config, header.parameters, path, packed=2)
        model, report = AutoModelForCausalLM.from_pretrained(
            **place,
            dtype=torch.float32,
            trust_remote_code=False,
            output_loading_info=True,
            # They are told below, by name.
            ignore_mismatched_sizes=True,
        )
        require_weights(report, path)
        _require_all_read(header, path)
        # Dequantised by now, but save_pretrained refuses while these say otherwise.
        model.hf_quantizer = None
        del model.config.quantization_config
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(**place, trust_remote_code=False).save_pretrained(folder)
        restate(path, folder / "config.json")


@contextmanager
def _read_once() -> Iterator[None]:
    """transformers parses the header anew for config, tokenizer and weights, and builds one map for each tensor."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError(f"reading GGUF files needs more: pip install 'theodolite[survey]' ({error})") from error

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
