"""A document written to a file and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from theodolite.ask.documents import Document, read_document


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Writes a file and reads it as a document."""

    def write_and_read(name: str, content: str | bytes, **options: Any) -> Document:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return read_document(path, **options)

    return write_and_read
