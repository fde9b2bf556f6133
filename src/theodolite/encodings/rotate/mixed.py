"""Rotations of image patches in directions that are learned."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from theodolite.encodings.rotate.axial import PatchRotate, check_patches, places_on_axes
from theodolite.encodings.rotate.base import K, Q
from theodolite.encodings.rotate.lengths import Lengths
from theodolite.encodings.rotate.operands import device_of
from theodolite.encodings.rotate.per_head import HeadwiseRotate, head_range
from theodolite.encodings.rotate.tables import Tables
from theodolite.encodings.rotate.tracing import positions_within
from theodolite.plan.errors import is_number
from theodolite.positions.checks import LARGEST_POSITION, can_read_at_once, require_count
from theodolite.positions.traced import is_traced

# Devices that have float64; on the others (MPS) the angles come from the CPU.
_FLOAT64 = ("cpu", "cuda")


class MixedRotary(PatchRotate, HeadwiseRotate):
    """RoPE-Mixed (2403.13298): `angle = f_x x + f_y y`, both frequencies of each pair learned, per layer and head.

    An axial encoding sees rows and columns apart; here a pair turns along any direction of the image. The parameter
    is `frequencies`, (2, H, D/2) for (x, y): initially of the lengths `rope_theta ** (-4i / D)`, each in two directions
    that are at right angles, the whole turned by an angle drawn for each head.

    A module is one layer. Layer l of rope-vit's `freqs` (2, layers, H * D/2) is `freqs[:, l].view(2, H, -1)`, of
    timm's `freqs[:, l]`. Keep it out of weight decay, as both do.

    Positions are (2, S), or (2, B, S) where rows differ: x the column and y the row in both
    (`patch_positions(rows, columns).flip(0)`), integers, or float32 or float64 fractions. Tables are float32, or
    float64 where the parameter is; angles are computed in float64, on the parameter's device where that has float64,
    else on the CPU. Autocast has no say.

    The parameter stays float32 in a model of half precision, or float64 after `.double()`: see `LearnedBase`, there
    for FSDP too.

    Args:
        head_dim: D, channels of a head, a multiple of 4.
        num_heads: H, key-value heads; the queries of a group turn as their key does.
        rope_theta: the base of the initial frequencies.
        interleaved: pairs are channels (2i, 2i+1), as in rope-vit and timm, or (i, i + D/2).

    Example:
        >>> import torch
        >>> from theodolite.positions.grids import patch_positions
        >>> rope = MixedRotary(64, 6)
        >>> q, k = torch.randn(2, 6, 1 + 12, 64), torch.randn(2, 6, 1 + 12, 64)
        >>> q, k = rope(q, k, patch_positions(3, 4).flip(0), prefix=1)
    """

    # What older modules call `freqs` is learned here, not derived.
    legacy_keys = ()

    def __init__(self, head_dim: int, num_heads: int, *, rope_theta: float = 10.0, interleaved: bool = True) -> None:
        require_count("head_dim", head_dim, least=4)
        if head_dim % 4:
            raise ValueError(f"head_dim: got {head_dim}; it must be a multiple of 4, for pairs of directions")
        require_count("num_heads", num_heads, least=1)
        if not is_number(rope_theta) or rope_theta <= 1:
            raise ValueError(f"rope_theta: got {rope_theta!r}; it must be a finite number above 1")
        super().__init__(rotary_dim=head_dim, interleaved=interleaved, head_dim=head_dim)
        self.num_heads, self.rope_theta = num_heads, float(rope_theta)
        self.frequencies = nn.Parameter(torch.empty(2, num_heads, head_dim // 2, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the directions anew, one number for each head, from the CPU's default generator."""
        if self.frequencies.is_meta:
            return
        # Drawn in float32, one after the other: a seed gives the directions that it gives rope-vit.
        turn = torch.rand(self.num_heads, 1, dtype=torch.float32, device="cpu").double() * (2 * math.pi)
        lengths = [self.rope_theta ** (-channel / self.rotary_dim) for channel in range(0, self.rotary_dim, 4)]
        along = torch.tensor(lengths, dtype=torch.float64, device="cpu")
        x, y = along * turn.cos(), along * turn.sin()
        with torch.no_grad():
            self.frequencies.copy_(torch.stack((torch.cat((x, -y), dim=-1), torch.cat((y, x), dim=-1))))

    def tables(
        self,
        positions: Tensor,
        *,
        lengths: Lengths | None = None,
        amplitude: bool = True,
        device: torch.device | str | None = None,
        heads: slice | None = None,
    ) -> Tables:
        """cos and sin with the gradient of `frequencies`, (1 or B, Ht, S, D/2).

        Args:
            positions: (2, S) or (2, B, S), x and y, at most 2**24 either way; on the CPU they are checked.
            lengths, amplitude: of no effect: no frequency depends on the length, and there is no attention factor.
            device: where the tables are put; that of `positions` by default.
            heads: the key-value heads of this rank, Ht of them; all by default.
        """
        positions = places_on_axes(positions, 2)
        if positions.device.type == "cpu" and is_traced(positions):
            positions = positions_within(positions, -LARGEST_POSITION, LARGEST_POSITION)
        elif can_read_at_once(positions) and not bool((positions.double().abs() <= LARGEST_POSITION).all()):
            raise ValueError(f"positions: they must be at most 2**24 = {LARGEST_POSITION} either way")
        frequencies: Tensor = self.frequencies[:, head_range(heads, self.num_heads)]
        device = positions.device if device is None else torch.device(device)
        if positions.is_meta and device.type != "meta":
            raise ValueError(f"positions: they are on the meta device and have no values to make tables of on {device}")
        home = frequencies.device if frequencies.device.type in _FLOAT64 else torch.device("cpu")
        if positions.is_meta or frequencies.is_meta:
            home = device = torch.device("meta")
        # (B, 1, S, 1) times (Ht, 1, D/2), for each axis.
        x, y = positions.to(home).double()[:, :, None, :, None]
        along_x, along_y = frequencies.to(home).double()[:, :, None]
        angles = x * along_x + y * along_y
        dtype = torch.float64 if self.frequencies.dtype == torch.float64 else torch.float32
        return Tables(angles.cos().to(device, dtype), angles.sin().to(device, dtype))

    def forward(
        self,
        q: Q,
        k: K,
        positions: Tensor,
        *,
        lengths: Lengths | None = None,
        heads_first: bool = True,
        prefix: int = 0,
        heads: slice | None = None,
    ) -> tuple[Q, K]:
        """As in `PatchRotate`; `heads` are the key-value heads that k carries and q belongs to, all by default."""
        tables = self.tables(positions, device=device_of(q, k), heads=heads)
        check_patches(q, k, positions, heads_first, prefix)
        return self.apply_tables(q, k, tables, heads_first=heads_first, prefix=prefix)

    def extra_repr(self) -> str:
        return (
            f"head_dim={self.head_dim}, num_heads={self.num_heads}, rope_theta={self.rope_theta:g}, "
            f"interleaved={self.interleaved}"
        )
