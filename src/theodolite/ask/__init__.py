"""Questions over long documents, answered by a local model.

Names are imported when first used: documents are read without torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "Answer": "theodolite.ask.session",
    "Document": "theodolite.ask.documents",
    "Passage": "theodolite.ask.passages",
    "Session": "theodolite.ask.session",
    "read_document": "theodolite.ask.documents",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'theodolite.ask' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
