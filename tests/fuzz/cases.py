"""Files that others may have written, drawn from a seed: case 17 of a seed is the same on every machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.fuzz.gguf_files import gguf_file
from tests.fuzz.json_files import config_file, params_file
from tests.fuzz.safetensors_files import safetensors_file

KINDS = ("config", "params", "gguf", "safetensors")
_SHARES = (52, 10, 32, 6)
_NAMES = {"config": "config.json", "params": "params.json", "gguf": "model.gguf", "safetensors": "model.safetensors"}


@dataclass(frozen=True)
class Case:
    """A file that was changed, and the file that it was made from; `zeros` bytes come after the former."""

    seed: int
    number: int
    kind: str
    data: bytes
    original: bytes
    zeros: int = 0

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write both, over those of the case before; returns their paths, the changed one first."""
        paths = []
        for part, data in (("changed", self.data), ("original", self.original)):
            path = folder / part / _NAMES[self.kind]
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            paths.append(path)
        if self.zeros:
            # Zeros past the end take no room.
            os.truncate(paths[0], len(self.data) + self.zeros)
        return paths[0], paths[1]


def case(seed: int, number: int) -> Case:
    """The case of that number; it depends on nothing else."""
    random = Random(f"{seed}:{number}")
    kind = random.choices(KINDS, _SHARES)[0]
    if kind == "gguf":
        data, original, zeros = gguf_file(random)
        return Case(seed, number, kind, data, original, zeros)
    data, original = {"config": config_file, "params": params_file, "safetensors": safetensors_file}[kind](random)
    return Case(seed, number, kind, data, original)
