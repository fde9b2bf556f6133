"""Put a plan's positions into a loaded transformers model, in place, and take them out again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from theodolite.models.describe import why_not_rotary
from theodolite.models.fit import check_layer, check_length, check_rest
from theodolite.models.hooks import CheckRotation, PatchedForward, SelectRotation, remove_hooks
from theodolite.models.parts import Decoder, find_decoder, find_owner
from theodolite.models.rotation import install, release
from theodolite.plan import ModelPlan

_RECORD = "_theodolite_patch"


def patch(model: nn.Module, plan: ModelPlan, *, length: int | None = None) -> None:
    """Make a loaded model turn its queries and keys by `plan`, with exact tables, in float32, rounded once.

    Tables are computed once per forward and distinct rotary encoding, from the positions that the model gives its
    layers, and shared by all layers; each layer follows its own `plan.layers[i].rotate` (None: nothing turns) and
    `score_scale`. Masks, windows and temperatures stay the model's own, and the plan must say the same. No weight,
    buffer or config is changed. A model that is patched already gets the new plan instead. Keys cached under one
    plan do not fit another.

    Args:
        model: a causal language model of transformers with rotary positions, or one of images and text, whose
            text decoder is then meant. Any dtype and device; later casts do not touch the tables.
        plan: one LayerPlan per decoder layer: that of `load`, or of `plan.huggingface.read_config`, or made from one.
        length: tokens of the sequences to come, needed (only) if frequencies depend on it (dynamic NTK, LongRoPE).

    Raises:
        ValueError: the model has no rotary positions, or the plan does not fit it; the message names both.
    """
    if not isinstance(plan, ModelPlan):
        raise ValueError(
            f"plan: got {type(plan).__name__}; give a ModelPlan: load(...).plan, or that of a config, "
            "theodolite.plan.huggingface.read_config(model.config.to_dict())"
        )
    if plan.depends_on_length:
        if length is None:
            raise ValueError(
                f"length: the frequencies of this plan ({_scalings(plan)}) depend on the tokens of a sequence; "
                "say how many it will have, prompt and generated together"
            )
        plan = plan.at_length(length)
    previous = _record(model)
    unpatch(model)
    try:
        _patch(model, plan)
    except BaseException:
        unpatch(model)
        if previous is not None:
            _patch(model, previous.plan)
        raise


def unpatch(model: nn.Module) -> None:
    """Restore a patched model exactly as it was; a model that is not patched is left alone."""
    record = _record(model)
    if record is None:
        return
    delattr(record.decoder.module, _RECORD)
    if record.forward.previous is None:
        record.decoder.rotary.__dict__.pop("forward", None)
    else:
        record.decoder.rotary.forward = record.forward.previous
    for layer in record.decoder.layers:
        remove_hooks(layer, SelectRotation, CheckRotation)
    for attention, scaling in record.scalings:
        attention.scaling = scaling  # type: ignore[assignment]
    for module_name, name in record.decoder.functions:
        release(module_name, name, record.forward)


@contextmanager
def patched(model: nn.Module, plan: ModelPlan, *, length: int | None = None) -> Iterator[nn.Module]:
    """`patch` for the length of a `with` block; afterwards the model is as it was, an earlier patch included."""
    previous = _record(model)
    patch(model, plan, length=length)
    try:
        yield model
    finally:
        unpatch(model)
        if previous is not None:
            _patch(model, previous.plan)


def current_plan(model: nn.Module) -> ModelPlan | None:
    """The plan that a model is patched with, settled for its length, or None."""
    record = _record(model)
    return None if record is None else record.plan


@dataclass(frozen=True)
class _Record:
    plan: ModelPlan
    decoder: Decoder
    forward: PatchedForward
    scalings: tuple[tuple[nn.Module, Any], ...]


def _record(model: nn.Module) -> _Record | None:
    # It hangs on the decoder, so that a model and a part of it do not patch twice.
    owner = find_owner(model)
    record = None if owner is None else owner.__dict__.get(_RECORD)
    return record if isinstance(record, _Record) else None


def _patch(model: nn.Module, plan: ModelPlan) -> None:
    decoder = find_decoder(model)
    if decoder is None:
        raise ValueError(why_not_rotary(model))
    if plan.rotaries and not decoder.functions:
        raise ValueError(
            f"{type(decoder.module).__name__}: its layers turn queries and keys by no function that a patch can replace"
        )
    check_length(decoder, plan)
    check_rest(model, plan)
    scales = [change for index in range(len(plan.layers)) if (change := check_layer(decoder, plan, index))]
    alike = len({policy.rotate for policy in plan.layers}) == 1
    common = SelectRotation(plan.layers[0].rotate) if alike else None
    forward = PatchedForward(decoder.functions, decoder.rotary.__dict__.get("forward"), common)
    before = tuple((attention, attention.scaling) for attention, _ in scales)
    setattr(decoder.module, _RECORD, _Record(plan, decoder, forward, before))
    decoder.rotary.forward = forward  # type: ignore[method-assign]
    for module_name, name in decoder.functions:
        install(module_name, name, forward)
    for index, (layer, policy) in enumerate(zip(decoder.layers, plan.layers, strict=True)):
        if common is None:
            layer.register_forward_pre_hook(SelectRotation(policy.rotate), with_kwargs=True)
        layer.register_forward_hook(CheckRotation(index), with_kwargs=True)
    for attention, scale in scales:
        attention.scaling = scale  # type: ignore[assignment]


def _scalings(plan: ModelPlan) -> str:
    return ", ".join(dict.fromkeys(r.scaling.rope_type for r in plan.rotaries if r.depends_on_length))
