"""Checkpoints between the two pair layouts of RoPE."""

from theodolite.encodings.layout.checkpoints import Converted, convert_state_dict
from theodolite.encodings.layout.tensors import Layout, Part, convert_tensor, permutation

__all__ = ["Converted", "Layout", "Part", "convert_state_dict", "convert_tensor", "permutation"]
