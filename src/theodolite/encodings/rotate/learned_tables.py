"""Tables that give a gradient to the frequencies they were made of, as exact as those of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from theodolite.encodings.rotate.exact import axes_of, host_positions
from theodolite.encodings.rotate.tables import Tables, pair_tables
from theodolite.plan import Rotary
from theodolite.positions.checks import require_positions


def learned_tables(
    inv_freq: Tensor,
    positions: Tensor,
    *,
    rotary: Rotary,
    amplitude: bool = True,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tables:
    """`rotary_tables` at frequencies that ask for a gradient, exact in the same way and to the same bits.

    Args:
        inv_freq: (1, P), or (B, P) where rows have their own; float64 on the CPU. P is R/2, or a multiple of it
            where several sets of frequencies (heads) stand side by side.
        positions: (S,) or (B, S), or (axes, B, S) where `rotary` has axes.
        rotary: whose axes and attention factor are used.
        dtype: of the tables, float32 or float64.

    Returns:
        Tables of (S, P) or (B, S, P).
    """
    axes = axes_of(rotary)
    require_positions("positions", positions, dims=(3,) if axes else (1, 2))
    if axes and positions.shape[0] != axes:
        raise ValueError(f"positions: got {positions.shape[0]} axes; this encoding has {axes}")
    device = positions.device if device is None else torch.device(device)
    meta = positions.is_meta or inv_freq.is_meta
    if positions.is_meta and device.type != "meta":
        raise ValueError(f"positions: they are on the meta device and have no values to make tables of on {device}")
    device = torch.device("meta") if meta else device
    axis = rotary.axis_of_pairs() * (inv_freq.shape[1] * 2 // rotary.rotary_dim)
    # (axes, B, S) whatever the caller's shape.
    batched = positions if axes else positions.reshape(1, -1, positions.shape[-1])
    factor = rotary.attention_factor() if amplitude else 1.0
    cos, sin = _learned(batched, inv_freq, axis, factor, dtype == torch.float64)
    if positions.dim() == 1 and inv_freq.shape[0] == 1:
        cos, sin = cos.squeeze(0), sin.squeeze(0)
    return Tables(cos.to(device), sin.to(device))


def settled_frequencies(rotary: Rotary) -> tuple[float, ...] | None:
    """The frequencies as plain numbers, or None where they depend on the length."""
    return None if rotary.depends_on_length else tuple(rotary.inv_freq().tolist())


def plan_frequencies(
    rotary: Rotary,
    settled: tuple[float, ...] | None,
    positions: Tensor,
    lengths: Sequence[int] | None,
    device: torch.device,
) -> Tensor:
    """The plan's frequencies, (1, R/2), or (B, R/2) by the `lengths` of the rows; float64, on the CPU or on meta."""
    if settled is not None:
        return torch.tensor([settled], dtype=torch.float64, device=device)
    if lengths is None:
        raise ValueError(
            f"rotary: {rotary.scaling.rope_type!r} has frequencies that depend on the length of the sequence; "
            "give `lengths`, or settle them with rotary.at_length(tokens), once for each sequence"
        )
    require_lengths(positions, len(lengths))
    rows = [rotary.inv_freq(length=int(length)).tolist() for length in lengths]
    return torch.tensor(rows, dtype=torch.float64, device=device)


def require_lengths(positions: Tensor, number: int) -> None:
    """Refuse a number of lengths that is not that of the rows of positions (B, S) or (axes, B, S)."""
    if positions.dim() < 2 or number != positions.shape[-2]:
        raise ValueError(
            f"lengths: got {number} for positions of shape {tuple(positions.shape)}; one per row of (B, S) is needed"
        )


def base_power(rotary: Rotary, log_ratio: Tensor) -> Tensor:
    """What a base of `rope_theta * exp(log_ratio)` makes of each frequency of the plan: (..., R/2) for (..., 1)."""
    exponents = [-2 * pair / rotary.rotary_dim for pair in range(rotary.rotary_dim // 2)]
    power: Tensor = (log_ratio * torch.tensor(exponents, dtype=torch.float64, device=log_ratio.device)).exp()
    return power


def on_host(parameter: Tensor) -> Tensor:
    """float64 on the CPU, with its gradient; a parameter without values stays where it is."""
    return parameter.double() if parameter.is_meta else parameter.cpu().double()


def table_dtype(parameter: Tensor) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


@torch.library.custom_op("theodolite::learned_tables", mutates_args=())
def _learned(
    positions: Tensor, inv_freq: Tensor, axis: Sequence[int], amplitude: float, double: bool
) -> tuple[Tensor, Tensor]:
    """cos and sin (B, S, P) for positions (axes, B, S) and frequencies (1 or B, P), on the CPU.

    One node of a compiled graph, so that the compiler cannot redo its float64 some other way.
    """
    if double:
        host = torch.from_numpy(host_positions("positions", positions))
        angles = host[list(axis)].permute(1, 2, 0) * inv_freq.detach()[:, None]
        return angles.cos() * amplitude, angles.sin() * amplitude
    rows = inv_freq.shape[0]
    each = [positions] if rows == 1 else [positions[:, row : row + 1] for row in range(rows)]
    made = [
        pair_tables(frequencies, one, axis_of_pairs=axis, axes=positions.shape[0], amplitude=amplitude, device="cpu")
        for frequencies, one in zip(inv_freq.tolist(), each, strict=True)
    ]
    if rows == 1:
        return made[0].cos, made[0].sin
    return torch.cat([table.cos for table in made]), torch.cat([table.sin for table in made])


@_learned.register_fake
def _(
    positions: Tensor, inv_freq: Tensor, axis: Sequence[int], amplitude: float, double: bool
) -> tuple[Tensor, Tensor]:
    device = "meta" if positions.is_meta or inv_freq.is_meta else "cpu"
    dtype = torch.float64 if double else torch.float32
    table = torch.empty((*positions.shape[1:], len(axis)), dtype=dtype, device=device)
    return table, torch.empty_like(table)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    positions, inv_freq, axis, *_ = inputs
    # A copy of its own: positions made in inference mode cannot be saved.
    host = positions.double() if positions.is_meta else positions.cpu().to(torch.float64, copy=True)
    ctx.save_for_backward(host, *output)
    ctx.axis, ctx.rows = list(axis), inv_freq.shape[0]


def _frequency_gradient(ctx: Any, grad_cos: Tensor, grad_sin: Tensor) -> tuple[Tensor | None, ...]:
    """`d cos(w p) / dw = -p sin(w p)` and `d sin(w p) / dw = p cos(w p)`, summed over tokens in float64."""
    positions, cos, sin = ctx.saved_tensors
    by_angle = cos.double() * grad_sin.double() - sin.double() * grad_cos.double()
    by_axis = torch.einsum("abs,bsp->apb", positions, by_angle)
    grad = by_axis[ctx.axis, torch.arange(len(ctx.axis), device=by_axis.device)].T
    return None, grad.sum(0, keepdim=True) if ctx.rows == 1 else grad, None, None, None


_learned.register_autograd(_frequency_gradient, setup_context=_save)
