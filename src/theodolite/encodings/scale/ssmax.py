"""Scalable softmax: a learned multiple of ln n for each head (2501.19399)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from theodolite.encodings.heads import heads_of_rank, require_heads
from theodolite.encodings.scale.base import Scale
from theodolite.encodings.scale.temperature import tokens_seen
from theodolite.plan.errors import PlanError, is_number


class SSMax(Scale):
    """`scale_h * ln n + bias_h` with n = m + 1, the number of tokens that a causal query at position m sees.

    The attention's own `1 / sqrt(head_dim)` stays. At m = 0, where there is one key and nothing to choose, it is
    `bias_h`, or 0. In a layer that sees both ways n is the length for all queries: give it positions of n - 1.
    With `bias=True` it is Mistral Large 4's, whose parameters have the same names; that model begins, as plain
    attention, with `initial_scale=0, initial_bias=1`.

    Args:
        num_heads: heads of the whole model, over all ranks of tensor parallelism.
        bias: whether each head also learns a constant. The paper finds that it hurts at longer lengths.
        initial_scale: what `scale` begins with; the paper's figures have 0.43.
        initial_bias: what `bias` begins with.

    Attributes:
        scale: (H,).
        bias: (H,), or None.

    Raises:
        ValueError: no head, an initial value that is no number, `heads` that are not there.
    """

    def __init__(
        self, num_heads: int, *, bias: bool = False, initial_scale: float = 0.43, initial_bias: float = 0.0
    ) -> None:
        super().__init__()
        require_heads("num_heads", num_heads)
        for name, value in (("initial_scale", initial_scale), ("initial_bias", initial_bias)):
            if not is_number(value):
                raise PlanError(name, value, "it must be a finite number")
        self.num_heads = num_heads
        self.initial_scale = initial_scale
        self.initial_bias = initial_bias
        self.scale = nn.Parameter(torch.empty(num_heads))
        self.bias = nn.Parameter(torch.empty(num_heads)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise what is learned."""
        nn.init.constant_(self.scale, self.initial_scale)
        if self.bias is not None:
            nn.init.constant_(self.bias, self.initial_bias)

    def _factors(self, positions: Tensor, heads: slice | None) -> Tensor:
        mine = heads_of_rank(heads, len(self.scale))
        dtype = torch.float64 if self.scale.dtype == torch.float64 else torch.float32
        log_n = tokens_seen(positions, dtype=dtype).log()[:, None]
        factors = self.scale[mine].to(dtype)[:, None] * log_n
        return factors if self.bias is None else factors + self.bias[mine].to(dtype)[:, None]

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, bias={self.bias is not None}"
