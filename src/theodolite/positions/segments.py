"""Positions on two levels: a token's place in its segment, and the segment's place in the text.

Bilevel encoding (BiPE, arXiv 2401.16421, section 3) embeds the first and rotates or biases by the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from theodolite.positions.checks import require_integers, require_mask
from theodolite.positions.packing import latest, run_starts, with_first
from theodolite.positions.padding import real_tokens


class Segments(NamedTuple):
    """Two positions per token, (B, S) or (S,), int64: its index in the segment, and the segment's index."""

    intra: Tensor
    inter: Tensor


def segment_positions(
    *,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    document_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> Segments:
    """Both positions of each token, from where segments start or where they end.

    Shapes (B batch, S tokens): every argument is (B, S) or (S,), all alike. A row's first real token starts a
    segment, flagged or not.

    Args:
        starts: not 0 where a token is the first of a segment.
        ends: not 0 where a token is the last of one, as a full stop is; give this or `starts`.
        document_ids: both positions begin again at 0 in each run of equal ids; negative ids are padding.
        attention_mask: 0 at padding, which is not counted and has 0 for both positions. A start flagged on padding
            holds for the real token after it.

    Raises:
        ValueError: both or none of `starts` and `ends`, shapes that differ, or a float mask.
    """
    flags = _flags(starts, ends)
    real, documents = torch.ones_like(flags), torch.zeros_like(flags)
    if attention_mask is not None:
        real = real_tokens("attention_mask", attention_mask)
        _require_same("attention_mask", real, flags)
    if document_ids is not None:
        require_integers("document_ids", document_ids, dims=(1, 2))
        _require_same("document_ids", document_ids, flags)
        ids = document_ids.to(torch.int64)
        real, documents = real & (ids >= 0), run_starts(ids)
    documents = _on_real_tokens(documents, real)
    first = _on_real_tokens(flags, real) | documents
    token, segment = real.cumsum(-1), first.cumsum(-1)
    intra = token - latest(token, first)
    inter = segment - latest(segment, documents)
    return Segments(intra.masked_fill(~real, 0), inter.masked_fill(~real, 0))


def starts_after(token_ids: Tensor, *, separators: Sequence[int]) -> Tensor:
    """True at each token that follows a separator, and at the first of each row: (B, S) or (S,) booleans.

    A separator closes the segment it stands in, as a full stop or a newline does; two in a row make a segment of
    one token, as in the published code.

    Args:
        separators: token ids.

    Raises:
        ValueError: no separator, or ids that are not integers.
    """
    require_integers("token_ids", token_ids, dims=(1, 2))
    if not separators:
        raise ValueError("separators: got none; give the ids of the tokens that end a segment")
    ids = token_ids.to(torch.int64)
    return _after(torch.isin(ids, torch.tensor(list(separators), dtype=torch.int64, device=ids.device)))


def _flags(starts: Tensor | None, ends: Tensor | None) -> Tensor:
    if starts is not None and ends is None:
        require_mask("starts", starts, dims=(1, 2))
        return starts.to(torch.bool)
    if ends is not None and starts is None:
        require_mask("ends", ends, dims=(1, 2))
        return _after(ends.to(torch.bool))
    raise ValueError(f"starts, ends: got {'none' if starts is None else 'both'}; give one of the two")


def _after(ends: Tensor) -> Tensor:
    return with_first(ends.roll(1, -1), True)


def _on_real_tokens(flags: Tensor, real: Tensor) -> Tensor:
    """The flags, those on padding moved to the next real token; the first real token is always flagged."""
    count = flags.cumsum(-1) + 1
    return real & (count > with_first(latest(count, real).roll(1, -1), 0))


def _require_same(name: str, tensor: Tensor, flags: Tensor) -> None:
    if tensor.shape != flags.shape:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}; it must be {tuple(flags.shape)}, as the flags are")
