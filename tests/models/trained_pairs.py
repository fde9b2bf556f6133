"""A tiny attention trained to recall which value stood last beside the same symbol: content and distance count."""

from __future__ import annotations

import torch
from torch import Tensor

HEADS, KEY_HEADS, WIDTH, INPUTS, SYMBOLS, VALUES, TOKENS = 4, 2, 32, 48, 6, 8, 24


def turned(x: Tensor, layout: str | None) -> Tensor:
    """x (..., S, D), turned pair by pair with base 100; as it is for None."""
    if layout is None:
        return x
    half = WIDTH // 2
    angle = torch.arange(TOKENS)[:, None] * 100.0 ** (-2 * torch.arange(half) / WIDTH)
    pairs = torch.arange(WIDTH).view(half, 2).T if layout == "interleaved" else torch.arange(WIDTH).view(2, half)
    one, two = x[..., pairs[0]], x[..., pairs[1]]
    # Scores need the pairs alone, whatever order they come out in.
    return torch.cat((one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()), dim=-1)


def train(layout: str | None, seed: int, *, steps: int = 250, learned_positions: bool = False) -> tuple[Tensor, Tensor]:
    """Weights (H*D, E) of the queries and (K*D, E) of the keys after some training; seconds on one core."""
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).requires_grad_()

    symbols, values, places = weight(SYMBOLS, INPUTS), weight(VALUES, INPUTS), weight(TOKENS, INPUTS)
    q, k, v = (weight(heads * WIDTH, INPUTS) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    out = weight(VALUES, HEADS * WIDTH)
    optimizer = torch.optim.AdamW([symbols, values, places, q, k, v, out], lr=1e-2, weight_decay=0.1)
    past = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(-1)
    # Its own value is no answer: attention must tell distance 0 from 1, and does so by the sine of the angle.
    past_and_own = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    for _ in range(steps):
        symbol = torch.randint(0, SYMBOLS, (32, TOKENS), generator=generator)
        value = torch.randint(0, VALUES, (32, TOKENS), generator=generator)
        last = torch.where((symbol[:, :, None] == symbol[:, None]) & past, torch.arange(TOKENS), -1).amax(-1)
        x = symbols[symbol] + values[value] + (places if learned_positions else 0.0)
        x = x / x.square().mean(-1, keepdim=True).sqrt()
        queries, keys, read = ((x @ w.T).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for w in (q, k, v))
        keys, read = (one.repeat_interleave(HEADS // KEY_HEADS, dim=1) for one in (turned(keys, layout), read))
        scores = (turned(queries, layout) @ keys.mT * WIDTH**-0.5).masked_fill(~past_and_own, -1e9)
        logits = (scores.softmax(-1) @ read).transpose(1, 2).flatten(2) @ out.T
        there = last >= 0
        loss = torch.nn.functional.cross_entropy(logits[there], value.gather(1, last.clamp(min=0))[there])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return q.detach(), k.detach()
