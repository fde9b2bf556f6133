"""One layer's positions: a composition of what acts in each of the places inside attention."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from theodolite.encodings.bias.base import Bias, ScoreMod
from theodolite.encodings.bias.combined import BiasByHead, BiasSum
from theodolite.encodings.rotate.base import K, Q, Rotate
from theodolite.encodings.rotate.parts import RotateByHead
from theodolite.encodings.scale.base import Scale
from theodolite.encodings.scale.combined import ScaleByHead, ScaleProduct
from theodolite.encodings.shared import SharedTables
from theodolite.plan import Mask


class Policy(nn.Module):
    """How positions enter the attention of one layer. Nothing at all is NoPE.

    Attention asks it four things, in this order: the bias of queries and keys as they are, `turn` for queries and
    keys, `score_scale` for their product, and, with `rotate_values`, the turning of values and of the output back.
    `theodolite.attention.attend_plainly` is that attention, written out.

    Args:
        rotate: turns queries and keys.
        bias: adds to the scores; several are added up.
        scale: multiplies the query by a number of its position; several are multiplied.
        score_scale: multiplies q.k; by default what the bias was made for (1 in T5), else `head_dim ** -0.5`.
        mask: which keys a query sees.
        rotate_values: values are turned as keys are, and the output is turned back at the query (DeepSeek-V4).

    Example:
        >>> import torch
        >>> from theodolite.encodings import ALiBi, Policy, RotaryEmbedding
        >>> from theodolite.plan import Rotary
        >>> rope = RotaryEmbedding(Rotary(head_dim=64, rope_theta=10000.0, rotary_dim=32))
        >>> policy = Policy(rotate=rope, bias=ALiBi(num_heads=8))
        >>> policy
        Policy(RotaryEmbedding + ALiBi, causal)
    """

    def __init__(
        self,
        *,
        rotate: Rotate | None = None,
        bias: Bias | Sequence[Bias] | None = None,
        scale: Scale | Sequence[Scale] | None = None,
        score_scale: float | None = None,
        mask: Mask | None = None,
        rotate_values: bool = False,
    ) -> None:
        super().__init__()
        if rotate_values and rotate is None:
            raise ValueError("rotate_values: got True without a rotation; give rotate")
        self.rotate = rotate
        self.bias = bias if bias is None or isinstance(bias, Bias) else BiasSum(bias)
        self.scale = scale if scale is None or isinstance(scale, Scale) else ScaleProduct(scale)
        self.mask = Mask() if mask is None else mask
        self.rotate_values = rotate_values
        made_for = None if self.bias is None else self.bias.score_scale
        self.score_scale = made_for if score_scale is None else score_scale

    @classmethod
    def by_head(cls, parts: Sequence[tuple[Policy, int]], *, group: int = 1) -> Policy:
        """Heads with policies of their own, as one policy.

        Args:
            parts: a policy and how many key-value heads in a row have it. A policy's own biases and scales are of its
                own query heads.
            group: query heads to a key-value head.

        Raises:
            ValueError: policies that differ in what all heads share: the mask, `score_scale` (say it alike in all: None
                and `head_dim ** -0.5` differ) or `rotate_values`.
        """
        if not parts:
            raise ValueError("parts: got none; give pairs of a policy and its heads")
        first = parts[0][0]
        for name in ("mask", "score_scale", "rotate_values"):
            values = [getattr(policy, name) for policy, _ in parts]
            if any(value != values[0] for value in values):
                raise ValueError(f"{name}: got {values}; all heads of a layer share it")
        rotates = [(policy.rotate, heads) for policy, heads in parts]
        biases = [(policy.bias, heads * group) for policy, heads in parts]
        scales = [(policy.scale, heads * group) for policy, heads in parts]
        return cls(
            rotate=RotateByHead(rotates) if any(part is not None for part, _ in rotates) else None,
            bias=BiasByHead(biases) if any(part is not None for part, _ in biases) else None,
            scale=ScaleByHead(scales) if any(part is not None for part, _ in scales) else None,
            score_scale=first.score_scale,
            mask=first.mask,
            rotate_values=first.rotate_values,
        )

    def turn(
        self,
        q: Q,
        k: K,
        tables: SharedTables,
        *,
        heads_first: bool = True,
        heads: slice | None = None,
    ) -> tuple[Q, K]:
        """Rotate q (B, H, S, D) and k (B, Hkv, S, D), either may be None, and scale q, at the positions of `tables`.

        `heads` are the query heads of this rank of tensor parallelism, for a scale that differs by head; all by
        default. A rotation that differs by head is made of this rank's heads alone, for it holds no learned heads of
        others (`PerHeadRotary(rotaries[4:8])`).
        """
        if self.rotate is not None:
            q, k = self.rotate.apply_tables(q, k, tables.of(self.rotate), heads_first=heads_first)
        if self.scale is not None and q is not None:
            q = self.scale(q, _one_axis(tables.positions), heads_first=heads_first, heads=heads)
        return q, k

    def dense_bias(self, q_positions: Tensor, k_positions: Tensor, **content: Tensor | slice | None) -> Tensor | None:
        """The bias as a tensor (1 or B, H, Sq, Sk), or None; the arguments are those of `Bias.dense`."""
        if self.bias is None:
            return None
        return self.bias.dense(_one_axis(q_positions), _one_axis(k_positions), **content)  # type: ignore[arg-type]

    def score_mod(self, q_positions: Tensor, k_positions: Tensor, **content: Tensor | slice | None) -> ScoreMod | None:
        """The bias for FlexAttention; None where there is no bias, or none that can be said so."""
        if self.bias is None:
            return None
        return self.bias.score_mod(_one_axis(q_positions), _one_axis(k_positions), **content)  # type: ignore[arg-type]

    def turn_values(self, v: Tensor, tables: SharedTables, *, heads_first: bool = True) -> Tensor:
        """Values (B, Hkv, S, D) as attention needs them: turned where `rotate_values`, else as they are."""
        if not self.rotate_values or self.rotate is None:
            return v
        return self.rotate.turn_values(v, tables.of(self.rotate, amplitude=False), heads_first=heads_first)

    def turn_output_back(self, out: Tensor, tables: SharedTables, *, heads_first: bool = True) -> Tensor:
        """Attention's output (B, H, S, D): turned back at the queries where `rotate_values`, else as it is."""
        if not self.rotate_values or self.rotate is None:
            return out
        return self.rotate.turn_output_back(out, tables.of(self.rotate, amplitude=False), heads_first=heads_first)

    def reset_parameters(self) -> None:
        """Initialise what is learned."""
        for part in (self.rotate, self.bias, self.scale):
            if part is not None:
                part.reset_parameters()

    def __repr__(self) -> str:
        parts = [type(part).__name__ for part in (self.rotate, self.bias, self.scale) if part is not None]
        kinds = ["causal" if self.mask.causal else "bidirectional"]
        if self.mask.sliding_window is not None:
            kinds.append(f"window {self.mask.sliding_window}")
        if self.mask.chunk is not None:
            kinds.append(f"chunk {self.mask.chunk}")
        return f"Policy({' + '.join(parts) or 'NoPE'}, {', '.join(kinds)})"


def _one_axis(positions: Tensor) -> Tensor:
    """Biases and scales follow the first axis (time) of positions that have several."""
    return positions[0] if positions.dim() == 3 else positions
