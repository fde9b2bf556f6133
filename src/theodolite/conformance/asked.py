"""A function that turns queries and keys, and what it claims to be. Shapes: B, H, S, D as everywhere; P pairs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from theodolite.conformance.measured import Table
from theodolite.plan import Rotary

Rotate = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
ROUNDINGS = 8 * 2.0**-24
"""What one table entry, one rotation and one rounding in float32 may cost, for vectors of length 1."""


class Asked:
    """The function under test, its claim, and inputs to ask it with.

    Args:
        rotate: takes q, k and positions (S,) or (B, S), returns q and k.
        rotary: what it claims to be, its length settled.
        heads_first: (B, H, S, D); otherwise (B, S, H, D).
        length: tokens up to which angles must be right to float32's own rounding.
        furthest: the largest position that is asked for (tokens).
    """

    def __init__(self, rotate: Rotate, rotary: Rotary, *, heads_first: bool, length: int, furthest: int) -> None:
        self.rotate, self.rotary, self.heads_first = rotate, rotary, heads_first
        self.length, self.furthest = length, furthest
        self.inv_freq = rotary.inv_freq()
        self.amplitude = rotary.attention_factor()
        count = rotary.rotary_dim // 2
        start = rotary.head_dim - rotary.rotary_dim if rotary.trailing else 0
        step = (2, 1) if rotary.interleaved else (1, count)
        self.pairs = [(start + step[0] * i, start + step[0] * i + step[1]) for i in range(count)]

    def places(self, *positions: int) -> list[int]:
        """These positions (tokens), each at most the furthest that is asked for."""
        return [min(position, self.furthest) for position in positions]

    def with_ends(self, *, furthest: int) -> Asked:
        """The same up to another furthest position."""
        length = min(self.length, furthest + 1)
        return Asked(self.rotate, self.rotary, heads_first=self.heads_first, length=length, furthest=furthest)

    def of_keys(self) -> Asked:
        """The same with keys in the place of queries: what is asked of queries is asked of keys."""

        def exchanged(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            turned_k, turned_q = self.rotate(k, q, positions)
            return turned_q, turned_k

        ends = {"length": self.length, "furthest": self.furthest}
        return Asked(exchanged, self.rotary, heads_first=self.heads_first, **ends)

    @property
    def turning(self) -> list[int]:
        """All channels that are in a pair."""
        return sorted(channel for pair in self.pairs for channel in pair)

    def turn(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Call the function with q and k of (B, H, S, D), whatever its own order of axes is."""
        # A module that learns would give numbers that carry gradients, which nobody asked for.
        with torch.set_grad_enabled(q.requires_grad or k.requires_grad):
            if self.heads_first:
                return self.rotate(q, k, positions)
            turned = self.rotate(q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous(), positions)
            return turned[0].transpose(1, 2), turned[1].transpose(1, 2)

    def turn_both(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        """Queries and keys turned, (B, H + Hkv, S, D): the heads of keys after those of queries."""
        return torch.cat(self.turn(q, k, positions), dim=1)

    def inputs(self, *, heads: int, tokens: int, rows: int = 1, key_heads: int | None = None) -> tuple[Tensor, Tensor]:
        """Random queries and keys of length 1, float32."""
        generator = torch.Generator().manual_seed(0)
        made = []
        for count in (heads, heads if key_heads is None else key_heads):
            x = torch.randn(rows, count, tokens, self.rotary.head_dim, generator=generator)
            made.append(x / x.norm(dim=-1, keepdim=True))
        return made[0], made[1]

    def units(self, positions: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Unit queries turned at positions: (P, N, D), head i with 1 in the first channel of pair i; float64."""
        q = torch.zeros(1, len(self.pairs), len(positions), self.rotary.head_dim, dtype=dtype)
        for number, (first, _) in enumerate(self.pairs):
            q[0, number, :, first] = 1
        return self.turn(q, q.clone(), torch.tensor(positions))[0][0].double()

    def table(self, positions: list[int]) -> Table:
        """The cosines and sines that the function turns by, pair by pair."""
        turned = self.units(positions).detach()
        rows = range(len(self.pairs))
        cos = torch.stack([turned[i, :, self.pairs[i][0]] for i in rows], dim=-1)
        sin = torch.stack([turned[i, :, self.pairs[i][1]] for i in rows], dim=-1)
        return Table(
            positions=np.asarray(positions),
            cos=cos.numpy(),
            sin=sin.numpy(),
            inv_freq=self.inv_freq,
            amplitude=self.amplitude,
            rope_theta=self.rotary.rope_theta,
            table_eps=2.0**-23,
        )

    def exact(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys (B, H, S, D) turned as claimed, in float64."""
        angles = positions.double()[..., None] * torch.from_numpy(self.inv_freq)
        angles = angles.unsqueeze(-3) if angles.dim() == 3 else angles
        cos, sin = self.amplitude * angles.cos(), self.amplitude * angles.sin()
        out = x.double().clone()
        first, second = ([pair[i] for pair in self.pairs] for i in (0, 1))
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., second] * cos + x[..., first] * sin
        return out


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference of two tensors, infinite where it is not a number."""
    return float((one.detach().double() - other.detach().double()).abs().nan_to_num(nan=float("inf")).max())
