"""Positions drawn at random in training, so that a short text teaches a long range.

Every sampler takes the generator that it draws from, and puts its positions on the generator's device. Rows are drawn
apart. Every row is strictly increasing and stays below `max_position_embeddings`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.positions.checks import require_count
from theodolite.positions.packing import run_starts

_LARGEST = 2**63 - 1


def randomized_positions(
    batch: int, tokens: int, *, max_position_embeddings: int, generator: torch.Generator
) -> Tensor:
    """Sorted positions drawn without replacement, each set as likely as any other: (batch, tokens), int64.

    Randomized positional encodings (Ruoss et al., arXiv 2305.16843, section 3). Time and memory grow with
    batch x tokens, however large `max_position_embeddings` is.

    Args:
        tokens: length of the text, L.
        max_position_embeddings: positions are below it, L'; at least `tokens`.

    Raises:
        ValueError: more tokens than positions, or no `torch.Generator`.
    """
    _check(batch, tokens, max_position_embeddings, generator)
    return _subsets(batch, max_position_embeddings, tokens, generator)


def pose_positions(
    batch: int,
    tokens: int,
    *,
    max_position_embeddings: int,
    chunks: int = 2,
    random_start: bool = False,
    generator: torch.Generator,
) -> Tensor:
    """The text in chunks, each but the first moved on by a random skip: (batch, tokens), int64.

    Positional skip-wise training (PoSE, Zhu et al., arXiv 2309.10400, section 3.2): positions run on by one inside a
    chunk, and chunk i is moved by u_i, where u_0 = 0 and u_i is uniform over u_(i-1) to L' - L. Where the text is
    cut is uniform too: any `chunks - 1` places between its tokens.

    Args:
        tokens: length of the text, L: the length trained on.
        max_position_embeddings: positions are below it, L': the length aimed at; at least `tokens`.
        chunks: 1 to `tokens`; the paper's is 2.
        random_start: the first chunk is moved as well, u_0 being uniform over 0 to L' - L.

    Raises:
        ValueError: more tokens than positions, more chunks than tokens, or no `torch.Generator`.
    """
    _check(batch, tokens, max_position_embeddings, generator)
    require_count("chunks", chunks, least=1)
    if chunks > tokens:
        raise ValueError(f"chunks: got {chunks} for {tokens} tokens; none may be empty")
    free = max_position_embeddings - tokens
    skip = torch.zeros(batch, 1, dtype=torch.int64, device=generator.device)
    if random_start:
        skip = _up_to(free, skip, generator)
    skips = [skip]
    # A skip is drawn above the one before it, so the chunks come in turn.
    for _ in range(chunks - 1):
        skips.append(_up_to(free, skips[-1], generator))
    cuts = _subsets(batch, tokens - 1, chunks - 1, generator) + 1
    place = torch.arange(tokens, device=generator.device)
    chunk_of = torch.searchsorted(cuts, place.repeat(batch, 1), right=True)
    return place + torch.cat(skips, dim=1).gather(1, chunk_of)


def _subsets(batch: int, of: int, size: int, generator: torch.Generator) -> Tensor:
    """Sorted subsets of 0 to `of` - 1, (batch, size), each as likely as any other."""
    if of <= 2 * size:
        # Where the smallest of random numbers stand.
        numbers = torch.randint(_LARGEST, (batch, of), generator=generator, device=generator.device)
        return numbers.topk(size, dim=1, largest=False, sorted=False).indices.sort(dim=1).values
    # The first different ones among numbers drawn one after another.
    least = torch.zeros(batch, 2 * size, dtype=torch.int64, device=generator.device)
    drawn = _up_to(of - 1, least, generator)
    while True:
        new = _first_of_their_kind(drawn)
        if int(new.sum(1).min()) >= size:
            break
        drawn = torch.cat((drawn, _up_to(of - 1, least, generator)), dim=1)
    return drawn[new & (new.cumsum(1) <= size)].view(batch, size).sort(dim=1).values


def _first_of_their_kind(numbers: Tensor) -> Tensor:
    """True at a number that none before it in its row is equal to."""
    ordered, place = numbers.sort(dim=1, stable=True)
    return torch.zeros_like(numbers, dtype=torch.bool).scatter_(1, place, run_starts(ordered))


def _up_to(highest: int, least: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform over `least` to `highest`, for each row."""
    # No outcome is more than highest / 2**63 likelier than another.
    numbers = torch.randint(_LARGEST, least.shape, generator=generator, device=generator.device)
    return least + numbers % (highest + 1 - least)


def _check(batch: int, tokens: int, max_position_embeddings: int, generator: torch.Generator) -> None:
    require_count("batch", batch, least=1)
    require_count("tokens", tokens, least=1)
    require_count("max_position_embeddings", max_position_embeddings, least=1)
    if max_position_embeddings < tokens:
        raise ValueError(
            f"max_position_embeddings: got {max_position_embeddings} for {tokens} tokens; it must hold them"
        )
    if not isinstance(generator, torch.Generator):
        raise ValueError(
            f"generator: got a {type(generator).__name__}; give a torch.Generator, so that draws can be repeated"
        )
