"""Multipliers that grow with the position and learn nothing: steps (Llama 4), logarithms, powers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from theodolite import plan
from theodolite.encodings.scale.base import Scale
from theodolite.plan.errors import PlanError, is_number, require_given, require_whole
from theodolite.positions.checks import require_integers

# A position below 0, as padding may have, counts as the first: factors stay finite everywhere, and so do the gradients
# of whatever they multiply.


class Temperature(Scale):
    """`1 + beta * ln(1 + floor((m + shift) / length))` at position m.

    Llama 4 has beta 0.1, length 8192, `shift=1`, on its layers without rotation only: the first change is at m = 8191.
    Ministral 3 and Mistral Small 4 have beta 0.1, their original length (16384, 8192), no shift, on all layers, after
    rotation: the first change is at m = length. The quotient is integer arithmetic, exact at any position.

    Args:
        beta: what each factor of e in the number of steps adds.
        length: tokens of one step.
        shift: added to the position first.

    Raises:
        ValueError: a length below 1, a shift below 0, a beta that is no number; positions that are not integers.
    """

    def __init__(self, *, beta: float, length: int, shift: int = 0) -> None:
        super().__init__()
        require_given(beta=beta, length=length, shift=shift)
        self.plan = plan.Temperature(beta=beta, length=length, shift=shift)

    @classmethod
    def from_plan(cls, temperature: plan.Temperature) -> Temperature:
        """The scale that a layer's plan asks for."""
        return cls(beta=temperature.beta, length=temperature.length, shift=temperature.shift)

    def _factors(self, positions: Tensor, heads: slice | None) -> Tensor:
        require_integers("positions", positions)
        steps = torch.div(positions.long().clamp(min=0) + self.plan.shift, self.plan.length, rounding_mode="floor")
        return (1 + self.plan.beta * steps.to(torch.float32).log1p())[:, None]

    def extra_repr(self) -> str:
        return f"beta={self.plan.beta}, length={self.plan.length}, shift={self.plan.shift}"


class LogScale(Scale):
    """`1 + alpha * ln(max(1, (m + 1) / length))` at position m: exactly 1 for the first `length` tokens.

    Inkling 2 has it on its global layers, on the query and on the bias alike (`log_scaling_alpha`,
    `log_scaling_n_floor` of its config).

    Args:
        alpha: what each factor of e in the number of tokens adds.
        length: tokens from which it begins to grow.

    Raises:
        ValueError: an alpha that is no number, a length below 1.
    """

    def __init__(self, *, alpha: float = 0.1, length: int = 128_000) -> None:
        super().__init__()
        require_given(length=length)
        require_whole(length=length)
        _require_number("alpha", alpha)
        self.alpha = alpha
        self.length = length

    def _factors(self, positions: Tensor, heads: slice | None) -> Tensor:
        # ln(n / L) = ln(1 + (n - L) / L), which is exact at n = L and keeps its digits just past it.
        past = tokens_seen(positions, after=self.length)
        return (1 + self.alpha * (past / self.length).log1p())[:, None]

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, length={self.length}"


class LogN(LogScale):
    """`max(1, ln(m + 1) / ln(train_length))` at position m, where m + 1 is the number of tokens that it sees.

    For inference past the trained length with weights that never saw it (Su 2021; Chiang & Cholak 2022; Qwen 1's
    `use_logn_attn`). It is exactly 1 within the trained length, so training there is not changed by it.

    Args:
        train_length: tokens that the model was trained on, at least 2.

    Raises:
        ValueError: a length below 2.
    """

    def __init__(self, train_length: int) -> None:
        require_given(train_length=train_length)
        require_whole(least=2, train_length=train_length)
        super().__init__(alpha=1 / math.log(train_length), length=train_length)

    def extra_repr(self) -> str:
        return f"train_length={self.length}"


class PowerScale(Scale):
    """`(1 + (m + 1) / length) ^ exponent` at position m: Beam's, on its layers without rotation.

    Args:
        exponent: 0.1 in Beam.
        length: tokens; 2048 in Beam.

    Raises:
        ValueError: an exponent that is no number, a length below 1.
    """

    def __init__(self, *, exponent: float = 0.1, length: int = 2048) -> None:
        super().__init__()
        require_given(length=length)
        require_whole(length=length)
        _require_number("exponent", exponent)
        self.exponent = exponent
        self.length = length

    def _factors(self, positions: Tensor, heads: slice | None) -> Tensor:
        return (self.exponent * (tokens_seen(positions) / self.length).log1p()).exp()[:, None]

    def extra_repr(self) -> str:
        return f"exponent={self.exponent}, length={self.length}"


def tokens_seen(positions: Tensor, *, after: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """How many tokens a causal query at each position sees, m + 1, itself included; those past `after`, 0 at least.

    Integers are counted as integers, and rounded once.
    """
    counted = positions if positions.is_floating_point() else positions.long()
    return (counted.clamp(min=0) + (1 - after)).clamp(min=0).to(dtype)


def _require_number(name: str, value: float) -> None:
    if not is_number(value):
        raise PlanError(name, value, "it must be a finite number")
