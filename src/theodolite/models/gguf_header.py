"""The header of a GGUF file: its scalar metadata and the shapes of its tensors, nothing of the weights."""

from __future__ import annotations

import math
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
# llama.cpp writes arrays of numbers and of strings, and tensors of up to four dimensions.
_DEEPEST, _MOST_DIMENSIONS = 4, 4
_BLOCK = re.compile(r"(?:^|\.)blk\.(\d{1,9})\.")


@dataclass(frozen=True)
class Header:
    """Metadata by key (strings and numbers; arrays are passed over) and shapes by tensor name."""

    metadata: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

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
    with path.open("rb") as file:
        magic, version = file.read(4), file.read(4)
        if magic != b"GGUF":
            raise ValueError(f"{path} is no GGUF file")
        if version not in (b"\x02\0\0\0", b"\x03\0\0\0"):
            raise ValueError(f"{path}: GGUF version {version.hex()} is not read; 2 and 3 are")
        try:
            return _read(_Bytes(file))
        except (struct.error, UnicodeDecodeError, KeyError, EOFError) as error:
            raise ValueError(f"{path} is damaged or ends too early ({error})") from None


class _Bytes:
    """What is left of a file; a length that goes past its end is refused before anything is allocated."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._left = file, os.fstat(file.fileno()).st_size - file.tell()

    def number(self, form: str) -> Any:
        return struct.unpack(form, self._file.read(self._take(struct.calcsize(form))))[0]

    def text(self) -> str:
        return self._file.read(self._take(self.number("<Q"))).decode("utf-8")

    def skip(self, length: int) -> None:
        self._file.seek(self._take(length), 1)

    def _take(self, length: int) -> int:
        if length > self._left:
            raise EOFError(f"{length} bytes are stated where {self._left} are left")
        self._left -= length
        return length


def _read(file: _Bytes) -> Header:
    tensors, keys = file.number("<Q"), file.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key, kind = file.text(), file.number("<I")
        if kind == _ARRAY:
            _pass_array(file, _DEEPEST)
        else:
            metadata[key] = file.text() if kind == _STRING else file.number(_SCALARS[kind])
    shapes = {}
    for _ in range(tensors):
        name, dimensions = file.text(), file.number("<I")
        if dimensions > _MOST_DIMENSIONS:
            raise EOFError(f"a tensor of {dimensions} dimensions")
        shapes[name] = tuple(file.number("<Q") for _ in range(dimensions))
        # The tensor's type and offset.
        file.skip(12)
    return Header(metadata, shapes)


def _pass_array(file: _Bytes, levels: int) -> None:
    if not levels:
        raise EOFError(f"arrays are nested deeper than {_DEEPEST}")
    kind, length = file.number("<I"), file.number("<Q")
    if kind in _SCALARS:
        file.skip(length * struct.calcsize(_SCALARS[kind]))
        return
    for _ in range(length):
        if kind == _STRING:
            file.skip(file.number("<Q"))
        elif kind == _ARRAY:
            _pass_array(file, levels - 1)
        else:
            raise KeyError(kind)
