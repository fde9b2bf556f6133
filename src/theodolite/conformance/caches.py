"""Checks of what is read in pieces: chunks of a prompt, and tokens one by one, against one forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from theodolite.conformance.subject import Subject
from theodolite.conformance.verdict import Cause, Verdict, skipped
from theodolite.conformance.watch import watched
from theodolite.plan.layer_json import attends

CHUNKS, DECODE, CROSSING = "chunked prefill", "decode", "decode across the original length"
_PIECES = (7, 1, 16, 11)
_STEPS = 12
_WIDEST_WINDOW = 1024


def chunks(subject: Subject) -> Verdict:
    """A prompt in uneven chunks with a cache, past the window of layers that have one, against one forward."""
    windows = [layer.mask.sliding_window for layer in subject.plan.layers if layer.mask.sliding_window]
    window = min(windows, default=0)
    count = min(window + 40 if 0 < window <= _WIDEST_WINDOW else 48, max(subject.trained, 48))
    lengths = [count - sum(_PIECES) - 5, *_PIECES, 5]
    return _compared(subject, CHUNKS, subject.tokens(count), lengths, f"{count} tokens in {len(lengths)} uneven chunks")


def decode(subject: Subject) -> Verdict:
    """Two rows read to 36 tokens and then token by token, against one forward."""
    ids = subject.tokens(36 + _STEPS, rows=2)
    return _compared(subject, DECODE, ids, [36] + [1] * _STEPS, f"{_STEPS} tokens one by one after 36")


def crossing(subject: Subject) -> Verdict:
    """Decoding from below the length at which frequencies change to above it, against one forward."""
    original = subject.original
    if original is None:
        return skipped(CROSSING, "frequencies do not change with the length")
    start = original - 20
    if start < 0:
        return skipped(CROSSING, f"the original length is {original} tokens")
    ids = subject.tokens(36)
    what = f"decoding from position {start:,} past {original:,}"
    return _compared(subject, CROSSING, ids, [16] + [1] * 20, what, start=start)


def _compared(
    subject: Subject, name: str, ids: Tensor, lengths: list[int], what: str, start: int | None = None
) -> Verdict:
    first = 0 if start is None else start
    if not subject.causal:
        return skipped(name, "its tokens see later ones, so that nothing can be read in pieces")
    if not any(attends(layer) for layer in subject.plan.layers):
        return skipped(name, "there is no attention, and so no cache of keys and values")
    # In pieces first, as a prompt is read: a whole forward may leave something behind.
    try:
        pieces, given = _in_pieces(subject, ids, lengths, start)
    except _NoCacheError as error:
        return skipped(name, str(error))
    whole = subject.logits(ids, start=start)
    tolerance = subject.tolerance_at(first + ids.shape[1])
    found = subject.difference(pieces, whole, tolerance)
    if found.first is None:
        message = f"{what} have the logits of one forward, within {found.largest:.2g} of their spread"
        return Verdict(name=name, outcome="pass", message=message, deviation=found.largest, tolerance=tolerance)
    apart = f"by {found.largest:.2g} of their spread; rounding costs {tolerance:.2g}"
    message = f"{what} have other logits than one forward, {apart}"
    cause = _cause(subject, lengths, given, first)
    return Verdict(
        name=name,
        outcome="fail",
        message=message,
        deviation=found.largest,
        tolerance=tolerance,
        starts_at=first + found.first,
        cause=cause.words if cause else None,
        cure="theodolite.patch(model, plan, length=...) settles one base for the sequence"
        if subject.original is not None and name == CROSSING
        else None,
        reference=cause.reference if cause else None,
    )


class _NoCacheError(Exception):
    """A model keeps no keys and values."""


def _in_pieces(subject: Subject, ids: Tensor, lengths: list[int], start: int | None) -> tuple[Tensor, list[list[int]]]:
    """Logits (B, S, V), and the positions that the rotary tables were asked for, piece by piece."""
    past, out, given = None, [], []
    for part, end in zip(ids.split(lengths, dim=1), _ends(lengths), strict=True):
        more: dict[str, Any] = {"attention_mask": torch.ones_like(ids[:, :end])}
        if start is not None:
            stands = torch.arange(end - part.shape[1], end, device=subject.device) + start
            more["position_ids"] = stands[None].expand(len(ids), -1)
        if subject.decoder is None:
            found = subject.step_on(part, past, **more)
        else:
            with watched(subject.decoder) as seen:
                found = subject.step_on(part, past, **more)
            given += [seen.positions[0].reshape(-1, part.shape[1])[0].tolist()] if seen.positions else []
        past = subject.cache_of(found)
        if past is None:
            raise _NoCacheError("the model keeps no keys and values between calls")
        out.append(found.logits.double().cpu())
    return torch.cat(out, dim=1), given


def _ends(lengths: list[int]) -> list[int]:
    return [sum(lengths[: index + 1]) for index in range(len(lengths))]


def _cause(subject: Subject, lengths: list[int], given: list[list[int]], first: int) -> Cause | None:
    for positions, end, count in zip(given, _ends(lengths), lengths, strict=False):
        wanted = list(range(first + end - count, first + end))
        if positions != wanted:
            words = (
                f"tokens {wanted[0]:,} to {wanted[-1]:,} were given positions "
                f"{positions[0]:,.10g} to {positions[-1]:,.10g}"
            )
            if positions == list(range(count)):
                words += ": each piece is counted from 0"
            elif positions[0] == 2 * wanted[0]:
                words += ": what was read before is added twice"
            elif positions[0] < wanted[0]:
                words += ": positions are counted by the rows that a cache still keeps, or late"
            return Cause(words=words, reference="huggingface/transformers#43082")
    if subject.original is not None and first + sum(lengths) > subject.original:
        words = "keys in the cache were turned by the frequencies of a shorter sequence"
        dynamic = any(r.scaling.rope_type == "dynamic" for r in subject.plan.rotaries)
        return Cause(words=words, reference="huggingface/transformers#25104" if dynamic else "vllm-project/vllm#27414")
    return Cause(
        words="the cache, the mask or the bias of a step is another one than that of one forward",
        reference="ml-explore/mlx#3494",
    )
