"""Results that outlive the process: one line per finished cell, written once, never half.

A cell is described by all that its result depends on, as plain data; the description's hash is its
key. What is stored under a key is therefore valid whatever run asks for it, and a run that was killed
goes on by asking again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

Cell = Mapping[str, Any]
Result = dict[str, Any]


def cell_key(cell: Cell) -> str:
    """The name of a cell: a hash of its canonical JSON."""
    text = json.dumps(cell, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class Store:
    """The cells finished in a folder: `results.jsonl`, and `tokens/KEY.npy` for long rows of numbers.

    Use it as a context. One process at a time may hold a folder; a process that dies lets go of it.

    Raises:
        BlockingIOError: another process holds the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "results.jsonl"
        self._results: dict[str, Result] = {}
        self._lock = FileLock(folder / ".lock", timeout=0)

    def __enter__(self) -> Store:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout:
            raise BlockingIOError(
                f"{self.folder}: another run is writing here; wait for it or choose another folder"
            ) from None
        try:
            # Held alone, so what lies about half written was left by a process that was killed.
            for left in (self.folder / "tokens").glob(".*"):
                left.unlink()
            self._results = self._read()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def __contains__(self, cell: Cell) -> bool:
        return cell_key(cell) in self._results

    def get(self, cell: Cell) -> Result | None:
        """The result of a finished cell, or None."""
        return self._results.get(cell_key(cell))

    def array(self, cell: Cell) -> NDArray[np.float32]:
        """The row of numbers stored with a finished cell."""
        row: NDArray[np.float32] = np.load(self._array_path(cell_key(cell)), allow_pickle=False)
        return row

    def put(self, cell: Cell, result: Result, *, array: NDArray[np.float32] | None = None, **notes: Any) -> Result:
        """Write a finished cell; `notes` (its seconds, say) stand beside the result and are not part of it."""
        key = cell_key(cell)
        if key in self._results:
            return self._results[key]
        if array is not None:
            write_atomically(self._array_path(key), lambda path: np.save(path, array, allow_pickle=False))
        line = json.dumps({"key": key, "cell": cell, "result": result, **notes}, ensure_ascii=False, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        # What a later run reads back is what this run goes on with.
        self._results[key] = json.loads(line)["result"]
        return self._results[key]

    def _array_path(self, key: str) -> Path:
        return self.folder / "tokens" / f"{key}.npy"

    def _read(self) -> dict[str, Result]:
        if not self.path.exists():
            return {}
        results: dict[str, Result] = {}
        whole = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    entry = json.loads(line)
                    results[entry["key"]] = entry["result"]
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"{self.path}: line {number} is not a result of a survey ({error})") from None
                whole += len(line)
        if whole < self.path.stat().st_size:
            # A kill in the middle of a write leaves part of a line: that cell was not finished.
            os.truncate(self.path, whole)
        return results


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Call `write` with a path beside `path`, then rename: the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
