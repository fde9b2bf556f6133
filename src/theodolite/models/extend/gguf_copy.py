"""A copy of a GGUF file in which named metadata and tensors of divisors are changed, and no other byte."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from theodolite.plan import PlanError
from theodolite.plan.gguf import read_keys
from theodolite.plan.gguf_header import read_header
from theodolite.plan.gguf_writing import Changes

_BLOCK = 1 << 22
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_U32, _F32, _STRING, _ARRAY = 4, 6, 8, 9
_U64 = struct.Struct("<Q")


def copy_changed(
    source: Path, target: Path, changes: Changes, progress: Callable[[int], object] = lambda written: None
) -> None:
    """Copy a GGUF file with changes; metadata and tensors that are not named stay byte for byte, in their order.

    Memory stays small whatever the size of the file. New tensors stand before the others.

    Args:
        progress: called with the bytes written since the last call.

    Raises:
        PlanError: the source is damaged, cut off or one part of several, or a tensor is there in another shape.
    """
    keys, _ = read_keys(source)
    parts_of = keys.get("split.count", 0)
    if type(parts_of) is not int or parts_of > 1:
        raise PlanError("split.count", parts_of, "give one file, made by llama-gguf-split --merge")
    require_all_data(source)
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        parts = _Parts(content, int(keys.get("general.alignment", 32)))
        present = {tensor.name: tensor for tensor in parts.tensors}
        for name, numbers in changes.divisors.items():
            if name in present and (present[name].kind, present[name].shape) != (0, (len(numbers),)):
                raise PlanError(name, present[name].shape, f"it must be {len(numbers)} float32 numbers to be replaced")
        added = {name: numbers for name, numbers in changes.divisors.items() if name not in present}
        with target.open("wb") as out:
            data, shift = _write_header(out, parts, changes, added)
            for numbers in added.values():
                out.write(_padded(_packed(numbers), parts.alignment))
            file.seek(parts.data)
            while block := file.read(_BLOCK):
                out.write(block)
                progress(len(block))
            for name in changes.divisors.keys() & present.keys():
                out.seek(data + shift + present[name].offset)
                out.write(_packed(changes.divisors[name]))


def require_all_data(path: Path) -> None:
    """Raise where the file ends before its tensors do.

    Raises:
        PlanError: it does; or it is no GGUF file.
    """
    try:
        header = read_header(path)
    except ValueError as error:
        raise PlanError("GGUF", path.name, str(error)) from error
    size = path.stat().st_size
    for name, (kind, begin) in header.places.items():
        end = begin + _bytes_of(kind, header.shapes[name])
        if end > size:
            raise PlanError(
                "GGUF", path.name, f"the tensor {name!r:.80} ends {end - size:,} bytes past the file, which is cut off"
            )


def _bytes_of(kind: int, shape: tuple[int, ...]) -> int:
    """The bytes of a tensor; 1 of a type that the installed package does not know, or of any without one."""
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ImportError, ValueError, KeyError):
        return 1
    return int(math.prod(shape) // block * size)


@dataclass(frozen=True)
class _Tensor:
    """A tensor's entry: where it stands, the offset of its data being the last 8 bytes."""

    name: str
    begin: int
    end: int
    kind: int
    shape: tuple[int, ...]
    offset: int


class _Parts:
    """Where the parts of a file lie that has been read once, and so is whole."""

    def __init__(self, content: mmap.mmap, alignment: int) -> None:
        self.content, self.alignment = content, alignment
        tensors, values = struct.unpack_from("<QQ", content, 8)
        self._at = 24
        self.values = [self._value() for _ in range(values)]
        self.tensors = [self._tensor() for _ in range(tensors)]
        self.data = -(-self._at // alignment) * alignment

    def _text(self) -> str:
        (length,) = _U64.unpack_from(self.content, self._at)
        begin = self._at + 8
        self._at = begin + length
        return self.content[begin : self._at].decode("utf-8")

    def _value(self) -> tuple[str, int, int]:
        """A key, and where its whole entry begins and ends."""
        begin, key = self._at, self._text()
        (kind,) = struct.unpack_from("<I", self.content, self._at)
        self._at += 4
        self._pass(kind)
        return key, begin, self._at

    def _pass(self, kind: int, count: int = 1) -> None:
        if kind == _STRING:
            for _ in range(count):
                self._at += 8 + _U64.unpack_from(self.content, self._at)[0]
        elif kind == _ARRAY:
            for _ in range(count):
                inner, length = struct.unpack_from("<IQ", self.content, self._at)
                self._at += 12
                self._pass(inner, length)
        else:
            self._at += _SIZES[kind] * count

    def _tensor(self) -> _Tensor:
        begin, name = self._at, self._text()
        (dimensions,) = struct.unpack_from("<I", self.content, self._at)
        *shape, kind, offset = struct.unpack_from(f"<{dimensions}QIQ", self.content, self._at + 4)
        self._at += 4 + 8 * dimensions + 12
        return _Tensor(name, begin, self._at, kind, tuple(shape), offset)


def _write_header(
    out: BinaryIO, parts: _Parts, changes: Changes, added: Mapping[str, tuple[float, ...]]
) -> tuple[int, int]:
    """Write all that stands before the data; where the data begin, and by how much those of the source are moved."""
    content = parts.content
    entries = [entry for key, begin, end in parts.values if (entry := _changed(content, key, begin, end, changes))]
    present = {key for key, _, _ in parts.values}
    entries += [_entry(key, value) for key, value in changes.values.items() if key not in present and value is not None]
    out.write(content[:8] + struct.pack("<QQ", len(parts.tensors) + len(added), len(entries)))
    out.writelines(entries)
    out.writelines(_new_tensors(added, parts.alignment))
    shift = sum(-(-4 * len(numbers) // parts.alignment) * parts.alignment for numbers in added.values())
    for tensor in parts.tensors:
        out.write(content[tensor.begin : tensor.end - 8] + _U64.pack(tensor.offset + shift))
    out.write(b"\0" * (-out.tell() % parts.alignment))
    return out.tell(), shift


def _new_tensors(added: Mapping[str, tuple[float, ...]], alignment: int) -> Iterator[bytes]:
    offset = 0
    for name, numbers in added.items():
        yield _text(name) + struct.pack("<IQIQ", 1, len(numbers), 0, offset)
        offset += -(-4 * len(numbers) // alignment) * alignment


def _changed(content: mmap.mmap, key: str, begin: int, end: int, changes: Changes) -> bytes:
    if key not in changes.values:
        return content[begin:end]
    value = changes.values[key]
    return b"" if value is None else _entry(key, value)


def _entry(key: str, value: int | float | str) -> bytes:
    if isinstance(value, str):
        return _text(key) + struct.pack("<I", _STRING) + _text(value)
    form, kind = ("<If", _F32) if isinstance(value, float) else ("<II", _U32)
    return _text(key) + struct.pack(form, kind, value)


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8")
    return _U64.pack(len(encoded)) + encoded


def _packed(numbers: tuple[float, ...]) -> bytes:
    return np.asarray(numbers, dtype="<f4").tobytes()


def _padded(data: bytes, alignment: int) -> bytes:
    return data + b"\0" * (-len(data) % alignment)
