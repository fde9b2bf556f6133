"""What all biases share: explicit positions, what attention has at hand, and the forms that agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from theodolite.encodings.bias.blocks import in_blocks
from theodolite.encodings.heads import heads_of_rank, require_heads
from theodolite.encodings.legacy import drop_legacy_keys
from theodolite.positions.checks import require_positions

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's `score_mod(score, batch, head, query_index, key_index)`."""


class Content(NamedTuple):
    """What a bias may read besides positions; the names of those that it needs are in its `reads`.

    Shapes: q (B, H, Sq, D) and k (B, Hkv, Sk, D), before rotation; x (B, Sq, E), the layer's input at the queries;
    q_state (B, H, Sq, ...) and k_state (B, H, Sk, ...), what the bias itself made of the layer's input with `state`, at
    queries and at keys; visible, booleans of (B, Sq, Sk) or (B, H, Sq, Sk), 1 where it holds for all: which keys a
    query sees.
    """

    q: Tensor | None = None
    k: Tensor | None = None
    x: Tensor | None = None
    q_state: Tensor | None = None
    k_state: Tensor | None = None
    visible: Tensor | None = None


class Bias(nn.Module):
    """A term that is added to the attention scores, after their scaling and before the softmax.

    Forms, all of the same numbers: `dense`, a tensor for `scaled_dot_product_attention`'s `attn_mask`; `score_mod`, a
    function for FlexAttention; `slopes`, one number per head for kernels that have ALiBi built in. The last two
    are None where the bias cannot be said so. Masks are no part of a bias: what a query must not see is for
    the mask to say, and the numbers at such pairs mean nothing.

    Args:
        num_heads: heads of the whole model, over all ranks of tensor parallelism.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    causal_only: ClassVar[bool] = False
    """Whether it is defined for keys up to the query alone."""
    by_distance: bool = False
    """Whether it is a function of query position minus key position alone, and of the head."""
    by_pair: bool = False
    """Whether it can be said pair by pair, as `score_mod`."""
    score_scale: float | None = None
    """What must multiply q.k where this bias is added; None for `head_dim ** -0.5`."""
    score_scales: tuple[float | None, ...] = ()
    """The same of its parts, where it has several."""
    legacy_keys: tuple[str, ...] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Another formula has to say for itself that it goes by the distance.
        if {"_value", "_dense", "dense"} & cls.__dict__.keys() and "by_distance" not in cls.__dict__:
            cls.by_distance = False
        if {"_score_mod", "_dense", "dense"} & cls.__dict__.keys() and "by_pair" not in cls.__dict__:
            cls.by_pair = "_score_mod" in cls.__dict__

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        require_heads("num_heads", num_heads)
        self.num_heads = num_heads

    def dense(
        self,
        q_positions: Tensor,
        k_positions: Tensor,
        *,
        q: Tensor | None = None,
        k: Tensor | None = None,
        x: Tensor | None = None,
        q_state: Tensor | None = None,
        k_state: Tensor | None = None,
        visible: Tensor | None = None,
        heads: slice | None = None,
    ) -> Tensor:
        """The bias as a tensor.

        Args:
            q_positions: (Sq,) or (B, Sq), where the queries stand (tokens).
            k_positions: (Sk,) or (B, Sk), where the keys stand (tokens).
            q, k, x, q_state, k_state: what `reads` names, in the shapes of `Content`.
            visible: which keys each query sees besides those before it, for a bias that counts them (CoPE); it is no
                mask, and others do not read it.
            heads: the heads of this rank, `slice(4, 8)`; all by default. q and k then carry these heads only.

        Returns:
            (1, H, Sq, Sk), or (B, H, Sq, Sk) where positions or content differ by row; float32, or float64 where the
            parameters are.
        """
        content = self._check(q_positions, k_positions, Content(q, k, x, q_state, k_state, visible))
        heads = self._heads(heads)
        dense = self._dense(_rows(q_positions), _rows(k_positions), content, heads)
        shape = heads.stop - heads.start, q_positions.shape[-1], k_positions.shape[-1]
        if dense.dim() != 4 or dense.shape[1] != shape[0] or dense.shape[2] != shape[1] or dense.shape[3] != shape[2]:
            raise ValueError(f"_dense: {type(self).__name__} gave shape {tuple(dense.shape)}; it must be (B, *{shape})")
        return dense

    def score_mod(
        self,
        q_positions: Tensor,
        k_positions: Tensor,
        *,
        q: Tensor | None = None,
        k: Tensor | None = None,
        x: Tensor | None = None,
        q_state: Tensor | None = None,
        k_state: Tensor | None = None,
        visible: Tensor | None = None,
        heads: slice | None = None,
    ) -> ScoreMod | None:
        """The same as a function for FlexAttention, which holds no tensor of all pairs; None where there is none."""
        content = self._check(q_positions, k_positions, Content(q, k, x, q_state, k_state, visible))
        return self._score_mod(_rows(q_positions), _rows(k_positions), content, self._heads(heads))

    def slopes(self, heads: slice | None = None) -> Tensor | None:
        """(H,), float32, where the bias is `-slope * distance`; else None."""
        return None

    def state(self, x: Tensor, previous: Tensor | None = None, *, heads: slice | None = None) -> Tensor | None:
        """(B, H, S, ...): what the bias makes of the layer's input x (B, S, E), to be kept with the keys; else None.

        New tokens are joined on the dimension of S. `previous` (B, H, ...) is the state of the token before the first
        of x, where there is one.
        """
        return None

    def values(
        self, weights: Tensor, q_positions: Tensor, k_positions: Tensor, *, heads: slice | None = None
    ) -> Tensor | None:
        """What attention adds to its output besides, (B, H, Sq, D), from its weights (B, H, Sq, Sk); else None.

        Shaw's relative values: a kernel that does not give its weights cannot add them.
        """
        return None

    @property
    def adds_values(self) -> bool:
        """Whether `values` may give anything: attention must then have its weights at hand."""
        return type(self).values is not Bias.values

    def forward(self, q_positions: Tensor, k_positions: Tensor, **content: Any) -> Tensor:
        """`dense`."""
        return self.dense(q_positions, k_positions, **content)

    def reset_parameters(self) -> None:
        """Initialise what is learned."""

    def _dense(self, q_positions: Tensor, k_positions: Tensor, content: Content, heads: slice) -> Tensor:
        """`dense` with positions as (1 or B, S) and `heads` with both ends given."""
        raise NotImplementedError

    def _score_mod(self, q_positions: Tensor, k_positions: Tensor, content: Content, heads: slice) -> ScoreMod | None:
        return None

    def _check(self, q_positions: Tensor, k_positions: Tensor, content: Content) -> Content:
        require_positions("q_positions", q_positions, dims=(1, 2))
        require_positions("k_positions", k_positions, dims=(1, 2))
        rows = [len(positions) for positions in (q_positions, k_positions) if positions.dim() == 2]
        if len(rows) == 2 and rows[0] != rows[1] and rows[0] != 1 and rows[1] != 1:
            raise ValueError(f"k_positions: got {rows[1]} rows; q_positions have {rows[0]}")
        for name in self.reads:
            if getattr(content, name) is None:
                raise ValueError(f"{name}: got None; {type(self).__name__} reads {', '.join(self.reads)}")
        return content

    def _heads(self, heads: slice | None) -> slice:
        return heads_of_rank(heads, self.num_heads)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        drop_legacy_keys(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


class PairwiseBias(Bias):
    """A bias that is a function of the two positions and the head alone, said once, for one pair: `_value`."""

    def _value(self, q_position: Tensor, k_position: Tensor, head: Tensor, *parameters: Tensor) -> Tensor:
        """The bias of pairs; the three broadcast, and every operation is elementwise or an indexing by `head`.

        `parameters` are `_parameters_of_pairs()` in the same order: use these and not the attributes of the module,
        so that gradients reach them block by block.
        """
        raise NotImplementedError

    def _parameters_of_pairs(self) -> tuple[Tensor, ...]:
        return ()

    def _parameters_on(self, device: torch.device) -> tuple[Tensor, ...]:
        """The same where the positions are: constants are made on the CPU."""
        return tuple(parameter.to(device) for parameter in self._parameters_of_pairs())

    def _dense(self, q_positions: Tensor, k_positions: Tensor, content: Content, heads: slice) -> Tensor:
        # (1, H, 1, 1) against (B, 1, Sq, 1) and (B, 1, 1, Sk).
        head = torch.arange(heads.start, heads.stop, device=q_positions.device)[None, :, None, None]
        q, k = q_positions[:, None, :, None], k_positions[:, None, None, :]
        return in_blocks(self._value, q, k, head, self._parameters_on(q_positions.device))

    def _score_mod(self, q_positions: Tensor, k_positions: Tensor, content: Content, heads: slice) -> ScoreMod:
        parameters, first = self._parameters_on(q_positions.device), heads.start
        rows = q_positions.shape[0] > 1, k_positions.shape[0] > 1

        def score_mod(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
            q = q_positions[batch if rows[0] else 0, q_index]
            k = k_positions[batch if rows[1] else 0, k_index]
            return score + self._value(q, k, head + first, *parameters)

        return score_mod


def _rows(positions: Tensor) -> Tensor:
    # What was made in inference mode cannot be saved for a backward.
    if not torch.compiler.is_compiling() and positions.is_inference() and torch.is_grad_enabled():
        positions = positions.clone()
    return positions if positions.dim() == 2 else positions[None]
