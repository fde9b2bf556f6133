"""The header of a GGUF file: its scalar metadata and the shapes of its tensors, nothing of the weights."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Header:
    """Metadata by key (strings and numbers; arrays are passed over) and shapes by tensor name."""

    metadata: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

    @property
    def parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(map(math.prod, self.shapes.values()))


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
            return _read(file)
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise ValueError(f"{path} is damaged or ends too early ({error})") from None


def _read(file: BinaryIO) -> Header:
    tensors, keys = _number(file, "<Q"), _number(file, "<Q")
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key, kind = _text(file), _number(file, "<I")
        if kind == _ARRAY:
            _pass_array(file)
        else:
            metadata[key] = _text(file) if kind == _STRING else _number(file, _SCALARS[kind])
    shapes = {}
    for _ in range(tensors):
        name, dimensions = _text(file), _number(file, "<I")
        shapes[name] = tuple(_number(file, "<Q") for _ in range(dimensions))
        # The tensor's type and offset.
        file.seek(12, 1)
    return Header(metadata, shapes)


def _number(file: BinaryIO, form: str) -> Any:
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]


def _text(file: BinaryIO) -> str:
    return file.read(_number(file, "<Q")).decode("utf-8")


def _pass_array(file: BinaryIO) -> None:
    kind, length = _number(file, "<I"), _number(file, "<Q")
    if kind in _SCALARS:
        file.seek(length * struct.calcsize(_SCALARS[kind]), 1)
        return
    for _ in range(length):
        if kind == _STRING:
            file.seek(_number(file, "<Q"), 1)
        else:
            _pass_array(file)
