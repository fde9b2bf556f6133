"""Weights trained for one pair layout of RoPE, put in order for the other.

Interleaved pairs are channels (2i, 2i+1) of a head (GPT-J, Meta's Llama, DeepSeek); halves are (i, i + R/2) (NeoX, and
Llama in transformers). The same rows of the query and key projections, in another order, give the same scores, so a
checkpoint is converted by moving rows: no arithmetic, any dtype, exact, and undone by converting back. Pair i stays
pair i, so frequencies, scalings and the axes of multi-axis positions are as before; so are layers that do not rotate.

Nothing in a tensor says which layout it is in: `to` is where it shall go, and converting twice spoils it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

Layout = Literal["halves", "interleaved"]
Part = Literal[
    "q", "k", "q_norm", "k_norm", "q_gated", "qkv_blocks", "qkv_grouped", "qkv_codegen", "latent_k", "keep"
]  # fmt: skip

_NAMES: dict[str, Part] = {
    **dict.fromkeys(("q_proj", "wq", "query", "q_b_proj", "wq_b"), "q"),
    **dict.fromkeys(("k_proj", "wk", "key"), "k"),
    **dict.fromkeys(("q_norm", "q_layernorm", "query_layernorm"), "q_norm"),
    **dict.fromkeys(("k_norm", "k_layernorm", "key_layernorm"), "k_norm"),
    **dict.fromkeys(("kv_a_proj_with_mqa", "wkv_a"), "latent_k"),
    # Latents have no heads yet, and kv_b makes the channels that do not turn, and the values.
    **dict.fromkeys(("q_a_proj", "wq_a", "q_a_layernorm", "kv_a_layernorm", "kv_norm", "kv_b_proj", "wkv_b"), "keep"),
}
# No name of a fused projection is above: `query_key_value` alone stands for two orders of rows, `qkv_proj` for three.
_LOOKS_LIKE_QK = re.compile(
    r"(^|[^a-z])w?(q|k|qk|kq|kv|qkv|qkvz|query|queries|key|keys)([^a-z]|$)|c_attn|w_pack|in_proj_(weight|bias)",
)
_WEIGHTS = ("weight", "weight_packed")
_BY_ROW = (*_WEIGHTS, "bias", "SCB", "lora_B", "lora_magnitude_vector")
_SCALES = ("weight_scale", "weight_scale_inv", "weight_zero_point")
_NOT_BY_ROW = ("lora_A", "weight_shape", "weight_g_idx")


class Converted(NamedTuple):
    """A state dict in the other layout, and the keys whose rows moved, in its order."""

    state_dict: dict[str, Any]
    changed: tuple[str, ...]


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
    _require_counts(head_dim=head_dim, rotary_dim=rotary_dim)
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
    heads = _Heads(num_heads, num_key_value_heads, head_dim, rotary_dim, trailing, v_head_dim, to)
    return _convert("tensor", tensor, _known(part), heads)


def convert_state_dict(
    state_dict: Mapping[str, Any],
    *,
    num_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    rotary_dim: int | None = None,
    trailing: bool = False,
    v_head_dim: int | None = None,
    to: Layout,
    names: Mapping[str, Part] | None = None,
    sites: Collection[str] | None = None,
    rows_per_scale: int | None = None,
    shard: bool = False,
) -> Converted:
    """A whole checkpoint, or a LoRA adapter alone, in the other layout.

    Projections, biases, norms of queries and keys, factors of LoRA and DoRA, and the scales and zero points of weights
    quantised by rows are found by their names; everything else is passed on as the same object. What looks like
    queries or keys and is not understood is an error, because a row left behind shows in no shape. The config is not
    touched: tell the model afterwards (`interleaved`, `rope_interleave`).

    Args:
        num_heads, num_key_value_heads, head_dim, rotary_dim, trailing, v_head_dim, to: as for `convert_tensor`.
        names: what modules with these names are, before the usual ones: `{"query_key_value": "qkv_grouped"}`.
        sites: where the attention to convert is, with * for the number of a layer: `["model.layers.*.self_attn"]`. Not
            needed where queries and keys have one home; cross attention, a vision tower or an indexer is another.
        rows_per_scale: rows that share a scale, for weights quantised in blocks (128 in DeepSeek's float8).
        shard: this is a part of a checkpoint: queries need not come with their keys, and there may be neither.

    Raises:
        ValueError: a name, a site or a shape does not fit; or, unless `shard`, a layer's queries are here and its keys
            are not, or the reverse, or there is nothing to convert.
    """
    heads = _Heads(num_heads, num_key_value_heads, head_dim, rotary_dim, trailing, v_head_dim, to)
    if rows_per_scale is not None:
        _require_counts(rows_per_scale=rows_per_scale)
    named = {**_NAMES, **{name: _known(part) for name, part in (names or {}).items()}}
    found = _at_sites([_find(key, state_dict[key], named) for key in state_dict], sites)
    converted, changed = dict(state_dict), []
    for tensor in found:
        if _stays(tensor, state_dict, heads, rows_per_scale):
            continue
        converted[tensor.key] = _convert(tensor.key, state_dict[tensor.key], tensor.part, heads)
        changed.append(tensor.key)
    if not shard:
        _require_both(found)
        if not changed:
            raise ValueError("state_dict: no queries or keys were found in it; give their `names`, or shard=True")
    return Converted(converted, tuple(changed))


@dataclass(frozen=True)
class _Heads:
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int | None
    trailing: bool
    v_head_dim: int | None
    to: Layout

    def __post_init__(self) -> None:
        counts = {field.name: getattr(self, field.name) for field in fields(self) if field.type.startswith("int")}
        _require_counts(**{name: count for name, count in counts.items() if count is not None})
        if self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads: got {self.num_key_value_heads}; it must divide num_heads ({self.num_heads})"
            )
        self.channels()

    def channels(self) -> tuple[int, ...]:
        return permutation(self.head_dim, self.rotary_dim, self.trailing, to=self.to)

    def count(self, part: Part) -> int:
        return self.num_key_value_heads if part in ("k", "k_norm") else self.num_heads


class _Found(NamedTuple):
    key: str
    path: str  # of the module that holds the projection
    part: Part
    leaf: str

    @property
    def site(self) -> str:
        return ".".join("*" if word.isdigit() else word for word in self.path.split("."))


@lru_cache(maxsize=32)
def _order(part: Part, heads: _Heads) -> tuple[int, ...]:
    """Which row each row comes from, for the parts whose number of rows follows from the heads."""
    query_heads, key_heads = heads.num_heads, heads.num_key_value_heads
    turned = heads.channels()
    still = tuple(range(heads.head_dim if heads.v_head_dim is None else heads.v_head_dim))
    if part == "q_gated":
        run = (turned, tuple(range(heads.head_dim))) * query_heads
    elif part == "qkv_blocks":
        run = (turned,) * (query_heads + key_heads) + (still,) * key_heads
    elif part == "qkv_grouped":
        run = ((turned,) * (query_heads // key_heads + 1) + (still,)) * key_heads
    elif part == "qkv_codegen":
        if query_heads % 4 or query_heads != key_heads:
            raise ValueError(f"num_heads: got {query_heads} with {key_heads} key heads; CodeGen's are 4n, and as many")
        run = ((turned,) * (query_heads // 4) + (still,) * (query_heads // 4) + (turned,) * (query_heads // 4)) * 4
    else:
        run = (turned,) * heads.count(part)
    return tuple(_chained(run))


def _chained(run: Iterable[tuple[int, ...]]) -> Iterable[int]:
    first = 0
    for rows in run:
        yield from (first + row for row in rows)
        first += len(rows)


def _order_of(name: str, part: Part, heads: _Heads, rows: int) -> tuple[int, ...]:
    if part != "latent_k":
        return _order(part, heads)
    width = heads.head_dim if heads.rotary_dim is None else heads.rotary_dim
    if not heads.trailing:
        raise ValueError(
            f"trailing: got False; with {name} the last {width} channels of a head turn: give trailing=True"
        )
    if rows <= width:
        raise ValueError(f"{name}: got {rows} rows; it must have a latent before the {width} rows of the rotary_dim")
    return permutation(rows, width, trailing=True, to=heads.to)


def _convert(name: str, tensor: Tensor, part: Part, heads: _Heads) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: got {type(tensor).__name__}; it must be a tensor")
    shape, width, count = tuple(tensor.shape), heads.head_dim, heads.count(part)
    gain = part in ("q_norm", "k_norm")
    if gain and shape in ((width,), (count, width)):
        return _taken(tensor, heads.channels(), dim=-1)
    if part == "keep":
        return tensor.detach().clone()
    order = _order_of(name, part, heads, shape[0] if shape else 0)
    if not shape or shape[0] != len(order) or (gain and len(shape) > 1):
        also = f"({width},), ({count}, {width}) or " if gain else ""
        raise ValueError(f"{name}: got shape {shape}; as {part!r} it must have {also}{_words(part, heads, len(order))}")
    return _taken(tensor, order, dim=0)


def _taken(tensor: Tensor, order: tuple[int, ...], *, dim: int) -> Tensor:
    return tensor.detach().index_select(dim, torch.tensor(order, device=tensor.device))


def _words(part: Part, heads: _Heads, rows: int) -> str:
    of = f"of head_dim {heads.head_dim}"
    if part.startswith("qkv"):
        values = heads.head_dim if heads.v_head_dim is None else heads.v_head_dim
        count = heads.num_key_value_heads
        return f"{rows} rows: {heads.num_heads} query heads and {count} key heads {of}, {count} value heads of {values}"
    if part == "q_gated":
        return f"{rows} rows: {heads.num_heads} heads {of}, each with a gate of as many"
    return f"{rows} rows: {heads.count(part)} heads {of}"


def _find(key: str, tensor: object, named: Mapping[str, Part]) -> _Found | None:
    words = key.split(".")
    known = [place for place, word in enumerate(words) if word in named]
    single = isinstance(tensor, Tensor) and tensor.numel() == 1
    if not known:
        looking = [place for place, word in enumerate(words) if _LOOKS_LIKE_QK.search(word.lower())]
        # One number, say the scale of a key-value cache, has no rows to move.
        if not looking or single:
            return None
        return _Found(key, ".".join(words[: looking[-1]]), "keep", words[looking[-1]])
    place = known[-1]
    after = [word for word in words[place + 1 :] if word not in ("base_layer", "norms") and not word.isdigit()]
    leaf = "weight" if not after else ".".join(after) if after[0] in ("weight", "bias", "SCB") else after[0]
    part: Part = "keep" if single and leaf not in _BY_ROW else named[words[place]]
    return _Found(key, ".".join(words[:place]), part, "" if part == "keep" else leaf)


def _at_sites(found: Iterable[_Found | None], sites: Collection[str] | None) -> list[_Found]:
    """What is to be converted; refuses what is not understood there, and a choice that nobody made."""
    tensors = [tensor for tensor in found if tensor is not None and (sites is None or tensor.site in sites)]
    for tensor in tensors:
        if tensor.part == "keep" and tensor.leaf:
            raise ValueError(
                f"{tensor.key}: {tensor.leaf!r} looks like queries or keys, and its name does not say how its rows "
                f"stand; give names={{{tensor.leaf!r}: part}} with one of {list(get_args(Part))} (see convert_tensor)"
            )
        if tensor.part != "keep" and tensor.leaf not in (*_BY_ROW, *_SCALES, *_NOT_BY_ROW):
            raise ValueError(
                f"{tensor.key}: {tensor.leaf!r} of queries or keys may hold their rows, in an order that is not known "
                f"here; convert the checkpoint before it is quantised, or adapted in this way"
            )
    there = {tensor.site for tensor in tensors if tensor.part != "keep"}
    if sites is None and len(there) > 1:
        raise ValueError(f"sites: queries and keys are in {sorted(there)}; give those that this layout is for")
    if sites is not None and not isinstance(sites, str) and there >= set(sites):
        return [tensor for tensor in tensors if tensor.part != "keep"]
    if sites is not None:
        raise ValueError(
            f"sites: got {sites!r}; it must be a list of sites, and queries or keys are in {sorted(there)}"
        )
    return [tensor for tensor in tensors if tensor.part != "keep"]


def _stays(found: _Found, state_dict: Mapping[str, Any], heads: _Heads, rows_per_scale: int | None) -> bool:
    """Whether a tensor is the same in both layouts; a scale of a block is, if no row leaves its block."""
    if found.leaf in _NOT_BY_ROW:
        return True
    if found.leaf not in _SCALES or rows_per_scale is None:
        return False
    weight = state_dict.get(found.key[: -len(found.leaf)] + "weight")
    if weight is None:
        raise ValueError(f"{found.key}: its weight is not in state_dict; give both, for rows_per_scale counts its rows")
    order = _order_of(found.key, found.part, heads, weight.shape[0])
    blocks = -(-len(order) // rows_per_scale)
    if state_dict[found.key].shape[0] != blocks:
        raise ValueError(
            f"rows_per_scale: got {rows_per_scale}, which makes {blocks} blocks of the {len(order)} rows of heads; "
            f"{found.key} has shape {tuple(state_dict[found.key].shape)}"
        )
    if any(row // rows_per_scale != source // rows_per_scale for row, source in enumerate(order)):
        raise ValueError(f"{found.key}: rows would leave their blocks of {rows_per_scale}; dequantise the weight first")
    return True


def _require_both(found: Iterable[_Found]) -> None:
    parts: dict[str, set[str]] = {}
    for tensor in found:
        if tensor.leaf in _WEIGHTS:
            parts.setdefault(tensor.path, set()).add(tensor.part)
    for path, there in parts.items():
        if bool(there & {"q", "q_gated"}) != bool(there & {"k", "latent_k"}):
            raise ValueError(
                f"{path}: got weights for {sorted(there)}; queries and keys turn together, so both must be here "
                "under known names (give `names`); shard=True if the checkpoint is in parts"
            )


def _known(part: Part) -> Part:
    if part not in get_args(Part):
        raise ValueError(f"part: got {part!r}; it must be one of {list(get_args(Part))}")
    return part


def _require_counts(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name}: got {count!r}; it must be a whole number above 0")
