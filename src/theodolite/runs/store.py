"""Results that outlive the process: one line per finished cell, written once, never half.

A cell is described by all that its result depends on, as plain data; the description's hash is its
key. What is stored under a key is therefore valid whatever run asks for it, and a run that was killed
goes on by asking again.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    return _digest(cell)[:24]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What is stored of a cell: plain data, and a row of numbers where it has one."""

    result: Result
    array: NDArray[np.float32] | None = None


class Store:
    """The cells finished in a folder: `results.jsonl`, and `tokens/KEY.npy` for long rows of numbers.

    Use it as a context. One process at a time may hold a folder; a process that dies lets go of it.

    Raises:
        BlockingIOError: another process holds the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "results.jsonl"
        self._entries: dict[str, dict[str, Any]] = {}
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
            self._entries = self._read()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def __contains__(self, cell: Cell) -> bool:
        return self.get(cell) is not None

    def get(self, cell: Cell) -> Finished | None:
        """A finished cell, or None. One whose row of numbers is gone or damaged is not finished."""
        key = cell_key(cell)
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry["array"] is None:
            return Finished(result=entry["result"])
        try:
            content = self._array_path(key).read_bytes()
        except FileNotFoundError:
            return None
        if hashlib.sha256(content).hexdigest() != entry["array"]:
            return None
        return Finished(result=entry["result"], array=np.load(io.BytesIO(content), allow_pickle=False))

    def put(
        self,
        cell: Cell,
        result: Result,
        *,
        array: NDArray[np.float32] | None = None,
        again: bool = False,
        **notes: Any,
    ) -> Finished:
        """Write a finished cell; `notes` (its seconds, say) stand beside the result and are not part of it.

        Args:
            again: take the place of a result that is there already, since what belonged to it is gone.
        """
        found = None if again else self.get(cell)
        if found is not None:
            return found
        # What a later run reads back is what this run goes on with, and what the digest is of.
        entry = json.loads(json.dumps({"key": cell_key(cell), "cell": cell, "result": result}, allow_nan=False))
        entry["array"] = None if array is None else self._write_array(entry["key"], array)
        line = json.dumps({**entry, "digest": _digest(entry), **notes}, ensure_ascii=False, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._entries[entry["key"]] = entry
        return Finished(result=entry["result"], array=array)

    def _write_array(self, key: str, array: NDArray[np.float32]) -> str:
        """Write a row of numbers; its digest."""
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        write_atomically(self._array_path(key), lambda path: path.write_bytes(buffer.getvalue()))
        return hashlib.sha256(buffer.getvalue()).hexdigest()

    def _array_path(self, key: str) -> Path:
        return self.folder / "tokens" / f"{key}.npy"

    def _read(self) -> dict[str, dict[str, Any]]:
        if not self.path.exists():
            return {}
        entries: dict[str, dict[str, Any]] = {}
        whole = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                entry = _entry(line, f"{self.path}: line {number}")
                entries[entry["key"]] = entry
                whole += len(line)
        if whole < self.path.stat().st_size:
            # A kill in the middle of a write leaves part of a line: that cell was not finished.
            os.truncate(self.path, whole)
        return entries


def _entry(line: bytes, where: str) -> dict[str, Any]:
    """A line of results, if it is one and as it was written."""
    remedy = "delete the line, and its cell is measured again, or choose another folder"
    try:
        entry = json.loads(line)
        written = {name: entry[name] for name in ("key", "cell", "result", "array")}
        unchanged = entry["digest"] == _digest(written) and entry["key"] == cell_key(entry["cell"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{where} is not a result of a survey ({error}); {remedy}") from None
    if not unchanged:
        raise ValueError(f"{where} is not as it was written; {remedy}")
    return dict(entry)


def _digest(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def write_json(path: Path, data: Any) -> None:
    """Write plain data whole or not at all, the same data as the same bytes."""
    text = json.dumps(data, ensure_ascii=False, indent=1, allow_nan=False) + "\n"
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
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
