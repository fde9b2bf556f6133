"""Pictures of encodings: a function for each, which takes arrays or plans and returns a figure of matplotlib."""

from theodolite.report.show.biases import bias_by_distance, bias_matrix
from theodolite.report.show.canvas import encoded
from theodolite.report.show.hands import clock_hands
from theodolite.report.show.rotations import coverage, decay, scores, wavelengths
from theodolite.report.show.vectors import curves, heat_map, similarity

__all__ = [
    "bias_by_distance",
    "bias_matrix",
    "clock_hands",
    "coverage",
    "curves",
    "decay",
    "encoded",
    "heat_map",
    "scores",
    "similarity",
    "wavelengths",
]
