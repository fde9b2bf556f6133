"""DeBERTa-v2's buckets of distances: one each up to half of them, logarithmic beyond."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from theodolite.positions.checks import require_count, require_integers


def log_bucket(relative: Tensor, *, position_buckets: int, max_relative_positions: int) -> Tensor:
    """DeBERTa-v2's bucket of a distance: itself up to half of the buckets, logarithmic beyond.

    The borders are exact integers, so no precision moves a bucket: transformers' `make_log_bucket_position` gives
    the same wherever its float32 logarithm falls on the right side. It goes on counting past the table and clamps
    afterwards; here buckets end at `position_buckets`, which is the same row.

    Args:
        relative: integers of any shape, the query's position minus the key's (tokens).
        position_buckets: buckets in each direction, at least 4.
        max_relative_positions: the distance (tokens) by which the last bucket is reached.

    Returns:
        int64 of the shape of `relative`, from `-position_buckets` to `position_buckets`.
    """
    require_integers("relative", relative)
    require_buckets(position_buckets, max_relative_positions)
    last = torch.tensor(_largest_distances(position_buckets, max_relative_positions), device=relative.device)
    # Unsigned integers have no sign to take.
    signed, half = relative.long(), position_buckets // 2
    distance = signed.abs()
    return signed.sign() * torch.where(distance <= half, distance, half + torch.bucketize(distance, last))


def require_buckets(position_buckets: int, max_relative_positions: int) -> None:
    """Refuse buckets that have no logarithmic part: fewer than 4, or as many as there are distances."""
    require_count("position_buckets", position_buckets, least=4)
    require_count("max_relative_positions", max_relative_positions, least=1)
    half = position_buckets // 2
    if max_relative_positions <= half + 1:
        raise ValueError(
            f"max_relative_positions: got {max_relative_positions}; with {position_buckets} position_buckets it must "
            f"be above {half + 1}"
        )


def rows_of_distances(max_relative_positions: int, position_buckets: int | None) -> Tensor:
    """(2 farthest + 1,), int64 on the CPU: rows of the table for the distances from -farthest to farthest.

    Beyond the farthest all distances have the same row. None for no buckets.
    """
    make = _rows_opaque if torch.compiler.is_compiling() else _rows
    return make(max_relative_positions, position_buckets or 0)


@functools.lru_cache(maxsize=64)
def _largest_distances(position_buckets: int, max_relative_positions: int) -> tuple[int, ...]:
    """The largest distance of bucket half, half + 1, ..., up to the last bucket but one.

    Bucket half + t holds those with ln(r/half) / ln((max-1)/half) * (half-1) <= t, that is
    r^(half-1) * half^t <= (max-1)^t * half^(half-1): decided in whole numbers.
    """
    half, top = position_buckets // 2, max_relative_positions - 1

    def within(distance: int, step: int) -> bool:
        return bool(distance ** (half - 1) * half**step <= top**step * half ** (half - 1))

    found = []
    for step in range(position_buckets - half):
        distance = round(half * (top / half) ** (step / (half - 1)))
        # Rounded, the float is never below the border.
        while not within(distance, step):
            distance -= 1
        found.append(distance)
    return tuple(found)


def _rows(max_relative_positions: int, position_buckets: int) -> Tensor:
    if not position_buckets:
        span = max_relative_positions
        return torch.arange(2 * span + 1, device="cpu").clamp(max=2 * span - 1)
    farthest = _largest_distances(position_buckets, max_relative_positions)[-1] + 1
    distances = torch.arange(-farthest, farthest + 1, device="cpu")
    buckets = log_bucket(distances, position_buckets=position_buckets, max_relative_positions=max_relative_positions)
    return (buckets + position_buckets).clamp(0, 2 * position_buckets - 1)


@torch.library.custom_op("theodolite::deberta_rows", mutates_args=())
def _rows_opaque(max_relative_positions: int, position_buckets: int) -> Tensor:
    """`_rows` as one node of a compiled graph: a constant."""
    return _rows(max_relative_positions, position_buckets)


@_rows_opaque.register_fake
def _(max_relative_positions: int, position_buckets: int) -> Tensor:
    return _rows(max_relative_positions, position_buckets)
