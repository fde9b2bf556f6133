"""One function that turns queries and keys: it checks what it is given and picks the implementation."""

from __future__ import annotations

from typing import TypeVar, cast

import torch
from torch import Tensor

from theodolite.kernels.autograd import turn
from theodolite.kernels.memory import require_aligned
from theodolite.kernels.operands import ROW_DTYPES, canonical_tables, check, check_pair, layout_of
from theodolite.kernels.outputs import check_memory, check_outputs
from theodolite.kernels.recipes import attempt, remember
from theodolite.kernels.recording import has_memory, is_plain, is_transformed, is_watched
from theodolite.kernels.watched import run_watched

Q = TypeVar("Q", Tensor, None)
K = TypeVar("K", Tensor, None)


def rotate(
    q: Q,
    k: K,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    trailing: bool = False,
    heads_first: bool = True,
    conjugate: bool = False,
    inplace: bool = False,
    out_q: Tensor | None = None,
    out_k: Tensor | None = None,
    stored_tables: bool = False,
) -> tuple[Q, K]:
    """Turn queries and keys by the angles of a table: `(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)` per pair.

    Shapes (B batch, H heads, S tokens, D channels of a head, R = rotary_dim, L rows of a table):
        q, k: (B, H, S, D), or (B, S, H, D) with `heads_first=False`; packed sequences (H, T, D) or (T, H, D). Their H
            may differ; either may be None. Any strides, without a copy where the channels of a head stand together.
        cos, sin: (S, R/2) or (B, S, R/2), one row per token of the call. Where heads turn by frequencies of their own,
            (B, Ht, S, R/2) or (1, Ht, S, R/2) in either layout of q and k; H of q and of k must be multiples of Ht,
            and heads that stand together share a table, as grouped queries share a key. R columns instead of R/2 give
            each channel its own entry, `x1 cos1 - x2 sin1, x2 cos2 + x1 sin2`, in the order of the channels: (a, b, a,
            b) for halves that are alike, (a, a, b, b) for neighbours.
        positions: (S,) or (B, S), integers: cos and sin have L rows, and these say which row is whose. No table of
            the rows that were picked is made.

    Args:
        interleaved: pairs are channels (2i, 2i+1); otherwise (i, i + R/2).
        rotary_dim: channels that turn, the last ones if `trailing`; all by default. The others pass bit for bit.
        conjugate: turn the other way: with tables of amplitude 1, the inverse.
        inplace: write into q and k themselves and return them.
        out_q, out_k: write there and return these, a slot of a key cache for example: tensors like q and k, of any
            strides, that share no memory with what is read. No gradient passes through them.
        stored_tables: take tables of float16, bfloat16 or int8 (entries times 127), which are coarser than the
            rotation. Otherwise they are float32 or float64: a table that was cast is refused.

    Returns:
        q and k in their own dtypes, computed in float32 (float64 for float64 input) and rounded once; the same bits
        from every implementation on the CPU. Gradients flow to q and k, to any order, and to tables that ask for one
        (learned frequencies).

    Raises:
        ValueError: a shape or dtype does not fit, memory is shared, a position has no row, or `inplace` with tables
            that ask for a gradient; the message names the argument. Nothing is written then, but for positions on a
            GPU, where the device itself stops, as for any index of torch.
        RuntimeError: `inplace` on a leaf that requires a gradient, or on a tensor that overlaps itself.
    """
    options = interleaved, rotary_dim, trailing, heads_first, conjugate, inplace, stored_tables
    key, done = attempt(q, k, cos, sin, positions, out_q, out_k, options)
    if done is not None:
        return cast(tuple[Q, K], done)
    given: dict[str, Tensor] = {}
    for name, x in (("q", q), ("k", k)):
        if x is not None:
            given[name] = x
    for name, x in given.items():
        check(
            name,
            x,
            cos,
            sin,
            positions,
            rotary_dim=rotary_dim,
            heads_first=heads_first,
            stored_tables=stored_tables,
        )
    if q is not None and k is not None:
        check_pair(q, k, rotary_dim)
    outs = _outputs(q, k, out_q, out_k, inplace)
    outputs = {name: out for name, out in zip("qk", outs, strict=True) if out is not None}
    check_outputs(given, outputs, {"cos": cos, "sin": sin})
    if not given:
        return q, k
    first = next(iter(given.values()))
    layout = layout_of(first, interleaved, rotary_dim, trailing, conjugate)
    tables = canonical_tables(cos, sin, positions, first.device)
    learned = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    all_given = q, k, cos, sin, positions, out_q, out_k
    if not first.is_meta and not is_transformed() and has_memory(*all_given):
        require_aligned(q=q, k=k, cos=cos, sin=sin, positions=positions, out_q=out_q, out_k=out_k)
        if outputs:
            check_memory(given, outputs, {"cos": cos, "sin": sin, "positions": positions}, heads_first)
    if learned or is_watched() or not is_plain(*all_given):
        return cast(tuple[Q, K], tuple(run_watched((q, k), outs, tables, layout, heads_first)))
    turned = turn((q, k), outs, tables, layout, heads_first)
    if key is not None and (positions is None or positions.dtype in ROW_DTYPES):
        remember(key, (q, k), turned, tables, layout, heads_first=heads_first, inplace=inplace)
    return cast(tuple[Q, K], tuple(turned))


def _outputs(
    q: Tensor | None, k: Tensor | None, out_q: Tensor | None, out_k: Tensor | None, inplace: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Where each goes: itself in place, what was given, or None for a new tensor."""
    for name, x, out in (("q", q, out_q), ("k", k, out_k)):
        if out is not None and (inplace or x is None):
            reason = "inplace=True writes elsewhere" if inplace else f"{name} is None"
            raise ValueError(f"out_{name}: it is given, and {reason}; leave one of the two out")
    return (q, k) if inplace else (out_q, out_k)
