"""A base that grows with the length of the sequence, by a small trained network."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from theodolite.encodings.rotate.base import Rotate
from theodolite.encodings.rotate.exact import axes_of, require_settled
from theodolite.encodings.rotate.learned_tables import (
    base_power,
    on_host,
    plan_frequencies,
    settled_frequencies,
    table_dtype,
    tables_of_plan,
)
from theodolite.encodings.rotate.lengths import Lengths, for_each_row, lengths_tensor
from theodolite.encodings.rotate.operands import layout_of
from theodolite.encodings.rotate.tables import Tables
from theodolite.plan import Rotary
from theodolite.plan.errors import is_number

# Octaves of length on either side of the reference where the units begin.
_SPREAD = 4.0
# How far all units together move the output's logit either way, at first.
_FIRST_GAIN = 0.01


class LengthBase(Rotate):
    """A rotation whose base is a trained function of the length, never falling and always within its bounds.

    With `u = log2(length / reference_length)`,
    `log theta = log theta_min + log(theta_max / theta_min) * sigmoid(offset + sum_j gain_j tanh(slope_j u + shift_j))`
    where softplus keeps `gain` and `slope` positive: whatever the weights, a longer sequence has no smaller base. At
    first the base is the plan's at `reference_length`, and within a factor of `(theta_max / theta_min) ** 0.0025` of it
    at any length.

    A trap: keys that were cached at one length do not fit queries of another. Settle the length once for a sequence
    (its longest), or turn the cached keys again whenever it changes:
    `k = rope.turn_output_back(k, rope.tables(p, lengths=before, amplitude=False))`, then
    `_, k = rope.apply_tables(None, k, rope.tables(p, lengths=after, amplitude=False))`, for pure rotations leave the
    attention factor on the keys as it is.

    Precision, dtypes and devices are those of `LearnedBase`; so is what becomes of a scaling's ramp.

    Args:
        rotary: its `rope_theta` must lie between the bounds; its own frequencies must not depend on the length.
        theta_min: the least base.
        theta_max: the largest base.
        reference_length: the length (tokens) at which the base is at first the plan's, and that others are measured
            by: that of training.
        hidden: units of the network.
    """

    def __init__(
        self, rotary: Rotary, *, theta_min: float, theta_max: float, reference_length: int, hidden: int = 8
    ) -> None:
        require_settled("rotary", rotary)
        super().__init__(**layout_of(rotary))
        for name, theta in (("theta_min", theta_min), ("theta_max", theta_max)):
            if not is_number(theta) or theta <= 1:
                raise ValueError(f"{name}: got {theta!r}; it must be a finite number above 1")
        if not theta_min < rotary.rope_theta < theta_max:
            raise ValueError(
                f"rotary: got rope_theta {rotary.rope_theta:g}; it must lie between theta_min ({theta_min:g}) and "
                f"theta_max ({theta_max:g})"
            )
        for name, number in (("reference_length", reference_length), ("hidden", hidden)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{name}: got {number!r}; it must be a whole number of at least 1")
        self.rotary, self.theta_min, self.theta_max = rotary, float(theta_min), float(theta_max)
        self.reference_length, self.hidden = reference_length, hidden
        self._inv_freq = settled_frequencies(rotary)
        for name, size in (("gain", hidden), ("slope", hidden), ("shift", hidden), ("offset", 1)):
            self.register_parameter(name, nn.Parameter(torch.empty(size, dtype=torch.float32)))
        self.reset_parameters()

    gain: nn.Parameter
    slope: nn.Parameter
    shift: nn.Parameter
    offset: nn.Parameter

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The plan's base at the reference, nearly level, with units spread over octaves; nothing is drawn."""
        nn.init.constant_(self.gain, _inverse_softplus(_FIRST_GAIN / self.hidden))
        nn.init.constant_(self.slope, _inverse_softplus(1.0))
        nn.init.zeros_(self.offset)
        if self.hidden == 1:
            nn.init.zeros_(self.shift)
        else:
            steps = torch.arange(self.hidden, dtype=torch.float32, device=self.shift.device)
            self.shift.copy_((2 * steps - (self.hidden - 1)) * (_SPREAD / (self.hidden - 1)))

    def rope_theta(self, lengths: Lengths) -> Tensor:
        """The base at each of these lengths (tokens), (B,), float64 on the CPU, with its gradient.

        Raises:
            ValueError: lengths that are not whole numbers of at least 1.
        """
        return self.rotary.rope_theta * self._log_ratio(lengths).exp()

    def tables(
        self,
        positions: Tensor,
        *,
        lengths: Lengths | None = None,
        amplitude: bool = True,
        device: torch.device | str | None = None,
    ) -> Tables:
        """cos and sin with the gradient of the network, (B, S, R/2); other arguments are those of `rotary_tables`.

        Args:
            positions: (S,) or (B, S), or (axes, B, S) where the plan has axes; (S,) and (1, S) serve all lengths.
            lengths: the tokens of each row's whole sequence, B of them, as numbers or as a tensor of integers. It is
                needed, and no default is made of the positions: keys of an earlier call would not fit.
        """
        if lengths is None:
            raise ValueError("lengths: got None; the base depends on it: give the tokens of each row's whole sequence")
        power = base_power(self.rotary, self._log_ratio(lengths)[:, None])
        positions = for_each_row(positions, power.shape[0], axes=axes_of(self.rotary))
        _, plan = plan_frequencies(self.rotary, self._inv_freq, positions, None, power.device)
        dtype = table_dtype(self.offset)
        return tables_of_plan(self.rotary, plan * power, positions, amplitude=amplitude, dtype=dtype, device=device)

    def extra_repr(self) -> str:
        return (
            f"{self.rotary!r}, theta_min={self.theta_min:g}, theta_max={self.theta_max:g}, "
            f"reference_length={self.reference_length}, hidden={self.hidden}"
        )

    def _log_ratio(self, lengths: Lengths) -> Tensor:
        """The logarithm of the base over the plan's, (B,)."""
        # One trip to the CPU for all weights.
        weights = on_host(torch.cat([self.gain, self.slope, self.shift, self.offset]))
        gain, slope, shift, offset = weights.split([self.hidden, self.hidden, self.hidden, 1])
        octaves = torch.log2(lengths_tensor(lengths).to(weights.device).double() / self.reference_length)
        units = torch.tanh(softplus(slope) * octaves[:, None] + shift)
        low = math.log(self.theta_min / self.rotary.rope_theta)
        high = math.log(self.theta_max / self.rotary.rope_theta)
        # The logit of where the plan's base stands between the bounds: a zero offset is the plan's base.
        start = math.log(-low / high)
        share = torch.sigmoid(start + offset + (softplus(gain) * units).sum(-1))
        return (low + (high - low) * share).clamp(low, high)


def _inverse_softplus(value: float) -> float:
    return math.log(math.expm1(value))
