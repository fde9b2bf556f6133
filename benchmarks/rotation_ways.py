"""Ways to rotate queries and keys, ours and what else is installed, and how far each is from the exact rotation.

q is (1, 32, S, 128) and k (1, 8, S, 128), tokens first in memory as projections leave them. `cuda_rotation.py` times
them.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from theodolite.encodings import rotary_tables
from theodolite.kernels import rotate
from theodolite.plan import Rotary

Q_HEADS, K_HEADS, HEAD_DIM = 32, 8, 128
# Where the one token of decoding stands.
POSITION = 1000
Turn = Callable[[Tensor, Tensor], "tuple[Tensor, Tensor]"]


class Case(NamedTuple):
    """S tokens; one is decoding."""

    tokens: int
    dtype: torch.dtype
    interleaved: bool

    def __str__(self) -> str:
        layout = "interleaved" if self.interleaved else "halves"
        return f"{self.tokens} tokens, {str(self.dtype).removeprefix('torch.')}, {layout}"


def inputs(case: Case, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(case.tokens)
    q, k = (
        torch.randn(1, case.tokens, heads, HEAD_DIM, generator=generator).to(device, case.dtype).transpose(1, 2)
        for heads in (Q_HEADS, K_HEADS)
    )
    return q, k


def tables(case: Case, device: str) -> tuple[Tensor, Tensor]:
    """float32 cos and sin, (S, 64)."""
    positions = torch.arange(case.tokens) + (POSITION if case.tokens == 1 else 0)
    cos, sin = rotary_tables(Rotary(head_dim=HEAD_DIM, rope_theta=10000.0), positions)
    return cos.to(device), sin.to(device)


def ours(case: Case, cos: Tensor, sin: Tensor) -> dict[str, Turn]:
    """Ways of this package."""
    rows = torch.arange(case.tokens, device=cos.device)

    def plain(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, k, cos, sin, interleaved=case.interleaved)

    return {
        "theodolite": plain,
        "theodolite, positions": lambda q, k: rotate(q, k, cos, sin, positions=rows, interleaved=case.interleaved),
        "theodolite, in place": lambda q, k: rotate(q, k, cos, sin, inplace=True, interleaved=case.interleaved),
        "theodolite, compiled": torch.compile(plain, dynamic=False),
    }


def others(case: Case, cos: Tensor, sin: Tensor) -> Iterator[tuple[str, Turn]]:
    """What models use today, as far as it is installed; each has its tables as it expects them."""
    half_cos, half_sin = cos.to(case.dtype), sin.to(case.dtype)
    if case.interleaved:
        full_cos, full_sin = (table.repeat_interleave(2, dim=-1)[None] for table in (half_cos, half_sin))
    else:
        full_cos, full_sin = (torch.cat((table, table), dim=-1)[None] for table in (half_cos, half_sin))
    try:
        if case.interleaved:
            from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb
        else:
            from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    except ImportError:
        print("transformers is not installed", file=sys.stderr)
    else:
        eager: Callable[..., Any] = apply_rotary_pos_emb
        compiled = torch.compile(eager, dynamic=False)
        yield "transformers", lambda q, k: eager(q, k, full_cos, full_sin)
        yield "transformers, compiled", lambda q, k: compiled(q, k, full_cos, full_sin)
    try:
        from flash_attn.layers.rotary import apply_rotary_emb  # type: ignore[import-not-found]
    except ImportError:
        print("flash-attn is not installed", file=sys.stderr)
    else:

        def flash(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            q, k = (apply_rotary_emb(x.transpose(1, 2), half_cos, half_sin, case.interleaved) for x in (q, k))
            return q.transpose(1, 2), k.transpose(1, 2)

        yield "flash-attn", flash
    if case.interleaved:
        return
    try:
        from liger_kernel.transformers.rope import liger_rotary_pos_emb  # type: ignore[import-not-found]
    except ImportError:
        print("liger-kernel is not installed", file=sys.stderr)
    else:
        yield "Liger, in place", lambda q, k: liger_rotary_pos_emb(q, k, full_cos, full_sin)


def bounds(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> float:
    """How far `out` is from the exact rotation, in multiples of what rounding allows; infinite where it is NaN."""
    dtype, half = x.dtype, x.shape[-1] // 2
    out, x, cos, sin = (tensor.detach().cpu().double() for tensor in (out, x, cos, sin))
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))
    x1, x2 = x[..., first], x[..., second]
    worst = 0.0
    for part, summands in ((first, (x1 * cos, -x2 * sin)), (second, (x2 * cos, x1 * sin))):
        exact = summands[0] + summands[1]
        # Two products and a sum in float32, fused or not; then the rounding to the dtype.
        allowed = 2.1 * 2.0**-24 * (summands[0].abs() + summands[1].abs()) + torch.finfo(dtype).eps / 2 * exact.abs()
        worst = max(worst, ((out[..., part] - exact).abs() / allowed).nan_to_num(nan=math.inf).max().item())
    return worst


def worst_of(turn: Turn, case: Case, device: str) -> float:
    """`bounds` of what `turn` makes of fresh inputs, which it may write over."""
    xs = inputs(case, device)
    outs = turn(*(x.clone() for x in xs))
    return max(bounds(out, x, *tables(case, device), case.interleaved) for out, x in zip(outs, xs, strict=True))


def not_the_same_bits(device: str) -> list[str]:
    """Options with which the device does not give the bits of the CPU."""
    differing = []
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for dtype, interleaved, rotary_dim, trailing, conjugate, gathered in itertools.product(
        dtypes, (False, True), (HEAD_DIM, 80, 6), (False, True), (False, True), (False, True)
    ):
        options: dict[str, Any] = {
            "interleaved": interleaved,
            "rotary_dim": rotary_dim,
            "trailing": trailing,
            "conjugate": conjugate,
        }
        case = Case(257, dtype, interleaved)
        q, k = inputs(case, "cpu")
        cos, sin = (table[:, : rotary_dim // 2] for table in tables(case, "cpu"))
        rows = torch.arange(257).flip(0) if gathered else None
        expected = rotate(q, k, cos, sin, positions=rows, **options)
        q, k, cos, sin = (tensor.to(device) for tensor in (q, k, cos, sin))
        given = rotate(q, k, cos, sin, positions=None if rows is None else rows.to(device), **options)
        if not all(torch.equal(one.cpu(), other) for one, other in zip(given, expected, strict=True)):
            differing.append(f"{dtype}, {options}, {'positions' if gathered else 'one row for each token'}")
    return differing
