"""Checks of rows side by side: padding on the left, documents in one row, and a batch against each row alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from theodolite.conformance.subject import Difference, Subject
from theodolite.conformance.verdict import Verdict, skipped
from theodolite.plan.layer_json import attends

PADDING, PACKING, BATCH = "left padding", "packing", "batch"
_LENGTHS = (11, 23, 17)
_DOCUMENTS = (9, 14, 10)
_OFFSETS = (0, 5, 300)
_GENERATED = 4


def batch(subject: Subject) -> Verdict:
    """Rows of one length, and of several with padding on the right; where positions count, each at its own."""
    ids = subject.tokens(19, rows=3)
    alone = [subject.logits(ids[row : row + 1])[0] for row in range(3)]
    together = subject.logits(ids)
    found = [_apart(subject, together[row], alone[row], subject.tolerance) for row in range(3)]
    told = "rows of 19 tokens"
    if all(one.first is None for one in found):
        told = "rows padded on the right"
        lengths = (19, 7, 12)
        mask = torch.stack([torch.arange(19) < length for length in lengths]).long().to(subject.device)
        together = subject.logits(ids, attention_mask=mask)
        found = [
            _apart(subject, together[row, :length], subject.logits(ids[row : row + 1, :length])[0], subject.tolerance)
            for row, length in enumerate(lengths)
        ]
    if all(one.first is None for one in found) and subject.takes_positions:
        offsets = [min(offset, subject.trained - 19) for offset in _OFFSETS]
        told = f"rows at positions {', '.join(map(str, offsets))}"
        positions = torch.tensor(offsets, device=subject.device)[:, None] + torch.arange(19, device=subject.device)
        together = subject.logits(ids, position_ids=positions, attention_mask=subject.mask(ids))
        found = []
        for row, offset in enumerate(offsets):
            single = subject.logits(ids[row : row + 1], start=offset)[0]
            found.append(_apart(subject, together[row], single, subject.tolerance))
    return _judged(
        subject,
        BATCH,
        found,
        f"{told} have the logits of each alone",
        f"{told} have other logits than each alone",
        "a row of a batch is given the positions or the tables of another",
        "linkedin/Liger-Kernel#477",
    )


def left_padding(subject: Subject) -> Verdict:
    """Rows padded on the left against each alone: with positions given, by generate, and with the mask alone."""
    widest = max(_LENGTHS)
    ids = subject.tokens(widest, rows=3)
    mask = torch.stack([torch.arange(widest) >= widest - n for n in _LENGTHS]).long().to(subject.device)
    alone = [subject.logits(ids[row : row + 1, -n:])[0] for row, n in enumerate(_LENGTHS)]

    def rows(logits: Tensor) -> list[Difference]:
        return [
            _apart(subject, logits[row, -n:], alone[row], subject.tolerance_at(widest))
            for row, n in enumerate(_LENGTHS)
        ]

    given: dict[str, Any] = {"attention_mask": mask}
    if subject.takes_positions:
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    found = rows(subject.logits(ids, **given))
    right = "rows padded on the left have the logits of each alone, "
    wrong = "rows padded on the left have other logits than each alone, "
    if any(one.first is not None for one in found):
        what = "with cumsum(mask) - 1 as position_ids" if subject.takes_positions else "with the mask"
        return _judged(
            subject,
            PADDING,
            found,
            "",
            wrong + what,
            "positions are counted from the shape, padding included",
            "unslothai/unsloth#3795",
        )
    generated = _generated(subject, ids, mask) if subject.causal else []
    if any(one.first is not None for one in generated):
        return _judged(
            subject,
            PADDING,
            generated,
            "",
            wrong + "in generate",
            "generate does not derive positions from the mask",
            "huggingface/transformers#18478",
        )
    forward = rows(subject.logits(ids, attention_mask=mask))
    if any(one.first is not None for one in forward):
        worst = max(forward, key=lambda one: one.largest)
        return Verdict(
            name=PADDING,
            outcome="note",
            deviation=worst.largest,
            tolerance=subject.tolerance_at(widest),
            starts_at=0,
            message="right in generate and with position_ids; a forward with the mask alone "
            "counts padding as positions",
            cause="only generate derives positions from the mask",
            cure="give position_ids = (mask.cumsum(-1) - 1).clamp(min=0) to forward",
            reference="huggingface/transformers#18478",
        )
    all_found = found + generated + forward
    return _judged(
        subject,
        PADDING,
        all_found,
        right + ("in forward and in generate" if generated else "in forward"),
        wrong,
        "",
        "",
    )


def _generated(subject: Subject, ids: Tensor, mask: Tensor) -> list[Difference]:
    """First steps of generate, all rows together against each alone; while the same tokens are chosen."""
    together = _generate(subject, ids, mask)
    found = []
    for row, n in enumerate(_LENGTHS):
        one = _generate(subject, ids[row : row + 1, -n:], mask[row : row + 1, -n:])
        chosen, wanted = together[row].argmax(-1), one[0].argmax(-1)
        same = int((chosen == wanted).long().cumprod(0).sum())
        steps = min(same + 1, len(wanted))
        found.append(_apart(subject, together[row, :steps], one[0, :steps], subject.tolerance_at(max(_LENGTHS))))
    return found


def _generate(subject: Subject, ids: Tensor, mask: Tensor) -> Tensor:
    """Logits (B, steps, V) of greedy generation."""
    with torch.no_grad(), _plain_generation(subject.model):
        out = subject.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=_GENERATED,
            min_new_tokens=_GENERATED,
            do_sample=False,
            num_beams=1,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=int(ids[0, 0]),
        )
    return torch.stack(out.logits, dim=1).double().cpu()


@contextmanager
def _plain_generation(model: Any) -> Iterator[None]:
    """What its files ask of generation (stop strings, several answers, penalties) has nothing to do with positions."""
    present = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = present


def packing(subject: Subject) -> Verdict:
    """Three documents in one row, positions starting again at each: with a mask of blocks, and by positions alone."""
    if not subject.takes_positions:
        return skipped(PACKING, "its forward takes no position_ids")
    if not all(attends(layer) for layer in subject.plan.layers):
        return skipped(PACKING, "layers without attention carry their state from one document into the next")
    ids = subject.tokens(sum(_DOCUMENTS))
    positions = torch.cat([torch.arange(n) for n in _DOCUMENTS])[None].to(subject.device)
    owner = torch.cat([torch.full((n,), index) for index, n in enumerate(_DOCUMENTS)])
    alone = torch.cat([subject.logits(part)[0] for part in ids.split(list(_DOCUMENTS), dim=1)])
    blocks = owner[:, None] == owner[None]
    if subject.causal:
        blocks &= torch.arange(len(owner))[:, None] >= torch.arange(len(owner))
    by_mask = _attempt(lambda: subject.logits(ids, position_ids=positions, attention_mask=_four(subject, blocks)))
    by_positions = _attempt(lambda: subject.logits(ids, position_ids=positions))
    tolerance = subject.tolerance_at(len(owner))
    mask_found = None if by_mask is None else subject.difference(by_mask[0], alone, tolerance)
    found = None if by_positions is None else subject.difference(by_positions[0], alone, tolerance)
    if found is not None and found.first is None:
        message = (
            f"{len(_DOCUMENTS)} documents in one row have the logits of each alone, by position_ids that start again"
        )
        return Verdict(name=PACKING, outcome="pass", message=message, deviation=found.largest, tolerance=tolerance)
    if mask_found is not None and mask_found.first is None:
        return Verdict(
            name=PACKING,
            outcome="note",
            deviation=None if found is None else found.largest,
            tolerance=tolerance,
            starts_at=None if found is None else found.first,
            message="right with a mask of blocks; by position_ids alone, documents in one row see each other",
            cause="this attention does not tell documents apart by their positions",
            cure="give a mask (1, 1, S, S) of blocks beside position_ids",
            reference="huggingface/transformers#35941",
        )
    worst = mask_found or found
    if worst is None:
        return skipped(PACKING, "its forward takes neither a mask of blocks nor positions that start again")
    return Verdict(
        name=PACKING,
        outcome="fail",
        deviation=worst.largest,
        tolerance=tolerance,
        starts_at=worst.first,
        message="documents in one row have other logits than each alone, even with a mask of blocks",
        cause="positions that start again are not obeyed",
        reference="allenai/OLMo-core#591",
    )


def _four(subject: Subject, blocks: Tensor) -> Tensor:
    """A mask (1, 1, S, S) of blocks, in the form that every attention of transformers adds to its scores."""
    least = torch.finfo(subject.dtype).min
    return torch.where(blocks, 0.0, least).to(subject.dtype)[None, None].to(subject.device)


def _attempt(call: Callable[[], Tensor]) -> Tensor | None:
    try:
        return call()
    except Exception:
        return None


def _apart(subject: Subject, one: Tensor, other: Tensor, allowed: float) -> Difference:
    return subject.difference(one, other, allowed)


def _judged(
    subject: Subject, name: str, found: list[Difference], right: str, wrong: str, cause: str, reference: str
) -> Verdict:
    worst = max(found, key=lambda one: one.largest)
    firsts = [one.first for one in found if one.first is not None]
    tolerance = subject.tolerance_at(max(_LENGTHS))
    if not firsts:
        message = f"{right}, within {worst.largest:.2g} of their spread"
        return Verdict(name=name, outcome="pass", message=message, deviation=worst.largest, tolerance=tolerance)
    message = f"{wrong}, by {worst.largest:.2g} of their spread; rounding costs {tolerance:.2g}"
    return Verdict(
        name=name,
        outcome="fail",
        message=message,
        deviation=worst.largest,
        tolerance=tolerance,
        starts_at=min(firsts),
        cause=cause,
        reference=reference,
    )
