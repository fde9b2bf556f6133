"""What all score scales share: a number for each query, from its position."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from theodolite.encodings.heads import heads_of_rank
from theodolite.positions.checks import require_positions


class Scale(nn.Module):
    """Multiplies attention scores by a number of the query's position, which is to multiply the query.

    It acts after rotation, which it commutes with; where it must not reach the bias, it is on the query that it is
    harmless. A subclass says the number in `_factors`, and in `num_heads` the heads of the whole model where it differs
    by head.
    """

    num_heads: int | None = None

    def factors(self, positions: Tensor, *, heads: slice | None = None) -> Tensor:
        """The multipliers at `positions` (S,) or (B, S): (1 or B, 1 or H, S), float32 (float64 for float64 parameters).

        `heads` are the heads of this rank, where they differ by head; all by default.
        """
        require_positions("positions", positions, dims=(1, 2))
        if self.num_heads is not None:
            heads = heads_of_rank(heads, self.num_heads)
        return self._factors(positions if positions.dim() == 2 else positions[None], heads)

    def forward(self, q: Tensor, positions: Tensor, *, heads_first: bool = True, heads: slice | None = None) -> Tensor:
        """q (B, H, S, D), or (B, S, H, D) with `heads_first=False`, times the factors; rounded once to its dtype."""
        factors = self.factors(positions, heads=heads).to(q.device)
        tokens = q.shape[-2 if heads_first else -3]
        if factors.shape[-1] != tokens:
            raise ValueError(
                f"positions: got {factors.shape[-1]} for the {tokens} tokens of q of shape {tuple(q.shape)}; "
                f"heads_first={not heads_first} reads the other order"
            )
        rows, heads_there = factors.shape[:2]
        if rows != 1 and rows != q.shape[0]:
            raise ValueError(f"positions: got {rows} rows for the {q.shape[0]} of q of shape {tuple(q.shape)}")
        heads_given = q.shape[1 if heads_first else 2]
        if heads_there != 1 and heads_there != heads_given:
            raise ValueError(f"heads: got {heads_there} for the {heads_given} of q of shape {tuple(q.shape)}")
        factors = factors[..., None] if heads_first else factors.transpose(1, 2)[..., None]
        return (q * factors).to(q.dtype) if q.dtype == torch.float64 else (q.float() * factors).to(q.dtype)

    def reset_parameters(self) -> None:
        """Initialise what is learned."""

    def _factors(self, positions: Tensor, heads: slice | None) -> Tensor:
        raise NotImplementedError
