"""The rotation that a plan describes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from theodolite.encodings.rotate.base import Rotate
from theodolite.encodings.rotate.exact import require_plan
from theodolite.encodings.rotate.lengths import Lengths
from theodolite.encodings.rotate.operands import layout_of
from theodolite.encodings.rotate.tables import Tables, rotary_tables, tables_of
from theodolite.plan import Rotary


class RotaryEmbedding(Rotate):
    """Turns queries and keys by position. Holds a plan and nothing else: no buffer, no parameter, no history.

    So there is nothing for `.half()`, `.to()`, meta initialisation or a weight initialiser to spoil, and no key in
    a state dict; the keys of older rotary modules (`inv_freq` and the like) are dropped, with a note, when one is
    loaded. Frequencies that such a checkpoint holds are compared first: those of another base, of another scaling, or
    that were learned, are an error.

    Args:
        rotary: what to apply. Fixed once given.

    Example:
        >>> import torch
        >>> from theodolite.plan import Rotary
        >>> rope = RotaryEmbedding(Rotary(head_dim=64, rope_theta=10000.0))
        >>> q, k = torch.randn(1, 8, 5, 64), torch.randn(1, 2, 5, 64)
        >>> q, k = rope(q, k, torch.arange(5))
    """

    def __init__(self, rotary: Rotary) -> None:
        require_plan("rotary", rotary)
        super().__init__(**layout_of(rotary))
        self._rotary = rotary
        # Plain numbers: no cast finds them, and a compiled graph carries them as constants.
        self._inv_freq = None if rotary.depends_on_length else tuple(rotary.inv_freq().tolist())

    @property
    def rotary(self) -> Rotary:
        """What is applied."""
        return self._rotary

    def tables(
        self,
        positions: Tensor,
        *,
        lengths: Lengths | None = None,
        amplitude: bool = True,
        device: torch.device | str | None = None,
    ) -> Tables:
        """cos and sin at `positions`; the arguments are those of `rotary_tables`."""
        if self._inv_freq is None:
            return rotary_tables(self.rotary, positions, lengths=lengths, amplitude=amplitude, device=device)
        return tables_of(self.rotary, self._inv_freq, positions, amplitude=amplitude, device=device)

    @property
    def table_key(self) -> Hashable:
        return self.rotary

    def extra_repr(self) -> str:
        return repr(self.rotary)

    def _fixed_frequencies(self) -> Sequence[Sequence[float]]:
        return () if self._inv_freq is None else (self._inv_freq,)
