"""The attention of a layer, under any policy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from theodolite.attention.by_policy import Path, attend_by_policy, path_of
from theodolite.attention.cache import Cache
from theodolite.attention.relative import attend_relatively
from theodolite.encodings.policy import Order, Policy
from theodolite.encodings.rotate.lengths import Lengths
from theodolite.encodings.shared import SharedTables
from theodolite.positions.relative import RelativeMap
from theodolite.positions.visible import visible_keys


class Attention(nn.Module):
    """Multi-head attention whose positions are a policy: grouped or not, causal or not, of a sequence to itself or not.

    Positions are always given, never counted. Memory is linear in the tokens under every policy, forward and backward;
    `path` says how it is worked out.

    Args:
        hidden_size: channels of the input and the output.
        num_heads: query heads.
        policy: what positions do; its bias, if it has one, is of `num_heads` heads. `Policy()` is NoPE, causal.
        num_kv_heads: key-value heads, of which `num_heads` is a multiple; as many as query heads by default.
        head_dim: channels of a head; `hidden_size / num_heads` by default.
        bias: whether the projections of queries, keys and values add a bias; `out_bias` that of the output.
        qk_norm: RMS norm of each head's queries and keys, before they are turned, with this epsilon; None for none.
        relative: maps the distances beyond which the model was not trained (`theodolite.positions`): ReRoPE, leaky
            ReRoPE, Self-Extend, LM-Infinite, dual chunks. A cache must then keep keys as projected.
        context_size: channels of what keys and values are made of, in cross-attention; `hidden_size` by default.

    Example:
        >>> import torch
        >>> from theodolite import Rotary, RotaryEmbedding
        >>> from theodolite.attention import Attention
        >>> from theodolite.encodings import Policy
        >>> rope = RotaryEmbedding(Rotary(head_dim=16, rope_theta=10000.0))
        >>> attention = Attention(64, 4, Policy(rotate=rope), num_kv_heads=2)
        >>> attention(torch.randn(2, 5, 64), torch.arange(5)).shape
        torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        policy: Policy,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm: float | None = None,
        relative: RelativeMap | None = None,
        context_size: int | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_heads if num_kv_heads is None else num_kv_heads
        _require(hidden_size, num_heads, self.num_kv_heads, head_dim, policy)
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.policy, self.relative = policy, relative
        context_size = hidden_size if context_size is None else context_size
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(context_size, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(context_size, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=out_bias)
        self.q_norm = None if qk_norm is None else nn.RMSNorm(self.head_dim, eps=qk_norm)
        self.k_norm = None if qk_norm is None else nn.RMSNorm(self.head_dim, eps=qk_norm)
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if policy.mask.sinks else None

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        *,
        context: Tensor | None = None,
        context_positions: Tensor | None = None,
        visible: Tensor | None = None,
        order: Order | None = None,
        lengths: Lengths | None = None,
        tables: SharedTables | None = None,
        context_tables: SharedTables | None = None,
        cache: Cache | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """x (B, S, hidden_size) attends to itself, or to `context`: (B, S, hidden_size).

        Args:
            positions: (S,), (B, S) or (axes, B, S), of x.
            context: (B, T, context_size) that keys and values are made of; x by default.
            context_positions: the same of the context, needed with it.
            visible, order, lengths: as in `attend_plainly`.
            tables, context_tables: those of this forward, shared by the layers; made of the positions by default.
            cache: of this layer: x is added to it, and attends to all that is in it.
            real: (S,) or (B, S), not 0 at tokens of x that are no padding; all by default. Without a cache, and among
                the tokens of one call, it hides what is 0 as well.
        """
        if (context is None) != (context_positions is None):
            raise ValueError("context_positions: context and its positions go together; give both, or neither")
        q, k, v = self._project(x, x if context is None else context)
        if tables is None:
            tables = SharedTables(positions, lengths=lengths, device=x.device)
        if context_positions is None:
            context_tables = tables
        elif context_tables is None:
            context_tables = SharedTables(context_positions, lengths=lengths, device=x.device)
        if cache is not None:
            if context is not None or visible is not None or order is not None:
                raise ValueError("cache: with one, x attends to itself, by its positions; leave the others out")
            return self._out(self._with_cache(cache, x, q, k, v, positions, real, tables, lengths))
        if real is not None:
            keys = visible_keys(real)
            visible = keys if visible is None else visible & (keys if visible.dim() == 3 else keys.unsqueeze(1))
        if self.relative is not None:
            at = positions if context_positions is None else context_positions
            return self._out(self._mapped(q, k, v, positions, at, visible, lengths))
        out = attend_by_policy(
            self.policy,
            q,
            k,
            v,
            positions,
            context_positions,
            x=x,
            visible=visible,
            order=order,
            sinks=self.sinks,
            tables=(tables, context_tables),
        )
        return self._out(out)

    def _with_cache(
        self,
        cache: Cache,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        real: Tensor | None,
        tables: SharedTables,
        lengths: Lengths | None,
    ) -> Tensor:
        if self.relative is not None and cache.turned:
            raise ValueError("cache: a map of distances turns each key by several positions; use Cache(turned=False)")
        cache.require_sees(self.policy.mask, self.relative)
        bias, state = self.policy.bias, None
        if bias is not None and "k_state" in bias.reads:
            behind = real is None or not bool((real.bool().diff(dim=-1) & real.bool()[..., 1:]).any())
            if len(cache) and not behind:
                raise ValueError(
                    f"real: {type(bias).__name__} sums over tokens, and padding between those in the cache and "
                    "new ones would be summed too; put padding behind"
                )
            state = bias.state(x, cache.last_state())
        cache.append(self.policy, k, v, positions, real=real, state=state, tables=tables, lengths=lengths)
        kept = cache.kept()
        if self.relative is not None:
            out = self._mapped(q, kept.k, kept.v, positions, kept.positions, cache.sees(positions), lengths)
            cache.evict()
            return out
        out = attend_by_policy(
            self.policy,
            q,
            kept.k,
            kept.v,
            positions,
            kept.positions,
            x=x,
            visible=cache.sees(positions),
            sinks=self.sinks,
            q_state=state,
            k_state=kept.state,
            lengths=lengths,
            tables=(tables, None) if cache.turned else None,
            turned=cache.turned,
        )
        cache.evict()
        return out

    def _mapped(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        k_positions: Tensor,
        visible: Tensor | None,
        lengths: Lengths | None,
    ) -> Tensor:
        assert self.relative is not None
        given: dict[str, Any] = {"visible": visible, "lengths": lengths, "sinks": self.sinks}
        return attend_relatively(self.policy, q, k, v, positions, k_positions, self.relative, **given)

    def _out(self, out: Tensor) -> Tensor:
        attended: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return attended

    def path(self, x: Tensor, positions: Tensor, **given: Any) -> Path:
        """How `forward` of these arguments is worked out, and why so."""
        if self.relative is not None:
            return Path("pieces", f"{type(self.relative).__name__} maps distances, a group of pairs at a time")
        asked: dict[str, Any] = {name: given.get(name) for name in ("visible", "order")}
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        asked |= {"sinks": self.sinks, "device": x.device, "dtype": dtype}
        return path_of(self.policy, positions, given.get("context_positions"), **asked)

    def _project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, D)."""
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(context).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(context).unflatten(-1, (self.num_kv_heads, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            # Under autocast weights are wider than what they norm.
            q, k = (norm(x.to(norm.weight.dtype)).to(x.dtype) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def extra_repr(self) -> str:
        return f"{self.num_heads} heads, {self.num_kv_heads} for keys and values, head_dim={self.head_dim}"


def _require(hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int | None, policy: Policy) -> None:
    if not isinstance(policy, Policy):
        raise ValueError(f"policy: got a {type(policy).__name__}; give a Policy, such as Policy(rotate=rope)")
    for name, number in (("hidden_size", hidden_size), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if number < 1:
            raise ValueError(f"{name}: got {number}; it must be at least 1")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads: got {num_kv_heads}; it must divide num_heads={num_heads}")
    if head_dim is None and hidden_size % num_heads:
        raise ValueError(f"head_dim: got None, and hidden_size={hidden_size} is no multiple of num_heads={num_heads}")
    if policy.bias is not None and policy.bias.num_heads != num_heads:
        name = type(policy.bias).__name__
        raise ValueError(f"policy: its {name} has {policy.bias.num_heads} heads; attention has {num_heads}")
