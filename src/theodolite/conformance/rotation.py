"""Check of what a model's layers do with the tables that they are given: which channels turn, once, in what pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from theodolite.conformance.subject import Subject
from theodolite.conformance.tables import look, rows_of, why_no_tables
from theodolite.conformance.verdict import Cause, Verdict, skipped
from theodolite.conformance.watch import Angles, Seen, Turning, angles_of, rotation_functions
from theodolite.models.decoder import head_dim
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
    # All tokens of two rows at once, then one token a row.
    for positions in (rows_of(_POSITIONS), torch.tensor([[5], [100]])):
        seen = look(subject, positions)
        for index in range(len(subject.plan.layers)):
            fault, deviation, tolerance = _judge(subject, seen, index, positions)
            if fault is not None:
                return fault
            if deviation >= worst:
                worst, allowed = deviation, tolerance
    turning = sum(layer.rotate is not None for layer in subject.plan.layers)
    message = f"{turning} of {len(subject.plan.layers)} layers turn, each pair by its angle and once"
    return Verdict(name=ROTATION, outcome="pass", message=message, deviation=worst, tolerance=allowed)


def _judge(subject: Subject, seen: Seen, index: int, positions: Tensor) -> tuple[Verdict | None, float, float]:
    assert subject.decoder is not None
    rotary, calls = subject.plan.layers[index].rotate, seen.turnings.get(index, [])
    calls = _in_pairs(calls)
    if rotary is None:
        changed = any(not torch.equal(a, b) for call in calls for a, b in zip(call.before, call.after, strict=True))
        if changed:
            words = "its queries and keys are turned, and the config says that this layer turns nothing"
            return (
                _failed(
                    index,
                    words,
                    1.0,
                    0.0,
                    1,
                    Cause(
                        words="the list of layers without rotation is read the other way round",
                        reference="huggingface/transformers#37344",
                    ),
                ),
                0.0,
                0.0,
            )
        return None, 0.0, 0.0
    if not calls:
        if subject.decoder.attention(index) is None:
            return None, 0.0, 0.0
        cause = Cause(words="the layer leaves the rotation out", reference="huggingface/transformers#37344")
        return _failed(index, "its queries and keys are not turned", 1.0, 0.0, 1, cause), 0.0, 0.0
    angles = angles_of(seen.tables.get(index), rotary.rotary_dim // 2)
    if angles is not None and not (torch.isfinite(angles.cos).all() and torch.isfinite(angles.sin).all()):
        cause = Cause(words="its table holds what is no number", reference="huggingface/transformers#45902")
        return _failed(index, "queries and keys are turned by no angles", math.inf, 0.0, 0, cause), 0.0, 0.0
    if angles is None or angles.cos.shape[-1] != rotary.rotary_dim // 2 or len(calls[0].before) != 2:
        return None, 0.0, 0.0
    before, after = _heads_first(calls[0].before, positions), _heads_first(calls[-1].after, positions)
    found = _scores(*after)
    exact = _scores(*(_turned(x, angles, rotary, "plan") for x in before))
    size = float(before[0].norm(dim=-1).max() * before[1].norm(dim=-1).max())
    amplitude = float(torch.hypot(angles.cos, angles.sin).max()) ** 2
    eps = torch.finfo(subject.dtype).eps
    # Four roundings in each channel of a query and of a key.
    tolerance = 8 * max(eps, 2.0**-23) * size * max(amplitude, 1.0)
    error = (found - exact).abs().nan_to_num(nan=float("inf"))
    if float(error.max()) <= tolerance:
        return None, float(error.max()), tolerance
    off = (error > tolerance).any(dim=1)
    latest = torch.maximum(positions[:, :, None], positions[:, None, :])
    at = int(latest[off].min())
    words = f"the scores of turned queries and keys are off by {float(error.max()):.2g} of {size:.2g}"
    known = _cause(before, after, found, angles, rotary, tolerance)
    return _failed(index, words, float(error.max()), tolerance, at, known), 0.0, 0.0


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


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """(B, H, S, S), each group of query heads with its key head."""
    if q.shape[1] != k.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return q @ k.transpose(-1, -2)


def _turned(x: Tensor, angles: Angles, rotary: Rotary, how: str) -> Tensor:
    """Queries or keys (B, H, S, D) turned in float64 as the plan says, or as a known fault does."""
    width = rotary.rotary_dim
    start = x.shape[-1] - width if rotary.trailing else 0
    part = x[..., start : start + width]
    cos, sin = angles.cos[:, None], angles.sin[:, None]
    interleaved = rotary.interleaved
    if how == "other layout":
        interleaved = not interleaved
    elif how == "backwards":
        sin = -sin
    elif how == "first row":
        cos, sin = cos[:1].expand_as(cos), sin[:1].expand_as(sin)
    elif how == "twice":
        cos, sin = cos * cos - sin * sin, 2 * cos * sin
    if how == "mixed":
        full = [
            v.repeat_interleave(2, -1) if angles.doubled == "neighbours" else torch.cat((v, v), -1) for v in (cos, sin)
        ]
        half = width // 2
        pairs = torch.cat((-part[..., half:], part[..., :half]), -1)
        if angles.doubled == "halves":
            pairs = torch.stack((-part[..., 1::2], part[..., 0::2]), -1).flatten(-2)
        turned = part * full[0] + pairs * full[1]
    elif interleaved:
        one, other = part[..., 0::2], part[..., 1::2]
        turned = torch.stack((one * cos - other * sin, other * cos + one * sin), -1).flatten(-2)
    else:
        one, other = part[..., : width // 2], part[..., width // 2 :]
        turned = torch.cat((one * cos - other * sin, other * cos + one * sin), -1)
    return torch.cat((x[..., :start], turned, x[..., start + width :]), -1)


_KNOWN = {
    "other layout": ("pairs are of the other layout than the config's family has ({})", "huggingface/candle#3948"),
    "mixed": ("tables of one pair layout meet a rotation of the other", "raiyanyahya/how-to-train-your-gpt#6"),
    "twice": ("queries and keys are turned twice", "NVIDIA/TensorRT-LLM#16378"),
    "backwards": ("queries and keys turn the other way", "huggingface/candle#3948"),
    "first row": ("every row of a batch is turned by the angles of the first", "linkedin/Liger-Kernel#477"),
}


def _cause(
    before: tuple[Tensor, ...], after: tuple[Tensor, ...], found: Tensor, angles: Angles, rotary: Rotary, allowed: float
) -> Cause | None:
    for how, (words, reference) in _KNOWN.items():
        guess = _scores(*(_turned(x, angles, rotary, how) for x in before))
        if float((found - guess).abs().max()) <= 4 * allowed:
            layout = "halves" if rotary.interleaved else "neighbours"
            return Cause(words=words.format(layout), reference=reference)
    if all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
        return Cause(words="nothing is turned", reference="huggingface/transformers#37344")
    if len(after[0]) > 1 and not after[0][1:].any():
        words = "all rows but the first come out as zeros where each has a single token"
        return Cause(words=words, reference="ml-explore/mlx#3494")
    ratio = found / _scores(*(_turned(x, angles, rotary, "plan") for x in before))
    middle = float(ratio.median())
    if float((ratio - middle).abs().quantile(0.9)) <= 1e-3 * abs(middle):
        words = f"the scores are multiplied by {middle:.6g} besides"
        return Cause(words=words, reference="NVIDIA/kvpress#84")
    start = before[0].shape[-1] - rotary.rotary_dim if rotary.trailing else 0
    passing = [c for c in range(before[0].shape[-1]) if not start <= c < start + rotary.rotary_dim]
    if passing and not torch.equal(after[0][..., passing], before[0][..., passing]):
        words = "channels outside the rotary width are changed"
        return Cause(words=words, reference="AI-Hypercomputer/maxtext#4616")
    return None


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
