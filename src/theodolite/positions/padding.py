"""Positions in a padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from theodolite.positions.checks import require_count, require_mask, tensor_of


def from_attention_mask(attention_mask: Tensor | Sequence[Any], *, start: int = 0, padded: int = 0) -> Tensor:
    """Each real token's number among the real tokens of its row: a row alone and in a batch has the same positions.

    Shapes (B batch, S tokens): (B, S) or (S,) gives int64 of the same shape. Padding may stand left, right or
    between; a row may be all padding.

    Args:
        attention_mask: what is not 0 is a real token: booleans, 0 and 1, or document numbers from 1. Lists, as a
            tokenizer gives them, are put on the CPU.
        start: position of each row's first real token.
        padded: position of the padding, whatever side it is on.

    RoBERTa and its kin, whose learned table begins after the padding row, count from `start=padding_idx + 1` with
    `padded=padding_idx`: for their own code, and for a `LearnedEmbedding` without `padding_idx`. One that was made with
    it adds the offset itself and has positions from 0.

    Raises:
        ValueError: a float mask, which may be additive (0 keeps); a 4-D mask, which says who sees whom and not who
            is there; a negative `start` or `padded`.
    """
    real = real_tokens("attention_mask", attention_mask)
    require_count("start", start, least=0)
    require_count("padded", padded, least=0)
    return (real.cumsum(-1) + (start - 1)).masked_fill(~real, padded)


def real_tokens(name: str, attention_mask: Tensor | Sequence[Any]) -> Tensor:
    """The mask (B, S) or (S,) as booleans, true at real tokens."""
    attention_mask = tensor_of(name, attention_mask, of="one for each token, 0 for padding")
    if attention_mask.dim() > 2:
        raise ValueError(
            f"{name}: got shape {tuple(attention_mask.shape)}; it must be (S,) or (B, S), one entry per token: "
            "a mask of queries by keys says what each sees, not where it stands"
        )
    require_mask(name, attention_mask, dims=(1, 2))
    return attention_mask.to(torch.bool)
