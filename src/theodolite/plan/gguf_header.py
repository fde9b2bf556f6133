"""The header of a GGUF file: its metadata and the shapes of its tensors, nothing of the weights."""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_SCALARS = {
    kind: struct.Struct(form)
    for kind, form in {
        0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
    }.items()
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
# llama.cpp writes arrays of numbers and of strings, and tensors of up to four dimensions.
_DEEPEST, _MOST_DIMENSIONS = 4, 4
# One number a layer is the longest list that speaks of positions.
_LONGEST_LIST = 100_000
# Of a whole file. Zeros make endless entries, and a file of zeros takes no room: these are some times what models have.
_MOST = {
    "keys": 2**16, "tensors": 2**17, "strings in lists": 2**22, "lists in lists": 2**16, "numbers in lists": 2**20,
    "bytes of text": 2**24,
}  # fmt: skip
# A whole tokenizer may stand in one value.
_LONGEST_TOKENIZER_TEXT = 2**20
_FLOATS: dict[int, Any] = {0: np.dtype("<f4"), 1: np.dtype("<f2"), 28: np.dtype("<f8")}
_WIDEST = 2**20
_BLOCK = re.compile(r"(?:^|\.)blk\.(\d{1,9})\.")


@dataclass(frozen=True)
class Header:
    """Metadata by key (strings and numbers), lists of numbers by key, and shapes by tensor name.

    `passed` has the keys whose values were passed over: lists of strings, of lists, or of very many numbers. `places`
    has each tensor's type, as ggml numbers it, and where in the file it begins (bytes), unchecked.
    """

    metadata: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    lists: dict[str, list[Any]]
    passed: frozenset[str] = frozenset()
    places: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def blocks(self) -> set[int]:
        """The layers that tensors belong to by their names, counted from 0."""
        return {int(found[1]) for name in self.shapes if (found := _BLOCK.search(name))}

    def stated(self, name: str) -> Any:
        """The value of the architecture's own key (`block_count`), or None."""
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.{name}")


def read_header(path: Path) -> Header:
    """Read the header of a GGUF file, version 2 or 3.

    Raises:
        ValueError: the file is no GGUF file, of another version, or ends too early.
    """
    return read_header_and(path)[0]


def read_header_and(path: Path, tensors: Iterable[str] = ()) -> tuple[Header, dict[str, list[float]]]:
    """The header, and the numbers of those of the named small tensors that the file has.

    Raises:
        ValueError: as `read_header`; or such a tensor holds no plain floats, or is no small one.
    """
    with path.open("rb") as file:
        magic, version = file.read(4), file.read(4)
        if magic != b"GGUF":
            raise ValueError(f"{path} is no GGUF file")
        if version not in (b"\x02\0\0\0", b"\x03\0\0\0"):
            raise ValueError(f"{path}: GGUF version {version.hex()} is not read; 2 and 3 are")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                return _read(_Bytes(content), frozenset(tensors))
            except (struct.error, UnicodeDecodeError, KeyError, EOFError, OverflowError) as error:
                raise ValueError(f"{path} is damaged or ends too early ({error})") from None


class _Bytes:
    """What is left of a file; a length that goes past its end is refused before anything is allocated."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.at, self.end = content, 8, len(content)
        self.left = dict(_MOST)

    def spend(self, what: str, count: int) -> None:
        """Refuse a header that has more of something than any model's."""
        self.left[what] -= count
        if self.left[what] < 0:
            raise EOFError(f"more than {_MOST[what]:,} {what}")

    def number(self, form: struct.Struct) -> Any:
        return form.unpack_from(self.content, self.take(form.size))[0]

    def text(self) -> str:
        length = self.number(_LENGTH)
        begin = self.take(length)
        self.spend("bytes of text", length)
        return self.content[begin : begin + length].decode("utf-8")

    def next_length(self) -> int:
        """The length that is stated where the file is read next."""
        length = self.number(_LENGTH)
        self.at -= _LENGTH.size
        return int(length)

    def take(self, length: int) -> int:
        """Where the next `length` bytes begin; they are passed."""
        begin = self.at
        if length > self.end - begin:
            raise EOFError(f"{length} bytes are stated where {self.end - begin} are left")
        self.at = begin + length
        return begin

    def pass_strings(self, count: int) -> None:
        self.spend("strings in lists", count)
        # Hundreds of thousands of tokens stand here, so this is the loop that takes the time.
        at, end, content, length_at = self.at, self.end, self.content, _LENGTH.unpack_from
        for _ in range(count):
            at += 8 + length_at(content, at)[0]
            if at > end:
                raise EOFError(f"a string ends {at - end} bytes past the file")
        self.at = at


def _read(file: _Bytes, wanted: frozenset[str]) -> tuple[Header, dict[str, list[float]]]:
    tensors, keys = file.number(_LENGTH), file.number(_LENGTH)
    file.spend("keys", keys)
    file.spend("tensors", tensors)
    metadata, lists, passed = _keys(file, keys)
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, tuple[int, int]] = {}
    for _ in range(tensors):
        name, dimensions = file.text(), file.number(_SCALARS[4])
        if dimensions > _MOST_DIMENSIONS:
            raise EOFError(f"a tensor of {dimensions} dimensions")
        if name in shapes:
            raise EOFError(f"the tensor {name!r:.80} is there twice")
        shapes[name] = tuple(file.number(_LENGTH) for _ in range(dimensions))
        places[name] = file.number(_SCALARS[4]), file.number(_LENGTH)
    alignment = "a list" if "general.alignment" in lists or "general.alignment" in passed else 32
    alignment = metadata.get("general.alignment", alignment)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise EOFError(f"an alignment of {alignment!r:.80}, which is no power of two")
    data = -(-file.at // alignment) * alignment
    places = {name: (kind, data + offset) for name, (kind, offset) in places.items()}
    return Header(metadata, shapes, lists, passed, places), {
        name: _floats(file, name, shapes[name], places[name]) for name in wanted if name in shapes
    }


def _keys(file: _Bytes, count: int) -> tuple[dict[str, Any], dict[str, list[Any]], frozenset[str]]:
    """Single values, lists of numbers, and the keys of what was passed over."""
    metadata: dict[str, Any] = {}
    lists: dict[str, list[Any]] = {}
    passed: set[str] = set()
    for _ in range(count):
        key, kind = file.text(), file.number(_SCALARS[4])
        if key in metadata or key in lists or key in passed:
            raise EOFError(f"the key {key!r:.80} is there twice")
        tokenizer = key.startswith("tokenizer.")
        if kind == _ARRAY:
            found = _array(file, _DEEPEST, kept=not tokenizer)
            if found is None:
                passed.add(key)
            else:
                lists[key] = found
        elif kind != _STRING:
            metadata[key] = file.number(_SCALARS[kind])
        elif tokenizer and file.next_length() > _LONGEST_TOKENIZER_TEXT:
            file.take(file.number(_LENGTH))
            passed.add(key)
        else:
            metadata[key] = file.text()
    return metadata, lists, frozenset(passed)


def _array(file: _Bytes, levels: int, *, kept: bool) -> list[Any] | None:
    """A list of numbers, if it is to be kept and no longer than a model has layers; others are passed over."""
    if not levels:
        raise EOFError(f"arrays are nested deeper than {_DEEPEST}")
    kind, length = file.number(_SCALARS[4]), file.number(_LENGTH)
    if kind in _SCALARS:
        form = _SCALARS[kind]
        begin = file.take(length * form.size)
        if not kept or length > _LONGEST_LIST:
            return None
        file.spend("numbers in lists", length)
        return [value for (value,) in form.iter_unpack(file.content[begin : file.at])]
    if kind == _STRING:
        file.pass_strings(length)
    elif kind == _ARRAY:
        file.spend("lists in lists", length)
        for _ in range(length):
            _array(file, levels - 1, kept=False)
    else:
        raise KeyError(kind)
    return None


def _floats(file: _Bytes, name: str, shape: tuple[int, ...], place: tuple[int, int]) -> list[float]:
    kind, begin = place
    count = math.prod(shape)
    if kind not in _FLOATS or count > _WIDEST:
        raise EOFError(f"{name} must hold plain floats, at most {_WIDEST}")
    length = count * _FLOATS[kind].itemsize
    if begin + length > file.end:
        raise EOFError(f"{name} ends {begin + length - file.end} bytes past the file")
    return [float(value) for value in np.frombuffer(file.content[begin : begin + length], dtype=_FLOATS[kind])]
