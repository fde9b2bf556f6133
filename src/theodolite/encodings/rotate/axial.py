"""Rotations of image patches and video frames, along axes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor

from theodolite.encodings.rotate.base import K, Q, Rotate
from theodolite.encodings.rotate.lengths import Lengths
from theodolite.encodings.rotate.operands import device_of
from theodolite.encodings.rotate.tables import Tables, pair_tables
from theodolite.kernels import rotate
from theodolite.kernels.outputs import require_apart
from theodolite.plan.axial import Axial
from theodolite.positions.checks import require_count, require_positions


class PatchRotate(Rotate):
    """A rotation of tokens that have a place, which lets the first `prefix` tokens, that have none, pass bit for bit.

    Class and register tokens can instead be given a place at 0 on every axis, where nothing turns
    (`theodolite.positions.grids.with_special_tokens`), wherever they stand in the sequence.
    """

    def apply_tables(
        self, q: Q, k: K, tables: Any, *, heads_first: bool = True, inplace: bool = False, prefix: int = 0
    ) -> tuple[Q, K]:
        """Turn q (B, H, prefix + S, D) and k (B, Hkv, prefix + S, D), either may be None, by tables made before.

        Args:
            prefix: tokens in front that the tables have no rows for; they pass as they are.
        """
        patches = _behind("q", q, prefix, heads_first), _behind("k", k, prefix, heads_first)
        turned = self._apply_patches(patches[0], patches[1], tables, heads_first=heads_first, inplace=inplace)
        whole = (_joined(x, part, prefix, heads_first, inplace) for x, part in zip((q, k), turned, strict=True))
        return cast(tuple[Q, K], tuple(whole))

    def forward(
        self,
        q: Q,
        k: K,
        positions: Tensor,
        *,
        lengths: Lengths | None = None,
        heads_first: bool = True,
        prefix: int = 0,
    ) -> tuple[Q, K]:
        """Turn q (B, H, prefix + S, D) and k (B, Hkv, prefix + S, D) at `positions`; either may be None.

        Positions are (axes, S) for all rows, or (axes, B, S). With `heads_first=False` q and k are
        (B, prefix + S, H, D). `prefix` tokens in front pass as they are.
        """
        tables = self.tables(positions, lengths=lengths, device=device_of(q, k))
        check_patches(q, k, positions, heads_first, prefix)
        return self.apply_tables(q, k, tables, heads_first=heads_first, prefix=prefix)

    def turn(
        self, x: Tensor, tables: Any, *, heads_first: bool = True, conjugate: bool = False, prefix: int = 0
    ) -> Tensor:
        """Turn one tensor (B, H, prefix + S, D) by tables made before; `conjugate` turns the other way."""
        patches = _behind("x", x, prefix, heads_first)
        turned = self._turn_patches(patches, tables, heads_first=heads_first, conjugate=conjugate)
        return cast(Tensor, _joined(x, turned, prefix, heads_first, False))

    def _apply_patches(self, q: Q, k: K, tables: Any, *, heads_first: bool, inplace: bool) -> tuple[Q, K]:
        return super().apply_tables(q, k, tables, heads_first=heads_first, inplace=inplace)

    def _turn_patches(self, x: Tensor, tables: Any, *, heads_first: bool, conjugate: bool) -> Tensor:
        return super().turn(x, tables, heads_first=heads_first, conjugate=conjugate)


class AxialRotary(PatchRotate):
    """Turns queries and keys by the places of their tokens on several axes. Holds a plan and nothing else.

    Positions are (axes, S), as `theodolite.positions` makes them for one image or for several packed ones, or
    (axes, B, S) where rows differ: integers, or float64 or float32 fractions. Which axis comes first, and from where
    it counts, is a family's own, and the wrong order is no error: the table in `theodolite.plan.axial` says which call
    goes with which `Axial` (`patch_positions(rows, columns).flip(0)` with `Axial.rope_vit`, for example).

    Args:
        axial: what to apply. Fixed once given.

    Example:
        >>> import torch
        >>> from theodolite.plan.axial import Axial
        >>> from theodolite.positions.grids import patch_positions
        >>> rope = AxialRotary(Axial.qwen_vl(64))
        >>> q, k = torch.randn(2, 8, 1 + 12, 64), torch.randn(2, 8, 1 + 12, 64)
        >>> q, k = rope(q, k, patch_positions(3, 4), prefix=1)
    """

    def __init__(self, axial: Axial) -> None:
        if not isinstance(axial, Axial):
            raise ValueError(f"axial: got a {type(axial).__name__}; it must be an Axial, for example Axial.qwen_vl(64)")
        super().__init__(rotary_dim=axial.rotary_dim, interleaved=axial.interleaved, head_dim=axial.head_dim)
        self._axial = axial
        # Plain numbers: no cast finds them, and a compiled graph carries them as constants.
        self._inv_freq = tuple(axial.inv_freq().tolist())
        self._axis, self._factor = axial.axis_of_pairs(), axial.attention_factor()
        ends = pairwise(accumulate(axial.axes_dim, initial=0))
        self._stretches = tuple(ends) if axial.halves_per_axis else ((0, axial.rotary_dim),)

    @property
    def axial(self) -> Axial:
        """What is applied."""
        return self._axial

    def tables(
        self,
        positions: Tensor,
        *,
        lengths: Lengths | None = None,
        amplitude: bool = True,
        device: torch.device | str | None = None,
    ) -> Tables:
        """cos and sin, (S, R/2) or (B, S, R/2), float32.

        Every entry is within 6e-8 of the true value, as long as position times `multiplier` is at most 2**24.

        Args:
            positions: (axes, S) or (axes, B, S), integers, or float32 or float64 where fractions are meant.
            lengths: of no effect: the frequencies do not depend on it.
            amplitude: false leaves the attention factor out: pure rotations.
            device: where the tables are put; that of `positions` by default.
        """
        axes = len(self._axial.axes_dim)
        places = places_on_axes(positions, axes)
        cos, sin = pair_tables(
            self._inv_freq,
            places,
            axis_of_pairs=self._axis,
            axes=axes,
            amplitude=self._factor if amplitude else 1.0,
            device=device,
        )
        return Tables(cos, sin) if places is positions else Tables(cos.squeeze(0), sin.squeeze(0))

    @property
    def table_key(self) -> Hashable:
        return self._axial

    def extra_repr(self) -> str:
        return repr(self._axial)

    def _apply_patches(self, q: Q, k: K, tables: Tables, *, heads_first: bool, inplace: bool) -> tuple[Q, K]:
        if len(self._stretches) == 1:
            return super()._apply_patches(q, k, tables, heads_first=heads_first, inplace=inplace)
        for name, x in (("q", q), ("k", k)):
            if x is not None:
                self._check_fit(name, x, tables, heads_first)
        if inplace and q is not None and k is not None:
            require_apart(q, k)
        turned = [
            rotate(
                None if q is None else q[..., start:stop],
                None if k is None else k[..., start:stop],
                *_pairs_of(tables, start, stop),
                heads_first=heads_first,
                inplace=inplace,
            )
            for start, stop in self._stretches
        ]
        if inplace:
            return q, k
        sides = (self._with_rest(x, [both[side] for both in turned]) for side, x in enumerate((q, k)))
        return cast(tuple[Q, K], tuple(sides))

    def _turn_patches(self, x: Tensor, tables: Tables, *, heads_first: bool, conjugate: bool) -> Tensor:
        if len(self._stretches) == 1:
            return super()._turn_patches(x, tables, heads_first=heads_first, conjugate=conjugate)
        self._check_fit("x", x, tables, heads_first)
        options: dict[str, Any] = {"heads_first": heads_first, "conjugate": conjugate}
        turned = [
            rotate(x[..., start:stop], None, *_pairs_of(tables, start, stop), **options)[0]
            for start, stop in self._stretches
        ]
        return cast(Tensor, self._with_rest(x, turned))

    def _with_rest(self, x: Tensor | None, turned: Sequence[Tensor | None]) -> Tensor | None:
        """The stretches side by side, and the channels behind them that do not turn."""
        if x is None:
            return None
        rest = [x[..., self.rotary_dim :]] if x.shape[-1] > self.rotary_dim else []
        return torch.cat([*cast(list[Tensor], turned), *rest], dim=-1)


def places_on_axes(positions: Tensor, axes: int) -> Tensor:
    """Positions (axes, S) or (axes, B, S) as (axes, B, S), B being 1 where they are the same for all rows.

    Raises:
        ValueError: they have another shape, another number of axes, or a dtype that positions cannot have.
    """
    if isinstance(positions, Tensor) and positions.dim() not in (2, 3):
        raise ValueError(f"positions: got shape {tuple(positions.shape)}; it must be (axes, S) or (axes, B, S)")
    require_positions("positions", positions, dims=(2, 3))
    if positions.shape[0] != axes:
        raise ValueError(
            f"positions: got {positions.shape[0]} axes; this encoding has {axes}, and they are the first dimension of "
            f"(axes, S) or (axes, B, S), here {tuple(positions.shape)}"
        )
    return positions[:, None] if positions.dim() == 2 else positions


def check_patches(q: Tensor | None, k: Tensor | None, positions: Tensor, heads_first: bool, prefix: int) -> None:
    """Refuse queries and keys that have not `prefix` tokens more than there are positions."""
    for name, x in (("q", q), ("k", k)):
        if x is None:
            continue
        require_count("prefix", prefix, least=0)
        tokens, placed = x.shape[-2 if heads_first else -3], positions.shape[-1]
        if tokens != prefix + placed:
            layout = "(B, H, S, D)" if heads_first else "(B, S, H, D)"
            raise ValueError(
                f"positions: got {placed} and a prefix of {prefix} for the {tokens} tokens of {name} of shape "
                f"{tuple(x.shape)}, read as {layout}; heads_first={not heads_first} reads the other order"
            )


def _pairs_of(tables: Tables, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the pairs that turn the channels from `start` to `stop`."""
    return tables.cos[..., start // 2 : stop // 2], tables.sin[..., start // 2 : stop // 2]


def _behind(name: str, x: Tensor | None, prefix: int, heads_first: bool) -> Any:
    """A view of the tokens behind the first `prefix`."""
    require_count("prefix", prefix, least=0)
    if x is None or prefix == 0:
        return x
    dim = -2 if heads_first else -3
    if x.dim() != 4 or x.shape[dim] < prefix:
        raise ValueError(
            f"{name}: got shape {tuple(x.shape)} and a prefix of {prefix}; it must have four dimensions, and no fewer "
            "tokens than the prefix"
        )
    return x.narrow(dim, prefix, x.shape[dim] - prefix)


def _joined(x: Tensor | None, turned: Tensor | None, prefix: int, heads_first: bool, inplace: bool) -> Any:
    """The first `prefix` tokens of x as they are, then those that were turned."""
    if x is None or turned is None or prefix == 0:
        return turned
    if inplace:
        return x
    dim = -2 if heads_first else -3
    return torch.cat((x.narrow(dim, 0, prefix), turned), dim=dim)
