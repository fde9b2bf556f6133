"""Checks that move all tokens, or some of them: positions are obeyed, and only their distances count."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from theodolite.conformance.subject import Subject
from theodolite.conformance.tables import failed_tables, read_tables, rows_of, why_no_tables
from theodolite.conformance.verdict import Cause, Verdict, exact, skipped
from theodolite.models.errors import first_line
from theodolite.plan import LayerPlan
from theodolite.plan.layer_json import attends

OBEYED, SHIFT, PAST, HISTORY = "positions obeyed", "shift", "past the stated length", "history"
_SHIFT = 17
# What torch raises for a row that a table has not, and what models say of a position that they do not take.
_REFUSALS = (IndexError, ValueError, RuntimeError)


def obeyed(subject: Subject) -> Verdict:
    """A gap between positions must show: a model that passes everything else may still count by itself."""
    if not subject.takes_positions:
        return skipped(OBEYED, "its forward takes no position_ids")
    if not subject.rotary and subject.plan.embed is None:
        return skipped(OBEYED, "its positions are in no place that position_ids reach")
    least = subject.noise
    tokens, step = _gap(subject, least)
    if step > least:
        message = f"moving half of the tokens by {tokens} changes the logits by {step:.2g} of their spread"
        return Verdict(name=OBEYED, outcome="pass", message=message, deviation=step, tolerance=least)
    # Where positions are ignored, it is the same computation twice and the difference is nothing at all.
    if step > 0:
        dtype = str(subject.dtype).removeprefix("torch.")
        why = f"moving half of the tokens by up to {tokens} changes the logits by {step:.2g} of their spread, "
        why += f"and rounding to {dtype} by {least:.2g}: too little to tell"
        return skipped(OBEYED, why if subject.exact else f"{why}; load it in float32")
    if len(subject.ids.unique()) < 2 or not any(_sees_more(layer) for layer in subject.plan.layers):
        return skipped(OBEYED, "its tokens see nothing that differs, so that their positions count for nothing")
    return Verdict(
        name=OBEYED,
        outcome="fail",
        message=f"moving half of the tokens by up to {tokens} changes no logit at all",
        deviation=step,
        tolerance=least,
        starts_at=subject.half,
        cause="position_ids are ignored, or nothing turns by them",
        cure="take positions from the caller",
        reference="unslothai/unsloth#3795",
    )


def _gap(subject: Subject, least: float) -> tuple[int, float]:
    """One gap (tokens) and the change that it makes: the first that shows, or the one that changes most."""
    room = (subject.original or subject.trained) - subject.ids.shape[1]
    tried = [(1, subject.step)]
    for tokens in (4, 16, 64, 256):
        if tried[-1][1] > least or tokens > room:
            break
        tried.append((tokens, subject.moved_on(tokens)))
    return tried[-1] if tried[-1][1] > least else (tried[-1][0], max(step for _, step in tried))


def _sees_more(layer: LayerPlan) -> bool:
    reach = layer.mask.reach
    return attends(layer) and (reach is None or reach > 0)


def shift(subject: Subject) -> Verdict:
    """The same tokens 17 positions later have the same logits, where only distances count."""
    if subject.not_shift_invariant is not None:
        return skipped(SHIFT, f"the model has {subject.not_shift_invariant}")
    count = subject.ids.shape[1]
    # A table that ends with the stated length takes no more.
    moved = min(_SHIFT, subject.trained - count) if subject.trained > count else _SHIFT
    if subject.original is not None and moved + count > subject.original:
        return skipped(SHIFT, f"the frequencies change at {subject.original:,} tokens, which the moved ones pass")
    return _shifted(subject, SHIFT, moved, f"{count} tokens moved by {moved} positions")


def _shifted(subject: Subject, name: str, start: int, what: str, cause: Cause | None = None) -> Verdict:
    tolerance = subject.tolerance_at(start + subject.ids.shape[1])
    logits = subject.logits(subject.ids, start=start)
    found = subject.difference(logits, subject.base, tolerance)
    if found.first is None:
        message = f"{what} have the same logits, within {found.largest:.2g} of their spread"
        return Verdict(name=name, outcome="pass", message=message, deviation=found.largest, tolerance=tolerance)
    message = f"{what} have other logits, by {found.largest:.2g} of their spread; rounding costs {tolerance:.2g}"
    if cause is None and not torch.isfinite(logits).all():
        cause = Cause(words="numbers are not finite")
    return Verdict(
        name=name,
        outcome="fail",
        message=message,
        deviation=found.largest,
        tolerance=tolerance,
        starts_at=start + found.first,
        cause=cause.words if cause else None,
        reference=cause.reference if cause else None,
    )


def past(subject: Subject) -> Verdict:
    """Past the stated length a model refuses, or goes on as its config says; it never clamps, wraps or makes NaN."""
    stated = subject.plan.max_position_embeddings
    if stated is None:
        return skipped(PAST, "no length is stated")
    if not subject.takes_positions:
        return skipped(PAST, "its forward takes no position_ids, so that only a text of that length would tell")
    if subject.plan.embed is not None and subject.plan.embed.kind == "learned":
        return _learned(subject, stated)
    start = max(stated - 8, 0)
    try:
        if why_no_tables(subject) is None and subject.original is None:
            end = stated + subject.ids.shape[1]
            read = read_tables(subject, rows_of([0, 1, start, stated - 1, stated, stated + 1, end, 2 * stated]))
            if read.fault is not None:
                return failed_tables(PAST, read.fault)
        what = f"{subject.ids.shape[1]} tokens from position {start:,}"
        if subject.not_shift_invariant is None and subject.original is None:
            return _shifted(subject, PAST, start, what)
        logits = subject.logits(subject.ids, start=start)
    except _REFUSALS as error:
        return _raised(stated, error)
    finite = bool(torch.isfinite(logits).all())
    message = f"{what} have {'finite' if finite else 'no finite'} logits"
    return Verdict(
        name=PAST, outcome="pass" if finite else "fail", message=message, starts_at=None if finite else start
    )


def _learned(subject: Subject, stated: int) -> Verdict:
    if subject.device.type != "cpu":
        return skipped(PAST, f"a learned table of {stated:,} rows is asked past its end on the CPU only")
    ids = subject.tokens(4)
    try:
        subject.logits(ids, start=stated - 2)
    except _REFUSALS as error:
        return _raised(stated, error)
    message = f"positions {stated:,} and {stated + 1:,} are past a learned table, and no error is raised"
    return Verdict(
        name=PAST,
        outcome="fail",
        message=message,
        starts_at=stated,
        cause="positions are clamped or wrapped to the rows that there are",
        reference="huggingface/transformers#14243",
    )


def _raised(stated: int, error: Exception) -> Verdict:
    message = f"a token past {stated:,} is refused ({said_by(error):.100})"
    return Verdict(name=PAST, outcome="pass", message=message)


def said_by(error: Exception) -> str:
    """The name of an exception, once, and what it says."""
    name, said = type(error).__name__, first_line(error)
    return said if said.startswith(name) else f"{name}: {said}"


def history(subject: Subject) -> Verdict:
    """Calls near, past the stated length and far past it, by turns: each gives the same bits the second time."""
    calls = list(_calls(subject))
    if not calls:
        return skipped(HISTORY, "there is no longer call to make")
    try:
        first = [call() for _, call in calls]
    except IndexError:
        # A table with an end refuses what is past it: nothing grows, and nothing can be kept.
        calls = [(start, call) for start, call in calls if start < subject.trained // 2] + [_end(subject)]
        first = [call() for _, call in calls]
    second = [call() for _, call in calls]
    # In every order: what is near after what is far, what lies between after both, and what is far again.
    kept: dict[int, Tensor] = {}
    for (start, _), logits in zip([*calls, *calls], [*first, *second], strict=True):
        one = kept.setdefault(start, logits)
        if not torch.equal(one, logits):
            apart = float((one - logits).abs().nan_to_num(nan=torch.inf).max()) / subject.scale
            return _history_failed(subject, start, apart)
    starts = ", ".join(f"{start:,}" for start, _ in calls)
    message = f"{len(calls)} calls, at positions {starts} and once more, agree to the bit"
    return exact(HISTORY, message)


def _history_failed(subject: Subject, start: int, apart: float) -> Verdict:
    message = f"the call at position {start:,} has other logits, by {apart:.2g} of their spread, after the longer one"
    cause = Cause(
        words="something that one call leaves on the model changes the next", reference="huggingface/transformers#44873"
    )
    cure = None
    if subject.plan.depends_on_length:
        cause = Cause(
            words="the frequencies of the longest call are kept for shorter ones",
            reference="huggingface/transformers#27226",
        )
        cure = "theodolite.patch(model, plan, length=...) settles one base for the sequence"
    return Verdict(
        name=HISTORY,
        outcome="fail",
        message=message,
        deviation=apart,
        tolerance=0.0,
        starts_at=start,
        cause=cause.words,
        cure=cure,
        reference=cause.reference,
    )


def _end(subject: Subject) -> tuple[int, Callable[[], Tensor]]:
    start = subject.trained - subject.ids.shape[1]
    return start, lambda: subject.logits(subject.ids, start=start)


def _calls(subject: Subject) -> list[tuple[int, Callable[[], Tensor]]]:
    ids, count = subject.ids, subject.ids.shape[1]

    def at(start: int) -> tuple[int, Callable[[], Tensor]]:
        return start, lambda: subject.logits(ids, start=start)

    near: tuple[int, Callable[[], Tensor]] = (0, lambda: subject.logits(ids))
    longer = subject.tokens(max(count, min(3 * count, subject.trained)))
    if not subject.takes_positions:
        return [near, (count, lambda: subject.logits(longer)), near]
    if subject.plan.embed is not None:
        room = (subject.plan.embed.rows or subject.trained) - count
        return [near, at(room), at(room // 2)] if room > 0 else []
    length = subject.original or subject.trained
    return [near, at(length + length // 2), at(4 * length), at(length + length // 2), near]
