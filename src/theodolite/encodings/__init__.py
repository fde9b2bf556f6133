"""Position encodings as torch modules, built from a plan or by hand."""

from theodolite.encodings.rotary import RotaryEmbedding
from theodolite.encodings.tables import Tables, rotary_tables

__all__ = ["RotaryEmbedding", "Tables", "rotary_tables"]
