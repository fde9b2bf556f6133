"""What the tests of biases that read queries and keys have in common."""

from __future__ import annotations

import torch

from theodolite.encodings.bias.cope import CoPE
from theodolite.encodings.bias.deberta import DisentangledBias
from theodolite.encodings.bias.shaw import ShawBias
from theodolite.encodings.bias.transformer_xl import TransformerXLBias

HEADS, HEAD_DIM, HIDDEN = 4, 8, 12

BIASES = {
    "transformer-xl": lambda: TransformerXLBias(HEADS, HEAD_DIM, hidden_size=HIDDEN),
    "transformer-xl clamped": lambda: TransformerXLBias(HEADS, HEAD_DIM, hidden_size=HIDDEN, clamp_length=5),
    "deberta": lambda: DisentangledBias(HEADS, HEAD_DIM, hidden_size=HIDDEN, max_relative_positions=6),
    "deberta-v2": lambda: DisentangledBias(
        HEADS, HEAD_DIM, hidden_size=HIDDEN, max_relative_positions=40, position_buckets=8
    ),
    "shaw": lambda: ShawBias(HEADS, HEAD_DIM, 4),
    "cope": lambda: CoPE(HEADS, HEAD_DIM, 7),
}


def made(name: str, dtype: torch.dtype = torch.float32, make=None):
    """A bias whose parameters are all large enough to be seen, the same at each call."""
    bias = (BIASES[name] if make is None else make)().to(dtype)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in bias.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return bias


def vectors(q_tokens: int, k_tokens: int, *, batch=2, kv_heads=2, heads=HEADS, dtype=torch.float64, seed=1):
    """q (B, H, Sq, D) and k (B, Hkv, Sk, D)."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, q_tokens, HEAD_DIM, generator=generator, dtype=torch.float64)
    k = torch.randn(batch, kv_heads, k_tokens, HEAD_DIM, generator=generator, dtype=torch.float64)
    return q.to(dtype), k.to(dtype)


def rows_of_positions(q_tokens: int, k_tokens: int):
    """Positions that differ by row: the second row's keys reach as far beyond its queries as they begin before."""
    q = torch.stack((torch.arange(40, 40 + q_tokens), torch.arange(903, 903 + q_tokens)))
    k = torch.stack((torch.arange(40 + q_tokens - k_tokens, 40 + q_tokens), torch.arange(900, 900 + k_tokens)))
    return q, k


def written_out(score_mod, batch: int, heads: int, q_tokens: int, k_tokens: int, score=0.0):
    """The scores of all pairs, called the way FlexAttention calls: under vmap, one dimension after the other."""
    for position in (4, 3, 2, 1):
        dims = [None] * 5
        dims[position] = 0
        score_mod = torch.vmap(score_mod, in_dims=tuple(dims))
    indices = (torch.arange(size) for size in (batch, heads, q_tokens, k_tokens))
    return score_mod(torch.tensor(score, dtype=torch.float64), *indices)
