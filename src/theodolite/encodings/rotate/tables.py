"""Rotary tables that are exact: cos and sin at given positions, made anew for each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from theodolite.encodings.rotate.exact import (
    BLOCK,
    cos_sin,
    cos_sin_by_block,
    host_positions,
    one_position,
    require_plan,
)
from theodolite.encodings.rotate.lengths import Lengths, for_each_row, row_lengths
from theodolite.plan import Rotary
from theodolite.positions.checks import require_positions
from theodolite.positions.traced import is_traced


class Tables(NamedTuple):
    """cos and sin of one rotary encoding at given positions: (S, R/2) or (B, S, R/2), float32."""

    cos: Tensor
    sin: Tensor


def rotary_tables(
    rotary: Rotary,
    positions: Tensor,
    *,
    lengths: Lengths | None = None,
    amplitude: bool = True,
    device: torch.device | str | None = None,
) -> Tables:
    """cos and sin, times the attention factor, at the given positions.

    Angles are computed in float64 on the CPU and rounded once: every entry is within 6e-8 of the true value
    (times the attention factor, where that is above 1), at any position up to 2**24. Nothing is remembered
    between calls; a row depends on its own position alone; autocast, the default dtype, the default device and
    `inference_mode` have no say.

    Args:
        positions: (S,) or (B, S), or (axes, B, S) where the encoding has `mrope_section`. Integers, or
            float32 or float64 where fractions are meant; half precision is refused, for it cannot count past 256.
            On the meta device the tables have their shape and no content.
        lengths: for frequencies that depend on the length, the tokens of each row's whole sequence, B of them, as
            numbers or as a tensor of integers, which is read on the host; positions (S,) and (1, S) then serve all B
            rows. Of no effect where nothing depends on the length.
        amplitude: false leaves the attention factor out. The tables are then pure rotations: what moves keys that
            are rotated already by a distance, or (`rotate(..., conjugate=True)`) turns them back.
        device: where the tables are put; that of `positions` by default.

    Raises:
        ValueError: positions of another dtype or shape, beyond 2**24 either way, or asking for a gradient; an
            encoding whose frequencies depend on the length without `lengths` (or `rotary.at_length(tokens)` before).
    """
    require_plan("rotary", rotary)
    if rotary.depends_on_length:
        if lengths is None:
            raise ValueError(
                f"rotary: {rotary.scaling.rope_type!r} has frequencies that depend on the length of the sequence; "
                "give `lengths`, or settle them with rotary.at_length(tokens), once for each sequence"
            )
        return _each_by_its_length(rotary, positions, row_lengths(lengths), amplitude, device)
    return tables_of(rotary, rotary.inv_freq().tolist(), positions, amplitude=amplitude, device=device)


def tables_of(
    rotary: Rotary,
    inv_freq: Sequence[float],
    positions: Tensor,
    *,
    amplitude: bool,
    device: torch.device | str | None,
) -> Tables:
    """`rotary_tables` with the frequencies at hand as plain numbers: what a compiled graph can carry."""
    axis = rotary.axis_of_pairs() if rotary.mrope_section else ()
    axes = len(rotary.mrope_section) if rotary.mrope_section else 0
    factor = rotary.attention_factor() if amplitude else 1.0
    return pair_tables(inv_freq, positions, axis_of_pairs=axis, axes=axes, amplitude=factor, device=device)


def pair_tables(
    inv_freq: Sequence[float],
    positions: Tensor,
    *,
    axis_of_pairs: Sequence[int] = (),
    axes: int = 0,
    amplitude: float = 1.0,
    device: torch.device | str | None = None,
) -> Tables:
    """cos and sin of any frequencies, as exact as `rotary_tables`: what an encoding without a plan is made of.

    Args:
        inv_freq: radians per unit of position, one for each pair, plain numbers. Those that are trained go to
            `learned_tables`, which gives them their gradient.
        positions: (S,) or (B, S); with `axes`, (axes, B, S).
        axis_of_pairs: which axis of the positions each pair follows, where there are axes.
        axes: how many axes the positions have; 0 for positions without that dimension.
        amplitude: multiplies cos and sin.
        device: where the tables are put; that of `positions` by default.

    Raises:
        ValueError: frequencies that ask for a gradient; axes of pairs that do not fit; positions as in
            `rotary_tables`.
    """
    if isinstance(inv_freq, Tensor) and inv_freq.requires_grad:
        raise ValueError(
            "inv_freq: it requires a gradient, and tables of plain numbers give none; use learned_tables, or detach it"
        )
    check_axes(len(inv_freq), axis_of_pairs, axes)
    _check(positions, axes)
    device = positions.device if device is None else torch.device(device)
    if positions.is_meta and device.type != "meta":
        raise ValueError(f"positions: they are on the meta device and have no values to make tables of on {device}")
    compute = _compute_opaque if is_traced(positions) else _compute
    cos, sin = compute(positions, inv_freq, axis_of_pairs, amplitude)
    return Tables(cos.to(device), sin.to(device))


def _each_by_its_length(
    rotary: Rotary, positions: Tensor, lengths: list[int], amplitude: bool, device: torch.device | str | None
) -> Tables:
    positions = for_each_row(positions, len(lengths), axes=len(rotary.mrope_section or ()))
    if not lengths:
        return rotary_tables(rotary.at_length(1), positions, amplitude=amplitude, device=device)
    rows = [
        rotary_tables(rotary.at_length(length), positions[..., row : row + 1, :], amplitude=amplitude, device=device)
        for row, length in enumerate(lengths)
    ]
    return Tables(torch.cat([row.cos for row in rows]), torch.cat([row.sin for row in rows]))


def check_axes(pairs: int, axis_of_pairs: Sequence[int], axes: int) -> None:
    """Refuse axes of pairs that are not one for each pair, or none where there are no axes.

    Raises:
        ValueError: as said.
    """
    if len(axis_of_pairs) != (pairs if axes else 0):
        needed = f"one for each of the {pairs} pairs is needed" if axes else "with axes=0 there are none"
        raise ValueError(f"axis_of_pairs: got {len(axis_of_pairs)}; {needed}")
    if axis_of_pairs and not 0 <= min(axis_of_pairs) <= max(axis_of_pairs) < axes:
        raise ValueError(f"axis_of_pairs: got {list(axis_of_pairs)}; each must be from 0 to {axes - 1}")


def _check(positions: Tensor, axes: int) -> None:
    # With axes the batch is never left out: (3, S) could be three rows whose axes were forgotten.
    require_positions("positions", positions, dims=(3,) if axes else (1, 2))
    if axes and positions.shape[0] != axes:
        raise ValueError(f"positions: got {positions.shape[0]} axes; this encoding has {axes}")


def _compute(
    positions: Tensor, inv_freq: Sequence[float], axis: Sequence[int], amplitude: float
) -> tuple[Tensor, Tensor]:
    """cos and sin times `amplitude`, float32, on the CPU (on meta for meta positions)."""
    if positions.is_meta or not torch.is_inference_mode_enabled():
        return _made(positions, inv_freq, axis, amplitude)
    # Outside inference mode, so that training can use them later.
    with torch.inference_mode(False):
        return _made(positions, inv_freq, axis, amplitude)


def _made(positions: Tensor, inv_freq: Sequence[float], axis: Sequence[int], amplitude: float) -> tuple[Tensor, Tensor]:
    shape = torch.Size((*(positions.shape[1:] if axis else positions.shape), len(inv_freq)))
    if positions.is_meta:
        return positions.new_empty(shape, dtype=torch.float32), positions.new_empty(shape, dtype=torch.float32)
    frequencies, columns = _in_float64(inv_freq), list(axis)
    if positions.numel() == 1:
        # A decoding step: one number is dealt with sooner as such.
        return cos_sin((frequencies * one_position("positions", positions)).view(shape), amplitude)
    host = host_positions("positions", positions)
    if shape.numel() <= BLOCK:
        return cos_sin(_by_pair(host, columns) * frequencies, amplitude)
    flat = host.flatten(-2) if columns else host.flatten()

    def angles(block: slice, out: Tensor) -> Tensor:
        return torch.mul(_by_pair(flat[..., block], columns), frequencies, out=out)

    cos, sin = cos_sin_by_block(angles, flat.shape[-1], shape[-1], amplitude)
    return cos.view(shape), sin.view(shape)


def _in_float64(inv_freq: Sequence[float]) -> Tensor:
    if isinstance(inv_freq, Tensor):
        return inv_freq.to("cpu", torch.float64)
    # A third of the time that torch.tensor takes.
    return torch.from_numpy(np.array(inv_freq, dtype=np.float64))


def _by_pair(positions: Tensor, columns: list[int]) -> Tensor:
    """(..., P) or (..., 1) for (axes, ...) or (...): the position that each pair follows."""
    return positions[columns].movedim(0, -1) if columns else positions.unsqueeze(-1)


@torch.library.custom_op("theodolite::rotary_tables", mutates_args=())
def _compute_opaque(
    positions: Tensor, inv_freq: Sequence[float], axis: Sequence[int], amplitude: float
) -> tuple[Tensor, Tensor]:
    """`_compute` as one node of a compiled graph, so that the compiler cannot redo its float64 some other way."""
    return _compute(positions, inv_freq, axis, amplitude)


@_compute_opaque.register_fake
def _(positions: Tensor, inv_freq: Sequence[float], axis: Sequence[int], amplitude: float) -> tuple[Tensor, Tensor]:
    shape = (*(positions.shape[1:] if axis else positions.shape), len(inv_freq))
    table = torch.empty(shape, dtype=torch.float32, device="cpu")
    return table, torch.empty_like(table)
