"""How a rotation runs: a float64 oracle and fast implementations behind one function."""

from theodolite.kernels.api import rotate
from theodolite.kernels.choice import active, describe, use

__all__ = ["active", "describe", "rotate", "use"]
