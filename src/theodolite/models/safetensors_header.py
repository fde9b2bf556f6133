"""How many numbers a safetensors file holds, from its header alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

_LARGEST_HEADER = 100_000_000


def count_parameters(path: Path) -> int:
    """Numbers in all tensors of a safetensors file.

    Raises:
        ValueError: the file is no safetensors file, or ends too early.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= _LARGEST_HEADER:
            raise ValueError(f"{path} is no safetensors file")
        header = file.read(size)
    try:
        tensors = json.loads(header)
    except ValueError:
        raise ValueError(f"{path} is no safetensors file, or ends too early") from None
    return sum(math.prod(tensor["shape"]) for name, tensor in tensors.items() if name != "__metadata__")
