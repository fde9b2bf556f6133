"""Passages that are begun again: a cue of a few tokens, and the tokens that follow, which a model can copy."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from theodolite.models.reader import Reader

CUE = 12
SCORED = 32
LENGTH = CUE + SCORED


def passages_at(tokens: Tensor, starts: list[int]) -> Tensor:
    """The passages of `tokens` (T,) that begin at `starts` (P of them), shape (P, LENGTH)."""
    return torch.stack([tokens[start : start + LENGTH] for start in starts])


def positions_at(starts: list[int]) -> Tensor:
    """Positions (P, LENGTH) of passages that begin at `starts`."""
    return torch.tensor(starts)[:, None] + torch.arange(LENGTH)


def spread_starts(begin: int, end: int, count: int) -> list[int]:
    """Starts of `count` passages, evenly over tokens `begin` to `end`, the last one ending at `end` at the latest."""
    room = end - begin - LENGTH
    if room < 0:
        raise ValueError(f"tokens {begin} to {end} are too few for a passage of {LENGTH}")
    if count == 1:
        return [begin + room // 2]
    return [begin + round(room * i / (count - 1)) for i in range(count)]


def copying(reader: Reader, text: Tensor, groups: list[list[int]], places: list[list[int]]) -> list[dict[str, float]]:
    """How well groups of passages are continued when they are begun again after what `reader` has read.

    Args:
        groups: where in `text` the passages begin, group by group.
        places: the position at which each of them is begun again.

    Returns:
        A group each: mean nats a token, and the share of tokens that were the most likely one, rounded for storing.
    """
    scores = reader.probe(passages_at(text, list(chain(*groups))), positions_at(list(chain(*places))), cue=CUE)
    sizes = [len(group) for group in groups]
    return [
        {"nll": round(float(nll.mean()), 6), "accuracy": round(float(correct.float().mean()), 6)}
        for nll, correct in zip(scores.nll.split(sizes), scores.correct.split(sizes), strict=True)
    ]
