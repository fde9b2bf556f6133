"""CoPE: positions that count what the query wants counted, rather than tokens."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from theodolite.encodings.bias.base import Content
from theodolite.encodings.bias.content import ContentBias, in_row_blocks
from theodolite.positions.checks import require_count, require_reachable
from theodolite.positions.visible import require_visible


class CoPE(ContentBias):
    """`q.e[p]`, where p sums a gate over the keys from this one up to the query.

    The gate of a key is `sigmoid(q.k / sqrt(D))`, 0 where the query does not see it; p is clamped to
    `max_positions - 1`, and between whole numbers `q.e` is interpolated linearly. Where every gate is 1, p is the
    distance plus 1 and this is a learned relative position. Attention
    must scale q.k by `1/sqrt(D)` too.

    A key after the query is not counted, nor one that `visible` hides: whatever attention does not see (padding, other
    documents, all outside a window) must be hidden there too. Keys are counted in the order of their positions,
    wherever they lie in memory, so a row needs every key that it sees: prefill in chunks and decoding are right as long
    as all earlier keys are given, and a window gives the positions of a model with that window.

    Forms: `dense` only; `score_mod` and `slopes` are None, for a pair depends on the keys between.

    Source: Golovneva et al. 2024 (2405.18719), the printed listing; x-transformers' `CoPE`, whose
    `pos_emb` is this one's `pos_emb[0].T`.

    Args:
        num_heads: heads of the whole model; the embeddings are shared by all of them.
        head_dim: channels of a head, D.
        max_positions: positions that have an embedding, `npos_max`; position 0 is one of them.
        scale_positions: divides `q.e` by sqrt(D) as well: the authors' released training code, unlike the paper.
    """

    reads: ClassVar[tuple[str, ...]] = ("q", "k")
    causal_only: ClassVar[bool] = True

    def __init__(self, num_heads: int, head_dim: int, max_positions: int, *, scale_positions: bool = False) -> None:
        super().__init__(num_heads, head_dim)
        require_count("max_positions", max_positions, least=1)
        self.max_positions = max_positions
        self.scale_positions = scale_positions
        self.pos_emb = nn.Parameter(torch.empty(1, head_dim, max_positions))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zeros, as the authors."""
        nn.init.zeros_(self.pos_emb)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, max_positions={self.max_positions}"

    def _dense(self, q_positions: Tensor, k_positions: Tensor, content: Content, heads: slice) -> Tensor:
        q, k, q_at, k_at = self._vectors(q_positions, k_positions, content, heads, self.pos_emb)
        # From the nearest key to the farthest: a plain running sum counts, and stays small where it matters.
        # Of keys at one position the later in memory is the nearer.
        order = k_at.shape[-1] - 1 - k_at.flip(-1).argsort(dim=-1, descending=True, stable=True)
        rows = [q, q_at[:, None, :, None]]
        if content.visible is not None:
            visible = require_visible(content.visible, q.shape[2], k.shape[2], batch=q.shape[0], heads=q.shape[1])
            require_reachable(q, "q", visible=visible)
            rows.append(visible.to(q.device).expand(-1, -1, q.shape[2], k.shape[2]))
        whole = [k, k_at[:, None, None], order[:, None, None], order.argsort(dim=-1)[:, None, None]]
        # Gates, their sums, two rows of the table each: several of this size live at once.
        row_size = 4 * q.shape[0] * q.shape[1] * max(k.shape[2], self.max_positions)
        return in_row_blocks(self._rows, rows, [*whole, self.pos_emb[0].to(q.dtype)], row_size=row_size)

    def _rows(self, q: Tensor, q_at: Tensor, *rest: Tensor) -> Tensor:
        *mask, k, k_at, order, back, pos_emb = rest
        counted = k_at <= q_at
        if mask:
            counted = counted & mask[0]
        batch, heads, tokens, width = q.shape
        # Heads in groups are rows of one product with the key that they share.
        by_group = q.reshape(batch, k.shape[1], heads // k.shape[1] * tokens, width)
        logits = (by_group @ k.mT).view(batch, heads, tokens, k.shape[2]) * self.scale
        gates = logits.sigmoid().where(counted, logits.new_zeros(()))
        sums = gates.gather(-1, order.expand(gates.shape)).cumsum(dim=-1).clamp(max=self.max_positions - 1)
        position = sums.gather(-1, back.expand(gates.shape))
        whole = (q.reshape(-1, width) @ pos_emb).view(batch, heads, tokens, self.max_positions)
        if self.scale_positions:
            whole = whole * self.scale
        below = position.floor()
        low, high = (whole.gather(-1, at.long()) for at in (below, position.ceil()))
        return torch.lerp(low, high, position - below)
