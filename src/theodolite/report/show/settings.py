"""What a picture may be asked for: lengths, widths, scalings. One set for all encodings; each reads what it needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from theodolite.plan.errors import LONGEST
from theodolite.plan.rotary import WIDEST_HEAD

SCALINGS = "none,linear:4,ntk:4,yarn:4"
_MOST_HEADS = 1024


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is drawn.

    Args:
        length: how far it goes (tokens); None for what suits the view.
        trained: the length (tokens) that scalings start from.
        scaling: scalings by name, with commas between, as a survey takes them; None for the usual ones of a rotation
            by name, and for none of a model's.
        position: where the hands stand (tokens).
        theta: the base of frequencies; None for 10,000, or a model's own.
        dim: channels of a vector that is added to embeddings.
        head_dim: channels of a head.
        heads: heads of a bias; None for 8, or a model's own.
        channels: which are drawn as curves; None for six of them.
        bidirectional: keys after the query too, as an encoder sees them.
        table: a file (.npy or .safetensors) with a learned table.
        key: the tensor's name in it; None where it can be told.
        seed: of what is learned, where it is drawn as it is initialised.

    Raises:
        ValueError: a number out of range.
    """

    length: int | None = None
    trained: int = 8192
    scaling: str | None = None
    position: int = 1000
    theta: float | None = None
    dim: int = 128
    head_dim: int = 128
    heads: int | None = None
    channels: tuple[int, ...] | None = None
    bidirectional: bool = False
    table: Path | None = None
    key: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        bounds = {
            "length": (2, LONGEST),
            "trained": (2, LONGEST),
            "position": (0, 2**24),
            "dim": (1, WIDEST_HEAD),
            "head_dim": (4, WIDEST_HEAD),
            "heads": (1, _MOST_HEADS),
            "seed": (0, 2**63 - 1),
        }
        for name, (least, most) in bounds.items():
            given = getattr(self, name)
            if given is not None and not least <= given <= most:
                raise ValueError(f"{name}: got {given:,}; it must be from {least:,} to {most:,}")
        if self.theta is not None and not (math.isfinite(self.theta) and self.theta > 1):
            raise ValueError(f"theta: got {self.theta:g}; the base must be a finite number above 1")

    def tokens(self, usual: int, most: int = LONGEST) -> int:
        """The tokens that a view draws: `length` as far as the view goes, or what is usual there."""
        return min(self.length or usual, most)
