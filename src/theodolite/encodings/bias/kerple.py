"""KERPLE: a learned kernel of the distance, logarithmic or a power."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from theodolite.encodings.bias.alibi import signed_distance
from theodolite.encodings.bias.base import Content, PairwiseBias
from theodolite.encodings.bias.devices import require_beside

_KINDS = ("log", "power")
# The authors' least value of either parameter, and the largest power that is a kernel.
_LEAST, _LARGEST_POWER = 0.01, 2.0


class Kerple(PairwiseBias):
    """Adds a kernel of the distance r = |m - n| with two numbers learned for each head (Chi et al. 2022, 2205.09921).

    "log" is `-r1 ln(1 + r2 r)`, "power" is `-r1 r^r2`. The kernels are those of the distance, the same in both
    directions. Fractions have a meaning.

    The formula needs r1 > 0, and r2 > 0 or 0 < r2 <= 2. As in the authors' code the parameters are these numbers
    themselves, held to at least 0.01 (a power to at most 2), with the gradient that they have there. The authors
    overwrite parameters in each forward; here a forward changes nothing: a parameter out of its range is read as the
    nearest number in it, and `clamp_parameters`, after each step of the optimizer, does what they do. Without it a
    parameter that is long pushed outwards is as long in coming back.

    In the authors' checkpoints r1 is `bias_p` and r2 `bias_a` for "log", and the other way round for "power".

    Args:
        num_heads: heads of the whole model.
        kind: "log" or "power".
    """

    by_distance = True

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

    @torch.no_grad()
    def clamp_parameters(self) -> None:
        """Put parameters that have left their range back to its end."""
        self.r1.copy_(self._in_range(self.r1, None))
        self.r2.copy_(self._in_range(self.r2, self._most))

    @property
    def _most(self) -> float | None:
        return _LARGEST_POWER if self.kind == "power" else None

    @staticmethod
    def _in_range(r: Tensor, most: float | None) -> Tensor:
        return r.clamp(_LEAST, most)

    def _parameters_of_pairs(self) -> tuple[Tensor, ...]:
        r1, r2 = (r if r.dtype == torch.float64 else r.float() for r in (self.r1, self.r2))
        # The value of the clamp, the gradient of the parameter.
        return tuple(self._in_range(r, most).detach() + (r - r.detach()) for r, most in ((r1, None), (r2, self._most)))

    def _check(self, q_positions: Tensor, k_positions: Tensor, content: Content) -> Content:
        content = super()._check(q_positions, k_positions, content)
        require_beside(self, self.r1, q_positions=q_positions, k_positions=k_positions)
        return content

    def _value(self, q_position: Tensor, k_position: Tensor, head: Tensor, *parameters: Tensor) -> Tensor:
        r1, r2 = parameters
        distance = signed_distance(q_position, k_position).abs().to(r1.dtype)
        if self.kind == "log":
            return -r1[head] * torch.log1p(r2[head] * distance)
        return -r1[head] * distance ** r2[head]

    def extra_repr(self) -> str:
        return f"{self.num_heads}, kind={self.kind!r}"
