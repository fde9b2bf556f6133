"""Query and key rows of a GGUF file, as they stand in it: nothing is put in another order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from theodolite.models.errors import LoadError, refusing
from theodolite.models.layer_heads import LayerHeads, width_of
from theodolite.models.pair_evidence import Array
from theodolite.models.projection_rows import fused_rows, split_heads
from theodolite.models.source import checked_header
from theodolite.plan import PlanError
from theodolite.plan.gguf import read_file
from theodolite.plan.gguf_header import Header

_KEYS = ("head_count", "head_count_kv")


def gguf_rows(path: Path) -> Iterator[tuple[int, Array, Array]]:
    """The number, and the rows (H, R, E) and (K, R, E), of each layer that turns; dequantised one by one.

    Raises:
        LoadError: the file is damaged, or says or holds too little.
    """
    if not path.is_file():
        raise LoadError(f"{path} does not exist, or is no file")
    header = checked_header(path)
    try:
        plan = read_file(path)
    except PlanError as error:
        raise LoadError(str(error)) from None
    if not plan.rotaries:
        raise LoadError(f"{path}: no layer of it turns queries and keys, so there is no layout")
    tensors = _Tensors(path, header)
    found = False
    for layer, policy in enumerate(plan.layers):
        names = {part: f"blk.{layer}.attn_{part}.weight" for part in ("q", "k", "qkv")}
        if policy.rotate is None or not (names["qkv"] in tensors or (names["q"] in tensors and names["k"] in tensors)):
            continue
        found, width = True, width_of(policy.rotate)
        counts = [_count(header, key, layer) for key in _KEYS]
        heads = LayerHeads(num_heads=counts[0], num_key_value_heads=counts[1] or counts[0], widths=(width,))
        if names["qkv"] in tensors:
            # llama.cpp's converters bring all arrangements to this one.
            yield layer, *fused_rows(tensors.numbers(names["qkv"]), names["qkv"], "qkv_blocks", heads, width)
        else:
            q, k = (tensors.numbers(names[part]) for part in "qk")
            yield layer, *split_heads(q, k, heads, width, (names["q"], names["k"]))
    if not found:
        raise LoadError(f"{path}: no layer has queries and keys under the names blk.*.attn_q and blk.*.attn_k")


def _count(header: Header, key: str, layer: int) -> int | None:
    """A number of heads, which some files state layer by layer."""
    stated = header.stated(f"attention.{key}")
    by_layer = header.lists.get(f"{header.metadata.get('general.architecture')}.attention.{key}", [])
    if stated is None and layer < len(by_layer):
        stated = by_layer[layer]
    return stated if type(stated) is int and stated > 0 else None


class _Tensors:
    """The numbers of a file's tensors by name. Not through `GGUFReader`, which walks the tokenizer for seconds."""

    def __init__(self, path: Path, header: Header) -> None:
        try:
            import gguf
        except ImportError as error:
            raise ImportError(f"reading GGUF files needs more: pip install 'theodolite[survey]' ({error})") from error
        self._gguf: Any = gguf
        self._path, self._header = path, header
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")

    def __contains__(self, name: str) -> bool:
        return name in self._header.shapes

    def numbers(self, name: str) -> Array:
        """A tensor, dequantised, with its rows first; float32, and 0 for what is no number."""
        number, begin = self._header.places[name]
        shape = self._header.shapes[name][::-1]
        with refusing(f"{name} cannot be dequantised"):
            kind = self._gguf.GGMLQuantizationType(number)
            block, size = self._gguf.GGML_QUANT_SIZES[kind]
            if not shape or shape[-1] % block:
                raise ValueError(f"its rows are no whole blocks of {block}")
            width = shape[-1] // block * size
            end = begin + math.prod(shape[:-1]) * width
            if end > len(self._bytes):
                raise ValueError(f"it ends {end - len(self._bytes):,} bytes past the file")
            rows = self._bytes[begin:end].reshape(*shape[:-1], width)
            plain = {"F32": np.float32, "F16": np.float16}.get(kind.name)
            found = rows.view(plain) if plain is not None else self._gguf.dequantize(rows, kind)
            return np.asarray(np.nan_to_num(found.astype(np.float32)))
