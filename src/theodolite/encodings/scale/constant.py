"""One number for all scores, and the scalings that ask for one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from theodolite.encodings.scale.base import Scale
from theodolite.plan.errors import LONGEST, require_between, require_given, require_positive
from theodolite.plan.scaling import Scaling


class ConstantScale(Scale):
    """The same multiplier at every position.

    Args:
        value: above 0.

    Raises:
        ValueError: a value that is not a finite number above 0.
    """

    def __init__(self, value: float) -> None:
        super().__init__()
        require_given(value=value)
        require_positive(value=value)
        self.value = value

    @classmethod
    def squared_attention_factor(cls, scaling: Scaling) -> ConstantScale:
        """A scaling's attention factor where cos and sin do not carry it, squared: once for q and once for k.

        YaRN's temperature, `(0.1 ln s + 1)^2`. Use it with tables of amplitude 1 (`attention_factor_given=1.0`), and
        only where all channels turn: on cos and sin the factor does not reach the others, here it would.
        """
        return cls(scaling.attention_factor() ** 2)

    @classmethod
    def latent(cls, scaling: Scaling) -> ConstantScale:
        """What latent attention (DeepSeek V2 and V3, Kimi K2) multiplies all its scores by besides: `mscale_all_dim`'s.

        It reaches the channels that turn and those that do not, and comes on top of whatever factor is on cos and sin:
        1.589626 for DeepSeek V2-Lite, 1.873854 for V3. Not where a plan's `score_scale` has it already.
        """
        return cls(scaling.score_factor())

    @classmethod
    def drope(cls, *, coefficient: float, factor: float) -> ConstantScale:
        """DroPE's `1 + c ln s`, for a model whose rotation was dropped, at s times its trained length (2512.12167).

        c is 0.412 for the paper's 494 M model trained from scratch and 0.103 for SmolLM.
        """
        require_given(coefficient=coefficient, factor=factor)
        require_positive(coefficient=coefficient)
        require_between(1, LONGEST, factor=factor)
        return cls(1 + coefficient * math.log(factor))

    def _factors(self, positions: Tensor, heads: slice | None) -> Tensor:
        return torch.full_like(positions, self.value, dtype=torch.float32)[:, None]

    def extra_repr(self) -> str:
        return f"{self.value}"
