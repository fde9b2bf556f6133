"""A model that holds longer, as files: a folder for transformers, or a GGUF."""

from theodolite.models.extend.card import Card
from theodolite.models.extend.folder import Written, extend_folder
from theodolite.models.extend.gguf import extend_gguf
from theodolite.models.extend.target import over_llama3, require_counted_over_stated, stretched

__all__ = [
    "Card",
    "Written",
    "extend_folder",
    "extend_gguf",
    "over_llama3",
    "require_counted_over_stated",
    "stretched",
]
