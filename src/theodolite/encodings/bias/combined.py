"""Biases together: added up, or some heads by one and some by another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn

from theodolite.encodings.bias.base import Bias, Content, ScoreMod
from theodolite.encodings.heads import require_heads


class BiasSum(Bias):
    """Several biases of the same heads, added up.

    Args:
        biases: at least one; at most one of them may keep a state.
    """

    def __init__(self, biases: Sequence[Bias]) -> None:
        if not biases:
            raise ValueError("biases: got none; give at least one")
        counts = [bias.num_heads for bias in biases]
        if len(set(counts)) > 1:
            raise ValueError(f"biases: got {counts} heads; all must have the same number")
        if sum("k_state" in bias.reads for bias in biases) > 1:
            raise ValueError("biases: got two that keep a state with the keys; only one may")
        super().__init__(counts[0])
        self.score_scales = tuple(dict.fromkeys(bias.score_scale for bias in biases if bias.score_scale is not None))
        self.score_scale = self.score_scales[0] if len(self.score_scales) == 1 else None
        self.biases = nn.ModuleList(biases)
        self.reads = _all_reads(biases)  # type: ignore[misc]
        self.causal_only = any(bias.causal_only for bias in biases)  # type: ignore[misc]
        self.by_distance = all(bias.by_distance for bias in biases)
        self.by_pair = all(bias.by_pair for bias in biases)

    def state(self, x: Tensor, previous: Tensor | None = None, *, heads: slice | None = None) -> Tensor | None:
        states = (bias.state(x, previous, heads=heads) for bias in self._each())
        return next((state for state in states if state is not None), None)

    def values(
        self, weights: Tensor, q_positions: Tensor, k_positions: Tensor, *, heads: slice | None = None
    ) -> Tensor | None:
        terms = [bias.values(weights, q_positions, k_positions, heads=heads) for bias in self._each()]
        there = [term for term in terms if term is not None]
        return sum(there[1:], there[0]) if there else None

    @property
    def adds_values(self) -> bool:
        return any(bias.adds_values for bias in self._each())

    def reset_parameters(self) -> None:
        for bias in self._each():
            bias.reset_parameters()

    def _each(self) -> Iterator[Bias]:
        return (cast(Bias, bias) for bias in self.biases)

    def _dense(self, q_positions: Tensor, k_positions: Tensor, content: Content, heads: slice) -> Tensor:
        first, *others = self._each()
        total = first._dense(q_positions, k_positions, content, heads)
        for bias in others:
            term = bias._dense(q_positions, k_positions, content, heads)
            # Two tensors of this size are enough, where one can hold the sum.
            fits = total.dtype == term.dtype and total.shape == torch.broadcast_shapes(total.shape, term.shape)
            total = total.add_(term) if fits else total + term
        return total

    def _score_mod(self, q_positions: Tensor, k_positions: Tensor, content: Content, heads: slice) -> ScoreMod | None:
        mods = [bias._score_mod(q_positions, k_positions, content, heads) for bias in self._each()]
        if any(mod is None for mod in mods):
            return None

        def score_mod(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
            for mod in mods:
                score = cast(ScoreMod, mod)(score, batch, head, q_index, k_index)
            return score

        return score_mod


class BiasByHead(Bias):
    """Heads with biases of their own: `BiasByHead([(ALiBi(6), 6), (None, 2)])`; None adds nothing.

    Args:
        parts: a bias, or None, and how many query heads in a row have it: as many as the bias itself has.
    """

    def __init__(self, parts: Sequence[tuple[Bias | None, int]]) -> None:
        if not parts:
            raise ValueError("parts: got none; give pairs of a bias, or None, and its heads")
        for part, count in parts:
            require_heads("parts", count)
            if part is not None and not isinstance(part, Bias):
                raise ValueError(f"parts: got a {type(part).__name__}; a part is a Bias module, or None to add nothing")
            if part is not None and part.num_heads != count:
                raise ValueError(f"parts: got a {type(part).__name__} of {part.num_heads} heads for {count} heads")
        super().__init__(sum(count for _, count in parts))
        there = [part for part, _ in parts if part is not None]
        self.score_scales = tuple(dict.fromkeys(bias.score_scale for bias in there))
        self.score_scale = self.score_scales[0] if len(self.score_scales) == 1 else None
        self.biases = nn.ModuleList(there)
        self._there = tuple(part is not None for part, _ in parts)
        self._ends = tuple(accumulate((count for _, count in parts), initial=0))
        self.reads = _all_reads(there)  # type: ignore[misc]
        self.causal_only = any(bias.causal_only for bias in there)  # type: ignore[misc]
        self.by_distance = all(bias.by_distance for bias in there)
        self.by_pair = all(bias.by_pair for bias in there)

    def state(self, x: Tensor, previous: Tensor | None = None, *, heads: slice | None = None) -> Tensor | None:
        heads = self._heads(heads)
        made = [
            (here, bias.state(x, own.q_state, heads=there))
            for here, bias, own, there in self._parts_of(Content(q_state=previous), heads)
            if bias is not None and "k_state" in bias.reads
        ]
        states = [(here, state) for here, state in made if state is not None]
        if not states:
            return None
        # Heads without a state have zeros: one tensor is kept with the keys.
        like = states[0][1]
        whole = like.new_zeros(like.shape[0], heads.stop - heads.start, *like.shape[2:])
        for here, state in states:
            whole[:, here] = state
        return whole

    def values(
        self, weights: Tensor, q_positions: Tensor, k_positions: Tensor, *, heads: slice | None = None
    ) -> Tensor | None:
        terms = [
            (here, bias.values(weights[:, here], q_positions, k_positions, heads=there))
            for here, bias, _, there in self._parts_of(Content(), self._heads(heads))
            if bias is not None
        ]
        there = [(here, term) for here, term in terms if term is not None]
        if not there:
            return None
        like = there[0][1]
        whole = like.new_zeros(like.shape[0], weights.shape[1], *like.shape[2:])
        for here, term in there:
            whole[:, here] = term
        return whole

    def slopes(self, heads: slice | None = None) -> Tensor | None:
        parts = [
            torch.zeros(hi - lo, device="cpu") if bias is None else bias.slopes() for lo, hi, bias in self._parts()
        ]
        if any(part is None for part in parts):
            return None
        return torch.cat([part.cpu() for part in cast(list[Tensor], parts)])[self._heads(heads)]

    @property
    def adds_values(self) -> bool:
        return any(cast(Bias, bias).adds_values for bias in self.biases)

    def reset_parameters(self) -> None:
        for bias in self.biases:
            cast(Bias, bias).reset_parameters()

    def _parts(self) -> Iterator[tuple[int, int, Bias | None]]:
        """Where each part's heads begin and end, and its bias."""
        biases = iter(self.biases)
        for lo, hi, there in zip(self._ends, self._ends[1:], self._there, strict=False):
            yield lo, hi, cast(Bias, next(biases)) if there else None

    def _parts_of(self, content: Content, heads: slice) -> Iterator[tuple[slice, Bias | None, Content, slice]]:
        """Of the parts that this rank has: its heads here, its bias, what that may read, its heads there."""
        for lo, hi, bias in self._parts():
            start, stop = max(lo, heads.start), min(hi, heads.stop)
            if start < stop:
                here = slice(start - heads.start, stop - heads.start)
                reads = () if bias is None else bias.reads
                yield here, bias, _of_heads(content, here, heads, reads), slice(start - lo, stop - lo)

    def _dense(self, q_positions: Tensor, k_positions: Tensor, content: Content, heads: slice) -> Tensor:
        parts = [
            (here, None if bias is None else bias._dense(q_positions, k_positions, own, there))
            for here, bias, own, there in self._parts_of(content, heads)
        ]
        made = [part for _, part in parts if part is not None]
        rows = max([q_positions.shape[0], k_positions.shape[0], *(part.shape[0] for part in made)])
        like = made[0] if made else torch.zeros((), device=q_positions.device)
        zero = like.new_zeros(1, 1, 1, 1)
        pairs = q_positions.shape[1], k_positions.shape[1]
        return torch.cat(
            [
                zero.expand(rows, here.stop - here.start, *pairs) if part is None else part.expand(rows, -1, -1, -1)
                for here, part in parts
            ],
            dim=1,
        )

    def _score_mod(self, q_positions: Tensor, k_positions: Tensor, content: Content, heads: slice) -> ScoreMod | None:
        mods = [
            (here, None if bias is None else bias._score_mod(q_positions, k_positions, own, there), bias)
            for here, bias, own, there in self._parts_of(content, heads)
        ]
        if any(mod is None and bias is not None for _, mod, bias in mods):
            return None

        def score_mod(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
            out = score
            for here, mod, _ in mods:
                if mod is not None:
                    # Both sides of `where` are worked out, so the index must lie inside the part even elsewhere.
                    own = (head - here.start).clamp(0, here.stop - here.start - 1)
                    inside = (head >= here.start) & (head < here.stop)
                    out = torch.where(inside, mod(score, batch, own, q_index, k_index), out)
            return out

        return score_mod


def _all_reads(biases: Sequence[Bias]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for bias in biases for name in bias.reads))


def _of_heads(content: Content, here: slice, heads: slice, reads: Sequence[str]) -> Content:
    """What the heads `here`, of a rank's, may read; grouped queries share their key heads."""
    q, k, x, q_state, k_state, visible = content
    if "k" not in reads:
        k = None
    if k is not None:
        count = heads.stop - heads.start
        if k.shape[1] == 0 or count % k.shape[1]:
            raise ValueError(f"k: got {k.shape[1]} heads for {count} query heads; they must be those of the same rank")
        group = count // k.shape[1]
        if here.start % group or here.stop % group:
            raise ValueError(
                f"parts: heads {here.start} to {here.stop} split a group of {group} queries that share a key head"
            )
        k = k[:, here.start // group : here.stop // group]
    q, q_state, k_state = (part if part is None else part[:, here] for part in (q, q_state, k_state))
    if visible is not None and visible.dim() == 4 and visible.shape[1] > 1:
        visible = visible[:, here]
    return Content(q, k, x, q_state, k_state, visible)
