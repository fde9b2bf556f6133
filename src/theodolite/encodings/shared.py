"""The tables of one forward, shared by all layers that turn alike."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.encodings.rotate.base import Rotate
from theodolite.encodings.rotate.lengths import Lengths


class SharedTables:
    """The positions of one forward and the tables made of them: each distinct rotation once, when a layer asks.

    Make one at the top of a model's forward and hand it to every layer; it lives as long as that forward.

    Args:
        positions: (S,), (B, S), or (axes, B, S).
        lengths: the tokens of each row's whole sequence, for frequencies that depend on it.
        device: where the tables are put; that of `positions` by default.
        prepare: rotations, policies or whole models whose tables are made at once. Needed where layers are checkpointed
            and frequencies are learned: a table that was made inside a checkpoint is not made again when it is redone.
            Checkpoints with `use_reentrant=True` go backward one by one, and cannot share a table that is learned.

    Example:
        >>> import torch
        >>> from theodolite.plan import Rotary
        >>> from theodolite.encodings import RotaryEmbedding, SharedTables
        >>> layers = [RotaryEmbedding(Rotary(head_dim=64, rope_theta=1e4)) for _ in range(2)]
        >>> tables = SharedTables(torch.arange(5))
        >>> tables.of(layers[0]) is tables.of(layers[1])
        True
    """

    def __init__(
        self,
        positions: Tensor,
        *,
        lengths: Lengths | None = None,
        device: torch.device | str | None = None,
        prepare: Iterable[nn.Module] = (),
    ) -> None:
        self.positions, self.lengths, self.device = positions, lengths, device
        self._made: dict[tuple[Hashable, bool, bool], Any] = {}
        for module in prepare:
            for rotate in _outermost(module):
                self.of(rotate)

    def of(self, rotate: Rotate, *, amplitude: bool = True) -> Any:
        """The tables of this rotation at these positions; without `amplitude` pure rotations, as for values."""
        # Tables that were made without a gradient, of frequencies that are learned, have none to give.
        key = rotate.table_key, amplitude, torch.is_grad_enabled()
        if key not in self._made:
            self._made[key] = rotate.tables(
                self.positions, lengths=self.lengths, amplitude=amplitude, device=self.device
            )
        return self._made[key]


def _outermost(module: nn.Module) -> Iterator[Rotate]:
    """The rotations in a module, those that are parts of another left out."""
    if isinstance(module, Rotate):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)
