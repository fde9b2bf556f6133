"""Check of what a model's layers do with the tables that they are given: which channels turn, once, in what pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from theodolite.conformance.subject import Subject
from theodolite.conformance.tables import look, rows_of, why_no_tables
from theodolite.conformance.turned import cause_of_turning, scores, turned
from theodolite.conformance.turnings import Turning
from theodolite.conformance.verdict import Cause, Verdict, skipped
from theodolite.conformance.watch import Angles, Seen, angles_of, rotation_functions
from theodolite.models.parts import head_dim
from theodolite.plan import Rotary

ROTATION, SCALE = "rotation", "score scale"
# A prime number of tokens: no axis of heads is as long.
_POSITIONS = [0, 1, 2, 3, 5, 8, 13, 21, 34, 55, *range(89, 110)]


def rotation(subject: Subject) -> Verdict:
    """Scores of queries and keys as each layer turns them, against the plan's pairs turned by the tables given.

    Scores are compared, for a permutation of channels that queries and keys share leaves them as they are.
    """
    why = why_no_tables(subject)
    if why is not None:
        return skipped(ROTATION, why)
    assert subject.decoder is not None
    if not rotation_functions(subject.decoder):
        return skipped(ROTATION, "its layers turn queries and keys by no function that can be looked at")
    worst = allowed = 0.0
    untold: str | None = None
    # All tokens of two rows at once, then one token a row.
    for row in (rows_of(_POSITIONS), torch.tensor([[5], [100]])):
        # A table that ends with the stated length has no row past it.
        positions = row.clamp(max=max(subject.trained - 1, 1))
        seen = look(subject, positions)
        for index in range(len(subject.plan.layers)):
            judged = _judge(subject, seen, index, positions)
            if judged.failed:
                return judged
            if judged.outcome == "skip":
                untold = untold or judged.message
            elif (judged.deviation or 0.0) >= worst:
                worst, allowed = judged.deviation or 0.0, judged.tolerance or 0.0
    if untold is not None:
        return skipped(ROTATION, untold)
    turning = sum(layer.rotate is not None for layer in subject.plan.layers)
    message = f"{turning} of {len(subject.plan.layers)} layers turn, each pair by its angle and once"
    return Verdict(name=ROTATION, outcome="pass", message=message, deviation=worst, tolerance=allowed)


def _judge(subject: Subject, seen: Seen, index: int, positions: Tensor) -> Verdict:
    """One layer: a pass, a failure, or a skip that says why nothing can be told."""
    assert subject.decoder is not None
    rotary, calls = subject.plan.layers[index].rotate, _in_pairs(seen.turnings.get(index, []))
    right = Verdict(name=ROTATION, outcome="pass", message="", deviation=0.0, tolerance=0.0)
    untold = next((call.untold for call in calls if call.untold is not None), None)
    if untold is not None:
        return skipped(ROTATION, f"layer {index}: {untold}, so that it cannot be told what turns")
    if rotary is None:
        if all(torch.equal(a, b) for call in calls for a, b in zip(call.before, call.after, strict=True)):
            return right
        words = "its queries and keys are turned, and the config says that this layer turns nothing"
        known = "the list of layers without rotation is read the other way round"
        return _failed(index, words, 1.0, 0.0, 1, Cause(words=known, reference="huggingface/transformers#37344"))
    if not calls:
        if subject.decoder.attention(index) is None:
            return right
        cause = Cause(words="the layer leaves the rotation out", reference="huggingface/transformers#37344")
        return _failed(index, "its queries and keys are not turned", 1.0, 0.0, 1, cause)
    angles = angles_of(seen.tables.get(index), rotary.rotary_dim // 2)
    if angles is not None and not (torch.isfinite(angles.cos).all() and torch.isfinite(angles.sin).all()):
        cause = Cause(words="its table holds what is no number", reference="huggingface/transformers#45902")
        return _failed(index, "queries and keys are turned by no angles", math.inf, 0.0, 0, cause)
    if angles is None:
        return skipped(ROTATION, f"layer {index}: it is given no table of a form that is known")
    if angles.cos.shape[-1] != rotary.rotary_dim // 2:
        return skipped(ROTATION, f"layer {index}: its table is of another width than the config's; see the tables")
    if len(calls[0].before) != 2 or calls[0].before[0].shape != calls[-1].after[0].shape:
        return skipped(ROTATION, f"layer {index}: it cannot be told which tensors are queries and which are keys")
    return _compare(subject, index, calls, angles, rotary, positions)


def _compare(
    subject: Subject, index: int, calls: list[Turning], angles: Angles, rotary: Rotary, positions: Tensor
) -> Verdict:
    before, after = _heads_first(calls[0].before, positions), _heads_first(calls[-1].after, positions)
    found = scores(*after)
    exact = scores(*(turned(x, angles, rotary, "plan") for x in before))
    size = float(before[0].norm(dim=-1).max() * before[1].norm(dim=-1).max())
    if not math.isfinite(size):
        return skipped(ROTATION, f"layer {index}: its queries and keys are no numbers before they are turned")
    amplitude = float(torch.hypot(angles.cos, angles.sin).max()) ** 2
    eps = torch.finfo(subject.dtype).eps
    # Four roundings in each channel of a query and of a key.
    tolerance = 8 * max(eps, 2.0**-23) * size * max(amplitude, 1.0)
    error = (found - exact).abs().nan_to_num(nan=float("inf"))
    if float(error.max()) <= tolerance:
        return Verdict(name=ROTATION, outcome="pass", message="", deviation=float(error.max()), tolerance=tolerance)
    off = (error > tolerance).any(dim=1)
    latest = torch.maximum(positions[:, :, None], positions[:, None, :])
    at = int(latest[off].min())
    words = f"the scores of turned queries and keys are off by {float(error.max()):.2g} of {size:.2g}"
    known = cause_of_turning(before, after, found, angles, rotary, tolerance)
    return _failed(index, words, float(error.max()), tolerance, at, known)


def _in_pairs(calls: list[Turning]) -> list[Turning]:
    """Functions that turn one tensor are called for queries, then for keys."""
    if calls and all(len(call.before) == 1 for call in calls) and len(calls) % 2 == 0:
        return [
            Turning(one.before + other.before, one.after + other.after)
            for one, other in zip(calls[0::2], calls[1::2], strict=True)
        ]
    return calls


def _failed(index: int, words: str, deviation: float, tolerance: float, at: int, cause: Cause | None) -> Verdict:
    return Verdict(
        name=ROTATION,
        outcome="fail",
        message=f"layer {index}: {words}",
        deviation=deviation,
        tolerance=tolerance,
        starts_at=at,
        cause=cause.words if cause else None,
        reference=cause.reference if cause else None,
    )


def _heads_first(tensors: tuple[Tensor, ...], positions: Tensor) -> tuple[Tensor, ...]:
    """Each as (B, H, S, D): the number of tokens is chosen so that no number of heads is the same."""
    tokens = positions.shape[1]
    return tuple(x.transpose(1, 2) if x.shape[1] == tokens and x.shape[2] != tokens else x for x in tensors)


def score_scale(subject: Subject) -> Verdict:
    """The number that attention multiplies its scores by, where its modules keep it, against the plan's."""
    found = list(_scales(subject))
    if not found:
        return skipped(SCALE, "its attention keeps no number to compare")
    for index, present, wanted in found:
        if abs(present - wanted) > 1e-6 * abs(wanted):
            ratio = present / wanted
            rotary = subject.plan.layers[index].rotate
            factor = 1.0 if rotary is None else rotary.scaling.score_factor()
            cause = None
            if factor != 1.0 and abs(ratio * factor - 1) < 1e-6:
                cause = Cause(
                    words="mscale_all_dim squared is left out of the scale of latent attention's scores",
                    reference="NVIDIA/Megatron-LM#1429",
                )
            message = f"layer {index}: scores are multiplied by {present:.6g}, and should be by {wanted:.6g}"
            return Verdict(
                name=SCALE,
                outcome="fail",
                message=message,
                deviation=abs(ratio - 1),
                tolerance=1e-6,
                cause=cause.words if cause else None,
                reference=cause.reference if cause else None,
            )
    return Verdict(
        name=SCALE,
        outcome="pass",
        message=f"scores are multiplied by {found[0][1]:.6g}, as the config says",
        deviation=max(abs(p / w - 1) for _, p, w in found),
        tolerance=1e-6,
    )


def _scales(subject: Subject) -> Iterator[tuple[int, float, float]]:
    if subject.decoder is None:
        return
    for index, layer in enumerate(subject.plan.layers):
        attention = subject.decoder.attention(index)
        present = getattr(attention, "scaling", None)
        width = None if attention is None else head_dim(attention)
        if isinstance(present, float) and width:
            yield index, present, width**-0.5 if layer.score_scale is None else layer.score_scale
