"""A better frequency map for one model, searched on its own text by the cheap instrument and confirmed by the dear."""

from theodolite.search.run import search
from theodolite.search.settings import Settings

__all__ = ["Settings", "search"]
