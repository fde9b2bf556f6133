"""Attention of a text that is read in chunks: to what was read before, whole, and to the chunk itself.

It stands in transformers' attention interface while a Reader reads. Shapes: B batch (probes), H query heads,
G key-value heads, S tokens of the call, D and E channels of keys and values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from theodolite.attention import Piece, attend, merge, with_sink
from theodolite.plan import Mask, ModelPlan, Temperature

NAME = "theodolite"
# Llama 4 counts the tokens of a forward where it means positions: a Reader does that multiplication in its place.
TEMPERED = "attn_temperature_tuning"


class Prefix:
    """Keys and values read so far, in buffers of fixed capacity, one pair a layer."""

    def __init__(self, layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.positions = torch.zeros(capacity, dtype=torch.int64)
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * layers

    def write(self, layer_idx: int, k: Tensor, v: Tensor) -> None:
        """Put k (1, G, S, D) and v (1, G, S, E) after what was read; they count once `length` is raised."""
        pair = self._layers[layer_idx]
        if pair is None:
            pair = (self._buffer(k), self._buffer(v))
            self._layers[layer_idx] = pair
        for buffer, x in zip(pair, (k, v), strict=True):
            buffer.narrow(2, self.length, x.shape[2]).copy_(x)

    def read(self, layer_idx: int, first: int = 0, *, end: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values read so far, or up to slot `end`, from `first` on: (1, G, n, D) and (1, G, n, E)."""
        pair = self._layers[layer_idx]
        assert pair is not None
        tokens = (self.length if end is None else end) - first
        return pair[0].narrow(2, first, tokens), pair[1].narrow(2, first, tokens)

    def advance(self, positions: Tensor) -> None:
        """Count tokens (n,) as read, once every layer has written them."""
        self.positions[self.length : self.length + len(positions)] = positions
        self.length += len(positions)

    def make_room(self, tokens: int) -> None:
        """Let `tokens` fit; capacity is doubled where it must grow."""
        if tokens <= self.capacity:
            return
        self.capacity = max(tokens, 2 * self.capacity)
        self.positions = torch.cat((self.positions, self.positions.new_zeros(self.capacity - len(self.positions))))
        for layer_idx, pair in enumerate(self._layers):
            if pair is not None:
                k, v = (self._buffer(x) for x in pair)
                k[:, :, : self.length], v[:, :, : self.length] = (x[:, :, : self.length] for x in pair)
                self._layers[layer_idx] = k, v

    def with_values(self, values: Tensor) -> Prefix:
        """The same keys, and in every layer the values (T, E) of the tokens read."""
        other = Prefix(0, self.length)
        other.length, other.positions = self.length, self.positions[: self.length]
        other._layers = [
            None if pair is None else (pair[0][:, :, : self.length], values.expand(1, pair[0].shape[1], -1, -1))
            for pair in self._layers
        ]
        return other

    def _buffer(self, x: Tensor) -> Tensor:
        return x.new_empty(1, x.shape[1], self.capacity, x.shape[3])


class Attends(ABC):
    """What stands behind the attention of a model for one call."""

    @abstractmethod
    def attention(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Piece:
        """q (B, H, S, D) over what is kept and over k (B, G, S, D) and v (B, G, S, E), turned."""

    @abstractmethod
    def tempered(self, layer_idx: int, q: Tensor) -> Tensor:
        """q times what the plan multiplies it by."""

    def finished(self, piece: Piece, sinks: Tensor | None) -> Tensor:
        """The output (B, H, S, E), with each head's learned sink logit (H,) if the model has them."""
        return piece.out if sinks is None else with_sink(piece, sinks)


@dataclass(frozen=True)
class Feed(Attends):
    """What attention must know of this call: the plan, what was read, and where the queries stand."""

    plan: ModelPlan
    prefix: Prefix
    positions: Tensor  # (B, S), on the CPU
    writing: bool

    def attention(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Piece:
        if self.writing:
            self.prefix.write(layer_idx, k, v)
        mask = self.plan.layers[layer_idx].mask
        if mask.sliding_window is None and mask.chunk is None:
            if self.writing and q.shape[2] == 1:
                # Decoding: all that is kept, the token itself included.
                return attend(q, *self.prefix.read(layer_idx, end=self.prefix.length + 1), scale=scale, softcap=softcap)
            own = attend(q, k, v, scale=scale, softcap=softcap, causal=True)
            return own if not self.prefix.length else merge(self._whole_prefix(layer_idx, q, scale, softcap), own)
        return self._limited(layer_idx, mask, q, k, v, scale, softcap)

    def tempered(self, layer_idx: int, q: Tensor) -> Tensor:
        """q (B, H, S, D) times what the plan multiplies queries by at their positions."""
        return temper(self.plan.layers[layer_idx].temperature, q, self.positions)

    def _whole_prefix(self, layer_idx: int, q: Tensor, scale: float, softcap: float | None) -> Piece:
        """All queries see the whole prefix, so those of all probes are one long row of queries."""
        keys, values = self.prefix.read(layer_idx)
        batch, heads, tokens, width = q.shape
        groups = keys.shape[1]
        row = q.view(batch, groups, heads // groups, tokens, width).permute(1, 2, 0, 3, 4).reshape(1, groups, -1, width)
        piece = attend(row, keys, values, scale=scale, softcap=softcap)

        def back(x: Tensor) -> Tensor:
            apart = x.reshape(groups, heads // groups, batch, tokens, *x.shape[3:])
            return apart.permute(2, 0, 1, 3, *range(4, apart.dim())).reshape(batch, heads, tokens, *x.shape[3:])

        return Piece(back(piece.out), back(piece.lse))

    def _limited(
        self, layer_idx: int, mask: Mask, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None
    ) -> Piece:
        """Windows and chunks are of positions, not of cache slots: skipped positions count as distance."""
        batch, tokens = self.positions.shape
        lowest = int(self.positions.min())
        # Keys before the first that any query sees are not even fetched.
        nearest = max(
            0 if mask.sliding_window is None else lowest - mask.sliding_window + 1,
            0 if mask.chunk is None else lowest // mask.chunk * mask.chunk,
        )
        read = self.prefix.positions[: self.prefix.length]
        first = int((read < nearest).long().cumprod(0).sum()) if len(read) else 0
        own = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        key_positions = torch.cat((read[first:].expand(batch, -1), self.positions), dim=1)
        distance = self.positions[:, :, None] - key_positions[:, None, :]
        seen = torch.cat((torch.ones(tokens, len(read) - first, dtype=torch.bool), own), dim=1).expand_as(distance)
        if mask.sliding_window is not None:
            seen = seen & (distance < mask.sliding_window)
        if mask.chunk is not None:
            seen = seen & (self.positions[:, :, None] // mask.chunk == key_positions[:, None, :] // mask.chunk)
        if len(read) > first:
            keys, values = self.prefix.read(layer_idx, first)
            k = torch.cat((keys.expand(batch, -1, -1, -1), k), dim=2)
            v = torch.cat((values.expand(batch, -1, -1, -1), v), dim=2)
        return attend(q, k, v, scale=scale, softcap=softcap, mask=seen[:, None].to(q.device))


def temper(temperature: Temperature | None, q: Tensor, positions: Tensor) -> Tensor:
    """q (B, H, S, D) times what a plan multiplies queries by at `positions` (B, S)."""
    if temperature is None:
        return q
    steps = torch.div(positions + temperature.shift, temperature.length, rounding_mode="floor")
    scale = 1 + temperature.beta * torch.log1p(steps.float())
    return (q * scale[:, None, :, None].to(q.device)).to(q.dtype)


# Not every model hands the keyword arguments of its forward down to its attention.
FEED: ContextVar[Attends | None] = ContextVar("theodolite_feed", default=None)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: q (B, H, S, D), k and v (B, G, S, D) in, (B, S, H, D) out."""
    feed = FEED.get()
    if feed is None:
        raise RuntimeError(f"the attention {NAME!r} works inside a theodolite Reader only")
    if attention_mask is not None:
        raise RuntimeError("the model made an attention mask of its own, which a Reader does not take")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    if hasattr(module, TEMPERED):
        query = feed.tempered(layer_idx, query)
    piece = feed.attention(layer_idx, query, key, value, scale, softcap)
    return feed.finished(piece, s_aux).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
