"""DeBERTa-v2's buckets of distances: one each up to half of them, logarithmic beyond."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from theodolite.positions.checks import require_count, require_integers

_ABOVE_ANY = 2**63 - 1


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
    ends = torch.tensor(bucket_borders(position_buckets, max_relative_positions), device=relative.device)
    # Unsigned integers have no sign to take.
    sizes = {"position_buckets": position_buckets, "max_relative_positions": max_relative_positions}
    return bucket_of(relative.long(), ends, **sizes)


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


def bucket_borders(position_buckets: int, max_relative_positions: int) -> tuple[int, ...]:
    """Plain numbers, ends[0] to ends[n + 1]: ends[t + 1] is the largest distance of bucket half + t.

    The first is below and the last above any distance.
    """
    found = _largest_distances(position_buckets, max_relative_positions)
    return (-1, *(min(distance, _ABOVE_ANY) for distance in found), _ABOVE_ANY)


def bucket_of(relative: Tensor, ends: Tensor, *, position_buckets: int, max_relative_positions: int) -> Tensor:
    """`log_bucket` of int64, elementwise, with `bucket_borders` as a tensor: no table of distances."""
    half, distance = position_buckets // 2, relative.abs()
    per_log = (half - 1) / math.log1p((max_relative_positions - 1 - half) / half)
    # Relative to half, so that the error is relative to the step, however near to each other the borders are.
    estimate = (((distance - half).clamp(min=0).float() / half).log1p() * per_log).ceil().long()
    step = estimate.clamp(0, len(ends) - 2)
    # It is off by one at most, and the whole numbers say where.
    step = step + (distance > ends[step + 1]).long() - (distance <= ends[step]).long()
    bucket = torch.where(distance <= half, distance, half + step)
    return torch.where(relative < 0, -bucket, bucket)


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
        border = half * (top / half) ** (step / (half - 1))
        # The float is surely that near; what is between is decided exactly, and mostly nothing is.
        distance, above = math.floor(border * (1 - 2.0**-40)), math.ceil(border * (1 + 2.0**-40))
        while above - distance > 1:
            middle = (distance + above) // 2
            distance, above = (middle, above) if within(middle, step) else (distance, middle)
        found.append(distance)
    return tuple(found)
