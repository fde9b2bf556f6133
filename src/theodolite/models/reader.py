"""Reading a text through a causal language model: in chunks, at explicit positions, with looks aside.

The full logits and the full score matrix never exist: a chunk attends to what was read before it and
to itself in two pieces, and its logits become two numbers a token. Shapes: S tokens of a chunk,
P probes, n tokens of a probe, T tokens read so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from theodolite.models.feed import FEED, NAME, TEMPERED, Attends, Feed, Prefix
from theodolite.models.mapped import MappedFeed, bare
from theodolite.models.parts import find_decoder
from theodolite.models.patch import patched
from theodolite.plan import ModelPlan
from theodolite.positions.relative import RelativeMap

_LOGITS_BYTES = 400_000_000
_SCORE_ROWS = 128


# Of each model the reader that was opened last: it stands behind the model's attention.
_OPEN: WeakKeyDictionary[Any, Reader] = WeakKeyDictionary()


class Scores(NamedTuple):
    """What a model makes of tokens that come next: both of one shape, on the CPU."""

    nll: Tensor
    """-ln p(token), nats, float32."""
    correct: Tensor
    """Whether the token was the most likely one, bool."""


class Borrowed:
    """A model whose attention is another one, for the length of a `with` block.

    Args:
        model: of transformers.
        name: the attention, as it is registered there.
    """

    def __init__(self, model: Any, name: str) -> None:
        if not model._can_set_attn_implementation():
            raise ValueError(
                f"{type(model).__name__} does not let its attention be replaced, so it cannot be read in chunks"
            )
        self.model, self.name = model, name
        self._own: str | None = None
        self._tempered: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self._own = self.model.config._attn_implementation
        self._tempered = [(m, getattr(m, TEMPERED)) for m in self.model.modules() if hasattr(m, TEMPERED)]
        self.model.set_attn_implementation(self.name)
        for module, _ in self._tempered:
            setattr(module, TEMPERED, False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.model.set_attn_implementation(self._own)
        for module, own in self._tempered:
            setattr(module, TEMPERED, own)


class Reader:
    """Reads tokens into a cache and scores them, and scores probes against the cache without adding to it.

    Args:
        model: a causal LM of transformers with attention layers only, patched or not.
        plan: its positions; windows and chunks are taken from it.
        capacity: how many tokens can be read.
        chunk: tokens per forward; by default 1,024, fewer where the vocabulary is large.
        relative: maps distances beyond those that the model was trained for; it is patched meanwhile, to turn nothing
            by its own code.

    Use it as a context: the model's own attention is put back at the end.
    """

    def __init__(
        self,
        model: Any,
        plan: ModelPlan,
        *,
        capacity: int,
        chunk: int | None = None,
        relative: RelativeMap | None = None,
    ) -> None:
        if relative is not None:
            require_turning(plan)
        self.model = model
        self.plan = plan
        self.relative = relative
        self.prefix = Prefix(len(plan.layers), capacity)
        vocabulary = model.get_output_embeddings().weight.shape[0]
        self.chunk = chunk or max(64, min(1024, _LOGITS_BYTES // (6 * vocabulary)))
        self._changes: ExitStack | None = None
        self._outer: Reader | None = None

    def __enter__(self) -> Reader:
        if self._changes is not None:
            raise RuntimeError("this reader is open already")
        require_causal_attention(self.model, self.plan)
        with ExitStack() as changes:
            changes.enter_context(Borrowed(self.model, NAME))
            if self.relative is not None:
                changes.enter_context(patched(self.model, bare(self.plan)))
            self._changes = changes.pop_all()
        self._outer = _OPEN.get(self.model)
        _OPEN[self.model] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._changes is not None:
            self._changes.close()
            self._changes = None
            _OPEN.pop(self.model, None)
            if self._outer is not None:
                _OPEN[self.model] = self._outer

    @property
    def length(self) -> int:
        """Tokens read so far."""
        return self.prefix.length

    def forget(self, length: int = 0) -> None:
        """Keep the first `length` tokens read and drop the rest."""
        self.prefix.length = min(length, self.prefix.length)

    @contextmanager
    def as_of(self, length: int) -> Iterator[None]:
        """Inside the block only the first `length` tokens read are seen; nothing may be read there."""
        whole = self.prefix.length
        self.prefix.length = min(length, whole)
        try:
            yield
        finally:
            self.prefix.length = whole

    def next_logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Read `tokens` (S,), at least one, at `positions` (S,): the logits (V,) of what follows them."""
        if not len(tokens):
            raise ValueError("tokens: got none; the logits of what follows are those after a token")
        self._require_room(len(tokens))
        for start in range(0, len(tokens), self.chunk):
            part = slice(start, start + self.chunk)
            logits = self._forward(tokens[part][None], positions[part][None], writing=True, keep=1)
        return logits[0, -1]

    def read(self, tokens: Tensor, positions: Tensor, *, targets: Tensor | None = None) -> Scores | None:
        """Read `tokens` (S,) at `positions` (S,); score `targets` (S,), the token after each, if given."""
        self._require_room(len(tokens))
        parts = []
        for start in range(0, len(tokens), self.chunk):
            part = slice(start, start + self.chunk)
            logits = self._forward(
                tokens[part][None], positions[part][None], writing=True, keep=None if targets is not None else 1
            )
            if targets is not None:
                parts.append(score(logits[0], targets[part]))
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
            scores = score(logits.flatten(0, 1), targets[part].flatten())
            parts.append(Scores(*(x.view(-1, targets.shape[1]) for x in scores)))
        return Scores(torch.cat([p.nll for p in parts]), torch.cat([p.correct for p in parts]))

    def _require_room(self, tokens: int) -> None:
        if self.prefix.length + tokens > self.prefix.capacity:
            raise ValueError(
                f"tokens: {tokens} more do not fit; {self.prefix.length} of {self.prefix.capacity} are taken"
            )

    def _forward(self, tokens: Tensor, positions: Tensor, *, writing: bool, keep: int | None) -> Tensor:
        logits = self.forward(self.feed(positions, writing=writing), tokens, positions, keep=keep)
        if writing:
            self.prefix.advance(positions[0])
        return logits

    def feed(self, positions: Tensor, *, writing: bool, prefix: Prefix | None = None) -> Attends:
        """What stands behind attention in a call at `positions` (B, S): over what was read, or another `prefix`."""
        prefix = self.prefix if prefix is None else prefix
        if self.relative is None:
            return Feed(self.plan, prefix, positions, writing)
        return MappedFeed(self.plan, self.relative, prefix, positions, writing=writing)

    def forward(self, feed: Attends, tokens: Tensor, positions: Tensor, *, keep: int | None) -> Tensor:
        """One call of the model: tokens and positions (B, S) in, logits (B, S or `keep`, V) out."""
        if self._changes is None:
            raise RuntimeError("the model attends as it does by itself; read inside of `with` alone")
        if _OPEN.get(self.model) is not self:
            raise RuntimeError("another reader is open on this model, perhaps with another plan; close it first")
        device = self.model.device
        outer = FEED.set(feed)
        try:
            with torch.inference_mode():
                logits = self.model(
                    input_ids=tokens.to(device),
                    position_ids=positions.to(device),
                    use_cache=False,
                    logits_to_keep=0 if keep is None else keep,
                ).logits
        finally:
            FEED.reset(outer)
        return logits  # type: ignore[no-any-return]


def require_causal_attention(model: Any, plan: ModelPlan) -> None:
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


def require_turning(plan: ModelPlan) -> None:
    """Raise for a plan with layers that turn nothing, whose distances no map changes."""
    if any(layer.rotate is None for layer in plan.layers):
        raise ValueError("relative: this model has layers that turn nothing, and a map changes what is turned")


def score(logits: Tensor, targets: Tensor) -> Scores:
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
