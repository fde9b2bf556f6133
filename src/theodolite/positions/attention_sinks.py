"""A sliding window with the first tokens kept, as a map of distances."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from theodolite.positions.checks import require_count
from theodolite.positions.relative import Group, RelativeMap, near, unbounded


@dataclass(frozen=True, kw_only=True)
class AttentionSinks(RelativeMap):
    """A window of the last tokens, and the first `sinks` as if they stood right before a full one (2309.17453).

    StreamingLLM's positions within its cache: at min(m, sinks + window - 1) a query sees sink n, so that no distance
    exceeds that, and those of the window are true. `LMInfinite` sets all sinks at one distance.
    """

    window: int
    sinks: int = 4

    def __post_init__(self) -> None:
        require_count("window", self.window, least=1)
        require_count("sinks", self.sinks, least=0)

    def largest_distance(self, tokens: int) -> int:
        require_count("tokens", tokens, least=1)
        return min(tokens - 1, self.sinks + self.window - 1)

    def _groups(self, m: Tensor, n: Tensor) -> tuple[Group, ...]:
        far = Group(
            q=m.clamp(max=self.sinks + self.window - 1),
            k=n,
            first=unbounded(m),
            last=(m - self.window).clamp(max=self.sinks - 1),
        )
        return near(m, n, self.window), far
