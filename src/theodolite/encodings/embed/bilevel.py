"""Positions on two levels: a token's place in its segment is added, the segment's place is rotated or biased."""

from __future__ import annotations

from torch import Tensor, nn

from theodolite.encodings.embed.base import Embed
from theodolite.positions.segments import Segments


class Bilevel(nn.Module):
    """Adds an encoding of the index within the segment (BiPE, arXiv 2401.16421, section 3).

    The other half is any rotation or bias, called with `segments.inter` where it would be given positions. With one
    segment that half does nothing and what is left is the absolute encoding; with segments of one token each, the
    same vector is added everywhere and what is left is the relative encoding.

    Args:
        embed: what is added, at positions within the segment.

    Example:
        >>> import torch
        >>> from theodolite.encodings import RotaryEmbedding
        >>> from theodolite.encodings.embed.sinusoidal import Sinusoidal
        >>> from theodolite.plan import Rotary
        >>> from theodolite.positions.segments import segment_positions, starts_after
        >>> bilevel, rope = Bilevel(Sinusoidal(64)), RotaryEmbedding(Rotary(head_dim=16, rope_theta=10000.0))
        >>> ids = torch.tensor([[5, 9, 13, 7, 13, 2]])
        >>> segments = segment_positions(starts=starts_after(ids, separators=[13]))
        >>> x = bilevel(torch.randn(1, 6, 64), segments)
        >>> q, k = torch.randn(1, 4, 6, 16), torch.randn(1, 4, 6, 16)
        >>> q, k = rope(q, k, segments.inter)
    """

    def __init__(self, embed: Embed) -> None:
        super().__init__()
        if not isinstance(embed, Embed):
            raise ValueError(f"embed: got a {type(embed).__name__}; give an Embed, for example Sinusoidal(64)")
        self.embed = embed

    def forward(self, x: Tensor, segments: Segments, *, mask: Tensor | None = None) -> Tensor:
        """x (B, S, E) + the vectors at `segments.intra`; `mask` as in `Embed.forward`."""
        if not isinstance(segments, Segments):
            raise ValueError(f"segments: got a {type(segments).__name__}; give what segment_positions returns")
        out: Tensor = self.embed(x, segments.intra, mask=mask)
        return out

    def reset_parameters(self) -> None:
        """Initialise what is learned."""
        self.embed.reset_parameters()
