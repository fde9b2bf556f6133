"""Transformer-XL's relative positions (also XLNet's): projected sinusoids of the distance, and two learned vectors."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from theodolite.encodings.bias.base import Content
from theodolite.encodings.bias.content import ContentBias, dots_at, full_precision, in_row_blocks
from theodolite.encodings.rotate.tables import pair_tables
from theodolite.positions.checks import can_read, require_count


class TransformerXLBias(ContentBias):
    """`(q.W R_r + u.k + v.W R_r) / sqrt(D)`, to which attention adds `q.k / sqrt(D)` of its own.

    r is the position of the query minus that of the key, and `R_r = [sin(r w) | cos(r w)]`,
    `w_i = 10000^(-2i/E)`. Nothing is shifted: pairs with r < 0 have their true value, which is what XLNet needs.
    Sines are exact at any position up to 2**24 and rounded to float32.

    Where few distances occur, W R_r is made for each and its products with q are gathered. Otherwise (fractions,
    gaps between positions, one query, a compiled graph) a score is, by the addition theorem, one product of a
    vector of E numbers that belongs to the query and one that belongs to the key. Scratch is linear in the tokens.

    Forms: `dense` only. `score_mod` and `slopes` are None: a pair takes a product of two vectors, which is no
    elementwise function.

    XLNet: `r_net.weight = rel_attn.r.flatten(1).T`. Its term for segments is no position and is left out.

    Source: Dai et al. 2019 (1901.02860), section 3.3; kimiyoung/transformer-xl, `RelPartialLearnableMultiHeadAttn`.

    Args:
        num_heads: heads of the whole model.
        head_dim: channels of a head, D.
        hidden_size: width of the sinusoid, E (`d_model`); even.
        clamp_length: distances beyond it, either way, count as it (`clamp_len`).
        r_w_bias: u, (H, D), where several layers share one parameter; own by default.
        r_r_bias: v, likewise. After `to_empty` shared parameters must be tied again, as anywhere in torch.
    """

    reads: ClassVar[tuple[str, ...]] = ("q", "k")

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        hidden_size: int,
        clamp_length: int | None = None,
        r_w_bias: nn.Parameter | None = None,
        r_r_bias: nn.Parameter | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim)
        require_count("hidden_size", hidden_size, least=2)
        if hidden_size % 2:
            raise ValueError(f"hidden_size: got {hidden_size}; it must be even, for half of it are sines")
        if clamp_length is not None:
            require_count("clamp_length", clamp_length, least=1)
        for name, given in (("r_w_bias", r_w_bias), ("r_r_bias", r_r_bias)):
            if given is not None and given.shape != (num_heads, head_dim):
                raise ValueError(f"{name}: got shape {tuple(given.shape)}; it must be {(num_heads, head_dim)}")
        self.hidden_size, self.clamp_length = hidden_size, clamp_length
        self._given = r_w_bias is not None, r_r_bias is not None
        self.r_net = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.r_w_bias = nn.Parameter(torch.empty(num_heads, head_dim)) if r_w_bias is None else r_w_bias
        self.r_r_bias = nn.Parameter(torch.empty(num_heads, head_dim)) if r_r_bias is None else r_r_bias
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with deviation 0.02, as the authors' code; vectors that were given are left alone."""
        nn.init.normal_(self.r_net.weight, std=0.02)
        for given, vector in zip(self._given, (self.r_w_bias, self.r_r_bias), strict=True):
            if not given:
                nn.init.normal_(vector, std=0.02)

    def extra_repr(self) -> str:
        clamp = "" if self.clamp_length is None else f", clamp_length={self.clamp_length}"
        return f"{super().extra_repr()}, hidden_size={self.hidden_size}{clamp}"

    def _dense(self, q_positions: Tensor, k_positions: Tensor, content: Content, heads: slice) -> Tensor:
        weight = self.r_net.weight.view(self.num_heads, self.head_dim, self.hidden_size)[heads]
        u, v = self.r_w_bias[heads], self.r_r_bias[heads]
        q, k, q_at, k_at = self._vectors(q_positions, k_positions, content, heads, weight, u, v)
        with full_precision(q.device):
            weight, u, v = weight.to(q.dtype) * self.scale, u.to(q.dtype) * self.scale, v.to(q.dtype)[:, None]
            # (B, Hkv, G, Sk) as (B, H, 1, Sk): heads in groups share a key.
            of_key = torch.einsum("grd,bgkd->bgrk", u.unflatten(0, (k.shape[1], -1)), k).flatten(1, 2)[:, :, None]
        distances = self._distances(q_positions, k_positions, q.shape[0])
        if distances is not None:
            sinusoid = self._sinusoid(torch.arange(*distances, device="cpu"), q)
            with full_precision(q.device):
                table = torch.einsum("ne,hde->hnd", sinusoid, weight)
            lowest = distances[0]
            return dots_at(lambda m, n: self._clamped(m - n) - lowest, q + v, q_at, k_at, table).add_(of_key)
        q_sin, q_cos = self._sinusoid(q_positions, q)[:, None].chunk(2, dim=-1)
        rows = [q, q_cos, q_sin, q_at[:, None, :, None]]
        whole = [weight, v, self._sinusoid(k_positions, q), of_key, k_at, self._farthest(q)]
        row_size = q.shape[0] * q.shape[1] * max(k.shape[2], self.hidden_size)
        return in_row_blocks(self._rows, rows, whole, row_size=row_size)

    def _distances(self, q_positions: Tensor, k_positions: Tensor, batch: int) -> tuple[int, int] | None:
        """The range of whole distances that occur, where a vector for each is the cheaper way; else None."""
        sides = q_positions, k_positions
        if not all(can_read(at) and at.shape[-1] and not at.is_floating_point() for at in sides):
            return None
        (q_low, q_high), (k_low, k_high) = ((at.long().amin(-1), at.long().amax(-1)) for at in sides)
        ends = torch.stack(((q_low - k_high).min(), (q_high - k_low).max()))
        lowest, highest = self._clamped(ends).tolist()
        count, queries, keys = highest + 1 - lowest, q_positions.shape[-1], k_positions.shape[-1]
        # Multiplications of the two ways, in units of a head.
        gathered = count * self.head_dim * (batch * queries + self.hidden_size)
        factored = batch * queries * self.hidden_size * (keys + self.head_dim)
        return (lowest, highest + 1) if count <= 2 * (queries + keys) and gathered < factored else None

    def _clamped(self, distance: Tensor) -> Tensor:
        return distance if self.clamp_length is None else distance.clamp(-self.clamp_length, self.clamp_length)

    def _rows(
        self,
        q: Tensor,
        cos: Tensor,
        sin: Tensor,
        q_at: Tensor,
        weight: Tensor,
        v: Tensor,
        k_side: Tensor,
        of_key: Tensor,
        k_at: Tensor,
        farthest: Tensor,
    ) -> Tensor:
        projected = torch.einsum("bhsd,hde->bhse", q + v, weight)
        of_sin, of_cos = projected.chunk(2, dim=-1)
        # a sin(m-n) + b cos(m-n) = (b sin m - a cos m) sin n + (a sin m + b cos m) cos n.
        q_side = torch.cat((of_cos * sin - of_sin * cos, of_sin * sin + of_cos * cos), dim=-1)
        # Heads are rows of the product, so that no table of keys is copied for each.
        scores = (q_side.flatten(1, 2) @ k_side.mT).view(*q.shape[:3], k_at.shape[-1])
        if self.clamp_length is not None:
            after, before = (projected @ farthest.mT).split(1, dim=-1)
            distance = q_at - k_at[:, None, None]
            scores = torch.where(distance >= self.clamp_length, after, scores)
            scores = torch.where(distance <= -self.clamp_length, before, scores)
        return scores + of_key

    def _sinusoid(self, positions: Tensor, like: Tensor) -> Tensor:
        """[sin | cos], E numbers for each position."""
        inv_freq = [10000.0 ** (-i / self.hidden_size) for i in range(0, self.hidden_size, 2)]
        cos, sin = pair_tables(inv_freq, positions, device=like.device)
        return torch.cat((sin, cos), dim=-1).to(like.dtype)

    def _farthest(self, like: Tensor) -> Tensor:
        """(2, E): R at the clamped distance after and before; nothing without a clamp."""
        if self.clamp_length is None:
            return like.new_empty(0)
        ends = torch.tensor([self.clamp_length, -self.clamp_length], device="meta" if like.is_meta else "cpu")
        return self._sinusoid(ends, like)
