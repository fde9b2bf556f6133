"""What a rotary encoding says: which channels turn, in what pairs, and how fast."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from theodolite.plan.errors import PlanError, require_given, require_list, require_positive, require_whole
from theodolite.plan.scaling import Float64, Scaling

WIDEST_HEAD = 2**16
"""Channels of a head, at most: all that is computed here is of that size."""
_LARGEST_AMPLITUDE = 255.0
"""Its square multiplies the scores, and is the last that float16 has a number for."""


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """A rotary encoding of one layer: `angle = inv_freq[pair] * position`.

    Args:
        head_dim: channels of a head.
        rope_theta: the base. It has no default: a missing base is the most common silent fault.
        rotary_dim: channels that turn ("partial" when fewer than `head_dim`); the exponents run over it.
        live_pairs: pairs that turn, fastest first; the rest stand still ("proportional"). All by default.
        scaling: how the frequencies are stretched; `Scaling()` is none.
        interleaved: pairs are channels (2i, 2i+1) when true (GPT-J), (i, i + rotary_dim/2) when false (NeoX, Llama).
        trailing: the channels that turn are the last of the head, not the first (DeepSeek).
        mrope_section: pairs per axis of multi-axis positions (time, height, width), or None for one axis.
        mrope_interleaved: axes alternate pair by pair (Qwen3-VL) rather than stand in blocks (Qwen2-VL).
    """

    head_dim: int
    rope_theta: float
    rotary_dim: int = 0
    live_pairs: int | None = None
    scaling: Scaling = field(default_factory=Scaling)
    interleaved: bool = False
    trailing: bool = False
    mrope_section: tuple[int, ...] | None = None
    mrope_interleaved: bool = False

    def __post_init__(self) -> None:
        require_given(head_dim=self.head_dim, rope_theta=self.rope_theta, rotary_dim=self.rotary_dim)
        require_whole(head_dim=self.head_dim, most=WIDEST_HEAD)
        require_positive(rope_theta=self.rope_theta)
        if not isinstance(self.scaling, Scaling):
            allowed = "it must be a Scaling, for example YaRN(factor=4, original_max_position_embeddings=8192)"
            raise PlanError("scaling", self.scaling, allowed)
        if self.rope_theta <= 1:
            raise PlanError("rope_theta", self.rope_theta, "the base must be above 1")
        if self.rotary_dim == 0:
            object.__setattr__(self, "rotary_dim", self.head_dim)
        require_whole(rotary_dim=self.rotary_dim)
        if self.rotary_dim > self.head_dim or self.rotary_dim % 2:
            raise PlanError("rotary_dim", self.rotary_dim, f"it must be even and at most head_dim ({self.head_dim})")
        require_whole(live_pairs=self.live_pairs, least=0)
        if self.live_pairs is not None and not 0 <= self.live_pairs <= self.rotary_dim // 2:
            raise PlanError("live_pairs", self.live_pairs, f"between 0 and {self.rotary_dim // 2}")
        if self.live_pairs == self.rotary_dim // 2:
            # All of them: the same encoding, so the same value.
            object.__setattr__(self, "live_pairs", None)
        if self.mrope_section is not None:
            require_list(mrope_section=self.mrope_section)
            for pairs in self.mrope_section:
                require_given(mrope_section=pairs)
                require_whole(mrope_section=pairs, least=0)
            object.__setattr__(self, "mrope_section", tuple(self.mrope_section))
            if sum(self.mrope_section) != self.rotary_dim // 2:
                raise PlanError(
                    "mrope_section",
                    list(self.mrope_section),
                    f"its sum must be the number of pairs ({self.rotary_dim // 2})",
                )
            counts = tuple(self.axis_of_pairs().count(axis) for axis in range(len(self.mrope_section)))
            if counts != self.mrope_section:
                raise PlanError(
                    "mrope_section",
                    list(self.mrope_section),
                    f"alternating axes have no room for it: the pairs would be shared out as {list(counts)}",
                )
        self._refuse_what_cannot_turn()

    def _refuse_what_cannot_turn(self) -> None:
        """Lists of the wrong length and numbers past all sense are found here, not in the middle of a forward."""
        lengths = {1, getattr(self.scaling, "original_max_position_embeddings", 0) + 1}
        for length in sorted(lengths) if self.depends_on_length else (1,):
            with np.errstate(all="ignore"):
                frequencies = self.inv_freq(length=length)
            if not (np.isfinite(frequencies) & (frequencies >= 0)).all():
                raise PlanError("scaling", self.scaling, "its frequencies must be finite and not negative")
        if not 0 < self.attention_factor() <= _LARGEST_AMPLITUDE:
            raise PlanError(
                "attention_factor",
                self.attention_factor(),
                f"it must be above 0 and at most {_LARGEST_AMPLITUDE:g}: its square multiplies the scores",
            )

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies change with the length of the sequence."""
        return self.scaling.depends_on_length

    def at_length(self, length: int) -> Rotary:
        """This encoding with its frequencies settled for sequences of `length` tokens."""
        return replace(self, scaling=self.scaling.at_length(length))

    def inv_freq(self, *, length: int | None = None) -> Float64:
        """Inverse frequencies, shape (rotary_dim/2,), float64, radians per token; 0 for pairs that stand still."""
        frequencies = self.scaling.inv_freq(self.rope_theta, self.rotary_dim, length=length)
        if self.live_pairs is not None:
            frequencies = np.where(np.arange(len(frequencies)) < self.live_pairs, frequencies, 0.0)
        return frequencies

    def axis_of_pairs(self) -> tuple[int, ...]:
        """Which axis of the positions each pair follows, rotary_dim/2 of them; all 0 without `mrope_section`.

        In blocks, as Qwen2-VL has it; or (`mrope_interleaved`) axis a > 0 takes the pairs a, a + n, a + 2n, ...
        of n axes until its section is full, and axis 0 takes what is left, as Qwen3-VL has it.
        """
        section = self.mrope_section
        if section is None:
            return (0,) * (self.rotary_dim // 2)
        if not self.mrope_interleaved:
            return tuple(axis for axis, pairs in enumerate(section) for _ in range(pairs))
        axes = (pair % len(section) for pair in range(sum(section)))
        return tuple(axis if pair < section[axis] * len(section) else 0 for pair, axis in enumerate(axes))

    def attention_factor(self) -> float:
        """The number that multiplies cos and sin (the scores get its square)."""
        return self.scaling.attention_factor()

    def wavelengths(self, *, length: int | None = None) -> Float64:
        """Tokens per full turn, shape (rotary_dim/2,); infinite for pairs that stand still."""
        with np.errstate(divide="ignore"):
            return np.asarray(2 * np.pi / self.inv_freq(length=length))
