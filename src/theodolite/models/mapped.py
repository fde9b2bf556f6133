"""Attention of a text that is read in chunks, at distances that a map has changed.

The model turns nothing meanwhile: keys are kept as projected, and turned for each group of the map when they are read.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from theodolite.attention import Piece
from theodolite.attention.relative import piece_by_map
from theodolite.encodings import Policy, RotaryEmbedding
from theodolite.models.feed import Prefix, temper
from theodolite.plan import ModelPlan, Rotary
from theodolite.positions import ReRoPE
from theodolite.positions.relative import RelativeMap

# No two tokens are that far apart.
_TRUE = ReRoPE(window=2**24)


def bare(plan: ModelPlan) -> ModelPlan:
    """The same plan with nothing turned by the model's own code."""
    return replace(plan, layers=tuple(replace(layer, rotate=None) for layer in plan.layers))


class MappedFeed:
    """What attention must know of one call: the plan, the map, what was read, and where the queries stand.

    Layers with a window of their own see no distance that the model was not trained for, and keep the true ones.
    """

    def __init__(self, plan: ModelPlan, relative: RelativeMap, prefix: Prefix, positions: Tensor) -> None:
        self.plan, self.relative, self.prefix, self.positions = plan, relative, prefix, positions
        self._rotations: dict[Rotary, RotaryEmbedding] = {}

    def tempered(self, layer_idx: int, q: Tensor) -> Tensor:
        """q (1, H, S, D) times what the plan multiplies queries by at their positions."""
        return temper(self.plan.layers[layer_idx].temperature, q, self.positions)

    def attention(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Piece:
        """q (1, H, S, D) over what was read and over k (1, G, S, D) and v (1, G, S, E), none of them turned."""
        self.prefix.write(layer_idx, k, v)
        end = self.prefix.length + k.shape[2]
        keys, values = self.prefix.read(layer_idx, end=end)
        layer, at = self.plan.layers[layer_idx], self.positions[0]
        if layer.rotate is None:
            raise ValueError(
                f"relative: layers[{layer_idx}] turns nothing, and a map of distances changes what is turned"
            )
        rotate = self._rotations.setdefault(layer.rotate, RotaryEmbedding(layer.rotate))
        policy = Policy(rotate=rotate, mask=replace(layer.mask, sinks=False))
        relative = self.relative if layer.mask.reach is None else _TRUE
        return piece_by_map(policy, q, keys, values, at, torch.arange(end), relative, scale=scale, softcap=softcap)
