"""Which keys a query sees, as booleans: by position, by document, and without padding."""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.plan import Mask
from theodolite.positions.checks import require_integers, require_positions
from theodolite.positions.padding import real_tokens


def visible_by_position(mask: Mask, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
    """Which keys a plan's mask lets a query see by their positions; None where it lets it see all.

    Args:
        mask: causal, window and chunk; its sinks are logits and no keys.
        q_positions: (Sq,) or (B, Sq), tokens.
        k_positions: (Sk,) or (B, Sk), tokens.

    Returns:
        (1 or B, Sq, Sk) booleans.

    Raises:
        ValueError: positions of several axes: tokens of a picture share one, so their order is not in it.
    """
    if not mask.causal and mask.sliding_window is None and mask.chunk is None:
        return None
    for name, positions in (("q_positions", q_positions), ("k_positions", k_positions)):
        require_positions(name, positions, dims=(1, 2))
    q, k = (torch.atleast_2d(positions) for positions in (q_positions, k_positions))
    return seen(mask, q.unsqueeze(-1), k.unsqueeze(-2))


def seen(mask: Mask, q: Tensor, k: Tensor) -> Tensor:
    """The same for positions that broadcast against each other."""
    # Unsigned integers wrap around where they are subtracted.
    q, k = (at if at.is_floating_point() else at.long() for at in (q, k))
    result = k <= q if mask.causal else torch.ones_like(k == q)
    if mask.sliding_window is not None:
        result = result & ((q - k).abs() < mask.sliding_window)
    if mask.chunk is not None:
        length = mask.chunk
        result = result & (torch.div(q, length, rounding_mode="floor") == torch.div(k, length, rounding_mode="floor"))
    return result


def visible_in_documents(q_documents: Tensor, k_documents: Tensor | None = None) -> Tensor:
    """Keys of the query's own document: (1 or B, Sq, Sk) booleans.

    Args:
        q_documents: (Sq,) or (B, Sq), a number for each token as from `document_ids`; negative is padding, which sees
            nothing and is not seen.
        k_documents: the same of the keys; those of the queries by default.
    """
    k_documents = q_documents if k_documents is None else k_documents
    for name, documents in (("q_documents", q_documents), ("k_documents", k_documents)):
        require_integers(name, documents, dims=(1, 2))
    q, k = (torch.atleast_2d(documents.long()) for documents in (q_documents, k_documents))
    same: Tensor = (q.unsqueeze(-1) == k.unsqueeze(-2)) & (q.unsqueeze(-1) >= 0)
    return same


def visible_keys(attention_mask: Tensor) -> Tensor:
    """Keys that are no padding, for every query: (B, 1, Sk) booleans.

    Args:
        attention_mask: (B, Sk) or (Sk,), what is not 0 is a real token.
    """
    real: Tensor = torch.atleast_2d(real_tokens("attention_mask", attention_mask))
    return real.unsqueeze(-2)


def visible_of_rows(visible: Tensor, rows: slice) -> Tensor:
    """Of booleans (..., Sq, Sk), or (..., 1, Sk) that hold for all queries, those of some queries."""
    return visible if visible.shape[-2] == 1 else visible[..., rows, :]


def require_visible(
    visible: Tensor, queries: int, keys: int, *, batch: int | None = None, heads: int | None = None
) -> Tensor:
    """The same as (1 or B, 1 or H, 1 or Sq, 1 or Sk); refuses what is none. A size of None may be any.

    Raises:
        ValueError: no booleans, or a shape that is neither (B, Sq, Sk) nor (B, H, Sq, Sk), 1 where it holds for all.
            Two dimensions are refused: (B, Sk) of padding and (Sq, Sk) look alike.
    """
    if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
        given = visible.dtype if isinstance(visible, Tensor) else f"a {type(visible).__name__}"
        raise ValueError(f"visible: got {given}; give booleans, true where the query sees the key")
    four = visible.unsqueeze(1) if visible.dim() == 3 else visible
    whole = (batch, heads, queries, keys)
    if four.dim() != 4 or any(
        full is not None and size not in (1, full) for size, full in zip(four.shape, whole, strict=True)
    ):
        hint = "; visible_keys(mask) makes it of a padding mask (B, Sk), and [None] of (Sq, Sk)"
        raise ValueError(
            f"visible: got shape {tuple(visible.shape)}; it must be (B, {queries}, {keys}) or "
            f"(B, H, {queries}, {keys}), "
            f"1 where it holds for all{hint if visible.dim() == 2 else ''}"
        )
    return four
