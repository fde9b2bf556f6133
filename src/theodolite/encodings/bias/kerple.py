"""KERPLE: a learned kernel of the distance, logarithmic or a power."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.encodings.bias.alibi import signed_distance
from theodolite.encodings.bias.base import PairwiseBias

_KINDS = ("log", "power")
# The authors' least value of either parameter, and the largest power that is a kernel.
_LEAST, _LARGEST_POWER = 0.01, 2.0


class Kerple(PairwiseBias):
    """Adds a kernel of the distance r = |m - n| with two numbers learned for each head (Chi et al. 2022, 2205.09921).

    "log" is `-r1 ln(1 + r2 r)`, "power" is `-r1 r^r2`. The kernels are those of the distance, the same in both
    directions. Fractions have a meaning.

    The formula needs r1 > 0, and r2 > 0 or 0 < r2 <= 2. As in the authors' code, numbers are held to at least 0.01 (and
    a power to at most 2) and are the parameters themselves, not a function of them. The authors overwrite a parameter
    that has left its range; here it is read at the bound, and its gradient leads back and no further out. In their
    checkpoints r1 is `bias_p` and r2 is `bias_a` for "log", and the other way round for "power".

    Args:
        num_heads: heads of the whole model.
        kind: "log" or "power".
    """

    def __init__(self, num_heads: int, *, kind: str = "log") -> None:
        super().__init__(num_heads)
        if kind not in _KINDS:
            raise ValueError(f"kind: got {kind!r}; it must be one of {', '.join(_KINDS)}")
        self.kind = kind
        self.r1 = nn.Parameter(torch.empty(num_heads))
        self.r2 = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As the authors draw them: the factor of "log" and the exponent of "power" up to 2, the other up to 1."""
        nn.init.uniform_(self.r1, 0, 2 if self.kind == "log" else 1)
        nn.init.uniform_(self.r2, 0, 1 if self.kind == "log" else 2)

    def _parameters_of_pairs(self) -> tuple[Tensor, ...]:
        r1, r2 = (r if r.dtype == torch.float64 else r.float() for r in (self.r1, self.r2))
        return _hold(r1, r2, self.kind == "power")

    def _value(self, q_position: Tensor, k_position: Tensor, head: Tensor, *parameters: Tensor) -> Tensor:
        r1, r2 = parameters
        distance = signed_distance(q_position, k_position).abs().to(r1.dtype)
        if self.kind == "log":
            return -r1[head] * torch.log1p(r2[head] * distance)
        return -r1[head] * distance ** r2[head]

    def extra_repr(self) -> str:
        return f"{self.num_heads}, kind={self.kind!r}"


class _Hold(torch.autograd.Function):
    """A clamp whose gradient vanishes only where a descent would go further out; a plain one never comes back."""

    @staticmethod
    def forward(ctx: Any, r1: Tensor, r2: Tensor, is_power: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(r1, r2)
        ctx.is_power = is_power
        return r1.clamp(_LEAST), r2.clamp(_LEAST, _LARGEST_POWER if is_power else None)

    @staticmethod
    def backward(ctx: Any, grad1: Tensor, grad2: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        r1, r2 = ctx.saved_tensors
        outward1, outward2 = (r1 < _LEAST) & (grad1 > 0), (r2 < _LEAST) & (grad2 > 0)
        if ctx.is_power:
            outward2 = outward2 | (r2 > _LARGEST_POWER) & (grad2 < 0)
        return grad1.masked_fill(outward1, 0), grad2.masked_fill(outward2, 0), None


_hold: Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]] = _Hold.apply
