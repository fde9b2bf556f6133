"""ALiBi: a penalty that grows with the distance, at a fixed slope for each head."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from theodolite.encodings.bias.base import PairwiseBias
from theodolite.encodings.heads import require_heads

_RULES = ("published", "geometric")


def alibi_slopes(num_heads: int, *, rule: str = "published", bias_max: float = 8.0) -> tuple[float, ...]:
    """The slopes of the H heads, exact.

    Where H is a power of two, both rules give `2^(-bias_max * h / H)` for h = 1 ... H. They differ for other counts:

    - "published" is what ALiBi's authors, BLOOM, Falcon and MPT compute, all in the same order: the slopes of the
      power of two m below H, then the first, third, fifth ... of the slopes for 2m;
    - "geometric" keeps to the formula for any H, as the text of the paper reads and some libraries do
      (attention-gym). A checkpoint that was trained with one is wrong with the other.

    Args:
        num_heads: H, heads of the whole model.
        rule: as said.
        bias_max: the exponent of the smallest slope; 8 but for MPT, where `alibi_bias_max` sets it.

    Raises:
        ValueError: another rule, no head, or a `bias_max` that is not a positive number.
    """
    require_heads("num_heads", num_heads)
    if rule not in _RULES:
        raise ValueError(f"rule: got {rule!r}; it must be one of {', '.join(_RULES)}")
    if not (math.isfinite(bias_max) and bias_max > 0):
        raise ValueError(f"bias_max: got {bias_max!r}; it must be a positive number")
    if rule == "geometric":
        return _geometric(num_heads, bias_max)
    below = 1 << (num_heads.bit_length() - 1)
    return _geometric(below, bias_max) + _geometric(2 * below, bias_max)[::2][: num_heads - below]


def _geometric(count: int, bias_max: float) -> tuple[float, ...]:
    return tuple(2.0 ** (-bias_max * number / count) for number in range(1, count + 1))


def signed_distance(q_position: Tensor, k_position: Tensor) -> Tensor:
    """Query minus key. Integers are widened first: those of 8 bits and unsigned ones wrap around."""
    q, k = (p if p.is_floating_point() else p.to(torch.int64) for p in (q_position, k_position))
    return q - k


class ALiBi(PairwiseBias):
    """Adds `-slope_h * (m - n)` for a query at m and a key at n (Press et al. 2021, 2108.12409).

    Holds its slopes as plain numbers: no parameter, no buffer. The bias is float32 whatever the model is cast to; in
    half precision it could not tell neighbouring distances apart. Fractions have a meaning: the slope is per token.

    BLOOM, MPT and Falcon add `slope_h * n` instead: the two differ by a number that all keys of a query share, which
    the softmax takes out. Falcon multiplies scores and bias together by `head_dim ** -0.5`; to run its checkpoints,
    multiply its slopes so and give them to `from_slopes`.

    Args:
        num_heads: heads of the whole model.
        rule, bias_max: how heads get their slopes; see `alibi_slopes`.
        symmetric: distances count in both directions, `-slope_h * |m - n|`, as encoders need. By default the bias is
            the causal one, which rewards keys after the query (`+slope_h` for each token): the mask must hide them.
    """

    by_distance = True

    def __init__(
        self, num_heads: int, *, rule: str = "published", bias_max: float = 8.0, symmetric: bool = False
    ) -> None:
        super().__init__(num_heads)
        self._slopes = alibi_slopes(num_heads, rule=rule, bias_max=bias_max)
        self.symmetric = symmetric

    @classmethod
    def from_slopes(cls, slopes: Iterable[float], *, symmetric: bool = False) -> ALiBi:
        """With given slopes, one for each head of the whole model; 0 leaves a head without bias."""
        given = tuple(float(slope) for slope in slopes)
        for slope in given:
            if not (math.isfinite(slope) and slope >= 0):
                raise ValueError(f"slopes: got {slope}; each must be a number of at least 0")
        bias = cls(len(given), symmetric=symmetric)
        bias._slopes = given
        return bias

    def slopes(self, heads: slice | None = None) -> Tensor:
        """(H,), float32, on the CPU: the bias is `-slope * distance` for every pair that a causal mask leaves."""
        return torch.tensor(self._slopes[self._heads(heads)], dtype=torch.float32, device="cpu")

    def _value(self, q_position: Tensor, k_position: Tensor, head: Tensor, *parameters: Tensor) -> Tensor:
        (slopes,) = parameters
        distance = signed_distance(q_position, k_position)
        if self.symmetric:
            distance = distance.abs()
        return -slopes[head] * distance.to(slopes.dtype)

    def _parameters_of_pairs(self) -> tuple[Tensor, ...]:
        return (self.slopes(),)

    def extra_repr(self) -> str:
        return f"{self.num_heads}, slopes {self._slopes[0]:.4g} to {self._slopes[-1]:.4g}, symmetric={self.symmetric}"
