"""Position encodings as torch modules, built from a plan or by hand."""

from theodolite.encodings.rotary import RotaryEmbedding, Tables, rotary_tables

__all__ = ["RotaryEmbedding", "Tables", "rotary_tables"]
