"""Rotary tables that are exact and stay so, and the module that applies them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from theodolite.kernels import rotate
from theodolite.plan import Rotary

LARGEST_POSITION = 2**24
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


class Tables(NamedTuple):
    """cos and sin of one rotary encoding at given positions: (S, R/2) or (B, S, R/2), float32."""

    cos: Tensor
    sin: Tensor


def rotary_tables(rotary: Rotary, positions: Tensor, *, device: torch.device | str | None = None) -> Tables:
    """cos and sin, times the attention factor, at the given positions.

    Angles are computed in float64 on the CPU and rounded once: every entry is within 6e-8 of the true value
    (times the attention factor, where that is above 1), at any position up to 2**24. Nothing is remembered
    between calls, and autocast, the default dtype and the default device have no say.

    Args:
        positions: (S,) or (B, S), or (axes, B, S) where the encoding has `mrope_section`. Integers, or
            float32 or float64 where fractions are meant; half precision is refused, for it cannot count past 256.
        device: where the tables are put; that of `positions` by default.

    Raises:
        ValueError: positions of another dtype or shape, negative beyond -2**24 or past 2**24, or an encoding
            whose frequencies depend on the length (call `rotary.at_length(tokens)` first).
    """
    if rotary.depends_on_length:
        raise ValueError(
            f"rotary: {rotary.scaling.rope_type!r} has frequencies that depend on the length of the sequence; "
            "settle them with rotary.at_length(tokens), once for each sequence"
        )
    device = positions.device if device is None else torch.device(device)
    host = _checked(positions, rotary)
    angles = _angles(rotary, host)
    factor = rotary.attention_factor()
    # from_numpy keeps float32 whatever the default dtype; .to() is no autocast operation.
    cos = torch.from_numpy(np.asarray(np.cos(angles) * factor, dtype=np.float32)).to(device)
    sin = torch.from_numpy(np.asarray(np.sin(angles) * factor, dtype=np.float32)).to(device)
    return Tables(cos, sin)


def _checked(positions: Tensor, rotary: Rotary) -> np.ndarray:
    if positions.dtype not in (*_INTEGERS, torch.float32, torch.float64):
        raise ValueError(f"positions: got {positions.dtype}; give integers, or float32 or float64 for fractions")
    allowed = (3,) if rotary.mrope_section else (1, 2)
    if positions.dim() not in allowed:
        shapes = "(axes, B, S)" if rotary.mrope_section else "(S,) or (B, S)"
        raise ValueError(f"positions: got shape {tuple(positions.shape)}; it must be {shapes}")
    if rotary.mrope_section and positions.shape[0] != len(rotary.mrope_section):
        raise ValueError(f"positions: got {positions.shape[0]} axes; mrope_section has {len(rotary.mrope_section)}")
    host = positions.detach().cpu().numpy().astype(np.float64)
    if host.size and not np.abs(host).max() <= LARGEST_POSITION:
        worst = host.flat[np.argmax(np.abs(host))]
        raise ValueError(f"positions: got {worst}; the tables are exact up to 2**24 = {LARGEST_POSITION}")
    return host


def _angles(rotary: Rotary, positions: np.ndarray) -> np.ndarray:
    inv_freq = rotary.inv_freq()
    if not rotary.mrope_section:
        return np.asarray(positions[..., None] * inv_freq)
    axis = axis_of_pairs(rotary)
    return np.asarray(np.moveaxis(positions, 0, -1)[..., axis] * inv_freq)


def axis_of_pairs(rotary: Rotary) -> np.ndarray:
    """Which axis of the positions each pair follows, shape (R/2,), for an encoding with `mrope_section`."""
    section = rotary.mrope_section
    assert section is not None
    if not rotary.mrope_interleaved:
        return np.repeat(np.arange(len(section)), section)
    # Axis a > 0 takes pairs a, a + n, a + 2n, ... until its section is full; axis 0 takes what is left.
    axis = np.zeros(sum(section), dtype=np.int64)
    for a, pairs in enumerate(section[1:], start=1):
        axis[a : a + pairs * len(section) : len(section)] = a
    return axis


class RotaryEmbedding(nn.Module):
    """Turns queries and keys by position. Holds a plan and nothing else: no buffer, no parameter, no history.

    Args:
        rotary: what to apply.

    Example:
        >>> import torch
        >>> from theodolite.plan import Rotary
        >>> rope = RotaryEmbedding(Rotary(head_dim=64, rope_theta=10000.0))
        >>> q, k = torch.randn(1, 8, 5, 64), torch.randn(1, 2, 5, 64)
        >>> q, k = rope(q, k, torch.arange(5))
    """

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.rotary = rotary

    def tables(self, positions: Tensor, *, device: torch.device | str | None = None) -> Tables:
        """cos and sin at `positions`; make them once per forward and give them to every layer's `apply`."""
        return rotary_tables(self.rotary, positions, device=device)

    def apply_tables(self, q: Tensor, k: Tensor, tables: Tables, *, heads_first: bool = True) -> tuple[Tensor, Tensor]:
        """Turn q (B, H, S, D) and k (B, Hkv, S, D) by tables that were made before."""
        return rotate(
            q,
            k,
            tables.cos,
            tables.sin,
            interleaved=self.rotary.interleaved,
            rotary_dim=self.rotary.rotary_dim,
            trailing=self.rotary.trailing,
            heads_first=heads_first,
        )

    def forward(self, q: Tensor, k: Tensor, positions: Tensor, *, heads_first: bool = True) -> tuple[Tensor, Tensor]:
        """Turn q (B, H, S, D) and k (B, Hkv, S, D), or (B, S, H, D) with `heads_first=False`, at `positions`."""
        return self.apply_tables(q, k, self.tables(positions, device=q.device), heads_first=heads_first)

    def extra_repr(self) -> str:
        return repr(self.rotary)
