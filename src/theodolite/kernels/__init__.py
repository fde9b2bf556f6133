"""How a rotation runs: a float64 oracle and fast implementations behind one function."""

from theodolite.kernels.api import rotate

__all__ = ["rotate"]
