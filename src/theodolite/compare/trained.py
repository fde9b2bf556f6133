"""Trained weights of a results folder: written whole, read back only as they were written."""

from __future__ import annotations

import hashlib
from pathlib import Path

from torch import Tensor, nn

from theodolite.runs import Cell, cell_key, write_atomically


class Weights:
    """The weights of finished trainings, a file each, by the key of the cell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "weights"

    def save(self, cell: Cell, model: nn.Module) -> str:
        """Write the weights of a model; their digest."""
        from safetensors.torch import save

        content = save({name: tensor.detach().contiguous().cpu() for name, tensor in model.state_dict().items()})
        write_atomically(self._path(cell), lambda path: path.write_bytes(content))
        return hashlib.sha256(content).hexdigest()

    def read(self, cell: Cell, digest: str) -> dict[str, Tensor] | None:
        """The weights with this digest; None where they are gone or damaged."""
        from safetensors.torch import load

        try:
            content = self._path(cell).read_bytes()
        except FileNotFoundError:
            return None
        return load(content) if hashlib.sha256(content).hexdigest() == digest else None

    def _path(self, cell: Cell) -> Path:
        return self.folder / f"{cell_key(cell)}.safetensors"
