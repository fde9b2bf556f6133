"""A few learned curves of the distance, mixed for each query by what stands there: Inkling's relative bias (2026)."""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from theodolite.encodings.bias.base import Bias, Content, ScoreMod
from theodolite.encodings.bias.content import in_row_blocks, working_dtype
from theodolite.encodings.bias.devices import require_beside
from theodolite.encodings.bias.projection import project, require_layer_input
from theodolite.encodings.scale.base import Scale
from theodolite.plan.errors import require_positive
from theodolite.positions.checks import require_count, require_integers


class LowRankBias(Bias):
    """Adds `(W_h x_m) P[:, m - n]` for `0 <= m - n < extent`, and nothing at other distances.

    `P` has `rank` curves of the distance, shared by all heads; each head of each query mixes them by a linear
    function of the layer's input. At a distance of `extent` or more nothing was ever learned and nothing is added.
    This is the bias of transformers' `inkling` (`r_proj` and `rel_logits_proj`) and `inkling2`.

    Args:
        num_heads: heads of the whole model, over all ranks of tensor parallelism.
        hidden_size: width of the layer's input, E.
        rank: how many curves there are; 16 in Inkling.
        extent: how many distances have a value (tokens), the first of them 0; 1024 in Inkling's global layers, the
            window in its local ones.
        l2_clip: a query's mix is multiplied by a learned number for each head and curve, then shrunk to this length
            where it is longer (Inkling 2); None for neither.
        scale: multiplies the bias by a number of the query's position, as it does the scores (`LogScale` in the
            global layers of Inkling 2).

    Attributes:
        weight: (H * rank, E), initialised as normal with 0.02.
        curves: (rank, extent), P, initialised as normal with 0.02.
        mix_scale: (H, rank), initialised as 1; only with `l2_clip`.
    """

    reads: ClassVar[tuple[str, ...]] = ("x",)

    def __init__(
        self,
        num_heads: int,
        hidden_size: int,
        rank: int = 16,
        *,
        extent: int,
        l2_clip: float | None = None,
        scale: Scale | None = None,
    ) -> None:
        super().__init__(num_heads)
        for name, count in (("hidden_size", hidden_size), ("rank", rank), ("extent", extent)):
            require_count(name, count, least=1)
        require_positive(l2_clip=l2_clip)
        if scale is not None and not isinstance(scale, Scale):
            raise ValueError(f"scale: got {scale!r}; it must be a Scale, for example LogScale()")
        self.hidden_size = hidden_size
        self.rank = rank
        self.extent = extent
        self.l2_clip = l2_clip
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(num_heads * rank, hidden_size))
        self.curves = nn.Parameter(torch.empty(rank, extent))
        self.mix_scale = None if l2_clip is None else nn.Parameter(torch.empty(num_heads, rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise what is learned."""
        nn.init.normal_(self.weight, std=0.02)
        nn.init.normal_(self.curves, std=0.02)
        if self.mix_scale is not None:
            nn.init.ones_(self.mix_scale)
        if self.scale is not None:
            self.scale.reset_parameters()

    def _check(self, q_positions: Tensor, k_positions: Tensor, content: Content) -> Content:
        super()._check(q_positions, k_positions, content)
        # A curve has values at whole distances only.
        require_integers("q_positions", q_positions)
        require_integers("k_positions", k_positions)
        require_beside(self, self.weight, x=cast(Tensor, content.x), q_positions=q_positions, k_positions=k_positions)
        return content

    def _dense(self, q_positions: Tensor, k_positions: Tensor, content: Content, heads: slice) -> Tensor:
        mix = self._mix(q_positions, content, heads)
        batch = max(mix.shape[0], q_positions.shape[0], k_positions.shape[0])

        def rows(mix: Tensor, q_position: Tensor, k_position: Tensor, curves: Tensor) -> Tensor:
            column = self._column(q_position, k_position)
            out = mix[..., :1] * _at(curves[0], column)
            for number in range(1, self.rank):
                out = torch.addcmul(out, mix[..., number : number + 1], _at(curves[number], column))
            return out

        of_rows = mix, q_positions[:, None, :, None]
        of_all = k_positions[:, None, None, :], self._padded_curves(mix)
        return in_row_blocks(rows, of_rows, of_all, row_size=batch * mix.shape[1] * k_positions.shape[-1])

    def _score_mod(self, q_positions: Tensor, k_positions: Tensor, content: Content, heads: slice) -> ScoreMod:
        mix = self._mix(q_positions, content, heads)
        curves = self._padded_curves(mix)
        rows = mix.shape[0] > 1, q_positions.shape[0] > 1, k_positions.shape[0] > 1

        def score_mod(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
            q = q_positions[batch if rows[1] else 0, q_index]
            k = k_positions[batch if rows[2] else 0, k_index]
            column, row = self._column(q, k), batch if rows[0] else 0
            total = mix[row, head, q_index, 0] * curves[0, column]
            for number in range(1, self.rank):
                total = total + mix[row, head, q_index, number] * curves[number, column]
            return score + total

        return score_mod

    def _mix(self, q_positions: Tensor, content: Content, heads: slice) -> Tensor:
        """(B, H, Sq, rank): how much of each curve each query takes."""
        x = content.x
        assert x is not None
        require_layer_input(x, self.hidden_size, q_positions.shape[-1])
        weight = self.weight[heads.start * self.rank : heads.stop * self.rank]
        mix: Tensor = project(x, weight).unflatten(-1, (-1, self.rank)).transpose(1, 2)
        if self.l2_clip is not None and self.mix_scale is not None:
            mix = mix * self.mix_scale[heads, None].to(mix.dtype)
            length = torch.linalg.vector_norm(mix, dim=-1, keepdim=True)
            mix = mix * (self.l2_clip / (length + 1e-6)).clamp(max=1.0)
        if self.scale is not None:
            mix = mix * self.scale.factors(q_positions, heads=heads)[..., None].to(mix.dtype)
        return mix

    def _padded_curves(self, mix: Tensor) -> Tensor:
        """(rank, extent + 1): the last column is the nothing at all other distances."""
        dtype = working_dtype(mix, self.curves)
        return torch.cat((self.curves.to(dtype), self.curves.new_zeros((self.rank, 1), dtype=dtype)), dim=1)

    def _column(self, q_position: Tensor, k_position: Tensor) -> Tensor:
        distance = q_position.long() - k_position.long()
        return torch.where((distance >= 0) & (distance < self.extent), distance, self.extent)


def _at(curve: Tensor, column: Tensor) -> Tensor:
    """The curve's values at the columns, (1 or B, 1, Sq, Sk)."""
    return curve.index_select(0, column.reshape(-1)).view(column.shape)
