"""Rotations along several axes: the rows and columns of an image, the frames of a video.

| family (vision encoder) | encoding | positions, from `theodolite.positions.grids` or `fractional_grids` |
|---|---|---|
| Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4V | `Axial.qwen_vl(head_dim)` | `patches_of_grids(...)`: row, column |
| Pixtral | `Axial.pixtral(head_dim)` | `patches_of_grids(..., spatial_merge_size=1)`: row, column |
| Gemma 4 | `Axial.gemma4(head_dim)` | `padded_patch_positions(...)`: column, row |
| Llama 4 | `Axial.llama4(head_dim)` | `llama4_patch_positions(...)`: column + 1, row + 1 |
| DINOv3 | `Axial.dinov3(head_dim)` | `centred_patch_positions(...)`: row, column, from -1 to 1 |
| EVA-02 | `Axial.eva02(head_dim)` | `resized_patch_positions(...)`: row, column |
| rope-vit (axial) | `Axial.rope_vit(head_dim)` | `patch_positions(...).flip(0)`: column, row |

The bases are those of the released models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from theodolite.plan.errors import PlanError, require_bool, require_given, require_positive, require_whole
from theodolite.plan.rotary import WIDEST_HEAD, Rotary
from theodolite.plan.scaling import Float64, Scaling

_LARGEST_MULTIPLIER = 1e6
"""So that angles in float64 are still exact to 6e-8 where positions are fractions of an image."""
_WIDEST_RATIO = 1e100
"""Of two periods, so that no power of it leaves the range of a float."""


@dataclass(frozen=True, kw_only=True)
class Axial:
    """A rotary encoding whose pairs follow one axis each: `angle = inv_freq[pair] * positions[axis_of_pairs[pair]]`.

    Args:
        head_dim: channels of a head.
        rope_theta: the base. It has no default.
        axes_dim: channels that turn by each axis, even numbers, (16, 56, 56) in FLUX; two halves of the head by
            default. Where their sum is less than `head_dim`, the last channels do not turn (MiniMax M3).
        scaling: how the frequencies are stretched: one scaling for all axes, or one for each (NTK per axis). A
            scaling sees one axis: its lengths and factors are those of the axis, in units of position.
        shared_spectrum: one spectrum over all channels that turn, dealt out to the axes in turn (Pixtral): axis a of n
            has the frequencies a, a + n, a + 2n, ... By default each axis has a whole spectrum over its own channels.
        alternating: the pairs of the axes alternate (Kimi K2.5) rather than stand in blocks.
        interleaved: pairs are channels (2i, 2i+1) when true, (i, i + R/2) of the R that turn when false.
        halves_per_axis: each axis turns a stretch of channels by itself, as a small head: its pairs are (i, i + half
            the stretch), counted from its begin (Gemma 4). Interleaved pairs in blocks stand so anyway.
        multiplier: multiplies every frequency, 2 pi where positions are counted in turns (DINOv3).
    """

    head_dim: int
    rope_theta: float
    axes_dim: tuple[int, ...] = ()
    scaling: Scaling | tuple[Scaling, ...] = field(default_factory=Scaling)
    shared_spectrum: bool = False
    alternating: bool = False
    interleaved: bool = False
    halves_per_axis: bool = False
    multiplier: float = 1.0

    def __post_init__(self) -> None:
        require_given(head_dim=self.head_dim, rope_theta=self.rope_theta, multiplier=self.multiplier)
        require_whole(head_dim=self.head_dim, most=WIDEST_HEAD)
        require_positive(rope_theta=self.rope_theta, multiplier=self.multiplier)
        if self.multiplier > _LARGEST_MULTIPLIER:
            raise PlanError("multiplier", self.multiplier, f"it must be at most {_LARGEST_MULTIPLIER:g}")
        for name in ("shared_spectrum", "alternating", "interleaved", "halves_per_axis"):
            require_bool(**{name: getattr(self, name)})
        self._settle_axes()
        self._settle_scaling()
        for name in ("shared_spectrum", "alternating"):
            if getattr(self, name) and len(set(self.axes_dim)) > 1:
                raise PlanError(name, True, f"the axes must have equally many channels, not {list(self.axes_dim)}")
        for name in ("interleaved", "alternating"):
            if self.halves_per_axis and getattr(self, name):
                raise PlanError("halves_per_axis", True, f"{name} says otherwise where the pairs stand: give one")
        factors = sorted({self._rotary(axis).attention_factor() for axis in range(len(self.axes_dim))})
        if len(factors) > 1:
            allowed = "it must be the same for all axes, for it scales the scores as a whole: say it in each scaling"
            raise PlanError("attention_factor", factors, allowed)

    def _settle_axes(self) -> None:
        if not isinstance(self.axes_dim, (list, tuple)):
            raise PlanError("axes_dim", self.axes_dim, "it must be a list, one number of channels for each axis")
        if not self.axes_dim:
            if self.head_dim % 4:
                raise PlanError("head_dim", self.head_dim, "for two halves it must be a multiple of 4: say axes_dim")
            object.__setattr__(self, "axes_dim", (self.head_dim // 2,) * 2)
        object.__setattr__(self, "axes_dim", tuple(self.axes_dim))
        for channels in self.axes_dim:
            require_given(axes_dim=channels)
            require_whole(axes_dim=channels, least=2)
            if channels % 2:
                raise PlanError("axes_dim", list(self.axes_dim), "each must be even")
        if self.rotary_dim > self.head_dim:
            raise PlanError("axes_dim", list(self.axes_dim), f"their sum must be at most head_dim ({self.head_dim})")

    def _settle_scaling(self) -> None:
        given = self.scaling
        scalings = tuple(given) if isinstance(given, (list, tuple)) else (given,) * len(self.axes_dim)
        if len(scalings) != len(self.axes_dim):
            raise PlanError("scaling", list(scalings), f"one for each of the {len(self.axes_dim)} axes is needed")
        # One for all where they agree: the same encoding, so the same value.
        object.__setattr__(self, "scaling", scalings[0] if all(one == scalings[0] for one in scalings) else scalings)
        for axis, scaling in enumerate(scalings):
            if getattr(scaling, "depends_on_length", False):
                allowed = "its frequencies depend on a length: settle it with scaling.at_length(length of the axis)"
                raise PlanError("scaling", scaling, allowed)
            if self.multiplier != 1 and hasattr(scaling, "original_max_position_embeddings"):
                allowed = (
                    "it counts turns over whole positions, and with a multiplier they are none: give Linear or NTK"
                )
                raise PlanError("scaling", scaling, allowed)
            self._rotary(axis)

    def _rotary(self, axis: int) -> Rotary:
        """The spectrum that the axis takes its frequencies from, as an encoding along one axis."""
        scaling = self.scaling[axis] if isinstance(self.scaling, tuple) else self.scaling
        dim = self.rotary_dim if self.shared_spectrum else self.axes_dim[axis]
        return Rotary(head_dim=dim, rope_theta=self.rope_theta, scaling=scaling)

    @property
    def rotary_dim(self) -> int:
        """Channels that turn, the first of the head."""
        return sum(self.axes_dim)

    def inv_freq(self) -> Float64:
        """Inverse frequencies, shape (rotary_dim/2,), float64, radians per unit of position, in the order of pairs."""
        axes = range(len(self.axes_dim))
        spectra = [self._rotary(axis).inv_freq() for axis in axes]
        if self.shared_spectrum:
            spectra = [spectrum[axis :: len(axes)] for axis, spectrum in enumerate(spectra)]
        ordered = np.stack(spectra, axis=1).ravel() if self.alternating else np.concatenate(spectra)
        return np.asarray(ordered * self.multiplier)

    def axis_of_pairs(self) -> tuple[int, ...]:
        """Which axis of the positions each pair follows, rotary_dim/2 of them."""
        axes = range(len(self.axes_dim))
        if self.alternating:
            return tuple(axes) * (self.axes_dim[0] // 2)
        return tuple(axis for axis in axes for _ in range(self.axes_dim[axis] // 2))

    def attention_factor(self) -> float:
        """The number that multiplies cos and sin (the scores get its square), the same for all axes."""
        return self._rotary(0).attention_factor()

    def periods(self) -> Float64:
        """Units of position per full turn, shape (rotary_dim/2,), in the order of pairs.

        A pair whose period is many times the extent of the positions hardly turns: most of DINOv3's, whose periods are
        1 to nearly 100 for positions from -1 to 1, make less than one turn.
        """
        with np.errstate(divide="ignore"):
            return np.asarray(2 * np.pi / self.inv_freq())

    @classmethod
    def qwen_vl(cls, head_dim: int, *, rope_theta: float = 10000.0) -> Axial:
        """Qwen2-VL, Qwen2.5-VL, Qwen3-VL and the many that took it over: rows then columns, halves.

        Positions: `patches_of_grids(grid_thw, spatial_merge_size=2)`.
        """
        return cls(head_dim=head_dim, rope_theta=rope_theta)

    @classmethod
    def pixtral(cls, head_dim: int, *, rope_theta: float = 10000.0) -> Axial:
        """Pixtral as transformers has it (halves): rows have the even frequencies of one spectrum, columns the odd.

        Positions: `patch_positions(rows, columns)`.
        """
        return cls(head_dim=head_dim, rope_theta=rope_theta, shared_spectrum=True)

    @classmethod
    def gemma4(cls, head_dim: int, *, rope_theta: float = 100.0) -> Axial:
        """Gemma 4: columns then rows, each half of the head turns alone.

        Positions: `padded_patch_positions(sizes, patches=...)`, which has columns first.
        """
        return cls(head_dim=head_dim, rope_theta=rope_theta, halves_per_axis=True)

    @classmethod
    def llama4(cls, head_dim: int, *, rope_theta: float = 10000.0) -> Axial:
        """Llama 4: columns then rows, interleaved.

        Positions: `llama4_patch_positions(rows, columns)`, which has columns first, from 1, and the class token last.
        """
        return cls(head_dim=head_dim, rope_theta=rope_theta, interleaved=True)

    @classmethod
    def eva02(cls, head_dim: int, *, rope_theta: float = 10000.0) -> Axial:
        """EVA-02, and timm's `RotaryEmbeddingCat(in_pixels=False)`: rows then columns, interleaved.

        Positions: `resized_patch_positions(rows, columns, trained_rows=..., trained_columns=...)`.
        """
        return cls(head_dim=head_dim, rope_theta=rope_theta, interleaved=True)

    @classmethod
    def rope_vit(cls, head_dim: int, *, rope_theta: float = 100.0) -> Axial:
        """rope-vit's RoPE-Axial (2403.13298): columns then rows, interleaved.

        Positions: `patch_positions(rows, columns).flip(0)`, columns first.
        """
        return cls(head_dim=head_dim, rope_theta=rope_theta, interleaved=True)

    @classmethod
    def dinov3(
        cls,
        head_dim: int,
        *,
        rope_theta: float | None = None,
        min_period: float | None = None,
        max_period: float | None = None,
    ) -> Axial:
        """DINOv3: rows then columns, halves; periods from a base, or log-spaced between two.

        Positions: `centred_patch_positions(rows, columns, normalize_coords=...)`, from -1 to 1.

        Args:
            rope_theta: periods are `rope_theta^(4i/d)`; 100 where nothing is given, as in the released models.
            min_period, max_period: of the first and the last pair of each axis, both in place of `rope_theta`. They
                are kept as the base and the multiplier that give them.
        """
        if min_period is None and max_period is None:
            base = 100.0 if rope_theta is None else rope_theta
            return cls(head_dim=head_dim, rope_theta=base, multiplier=2 * math.pi)
        if rope_theta is not None:
            raise PlanError("rope_theta", rope_theta, "min_period and max_period say the periods: give one of the two")
        if min_period is None or max_period is None:
            given = {"min_period": min_period, "max_period": max_period}
            raise PlanError("min_period, max_period", given, "both must be given, or rope_theta")
        require_positive(min_period=min_period, max_period=max_period)
        require_whole(head_dim=head_dim, least=8, most=WIDEST_HEAD)
        if not min_period < max_period <= min_period * _WIDEST_RATIO:
            allowed = f"it must be above min_period ({min_period:g}) and at most {_WIDEST_RATIO:g} times as long"
            raise PlanError("max_period", max_period, allowed)
        pairs = head_dim // 4
        base = (max_period / min_period) ** (pairs / (pairs - 1))
        return cls(head_dim=head_dim, rope_theta=base, multiplier=2 * math.pi / min_period)
