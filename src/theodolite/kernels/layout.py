"""Which channels of a head turn, in which pairs, and which way."""

from __future__ import annotations

from typing import NamedTuple


class Layout(NamedTuple):
    """What every implementation of the rotation is told about the channels.

    Args:
        interleaved: pairs are (2i, 2i+1) of the channels that turn; otherwise (i, i + R/2).
        rotary_dim: R, the channels that turn; even.
        trailing: they are the last R of the head, not the first.
        conjugate: turn the other way (the transpose, where the two channels of a pair have tables of their own).
    """

    interleaved: bool
    rotary_dim: int
    trailing: bool
    conjugate: bool
