"""Shaw's relative positions: a learned vector for each clipped distance, for keys and for values."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from theodolite.encodings.bias.base import Content, ScoreMod
from theodolite.encodings.bias.content import ContentBias, dots, dots_at, full_precision, in_row_blocks, working_dtype
from theodolite.encodings.bias.devices import require_beside
from theodolite.positions.checks import require_integers, require_reachable


class ShawBias(ContentBias):
    """`q.a[clip(n - m)] / sqrt(D)` for a query at m and a key at n, beside `q.k / sqrt(D)`.

    All distances beyond `clip` are one. `values` is the other half: what the positions add to attention's output.

    Forms: `dense`, and `score_mod` over a table of (B, H, Sq, 2 clip + 1) that it makes once. `values` needs the
    weights of attention, which FlexAttention does not give.

    Source: Shaw et al. 2018 (1803.02155), equations 3 to 5; with two clips and without values it is
    `position_embeddings_type="relative_key"` of transformers' Wav2Vec2-BERT, whose `distance_embedding.weight`
    is `relative_keys`.

    Args:
        num_heads: heads of the whole model; the vectors are shared by all of them.
        head_dim: channels of a head, D.
        clip: the largest distance (tokens) that has a vector of its own; (left, right) where they differ: keys
            before the query, keys after it.
        values: whether there are vectors for values.
    """

    reads: ClassVar[tuple[str, ...]] = ("q",)

    def __init__(self, num_heads: int, head_dim: int, clip: int | tuple[int, int], *, values: bool = True) -> None:
        super().__init__(num_heads, head_dim)
        self.left, self.right = clip if isinstance(clip, tuple) else (clip, clip)
        for side in (self.left, self.right):
            if isinstance(side, bool) or not isinstance(side, int) or side < 0 or self.left + self.right == 0:
                raise ValueError(f"clip: got {clip!r}; give tokens, at least 1, or (left, right), one of them above 0")
        rows = self.left + self.right + 1
        self.relative_keys = nn.Parameter(torch.empty(rows, head_dim))
        self.relative_values = nn.Parameter(torch.empty(rows, head_dim)) if values else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier's uniform distribution."""
        nn.init.xavier_uniform_(self.relative_keys)
        if self.relative_values is not None:
            nn.init.xavier_uniform_(self.relative_values)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, clip={(self.left, self.right)}, values={self.relative_values is not None}"

    @property
    def adds_values(self) -> bool:
        return self.relative_values is not None

    def values(
        self, weights: Tensor, q_positions: Tensor, k_positions: Tensor, *, heads: slice | None = None
    ) -> Tensor | None:
        """What positions add to attention's output: the sum over keys of `weight * aV[clip(n - m)]`.

        Weights of equal distance are added up first: scratch is (B, H, Sq, 2 clip + 1).

        Args:
            weights: (B, H, Sq, Sk), after the softmax.
            q_positions: (Sq,) or (B, Sq), tokens.
            k_positions: (Sk,) or (B, Sk), tokens.
            heads: of no effect: all heads share the vectors.

        Returns:
            (B, H, Sq, D) in the dtype of `weights`; to be added to `weights @ v`. None with `values=False`.
        """
        if self.relative_values is None:
            return None
        tokens = q_positions.shape[-1], k_positions.shape[-1]
        if weights.dim() != 4 or weights.shape[2:] != tokens:
            raise ValueError(
                f"weights: got shape {tuple(weights.shape)}; the positions ask for (B, H, {tokens[0]}, {tokens[1]})"
            )
        for name, positions in (("q_positions", q_positions), ("k_positions", k_positions)):
            require_integers(name, positions, dims=(1, 2))
        require_beside(self, self.relative_values, weights=weights)
        require_reachable(weights, "weights", q_positions=q_positions, k_positions=k_positions)
        q_at, k_at = (torch.atleast_2d(at.long().to(weights.device)) for at in (q_positions, k_positions))
        table = self.relative_values.to(working_dtype(weights, self.relative_values))
        row_size = weights.shape[0] * weights.shape[1] * max(len(table), weights.shape[3], self.head_dim)
        out = in_row_blocks(self._summed, [weights, q_at[:, None, :, None]], [table, k_at], row_size=row_size)
        return out.to(weights.dtype)

    def _dense(self, q_positions: Tensor, k_positions: Tensor, content: Content, heads: slice) -> Tensor:
        q, _, q_at, k_at = self._checked(q_positions, k_positions, content, heads)
        with full_precision(q.device):
            table = self.relative_keys.to(q.dtype) * self.scale
        return dots_at(self._row, q, q_at, k_at, table[None])

    def _score_mod(self, q_positions: Tensor, k_positions: Tensor, content: Content, heads: slice) -> ScoreMod:
        q, _, q_at, k_at = self._checked(q_positions, k_positions, content, heads)
        with full_precision(q.device):
            every = dots(q, self.relative_keys[None].to(q.dtype) * self.scale)
        rows = q_at.shape[0] > 1, k_at.shape[0] > 1

        def score_mod(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
            q_position = q_at[batch if rows[0] else 0, q_index]
            k_position = k_at[batch if rows[1] else 0, k_index]
            return score + every[batch, head, q_index, self._row(q_position, k_position)]

        return score_mod

    def _checked(self, q_positions: Tensor, k_positions: Tensor, content: Content, heads: slice) -> tuple[Tensor, ...]:
        require_integers("q_positions", q_positions)
        require_integers("k_positions", k_positions)
        return self._vectors(q_positions, k_positions, content, heads, self.relative_keys)

    def _row(self, q_position: Tensor, k_position: Tensor) -> Tensor:
        return (k_position - q_position).clamp(-self.left, self.right) + self.left

    def _summed(self, weights: Tensor, q_at: Tensor, table: Tensor, k_at: Tensor) -> Tensor:
        index = self._row(q_at[:, 0], k_at[:, None])[:, None].expand(weights.shape)
        sums = weights.new_zeros((*weights.shape[:3], len(table)), dtype=table.dtype)
        return sums.scatter_add(-1, index, weights.to(table.dtype)) @ table
