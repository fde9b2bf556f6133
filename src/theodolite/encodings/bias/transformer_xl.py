"""Transformer-XL's relative positions (also XLNet's): projected sinusoids of the distance, and two learned vectors."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from theodolite.encodings.bias.base import Content
from theodolite.encodings.bias.content import ContentBias, full_precision, in_row_blocks
from theodolite.encodings.rotate.tables import pair_tables
from theodolite.positions.checks import require_count


class TransformerXLBias(ContentBias):
    """`(q.W R_r + u.k + v.W R_r) / sqrt(D)`, to which attention adds `q.k / sqrt(D)` of its own.

    r is the position of the query minus that of the key, and `R_r = [sin(r w) | cos(r w)]`,
    `w_i = 10000^(-2i/E)`. By the addition theorem this is one product of a vector that belongs to the query and
    one that belongs to the key, so scratch is linear in the tokens, positions are any (fractions too), and
    nothing is shifted: pairs with r < 0 have their true value, which is what XLNet needs. Sines are exact at any
    position up to 2**24 and rounded to float32.

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

    def _dense(self, q_positions: Tensor, k_positions: Tensor, content: Content, heads: slice) -> Tensor:
        weight = self.r_net.weight.view(self.num_heads, self.head_dim, self.hidden_size)[heads]
        u, v = self.r_w_bias[heads], self.r_r_bias[heads]
        q, k, q_at, k_at = self._vectors(q_positions, k_positions, content, heads, weight, u, v)
        (q_cos, q_sin), (k_cos, k_sin) = self._tables(q_positions, q), self._tables(k_positions, q)
        with full_precision(q.device):
            weight, u, v = weight.to(q.dtype) * self.scale, u.to(q.dtype) * self.scale, v.to(q.dtype)
            # (B, Hkv, G, Sk) as (B, H, 1, Sk): heads in groups share a key.
            of_key = torch.einsum("grd,bgkd->bgrk", u.view(k.shape[1], -1, self.head_dim), k).flatten(1, 2)[:, :, None]
        rows = [q, q_cos[:, None], q_sin[:, None], q_at[:, None, :, None]]
        whole = [weight, v[:, None], torch.cat((k_sin, k_cos), dim=-1), of_key, k_at, self._farthest(q)]
        row_size = q.shape[0] * q.shape[1] * max(k.shape[2], self.hidden_size)
        return in_row_blocks(self._rows, rows, whole, row_size=row_size)

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

    def _tables(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        inv_freq = [10000.0 ** (-i / self.hidden_size) for i in range(0, self.hidden_size, 2)]
        cos, sin = pair_tables(inv_freq, positions, device=like.device)
        return cos.to(like.dtype), sin.to(like.dtype)

    def _farthest(self, like: Tensor) -> Tensor:
        """(2, E): R at the clamped distance after and before; nothing without a clamp."""
        if self.clamp_length is None:
            return like.new_empty(0)
        at = torch.tensor([self.clamp_length, -self.clamp_length], device="meta" if like.is_meta else "cpu")
        cos, sin = self._tables(at, like)
        return torch.cat((sin, cos), dim=-1)
