"""Queries and keys turned in float64 as a plan says, or as a known fault does; and which fault explains a score.

Shapes: B rows, H heads, S tokens, D channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.conformance.verdict import Cause
from theodolite.conformance.watch import Angles
from theodolite.plan import Rotary


def scores(q: Tensor, k: Tensor) -> Tensor:
    """(B, H, S, S), each group of query heads with its key head."""
    if q.shape[1] != k.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return q @ k.transpose(-1, -2)


def turned(x: Tensor, angles: Angles, rotary: Rotary, how: str) -> Tensor:
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


_LAYOUT = "pairs are of the other layout than the config's family has ({})"
_KNOWN = {
    "other layout": (_LAYOUT, "huggingface/candle#3948"),
    "mixed": ("tables of one pair layout meet a rotation of the other", "raiyanyahya/how-to-train-your-gpt#6"),
    "twice": ("queries and keys are turned twice", "NVIDIA/TensorRT-LLM#16378"),
    "backwards": ("queries and keys turn the other way", "huggingface/candle#3948"),
    "first row": ("every row of a batch is turned by the angles of the first", "linkedin/Liger-Kernel#477"),
}
# What may befall one of the two alone.
_ALONE = {
    "twice": ("{} are turned twice", "NVIDIA/TensorRT-LLM#16378"),
    "backwards": ("{} turn the other way, and {} do not", "huggingface/candle#3948"),
}


def cause_of_turning(
    before: tuple[Tensor, ...], after: tuple[Tensor, ...], found: Tensor, angles: Angles, rotary: Rotary, allowed: float
) -> Cause | None:
    """The known fault that explains scores `found` (B, H, S, S) of queries and keys (B, H, S, D); None if none does."""
    for how, (words, reference) in _KNOWN.items():
        guess = scores(*(turned(x, angles, rotary, how) for x in before))
        if float((found - guess).abs().max()) <= 4 * allowed:
            layout = "halves" if rotary.interleaved else "neighbours"
            return Cause(words=words.format(layout), reference=reference)
    alone = _of_one(before, after, found, angles, rotary, allowed)
    if alone is not None:
        return alone
    if len(after[0]) > 1 and not after[0][1:].any():
        words = "all rows but the first come out as zeros where each has a single token"
        return Cause(words=words, reference="ml-explore/mlx#3494")
    ratio = found / scores(*(turned(x, angles, rotary, "plan") for x in before))
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


def _of_one(
    before: tuple[Tensor, ...], after: tuple[Tensor, ...], found: Tensor, angles: Angles, rotary: Rotary, allowed: float
) -> Cause | None:
    """What befalls queries alone, or keys alone; or that neither is turned."""
    still = [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    if any(still):
        words = "nothing is turned" if all(still) else f"{'queries' if still[0] else 'keys'} are not turned"
        return Cause(words=words, reference="huggingface/transformers#37344")
    for how, (words, reference) in _ALONE.items():
        for wrong, names in enumerate((("queries", "keys"), ("keys", "queries"))):
            hows = [how if index == wrong else "plan" for index in range(2)]
            guess = scores(*(turned(x, angles, rotary, one) for x, one in zip(before, hows, strict=True)))
            if float((found - guess).abs().max()) <= 4 * allowed:
                return Cause(words=words.format(*names), reference=reference)
    return None
