"""Checks of what people do to a loaded model: cast it and cast it back, autocast, initialise it on the meta device.

A cast and a meta initialisation are tried on the modules that hold position buffers and no weights, and undone: no
weight is rounded, and no second copy of the model is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from theodolite.conformance.subject import Subject
from theodolite.conformance.tables import ladder, look, rows_of, why_no_tables
from theodolite.conformance.verdict import Verdict, exact, skipped
from theodolite.conformance.watch import Seen, angles_of

CAST, META, AUTOCAST = "cast and back", "meta init", "autocast"


def cast(subject: Subject) -> Verdict:
    """`.to(bfloat16)` and back: the rounding of weights is the user's choice, that of frequencies is not."""
    held = _holders(subject.model)
    if not held:
        return exact(CAST, "no module holds positions in a buffer")
    before = _told(subject)
    with _restored(held):
        for module in held:
            module.to(torch.bfloat16).to(subject.dtype)
        after = _told(subject)
    apart, position = _apart(before, after)
    if apart == 0.0:
        return exact(CAST, f"buffers of {', '.join(_names(held))} give the same after .to(bfloat16) and back")
    return Verdict(
        name=CAST,
        outcome="note",
        deviation=apart,
        tolerance=0.0,
        starts_at=position,
        message=f"right as loaded; after .to(bfloat16), {_effect(subject, apart)}, and no cast back repairs it",
        cause=f"a cast rounds the buffers of {', '.join(_names(held))}",
        cure="load with from_pretrained(..., dtype=torch.bfloat16)"
        + (", or theodolite.patch(model, plan) before the cast" if why_no_tables(subject) is None else ""),
        reference="NVIDIA-NeMo/Automodel#2549",
    )


def meta(subject: Subject) -> Verdict:
    """Initialised on the meta device, `to_empty`, weights loaded: buffers that no file holds are what memory held."""
    held = _holders(subject.model)
    if not held:
        return exact(META, "no module holds positions in a buffer")
    before = _told(subject)
    with _restored(held), torch.no_grad():
        for module in held:
            kept = module.state_dict()
            module.to_empty(device=subject.device)
            for buffer in module.buffers():
                # What memory holds cannot be known; NaN is never right.
                buffer.fill_(float("nan") if buffer.is_floating_point() else 0)
            module.load_state_dict(kept)
        lost, position = _apart(before, _told(subject))
        for module in held:
            _fill_again(subject, module)
        repaired = _apart(before, _told(subject))[0] == 0.0
    if lost == 0.0:
        return exact(META, "tables are the same after meta initialisation, to_empty and loading")
    cure = "load with from_pretrained"
    if why_no_tables(subject) is None:
        cure += ", or theodolite.patch(model, plan) after the weights"
    if repaired:
        cure = "call the model's init_weights() after to_empty and before the weights are loaded; or from_pretrained"
    return Verdict(
        name=META,
        outcome="note",
        deviation=lost,
        tolerance=0.0,
        starts_at=position,
        cure=cure,
        message="right as loaded; after meta initialisation, to_empty and loading of the weights, positions are gone",
        cause=f"the buffers of {', '.join(_names(held))} are in no file and are not filled again",
        reference="huggingface/transformers#45902",
    )


def autocast(subject: Subject) -> Verdict:
    """Under autocast to bfloat16, cos and sin are those of float32 to the bit."""
    why = why_no_tables(subject)
    if why is not None:
        return skipped(AUTOCAST, why)
    positions = rows_of(_positions(subject))
    outside = look(subject, positions)
    with torch.autocast(subject.device.type, torch.bfloat16):
        inside = look(subject, positions)
    worst, at = _tables_apart(subject, outside, inside, positions)
    if worst == 0.0:
        return exact(AUTOCAST, "cos and sin are the same to the bit under autocast to bfloat16")
    # A table that comes out in bfloat16 is rounded once.
    rounding = 2.0**-8
    words = "cos and sin are rounded to bfloat16" if worst <= rounding else "angles are computed in bfloat16"
    return Verdict(
        name=AUTOCAST,
        outcome="fail",
        deviation=worst,
        tolerance=0.0,
        starts_at=at,
        message=f"under autocast to bfloat16, cos or sin is off by {worst:.2g}",
        cause=f"{words} under autocast",
        cure="compute angles with autocast disabled, or theodolite.patch(model, plan)",
        reference="huggingface/transformers#29285",
    )


def _positions(subject: Subject) -> list[int]:
    return ladder(min(subject.trained, subject.original or subject.trained) - 1)


def _told(subject: Subject) -> tuple[Tensor, list[int]]:
    """What positions come to, (N, numbers), and the position of each row: tables, or logits where there are none."""
    if why_no_tables(subject) is None:
        positions = rows_of(_positions(subject))[:1]
        seen = look(subject, positions)
        rows = list(_read(subject, seen))
        if rows:
            return torch.cat(rows, dim=-1), positions[0].tolist()
    logits = subject.logits(subject.ids)[0] / subject.scale
    return logits, list(range(len(logits)))


def _read(subject: Subject, seen: Seen) -> Iterator[Tensor]:
    done = set()
    for index, layer in enumerate(subject.plan.layers):
        given = seen.tables.get(index)
        if layer.rotate is None or given is None or id(given) in done:
            continue
        done.add(id(given))
        angles = angles_of(given, layer.rotate.rotary_dim // 2)
        if angles is not None:
            yield torch.cat((angles.cos[0], angles.sin[0]), dim=-1)


def _tables_apart(subject: Subject, one: Seen, other: Seen, positions: Tensor) -> tuple[float, int | None]:
    first, second = list(_read(subject, one)), list(_read(subject, other))
    if not first or len(first) != len(second):
        return 0.0, None
    told = positions[0].tolist()
    return _apart((torch.cat(first, -1), told), (torch.cat(second, -1), told))


def _apart(one: tuple[Tensor, list[int]], other: tuple[Tensor, list[int]]) -> tuple[float, int | None]:
    apart = (one[0] - other[0]).abs().amax(-1).nan_to_num(nan=float("inf"))
    off = [position for position, value in zip(one[1], apart.tolist(), strict=True) if value > 0]
    return float(apart.max()), min(off) if off else None


def _effect(subject: Subject, apart: float) -> str:
    what = "cos or sin" if why_no_tables(subject) is None else "a logit, in standard deviations,"
    return f"{what} is off by {apart:.2g} within {subject.trained:,} tokens"


def _holders(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that hold float buffers and no weights."""
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or next(module.parameters(), None) is not None:
            continue
        if any(buffer.is_floating_point() for buffer in module.buffers()):
            found.append(module)
            inside |= {id(part) for part in module.modules()}
    return found


def _names(held: list[nn.Module]) -> list[str]:
    return list(dict.fromkeys(type(module).__name__ for module in held))


@contextmanager
def _restored(held: list[nn.Module]) -> Iterator[None]:
    """Afterwards every buffer and attribute of these modules is the object that it was."""
    parts = [part for module in held for part in module.modules()]
    kept = [(part, dict(part._buffers), dict(part.__dict__)) for part in parts]
    values = [(buffer, buffer.clone()) for part in parts for buffer in part._buffers.values() if buffer is not None]
    try:
        yield
    finally:
        for part, buffers, attributes in kept:
            part.__dict__.clear()
            part.__dict__.update(attributes)
            part._buffers.clear()
            part._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                # A cast keeps the tensor object and changes what it holds.
                buffer.data = value


def _fill_again(subject: Subject, module: nn.Module) -> None:
    """What the model's own init_weights does to a module."""
    fill = getattr(subject.model, "_init_weights", None)
    if callable(fill):
        for part in module.modules():
            fill(part)
