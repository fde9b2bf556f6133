"""Which encoding a model should have: the same small model, trained under each on the same data, then measured."""

from theodolite.compare.run import compare
from theodolite.compare.settings import Settings, Size
from theodolite.compare.training import Training

__all__ = ["Settings", "Size", "Training", "compare"]
