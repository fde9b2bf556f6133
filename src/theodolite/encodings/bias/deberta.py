"""DeBERTa's disentangled positions: content to position and position to content, by (bucketed) distance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.encodings.bias.base import Content, ScoreMod
from theodolite.encodings.bias.content import ContentBias, Vectors, dots, dots_at, full_precision
from theodolite.encodings.bias.deberta_buckets import bucket_borders, bucket_of, log_bucket, require_buckets
from theodolite.positions.checks import require_count, require_integers

__all__ = ["DisentangledBias", "RelativeEmbeddings", "log_bucket"]

_TERMS = ("c2p", "p2c")
# Distances whose rows are listed, 1 MiB of them at most; of more, each is worked out.
_LISTED = 2**16


class RelativeEmbeddings(nn.Module):
    """The vectors of distances that all layers share, (2 span, E), normalised where the model does so.

    Transformers keeps them as `encoder.rel_embeddings.weight` and, with `norm_rel_ebd="layer_norm"`,
    `encoder.LayerNorm`. Call it for the vectors.

    Args:
        span: `position_buckets`, or `max_relative_positions` where there are no buckets.
        hidden_size: width of a vector, E.
        layer_norm_eps: with it, the vectors go through a layer norm.
    """

    def __init__(self, span: int, hidden_size: int, *, layer_norm_eps: float | None = None) -> None:
        super().__init__()
        require_count("span", span, least=1)
        require_count("hidden_size", hidden_size, least=1)
        self.weight = nn.Parameter(torch.empty(2 * span, hidden_size))
        self.LayerNorm = None if layer_norm_eps is None else nn.LayerNorm(hidden_size, eps=layer_norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with deviation 0.02, as the authors."""
        nn.init.normal_(self.weight, std=0.02)
        if self.LayerNorm is not None:
            self.LayerNorm.reset_parameters()

    def forward(self) -> Tensor:
        """(2 span, E)."""
        norm = self.LayerNorm
        if norm is None:
            return self.weight
        with full_precision(self.weight.device):
            table, scale, shift = (_at_least_float32(x) for x in (self.weight, norm.weight, norm.bias))
            return F.layer_norm(table, norm.normalized_shape, scale, shift, norm.eps)


class DisentangledBias(ContentBias):
    """`(q.Kr[d] + k.Qr[d]) / sqrt(D (1 + terms))`, d the bucket of the query's position minus the key's.

    Kr and Qr are projections of the vectors of distances. Attention's own `q.k` is divided by the same root:
    its `score_scale` here is not `1/sqrt(D)`.

    The second term takes the bucket of query minus key too, as the authors' code and all checkpoints do; the paper
    prints key minus query.

    Forms: `dense`; `score_mod` over tables of (B, H, Sq, 2 span) and (B, H, Sk, 2 span) that it makes once.

    Source: He et al. 2020 (2006.03654), equation 4, and 2021 (2111.09543); transformers'
    `DisentangledSelfAttention` of `deberta` (no buckets) and `deberta_v2`. `share_att_key=True` there is
    `pos_key_proj=attention.key_proj, pos_query_proj=attention.query_proj` here. Its dropout of the vectors is left
    to a `rel_embeddings` that does it.

    Args:
        num_heads: heads of the whole model.
        head_dim: channels of a head, D.
        hidden_size: width of the vectors of distances, E.
        max_relative_positions: with buckets, the distance (tokens) that falls into the last one; without, the
            distances that have a vector of their own, either way. Where a config has -1, its
            `max_position_embeddings`.
        position_buckets: logarithmic buckets (DeBERTa-v2 and v3); None for none (DeBERTa).
        pos_att_type: which terms there are, of "c2p" and "p2c".
        rel_embeddings: the vectors, (2 span, E), shared with other layers: an `nn.Embedding`, or a module that gives
            them when called (`RelativeEmbeddings`); own by default.
        pos_key_proj: from a vector to Kr, H D channels; own by default.
        pos_query_proj: from a vector to Qr, likewise.
    """

    reads: ClassVar[tuple[str, ...]] = ("q", "k")

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        hidden_size: int,
        max_relative_positions: int,
        position_buckets: int | None = None,
        pos_att_type: Sequence[str] = _TERMS,
        rel_embeddings: nn.Module | None = None,
        pos_key_proj: nn.Module | None = None,
        pos_query_proj: nn.Module | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim)
        require_count("hidden_size", hidden_size, least=1)
        if max_relative_positions == -1:
            raise ValueError(
                "max_relative_positions: got -1, which in a config stands for its max_position_embeddings; give that"
            )
        require_count("max_relative_positions", max_relative_positions, least=1)
        # Plain numbers, worked out once: no cast finds them.
        self._ends: tuple[int, ...] = ()
        if position_buckets is not None:
            require_buckets(position_buckets, max_relative_positions)
            self._ends = bucket_borders(position_buckets, max_relative_positions)
        # From here on all distances are in the last bucket; the last of the borders is above any.
        self._farthest = self._ends[-2] + 1 if self._ends else 0
        self.max_relative_positions, self.position_buckets = max_relative_positions, position_buckets
        self.span = max_relative_positions if position_buckets is None else position_buckets
        self.pos_att_type = tuple(pos_att_type)
        known = not isinstance(pos_att_type, str) and set(self.pos_att_type) <= set(_TERMS)
        if not self.pos_att_type or not known or len(set(self.pos_att_type)) < len(self.pos_att_type):
            raise ValueError(f'pos_att_type: got {pos_att_type!r}; give ("c2p", "p2c") or one of the two')
        for name, given, term in (
            ("pos_key_proj", pos_key_proj, "c2p"),
            ("pos_query_proj", pos_query_proj, "p2c"),
        ):
            if given is not None and term not in self.pos_att_type:
                raise ValueError(f"{name}: it belongs to the term {term!r}, and pos_att_type is {self.pos_att_type}")
        self.score_scale = float((head_dim * (1 + len(self.pos_att_type))) ** -0.5)
        self._own = tuple(given is None for given in (rel_embeddings, pos_key_proj, pos_query_proj))
        if rel_embeddings is None:
            rel_embeddings = RelativeEmbeddings(self.span, hidden_size)
        if pos_key_proj is None and "c2p" in self.pos_att_type:
            pos_key_proj = nn.Linear(hidden_size, num_heads * head_dim)
        if pos_query_proj is None and "p2c" in self.pos_att_type:
            pos_query_proj = nn.Linear(hidden_size, num_heads * head_dim)
        self.rel_embeddings, self.pos_key_proj, self.pos_query_proj = rel_embeddings, pos_key_proj, pos_query_proj
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with deviation 0.02, biases 0; modules that were given are left alone."""
        for own, module in zip(self._own, (self.rel_embeddings, self.pos_key_proj, self.pos_query_proj), strict=True):
            if own and isinstance(module, RelativeEmbeddings):
                module.reset_parameters()
            elif own and isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def extra_repr(self) -> str:
        buckets = "" if self.position_buckets is None else f", position_buckets={self.position_buckets}"
        return f"{super().extra_repr()}, max_relative_positions={self.max_relative_positions}{buckets}"

    def _dense(self, q_positions: Tensor, k_positions: Tensor, content: Content, heads: slice) -> Tensor:
        at = self._checked(q_positions, k_positions, content, heads)
        ends, (c2p, p2c) = self._ends_on(at.q.device), self._tables(at, heads)
        q, k, q_at, k_at = at
        total = None if c2p is None else dots_at(self._row, q, q_at, k_at, c2p, *ends)
        if p2c is not None:
            by_key = dots_at(self._row_of_swapped, k, k_at, q_at, p2c, *ends, add_to=total)
            total = by_key.mT if total is None else by_key
        return cast(Tensor, total)

    def _score_mod(self, q_positions: Tensor, k_positions: Tensor, content: Content, heads: slice) -> ScoreMod:
        at = self._checked(q_positions, k_positions, content, heads)
        q_at, k_at, ends = at.q_positions, at.k_positions, self._ends_on(at.q.device)
        rows = q_at.shape[0] > 1, k_at.shape[0] > 1
        with full_precision(at.q.device):
            c2p, p2c = (
                None if table is None else dots(x, table)
                for x, table in zip((at.q, at.k), self._tables(at, heads), strict=True)
            )

        def score_mod(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
            q_position = q_at[batch if rows[0] else 0, q_index]
            row = self._row(q_position, k_at[batch if rows[1] else 0, k_index], *ends)
            if c2p is not None:
                score = score + c2p[batch, head, q_index, row]
            return score if p2c is None else score + p2c[batch, head, k_index, row]

        return score_mod

    def _checked(self, q_positions: Tensor, k_positions: Tensor, content: Content, heads: slice) -> Vectors:
        require_integers("q_positions", q_positions)
        require_integers("k_positions", k_positions)
        return self._vectors(q_positions, k_positions, content, heads, *self.parameters())

    def _row(self, q_position: Tensor, k_position: Tensor, *ends: Tensor) -> Tensor:
        """The row of the table of vectors; `ends` as `_ends_on` gives them."""
        distance = q_position - k_position
        if self._farthest <= _LISTED and ends:
            return ends[0][distance.clamp(-self._farthest, self._farthest) + self._farthest]
        return self._row_of(distance, *ends)

    def _row_of(self, distance: Tensor, *ends: Tensor) -> Tensor:
        if self.position_buckets is not None:
            longest = self.max_relative_positions
            distance = bucket_of(
                distance, *ends, position_buckets=self.position_buckets, max_relative_positions=longest
            )
        return (distance + self.span).clamp(0, 2 * self.span - 1)

    def _row_of_swapped(self, k_position: Tensor, q_position: Tensor, *ends: Tensor) -> Tensor:
        return self._row(q_position, k_position, *ends)

    def _ends_on(self, device: torch.device) -> tuple[Tensor, ...]:
        """The row of each distance up to the farthest that differs; of many, where the buckets end; else nothing."""
        if not self._ends:
            return ()
        ends = torch.tensor(self._ends, device=device)
        if self._farthest > _LISTED:
            return (ends,)
        return (self._row_of(torch.arange(-self._farthest, self._farthest + 1, device=device), ends),)

    def _tables(self, at: Vectors, heads: slice) -> tuple[Tensor | None, Tensor | None]:
        """Kr and Qr of these heads, (H, 2 span, D), times the scale."""
        table = self.rel_embeddings
        vectors: Tensor = table.weight if isinstance(table, nn.Embedding) else table()
        if vectors.dim() != 2 or vectors.shape[0] != 2 * self.span:
            raise ValueError(f"rel_embeddings: got shape {tuple(vectors.shape)}; it must be ({2 * self.span}, E)")
        key, query = (
            None if module is None else self._of_heads(_projected(module, vectors, at.q.dtype), heads)
            for module in (self.pos_key_proj, self.pos_query_proj)
        )
        return key, query

    def _of_heads(self, projected: Tensor, heads: slice) -> Tensor:
        each: Tensor = projected.unflatten(1, (self.num_heads, self.head_dim)).transpose(0, 1)[heads]
        return each * self.scale


def _projected(module: nn.Module, vectors: Tensor, dtype: torch.dtype) -> Tensor:
    with full_precision(vectors.device):
        # Only of a plain projection is it known what its weight means.
        if type(module) is not nn.Linear:
            return module(vectors).to(dtype)  # type: ignore[no-any-return]
        bias = None if module.bias is None else module.bias.to(dtype)
        return F.linear(vectors.to(dtype), module.weight.to(dtype), bias)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
