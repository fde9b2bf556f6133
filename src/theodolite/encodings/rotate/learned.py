"""Frequencies that are trained: the base (one, or one per head), or every frequency by itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from theodolite.encodings.rotate.base import Rotate
from theodolite.encodings.rotate.exact import require_plan
from theodolite.encodings.rotate.learned_tables import (
    base_power,
    on_host,
    plan_frequencies,
    settled_frequencies,
    table_dtype,
    tables_of_plan,
)
from theodolite.encodings.rotate.lengths import Lengths
from theodolite.encodings.rotate.operands import layout_of
from theodolite.encodings.rotate.per_head import HeadwiseRotate, head_range
from theodolite.encodings.rotate.tables import Tables
from theodolite.plan import Rotary


class LearnedBase(HeadwiseRotate):
    """A rotation whose base is trained: one base for all heads, or one for each key-value head.

    The parameter is `log_ratio`, the logarithm of the base over the plan's `rope_theta`, and begins at 0: the tables
    are then those of the plan, bit for bit. The frequencies are the plan's times `exp(log_ratio) ** (-2i / R)`; the
    ramp of a scaling stays where the plan's base has it. Share one module between the layers that share a base, and
    keep the parameter out of weight decay, which would pull the base back to the plan's.

    The parameter stays float32 in a model of half precision, or float64 after `.double()`: `.half()`, `.bfloat16()`
    and `.to(dtype)` only move it (`FullPrecision`). Frequencies and angles are computed in float64. Tables are float32,
    or float64 where the parameter is; autocast has no say. The parameter is read by the CPU once per `tables`.

    FSDP2 wants one dtype in a group: shard this module apart, before the model around it, or keep all parameters in
    float32 with a mixed-precision policy; `param_dtype=torch.bfloat16` of a policy does round this one too.

    Args:
        rotary: where training begins.
        num_heads: key-value heads, for a base for each; None for one base. Tables of a part of the heads give a
            gradient to that part.

    Example:
        >>> import torch
        >>> from theodolite.plan import Rotary
        >>> rope = LearnedBase(Rotary(head_dim=64, rope_theta=10000.0), num_heads=2)
        >>> q, k = rope(torch.randn(1, 8, 5, 64), torch.randn(1, 2, 5, 64), torch.arange(5))
        >>> k.sum().backward()
        >>> rope.log_ratio.grad.shape
        torch.Size([2])
    """

    def __init__(self, rotary: Rotary, *, num_heads: int | None = None) -> None:
        require_plan("rotary", rotary)
        super().__init__(**layout_of(rotary))
        if num_heads is not None and (isinstance(num_heads, bool) or not isinstance(num_heads, int) or num_heads < 1):
            raise ValueError(f"num_heads: got {num_heads!r}; it must be a whole number of at least 1, or None")
        self.rotary, self.num_heads = rotary, num_heads
        self._inv_freq = settled_frequencies(rotary)
        # Of one dimension where there is one base, for sharding refuses parameters of none.
        self.log_ratio = nn.Parameter(torch.empty(num_heads or 1, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Put the base back to the plan's."""
        nn.init.zeros_(self.log_ratio)

    @property
    def rope_theta(self) -> Tensor:
        """The base as it is, (1,) or (num_heads,), float64 on the CPU, without gradient."""
        return on_host(self.log_ratio.detach()).exp() * self.rotary.rope_theta

    def tables(
        self,
        positions: Tensor,
        *,
        lengths: Lengths | None = None,
        amplitude: bool = True,
        device: torch.device | str | None = None,
        heads: slice | None = None,
    ) -> Tables:
        """cos and sin with the gradient of the base; the other arguments are those of `rotary_tables`.

        Args:
            heads: the key-value heads of this rank, Ht of them; all by default.
            lengths: of no effect unless the plan's frequencies depend on them.

        Returns:
            (S, R/2) or (B, S, R/2) for one base, (B or 1, Ht, S, R/2) for one per head.
        """
        log_ratio: Tensor = self.log_ratio
        if self.num_heads is not None:
            log_ratio = log_ratio[head_range(heads, self.num_heads)]
        elif heads is not None:
            raise ValueError(f"heads: got {heads}; all heads share one base (num_heads=None)")
        power = base_power(self.rotary, on_host(log_ratio)[:, None])
        positions, plan = plan_frequencies(self.rotary, self._inv_freq, positions, lengths, power.device)
        # (R/2,) or (B, R/2), times (Ht or 1, R/2).
        inv_freq = plan.unsqueeze(-2) * power
        if self.num_heads is None:
            inv_freq = inv_freq.squeeze(-2)
        elif inv_freq.dim() == 2:
            inv_freq = inv_freq[None]
        dtype = table_dtype(self.log_ratio)
        return tables_of_plan(self.rotary, inv_freq, positions, amplitude=amplitude, dtype=dtype, device=device)

    def extra_repr(self) -> str:
        return f"{self.rotary!r}, num_heads={self.num_heads}"


class LeRoPE(Rotate):
    """LeRoPE (2607.10134; Mistral Large 4): every frequency of the plan times `exp(alpha)` of its own.

    `alpha` is (R/2,) and begins at 0, where the tables are those of the plan bit for bit. One module is shared by all
    layers and heads, and the parameter is kept out of weight decay, as its authors have it. The name is that of
    transformers' `MistralLarge4TextRotaryEmbedding`, so its checkpoints load. A pair that stands still goes on so.

    Precision, dtypes and devices are those of `LearnedBase`.

    Args:
        rotary: where training begins.
    """

    def __init__(self, rotary: Rotary) -> None:
        require_plan("rotary", rotary)
        super().__init__(**layout_of(rotary))
        self.rotary = rotary
        self._inv_freq = settled_frequencies(rotary)
        self.alpha = nn.Parameter(torch.empty(rotary.rotary_dim // 2, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Put the frequencies back to the plan's."""
        nn.init.zeros_(self.alpha)

    def tables(
        self,
        positions: Tensor,
        *,
        lengths: Lengths | None = None,
        amplitude: bool = True,
        device: torch.device | str | None = None,
    ) -> Tables:
        """cos and sin with the gradient of `alpha`; the arguments are those of `rotary_tables`."""
        factors = on_host(self.alpha).exp()
        positions, plan = plan_frequencies(self.rotary, self._inv_freq, positions, lengths, factors.device)
        dtype = table_dtype(self.alpha)
        return tables_of_plan(self.rotary, plan * factors, positions, amplitude=amplitude, dtype=dtype, device=device)

    def extra_repr(self) -> str:
        return repr(self.rotary)
