"""A document of any length through a causal language model, a chunk at a time, with what is kept bounded or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from theodolite.models.errors import LoadError
from theodolite.models.feed import FEED, NAME, Attends, Feed, Prefix
from theodolite.models.kept import fill_prefix, prefix_tensors, read_kept, write_kept
from theodolite.models.mapped import MappedFeed, bare
from theodolite.models.patch import current_plan, patched
from theodolite.models.reader import Borrowed, require_causal_attention, require_turning, score
from theodolite.models.window import Kept, Window, WindowFeed
from theodolite.plan import ModelPlan
from theodolite.positions.checks import require_count, require_integers
from theodolite.positions.relative import RelativeMap

_WHAT = "a saved stream"


class Streamed(NamedTuple):
    """What a chunk gave: of the tokens `start` to `start + n - 1`, counted from the first of the text."""

    start: int
    log_probs: Tensor | None
    """(n,) float32 on the CPU: the logarithm of each token's probability given those before it."""
    states: Tensor | None
    """(n, hidden_size): the last hidden state of each token, after the final norm."""


class Stream:
    """Reads a text through a model, however it is cut: the same numbers in one piece, in chunks, or resumed.

    The model is patched with the plan while tokens are read, and as it was in between.

    Args:
        model: a causal LM of transformers with rotary positions and attention layers only.
        plan: its positions; those that it is patched with by default.
        window: each token sees so many tokens up to itself, and memory stays flat; None keeps everything.
        sinks: with a window, the first so many tokens are seen as well, as if they stood before a full window: no
            distance exceeds `sinks + window - 1`.
        chunk: tokens of one forward. Of no effect on what comes out.
        relative: maps distances beyond those that the model was trained for (`theodolite.positions`: ReRoPE, leaky
            ReRoPE, Self-Extend, LM-Infinite, dual chunks), in layers without a window of their own.

    Example:
        >>> from theodolite import load  # doctest: +SKIP
        >>> loaded = load("SmolLM2-135M-Instruct")  # doctest: +SKIP
        >>> stream = Stream(loaded.model, loaded.plan, window=2048, sinks=4)  # doctest: +SKIP
        >>> for part in stream.feed(tokens):  # doctest: +SKIP
        ...     print(part.start, float(part.log_probs.mean()))
    """

    def __init__(
        self,
        model: Any,
        plan: ModelPlan | None = None,
        *,
        window: int | None = None,
        sinks: int = 4,
        chunk: int = 1024,
        relative: RelativeMap | None = None,
    ) -> None:
        plan = current_plan(model) if plan is None else plan
        if plan is None:
            raise ValueError("plan: got None, and the model is not patched; give the plan that `load` has read")
        require_count("chunk", chunk, least=1)
        require_count("sinks", sinks, least=0)
        if window is not None:
            require_count("window", window, least=1)
            if any(layer.mask.chunk is not None for layer in plan.layers):
                raise ValueError("window: this model has layers that see chunks of positions; they take no window")
        if relative is not None and window is not None:
            raise ValueError("relative: got a map of distances and a window; give one of them")
        if relative is not None:
            require_turning(plan)
        require_causal_attention(model, plan)
        self.relative = relative
        self.model, self.plan, self.chunk = model, plan, chunk
        self.window, self.sinks = window, sinks if window is not None else 0
        layers = len(plan.layers)
        self._window = Window(window, sinks, 0, [None] * layers, [None] * layers) if window is not None else None
        self._prefix = Prefix(layers, 0) if window is None else None
        # Read, but not yet fed: its probability is known, what it makes of the next token's is not asked for yet.
        self._waiting: int | None = None

    @property
    def length(self) -> int:
        """Tokens that were given so far."""
        return self._read + (self._waiting is not None)

    def feed(self, tokens: Tensor, *, states: bool = False) -> Iterator[Streamed]:
        """Read more tokens (n,), integers; what each chunk gave comes as soon as it is read.

        The text's first token has no probability: `log_probs` begins with its second. Stopped half-way, what was
        yielded has been read, and `length` says from where to go on.

        Args:
            states: give hidden states instead, of the first token too. One stream gives the one or the other.
        """
        require_integers("tokens", tokens, dims=(1,))
        if states and self._waiting is not None:
            raise ValueError("states: this stream has given log-probabilities so far; make another for states")
        waiting = [] if self._waiting is None else [self._waiting]
        line = torch.cat((torch.tensor(waiting, dtype=torch.int64), tokens.cpu().long()))
        last = len(line) if states else len(line) - 1
        if len(line) and not states and last == 0:
            self._waiting = int(line[0])
        if self._prefix is not None:
            # At once: grown in steps, old and new memory are there together.
            self._prefix.make_room(self._read + last)
        for start in range(0, last, self.chunk):
            stop, at = min(start + self.chunk, last), self._read
            out = self._forward(line[start:stop], states)
            if states:
                yield Streamed(at, None, out)
            else:
                self._waiting = int(line[stop])
                yield Streamed(at + 1, -score(out, line[start + 1 : stop + 1]).nll, None)

    def save(self, path: str | Path) -> None:
        """Write what is kept, for `resume`; complete or not at all."""
        if self._prefix is not None:
            tensors = prefix_tensors(self._prefix, len(self.plan.layers))
        else:
            assert self._window is not None
            tensors = {
                f"{place}.{kind}.{layer}": x
                for place, kept in (("first", self._window.first), ("last", self._window.last))
                for layer, pair in enumerate(kept)
                if pair is not None
                for kind, x in zip("kv", pair, strict=True)
            }
        write_kept(path, _WHAT, tensors, self._identity(), waiting=self._waiting, length=self._read)

    def resume(self, path: str | Path) -> None:
        """Go on from what `save` wrote, with the same model, plan, window and sinks.

        Raises:
            LoadError: no such file, or one of another model, plan or setting.
        """
        tensors, state = read_kept(path, _WHAT, self._identity())
        layers, length = len(self.plan.layers), state["length"]
        if self._prefix is not None:
            prefix = Prefix(layers, length)
            fill_prefix(prefix, tensors, torch.arange(length), layers, path, self.model)
            self._prefix = prefix
        else:
            assert self._window is not None
            kept = [[_pair(tensors, f"{place}.{{}}.{i}", path) for i in range(layers)] for place in ("first", "last")]
            device = self.model.device
            self._window.first, self._window.last = (
                [None if pair is None else (pair[0].to(device), pair[1].to(device)) for pair in place] for place in kept
            )
            self._window.length = length
        self._waiting = state["waiting"]

    @property
    def _read(self) -> int:
        return self._window.length if self._window is not None else self._prefix.length if self._prefix else 0

    def _identity(self) -> dict[str, Any]:
        config = self.model.config
        return {
            "model": f"{type(self.model).__name__} {getattr(config, '_name_or_path', '')}".strip(),
            "weights": _digest(self.model),
            "dtype": str(self.model.dtype),
            "plan": repr(self.plan),
            "window": self.window,
            "sinks": self.sinks,
            "relative": repr(self.relative),
        }

    def _forward(self, tokens: Tensor, states: bool) -> Tensor:
        """Logits (n, V), or hidden states (n, hidden_size), of tokens that follow those read."""
        positions = torch.arange(self._read, self._read + len(tokens))[None]
        feed: Attends
        plan = self.plan
        if self._window is not None:
            feed = WindowFeed(self.plan, self._window, positions)
        elif self._prefix is not None:
            if self.relative is None:
                feed = Feed(self.plan, self._prefix, positions, writing=True)
            else:
                feed, plan = MappedFeed(self.plan, self.relative, self._prefix, positions), bare(self.plan)
        device = self.model.device
        given = {"input_ids": tokens[None].to(device), "position_ids": positions.to(device), "use_cache": False}
        outer = FEED.set(feed)
        try:
            with patched(self.model, plan), Borrowed(self.model, NAME), torch.inference_mode():
                out = self.model.base_model(**given).last_hidden_state if states else self.model(**given).logits
        finally:
            FEED.reset(outer)
        if isinstance(feed, WindowFeed):
            feed.commit()
        elif self._prefix is not None:
            self._prefix.advance(positions[0])
        return out[0]  # type: ignore[no-any-return]


def stream(
    model: Any,
    tokens: Tensor,
    plan: ModelPlan | None = None,
    *,
    window: int | None = None,
    sinks: int = 4,
    chunk: int = 1024,
    relative: RelativeMap | None = None,
    states: bool = False,
) -> Iterator[Streamed]:
    """A document (n,) of any length through a causal LM: `Stream(model, plan, ...).feed(tokens)`.

    Per-token log-probabilities, or last hidden states, as they come. With a `window` memory does not grow.
    """
    return Stream(model, plan, window=window, sinks=sinks, chunk=chunk, relative=relative).feed(tokens, states=states)


def _pair(tensors: dict[str, Tensor], name: str, path: str | Path) -> Kept | None:
    k, v = (tensors.get(name.format(kind)) for kind in "kv")
    if (k is None) != (v is None):
        raise LoadError(f"{path}: {name.format('k')} is not as it was written")
    return None if k is None or v is None else (k, v)


def _digest(model: Any) -> str:
    """A few numbers of a few weights: another checkpoint of the same shape differs in them."""
    sums = []
    for parameter in list(model.parameters())[:: max(1, len(list(model.parameters())) // 8)]:
        sums.append(f"{float(parameter.detach().flatten()[:4096].double().abs().sum()):.6g}")
    return " ".join(sums)
