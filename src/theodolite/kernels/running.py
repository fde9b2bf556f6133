"""Queries and keys, brought into the canonical form and handed to the implementation that is picked for them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from theodolite.kernels.choice import pick
from theodolite.kernels.layout import Layout
from theodolite.kernels.operands import Tables, canonical

# q and k, either may be None.
Maybe = Sequence["Tensor | None"]


def run(xs: Maybe, outs: Maybe, tables: Tables, layout: Layout, heads_first: bool) -> None:
    """Turn q and k, either may be None, into their outputs; nothing is recorded."""
    turns = []
    for x, out in zip(xs, outs, strict=True):
        if x is not None and out is not None and x.numel() and not x.is_meta:
            view = canonical(x, heads_first)
            turns.append((view if out is x else canonical(out, heads_first), view))
    # Tokens and channels are the same by the tables; the batch need not be.
    alike = len({(x.dtype, x.shape[0], x.shape[3]) for _, x in turns}) == 1
    for together in (turns,) if alike else [[turn] for turn in turns]:
        implementation = pick(together, tables.cos, tables.sin, layout)
        implementation(together, tables.cos, tables.sin, tables.positions, layout)
