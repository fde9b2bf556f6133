"""Checkpoints between the two pair layouts of RoPE."""

from theodolite.encodings.layout.checkpoints import Converted, attention_sites, convert_state_dict, row_moves
from theodolite.encodings.layout.tensors import Heads, Layout, Part, convert_rows, convert_tensor, permutation

__all__ = [
    "Converted",
    "Heads",
    "Layout",
    "Part",
    "attention_sites",
    "convert_rows",
    "convert_state_dict",
    "convert_tensor",
    "permutation",
    "row_moves",
]
