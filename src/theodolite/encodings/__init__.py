"""Position encodings as torch modules, built from a plan or by hand: one folder for each place where they act."""

from theodolite.encodings.rotate.rotary import RotaryEmbedding
from theodolite.encodings.rotate.tables import Tables, rotary_tables

__all__ = ["RotaryEmbedding", "Tables", "rotary_tables"]
