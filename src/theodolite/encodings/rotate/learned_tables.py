"""Tables that give a gradient to the frequencies they were made of, as exact as those of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from theodolite.encodings.rotate.exact import axes_of, cos_sin, host_positions, require_plan
from theodolite.encodings.rotate.lengths import Lengths, for_each_row, row_lengths
from theodolite.encodings.rotate.tables import Tables, check_axes, pair_tables
from theodolite.plan import Rotary
from theodolite.positions.checks import require_positions


def learned_tables(
    inv_freq: Tensor,
    positions: Tensor,
    *,
    axis_of_pairs: Sequence[int] = (),
    axes: int = 0,
    amplitude: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tables:
    """`pair_tables` with a gradient to the frequencies: what a learned rotation of one's own is made of.

    Exact in the same way and to the same bits, at the frequencies as they are given: work them out in float64
    (`parameter.double().exp()`), or their own rounding to float32 times the position is what angles are off by. They
    are read by the CPU once per call; in a compiled graph this is one node.

    Args:
        inv_freq: radians per unit of position: (P,) for all rows; (B, P) where each row has its own; (1, Ht, P) or
            (B, Ht, P) where heads have, too. float32 or float64 is meant.
        positions: (S,) or (B, S); with `axes`, (axes, B, S). Where rows have frequencies of their own, (S,) and
            (1, S) serve all of them.
        axis_of_pairs: which axis of the positions each of the P pairs follows, where there are axes.
        axes: how many axes the positions have; 0 for positions without that dimension.
        amplitude: multiplies cos and sin.
        dtype: of the tables, float32 or float64.
        device: where the tables are put; that of `positions` by default.

    Returns:
        Tables of (S, P) or (B, S, P), (B, S, P), or (1 or B, Ht, S, P) as `inv_freq` has one, two or three dimensions.

    Raises:
        ValueError: frequencies of another shape or that are no tensor of fractions; positions as in `pair_tables`.
    """
    _check_frequencies(inv_freq)
    check_axes(inv_freq.shape[-1], axis_of_pairs, axes)
    require_positions("positions", positions, dims=(3,) if axes else (1, 2))
    if axes and positions.shape[0] != axes:
        raise ValueError(f"positions: got {positions.shape[0]} axes; this encoding has {axes}")
    device = positions.device if device is None else torch.device(device)
    if positions.is_meta and device.type != "meta":
        raise ValueError(f"positions: they are on the meta device and have no values to make tables of on {device}")
    if positions.is_meta or inv_freq.is_meta:
        device = torch.device("meta")
    pairs, heads = inv_freq.shape[-1], inv_freq.shape[1] if inv_freq.dim() == 3 else 1
    if inv_freq.dim() == 2 or (inv_freq.dim() == 3 and inv_freq.shape[0] != 1):
        positions = for_each_row(positions, inv_freq.shape[0], axes=axes, name="inv_freq")
    rows = inv_freq.flatten(1) if inv_freq.dim() > 1 else inv_freq[None]
    # (axes, B, S) whatever the caller's shape.
    batched = positions if axes else positions[None] if positions.dim() == 2 else positions[None, None]
    axis = (tuple(axis_of_pairs) if axes else (0,) * pairs) * heads
    cos, sin = _learned(batched, on_host(rows), axis, amplitude, dtype == torch.float64)
    if inv_freq.dim() == 3:
        cos, sin = (_owned(x.unflatten(-1, (heads, pairs)).transpose(-3, -2)) for x in (cos, sin))
    elif positions.dim() == 1:
        cos, sin = _owned(cos.squeeze(0)), _owned(sin.squeeze(0))
    return Tables(cos.to(device), sin.to(device))


def tables_of_plan(
    rotary: Rotary,
    inv_freq: Tensor,
    positions: Tensor,
    *,
    amplitude: bool,
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> Tables:
    """`learned_tables` with the axes and the attention factor of a plan."""
    return learned_tables(
        inv_freq,
        positions,
        axis_of_pairs=rotary.axis_of_pairs() if rotary.mrope_section else (),
        axes=axes_of(rotary),
        amplitude=rotary.attention_factor() if amplitude else 1.0,
        dtype=dtype,
        device=device,
    )


def settled_frequencies(rotary: Rotary) -> tuple[float, ...] | None:
    """The frequencies as plain numbers, or None where they depend on the length."""
    require_plan("rotary", rotary)
    if rotary.at_length(1).attention_factor() != rotary.attention_factor():
        raise ValueError(
            f"rotary: the attention factor of {rotary.scaling.rope_type!r} depends on the length, and what is learned "
            "has one for all rows; settle it with rotary.at_length(tokens)"
        )
    return None if rotary.depends_on_length else tuple(rotary.inv_freq().tolist())


def plan_frequencies(
    rotary: Rotary,
    settled: tuple[float, ...] | None,
    positions: Tensor,
    lengths: Lengths | None,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """The positions, and the plan's frequencies, float64, on the CPU or on meta.

    The frequencies are (R/2,), or (B, R/2) where they depend on the `lengths` of the rows: positions then have B rows.
    """
    if settled is not None:
        return positions, torch.tensor(settled, dtype=torch.float64, device=device)
    if lengths is None:
        raise ValueError(
            f"rotary: {rotary.scaling.rope_type!r} has frequencies that depend on the length of the sequence; "
            "give `lengths`, or settle them with rotary.at_length(tokens), once for each sequence"
        )
    rows = [rotary.inv_freq(length=length).tolist() for length in row_lengths(lengths)]
    positions = for_each_row(positions, len(rows), axes=axes_of(rotary))
    frequencies = torch.tensor(rows, dtype=torch.float64, device=device)
    return positions, frequencies.reshape(len(rows), rotary.rotary_dim // 2)


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


def _owned(table: Tensor) -> Tensor:
    # No view: FSDP warns of those that a module gives.
    return table.clone(memory_format=torch.contiguous_format)


def _check_frequencies(inv_freq: Tensor) -> None:
    if not isinstance(inv_freq, Tensor) or not inv_freq.is_floating_point():
        kind = inv_freq.dtype if isinstance(inv_freq, Tensor) else f"a {type(inv_freq).__name__}"
        raise ValueError(f"inv_freq: got {kind}; give a tensor of fractions, or plain numbers to pair_tables")
    if inv_freq.dim() not in (1, 2, 3):
        raise ValueError(f"inv_freq: got shape {tuple(inv_freq.shape)}; it must be (P,), (B, P) or (1 or B, Ht, P)")


@torch.library.custom_op("theodolite::learned_tables", mutates_args=())
def _learned(
    positions: Tensor, inv_freq: Tensor, axis: Sequence[int], amplitude: float, double: bool
) -> tuple[Tensor, Tensor]:
    """cos and sin (B, S, P) for positions (axes, B, S) and frequencies (1 or B, P), on the CPU.

    One node of a compiled graph, so that the compiler cannot redo its float64 some other way.
    """
    if double:
        host = host_positions("positions", positions)
        angles = host[list(axis)].permute(1, 2, 0) * inv_freq.detach()[:, None]
        return cos_sin(angles, amplitude, torch.float64)
    rows = inv_freq.shape[0]
    if rows == 0:
        empty = torch.empty((0, positions.shape[2], len(axis)), dtype=torch.float32, device="cpu")
        return empty, empty.clone()
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
