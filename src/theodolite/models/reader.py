"""Reading a text through a causal language model: in chunks, at explicit positions, with looks aside.

The full logits and the full score matrix never exist: a chunk attends to what was read before it and
to itself in two pieces, and its logits become two numbers a token. Shapes: S tokens of a chunk,
P probes, n tokens of a probe, T tokens read so far.
"""

from __future__ import annotations

import math
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

from theodolite.attention import Piece, attend, merge, with_sink
from theodolite.models.decoder import find_decoder
from theodolite.plan import Mask, ModelPlan

_NAME = "theodolite"
_LOGITS_BYTES = 400_000_000
_SCORE_ROWS = 128
# Llama 4 counts the tokens of a forward where it means positions: a Reader does that multiplication in its place.
_TEMPERED = "attn_temperature_tuning"


class Scores(NamedTuple):
    """What a model makes of tokens that come next: both of one shape, on the CPU."""

    nll: Tensor
    """-ln p(token), nats, float32."""
    correct: Tensor
    """Whether the token was the most likely one, bool."""


class _Prefix:
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
        kept = slice(self.length, self.length + k.shape[2])
        pair[0][:, :, kept], pair[1][:, :, kept] = k, v

    def read(self, layer_idx: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values read so far, from slot `first` on: (1, G, T - first, D) and (1, G, T - first, E)."""
        pair = self._layers[layer_idx]
        assert pair is not None
        return pair[0][:, :, first : self.length], pair[1][:, :, first : self.length]

    def _buffer(self, x: Tensor) -> Tensor:
        return x.new_empty(1, x.shape[1], self.capacity, x.shape[3])


@dataclass(frozen=True)
class _Feed:
    """What attention must know of this call: the plan, what was read, and where the queries stand."""

    plan: ModelPlan
    prefix: _Prefix
    positions: Tensor  # (B, S), on the CPU
    writing: bool

    def attention(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Piece:
        if self.writing:
            self.prefix.write(layer_idx, k, v)
        mask = self.plan.layers[layer_idx].mask
        if mask.sliding_window is None and mask.chunk is None:
            own = attend(q, k, v, scale=scale, softcap=softcap, causal=True)
            return own if not self.prefix.length else merge(self._whole_prefix(layer_idx, q, scale, softcap), own)
        return self._limited(layer_idx, mask, q, k, v, scale, softcap)

    def tempered(self, layer_idx: int, q: Tensor) -> Tensor:
        """q (B, H, S, D) times what the plan multiplies queries by at their positions."""
        temperature = self.plan.layers[layer_idx].temperature
        if temperature is None:
            return q
        steps = torch.div(self.positions + temperature.shift, temperature.length, rounding_mode="floor")
        scale = 1 + temperature.beta * torch.log1p(steps.float())
        return (q * scale[:, None, :, None].to(q.device)).to(q.dtype)

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
        nearest = lowest if mask.sliding_window is None else lowest - mask.sliding_window + 1
        if mask.chunk is not None:
            nearest = (
                max(nearest, lowest // mask.chunk * mask.chunk)
                if mask.sliding_window
                else lowest // mask.chunk * mask.chunk
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


# Not every model hands the keyword arguments of its forward down to its attention.
_FEED: ContextVar[_Feed | None] = ContextVar("theodolite_feed", default=None)


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
    feed = _FEED.get()
    if feed is None:
        raise RuntimeError(f"the attention {_NAME!r} works inside a theodolite Reader only")
    if attention_mask is not None:
        raise RuntimeError("the model made an attention mask of its own, which a Reader does not take")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    if hasattr(module, _TEMPERED):
        query = feed.tempered(layer_idx, query)
    piece = feed.attention(layer_idx, query, key, value, scale, softcap)
    out = piece.out if s_aux is None else with_sink(piece, s_aux)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attention)


class Reader:
    """Reads tokens into a cache and scores them, and scores probes against the cache without adding to it.

    Args:
        model: a causal LM of transformers with attention layers only, patched or not.
        plan: its positions; windows and chunks are taken from it.
        capacity: how many tokens can be read.
        chunk: tokens per forward; by default 1,024, fewer where the vocabulary is large.

    Use it as a context: the model's own attention is put back at the end.
    """

    def __init__(self, model: Any, plan: ModelPlan, *, capacity: int, chunk: int | None = None) -> None:
        self.model = model
        self.plan = plan
        self.prefix = _Prefix(len(plan.layers), capacity)
        vocabulary = model.get_output_embeddings().weight.shape[0]
        self.chunk = chunk or max(64, min(1024, _LOGITS_BYTES // (6 * vocabulary)))
        self._own_attention: str | None = None
        self._tempered: list[tuple[Any, Any]] = []

    def __enter__(self) -> Reader:
        _require_causal_attention(self.model, self.plan)
        if not self.model._can_set_attn_implementation():
            raise ValueError(
                f"{type(self.model).__name__} does not let its attention be replaced, so it cannot be read in chunks"
            )
        self._own_attention = self.model.config._attn_implementation
        self._tempered = [(m, getattr(m, _TEMPERED)) for m in self.model.modules() if hasattr(m, _TEMPERED)]
        self.model.set_attn_implementation(_NAME)
        for module, _ in self._tempered:
            setattr(module, _TEMPERED, False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.model.set_attn_implementation(self._own_attention)
        for module, own in self._tempered:
            setattr(module, _TEMPERED, own)

    @property
    def length(self) -> int:
        """Tokens read so far."""
        return self.prefix.length

    def forget(self, length: int = 0) -> None:
        """Keep the first `length` tokens read and drop the rest."""
        self.prefix.length = min(length, self.prefix.length)

    def read(self, tokens: Tensor, positions: Tensor, *, targets: Tensor | None = None) -> Scores | None:
        """Read `tokens` (S,) at `positions` (S,); score `targets` (S,), the token after each, if given."""
        if self.prefix.length + len(tokens) > self.prefix.capacity:
            raise ValueError(
                f"tokens: {len(tokens)} more do not fit; {self.prefix.length} of {self.prefix.capacity} are taken"
            )
        parts = []
        for start in range(0, len(tokens), self.chunk):
            part = slice(start, start + self.chunk)
            logits = self._forward(
                tokens[part][None], positions[part][None], writing=True, keep=None if targets is not None else 1
            )
            if targets is not None:
                parts.append(_score(logits[0], targets[part]))
        return Scores(torch.cat([p.nll for p in parts]), torch.cat([p.correct for p in parts])) if parts else None

    def probe(self, tokens: Tensor, positions: Tensor, *, cue: int) -> Scores:
        """Score tokens `cue` to n-1 of each of `tokens` (P, n), fed at `positions` (P, n) after what was read.

        The probes see the prefix and themselves, not each other, and leave no trace. Returns (P, n - cue).
        """
        if not 0 < cue < tokens.shape[1]:
            raise ValueError(f"cue: got {cue}; 1 to {tokens.shape[1] - 1} tokens of these probes can be a cue")
        fed, targets = tokens[:, :-1], tokens[:, cue:]
        per_forward = max(1, self.chunk // fed.shape[1])
        parts = []
        for start in range(0, len(tokens), per_forward):
            part = slice(start, start + per_forward)
            logits = self._forward(fed[part], positions[part, :-1], writing=False, keep=targets.shape[1])
            scores = _score(logits.flatten(0, 1), targets[part].flatten())
            parts.append(Scores(*(x.view(-1, targets.shape[1]) for x in scores)))
        return Scores(torch.cat([p.nll for p in parts]), torch.cat([p.correct for p in parts]))

    def _forward(self, tokens: Tensor, positions: Tensor, *, writing: bool, keep: int | None) -> Tensor:
        device = self.model.device
        outer = _FEED.set(_Feed(self.plan, self.prefix, positions, writing))
        try:
            with torch.inference_mode():
                logits = self.model(
                    input_ids=tokens.to(device),
                    position_ids=positions.to(device),
                    use_cache=False,
                    logits_to_keep=0 if keep is None else keep,
                ).logits
        finally:
            _FEED.reset(outer)
        if writing:
            self.prefix.positions[self.prefix.length : self.prefix.length + tokens.shape[1]] = positions[0]
            self.prefix.length += tokens.shape[1]
        return logits  # type: ignore[no-any-return]


def _require_causal_attention(model: Any, plan: ModelPlan) -> None:
    """Raise for a model whose tokens need more of each other than the keys and values before them."""
    if not all(layer.mask.causal for layer in plan.layers):
        raise ValueError(f"{type(model).__name__} lets tokens see those after them, so it cannot be read in chunks")
    decoder = find_decoder(model)
    without = [] if decoder is None else [i for i in range(len(decoder.layers)) if decoder.attention(i) is None]
    if getattr(model, "_is_stateful", False) or without:
        where = f" (layers {', '.join(map(str, without))})" if without else ""
        raise ValueError(
            f"{type(model).__name__} has layers with a recurrent state or a convolution{where}, "
            "and only attention can be read in chunks"
        )


def _score(logits: Tensor, targets: Tensor) -> Scores:
    """logits (S, V), targets (S,): in float32, a few rows at a time so that no copy of all logits is made."""
    nll = torch.empty(len(targets), dtype=torch.float32)
    correct = torch.empty(len(targets), dtype=torch.bool)
    targets = targets.to(logits.device)
    for start in range(0, len(targets), _SCORE_ROWS):
        rows = slice(start, start + _SCORE_ROWS)
        block = logits[rows].float()
        nll[rows] = torch.nn.functional.cross_entropy(block, targets[rows], reduction="none").cpu()
        correct[rows] = (block.argmax(dim=-1) == targets[rows]).cpu()
    if not math.isfinite(float(nll.sum())):
        raise FloatingPointError("the model gave a probability that is no number: its weights or its dtype overflow")
    return Scores(nll, correct)
