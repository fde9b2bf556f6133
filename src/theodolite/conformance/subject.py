"""A loaded model that checks are made on: its logits, what rounding costs in it, and what a position is worth."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from theodolite.models.parts import Decoder, find_decoder
from theodolite.plan import ModelPlan

TOKENS = 48
"""What most checks run on, and the least that a model must take."""
# The largest of three draws is within a small factor of the largest of all; and every operation rounds by itself.
_DRAWS, _ALLOWED = 3, 16.0
_USUAL_LENGTH = 8192
# Fewer ids than these may be none that the config gives no meaning.
_FEWEST_IDS = 16


class Difference(NamedTuple):
    """How far two sets of logits are apart."""

    largest: float
    """In standard deviations of the model's logits; infinite where one of them is not finite."""
    first: int | None
    """Index of the first token that is off by more than was allowed."""


class Subject:
    """A causal language model of transformers, as it is loaded; nothing in it is changed for good.

    Args:
        model: in evaluation mode.
        plan: what its config says about positions.
    """

    def __init__(self, model: Any, plan: ModelPlan) -> None:
        self.model, self.plan = model, plan
        self.config: Any = model.config.get_text_config()
        self.device: torch.device = next(model.parameters()).device
        self.dtype: torch.dtype = next(p for p in model.parameters() if p.is_floating_point()).dtype
        self.decoder: Decoder | None = find_decoder(model)
        self.takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
        parameters = inspect.signature(type(model).forward).parameters
        # Its older name stands for the same argument.
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.ids = self.tokens(TOKENS)

    def tokens(self, count: int, rows: int = 1, seed: int = 0) -> Tensor:
        """Random ids (rows, count), none of them one that the config gives a meaning, where there are enough others."""
        named = (self.config.to_dict() | self.model.config.to_dict()).items()
        special = {value for name, value in named if name.endswith("token_id") and isinstance(value, int)}
        every = range(min(self.config.vocab_size, 32_000))
        plain = [i for i in every if i not in special]
        allowed = torch.tensor(plain if len(plain) >= _FEWEST_IDS else every)
        chosen = torch.randint(len(allowed), (rows, count), generator=torch.Generator().manual_seed(seed))
        return allowed[chosen].to(self.device)

    def logits(self, ids: Tensor, *, start: int | None = None, **more: Any) -> Tensor:
        """Logits (B, S, V) of one forward, float64 on the CPU; `start`: position of the first token, given as ids."""
        if start is not None:
            more["position_ids"] = torch.arange(start, start + ids.shape[1], device=self.device)[None]
            more.setdefault("attention_mask", torch.ones_like(ids))
        more.setdefault("use_cache", False)
        with torch.no_grad():
            found: Tensor = self.model(input_ids=ids, **more).logits
        return found.double().cpu()

    def step_on(self, ids: Tensor, cache: Any = None, **more: Any) -> Any:
        """One forward that reads and writes keys and values: its output, logits (B, S, V) and cache."""
        with torch.no_grad():
            return self.model(input_ids=ids, use_cache=True, **{self.cache_name: cache}, **more)

    def cache_of(self, output: Any) -> Any:
        """The keys and values that an output carries; None where there are none."""
        found = getattr(output, self.cache_name, None)
        return getattr(output, "past_key_values", None) if found is None else found

    def mask(self, ids: Tensor) -> Tensor:
        """All ones: with a mask, transformers does not take a gap between positions for another document."""
        return torch.ones_like(ids)

    @property
    def rotary(self) -> bool:
        """Whether any layer turns queries and keys."""
        return bool(self.plan.rotaries)

    @property
    def trained(self) -> int:
        """The stated length (tokens); 8,192 where none is stated."""
        return self.plan.max_position_embeddings or _USUAL_LENGTH

    @property
    def original(self) -> int | None:
        """The length (tokens) at which the frequencies begin to change; None where they never do."""
        found = [r.scaling.original_max_position_embeddings for r in self._changing]
        return min(found) if found else None

    @property
    def _changing(self) -> list[Any]:
        return [rotary for rotary in self.plan.rotaries if rotary.depends_on_length]

    @cached_property
    def not_shift_invariant(self) -> str | None:
        """Why moving all tokens together changes the logits by right; None where it must not."""
        if self.plan.embed is not None:
            return f"{self.plan.embed.kind} absolute positions"
        if any(layer.temperature is not None for layer in self.plan.layers):
            return "a temperature that grows with the position"
        if any(layer.mask.chunk is not None for layer in self.plan.layers):
            return "attention in fixed chunks"
        return None if self.takes_positions else "no position_ids: its forward counts by itself"

    @cached_property
    def base(self) -> Tensor:
        """Logits of the common tokens at positions 0, 1, 2, ..."""
        return self.logits(self.ids)

    @cached_property
    def finite(self) -> bool:
        """Whether those are numbers: where they are not, nothing that compares logits has an answer."""
        return bool(torch.isfinite(self.base).all())

    @cached_property
    def scale(self) -> float:
        """The standard deviation of the logits, the unit of all differences."""
        spread = float(self.base.std())
        return spread if math.isfinite(spread) and spread > 0 else 1.0

    @cached_property
    def tolerance(self) -> float:
        """What two equal computations may differ by, in standard deviations.

        Sixteen times the largest change when each module's output is disturbed by one rounding of its dtype (of
        float32 in a float64 model, which computes norms, softmax and tables in float32).
        """
        return _ALLOWED * self.noise

    @cached_property
    def noise(self) -> float:
        """The largest change of a logit under roundings, in standard deviations, of three draws."""
        draws = []
        for seed in range(_DRAWS):
            with _disturbed(self.model, seed):
                draws.append(float((self.logits(self.ids) - self.base).abs().max()))
        return max(draws) / self.scale

    @property
    def exact(self) -> bool:
        """Whether it is in a dtype that shows most of what there is to see."""
        return torch.finfo(self.dtype).eps <= torch.finfo(torch.float32).eps

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one."""
        return all(layer.mask.causal for layer in self.plan.layers)

    @property
    def half(self) -> int:
        """The first token that moves when half of them do: one whose chunk has tokens that stay."""
        chunks = {layer.mask.chunk for layer in self.plan.layers if layer.mask.chunk}
        middle = self.ids.shape[1] // 2
        return next((at for at in range(middle, middle + 8) if all(at % chunk for chunk in chunks)), middle)

    @cached_property
    def step(self) -> float:
        """The change of the logits, in standard deviations, when the second half moves on by one token."""
        return self.moved_on(1)

    def moved_on(self, tokens: int) -> float:
        """The change of the logits, in standard deviations, when the second half moves on."""
        positions = torch.arange(self.ids.shape[1], device=self.device)[None]
        moved = positions + tokens * (positions >= self.half)
        logits = self.logits(self.ids, position_ids=moved, attention_mask=self.mask(self.ids))
        return float((logits - self.base).abs().max()) / self.scale

    def tolerance_at(self, position: int) -> float:
        """`tolerance`, and what float32 angles cost there: as much as an error of position * 2^-23 tokens in it."""
        if not self.rotary or not self.takes_positions:
            return self.tolerance
        return self.tolerance + _ALLOWED * self.step * position * 2.0**-23

    def difference(self, one: Tensor, other: Tensor, allowed: float) -> Difference:
        """How far logits (S, V) or (B, S, V) are apart, and the first token that is off by more than `allowed`."""
        apart = (one - other).abs().amax(-1).reshape(-1, one.shape[-2]).amax(0) / self.scale
        apart = apart.nan_to_num(nan=float("inf"))
        # What is no number is off, also where no number says what is allowed.
        off = (~(apart <= allowed) | apart.isinf()).nonzero()
        return Difference(float(apart.max()), int(off[0]) if len(off) else None)


@contextmanager
def _disturbed(model: nn.Module, seed: int) -> Iterator[None]:
    """Every module without parts gives its output with one more rounding of random sign."""
    generator = torch.Generator().manual_seed(seed)

    def disturb(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        eps = max(torch.finfo(output.dtype).eps, torch.finfo(torch.float32).eps)
        signs = (torch.randint(2, output.shape, generator=generator) * 2 - 1).to(output.device)
        # In its own dtype the factor would be 1.
        return (output.double() * (1 + eps * signs)).to(output.dtype)

    handles = [m.register_forward_hook(disturb) for m in model.modules() if not any(True for _ in m.children())]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
