"""Folders and files that have their name when they are whole, and are gone when they are not."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write into; it becomes `out` when the block ends, and is gone if it fails.

    Raises:
        FileExistsError: `out` is there.
        OSError: it cannot be made.
    """
    require_absent(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield scratch
        for path in scratch.rglob("*"):
            if path.is_file():
                flush(path)
        scratch.chmod(0o777 & ~umask())
        require_absent(out)
        scratch.rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def appearing_file(out: Path) -> Iterator[Path]:
    """A path beside `out` to write a file to; it becomes `out` when the block ends, and is gone if it fails.

    Raises:
        FileExistsError: `out` is there.
        OSError: it cannot be made.
    """
    require_absent(out)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield scratch / out.name
        flush(scratch / out.name)
        require_absent(out)
        (scratch / out.name).rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def require_absent(out: Path) -> None:
    """Raise where something has the name of what is to be written."""
    if os.path.lexists(out):
        raise FileExistsError(f"out: {str(out)!r} is there already; give a name that is not, or delete it")


def flush(path: Path) -> None:
    """Have a file's bytes on the disk before its name is."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def umask() -> int:
    """What the process takes from the modes of new files."""
    taken = os.umask(0)
    os.umask(taken)
    return taken
