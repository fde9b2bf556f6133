"""From what a plan says to the modules that do it."""

from __future__ import annotations

from theodolite.encodings.policy import Policy
from theodolite.encodings.rotate.rotary import RotaryEmbedding
from theodolite.plan import LayerPlan


def build(layer: LayerPlan, *, num_heads: int, hidden_size: int | None = None) -> Policy:
    return Policy(
        rotate=None if layer.rotate is None else RotaryEmbedding(layer.rotate),
        score_scale=layer.score_scale,
        mask=layer.mask,
    )
