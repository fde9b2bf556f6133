"""At which distance a query sees a key, where the true one is beyond what a model was trained on.

Each map sends the distance r = m - n of a query at m and a key at n <= m to a distance r' that training has seen, in
two forms that agree: dense, as a matrix of r'; and factorised into groups, each with positions q' and k' such that
r' = q' - k' for the keys of an interval. Attention rotates q and k once for each group, and takes each score from the
group whose interval holds the key: no rotation is ever made for a pair.

All maps are causal: a key after its query (n > m) is in no group. To such pairs, and to those that a map hides, the
dense form gives the plain m - n; `seen` is the mask that takes them out. Positions start at 0 in each document: maps
that count blocks of them (Self-Extend, dual chunk) change where positions are shifted.

Shapes: Q queries, K keys; positions are (Q,) and (K,), or (B, Q) and (B, K), or one of each. One query among many keys
(decoding) gives the row that all queries (prefill) give.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.positions.checks import require_count, require_integers


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Positions to rotate by, and the keys for which they hold.

    Args:
        q, k: positions of queries and keys, shaped as those given: int64; or float64 on the CPU where a map has
            fractions, for no other kind of device is sure to have it, and rotary tables are made there.
        first, last: for each query the positions of the keys in the group, both ends included: (Q,) or (B, Q), int64.
            None, where `last` is below `first`.
    """

    q: Tensor
    k: Tensor
    first: Tensor
    last: Tensor

    def region(self, k_positions: Tensor) -> Tensor:
        """Which pairs are in the group, for keys at their own positions: (Q, K) or (B, Q, K), boolean."""
        keys = k_positions.to(torch.int64).unsqueeze(-2)
        return (self.first.unsqueeze(-1) <= keys) & (keys <= self.last.unsqueeze(-1))


class RelativeMap(ABC):
    """A map of distances; see the module."""

    def groups(self, q_positions: Tensor, k_positions: Tensor) -> tuple[Group, ...]:
        """The factorised form: no pair is in two groups.

        Raises:
            ValueError: positions that are not integers, or of other shapes than (S,) and (B, S), or of two batches.
        """
        for name, positions in (("q_positions", q_positions), ("k_positions", k_positions)):
            require_integers(name, positions, dims=(1, 2))
        if q_positions.dim() == k_positions.dim() == 2 and len(q_positions) != len(k_positions):
            raise ValueError(f"k_positions: got {len(k_positions)} rows; q_positions has {len(q_positions)}")
        return self._groups(q_positions.to(torch.int64), k_positions.to(torch.int64))

    def relative(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """The dense form, r' of every pair: (Q, K) or (B, Q, K), int64, or float64 on the CPU where it has fractions.

        For pairs in no group the plain m - n. For tests, pictures and short sequences: it is as large as the scores.
        """
        distances = q_positions.to(torch.int64).unsqueeze(-1) - k_positions.to(torch.int64).unsqueeze(-2)
        for group in self.groups(q_positions, k_positions):
            within = group.q.unsqueeze(-1) - group.k.unsqueeze(-2)
            region = group.region(k_positions).to(within.device)
            distances = torch.where(region, within, distances.to(within.device))
        return distances

    def seen(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Which pairs are in some group, that is which keys a query may see: (Q, K) or (B, Q, K), boolean."""
        first, *others = (group.region(k_positions) for group in self.groups(q_positions, k_positions))
        for region in others:
            first = first | region
        return first

    @abstractmethod
    def largest_distance(self, tokens: int) -> float:
        """The largest r' among the pairs of a sequence of `tokens`: what the trained length must be above."""

    @abstractmethod
    def _groups(self, m: Tensor, n: Tensor) -> tuple[Group, ...]: ...


@dataclass(frozen=True, kw_only=True)
class ReRoPE(RelativeMap):
    """min(r, window): from `window` tokens on, all keys stand at the same distance (Su 2023, kexue.fm/archives/9708).

    The identity up to `window` + 1 tokens. The keys of the far group are not rotated at all.
    """

    window: int

    def __post_init__(self) -> None:
        require_count("window", self.window, least=1)

    def largest_distance(self, tokens: int) -> int:
        require_count("tokens", tokens, least=1)
        return min(tokens - 1, self.window)

    def _groups(self, m: Tensor, n: Tensor) -> tuple[Group, ...]:
        far = Group(q=torch.full_like(m, self.window), k=torch.zeros_like(n), first=unbounded(m), last=m - self.window)
        return near(m, n, self.window), far


@dataclass(frozen=True, kw_only=True)
class LeakyReRoPE(RelativeMap):
    """window + (r - window) / factor from `window` on (Su 2023): far distances grow, slower.

    `factor` 1 is the identity, infinity is ReRoPE. Distances are float64, near ones whole.
    """

    window: int
    factor: float

    def __post_init__(self) -> None:
        require_count("window", self.window, least=1)
        if isinstance(self.factor, bool) or not isinstance(self.factor, (int, float)) or not self.factor >= 1:
            raise ValueError(f"factor: got {self.factor!r}; give a number of at least 1")

    def largest_distance(self, tokens: int) -> float:
        require_count("tokens", tokens, least=1)
        return min(tokens - 1, self.window) + max(tokens - 1 - self.window, 0) / self.factor

    def _groups(self, m: Tensor, n: Tensor) -> tuple[Group, ...]:
        far = Group(
            q=_fractions(m) / self.factor + (self.window - self.window / self.factor),
            k=_fractions(n) / self.factor,
            first=unbounded(m),
            last=m - self.window,
        )
        return near(m, n, self.window), far


@dataclass(frozen=True, kw_only=True)
class SelfExtend(RelativeMap):
    """Near keys at their distance; from `window` on floor(m/G) - floor(n/G) + window - floor(window/G) (2401.01325).

    `group_size` G of 1 is the identity. For one query r' never falls as r grows. A model trained on L tokens reads
    (L - window + floor(window/G)) * G of them: the paper's (L - window) * G + window, where G divides `window`. As in
    the paper the shift is whole; LongLM's prefill leaves its fraction in where G does not divide `window`.
    """

    window: int
    group_size: int

    def __post_init__(self) -> None:
        require_count("window", self.window, least=1)
        require_count("group_size", self.group_size, least=1)

    def largest_distance(self, tokens: int) -> int:
        require_count("tokens", tokens, least=1)
        last = tokens - 1
        return last if last < self.window else last // self.group_size + self._shift

    @property
    def _shift(self) -> int:
        return self.window - self.window // self.group_size

    def _groups(self, m: Tensor, n: Tensor) -> tuple[Group, ...]:
        far = Group(
            q=m // self.group_size + self._shift,
            k=n // self.group_size,
            first=unbounded(m),
            last=m - self.window,
        )
        return near(m, n, self.window), far


@dataclass(frozen=True, kw_only=True)
class LMInfinite(RelativeMap):
    """The first `sinks` keys at no more than `window`, and those nearer than `window`; no others (2308.16137).

    `sinks` counts positions, not places in a cache. With both the branch and the limit of the paper at `window`, as
    its code has them.
    """

    window: int
    sinks: int

    def __post_init__(self) -> None:
        require_count("window", self.window, least=1)
        require_count("sinks", self.sinks, least=0)

    def largest_distance(self, tokens: int) -> int:
        require_count("tokens", tokens, least=1)
        return min(tokens - 1, self.window if self.sinks else self.window - 1)

    def _groups(self, m: Tensor, n: Tensor) -> tuple[Group, ...]:
        far = Group(
            q=torch.full_like(m, self.window),
            k=torch.zeros_like(n),
            first=unbounded(m),
            last=(m - self.window).clamp(max=self.sinks - 1),
        )
        return near(m, n, self.window), far


def near(m: Tensor, n: Tensor, window: int) -> Group:
    """The keys nearer than `window`, at their own distance."""
    return Group(q=m, k=n, first=m - window + 1, last=m)


def unbounded(m: Tensor) -> Tensor:
    """A `first` that no key is before."""
    return torch.full_like(m, torch.iinfo(torch.int64).min)


def _fractions(positions: Tensor) -> Tensor:
    """float64, on the CPU: MPS has none."""
    return (positions if positions.is_meta else positions.cpu()).to(torch.float64)
