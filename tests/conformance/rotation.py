"""Is a rotary embedding right? Give your own function, and read in plain words what fails.

    from tests.conformance.rotation import Expected, failures

    def rotate(q, k, positions):      # q (B, H, S, D), k (B, Hkv, S, D), positions (S,) or (B, S), integers
        ...                           # your model's code
        return q, k

    for sentence in failures(rotate, Expected(head_dim=128, inv_freq=[...])):
        print(sentence)

Needs torch and numpy only. Every check turns real queries and keys at positions other than 0, in batches, for most
faults pass at position 0 with one row. Each check returns a sentence, or None if all is well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Rotate = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

# What one table entry, one rotation and one rounding in float32 may cost, for vectors of length 1.
TOLERANCE = 8 * 2.0**-24


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the rotation should be.

    Args:
        head_dim: channels of a head.
        inv_freq: radians per token, one for each pair that turns, fastest first.
        interleaved: pairs are channels (2i, 2i+1); otherwise (i, i + R/2), for R = 2 * len(inv_freq) channels.
        trailing: the last R channels of the head turn; otherwise the first.
        amplitude: what multiplies cos and sin (YaRN's attention factor).
        furthest: the largest position at which angles are read (tokens).
    """

    head_dim: int
    inv_freq: Sequence[float]
    interleaved: bool = False
    trailing: bool = False
    amplitude: float = 1.0
    furthest: int = 2**20

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The two channels of each pair."""
        count = len(self.inv_freq)
        start = self.head_dim - 2 * count if self.trailing else 0
        if self.interleaved:
            return [(start + 2 * i, start + 2 * i + 1) for i in range(count)]
        return [(start + i, start + count + i) for i in range(count)]


def failures(rotate: Rotate, expected: Expected) -> list[str]:
    """Everything that is wrong, a sentence each; empty if all is well."""
    return [sentence for check in CHECKS if (sentence := check(rotate, expected)) is not None]


def position_zero(rotate: Rotate, expected: Expected) -> str | None:
    """At position 0 nothing turns."""
    q, k = _inputs(expected, heads=3, tokens=1)
    out = rotate(q.clone(), k.clone(), torch.tensor([0]))[0]
    channels = [channel for pair in expected.pairs for channel in pair]
    error = _distance(out[..., channels], q[..., channels] * expected.amplitude)
    return None if error <= TOLERANCE else f"position 0 should change nothing, and moves a query by {error:.2g}"


def inputs_untouched(rotate: Rotate, expected: Expected) -> str | None:
    """Queries and keys are not written to unless asked."""
    q, k = _inputs(expected, heads=3, tokens=5)
    kept = q.clone(), k.clone()
    rotate(q, k, torch.arange(5))
    if torch.equal(q, kept[0]) and torch.equal(k, kept[1]):
        return None
    return "the inputs are overwritten: a caller that still needs them gets turned ones"


def shapes_and_dtypes(rotate: Rotate, expected: Expected) -> str | None:
    """Outputs are like the inputs, with fewer key heads than query heads."""
    for dtype in (torch.float32, torch.bfloat16):
        q, k = (x.to(dtype) for x in _inputs(expected, heads=4, tokens=5, key_heads=2))
        for name, x, out in zip("qk", (q, k), rotate(q.clone(), k.clone(), torch.arange(5)), strict=True):
            if out.shape != x.shape or out.dtype != dtype:
                return f"{name} went in as {_kind(x)} and came out as {_kind(out)}"
    return None


def token_axis(rotate: Rotate, expected: Expected) -> str | None:
    """The position is that of the token, not that of the head (tried where both axes have one length)."""
    q, k = (x[:, :1, :1].expand(1, 5, 5, -1).contiguous() for x in _inputs(expected, heads=1, tokens=1))
    out = rotate(q, k, torch.arange(5))[0]
    if _distance(out, out[:, :1].expand_as(out)) > TOLERANCE:
        return "equal heads of one token are turned differently: the axis of heads is taken for the axis of tokens"
    if torch.equal(out[:, :, 0], out[:, :, 1]):
        return "equal tokens at positions 0 and 1 come out equal: nothing turns along the axis of tokens"
    return None


def passing_channels(rotate: Rotate, expected: Expected) -> str | None:
    """Channels outside the rotary width pass bit for bit."""
    q, k = _inputs(expected, heads=2, tokens=5)
    turning = {channel for pair in expected.pairs for channel in pair}
    passing = [channel for channel in range(expected.head_dim) if channel not in turning]
    out = rotate(q.clone(), k.clone(), torch.arange(7, 12))[0]
    if torch.equal(out[..., passing], q[..., passing]):
        return None
    return (
        f"{len(passing)} channels should pass unchanged, and some are changed: the rotary width is ignored or misplaced"
    )


def partners(rotate: Rotate, expected: Expected) -> str | None:
    """A channel turns into its own partner and into no other."""
    for first, second in expected.pairs:
        out = _turned_unit(rotate, expected, first, 1)
        out[[first, second]] = 0
        if out.abs().max() > TOLERANCE:
            wrong = int(out.abs().argmax())
            return (
                f"channel {first} should be paired with channel {second}, and is with {wrong}: "
                "another pair layout (interleaved or halves) or another rotary width"
            )
    return None


def frequencies(rotate: Rotate, expected: Expected) -> str | None:
    """One rotation, by inv_freq, in the direction (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
    for number, ((first, second), frequency) in enumerate(zip(expected.pairs, expected.inv_freq, strict=True)):
        out = _turned_unit(rotate, expected, first, 1)
        angle = math.atan2(out[second], out[first])
        if abs(angle - frequency) > TOLERANCE:
            hint = ""
            if abs(angle + frequency) <= TOLERANCE:
                hint = ": it turns the other way"
            elif abs(angle - 2 * frequency) <= 2 * TOLERANCE:
                hint = ": it turns twice"
            return f"pair {number} should turn by {frequency:.7g} radians a token, and turns by {angle:.7g}{hint}"
    return None


def amplitude(rotate: Rotate, expected: Expected) -> str | None:
    """Norms are kept, times the amplitude, at every position."""
    q, k = _inputs(expected, heads=2, tokens=6)
    channels = [channel for pair in expected.pairs for channel in pair]
    out = rotate(q.clone(), k.clone(), torch.tensor([0, 1, 5, 100, 1000, 5000]))[0]
    ratio = out[..., channels].double().norm(dim=-1) / q[..., channels].double().norm(dim=-1)
    worst = float(ratio.flatten()[(ratio - expected.amplitude).abs().argmax()])
    if abs(worst - expected.amplitude) <= expected.amplitude * TOLERANCE:
        return None
    return f"a rotation should multiply norms by {expected.amplitude:.7g}, and multiplies one by {worst:.7g}"


def relative(rotate: Rotate, expected: Expected) -> str | None:
    """A score knows only the distance, to the precision of float32 tables, out to the furthest position."""
    q, k = _inputs(expected, heads=1, tokens=1)
    scores = []
    for shift in (0, 10, 100, 8192, expected.furthest - 10):
        turned_q = rotate(q.clone(), k.clone(), torch.tensor([7 + shift]))[0].double()
        turned_k = rotate(q.clone(), k.clone(), torch.tensor([3 + shift]))[1].double()
        scores.append(float((turned_q * turned_k).sum()))
    spread = max(scores) - min(scores)
    if spread <= 4 * expected.amplitude**2 * TOLERANCE:
        return None
    return f"a query 4 tokens after its key should score the same everywhere, and the scores differ by {spread:.2g}"


def far_angles(rotate: Rotate, expected: Expected) -> str | None:
    """Angles are as exact far out as near: in float32 they are off by 5e-4 at 8 K and by 6e-2 at 1 M."""
    for position in (257, 8191, 131_071, expected.furthest - 1):
        if position >= expected.furthest:
            continue
        for number, ((first, second), frequency) in enumerate(zip(expected.pairs, expected.inv_freq, strict=True)):
            out = _turned_unit(rotate, expected, first, position) / expected.amplitude
            angle = float(np.float64(position) * np.float64(frequency))
            error = max(abs(float(out[first]) - math.cos(angle)), abs(float(out[second]) - math.sin(angle)))
            if error > TOLERANCE:
                return f"at position {position} the cosine or sine of pair {number} is off by {error:.2g}"
    return None


def half_precision(rotate: Rotate, expected: Expected) -> str | None:
    """bfloat16 queries are turned by the same angles as float32 ones, at positions that bfloat16 cannot tell apart."""
    q, k = (x.bfloat16() for x in _inputs(expected, heads=2, tokens=4))
    positions = torch.tensor([255, 257, 1001, 4099])
    low, high = rotate(q.clone(), k.clone(), positions)[0], rotate(q.float(), k.float(), positions)[0]
    # Three roundings to bfloat16 (two products and a sum) are forgiven; another angle is not.
    error = _distance(low, high)
    if error <= 3 * 2.0**-8 * expected.amplitude:
        return None
    return f"bfloat16 queries come out {error:.2g} from the float32 ones: positions or tables follow the input's dtype"


def rows_independent(rotate: Rotate, expected: Expected) -> str | None:
    """A row of a batch is turned as if alone, one token a row, each at its own position."""
    q, k = (x.transpose(0, 2).contiguous() for x in _inputs(expected, heads=2, tokens=3))
    positions = torch.tensor([[7], [700], [3]])
    batch = rotate(q.clone(), k.clone(), positions)
    for row in range(3):
        one = slice(row, row + 1)
        alone = rotate(q[one].clone(), k[one].clone(), positions[one])
        for name, together, single in zip("qk", batch, alone, strict=True):
            if _distance(together[one], single) > TOLERANCE:
                return f"{name} of row {row} is turned differently in a batch of three than alone"
    return None


def positions_obeyed(rotate: Rotate, expected: Expected) -> str | None:
    """Tokens stand where the positions say: shuffled, with gaps, and one at a time."""
    q, k = _inputs(expected, heads=2, tokens=6)
    positions = torch.tensor([40, 2, 41, 1000, 0, 2])
    whole = rotate(q.clone(), k.clone(), positions)[0]
    for token in range(6):
        one = slice(token, token + 1)
        alone = rotate(q[:, :, one].clone(), k[:, :, one].clone(), positions[one])[0]
        if _distance(whole[:, :, one], alone) > TOLERANCE:
            return f"a token at position {int(positions[token])} is turned differently among others than alone"
    return None


def no_history(rotate: Rotate, expected: Expected) -> str | None:
    """The same call gives the same answer after a longer one, and after one in bfloat16."""
    q, k = _inputs(expected, heads=2, tokens=6)
    before = rotate(q.clone(), k.clone(), torch.arange(6))[0]
    long_q, long_k = _inputs(expected, heads=2, tokens=9000)
    rotate(long_q.bfloat16(), long_k.bfloat16(), torch.arange(9000))
    after = rotate(q.clone(), k.clone(), torch.arange(6))[0]
    return None if torch.equal(before, after) else "the same call gives another answer after a longer one"


# History first, before other checks have made some.
CHECKS = (
    no_history,
    shapes_and_dtypes,
    inputs_untouched,
    position_zero,
    token_axis,
    passing_channels,
    partners,
    frequencies,
    amplitude,
    relative,
    far_angles,
    half_precision,
    rows_independent,
    positions_obeyed,
)


def _inputs(expected: Expected, *, heads: int, tokens: int, key_heads: int | None = None) -> tuple[Tensor, Tensor]:
    """Queries and keys of length 1 a token."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, count, tokens, expected.head_dim) for count in (heads, heads if key_heads is None else key_heads)]
    q, k = (torch.randn(shape, generator=generator) for shape in shapes)
    return q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)


def _turned_unit(rotate: Rotate, expected: Expected, channel: int, position: int) -> Tensor:
    """A query of 1 in one channel, turned at one position: its channels, float64."""
    q = torch.zeros(1, 1, 1, expected.head_dim)
    q[..., channel] = 1
    return rotate(q, q.clone(), torch.tensor([position]))[0].double().flatten()


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
