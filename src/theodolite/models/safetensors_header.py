"""How many numbers a safetensors file holds, from its header alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from theodolite.plan.json_object import parse_object

# The format's own limit is 100 MB. What is made of a header takes several times its size, and the largest models have
# some hundred kilobytes in each file.
_LARGEST_HEADER = 2**25
_MOST_VALUES = 2**21
_MOST_DIMENSIONS = 32


def count_parameters(path: Path) -> int:
    """Numbers in all tensors of a safetensors file.

    Raises:
        ValueError: the file is no safetensors file, or ends too early.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= _LARGEST_HEADER:
            raise ValueError(
                f"{path} is no safetensors file: its header would have {size:,} bytes, and at most "
                f"{_LARGEST_HEADER:,} are read"
            )
        header = file.read(size)
    try:
        tensors = parse_object(header, most=_MOST_VALUES)
    except ValueError as error:
        raise ValueError(
            f"{path} is no safetensors file, or ends too early: its header is not read ({error})"
        ) from None
    numbers = 0
    for name, tensor in tensors.items():
        if name == "__metadata__":
            continue
        shape: Any = tensor.get("shape") if isinstance(tensor, dict) else None
        if not _is_shape(shape):
            raise ValueError(f"{path} is no safetensors file: its header gives {name!r:.80} no shape")
        numbers += math.prod(shape)
    return numbers


def _is_shape(shape: Any) -> bool:
    return (
        isinstance(shape, list)
        and len(shape) <= _MOST_DIMENSIONS
        and all(type(size) is int and 0 <= size < 1 << 63 for size in shape)
    )
