"""A learned table from a file: NumPy's, or a tensor of a safetensors file. Nothing is unpickled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from theodolite.report.files import needs
from theodolite.report.style import words

_NAMES = ("wpe.weight", "position_embeddings.weight", "embed_positions.weight", "position_embedding.weight")


def read_table(path: Path, key: str | None) -> NDArray[np.float64]:
    """The table (S, D) that a file holds.

    Args:
        path: a `.npy` file, or a `.safetensors` file.
        key: the tensor's name in the latter; None where exactly one has a usual name (`wpe.weight`, ...).

    Raises:
        ValueError: another kind of file, no such tensor, or one that is no matrix of numbers.
        OSError: it cannot be read.
    """
    if path.suffix == ".npy":
        table = _of_numpy(path)
    elif path.suffix == ".safetensors":
        table = _of_safetensors(path, key)
    else:
        raise ValueError(f"table: got {str(path)!r}; it must be a .npy or a .safetensors file")
    if table.ndim != 2 or not table.size:
        raise ValueError(f"table: {str(path)!r} has shape {table.shape}; it must be (positions, channels)")
    return table


def _of_numpy(path: Path) -> NDArray[np.float64]:
    try:
        return np.asarray(np.load(path, allow_pickle=False), dtype=np.float64)
    except (ValueError, TypeError, EOFError) as error:
        raise ValueError(f"table: {str(path)!r} is no array of numbers ({words(str(error), 80)})") from None


def _of_safetensors(path: Path, key: str | None) -> NDArray[np.float64]:
    with needs("safetensors", "to read a table"):
        from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, framework="pt") as file:
            return np.asarray(file.get_tensor(_chosen(path, list(file.keys()), key)).double().numpy())
    except SafetensorError as error:
        raise ValueError(f"table: {str(path)!r} is no safetensors file ({words(str(error), 80)})") from None


def _chosen(path: Path, keys: list[str], key: str | None) -> str:
    if key is not None:
        if key not in keys:
            raise ValueError(f"key: {str(path)!r} has no tensor {key!r}")
        return key
    usual = [name for name in keys if name.endswith(_NAMES)]
    if len(usual) != 1:
        found = f"several ({', '.join(words(name, 60) for name in usual[:4])})" if usual else "none"
        raise ValueError(f"key: of the usual names of such a table {str(path)!r} has {found}; give --key")
    return usual[0]
