"""How a rotary frequency map is stretched past the length that it was trained for.

Each scaling is a frozen dataclass with two answers, both in float64: the inverse frequencies
(radians per token, one per pair, fastest first) and the attention factor, which multiplies cos and
sin and so enters the scores squared. `D` below is the number of channels that turn, `L` is
`original_max_position_embeddings`, `theta` is `rope_theta`, `f_i = theta^(-2i/D)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from theodolite.plan.errors import (
    LONGEST,
    PlanError,
    require_between,
    require_bool,
    require_given,
    require_one_of,
    require_positive,
    require_whole,
)

Float64 = NDArray[np.float64]


def plain_inv_freq(rope_theta: float, dim: int) -> Float64:
    """Unscaled inverse frequencies `theta^(-2i/dim)`, shape (dim/2,), radians per token (RoFormer, eq. 15)."""
    # Python's power, not numpy's: the last bit of the latter depends on the processor, and 2**24 tokens enlarge it.
    return np.asarray([float(rope_theta) ** (-channel / dim) for channel in range(0, dim, 2)], dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """What all scalings answer; this base class itself changes nothing."""

    rope_type: ClassVar[str] = "default"

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies change with the length of the sequence."""
        return False

    def at_length(self, length: int) -> Scaling:
        """The same scaling with its frequencies settled for sequences of `length` tokens."""
        return self

    def inv_freq(self, rope_theta: float, dim: int, *, length: int | None = None) -> Float64:
        """Inverse frequencies, shape (dim/2,), radians per token.

        `length` (tokens) is needed by a scaling that depends on it, and ignored by the others.
        """
        return plain_inv_freq(rope_theta, dim)

    def attention_factor(self) -> float:
        """The number that multiplies cos and sin; the scores get its square."""
        return 1.0

    def score_factor(self) -> float:
        """The number by which latent attention (DeepSeek) multiplies the scores besides."""
        return 1.0

    def _length(self, length: int | None) -> int:
        if length is None:
            raise PlanError(
                "length",
                None,
                f"the frequencies of {self.rope_type!r} depend on the length of the sequence: give it in tokens",
            )
        require_whole(length=length)
        return length


@dataclass(frozen=True, kw_only=True)
class Linear(Scaling):
    """Position interpolation (2306.15595): every frequency divided by `factor`."""

    rope_type: ClassVar[str] = "linear"
    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def inv_freq(self, rope_theta: float, dim: int, *, length: int | None = None) -> Float64:
        return plain_inv_freq(rope_theta, dim) / self.factor


@dataclass(frozen=True, kw_only=True)
class NTK(Scaling):
    """NTK-aware scaling: theta becomes `theta * factor^(D/(D-2))`.

    The fastest pair is left alone and the slowest is divided by exactly `factor`.
    In a config it is a larger `rope_theta` and nothing else.
    """

    rope_type: ClassVar[str] = "ntk"
    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def scaled_theta(self, rope_theta: float, dim: int) -> float:
        """The base that gives these frequencies when nothing else is done."""
        if dim <= 2:
            raise PlanError("rotary_dim", dim, "NTK scaling needs at least two pairs (4 channels)")
        try:
            theta = float(rope_theta * self.factor ** (dim / (dim - 2)))
        except OverflowError:
            theta = math.inf
        if math.isinf(theta):
            raise PlanError("factor", self.factor, f"the base {rope_theta:g} times its power is past all numbers")
        return theta

    def inv_freq(self, rope_theta: float, dim: int, *, length: int | None = None) -> Float64:
        return plain_inv_freq(self.scaled_theta(rope_theta, dim), dim)


@dataclass(frozen=True, kw_only=True)
class DynamicNTK(Scaling):
    """NTK whose factor grows with the sequence: `factor * length / L - (factor - 1)` past L, none before.

    This is the form of transformers' `dynamic`; `factor=1` is the YaRN paper's `length / L`.
    """

    rope_type: ClassVar[str] = "dynamic"
    factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        _check_stretch(self.factor, self.original_max_position_embeddings)

    @property
    def depends_on_length(self) -> bool:
        return True

    def at_length(self, length: int) -> Scaling:
        ratio = max(self._length(length), self.original_max_position_embeddings) / self.original_max_position_embeddings
        return NTK(factor=self.factor * ratio - (self.factor - 1))

    def inv_freq(self, rope_theta: float, dim: int, *, length: int | None = None) -> Float64:
        return self.at_length(self._length(length)).inv_freq(rope_theta, dim)


@dataclass(frozen=True, kw_only=True)
class YaRN(Scaling):
    """YaRN (2309.00071): slow pairs divided by `factor`, fast ones left alone, a ramp between.

    A pair that turns more than `beta_fast` times in L tokens is left alone, one that turns fewer than
    `beta_slow` times is divided. `ramp="index"` is linear in the pair's index between the two, as in
    the authors' code and in every engine, its ends rounded outwards when `truncate`;
    `ramp="rotations"` is linear in the number of turns, as the paper prints it (eq. 18).

    The attention factor is `attention_factor` if given; else `m(mscale) / m(mscale_all_dim)` if both
    are given and not zero; else `m(1)`, with `m(c) = 0.1 c ln(factor) + 1`.
    """

    rope_type: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor_given: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    ramp: str = "index"

    def __post_init__(self) -> None:
        _check_stretch(self.factor, self.original_max_position_embeddings)
        require_given(beta_fast=self.beta_fast, beta_slow=self.beta_slow)
        require_bool(truncate=self.truncate)
        # Released models have 0.7 and 1; readers take 0 for "not given".
        require_between(0, 100, mscale=self.mscale, mscale_all_dim=self.mscale_all_dim)
        require_positive(
            beta_fast=self.beta_fast, beta_slow=self.beta_slow, attention_factor=self.attention_factor_given
        )
        if self.beta_fast < self.beta_slow:
            raise PlanError(
                "beta_fast",
                self.beta_fast,
                f"it must be at least beta_slow ({self.beta_slow}): fast pairs turn more often",
            )
        require_one_of("ramp", self.ramp, ("index", "rotations"))

    def inv_freq(self, rope_theta: float, dim: int, *, length: int | None = None) -> Float64:
        plain = plain_inv_freq(rope_theta, dim)
        kept = 1.0 - self._interpolated(plain, rope_theta, dim)
        return plain * kept + plain / self.factor * (1.0 - kept)

    def _interpolated(self, plain: Float64, rope_theta: float, dim: int) -> Float64:
        """How much of each pair is interpolated, 0 to 1, shape (dim/2,)."""
        if self.ramp == "rotations":
            rotations = self.original_max_position_embeddings * plain / (2 * math.pi)
            width = max(self.beta_fast - self.beta_slow, 1e-9)
            return np.asarray(1.0 - np.clip((rotations - self.beta_slow) / width, 0.0, 1.0))
        low, high = self.ramp_ends(rope_theta, dim)
        return np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)

    def ramp_ends(self, rope_theta: float, dim: int) -> tuple[float, float]:
        """Pair indices (fractional unless `truncate`) where interpolation begins and is complete."""

        def pair_that_turns(times: float) -> float:
            turns = math.log(self.original_max_position_embeddings) - math.log(times) - math.log(2 * math.pi)
            return dim * turns / (2 * math.log(rope_theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # The upper bound is D - 1, not D/2 - 1: so it is in the authors' code and in every engine.
        # Both ends are kept in range, so that where all pairs turn fast, or none does, the ramp still rises.
        low, high = (min(max(end, 0), dim - 1) for end in (low, high))
        return low, high + 0.001 if low == high else high

    def attention_factor(self) -> float:
        if self.attention_factor_given is not None:
            return self.attention_factor_given
        if self.mscale and self.mscale_all_dim:
            return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
        return self.magnitude(1.0)

    def score_factor(self) -> float:
        return self.magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def magnitude(self, coefficient: float) -> float:
        """`0.1 * coefficient * ln(factor) + 1`."""
        return 0.1 * coefficient * math.log(self.factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class YaRNByLength(Scaling):
    """YaRN for the sequences that need it: no scaling up to L tokens, `yarn` past it, each row by its own length.

    Frequencies and attention factor change together, so `attention_factor()` is that of the longer sequences until the
    length is settled: `at_length` gives no scaling, or `yarn`. A config cannot say it.
    """

    rope_type: ClassVar[str] = "yarn-by-length"
    yarn: YaRN

    def __post_init__(self) -> None:
        if not isinstance(self.yarn, YaRN):
            allowed = "it must be a YaRN, for example YaRN(factor=4, original_max_position_embeddings=8192)"
            raise PlanError("yarn", self.yarn, allowed)
        if self.yarn.score_factor() != 1.0:
            raise PlanError(
                "mscale_all_dim",
                self.yarn.mscale_all_dim,
                "it multiplies the scores of all sequences alike, short ones too; leave it out",
            )

    @property
    def original_max_position_embeddings(self) -> int:
        """L, the most tokens that are not scaled."""
        return self.yarn.original_max_position_embeddings

    @property
    def depends_on_length(self) -> bool:
        return True

    def at_length(self, length: int) -> Scaling:
        return self.yarn if self._length(length) > self.original_max_position_embeddings else Scaling()

    def inv_freq(self, rope_theta: float, dim: int, *, length: int | None = None) -> Float64:
        return self.at_length(self._length(length)).inv_freq(rope_theta, dim)

    def attention_factor(self) -> float:
        return self.yarn.attention_factor()


@dataclass(frozen=True, kw_only=True)
class LongRoPE(Scaling):
    """LongRoPE (2402.13753): one divisor per pair, a short list up to L tokens and a long one past it.

    The attention factor is `attention_factor` if given, else `sqrt(1 + ln s / ln L)` with
    `s = factor`, and 1 for `s <= 1`; the same for both lists.
    """

    rope_type: ClassVar[str] = "longrope"
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float | None = None
    attention_factor_given: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "short_factor", tuple(self.short_factor))
        object.__setattr__(self, "long_factor", tuple(self.long_factor))
        _check_original_length(self.original_max_position_embeddings)
        require_positive(factor=self.factor, attention_factor=self.attention_factor_given)
        require_between(0, LONGEST, factor=self.factor)
        for name in ("short_factor", "long_factor"):
            for value in getattr(self, name):
                require_positive(**{name: value})
        if self.original_max_position_embeddings < 2:
            raise PlanError(
                "original_max_position_embeddings", self.original_max_position_embeddings, "it must be at least 2"
            )
        if len(self.short_factor) != len(self.long_factor):
            raise PlanError(
                "long_factor", len(self.long_factor), f"it must be as long as short_factor ({len(self.short_factor)})"
            )

    @property
    def depends_on_length(self) -> bool:
        return self.short_factor != self.long_factor

    def at_length(self, length: int) -> Scaling:
        chosen = self.long_factor if self._length(length) > self.original_max_position_embeddings else self.short_factor
        return replace(self, short_factor=chosen, long_factor=chosen)

    def inv_freq(self, rope_theta: float, dim: int, *, length: int | None = None) -> Float64:
        if len(self.short_factor) != dim // 2:
            raise PlanError("short_factor", f"{len(self.short_factor)} numbers", f"one per pair is needed: {dim // 2}")
        settled = self.at_length(self._length(length)) if self.depends_on_length else self
        assert isinstance(settled, LongRoPE)
        return plain_inv_freq(rope_theta, dim) / np.asarray(settled.short_factor, dtype=np.float64)

    def attention_factor(self) -> float:
        if self.attention_factor_given is not None:
            return self.attention_factor_given
        if self.factor is None or self.factor <= 1.0:
            return 1.0
        return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_max_position_embeddings))


@dataclass(frozen=True, kw_only=True)
class Llama3(Scaling):
    """Llama 3.1's scaling: by wavelength, kept below `L/high`, divided above `L/low`, blended between.

    It is NTK-by-parts with alpha = `low_freq_factor` and beta = `high_freq_factor`, and no temperature.
    """

    rope_type: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        _check_stretch(self.factor, self.original_max_position_embeddings)
        require_given(low_freq_factor=self.low_freq_factor, high_freq_factor=self.high_freq_factor)
        require_positive(low_freq_factor=self.low_freq_factor, high_freq_factor=self.high_freq_factor)
        if self.high_freq_factor <= self.low_freq_factor:
            raise PlanError(
                "high_freq_factor", self.high_freq_factor, f"it must be above low_freq_factor ({self.low_freq_factor})"
            )

    def inv_freq(self, rope_theta: float, dim: int, *, length: int | None = None) -> Float64:
        plain = plain_inv_freq(rope_theta, dim)
        rotations = self.original_max_position_embeddings * plain / (2 * math.pi)
        kept = np.clip((rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return plain * kept + plain / self.factor * (1.0 - kept)


def _check_factor(factor: float) -> None:
    require_given(factor=factor)
    require_positive(factor=factor)
    if factor < 1.0:
        raise PlanError("factor", factor, "it must be at least 1: a factor divides positions")
    if factor > LONGEST:
        raise PlanError("factor", factor, f"it must be at most {LONGEST:,}: no sequence is longer")


def _check_stretch(factor: float, original_max_position_embeddings: int) -> None:
    _check_factor(factor)
    _check_original_length(original_max_position_embeddings)
    if factor * original_max_position_embeddings > LONGEST:
        raise PlanError(
            "factor",
            factor,
            f"times original_max_position_embeddings ({original_max_position_embeddings}) it must be at most "
            f"{LONGEST:,}: no sequence is longer",
        )


def _check_original_length(original_max_position_embeddings: int) -> None:
    require_given(original_max_position_embeddings=original_max_position_embeddings)
    require_whole(original_max_position_embeddings=original_max_position_embeddings)
