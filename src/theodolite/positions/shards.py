"""Which tokens each rank holds under sequence or context parallelism, and how to put them together again.

A sharding is a table (ranks, T / ranks) of global indices, int64: row r lists what rank r holds, in its order. A
token's position goes where the token goes: `shard(positions, table[rank], dim=-1)` of the positions of the whole
sequence or pack. Positions are never made from a rank's own length, and no table of cos and sin is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from theodolite.positions.checks import can_read, gatherable, require_count, require_integers
from theodolite.positions.packing import require_cu_seqlens


def contiguous(total: int, *, ranks: int, device: torch.device | str | None = None) -> Tensor:
    """Rank r holds the r-th stretch: 8 tokens on 2 ranks are [0, 1, 2, 3], [4, 5, 6, 7].

    What Ulysses (arXiv 2309.14509) needs, for packs too: its documents are cut where the stretches end.

    Raises:
        ValueError: `total` is no multiple of `ranks`.
    """
    return _in_stretches(total, ranks, 1, device)


def striped(total: int, *, ranks: int, device: torch.device | str | None = None) -> Tensor:
    """Rank r holds every ranks-th token from r on: [0, 2, 4, 6], [1, 3, 5, 7] (arXiv 2311.09431). For packs too.

    Raises:
        ValueError: `total` is no multiple of `ranks`.
    """
    return _in_stretches(total, ranks, 1, device).reshape(-1, ranks).t().contiguous()


def zigzag(total: int, *, ranks: int, device: torch.device | str | None = None) -> Tensor:
    """Rank r holds stretch r from the front and stretch r from the back, of 2 x ranks: [0, 1, 6, 7], [2, 3, 4, 5].

    All ranks then have the same work under a causal mask. The order of Megatron-LM, Transformer Engine and
    torch's context parallelism.

    Raises:
        ValueError: `total` is no multiple of 2 x `ranks`.
    """
    stretches = _in_stretches(total, ranks, 2, device)
    return torch.cat((stretches[:ranks], stretches[ranks:].flip(0)), dim=1)


def zigzag_packed(cu_seqlens: Tensor | Sequence[int], *, ranks: int, total: int | None = None) -> Tensor:
    """A zigzag of each document of a pack: [0, 4, 8] on 2 ranks is [0, 3, 4, 7], [1, 2, 5, 6].

    The order of Transformer Engine's packed (thd) partition: documents one after another, of each the front stretch
    and then the back one.

    Args:
        cu_seqlens: (documents + 1,), as in `packing`.
        total: tokens of the pack; read from `cu_seqlens` if not given, which a traced graph cannot do.

    Raises:
        ValueError: a document's length is no multiple of 2 x `ranks` (in a traced graph it is not looked at);
            `cu_seqlens` is not what it must be.
    """
    require_count("ranks", ranks, least=1)
    cu_seqlens, tokens = require_cu_seqlens(cu_seqlens, total)
    if can_read(cu_seqlens):
        for number, length in enumerate(cu_seqlens.diff().tolist()):
            if length % (2 * ranks):
                raise ValueError(f"cu_seqlens: document {number} has {_no_multiple(length, ranks, 2)}")
    local_starts = cu_seqlens // ranks
    local = torch.arange(tokens // ranks, device=cu_seqlens.device)
    document = torch.searchsorted(local_starts[1:].contiguous(), local, right=True)
    stretch = (cu_seqlens.diff() // (2 * ranks))[document]
    within = local - local_starts[document]
    rank = torch.arange(ranks, device=cu_seqlens.device).unsqueeze(-1)
    front = rank * stretch + within
    back = (2 * ranks - 1 - rank) * stretch + (within - stretch)
    return cu_seqlens[document] + torch.where(within < stretch, front, back)


def shard(tensor: Tensor, indices: Tensor, *, dim: int) -> Tensor:
    """What the holder of `indices` (a row of a sharding) has of `tensor` along `dim`: positions, ids, hidden states.

    Gradients flow.

    Raises:
        ValueError: `indices` is not a list of integers.
    """
    require_integers("indices", indices, dims=(1,))
    return gatherable(tensor).index_select(dim, indices.to(tensor.device, torch.int64)).to(tensor.dtype)


def unshard(shards: Sequence[Tensor] | Tensor, sharding: Tensor, *, dim: int) -> Tensor:
    """The whole again, from every rank's shard in the order of the ranks.

    Args:
        shards: one tensor per rank, as all-gather lists them, or one (ranks, ...) of them stacked.
        sharding: the whole table (ranks, T / ranks).
        dim: where the tokens are in each shard.

    Raises:
        ValueError: another number of shards, or of tokens in one, than the sharding has; a table that does not hold
            every token once (in a traced graph it is not looked at).
    """
    require_integers("sharding", sharding)
    if sharding.dim() != 2:
        raise ValueError(f"sharding: got shape {tuple(sharding.shape)}; it must be (ranks, tokens of a rank)")
    shards = tuple(shards)
    if not shards or len(shards) != sharding.shape[0]:
        raise ValueError(f"shards: got {len(shards)}; the sharding has {sharding.shape[0]} ranks")
    for rank, part in enumerate(shards):
        if part.shape[dim] != sharding.shape[1]:
            raise ValueError(
                f"shards: rank {rank} has {part.shape[dim]} tokens along dim {dim}; the sharding gives it "
                f"{sharding.shape[1]}"
            )
    order = sharding.to(shards[0].device, torch.int64).reshape(-1)
    back = order.argsort()
    if can_read(order) and not torch.equal(order[back], torch.arange(order.shape[0], device=order.device)):
        raise ValueError("sharding: it does not hold each token from 0 on once, so the whole cannot be put together")
    whole = torch.cat(shards, dim)
    return gatherable(whole).index_select(dim, back).to(whole.dtype)


def _in_stretches(total: int, ranks: int, each: int, device: torch.device | str | None) -> Tensor:
    """All indices, (ranks * each, T / (ranks * each))."""
    require_count("total", total, least=0)
    require_count("ranks", ranks, least=1)
    if total % (ranks * each):
        raise ValueError(f"total: got {_no_multiple(total, ranks, each)}")
    return torch.arange(total, device=device).reshape(ranks * each, -1)


def _no_multiple(length: int, ranks: int, each: int) -> str:
    multiple = ranks * each
    needs = f"a multiple of {'2 x ' if each == 2 else ''}ranks = {multiple} is needed"
    return f"{length} tokens; {needs}: pad to {-(-length // multiple) * multiple}"
