"""Numbers worked out from a rotary encoding: how far its pairs turn, and how exact usual arithmetic is there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from theodolite.plan.errors import require_whole
from theodolite.plan.rotary import Rotary
from theodolite.plan.scaling import Float64, plain_inv_freq

FURTHEST = 2**20
"""Distances (tokens) that are searched for the first negative mean of cosines, at most."""
_BLOCK = 1024
_MOST_COSINES, _MOST_IN_TABLE = 2**27, 2**22
_FASTEST = 1e6
_MOST_WORK = 2**12
_POSITIONS = 1024
"""Positions below the end at which errors of angles are taken."""


@dataclass(frozen=True, kw_only=True)
class AngleErrors:
    """The largest errors of cos and sin that come from the angle alone, over all pairs and the last positions.

    Args:
        position: the last of the positions (tokens); 1,024 of them are taken, or all where there are fewer.
        float32: (cos, sin) of `float32(position) * float32(inv_freq)`.
        bfloat16_inv_freq: the same with `inv_freq` rounded to bfloat16 before.
        bfloat16_positions: the same with the positions rounded to bfloat16 before.
    """

    position: int
    float32: tuple[float, float]
    bfloat16_inv_freq: tuple[float, float]
    bfloat16_positions: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Derived:
    """What follows from a rotary encoding at a length.

    Args:
        length: the length (tokens) that the numbers are of; None where the model states none.
        seen: distances below it (tokens) are met: the length, or the window or chunk of the layers where that is less.
        pairs: pairs of channels that the encoding speaks of, those that stand still included.
        shortest_wavelength, longest_wavelength: tokens per full turn, of the pairs that turn; None where none does.
        unturned_pairs: pairs that turn, and complete no turn in `seen` tokens; None without a length.
        effective_factor: the most that a pair is slowed by the scaling, 1 without one.
        first_negative: the least distance (whole tokens) at which the mean of cosines over the turning pairs is
            negative (2405.14591 bounds the context by it); None where it is not before `searched`.
        searched: the largest distance looked at.
        errors: of angles as they are usually computed, at the end of `length`; None without a length, or where nothing
            turns.
    """

    length: int | None
    seen: int | None
    pairs: int
    shortest_wavelength: float | None
    longest_wavelength: float | None
    unturned_pairs: int | None
    effective_factor: float
    first_negative: int | None
    searched: int
    errors: AngleErrors | None


@lru_cache(maxsize=64)
def derive(rotary: Rotary, length: int | None, seen: int | None = None) -> Derived:
    """The numbers of an encoding, its frequencies settled for sequences of `length` tokens.

    Without a length, those that depend on it are None, and a scaling that depends on it is taken at its original one.

    Args:
        seen: tokens that the layers see, the query's own included; None for all.
    """
    require_whole(length=length, seen=seen)
    frequencies = settled_inv_freq(rotary, length)
    turning = frequencies[frequencies > 0]
    with np.errstate(over="ignore"):
        wavelengths = np.minimum(2 * np.pi / turning, np.finfo(np.float64).max)
    # Nothing turns so fast but by divisors that are no divisors, and angles of that size have no meaning.
    usual = bool(len(turning)) and float(turning.max()) <= _FASTEST
    first, searched = first_negative_mean(turning) if usual else (None, 0)
    seen = None if length is None else min(length, seen or length)
    return Derived(
        length=length,
        seen=seen,
        pairs=len(frequencies),
        shortest_wavelength=float(wavelengths.min()) if len(turning) else None,
        longest_wavelength=float(wavelengths.max()) if len(turning) else None,
        unturned_pairs=None if seen is None else int((wavelengths > seen).sum()),
        effective_factor=_effective_factor(rotary, frequencies),
        first_negative=first,
        searched=searched,
        errors=angle_errors(turning, length) if usual and length is not None else None,
    )


def workable(rotaries: Iterable[Rotary]) -> list[Rotary]:
    """The first of the rotations, as many as are worked out in a second or so: 32 of heads of 128, 3 of the widest."""
    found: list[Rotary] = []
    work = 0
    for rotary in rotaries:
        # Errors are taken of so many pairs at most.
        work += min(rotary.rotary_dim // 2, _POSITIONS) + _POSITIONS // 16
        if found and work > _MOST_WORK:
            break
        found.append(rotary)
    return found


def settled_inv_freq(rotary: Rotary, length: int | None) -> Float64:
    """The inverse frequencies (radians per token) at `length`, or at the scaling's original length without one."""
    if length is None and rotary.depends_on_length:
        length = int(getattr(rotary.scaling, "original_max_position_embeddings", 1))
    return rotary.inv_freq(length=length)


def _effective_factor(rotary: Rotary, frequencies: Float64) -> float:
    plain = plain_inv_freq(rotary.rope_theta, rotary.rotary_dim)
    turning = frequencies > 0
    return float((plain[turning] / frequencies[turning]).max()) if turning.any() else 1.0


def first_negative_mean(inv_freq: Float64) -> tuple[int | None, int]:
    """The least whole distance at which the mean of `cos(inv_freq * distance)` is negative, and how far was searched.

    Args:
        inv_freq: shape (pairs,), radians per token.
    """
    pairs = len(inv_freq)
    if not pairs:
        return None, 0
    # A head of thousands of pairs gets smaller tables, and is searched less far.
    block = max(32, min(_BLOCK, _MOST_IN_TABLE // pairs))
    blocks = max(1, min(FURTHEST, _MOST_COSINES // pairs) // block)
    near = np.arange(block)[:, None] * inv_freq
    cos_near, sin_near = np.cos(near), np.sin(near)
    done, step = 0, 1
    while done < blocks:
        # cos(a + b) = cos a cos b - sin a sin b: the sum over pairs is a product of two small tables.
        far = block * np.arange(done, min(done + step, blocks))[:, None] * inv_freq
        means = (np.cos(far) @ cos_near.T - np.sin(far) @ sin_near.T).ravel()
        negative = np.flatnonzero(means < 0)
        if len(negative):
            return done * block + int(negative[0]), blocks * block
        done, step = done + step, min(2 * step, 128)
    return None, blocks * block


def angle_errors(inv_freq: Float64, length: int) -> AngleErrors:
    """The errors of cos and sin at the last positions of `length` tokens, angles computed as they usually are.

    Args:
        inv_freq: shape (pairs,), radians per token.
    """
    last = length - 1
    # The slowest pairs and the fastest err in their own ways, and a thousand of them show both.
    inv_freq = inv_freq if len(inv_freq) <= _POSITIONS else inv_freq[:: -(-len(inv_freq) // _POSITIONS)]
    positions = np.arange(max(0, length - _POSITIONS), length)[:, None]
    exact = positions * inv_freq
    cos, sin = np.cos(exact), np.sin(exact)
    single, frequencies = positions.astype(np.float32), inv_freq.astype(np.float32)

    def largest(angles: np.ndarray) -> tuple[float, float]:
        given = angles.astype(np.float64)
        return float(np.abs(np.cos(given) - cos).max()), float(np.abs(np.sin(given) - sin).max())

    return AngleErrors(
        position=last,
        float32=largest(single * frequencies),
        bfloat16_inv_freq=largest(single * to_bfloat16(frequencies)),
        bfloat16_positions=largest(to_bfloat16(single) * frequencies),
    )


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 numbers rounded to bfloat16 (to nearest, ties to even), as float32."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)
