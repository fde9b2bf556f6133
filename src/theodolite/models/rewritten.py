"""A checkpoint's files written anew, complete or not at all: one tensor in memory at a time, all else copied."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from theodolite.encodings.layout import Heads, Part, convert_rows
from theodolite.models.errors import LoadError
from theodolite.models.tensor_files import INDEX, Entry, TensorFile, is_stale

_BLOCK = 1 << 23
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt", ".npz")
_MOST_FILES = 10_000


def write_moved(file: TensorFile, out: Path, moves: Mapping[str, tuple[Part, Heads]]) -> None:
    """The file again, with the rows of some tensors moved: header, order and all other bytes are the same."""
    with file.path.open("rb") as given, out.open("wb") as written:
        at = 0
        for entry in file.entries:
            if entry.name not in moves or entry.begin == entry.end:
                continue
            _copy(given, written, entry.begin - at, file.path)
            written.write(_moved(entry, *moves[entry.name]))
            at = entry.end
            given.seek(at)
        _copy(given, written, file.size - at, file.path)
        written.flush()
        os.fsync(written.fileno())


def _moved(entry: Entry, part: Part, heads: Heads) -> memoryview:
    """The bytes of a tensor whose rows have moved."""
    converted = convert_rows(entry.name, entry.read(), part, heads).contiguous()
    return converted.flatten().view(torch.uint8).numpy().data


def _copy(given: BinaryIO, written: BinaryIO, count: int, path: Path) -> None:
    while count:
        block = given.read(min(count, _BLOCK))
        if not block:
            raise LoadError(f"{path} has become shorter while it was read")
        written.write(block)
        count -= len(block)


def require_new(source: Path, out: Path) -> None:
    """Raise where the output exists, is inside the input, or is no place to write to."""
    if out.exists() or out.is_symlink():
        raise ValueError(f"out: {str(out)!r} exists; give a new name, for nothing is merged or overwritten")
    if not out.parent.is_dir():
        raise ValueError(f"out: {str(out.parent)!r} is no folder")
    if source.is_dir() and source.resolve() in out.resolve().parents:
        raise ValueError(f"out: {str(out)!r} is inside the checkpoint that is converted")
    if source.is_file() and out.suffix != ".safetensors":
        raise ValueError(f"out: got {str(out)!r}; it is a file for a file, and must end in .safetensors")


def beside(source: Path, files: Sequence[TensorFile]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The other files of a folder: those to copy, and those that have or name other weights, which stay."""
    ours = {file.path.name for file in files}
    # It names files that stay behind.
    stale = INDEX if is_stale(source / INDEX, ours) else None
    copied: list[str] = []
    left: list[str] = []
    for folder, folders, names in os.walk(source):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            inside = path.relative_to(source)
            if str(inside) in ours or not path.is_file():
                continue
            (left if path.suffix.lower() in _WEIGHTS or str(inside) == stale else copied).append(str(inside))
        if len(copied) + len(left) > _MOST_FILES:
            raise LoadError(f"{source} has more than {_MOST_FILES:,} files; give a folder with a checkpoint alone")
    return tuple(copied), tuple(left)
