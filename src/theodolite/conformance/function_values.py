"""Checks of the numbers that a rotation gives: pairs, norms, angles near and far, half precision."""

from __future__ import annotations

import numpy as np
import torch

from theodolite.conformance.asked import ROUNDINGS, Asked, distance
from theodolite.conformance.causes import cause_of
from theodolite.conformance.function_form import both
from theodolite.conformance.measured import Table
from theodolite.conformance.verdict import Cause, Verdict, judged, skipped

_FAR = (131_071, 1_048_575)


def position_zero(asked: Asked) -> Verdict:
    """At position 0 nothing turns."""
    q, _ = asked.inputs(heads=3, tokens=1)
    out = asked.turn(q.clone(), q.clone(), torch.tensor([0]))[0]
    error = distance(out, asked.exact(q, torch.tensor([0])))
    table = asked.table(asked.places(0, 1, 2, 5, 100))
    cause = cause_of(table, asked.rotary) if error > ROUNDINGS * asked.amplitude else None
    return judged(
        "position 0",
        error,
        ROUNDINGS * asked.amplitude,
        "position 0 changes nothing",
        f"position 0 should change nothing, and moves a query of length 1 by {error:.2g}",
        at=0,
        cause=cause,
    )


def width(asked: Asked) -> Verdict:
    """Channels outside the rotary width pass bit for bit, and those inside turn."""
    rotary = asked.rotary
    q, k = asked.inputs(heads=2, tokens=5)
    out = asked.turn(q.clone(), k.clone(), torch.arange(7, 12))[0].to(q.dtype)
    passing = [channel for channel in range(rotary.head_dim) if channel not in asked.turning]
    if passing and not torch.equal(out[..., passing], q[..., passing]):
        error = distance(out[..., passing], q[..., passing])
        words = "the partial rotary factor is ignored, or the other end of the head turns"
        return judged(
            "width",
            error,
            0.0,
            "",
            f"{len(passing)} channels should pass unchanged, and some are changed",
            at=7,
            cause=Cause(words=words, reference="AI-Hypercomputer/maxtext#4616"),
        )
    live = [pair for pair, w in zip(asked.pairs, asked.inv_freq, strict=True) if w > 1e-3]
    still = [pair for pair in live if torch.equal(out[..., list(pair)], q[..., list(pair)])]
    if still:
        words = f"{len(still)} of {len(asked.pairs)} pairs should turn and stand still"
        return judged(
            "width",
            float(len(still)),
            0.0,
            "",
            words,
            at=7,
            cause=Cause(words="fewer channels turn than are claimed", reference="ml-explore/mlx-lm#1698"),
        )
    return judged("width", 0.0, 0.0, f"{rotary.rotary_dim} of {rotary.head_dim} channels turn, and no other", "")


def pairs(asked: Asked) -> Verdict:
    """A channel turns into its own partner and into no other."""
    turned = asked.units([1])[:, 0]
    tolerance = ROUNDINGS * asked.amplitude
    for number, (first, second) in enumerate(asked.pairs):
        rest = turned[number].clone()
        rest[[first, second]] = 0
        if float(rest.abs().max()) > tolerance:
            wrong = int(rest.abs().argmax())
            wording = f"channel {first} should be paired with channel {second}, and is with {wrong}"
            return judged(
                "pairs",
                float(rest.abs().max()),
                tolerance,
                "",
                wording,
                at=1,
                cause=_layout_cause(asked, first, second, wrong),
            )
    layout = "neighbouring channels" if asked.rotary.interleaved else "two halves"
    return judged("pairs", 0.0, tolerance, f"pairs are {layout}", "")


def _layout_cause(asked: Asked, first: int, second: int, wrong: int) -> Cause | None:
    rotary, apart = asked.rotary, wrong - first
    # A table of one layout with a rotation of the other keeps no norm.
    q, k = asked.inputs(heads=2, tokens=3)
    positions = torch.tensor(asked.places(3, 10, 100))
    out = asked.turn(q.clone(), k.clone(), positions)[0]
    kept = distance(out.double().norm(dim=-1), asked.exact(q, positions).norm(dim=-1))
    if kept > 1e-3:
        return Cause(
            words="tables of one pair layout meet a rotation of the other: norms are not kept",
            reference="raiyanyahya/how-to-train-your-gpt#6",
        )
    if not rotary.interleaved and apart == 1:
        return Cause(
            words="this is the interleaved layout (neighbouring channels), and halves are claimed",
            reference="huggingface/candle#3948",
        )
    if rotary.interleaved and apart == rotary.rotary_dim // 2:
        return Cause(
            words="this is the layout of two halves, and neighbouring channels are claimed",
            reference="huggingface/candle#3948",
        )
    if rotary.live_pairs is not None and apart == rotary.live_pairs:
        return Cause(
            words="a proportional rotation is taken for a partial one: partners stand too near",
            reference="NVIDIA-NeMo/Megatron-Bridge#4195",
        )
    if apart == rotary.head_dim // 2:
        return Cause(
            words="partners stand half a head apart, and half the rotary width is claimed",
            reference="labscommunity/cascadia#69",
        )
    return None


def _pairs_are_wrong(asked: Asked) -> bool:
    return pairs(asked).failed


def norms(asked: Asked) -> Verdict:
    """Norms are kept, times the amplitude, at every position."""
    q, k = asked.inputs(heads=2, tokens=6)
    positions = torch.tensor(asked.places(0, 1, 5, 100, 1000, 5000))
    out = asked.turn(q.clone(), k.clone(), positions)[0].double()
    ratio = out[..., asked.turning].norm(dim=-1) / q.double()[..., asked.turning].norm(dim=-1)
    off = (ratio - asked.amplitude).abs().amax((0, 1))
    worst = float(ratio.flatten()[(ratio - asked.amplitude).abs().argmax()])
    tolerance = asked.amplitude * ROUNDINGS
    first = int(positions[(off > tolerance).nonzero()[0, 0]]) if bool((off > tolerance).any()) else None
    cause = None
    if first is not None:
        table = asked.table(asked.places(0, 1, 2, 5, 100))
        one_number = table.found_amplitude() is not None and not _pairs_are_wrong(asked)
        cause = cause_of(table, asked.rotary) if one_number else None
        if cause is None and float(off.min()) < tolerance:
            cause = Cause(
                words="tables of one pair layout meet a rotation of the other, or tables are rounded",
                reference="raiyanyahya/how-to-train-your-gpt#6",
            )
    return judged(
        "norms",
        float(off.max()),
        tolerance,
        f"norms are multiplied by {asked.amplitude:.6g}",
        f"norms should be multiplied by {asked.amplitude:.6g}, and one is by {worst:.6g}",
        at=first,
        cause=cause,
    )


def angles(asked: Asked) -> Verdict:
    """Each pair turns by its frequency times the position, up to `length`."""
    if _pairs_are_wrong(asked):
        return skipped("angles", "pairs are other ones than are claimed")
    last = asked.length - 1
    positions = [0, *(2**power for power in range(last.bit_length()) if 2**power < last), last]
    table = asked.table(positions)
    return _judge_table(asked, "angles", table, table.allowed(), f"up to position {last:,}")


def _judge_table(asked: Asked, name: str, table: Table, bound: np.ndarray, where: str) -> Verdict:  # type: ignore[type-arg]
    error = np.nan_to_num(table.error(table.inv_freq, table.amplitude), nan=np.inf)
    off = error > bound
    row, pair = np.unravel_index(int((error / bound).argmax()), error.shape)
    right = f"cos and sin are within {error.max():.2g} {where}"
    if not off.any():
        return judged(name, float(error.max()), float(bound.max()), right, "")
    first = int(table.positions[off.any(-1)].min())
    cause = _direction(table) or _of_norms(asked, table) or cause_of(table, asked.rotary)
    wrong = (
        f"cos or sin of pair {pair} is off by {error[row, pair]:.2g} at position {int(table.positions[row]):,}, "
        f"where rounding costs {bound[row, pair]:.1g}"
    )
    return judged(name, float(error[row, pair]), float(bound[row, pair]), "", wrong, at=first, cause=cause)


def _of_norms(asked: Asked, table: Table) -> Cause | None:
    """Where pairs have no one amplitude, they turn by no angle, and frequencies explain nothing."""
    kept = norms(asked)
    if not kept.failed or kept.cause is None or table.found_amplitude() is not None:
        return None
    return Cause(words=kept.cause, reference=kept.reference)


def _direction(table: Table) -> Cause | None:
    if table.matches(-table.inv_freq):
        return Cause(words="it turns the other way", reference="huggingface/candle#3948")
    return None


def relative(asked: Asked) -> Verdict:
    """A score knows only the distance: a query 4 tokens after its key scores the same everywhere."""
    q, k = asked.inputs(heads=1, tokens=1)
    shifts = [shift for shift in (0, 10, 100, asked.length - 8) if shift + 7 <= asked.furthest]
    scores = []
    for shift in shifts:
        turned_q = asked.turn(q.clone(), k.clone(), torch.tensor([7 + shift]))[0].double()
        turned_k = asked.turn(q.clone(), k.clone(), torch.tensor([3 + shift]))[1].double()
        scores.append(float((turned_q * turned_k).sum()))
    off = [abs(score - scores[0]) for score in scores]
    # Of a pair of vectors of length 1: both turned by angles of float32.
    roundings = (np.log(asked.rotary.rope_theta) + 8) * 2.0**-24
    tolerance = 4 * asked.amplitude**2 * (ROUNDINGS + roundings * shifts[-1])
    bad = next((shift for shift, one in zip(shifts, off, strict=True) if one > tolerance), None)
    return judged(
        "relative",
        max(off),
        tolerance,
        "a score is one of the distance alone",
        f"a query 4 tokens after its key should score the same everywhere, and scores differ by {max(off):.2g}",
        at=bad,
        cause=_cause_of_keys(asked),
    )


def _cause_of_keys(asked: Asked) -> Cause | None:
    alike = both(asked)
    return None if alike.cause is None else Cause(words=alike.cause, reference=alike.reference)


def far_angles(asked: Asked) -> Verdict:
    """The same far out: exact, or with the errors that float32 angles have there, which are noted."""
    name = "far angles"
    if _pairs_are_wrong(asked):
        return skipped(name, "pairs are other ones than are claimed")
    positions = sorted({p for p in (*_FAR, asked.furthest) if asked.length <= p <= asked.furthest})
    if not positions:
        return skipped(name, f"no position past {asked.furthest:,} is asked for")
    table = asked.table(positions)
    error = np.nan_to_num(table.error(table.inv_freq, table.amplitude), nan=np.inf)
    tolerance = ROUNDINGS * asked.amplitude
    told = ", ".join(f"{worst:.2g} at {position:,}" for position, worst in zip(positions, error.max(-1), strict=True))
    if error.max() <= tolerance:
        return judged(name, float(error.max()), tolerance, f"cos and sin are off by {told}: exact", "")
    if (error <= table.allowed()).all() and not angles(asked).failed:
        return Verdict(
            name=name,
            outcome="note",
            deviation=float(error.max()),
            tolerance=tolerance,
            starts_at=int(table.positions[(error > tolerance).any(-1)].min()),
            message=f"right near; far out cos or sin is off by {told}",
            cause="angles are products in float32",
            cure="compute angles in float64 and round cos and sin",
        )
    near = angles(asked)
    if near.failed:
        # What is wrong near is wrong here, and near is where it can be told.
        message = f"cos and sin are off by {told}, and near by already"
        return Verdict(
            name=name,
            outcome="fail",
            message=message,
            deviation=float(error.max()),
            tolerance=float(table.allowed().max()),
            starts_at=near.starts_at,
            cause=near.cause,
            reference=near.reference,
        )
    return _judge_table(asked, name, table, table.allowed(), f"up to position {positions[-1]:,}")


def half_precision(asked: Asked) -> Verdict:
    """bfloat16 queries are turned by the same angles as float32 ones, at positions that bfloat16 cannot tell apart."""
    q, k = (x.bfloat16() for x in asked.inputs(heads=2, tokens=4))
    positions = torch.tensor(asked.places(255, 257, 1001, 4099))
    low = asked.turn(q.clone(), k.clone(), positions)[0]
    high = asked.turn(q.float(), k.float(), positions)[0]
    # Three roundings to bfloat16 (two products and a sum) are forgiven; another angle is not.
    off = (low.double() - high.double()).abs().amax((0, 1, 3))
    tolerance = 3 * 2.0**-8 * asked.amplitude
    first = int(positions[(off > tolerance).nonzero()[0, 0]]) if bool((off > tolerance).any()) else None
    cause = Cause(
        words="positions, angles or frequencies follow the dtype of the input", reference="EleutherAI/gpt-neox#1016"
    )
    return judged(
        "half precision",
        float(off.max()),
        tolerance,
        "bfloat16 queries turn by the same angles",
        f"bfloat16 queries come out {float(off.max()):.2g} from the float32 ones",
        at=first,
        cause=cause,
    )
