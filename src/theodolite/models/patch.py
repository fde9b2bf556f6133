"""Put a plan's positions into a loaded transformers model, in place, and take them out again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from theodolite.models.decoder import Decoder, find_decoder, head_dim
from theodolite.models.describe import why_not_rotary
from theodolite.models.rotation import LayerRotation, PositionTables, install, release
from theodolite.plan import LayerPlan, ModelPlan, Rotary

_RECORD = "_theodolite_patch"


def patch(model: nn.Module, plan: ModelPlan, *, length: int | None = None) -> None:
    """Make a loaded model turn its queries and keys by `plan`, with exact tables, in float32, rounded once.

    Tables are computed once per forward and distinct rotary encoding, from the positions that the model gives its
    layers, and shared by all layers; each layer follows its own `plan.layers[i].rotate` (None: nothing turns) and
    `score_scale`. Masks, windows and temperatures stay the model's own. No weight, buffer or config is changed.
    A model that is patched already gets the new plan instead. Keys cached under one plan do not fit another.

    Args:
        model: a causal language model of transformers with rotary positions, or one of images and text, whose
            text decoder is then meant. Any dtype and device; later casts do not touch the tables.
        plan: one LayerPlan per decoder layer.
        length: tokens of the sequences to come, needed (only) if frequencies depend on it (dynamic NTK, LongRoPE).

    Raises:
        ValueError: the model has no rotary positions, or the plan does not fit it; the message names both.
    """
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
        if previous is not None:
            _patch(model, previous.plan)
        raise


def unpatch(model: nn.Module) -> None:
    """Restore a patched model exactly as it was; a model that is not patched is left alone."""
    record = _record(model)
    if record is None:
        return
    delattr(model, _RECORD)
    if record.forward.previous is None:
        delattr(record.decoder.rotary, "forward")
    else:
        record.decoder.rotary.forward = record.forward.previous
    for layer in record.decoder.layers:
        _remove_hooks(layer)
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


class _Forward:
    """The patched `rotary_emb.forward`: takes note of the positions, computes nothing yet."""

    def __init__(self, functions: tuple[tuple[str, str], ...], previous: Any) -> None:
        self.functions, self.previous = functions, previous

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> PositionTables:
        # A copy or an unpickled model comes with its hooks, but no one has counted it yet.
        for module_name, name in self.functions:
            install(module_name, name, self)
        return PositionTables(position_ids, x.device)


class _Select:
    """Before a decoder layer: the tables of this forward become the rotation of this layer."""

    def __init__(self, rotary: Rotary | None) -> None:
        self.rotary = rotary

    def __call__(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return tuple(map(self._select, args)), {name: self._select(value) for name, value in kwargs.items()}

    def _select(self, value: Any) -> Any:
        if not isinstance(value, PositionTables):
            return value
        return LayerRotation(self.rotary, None if self.rotary is None else value.of(self.rotary))


class _Check:
    """After a decoder layer: a rotation that the plan asks for and the layer's code left out is an error."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, LayerRotation) and value.rotary is not None and not value.used:
                raise RuntimeError(
                    f"layers[{self.index}].rotate: the plan turns queries and keys in this layer, and the model's "
                    "code for it does not; give rotate=None for this layer"
                )


@dataclass(frozen=True)
class _Record:
    plan: ModelPlan
    decoder: Decoder
    forward: _Forward
    scalings: tuple[tuple[nn.Module, Any], ...]


def _record(model: nn.Module) -> _Record | None:
    record = model.__dict__.get(_RECORD)
    return record if isinstance(record, _Record) else None


def _patch(model: nn.Module, plan: ModelPlan) -> None:
    decoder = find_decoder(model)
    if decoder is None:
        raise ValueError(why_not_rotary(model))
    scales = tuple(_check_layer(decoder, plan, index) for index in range(_check_length(decoder, plan)))
    forward = _Forward(decoder.functions, decoder.rotary.__dict__.get("forward"))
    decoder.rotary.forward = forward  # type: ignore[method-assign]
    for module_name, name in decoder.functions:
        install(module_name, name, forward)
    for index, (layer, policy) in enumerate(zip(decoder.layers, plan.layers, strict=True)):
        layer.register_forward_pre_hook(_Select(policy.rotate), with_kwargs=True)
        layer.register_forward_hook(_Check(index), with_kwargs=True)
    scalings: list[tuple[nn.Module, Any]] = []
    for change in scales:
        if change is not None:
            attention, scale = change
            scalings.append((attention, attention.scaling))
            attention.scaling = scale  # type: ignore[assignment]
    setattr(model, _RECORD, _Record(plan, decoder, forward, tuple(scalings)))


def _check_length(decoder: Decoder, plan: ModelPlan) -> int:
    if len(plan.layers) != len(decoder.layers):
        raise ValueError(
            f"layers: the plan ({plan.model_type}) has {len(plan.layers)} layers, "
            f"the model ({type(decoder.module).__name__}) has {len(decoder.layers)}"
        )
    if plan.embed is not None:
        raise ValueError(f"embed: the plan adds {plan.embed.kind} positions to the embeddings; patch only rotates")
    return len(plan.layers)


def _check_layer(decoder: Decoder, plan: ModelPlan, index: int) -> tuple[nn.Module, float] | None:
    """Raise where a layer's policy does not fit its module; the attention and its new score scale, if it changes."""
    policy, attention = plan.layers[index], decoder.attention(index)
    if policy.bias is not None:
        raise ValueError(f"layers[{index}].bias: the plan adds {policy.bias.kind!r} to the scores; patch only rotates")
    if attention is None:
        if policy.rotate is not None:
            raise ValueError(
                f"layers[{index}].rotate: the plan turns queries and keys; the model has no attention there"
            )
        return None
    if policy.rotate is not None:
        width = head_dim(attention)
        if width is not None and width != policy.rotate.head_dim:
            raise ValueError(
                f"layers[{index}].rotate.head_dim: the plan has {policy.rotate.head_dim}, the model has {width}"
            )
        if not getattr(attention, "use_rope", True):
            raise ValueError(
                f"layers[{index}].rotate: the plan turns queries and keys; the model turns nothing there (NoPE)"
            )
    return _score_scale(policy, attention, index)


def _score_scale(policy: LayerPlan, attention: nn.Module, index: int) -> tuple[nn.Module, float] | None:
    present = getattr(attention, "scaling", None)
    if policy.score_scale is None:
        width = head_dim(attention)
        if isinstance(present, float) and width and not math.isclose(present, width**-0.5, rel_tol=1e-6):
            raise ValueError(
                f"layers[{index}].score_scale: the plan leaves it at head_dim ** -0.5 = {width**-0.5:.6g}, "
                f"the model multiplies scores by {present:.6g}; say which in the plan"
            )
        return None
    if not isinstance(present, (int, float)):
        raise ValueError(f"layers[{index}].score_scale: the plan has {policy.score_scale}, the model keeps none to set")
    # A difference in the last places is another order of the same multiplications; the model keeps its own.
    if math.isclose(present, policy.score_scale, rel_tol=1e-9):
        return None
    return attention, policy.score_scale


def _remove_hooks(layer: nn.Module) -> None:
    for hooks, with_kwargs in (
        (layer._forward_pre_hooks, layer._forward_pre_hooks_with_kwargs),
        (layer._forward_hooks, layer._forward_hooks_with_kwargs),
    ):
        for key in [key for key, hook in hooks.items() if isinstance(hook, (_Select, _Check))]:
            del hooks[key]
            with_kwargs.pop(key, None)


def _scalings(plan: ModelPlan) -> str:
    return ", ".join(dict.fromkeys(r.scaling.rope_type for r in plan.rotaries if r.depends_on_length))
