"""Writing whole files or none, and asking for what an optional package does."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path


def write_whole(path: Path, content: bytes) -> Path:
    """Write `content` to `path` so that a reader, or a kill, never finds half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner reads; a report is for everyone whom the umask allows.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


@contextmanager
def needs(package: str, purpose: str) -> Iterator[None]:
    """Turn a failed import of an optional package into a sentence that says what to install."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise ImportError(f"{package} is needed {purpose}: pip install 'theodolite[survey]'") from missing


def resource(name: str) -> str:
    """A template, style sheet or script of the package."""
    return files("theodolite.report").joinpath("templates", name).read_text(encoding="utf-8")
