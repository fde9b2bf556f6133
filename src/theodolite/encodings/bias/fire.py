"""FIRE: a small network of the distance, relative to how far back the query could look."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from theodolite.encodings.bias.alibi import signed_distance
from theodolite.encodings.bias.base import Content, PairwiseBias
from theodolite.encodings.bias.devices import require_beside

# As in the authors' code: keeps a query at position 0 with a threshold of 0 from dividing by zero.
_EPSILON = 1e-6


class Fire(PairwiseBias):
    """Adds `f_h(psi(r) / psi(max(L, m)))` for a query at m and a key r = m - n before it (Li et al. 2023, 2310.04418).

    psi(x) = ln(1 + |c| x), f is a network of one hidden layer (ReLU) that gives a number to each head. The threshold is
    L = |L_multiplier * init_L|. Learned: c, L_multiplier and f; the names are those of the code in the paper's
    appendix, whose state dict loads here.

    What enters f is in [0, 1] for every key that a causal mask leaves, at any length, so the bias is bounded. Up to
    position L it is a function of the distance; past L it depends on the query's position too. Distances are taken
    without sign, so keys after a query get a number, which for far ones may come from outside [0, 1]. Fractions
    have a meaning.

    Args:
        num_heads: heads of the whole model.
        hidden: width of the hidden layer.
        init_c: first value of c (per token).
        init_L: the threshold (tokens) at first.
    """

    def __init__(self, num_heads: int, *, hidden: int = 32, init_c: float = 0.1, init_L: float = 512.0) -> None:
        super().__init__(num_heads)
        if isinstance(hidden, bool) or not isinstance(hidden, int) or hidden < 1:
            raise ValueError(f"hidden: got {hidden!r}; it must be a whole number of at least 1")
        for name, number in (("init_c", init_c), ("init_L", init_L)):
            if not (math.isfinite(number) and number > 0):
                raise ValueError(f"{name}: got {number!r}; it must be a positive number")
        self.init_c, self.init_L = float(init_c), float(init_L)
        self.mlp = nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, num_heads))
        # Of one dimension, for sharded training refuses parameters without any.
        self.c = nn.Parameter(torch.empty(1))
        self.L_multiplier = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in self._layers():
            layer.reset_parameters()
        nn.init.constant_(self.c, self.init_c)
        nn.init.constant_(self.L_multiplier, 1.0)

    def _parameters_of_pairs(self) -> tuple[Tensor, ...]:
        first, last = self._layers()
        learned = first.weight[:, 0], first.bias, last.weight, last.bias, self.c, self.L_multiplier
        return tuple(p if p.dtype == torch.float64 else p.float() for p in learned)

    def _layers(self) -> tuple[nn.Linear, nn.Linear]:
        return cast(nn.Linear, self.mlp[0]), cast(nn.Linear, self.mlp[2])

    def _check(self, q_positions: Tensor, k_positions: Tensor, content: Content) -> Content:
        content = super()._check(q_positions, k_positions, content)
        require_beside(self, self.c, q_positions=q_positions, k_positions=k_positions)
        return content

    def _value(self, q_position: Tensor, k_position: Tensor, head: Tensor, *parameters: Tensor) -> Tensor:
        weight_in, bias_in, weight_out, bias_out, c, multiplier = parameters
        distance = signed_distance(q_position, k_position).abs().to(c.dtype)
        # Indexed although there is one: FlexAttention has gradients for indexed tensors alone.
        furthest = torch.maximum(q_position.to(c.dtype), (multiplier[0] * self.init_L).abs())
        relative = torch.log1p((c[0] * distance).abs()) / (torch.log1p((c[0] * furthest).abs()) + _EPSILON)
        total = bias_out[head]
        # One hidden unit at a time: no tensor of hidden units x pairs, and no matrix product for autocast to round.
        for unit in range(weight_in.shape[0]):
            active = torch.relu(weight_in[unit] * relative + bias_in[unit])
            total = total + weight_out[head, unit] * active
        return total

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes the authors' `init_L`, a constant that they store, and refuses one that is not this module's."""
        for name in ("c", "L_multiplier"):
            if isinstance(learned := state_dict.get(prefix + name), Tensor) and learned.dim() == 0:
                state_dict[prefix + name] = learned[None]
        stored = state_dict.pop(prefix + "init_L", None)
        # Stored in half precision at worst.
        if stored is not None and not math.isclose(float(stored), self.init_L, rel_tol=2.0**-8):
            args[-1].append(f"{prefix}init_L: the checkpoint has {float(stored):g}, this module {self.init_L:g}")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{self.num_heads}, hidden={self._layers()[0].out_features}, init_L={self.init_L:g}"
