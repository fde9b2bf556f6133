"""Positions of documents packed one after another: from cumulative lengths, or from a number per token.

Two forms say the same. `cu_seqlens` (documents + 1,) holds where each document begins and, last, where the last one
ends: [0, 3, 7] is a document of 3 tokens and one of 4. Document ids have one number per token: [0, 0, 0, 1, 1, 1, 1],
negative for padding; a document is a run of equal numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from theodolite.positions.checks import can_read, integers_of, require_count, require_integers

_LARGEST_INT32 = 2**31 - 1


def from_cu_seqlens(
    cu_seqlens: Tensor | Sequence[int],
    *,
    total: int | None = None,
    reset: bool = True,
    trailing_padding: bool = False,
) -> Tensor:
    """Positions (T,) of the T tokens of a pack, int64, starting at 0 in each document.

    Args:
        cu_seqlens: (documents + 1,) integers from 0, never falling; a document may be empty. A list is put on the CPU.
        total: T. Read from `cu_seqlens` if not given, which a traced graph cannot do.
        reset: false counts on through the pack, as long-context training on short documents wants.
        trailing_padding: T may be larger than the last of `cu_seqlens`; what stands after it has position 0.

    The values are read once to be checked, on any device; a traced graph goes without.

    Raises:
        ValueError: `cu_seqlens` does not start at 0, falls, or does not end at `total`.
    """
    cu_seqlens, total = require_cu_seqlens(cu_seqlens, total, trailing_padding=trailing_padding)
    tokens = torch.arange(total, device=cu_seqlens.device)
    starts = cu_seqlens[:-1][_document_of(tokens, cu_seqlens).clamp(max=cu_seqlens.shape[0] - 2)]
    positions = tokens - starts if reset else tokens
    return positions.masked_fill(tokens >= cu_seqlens[-1], 0) if trailing_padding else positions


def document_ids(
    cu_seqlens: Tensor | Sequence[int], *, total: int | None = None, trailing_padding: bool = False
) -> Tensor:
    """Each token's document (T,), int64: its index in `cu_seqlens`, or -1 for trailing padding.

    Arguments and errors as `from_cu_seqlens`. An empty document has no token, so its number is passed over.
    """
    cu_seqlens, total = require_cu_seqlens(cu_seqlens, total, trailing_padding=trailing_padding)
    tokens = torch.arange(total, device=cu_seqlens.device)
    ids = _document_of(tokens, cu_seqlens)
    return ids.masked_fill(tokens >= cu_seqlens[-1], -1) if trailing_padding else ids


def from_document_ids(document_ids: Tensor) -> Tensor:
    """Positions (B, S) or (S,), int64, of tokens with these document ids: each run of equal ids counts from 0.

    Negative ids are padding and have position 0. Where 0 is padding and documents count from 1, subtract 1 first.

    Raises:
        ValueError: not integers, or another shape.
    """
    require_integers("document_ids", document_ids, dims=(1, 2))
    ids = document_ids.to(torch.int64)
    tokens = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
    return (tokens - latest(tokens, run_starts(ids))).masked_fill(ids < 0, 0)


def cu_seqlens_of_lengths(lengths: Tensor | Sequence[int]) -> Tensor:
    """`cu_seqlens` (documents + 1,) of documents of these lengths (documents,), int32 as kernels for packs want it.

    Of a list it is made on the CPU.

    Raises:
        ValueError: a negative length, or 2**31 tokens and more.
    """
    lengths = integers_of("lengths", lengths, of="one for each document")
    if lengths.dim() != 1:
        raise ValueError(f"lengths: got shape {tuple(lengths.shape)}; it must be (documents,)")
    cu_seqlens = torch.nn.functional.pad(lengths.to(torch.int64).cumsum(0), (1, 0))
    if can_read(lengths):
        values = cu_seqlens.tolist()
        for document, (start, end) in enumerate(pairwise(values)):
            if end < start:
                raise ValueError(f"lengths: document {document} has {end - start}; no length is negative")
        if values[-1] > _LARGEST_INT32:
            raise ValueError(f"lengths: they sum to {values[-1]}; int32 holds up to {_LARGEST_INT32}")
    return cu_seqlens.to(torch.int32)


def cu_seqlens_of_documents(document_ids: Tensor) -> Tensor:
    """`cu_seqlens` (documents + 1,), int32, of runs of equal ids (S,), or of rows (B, S) laid end to end.

    A row's start always begins a document. Padding (negative ids) at the very end is left out, so that the last
    entry is where the last document ends. How many documents there are is read from the values, so this cannot be
    traced into a graph.

    Raises:
        ValueError: padding elsewhere: `cu_seqlens` has no gaps, so take it out of the tokens first.
    """
    require_integers("document_ids", document_ids, dims=(1, 2))
    ids = document_ids.to(torch.int64)
    starts, real = run_starts(ids).reshape(-1), (ids >= 0).reshape(-1)
    total = int(real.sum())
    if not bool(real[:total].all()):
        where = int((~real).nonzero()[0])
        raise ValueError(
            f"document_ids: token {where} is padding and a document follows; cu_seqlens has no gaps: "
            "take the padding out of the tokens first"
        )
    return torch.nn.functional.pad(starts[:total].nonzero().reshape(-1), (0, 1), value=total).to(torch.int32)


def run_starts(ids: Tensor) -> Tensor:
    """True where a run of equal numbers begins along the last dimension, as its first entry always does."""
    return with_first(ids != ids.roll(1, -1), True)


def with_first(values: Tensor, first: int) -> Tensor:
    """The values with another first entry along the last dimension, for any length, 0 and 1 among them."""
    # A slice would bind an exported graph to lengths above 2.
    return values.masked_fill(torch.arange(values.shape[-1], device=values.device) == 0, first)


def latest(values: Tensor, flags: Tensor) -> Tensor:
    """The value at the last flag so far along the last dimension, for values that never fall; 0 before any flag."""
    return torch.where(flags, values, 0).cummax(-1).values


def _document_of(tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
    return torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)


def require_cu_seqlens(
    cu_seqlens: Tensor | Sequence[int], total: int | None, *, trailing_padding: bool = False
) -> tuple[Tensor, int]:
    """`cu_seqlens` as int64 and the number of tokens, once both are what `from_cu_seqlens` says."""
    cu_seqlens = integers_of("cu_seqlens", cu_seqlens, of="where each document begins and the last one ends")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens: got shape {tuple(cu_seqlens.shape)}; it must be (documents + 1,)")
    cu_seqlens = cu_seqlens.to(torch.int64)
    if total is not None:
        require_count("total", total, least=0)
    if not can_read(cu_seqlens):
        if total is None:
            raise ValueError("total: cu_seqlens cannot be read here, in a traced graph or on meta; give the tokens")
        return cu_seqlens, total
    values = cu_seqlens.tolist()
    if values[0] != 0:
        raise ValueError(f"cu_seqlens: starts at {values[0]}; it must start at 0")
    for document, (start, end) in enumerate(pairwise(values)):
        if end < start:
            raise ValueError(f"cu_seqlens: falls from {start} to {end} at document {document}; it may not fall")
    last = int(values[-1])
    if total is None:
        return cu_seqlens, last
    if total < last or (total > last and not trailing_padding):
        hint = " (tokens after the last document need trailing_padding=True)" if total > last else ""
        raise ValueError(f"cu_seqlens: ends at {last}; it must end at the {total} tokens of the pack{hint}")
    return cu_seqlens, total
