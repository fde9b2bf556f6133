"""Keys that are turned already, moved to other positions or to other frequencies: one rotation, one rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from theodolite.encodings.rotate.exact import (
    axes_of,
    cos_sin_by_block,
    host_positions,
    require_plan,
    require_settled,
)
from theodolite.encodings.rotate.operands import require_heads
from theodolite.encodings.rotate.tables import Tables, rotary_tables
from theodolite.kernels import rotate
from theodolite.plan import Rotary
from theodolite.positions.checks import LARGEST_POSITION, require_positions
from theodolite.positions.traced import is_traced


@overload
def rerotate(
    k: Tensor, *, rotary: Rotary, by: int | Tensor, heads_first: bool = True, inplace: bool = False
) -> Tensor: ...


@overload
def rerotate(
    k: Tensor,
    *,
    old: Rotary,
    new: Rotary,
    positions: Tensor,
    new_positions: Tensor | None = None,
    amplitude: bool = True,
    heads_first: bool = True,
    inplace: bool = False,
) -> Tensor: ...


def rerotate(
    k: Tensor,
    *,
    rotary: Rotary | None = None,
    by: int | Tensor | None = None,
    old: Rotary | None = None,
    new: Rotary | None = None,
    positions: Tensor | None = None,
    new_positions: Tensor | None = None,
    amplitude: bool = True,
    heads_first: bool = True,
    inplace: bool = False,
) -> Tensor:
    """Keys k (B, Hkv, S, D) that were rotated before, as they would be at other positions or by another plan.

    `rerotate(k, rotary=plan, by=-500)` moves keys: a pure rotation, whose amplitude is 1 whatever the plan's attention
    factor, which the keys have already. `rerotate(k, old=plan, new=other, positions=p, new_positions=n)` also changes
    the frequencies and the attention factor: pair i turns by `w_new n - w_old p`, an angle worked out in float64, and
    is multiplied by the ratio of the factors.

    The result differs from rotating the unrotated keys afresh by the roundings of one more rotation: in float32 a few
    ulp (at most 9 * 2^-24 of the length of the pair), in half precision one more rounding to the dtype. Roundings add
    up when a key is moved again and again: 500 moves of -1 are off a hundred times as far as one of -500 (bfloat16: a
    quarter of the key's length; one move: 0.3 %). Where many moves are to come, keep the keys and move these by the
    whole distance.

    Args:
        k: rotated keys, or (B, S, Hkv, D) with `heads_first=False`.
        rotary: the plan that the keys were rotated by.
        by: how far each key moves: one whole number for all, or as positions are: (S,), (B, S) or (axes, B, S). A
            number moves all axes.
        old, new: the plans before and after, alike in width and layout; their axes may differ.
        positions: where the keys stand, as the old plan has it.
        new_positions: where they shall stand, as the new plan has it; where they are by default.
        amplitude: false leaves the attention factors out: pure rotations, of values that are turned as keys are.
        inplace: write into k itself and return it.

    Raises:
        ValueError: plans that differ in width or layout, or whose frequencies depend on the length (settle both with
            `at_length`); positions of another shape or dtype; a mixture of the two forms.
    """
    require_heads("k", k)
    if rotary is not None and by is not None and all(x is None for x in (old, new, positions, new_positions)):
        plan, tables = rotary, _tables_of_move(k, rotary, by, heads_first)
    elif old is not None and new is not None and positions is not None and rotary is None and by is None:
        tables = rerotation_tables(
            old=old, new=new, positions=positions, new_positions=new_positions, amplitude=amplitude, device=k.device
        )
        plan = new
        _check_tokens("positions", tables.cos, k, heads_first)
    else:
        raise ValueError(
            "rerotate: give rotary and by, or old, new and positions (and new_positions where they change)"
        )
    return rotate(
        None,
        k,
        tables.cos,
        tables.sin,
        interleaved=plan.interleaved,
        rotary_dim=plan.rotary_dim,
        trailing=plan.trailing,
        heads_first=heads_first,
        inplace=inplace,
    )[1]


def rerotation_tables(
    *,
    old: Rotary,
    new: Rotary,
    positions: Tensor,
    new_positions: Tensor | None = None,
    amplitude: bool = True,
    device: torch.device | str | None = None,
) -> Tables:
    """The tables of `rerotate`, (S, R/2) or (B, S, R/2), float32: make them once for the caches of all layers.

    `RotaryEmbedding(new).apply_tables(None, k, tables)` then turns each. Every entry is within 6e-8 of the true
    value, times the ratio of the attention factors where that is above 1. Those of a move by `by` are
    `rotary_tables(rotary, by, amplitude=False)`.

    A compiler does not look inside: where a graph must have no break, give it tables that were made outside.
    """
    _require_eager()
    require_plan("old", old)
    require_plan("new", new)
    _check_alike(old, new)
    require_settled("old", old)
    require_settled("new", new)
    if new_positions is None:
        if axes_of(old) != axes_of(new):
            raise ValueError(
                f"new_positions: got None; the old plan has mrope_section {old.mrope_section} and the new one "
                f"{new.mrope_section}, so positions of the one are none of the other"
            )
        new_positions = positions
    _check_positions("positions", positions, old)
    _check_positions("new_positions", new_positions, new)
    if positions.shape[-1] != new_positions.shape[-1]:
        raise ValueError(f"new_positions: got {new_positions.shape[-1]} tokens; positions have {positions.shape[-1]}")
    device = positions.device if device is None else torch.device(device)
    meta = positions.is_meta or new_positions.is_meta
    if meta and device.type != "meta":
        raise ValueError(f"positions: they are on the meta device and have no values to make tables of on {device}")
    before, after = (x if x.dim() == 3 else x.reshape(1, -1, x.shape[-1]) for x in (positions, new_positions))
    if before.shape[1] != after.shape[1] and before.shape[1] != 1 and after.shape[1] != 1:
        raise ValueError(
            f"new_positions: got shape {tuple(new_positions.shape)}; its rows must be those of positions, "
            f"{tuple(positions.shape)}, or one"
        )
    ratio = new.attention_factor() / old.attention_factor() if amplitude else 1.0
    compute = _compute_opaque if is_traced(positions, new_positions) else _compute
    cos, sin = compute(
        before,
        after,
        old.inv_freq().tolist(),
        new.inv_freq().tolist(),
        old.axis_of_pairs(),
        new.axis_of_pairs(),
        ratio,
    )
    if positions.dim() == 1 and new_positions.dim() == 1:
        cos, sin = cos.squeeze(0), sin.squeeze(0)
    return Tables(cos.to(device), sin.to(device))


def _tables_of_move(k: Tensor, rotary: Rotary, by: int | Tensor, heads_first: bool) -> Tables:
    _require_eager()
    require_settled("rotary", rotary)
    if isinstance(by, Tensor):
        _check_positions("by", by, rotary)
        if not by.is_meta and not is_traced(by):
            by = by.cpu()
            host_positions("by", by)
        tables = rotary_tables(rotary, by, amplitude=False, device=k.device)
        _check_tokens("by", tables.cos, k, heads_first)
        return tables
    if isinstance(by, bool) or not isinstance(by, int):
        raise ValueError(f"by: got {by!r}; give a whole number of tokens, or a tensor with one number per token")
    if abs(by) > LARGEST_POSITION:
        raise ValueError(f"by: got {by}; the tables are exact up to 2**24 = {LARGEST_POSITION}")
    axes = axes_of(rotary)
    one = torch.full((axes, 1, 1) if axes else (1,), by, dtype=torch.int64, device="cpu")
    cos, sin = rotary_tables(rotary, one, amplitude=False, device=k.device)
    # One row for all tokens, seen as many times as there are tokens.
    shape = k.shape[2 if heads_first else 1], rotary.rotary_dim // 2
    return Tables(cos.reshape(1, -1).expand(shape), sin.reshape(1, -1).expand(shape))


def _require_eager() -> None:
    # `torch.compiler.disable` would say the same, and import the compiler for all who never compile.
    if torch.compiler.is_compiling():
        raise RuntimeError("rerotate: plans are read outside a graph; make the tables before, with rerotation_tables")


def _check_alike(old: Rotary, new: Rotary) -> None:
    for name in ("head_dim", "rotary_dim", "interleaved", "trailing"):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            raise ValueError(f"new: got {name} {after}; it must be that of old, {before}: other channels were turned")


def _check_positions(name: str, positions: Tensor, rotary: Rotary) -> None:
    axes = axes_of(rotary)
    require_positions(name, positions, dims=(3,) if axes else (1, 2))
    if axes and positions.shape[0] != axes:
        raise ValueError(f"{name}: got {positions.shape[0]} axes; this encoding has {axes}")


def _check_tokens(name: str, table: Tensor, k: Tensor, heads_first: bool) -> None:
    if table.shape[-2] != k.shape[2 if heads_first else 1]:
        layout = "(B, H, S, D)" if heads_first else "(B, S, H, D)"
        raise ValueError(
            f"{name}: got {table.shape[-2]} for the {k.shape[2 if heads_first else 1]} tokens of k of shape "
            f"{tuple(k.shape)}, read as {layout}; heads_first={not heads_first} reads the other order"
        )


def _compute(
    positions: Tensor,
    new_positions: Tensor,
    old_freq: Sequence[float],
    new_freq: Sequence[float],
    old_axis: Sequence[int],
    new_axis: Sequence[int],
    amplitude: float,
) -> tuple[Tensor, Tensor]:
    """cos and sin (B, S, R/2), float32, for positions (axes, B, S); on the CPU (on meta for meta positions)."""
    rows, tokens = max(positions.shape[1], new_positions.shape[1]), positions.shape[2]
    shape = rows, tokens, len(new_freq)
    if positions.is_meta or new_positions.is_meta:
        table = torch.empty(shape, dtype=torch.float32, device="meta")
        return table, torch.empty_like(table)
    # Made outside inference mode, so that training can use them later.
    with torch.inference_mode(False):
        before = _of_tokens("positions", positions, rows)
        after = _of_tokens("new_positions", new_positions, rows)
        old, new = (torch.tensor(freq, dtype=torch.float64, device="cpu") for freq in (old_freq, new_freq))

        def angles(block: slice, out: Tensor) -> Tensor:
            torch.mul(after[block][:, list(new_axis)], new, out=out)
            return out.sub_(before[block][:, list(old_axis)] * old)

        cos, sin = cos_sin_by_block(angles, rows * tokens, len(new_freq), amplitude)
        return cos.view(shape), sin.view(shape)


def _of_tokens(name: str, positions: Tensor, rows: int) -> Tensor:
    """(tokens of all rows, axes) of (axes, rows or 1, S)."""
    host = host_positions(name, positions)
    return host.expand(-1, rows, -1).flatten(1).T


@torch.library.custom_op("theodolite::rerotation_tables", mutates_args=())
def _compute_opaque(
    positions: Tensor,
    new_positions: Tensor,
    old_freq: Sequence[float],
    new_freq: Sequence[float],
    old_axis: Sequence[int],
    new_axis: Sequence[int],
    amplitude: float,
) -> tuple[Tensor, Tensor]:
    """`_compute` as one node of a graph that is traced, which would else hold the tables."""
    return _compute(positions, new_positions, old_freq, new_freq, old_axis, new_axis, amplitude)


@_compute_opaque.register_fake
def _(
    positions: Tensor,
    new_positions: Tensor,
    old_freq: Sequence[float],
    new_freq: Sequence[float],
    old_axis: Sequence[int],
    new_axis: Sequence[int],
    amplitude: float,
) -> tuple[Tensor, Tensor]:
    rows = max(positions.shape[1], new_positions.shape[1])
    table = torch.empty((rows, positions.shape[2], len(new_freq)), dtype=torch.float32, device="cpu")
    return table, torch.empty_like(table)
