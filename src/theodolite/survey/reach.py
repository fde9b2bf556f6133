"""Reach, the cheap instrument: how far back can a model copy from, when positions are skipped, not filled?

Two forms. *Far*: read a short text at positions from 0, then begin its passages again at positions
`distance` later, for as many distances as wanted; it shows where the positions of a scaling give out.
*Spread*: read chunks at even places along the whole length, each at the positions that it has in the
text, and copy from each in turn from the end; the more is read, the more competes for attention, and
the closer it comes to a full pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from theodolite.models.reader import Reader
from theodolite.plan import ModelPlan
from theodolite.positions import RelativeMap
from theodolite.survey.passages import copying, spread_starts


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The spread form: `tokens` are read of each `length`, in chunks of `chunk`, `passages` copied from each."""

    tokens: int
    chunk: int
    passages: int


def spread_chunks(spread: Spread, length: int) -> list[int]:
    """Where the chunks begin: evenly, the first at 0, the last ending at `length`; all of it if it is short."""
    count = max(2, min(spread.tokens, length) // spread.chunk)
    if count * spread.chunk >= length:
        count = max(1, length // spread.chunk)
        return [i * spread.chunk for i in range(count)]
    return [round(i * (length - spread.chunk) / (count - 1)) for i in range(count)]


def spread_groups(spread: Spread, length: int) -> list[list[int]]:
    """Where the passages begin that are copied from each chunk, chunk by chunk."""
    return [spread_starts(begin, begin + spread.chunk, spread.passages) for begin in spread_chunks(spread, length)]


def spread_reach(
    model: Any, plan: ModelPlan, text: Tensor, *, length: int, spread: Spread, relative: RelativeMap | None = None
) -> list[dict[str, float]]:
    """Copying from each chunk by its distance (tokens) from the end of `length`, nearest first.

    `text` (T,) has at least `length` tokens; `model` is already patched with `plan`; `relative` maps distances.
    """
    places = torch.cat([torch.arange(begin, begin + spread.chunk) for begin in spread_chunks(spread, length)])
    groups = spread_groups(spread, length)
    with Reader(model, plan, capacity=len(places), relative=relative) as reader:
        reader.read(text[places], places)
        cells = copying(reader, text, groups, [[length] * len(group) for group in groups])
    distances = [round(length - sum(group) / len(group)) for group in groups]
    return [{"distance": distance, **cell} for distance, cell in zip(distances, cells, strict=True)][::-1]


def far_reach(
    model: Any,
    plan: ModelPlan,
    text: Tensor,
    *,
    read: int,
    distances: list[int],
    passages: int,
    relative: RelativeMap | None = None,
) -> list[dict[str, float]]:
    """Copying from the first `read` tokens of `text` at each distance (tokens), which must be at least `read`."""
    if min(distances) < read:
        raise ValueError(
            f"distances: got {min(distances)}; one below the {read} tokens read would set two tokens at one position"
        )
    starts = spread_starts(0, read, passages)
    places = [[start + distance for start in starts] for distance in distances]
    with Reader(model, plan, capacity=read, relative=relative) as reader:
        reader.read(text[:read], torch.arange(read))
        cells = copying(reader, text, [starts] * len(distances), places)
    return [{"distance": distance, **cell} for distance, cell in zip(distances, cells, strict=True)]


def alone(model: Any, plan: ModelPlan, text: Tensor, groups: list[list[int]]) -> list[dict[str, float]]:
    """Groups of passages with nothing before them, at positions from 0: what can be guessed without the text."""
    with Reader(model, plan, capacity=1) as reader:
        return copying(reader, text, groups, [[0] * len(group) for group in groups])
