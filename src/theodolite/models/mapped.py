"""Attention of a text that is read in chunks, at distances that a map has changed.

The model turns nothing meanwhile: keys are kept as projected, and turned for each group of the map when they are read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from theodolite.attention import Piece, merge
from theodolite.attention.relative import piece_by_map
from theodolite.encodings import Policy, RotaryEmbedding
from theodolite.models.feed import Attends, Prefix, temper
from theodolite.plan import ModelPlan, Rotary
from theodolite.positions import ReRoPE
from theodolite.positions.relative import RelativeMap

# No two tokens are that far apart.
_TRUE = ReRoPE(window=2**24)


def bare(plan: ModelPlan) -> ModelPlan:
    """The same plan with nothing turned by the model's own code."""
    return replace(plan, layers=tuple(replace(layer, rotate=None) for layer in plan.layers))


class MappedFeed(Attends):
    """What attention must know of one call: the plan, the map, what was read, and where the queries stand.

    Layers with a window of their own see no distance that the model was not trained for, and keep the true ones.

    Args:
        positions: (B, S), on the CPU.
        writing: keep the call's keys and values (B = 1); else they are seen by their own row alone, and forgotten.
    """

    def __init__(
        self, plan: ModelPlan, relative: RelativeMap, prefix: Prefix, positions: Tensor, *, writing: bool = True
    ) -> None:
        self.plan, self.relative, self.prefix, self.positions = plan, relative, prefix, positions
        self.writing = writing
        self._rotations: dict[Rotary, RotaryEmbedding] = {}
        # All layers of a call stand at the same positions.
        self._tables: dict[tuple[str, bool], dict[Any, Any]] = {}

    def tempered(self, layer_idx: int, q: Tensor) -> Tensor:
        """q (B, H, S, D) times what the plan multiplies queries by at their positions."""
        return temper(self.plan.layers[layer_idx].temperature, q, self.positions)

    def attention(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Piece:
        """q (B, H, S, D) over what was read and over k (B, G, S, D) and v (B, G, S, E), none of them turned."""
        layer = self.plan.layers[layer_idx]
        if layer.rotate is None:
            raise ValueError(
                f"relative: layers[{layer_idx}] turns nothing, and a map of distances changes what is turned"
            )
        rotate = self._rotations.setdefault(layer.rotate, RotaryEmbedding(layer.rotate))
        policy = Policy(rotate=rotate, mask=replace(layer.mask, sinks=False))
        relative = self.relative if layer.mask.reach is None else _TRUE

        def piece(what: str, q: Tensor, at: Tensor, k: Tensor, v: Tensor, k_at: Tensor) -> Piece:
            memory = self._tables.setdefault((what, layer.mask.reach is None), {})
            return piece_by_map(policy, q, k, v, at, k_at, relative, scale=scale, softcap=softcap, memory=memory)

        read = self.prefix.positions[: self.prefix.length]
        if self.writing:
            self.prefix.write(layer_idx, k, v)
            keys, values = self.prefix.read(layer_idx, end=self.prefix.length + k.shape[2])
            return piece("whole", q, self.positions[0], keys, values, torch.cat((read, self.positions[0])))
        own = piece("own", q, self.positions, k, v, self.positions)
        if not self.prefix.length:
            return own
        rows, heads, tokens, width = q.shape
        # What was read is the same for all rows, so their queries are one long row.
        row = q.transpose(0, 1).reshape(1, heads, rows * tokens, width)
        far = piece("read", row, self.positions.flatten(), *self.prefix.read(layer_idx), read)
        out = far.out.view(heads, rows, tokens, -1).transpose(0, 1)
        return merge(Piece(out, far.lse.view(heads, rows, tokens).transpose(0, 1)), own)
