"""The tensors of safetensors files by name: checked headers, and the bytes of one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from theodolite.models.errors import LoadError
from theodolite.models.safetensors_header import MOST_VALUES, is_shape, read_header
from theodolite.models.source import safetensors_files
from theodolite.plan.json_object import parse_object

INDEX = "model.safetensors.index.json"
"""Says which file of several has which tensor."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32, "F64": torch.float64,
    "I64": torch.int64, "U64": torch.uint64, "C64": torch.complex64,
}  # fmt: skip


class Entry(NamedTuple):
    """A tensor of a file: `begin` and `end` are bytes of the file; `dtype` is the format's name."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def meta(self) -> Tensor:
        """A tensor of the same shape without numbers, for what looks at names and shapes only."""
        return torch.empty(self.shape, dtype=_DTYPES.get(self.dtype, torch.uint8), device="meta")

    def read(self) -> Tensor:
        """The tensor, on the CPU.

        Raises:
            LoadError: torch has no such dtype, or the file has become shorter.
        """
        if self.dtype not in _DTYPES:
            raise LoadError(f"{self.file}: {self.name!r:.80} is of dtype {self.dtype}, which cannot be read here")
        stored = bytearray(self.end - self.begin)
        with self.file.open("rb") as file:
            file.seek(self.begin)
            if file.readinto(stored) != len(stored):
                raise LoadError(f"{self.file} has become shorter while it was read")
        dtype = _DTYPES[self.dtype]
        return (torch.frombuffer(stored, dtype=dtype) if stored else torch.empty(0, dtype=dtype)).view(self.shape)


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file: where its data begins and ends (bytes), and its tensors in the order of their data."""

    path: Path
    data: int
    size: int
    entries: tuple[Entry, ...]


def require_readable(source: Path, *, instead: str = "") -> None:
    """Raise where the source is a file of another kind, before anybody asks how wide its heads are.

    Args:
        instead: what a GGUF file can be given for, as the end of a sentence.

    Raises:
        LoadError: it is not there, or is a file and no safetensors.
    """
    if not source.exists():
        raise LoadError(f"{source} does not exist")
    if source.is_dir():
        return
    with source.open("rb") as file:
        begin = file.read(4)
    if begin == b"GGUF":
        raise LoadError(f"{source} is a GGUF file, which is not read here{instead}")
    if source.suffix.lower() in _PICKLES:
        raise LoadError(f"{source} is a pickle, which is never opened; give safetensors")


def tensor_files(source: Path) -> list[TensorFile]:
    """The safetensors files of a folder (a model's, an adapter's, Mistral's own), or the one given.

    Raises:
        LoadError: there are none; a header is damaged, or gives tensors that overlap, leave gaps, or are not as large
            as they say; two files hold a tensor of one name, or one lacks
            a tensor that the index says it has.
    """
    return checked_files(_in_folder(source) if source.is_dir() else [source])


def checked_files(paths: Sequence[Path]) -> list[TensorFile]:
    """The files of one checkpoint, each with its header; and where an index names them, all that it says is there.

    Raises:
        LoadError: as `tensor_files`.
    """
    files = [read_tensor_file(path) for path in paths]
    homes: dict[str, Path] = {}
    for file in files:
        for entry in file.entries:
            if homes.setdefault(entry.name, file.path) != file.path:
                raise LoadError(f"{entry.name!r:.80} is in {homes[entry.name].name} and in {file.path.name}")
    index = paths[0].parent / INDEX if paths else None
    if index is not None and not is_stale(index, [path.name for path in paths]):
        for name, home in _weight_map(index).items():
            if name not in homes or homes[name].name != home:
                raise LoadError(f"{index} says that {name!r:.80} is in {home!r:.80}, which does not have it")
    return files


def is_stale(index: Path, names: Collection[str]) -> bool:
    """Whether an index is not there, or names other files than those of the checkpoint, which is read without it."""
    return not index.is_file() or set(map(str, _weight_map(index).values())) != set(names)


def _weight_map(index: Path) -> dict[str, Any]:
    try:
        named = parse_object(index.read_bytes(), most=MOST_VALUES).get("weight_map")
    except (OSError, ValueError):
        # Where it matters, it has been read before.
        return {}
    return named if isinstance(named, dict) else {}


def _in_folder(folder: Path) -> list[Path]:
    if (folder / "adapter_model.safetensors").is_file():
        return [folder / "adapter_model.safetensors"]
    own = folder / "consolidated.safetensors"
    if own.is_file() and not any(folder.glob("model*.safetensors*")):
        return [own]
    return safetensors_files(folder)


def read_tensor_file(path: Path) -> TensorFile:
    """The header of a safetensors file, checked against its size.

    Raises:
        LoadError: as `tensor_files`.
    """
    try:
        tensors, data = read_header(path)
        size = path.stat().st_size
        entries = sorted(_entries(path, tensors, data), key=lambda entry: (entry.begin, entry.end))
        _require_whole(entries, data, size)
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read as a safetensors file: {error}") from None
    return TensorFile(path, data, size, tuple(entries))


def _entries(path: Path, tensors: dict[str, Any], data: int) -> Iterator[Entry]:
    for name, said in tensors.items():
        if name == "__metadata__":
            continue
        said = said if isinstance(said, dict) else {}
        dtype, shape, place = said.get("dtype"), said.get("shape"), said.get("data_offsets")
        if not isinstance(dtype, str) or not is_shape(shape):
            raise ValueError(f"its header gives {name!r:.80} no dtype or no shape")
        if not (isinstance(place, list) and len(place) == 2 and all(type(at) is int and at >= 0 for at in place)):
            raise ValueError(f"its header gives {name!r:.80} no place")
        begin, end = place
        known = _DTYPES.get(dtype)
        if known is not None and end - begin != math.prod(shape) * known.itemsize:
            raise ValueError(f"{name!r:.80} has {end - begin} bytes, which {dtype} of shape {shape} does not fill")
        yield Entry(name, path, dtype, tuple(shape), data + begin, data + end)


def _require_whole(entries: list[Entry], data: int, size: int) -> None:
    at = data
    for entry in entries:
        if entry.begin != at or entry.end < at:
            raise ValueError(f"{entry.name!r:.80} begins at byte {entry.begin} and not at {at}")
        at = entry.end
    if at != size:
        raise ValueError(f"its tensors end at byte {at}, and it has {size}")
