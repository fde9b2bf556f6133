"""Weights trained for one pair layout of RoPE, put in order for the other.

Interleaved pairs are channels (2i, 2i+1) of a head (GPT-J, Meta's Llama, DeepSeek); halves are (i, i + R/2) (NeoX, and
Llama in transformers). The same rows of the query and key projections, in another order, give the same scores, so a
checkpoint is converted by moving rows: no arithmetic, any dtype, exact, and undone by converting back. Pair i stays
pair i, so frequencies, scalings and the axes of multi-axis positions are as before; so are layers that do not rotate.

Nothing in a tensor says which layout it is in: `to` is where it shall go, and converting twice spoils it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

Layout = Literal["halves", "interleaved"]
Part = Literal[
    "q", "k", "q_norm", "k_norm", "q_gated", "qkv_blocks", "qkv_grouped", "qkv_codegen", "latent_k", "keep"
]  # fmt: skip
FUSED = ("qkv_blocks", "qkv_grouped", "qkv_codegen")
"""Parts that hold queries, keys and values in one tensor."""


def permutation(head_dim: int, rotary_dim: int | None = None, trailing: bool = False, *, to: Layout) -> tuple[int, ...]:
    """Where each channel of a head comes from: `new = old[..., list(permutation(...))]`.

    Args:
        head_dim: channels of a head.
        rotary_dim: channels that turn, the last ones if `trailing`; all by default. The others stay where they are.
        to: "halves" (evens, then odds: what Meta's weights need in transformers) or "interleaved", its inverse.

    Raises:
        ValueError: a width is not a whole number above 0, or `rotary_dim` is odd or more than `head_dim`.
    """
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    require_counts(head_dim=head_dim, rotary_dim=rotary_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise ValueError(f"rotary_dim: got {rotary_dim}; it must be even and at most head_dim ({head_dim})")
    if to not in get_args(Layout):
        raise ValueError(f"to: got {to!r}; it must be 'halves' or 'interleaved'")
    half = rotary_dim // 2
    if to == "halves":
        turned = [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2)]
    else:
        turned = [channel for pair in range(half) for channel in (pair, half + pair)]
    first = head_dim - rotary_dim if trailing else 0
    return (*range(first), *(first + channel for channel in turned), *range(first + rotary_dim, head_dim))


def convert_tensor(
    tensor: Tensor,
    part: Part,
    *,
    num_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    rotary_dim: int | None = None,
    trailing: bool = False,
    v_head_dim: int | None = None,
    to: Layout,
) -> Tensor:
    """One tensor in the other layout: a new one, without gradient, of the same dtype; `tensor` is left alone.

    `part` says how the rows stand (H query heads, K key-value heads, G = H/K, D head_dim, V v_head_dim, R rotary_dim,
    E whatever comes after the rows: the inputs of a weight, the rank of a LoRA B, nothing for a bias):
        "q", "k": (H*D, E), (K*D, E). Weights, biases, the B factor of LoRA (A has no rows of heads and stays).
        "q_norm", "k_norm": gains after the projection: (D,) for all heads, (H, D), or (H*D,); K for keys.
        "q_gated": (H*2*D, E), in each head the query, then its gate (Qwen3-Next).
        "qkv_blocks": (H*D + K*D + K*V, E), all queries, all keys, all values (Phi-3, DBRX, ChatGLM, ModernBERT).
        "qkv_grouped": (K, G queries + key + value, ...) flattened (NeoX, where G is 1; Falcon; InternLM2).
        "qkv_codegen": four shards, each of queries, values, keys (CodeGen).
        "latent_k": (latent + R, E), the key that all heads share in the last R rows (`kv_a_proj_with_mqa`).
        "keep": nothing moves.

    Args:
        head_dim: channels of a query head: in latent attention those that turn and those that do not (DeepSeek: 192).
        rotary_dim, trailing: as for `permutation` (DeepSeek: 64, trailing).
        v_head_dim: channels of a value head, where they are fused; `head_dim` by default.

    Raises:
        ValueError: the rows are not those of such heads.
    """
    heads = Heads(num_heads, num_key_value_heads, head_dim, rotary_dim, trailing, v_head_dim, to)
    return convert_rows("tensor", tensor, known(part), heads)


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int | None
    trailing: bool
    v_head_dim: int | None
    to: Layout

    def __post_init__(self) -> None:
        require_counts(num_heads=self.num_heads, num_key_value_heads=self.num_key_value_heads, v_head_dim=self.values)
        if self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads: got {self.num_key_value_heads}; it must divide num_heads ({self.num_heads})"
            )
        self.channels()

    def channels(self) -> tuple[int, ...]:
        return permutation(self.head_dim, self.rotary_dim, self.trailing, to=self.to)

    @property
    def values(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    def count(self, part: Part) -> int:
        return self.num_key_value_heads if part in ("k", "k_norm") else self.num_heads


@lru_cache(maxsize=32)
def _order(part: Part, heads: Heads) -> tuple[int, ...]:
    """Which row each row comes from, for the parts whose number of rows follows from the heads."""
    query_heads, key_heads = heads.num_heads, heads.num_key_value_heads
    turned = heads.channels()
    still = tuple(range(heads.values))
    if part == "q_gated":
        run = (turned, tuple(range(heads.head_dim))) * query_heads
    elif part == "qkv_blocks":
        run = (turned,) * (query_heads + key_heads) + (still,) * key_heads
    elif part == "qkv_grouped":
        run = ((turned,) * (query_heads // key_heads + 1) + (still,)) * key_heads
    elif part == "qkv_codegen":
        if query_heads % 4 or query_heads != key_heads:
            raise ValueError(
                f"num_heads: got {query_heads}, and {key_heads} key-value heads; "
                "for 'qkv_codegen' they must be equal, and divisible by 4"
            )
        run = ((turned,) * (query_heads // 4) + (still,) * (query_heads // 4) + (turned,) * (query_heads // 4)) * 4
    else:
        run = (turned,) * heads.count(part)
    return tuple(_chained(run))


def _chained(run: Iterable[tuple[int, ...]]) -> Iterable[int]:
    first = 0
    for rows in run:
        yield from (first + row for row in rows)
        first += len(rows)


def order_of(name: str, part: Part, heads: Heads, rows: int) -> tuple[int, ...]:
    if part != "latent_k":
        return _order(part, heads)
    width = heads.head_dim if heads.rotary_dim is None else heads.rotary_dim
    if not heads.trailing:
        raise ValueError(
            f"trailing: got False; where keys are latent ({name}) the last {width} channels of a head turn: give True"
        )
    if rows <= width:
        raise ValueError(f"{name}: got {rows} rows; it must have a latent before the {width} rows of the rotary_dim")
    return permutation(rows, width, trailing=True, to=heads.to)


def convert_rows(name: str, tensor: Tensor, part: Part, heads: Heads) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: got {type(tensor).__name__}; it must be a tensor")
    shape, width, count = tuple(tensor.shape), heads.head_dim, heads.count(part)
    gain = part in ("q_norm", "k_norm")
    if gain and shape in ((width,), (count, width)):
        return _taken(tensor, heads.channels(), dim=-1)
    if part == "keep":
        return tensor.detach().clone()
    order = order_of(name, part, heads, shape[0] if shape else 0)
    if not shape or shape[0] != len(order) or (gain and len(shape) > 1):
        also = f"({width},), ({count}, {width}) or " if gain else ""
        raise ValueError(f"{name}: got shape {shape}; as {part!r} it must have {also}{_words(part, heads, len(order))}")
    return _taken(tensor, order, dim=0)


def _taken(tensor: Tensor, order: tuple[int, ...], *, dim: int) -> Tensor:
    return tensor.detach().index_select(dim, torch.tensor(order, device=tensor.device))


def _words(part: Part, heads: Heads, rows: int) -> str:
    of = f"of head_dim {heads.head_dim}"
    if part in FUSED:
        count = heads.num_key_value_heads
        values = f"{count} value heads of {heads.values}"
        return f"{rows} rows: {heads.num_heads} query heads and {count} key heads {of}, {values}"
    if part == "q_gated":
        return f"{rows} rows: {heads.num_heads} heads {of}, each with a gate of as many"
    return f"{rows} rows: {heads.count(part)} heads {of}"


def known(part: Part) -> Part:
    if part not in get_args(Part):
        raise ValueError(f"part: got {part!r}; it must be one of {list(get_args(Part))}")
    return part


def require_counts(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name}: got {count!r}; it must be a whole number above 0")
