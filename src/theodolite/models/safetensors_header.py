"""The header of a safetensors file, and how many numbers the file holds by it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeGuard

from theodolite.plan.json_object import parse_object

# The format's own limit is 100 MB. What is made of a header takes several times its size, and the largest models have
# some hundred kilobytes in each file.
_LARGEST_HEADER = 2**25
MOST_VALUES = 2**21
"""Values of a header, or of an index, at most."""
_MOST_DIMENSIONS = 32


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """What the header of a safetensors file says, by tensor name, unchecked; and where the data begin (bytes).

    Raises:
        ValueError: there is no header, or it is longer than the file or than is read here.
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= _LARGEST_HEADER:
            raise ValueError(f"its header would have {length:,} bytes, and at most {_LARGEST_HEADER:,} are read")
        if length > size - 8:
            raise ValueError("its header is longer than it")
        return parse_object(file.read(length), most=MOST_VALUES), 8 + length


def count_parameters(path: Path) -> int:
    """Numbers in all tensors of a safetensors file.

    Raises:
        ValueError: the file is no safetensors file, or ends too early.
    """
    try:
        tensors, _ = read_header(path)
    except ValueError as error:
        raise ValueError(
            f"{path} is no safetensors file, or ends too early: its header is not read ({error})"
        ) from None
    numbers = 0
    for name, tensor in tensors.items():
        if name == "__metadata__":
            continue
        shape: Any = tensor.get("shape") if isinstance(tensor, dict) else None
        if not is_shape(shape):
            raise ValueError(f"{path} is no safetensors file: its header gives {name!r:.80} no shape")
        numbers += math.prod(shape)
    return numbers


def is_shape(shape: Any) -> TypeGuard[list[int]]:
    """Whether a header's shape is one."""
    return (
        isinstance(shape, list)
        and len(shape) <= _MOST_DIMENSIONS
        and all(type(size) is int and 0 <= size < 1 << 63 for size in shape)
    )
