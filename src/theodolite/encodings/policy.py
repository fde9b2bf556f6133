"""One layer's positions: a composition of what acts in each of the places inside attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from theodolite.encodings.bias.base import Bias, ScoreMod
from theodolite.encodings.bias.combined import BiasByHead, BiasSum
from theodolite.encodings.rotate.axial import PatchRotate
from theodolite.encodings.rotate.base import K, Q, Rotate
from theodolite.encodings.rotate.parts import RotateByHead
from theodolite.encodings.scale.base import Scale
from theodolite.encodings.scale.combined import ScaleByHead, ScaleProduct
from theodolite.encodings.shared import SharedTables
from theodolite.plan import Mask
from theodolite.positions.visible import require_visible, seen, visible_by_position

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's `mask_mod(batch, head, query_index, key_index)`."""
Order = Tensor | tuple[Tensor, Tensor]
"""The order of tokens, of queries and keys alike or one for each."""


class Policy(nn.Module):
    """How positions enter the attention of one layer. Nothing at all is NoPE.

    Attention asks it, in this order: the bias of queries and keys as they are (`attn_mask`, or `score_mod` and
    `mask_mod`), `turn` for queries and keys, `score_scale` for their product, and, for the few that touch values,
    `turn_values`, `values` and `turn_output_back`. `theodolite.attention.attend_plainly` is that, written out.

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
        >>> print(policy)
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
        _require("rotate", rotate, Rotate, "a Rotate module, such as RotaryEmbedding(rotary)")
        _require("mask", mask, Mask, "a Mask, such as Mask(sliding_window=1024)")
        if rotate_values and rotate is None:
            raise ValueError("rotate_values: got True without a rotation; give rotate")
        self.rotate = rotate
        self.bias = _one("bias", bias, Bias, BiasSum)
        self.scale = _one("scale", scale, Scale, ScaleProduct)
        self.mask = Mask() if mask is None else mask
        if self.bias is not None and self.bias.causal_only and not self.mask.causal:
            raise ValueError(f"mask: got {self.mask}; {type(self.bias).__name__} is for keys up to the query alone")
        self.rotate_values = rotate_values
        made_for = None if self.bias is None else self.bias.score_scale
        if score_scale is None and self.bias is not None and len(self.bias.score_scales) > 1:
            raise ValueError(
                f"score_scale: got None, and the biases were made for {list(self.bias.score_scales)} (None is "
                "head_dim ** -0.5); give the one that all heads shall have"
            )
        if score_scale is not None and not (math.isfinite(score_scale) and score_scale > 0):
            raise ValueError(f"score_scale: got {score_scale}; it must be a finite number above 0")
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
        tables: SharedTables | Tensor,
        *,
        heads_first: bool = True,
        heads: slice | None = None,
    ) -> tuple[Q, K]:
        """Rotate q (B, H, S, D) and k (B, Hkv, S, D), either may be None, and scale q.

        Args:
            tables: the tables of this forward, which layers share, or positions to make them of.
            heads: the query heads of this rank of tensor parallelism, for a scale that differs by head; all by default.
                A rotation that differs by head is made of this rank's heads alone (`PerHeadRotary(rotaries[4:8])`).
        """
        if isinstance(tables, Tensor):
            device = q.device if q is not None else k.device if k is not None else None
            tables = SharedTables(tables, device=device)
        if self.rotate is not None:
            q, k = self.rotate.apply_tables(q, k, tables.of(self.rotate), heads_first=heads_first)
        if self.scale is not None and q is not None:
            q = self.scale(q, self._one_axis(tables.positions), heads_first=heads_first, heads=heads)
        return q, k

    def dense_bias(self, q_positions: Tensor, k_positions: Tensor, **content: Any) -> Tensor | None:
        """The bias alone as a tensor (1 or B, H, Sq, Sk), or None; the arguments are those of `Bias.dense`.

        What it reads is q and k before they are turned. A state that it keeps (the forgetting gate's) is made of x
        where x covers the keys and none is given.
        """
        if self.bias is None:
            return None
        content = self._with_state(k_positions, content)
        return self.bias.dense(self._one_axis(q_positions), self._one_axis(k_positions), **content)

    def score_mod(self, q_positions: Tensor, k_positions: Tensor, **content: Any) -> ScoreMod | None:
        """The bias for FlexAttention; None where there is no bias.

        The arguments are those of `dense_bias`. What a query sees is for `mask_mod` to say.

        Raises:
            ValueError: a bias that is no function of one pair (CoPE, Transformer-XL).
        """
        if self.bias is None:
            return None
        content = self._with_state(k_positions, content)
        mod = self.bias.score_mod(self._one_axis(q_positions), self._one_axis(k_positions), **content)
        if mod is None:
            raise ValueError(
                f"score_mod: {type(self.bias).__name__} cannot be said pair by pair; take `attn_mask`, and "
                "scaled_dot_product_attention"
            )
        return mod

    def visible(
        self,
        q_positions: Tensor,
        k_positions: Tensor,
        *,
        visible: Tensor | None = None,
        order: Order | None = None,
    ) -> Tensor | None:
        """Which keys a query sees: (1 or B, 1 or H, Sq, Sk) booleans, or None for all.

        Args:
            visible: (B, Sq, Sk) or (B, H, Sq, Sk) booleans besides the policy's mask, 1 where it holds for all.
            order: what the mask goes by, (S,) or (B, S), or one for queries and one for keys, where it is not the
                positions: needed where these have several axes, for the tokens of a picture share a time.
        """
        own = visible_by_position(self.mask, *self._order(q_positions, k_positions, order))
        if visible is not None:
            visible = require_visible(visible, q_positions.shape[-1], k_positions.shape[-1])
        if own is None or visible is None:
            return visible if own is None else own.unsqueeze(1)
        return own.unsqueeze(1) & visible

    def mask_mod(
        self,
        q_positions: Tensor,
        k_positions: Tensor,
        *,
        visible: Tensor | None = None,
        order: Order | None = None,
    ) -> MaskMod:
        """`visible` for FlexAttention's `create_block_mask`: a function that holds no tensor of all pairs of its own.

        Where rows differ, by positions or by `visible`, give `create_block_mask` the number of rows, not None.
        """
        q_at, k_at = (torch.atleast_2d(at) for at in self._order(q_positions, k_positions, order))
        pairs = None
        if visible is not None:
            queries, keys = q_positions.shape[-1], k_positions.shape[-1]
            pairs = require_visible(visible, queries, keys).expand(-1, -1, queries, keys)

        def mask_mod(batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
            q, k = (at[batch if len(at) > 1 else 0, index] for at, index in ((q_at, q_index), (k_at, k_index)))
            result = seen(self.mask, q, k)
            if pairs is None:
                return result
            row, column = batch if len(pairs) > 1 else 0, head if pairs.shape[1] > 1 else 0
            return result & pairs[row, column, q_index, k_index]

        return mask_mod

    def attn_mask(
        self,
        q_positions: Tensor,
        k_positions: Tensor,
        *,
        visible: Tensor | None = None,
        order: Order | None = None,
        dtype: torch.dtype = torch.float32,
        **content: Any,
    ) -> Tensor | None:
        """Bias and mask in one, for `scaled_dot_product_attention(..., attn_mask=, scale=policy.score_scale)`.

        Args:
            visible, order: as in `visible`.
            dtype: that of the queries, where there is a bias.
            content: what the bias reads, as in `dense_bias`.

        Returns:
            (1 or B, 1 or H, Sq, Sk): booleans without a bias, else the bias in `dtype` with -inf where nothing is seen;
            None where everything is seen and there is no bias.
        """
        pairs = self.visible(q_positions, k_positions, visible=visible, order=order)
        bias = self.dense_bias(q_positions, k_positions, visible=pairs, **content)
        if bias is None or pairs is None:
            return pairs if bias is None else bias.to(dtype)
        return bias.to(dtype).masked_fill(~pairs, -torch.inf)

    def values(
        self, weights: Tensor, q_positions: Tensor, k_positions: Tensor, *, heads: slice | None = None
    ) -> Tensor | None:
        """What positions add to the output, from attention's weights (Shaw's relative values); None for most."""
        if self.bias is None:
            return None
        return self.bias.values(weights, self._one_axis(q_positions), self._one_axis(k_positions), heads=heads)

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

    def extra_repr(self) -> str:
        values = ", rotate_values=True" if self.rotate_values else ""
        return f"mask={self.mask!r}, score_scale={self.score_scale}{values}"

    def __str__(self) -> str:
        parts = [type(part).__name__ for part in (self.rotate, self.bias, self.scale) if part is not None]
        kinds = ["causal" if self.mask.causal else "bidirectional"]
        if self.mask.sliding_window is not None:
            kinds.append(f"window {self.mask.sliding_window}")
        if self.mask.chunk is not None:
            kinds.append(f"chunk {self.mask.chunk}")
        return f"Policy({' + '.join(parts) or 'NoPE'}, {', '.join(kinds)})"

    def _order(self, q_positions: Tensor, k_positions: Tensor, order: Order | None) -> tuple[Tensor, Tensor]:
        """What the mask goes by."""
        if order is not None:
            return order if isinstance(order, tuple) else (order, order)
        several = q_positions.dim() == 3 or k_positions.dim() == 3 or isinstance(self.rotate, PatchRotate)
        if several and (self.mask.causal or self.mask.reach is not None):
            raise ValueError(
                f"positions: got several axes, of shape {tuple(q_positions.shape)}, with {self.mask}, which goes by "
                "order; give order=, the tokens' numbers (S,) or (B, S), or a mask with causal=False"
            )
        return self._one_axis(q_positions), self._one_axis(k_positions)

    def _one_axis(self, positions: Tensor) -> Tensor:
        """What biases, scales and masks follow: the first axis (time) of positions that have several."""
        if (
            positions.dim() == 2
            and isinstance(self.rotate, PatchRotate)
            and not (self.bias is None and self.scale is None)
        ):
            raise ValueError(
                f"positions: got shape {tuple(positions.shape)}, where {type(self.rotate).__name__} has axes and the "
                "bias or scale beside it has rows; give (axes, B, S)"
            )
        return positions[0] if positions.dim() == 3 else positions

    def _with_state(self, k_positions: Tensor, content: dict[str, Any]) -> dict[str, Any]:
        bias, x = self.bias, content.get("x")
        if bias is None or x is None or "k_state" not in bias.reads or content.get("k_state") is not None:
            return content
        if x.shape[1] != k_positions.shape[-1]:
            raise ValueError(
                f"k_state: got None, and x has {x.shape[1]} tokens for {k_positions.shape[-1]} keys; give what "
                f"policy.bias.state made of all of them"
            )
        state = bias.state(x, heads=content.get("heads"))
        return {**content, "q_state": state, "k_state": state}


P = TypeVar("P")


def _require(name: str, part: Any, kind: type, wanted: str) -> None:
    if part is not None and not isinstance(part, kind):
        raise ValueError(f"{name}: got a {type(part).__name__}; give {wanted}, or None")


def _one(name: str, given: P | Sequence[P] | None, kind: type[P], joined: Callable[[Sequence[P]], P]) -> P | None:
    """One part, several joined, or none."""
    if isinstance(given, (list, tuple)):
        for part in given:
            _require(name, part, kind, f"{kind.__name__} modules")
        return joined(given)
    _require(name, given, kind, f"a {kind.__name__} module or several")
    return cast("P | None", given)
