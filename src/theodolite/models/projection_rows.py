"""Rows of queries and keys, head by head, taken from a checkpoint's projections whatever their arrangement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from theodolite.encodings.layout import Part
from theodolite.models.errors import LoadError
from theodolite.models.layer_heads import LayerHeads, Width, layer_of
from theodolite.models.pair_evidence import Array
from theodolite.models.tensor_files import Entry, TensorFile

_KNOWN: dict[str, Part] = {
    **dict.fromkeys(("q_proj", "wq", "query", "q_b_proj", "wq_b"), "q"),
    **dict.fromkeys(("k_proj", "wk", "key"), "k"),
    **dict.fromkeys(("kv_a_proj_with_mqa", "wkv_a"), "latent_k"),
}
_QUERIES, _KEYS = ("q", "q_gated"), ("k", "latent_k")
_FUSED = ("qkv_blocks", "qkv_grouped", "qkv_codegen")
# What comes before the queries' projection where they are made from a latent, and the gain between the two.
_FIRST, _FIRST_GAIN = ("q_a_proj", "wq_a"), ("q_a_layernorm", "q_norm")
_NUMBERS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I8")

Home = tuple[int, str]


def projection_rows(
    files: Sequence[TensorFile], heads: LayerHeads, sites: Iterable[str] | None = None
) -> Iterator[tuple[int, Array, Array]]:
    """The number, and the rows (H, R, E) and (K, R, E), of each layer that turns.

    Raises:
        LoadError: no queries and keys are found, or they hold no plain numbers.
        ValueError: their rows are not those of such heads, or they are in several places and nobody says which.
    """
    known = {**_KNOWN, **heads.names}
    homes: dict[Home, dict[str, Entry]] = {}
    for file in files:
        for entry in file.entries:
            words, layer = entry.name.split("."), layer_of(entry.name)
            if layer is None or len(words) < 3 or words[-1] != "weight":
                continue
            if words[-2] in (*known, *_FIRST, *_FIRST_GAIN):
                homes.setdefault((layer, ".".join(words[:-2])), {})[words[-2]] = entry
    for (layer, path), tensors in _chosen(homes, known, sites):
        width = heads.width_of(f"{path}.")
        if width is not None:
            yield layer, *_rows(tensors, known, heads, width)


def _chosen(
    homes: Mapping[Home, dict[str, Entry]], known: Mapping[str, Part], sites: Iterable[str] | None
) -> list[tuple[Home, dict[str, Entry]]]:
    """The places that have queries and keys both, if they are of one kind or of those asked for."""
    whole = []
    for home, tensors in sorted(homes.items()):
        parts = {known.get(name) for name in tensors}
        if parts & set(_FUSED) or (parts & set(_QUERIES) and parts & set(_KEYS)):
            whole.append((home, tensors))
    if not whole:
        raise LoadError("no layer's queries and keys were found, together and under known names")
    there = {site_of(path) for (_, path), _ in whole}
    wanted = there if sites is None else there & set(sites)
    if (sites is None and len(there) > 1) or not wanted:
        raise ValueError(f"sites: queries and keys are in {sorted(there)}; say which are meant")
    return [one for one in whole if site_of(one[0][1]) in wanted]


def site_of(path: str) -> str:
    """The path of a module with * for the numbers in it."""
    return ".".join("*" if word.isdigit() else word for word in path.split("."))


def _rows(
    tensors: Mapping[str, Entry], known: Mapping[str, Part], heads: LayerHeads, width: Width
) -> tuple[Array, Array]:
    by_part = {known[name]: entry for name, entry in tensors.items() if name in known}
    fused = next((part for part in by_part if part in _FUSED), None)
    if fused is not None:
        return fused_rows(numbers(by_part[fused]), by_part[fused].name, fused, heads, width)
    q_part, k_part = (next(part for part in by_part if part in parts) for parts in (_QUERIES, _KEYS))
    q, k = (numbers(by_part[part]) for part in (q_part, k_part))
    if k_part == "latent_k":
        k = k[None, -width.rotary_dim :]
    else:
        k = _turning(_by_head(k, by_part[k_part].name, heads.num_key_value_heads, width.head_dim), width)
    q = _by_head(q, by_part[q_part].name, heads.num_heads, width.head_dim * (2 if q_part == "q_gated" else 1))
    q = _turning(q[:, : width.head_dim], width)
    first = next((tensors[name] for name in _FIRST if name in tensors), None)
    if first is not None:
        # Queries of a latent: their products with keys are those of keys seen through the first projection.
        k = k @ numbers(first).T
        gain = next((tensors[name] for name in _FIRST_GAIN if name in tensors), None)
        if gain is not None:
            k = k * numbers(gain)
    if q.shape[-1] != k.shape[-1] or len(q) % len(k):
        raise ValueError(
            f"{by_part[k_part].name}: {len(k)} key heads of {k.shape[-1]} inputs do not fit "
            f"{len(q)} query heads of {q.shape[-1]}"
        )
    return q, k


def fused_rows(rows: Array, name: str, part: Part, heads: LayerHeads, width: Width) -> tuple[Array, Array]:
    """Query heads and key heads out of one projection."""
    query_heads, key_heads = heads.num_heads, heads.num_key_value_heads
    if query_heads is None or key_heads is None:
        raise ValueError(f"{name}: queries, keys and values in one; how many heads they have must be given")
    if query_heads % key_heads or (part == "qkv_codegen" and (query_heads % 4 or query_heads != key_heads)):
        raise ValueError(f"{name}: {query_heads} query heads and {key_heads} key heads do not go together")
    values, head = heads.v_head_dim or width.head_dim, width.head_dim
    share, inputs = query_heads // key_heads, rows.shape[-1]
    if rows.ndim != 2 or len(rows) != (query_heads + key_heads) * head + key_heads * values:
        raise ValueError(f"{name}: got shape {rows.shape}, which {query_heads} and {key_heads} heads do not fill")
    if part == "qkv_blocks":
        end = query_heads * head
        q, k = rows[:end].reshape(-1, head, inputs), rows[end : end + key_heads * head].reshape(-1, head, inputs)
    elif part == "qkv_grouped":
        groups = rows.reshape(key_heads, (share + 1) * head + values, inputs)
        q = groups[:, : share * head].reshape(-1, head, inputs)
        k = groups[:, share * head : (share + 1) * head]
    else:
        quarters = rows.reshape(4, 3, query_heads // 4, head, inputs)
        q, k = (quarters[:, at].reshape(-1, head, inputs) for at in (0, 2))
    return _turning(q, width), _turning(k, width)


def _by_head(rows: Array, name: str, count: int | None, width: int) -> Array:
    """(H, D, E) of (H*D, E)."""
    if rows.ndim != 2 or not len(rows) or len(rows) % width or (count is not None and len(rows) != count * width):
        said = "whole heads" if count is None else f"{count} heads"
        raise ValueError(f"{name}: got shape {rows.shape}; it must have the rows of {said} of {width}")
    return rows.reshape(-1, width, rows.shape[-1])


def _turning(heads: Array, width: Width) -> Array:
    if heads.shape[1] != width.head_dim:
        raise ValueError(f"head_dim: got heads of {heads.shape[1]} channels, and {width.head_dim} are stated")
    return heads[:, width.head_dim - width.rotary_dim :] if width.trailing else heads[:, : width.rotary_dim]


def split_heads(q: Array, k: Array, heads: LayerHeads, width: Width, names: tuple[str, str]) -> tuple[Array, Array]:
    """Rows (H, R, E) and (K, R, E) of two plain projections (H*D, E) and (K*D, E)."""
    counts = (heads.num_heads, heads.num_key_value_heads)
    q, k = (
        _turning(_by_head(x, name, count, width.head_dim), width)
        for x, name, count in zip((q, k), names, counts, strict=True)
    )
    if len(q) % len(k):
        raise ValueError(f"{names[1]}: {len(k)} key heads do not divide {len(q)} query heads")
    return q, k


def numbers(entry: Entry) -> Array:
    """A tensor as float32.

    Raises:
        LoadError: its dtype is that of packed weights.
    """
    if entry.dtype not in _NUMBERS:
        raise LoadError(f"{entry.name}: {entry.dtype} holds packed weights; detect looks at floats and whole numbers")
    found: Array = entry.read().float().numpy()
    return np.nan_to_num(found, copy=False)
