"""T5: a learned number for each head and bucket of distances."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from theodolite.encodings.bias.alibi import signed_distance
from theodolite.encodings.bias.base import Content, PairwiseBias
from theodolite.encodings.bias.devices import require_beside
from theodolite.positions.checks import require_count, require_integers


def bucket_starts(buckets: int, max_distance: int) -> tuple[int, ...]:
    """The distances at which the buckets 0, 1, 2 ... of one direction start, by whole numbers alone.

    Half of the buckets, e, hold one distance each. The others grow: bucket e + j holds distances r with
    `ln(r / e) / ln(max_distance / e) * (buckets - e) >= j`, which is `r^N e^j >= e^N max_distance^j` for
    N = buckets - e. No logarithm is rounded, so no precision moves a bucket. T5's own formula gives the same buckets
    in float32; in float64 it misses some of those that start on a whole number, in bfloat16 many.
    """
    exact = buckets // 2
    steps = buckets - exact
    starts = list(range(exact + 1))
    for step in range(1, steps):
        bound = exact**steps * max_distance**step
        distance = max(exact, int(exact * (max_distance / exact) ** (step / steps)) - 1)
        while distance**steps * exact**step < bound:
            distance += 1
        starts.append(distance)
    return tuple(starts)


class T5Bias(PairwiseBias):
    """Adds `weight[bucket(n - m), h]` for a query at m and a key at n (Raffel et al. 2019, 1910.10683).

    The parameter is that of transformers' `nn.Embedding(num_buckets, num_heads)`: named `relative_attention_bias`, this
    module takes the checkpoint's `relative_attention_bias.weight`. T5 gives one module to all layers of a stack, gives
    cross-attention none, and does not divide scores by the square root of the head dim: attention must be
    given `scale=1.0`, which is what `score_scale` says.

    Args:
        num_heads: heads of the whole model.
        num_buckets: learned numbers for each head; even where `bidirectional`.
        max_distance: distance (tokens) past which all distances surely share the last bucket.
        bidirectional: half of the buckets for keys after the query, as in encoders. Without it, as in decoders, keys
            after the query are in bucket 0.
        std: the standard deviation of the initial numbers; T5 takes `embedding width ** -0.5`.

    Raises:
        ValueError: buckets that cannot be made, or positions that are not integers: buckets are of whole distances.
    """

    score_scale = 1.0
    by_distance = True

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool,
        std: float = 0.02,
    ) -> None:
        super().__init__(num_heads)
        require_count("num_buckets", num_buckets, least=1)
        require_count("max_distance", max_distance, least=1)
        if not (math.isfinite(std) and std >= 0):
            raise ValueError(f"std: got {std!r}; it must be a number of at least 0")
        if bidirectional and num_buckets % 2:
            raise ValueError(f"num_buckets: got {num_buckets}; each direction has half of them, so give an even number")
        one_way = num_buckets // 2 if bidirectional else num_buckets
        if one_way < 2:
            raise ValueError(f"num_buckets: got {num_buckets}; each direction needs at least 2")
        if max_distance <= one_way // 2:
            raise ValueError(
                f"max_distance: got {max_distance}; it must be above {one_way // 2}, for the buckets below hold one "
                "distance each"
            )
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.bidirectional, self.std = bidirectional, std
        self._starts = bucket_starts(one_way, max_distance)
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def bucket(self, relative_position: Tensor) -> Tensor:
        """The bucket of key position minus query position (tokens, integers of any shape), as int64."""
        require_integers("relative_position", relative_position)
        return self._bucket(relative_position.to(torch.int64))

    def _bucket(self, relative_position: Tensor) -> Tensor:
        exact = len(self._starts) // 2
        if self.bidirectional:
            distance, offset = relative_position.abs(), (relative_position > 0) * len(self._starts)
        else:
            distance, offset = -relative_position.clamp(max=0), None
        bucket = distance.clamp(max=exact)
        for start in self._starts[exact + 1 :]:
            bucket = bucket + (distance >= start)
        return bucket if offset is None else bucket + offset

    def _parameters_of_pairs(self) -> tuple[Tensor, ...]:
        return (self.weight if self.weight.dtype == torch.float64 else self.weight.float(),)

    def _value(self, q_position: Tensor, k_position: Tensor, head: Tensor, *parameters: Tensor) -> Tensor:
        (weight,) = parameters
        return weight[self._bucket(signed_distance(k_position, q_position)), head]

    def _check(self, q_positions: Tensor, k_positions: Tensor, content: Content) -> Content:
        require_integers("q_positions", q_positions)
        require_integers("k_positions", k_positions)
        require_beside(self, self.weight, q_positions=q_positions, k_positions=k_positions)
        return super()._check(q_positions, k_positions, content)

    def extra_repr(self) -> str:
        return (
            f"{self.num_heads}, num_buckets={self.num_buckets}, max_distance={self.max_distance}, "
            f"bidirectional={self.bidirectional}"
        )
