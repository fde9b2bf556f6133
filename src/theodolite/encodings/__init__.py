"""Position encodings as torch modules, built from a plan or by hand: one folder for each place where they act."""

from theodolite.encodings.build import build
from theodolite.encodings.policy import Policy
from theodolite.encodings.rotate.parts import RotateByChannel, RotateByHead
from theodolite.encodings.rotate.rotary import RotaryEmbedding
from theodolite.encodings.rotate.tables import Tables, rotary_tables
from theodolite.encodings.shared import SharedTables

__all__ = [
    "Policy",
    "RotaryEmbedding",
    "RotateByChannel",
    "RotateByHead",
    "SharedTables",
    "Tables",
    "build",
    "rotary_tables",
]
