"""Checks of what a model's layers are given, cos and sin, against the exact ones of its plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from theodolite.conformance.causes import cause_of, long_list_cause
from theodolite.conformance.measured import Table
from theodolite.conformance.subject import Subject
from theodolite.conformance.verdict import Cause, Verdict, skipped
from theodolite.conformance.watch import Angles, Seen, angles_of, watched
from theodolite.plan import Rotary
from theodolite.plan.describe import describe

TABLES = "tables"


@dataclass(frozen=True)
class Fault:
    """One layer's table that is off: the worst entry, the first position, and why if it is known."""

    layer: int
    deviation: float
    tolerance: float
    position: int
    words: str
    cause: Cause | None


@dataclass(frozen=True)
class Read:
    """What reading the tables of all layers found: the largest error, what it may be, and the first fault."""

    deviation: float
    tolerance: float
    fault: Fault | None
    layers: int


def why_no_tables(subject: Subject) -> str | None:
    """Why the tables of a model cannot be looked at; None where they can."""
    if not subject.rotary:
        return f"nothing turns here: {describe(subject.plan)}"
    if subject.decoder is None or not subject.takes_positions:
        return "rotary positions are computed inside each layer, where they cannot be looked at"
    return None


def ladder(last: int) -> list[int]:
    """Positions 0, 1, 2, 4, ..., and `last` (tokens)."""
    return [0, *(2**power for power in range(last.bit_length()) if 2**power < last), last]


def rows_of(positions: list[int]) -> Tensor:
    """Two rows (2, S): the positions, and each of them less one."""
    row = torch.tensor(positions)
    return torch.stack((row, (row - 1).clamp(min=0)))


def look(subject: Subject, positions: Tensor) -> Seen:
    """One forward at `positions` (B, S), and what the layers were given in it."""
    assert subject.decoder is not None
    ids = subject.tokens(positions.shape[1], len(positions))
    with watched(subject.decoder) as seen:
        subject.logits(ids, position_ids=positions.to(subject.device), attention_mask=subject.mask(ids))
    return seen


def tables(subject: Subject) -> Verdict:
    """The cos and sin that layers are given, from position 0 to the end of the stated length, in two rows."""
    why = why_no_tables(subject)
    if why is not None:
        return skipped(TABLES, why)
    reads = [read_tables(subject, rows_of(ladder(last))) for last in _lasts(subject)]
    fault = next((read.fault for read in reads if read.fault is not None), None)
    if fault is None:
        if not any(read.layers for read in reads):
            return skipped(TABLES, "its layers are given no tables of a form that is known")
        worst = max(reads, key=lambda read: read.deviation)
        message = (
            f"cos and sin are within {worst.deviation:.2g} up to position {_lasts(subject)[-1]:,}, "
            "as float32 angles are"
        )
        return Verdict(
            name=TABLES, outcome="pass", message=message, deviation=worst.deviation, tolerance=worst.tolerance
        )
    return failed_tables(TABLES, fault)


def failed_tables(name: str, fault: Fault) -> Verdict:
    """The verdict on tables that are off."""
    return Verdict(
        name=name,
        outcome="fail",
        message=f"layer {fault.layer}: {fault.words}",
        deviation=fault.deviation,
        tolerance=fault.tolerance,
        starts_at=fault.position,
        cause=fault.cause.words if fault.cause else None,
        cure=_cure(fault.cause),
        reference=fault.cause.reference if fault.cause else None,
    )


def _cure(cause: Cause | None) -> str | None:
    if cause is None:
        return None
    if "inv_freq" in cause.words or "filled" in cause.words or "frequencies are zero" in cause.words:
        return "load with from_pretrained(..., dtype=...) in place of a cast, or theodolite.patch(model, plan)"
    return "theodolite.patch(model, plan) turns by exact tables of the config"


def _lasts(subject: Subject) -> list[int]:
    original = subject.original
    if original is None:
        return [subject.trained - 1]
    return [original - 1, max(subject.trained, 2 * original) - 1]


def read_tables(subject: Subject, positions: Tensor) -> Read:
    """Compare the tables of all layers with the exact ones at `positions` (B, S)."""
    seen = look(subject, positions)
    length = int(positions.max()) + 1
    worst, allowed, first, count = 0.0, 0.0, None, 0
    judged = set()
    for index, layer in enumerate(subject.plan.layers):
        given = seen.tables.get(index)
        if layer.rotate is None or given is None:
            continue
        count += 1
        if (id(given), layer.rotate) in judged:
            continue
        judged.add((id(given), layer.rotate))
        angles = angles_of(given, layer.rotate.rotary_dim // 2)
        if angles is None:
            count -= 1
            continue
        read = _judge(subject, index, layer.rotate, angles, positions, length)
        if read.deviation >= worst:
            worst, allowed = read.deviation, read.tolerance
        first = first or read.fault
    return Read(worst, allowed, first, count)


def _judge(subject: Subject, index: int, rotary: Rotary, angles: Angles, positions: Tensor, length: int) -> Read:
    pairs = rotary.rotary_dim // 2
    if angles.cos.shape[-1] != pairs:
        words = f"its tables are {angles.width} channels wide, and {rotary.rotary_dim} of {rotary.head_dim} turn"
        ignored = Cause(words="the partial rotary factor is ignored", reference="vllm-project/vllm#43770")
        return Read(np.inf, 0.0, Fault(index, np.inf, 0.0, 0, words, ignored), 1)
    if angles.doubled == "apart":
        words = "the two channels of a pair are given different angles"
        return Read(float("inf"), 0.0, Fault(index, float("inf"), 0.0, 1, words, None), 1)
    settled = rotary.at_length(length) if rotary.depends_on_length else rotary
    found: list[tuple[Table, Fault | None]] = []
    worst = allowed = 0.0
    for row in range(len(positions)):
        # A table of one row serves all rows if it is broadcast.
        given = min(row, len(angles.cos) - 1)
        table = Table(
            positions=positions[row].numpy(),
            cos=angles.cos[given].numpy(),
            sin=angles.sin[given].numpy(),
            inv_freq=settled.inv_freq(),
            amplitude=settled.attention_factor(),
            rope_theta=rotary.rope_theta,
            table_eps=max(torch.finfo(subject.dtype).eps / 2, 2.0**-24),
        )
        error = np.nan_to_num(table.error(table.inv_freq, table.amplitude), nan=np.inf)
        bound = table.allowed()
        at = np.unravel_index(int(error.argmax()), error.shape)
        if error[at] >= worst:
            worst, allowed = float(error[at]), float(bound[at])
        found.append((table, _fault(index, table, error, bound)))
    fault: Fault | None = next((fault for _, fault in found if fault is not None), None)
    if fault is not None:
        cause = _cause(subject, found, rotary, settled, length)
        fault = Fault(index, worst, fault.tolerance, fault.position, fault.words, cause)
    return Read(worst, allowed, fault, 1)


def _fault(index: int, table: Table, error: np.ndarray, bound: np.ndarray) -> Fault | None:  # type: ignore[type-arg]
    off = error > bound
    if not off.any():
        return None
    first = int(table.positions[off.any(-1)].min())
    row, pair = np.unravel_index(int(np.where(off, error, 0).argmax()), error.shape)
    words = (
        f"cos or sin of pair {pair} is off by {error[row, pair]:.2g} at position {int(table.positions[row]):,}, "
        f"where rounding costs {bound[row, pair]:.1g}"
    )
    return Fault(index, float(error[row, pair]), float(bound[row, pair]), first, words, None)


def _cause(
    subject: Subject, found: list[tuple[Table, Fault | None]], rotary: Rotary, settled: Rotary, length: int
) -> Cause | None:
    (first, fault), *rest = found
    if fault is None and rest:
        other = rest[0][0]
        same = np.array_equal(first.cos, other.cos) and np.array_equal(first.sin, other.sin)
        if same:
            words = "every row of a batch is given the tables of the first"
            return Cause(words=words, reference="linkedin/Liger-Kernel#477")
    table = next(table for table, one in found if one is not None)
    if rotary.depends_on_length:
        cause = long_list_cause(table, rotary, length)
        if cause is not None:
            return cause
    return cause_of(table, settled, subject.plan.rotaries)
