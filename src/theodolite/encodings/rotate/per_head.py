"""Heads that turn by frequencies of their own."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from theodolite.encodings.heads import heads_of_rank
from theodolite.encodings.rotate.base import K, Q, Rotate
from theodolite.encodings.rotate.exact import axes_of
from theodolite.encodings.rotate.lengths import Lengths, for_each_row, row_lengths
from theodolite.encodings.rotate.operands import device_of, layout_of
from theodolite.encodings.rotate.tables import Tables, rotary_tables, tables_of
from theodolite.plan import Rotary


class HeadwiseRotate(Rotate):
    """A rotation whose tables differ by key-value head; the queries of a group turn as their key does."""

    def tables(
        self,
        positions: Tensor,
        *,
        lengths: Lengths | None = None,
        amplitude: bool = True,
        device: torch.device | str | None = None,
        heads: slice | None = None,
    ) -> Tables:
        """As in `Rotate`; `heads` are the key-value heads of this rank, `slice(2, 4)`, all by default."""
        raise NotImplementedError

    def forward(
        self,
        q: Q,
        k: K,
        positions: Tensor,
        *,
        lengths: Lengths | None = None,
        heads_first: bool = True,
        heads: slice | None = None,
    ) -> tuple[Q, K]:
        """As in `Rotate`; `heads` are the key-value heads that k carries and q belongs to, all by default."""
        tables = self.tables(positions, lengths=lengths, device=device_of(q, k), heads=heads)
        for name, x in (("q", q), ("k", k)):
            if x is not None:
                self._check_tokens(name, x, positions, heads_first)
        return self.apply_tables(q, k, tables, heads_first=heads_first)

    def _check_fit(self, name: str, x: Tensor, tables: Any, heads_first: bool) -> None:
        super()._check_fit(name, x, tables, heads_first)
        if name != "k" or tables.cos.dim() != 4:
            return
        given, made = x.shape[1 if heads_first else 2], tables.cos.shape[1]
        if given != made:
            raise ValueError(
                f"k: got {given} heads for tables of {made}; there is one for each key-value head, and "
                "heads=slice(first, last + 1) makes those of a part of them"
            )


class PerHeadRotary(HeadwiseRotate):
    """One plan for each key-value head: a base per head (HARPE), a factor per head (Ms-PoE, 2403.04797), or both.

    Like `RotaryEmbedding` it holds plans and nothing else. Each head turns exactly, bit for bit, as
    `RotaryEmbedding` with its plan would turn it.

    Args:
        rotaries: one for each key-value head of the whole model. They agree in width, layout and axes; bases,
            scalings and pairs that stand still are their own.

    Example:
        >>> import torch
        >>> from theodolite.plan import Linear, Rotary
        >>> bases = PerHeadRotary([Rotary(head_dim=64, rope_theta=theta) for theta in (1e4, 2e4, 1e6, 5e6)])
        >>> factors = PerHeadRotary(
        ...     [Rotary(head_dim=64, rope_theta=1e4, scaling=Linear(factor=f)) for f in (1.2, 1.4, 1.6, 1.8)]
        ... )
        >>> q, k = torch.randn(1, 8, 5, 64), torch.randn(1, 4, 5, 64)
        >>> q, k = bases(q, k, torch.arange(5))
    """

    def __init__(self, rotaries: Sequence[Rotary]) -> None:
        if isinstance(rotaries, Rotary) or not isinstance(rotaries, Iterable):
            raise ValueError(
                f"rotaries: got a {type(rotaries).__name__}; give a list of plans, one for each key-value head"
            )
        rotaries = tuple(rotaries)
        _check_alike(rotaries)
        first = rotaries[0]
        super().__init__(**layout_of(first))
        self._rotaries = rotaries
        # Heads with the same plan share the work. Plain numbers: no cast finds them.
        self._distinct = tuple(dict.fromkeys(rotaries))
        self._which = tuple(self._distinct.index(rotary) for rotary in rotaries)
        self._inv_freq = tuple(
            None if rotary.depends_on_length else tuple(rotary.inv_freq().tolist()) for rotary in self._distinct
        )

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """What each key-value head turns by."""
        return self._rotaries

    def tables(
        self,
        positions: Tensor,
        *,
        lengths: Lengths | None = None,
        amplitude: bool = True,
        device: torch.device | str | None = None,
        heads: slice | None = None,
    ) -> Tables:
        """cos and sin, (B or 1, Ht, S, R/2), float32; the other arguments are those of `rotary_tables`.

        Args:
            heads: the key-value heads of this rank, Ht of them; all by default.
        """
        which = self._which[head_range(heads, len(self._which))]
        if lengths is not None and any(self._inv_freq[number] is None for number in which):
            # All heads alike, so that their tables can be stacked.
            lengths = row_lengths(lengths)
            positions = for_each_row(positions, len(lengths), axes=axes_of(self._distinct[0]))
        made: dict[int, Tables] = {}
        for number in which:
            if number not in made:
                rotary, inv_freq = self._distinct[number], self._inv_freq[number]
                if inv_freq is None:
                    one = rotary_tables(rotary, positions, lengths=lengths, amplitude=amplitude, device=device)
                else:
                    one = tables_of(rotary, inv_freq, positions, amplitude=amplitude, device=device)
                made[number] = one
        cos = torch.stack([made[number].cos for number in which], dim=-3)
        sin = torch.stack([made[number].sin for number in which], dim=-3)
        return Tables(cos, sin) if cos.dim() == 4 else Tables(cos[None], sin[None])

    @property
    def table_key(self) -> Hashable:
        return type(self), self.rotaries

    def _fixed_frequencies(self) -> Sequence[Sequence[float]]:
        fixed = [inv_freq for inv_freq in self._inv_freq if inv_freq is not None]
        # Stored frequencies may be those of a head that has them by the length.
        return fixed if len(fixed) == len(self._inv_freq) else ()

    def extra_repr(self) -> str:
        return ",\n".join(repr(rotary) for rotary in self.rotaries)


def head_range(heads: slice | None, number: int) -> slice:
    """`heads` of `number` key-value heads, with both ends given."""
    return heads_of_rank(heads, number, kind="key-value heads")


def _check_alike(rotaries: tuple[Rotary, ...]) -> None:
    if not rotaries:
        raise ValueError("rotaries: got none; give one for each key-value head")
    for number, rotary in enumerate(rotaries):
        if not isinstance(rotary, Rotary):
            raise ValueError(f"rotaries: got a {type(rotary).__name__} for head {number}; each must be a Rotary")
        for name in ("head_dim", "rotary_dim", "interleaved", "trailing"):
            given, first = getattr(rotary, name), getattr(rotaries[0], name)
            if given != first:
                raise ValueError(
                    f"rotaries: got {name} {given} for head {number} and {first} for head 0; it must agree"
                )
        if axes_of(rotary) != axes_of(rotaries[0]):
            raise ValueError(
                f"rotaries: got mrope_section {rotary.mrope_section} for head {number} and "
                f"{rotaries[0].mrope_section} for head 0; the positions of all heads must have the same axes"
            )
