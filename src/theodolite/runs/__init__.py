"""Cells of work and their store: what is done stays done."""

from theodolite.runs.store import Cell, Finished, Result, Store, cell_key, write_atomically, write_json

__all__ = ["Cell", "Finished", "Result", "Store", "cell_key", "write_atomically", "write_json"]
