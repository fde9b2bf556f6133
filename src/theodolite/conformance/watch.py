"""What a model's layers are given and do in one forward: tables, positions, and each turning of queries and keys.

Shapes: B rows, H heads, S tokens, D channels of a head, P = rotary_dim / 2 pairs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.conformance.turnings import Turning, looked_at, patched_turn
from theodolite.models.parts import Decoder
from theodolite.models.rotation import Dispatcher, LayerRotation

_BIASES = ("alibi", "position_bias")


@dataclass(frozen=True)
class Angles:
    """Cosines and sines as a layer was given them, one number a pair: (B, S, P), float64, amplitude included.

    Args:
        doubled: how each number stood twice in what was given: "halves", "neighbours", "" (once), or "apart" where the
            two differ.
        width: channels of the table as it was given.
    """

    cos: Tensor
    sin: Tensor
    doubled: str
    width: int


@dataclass
class Seen:
    """All that was seen in one forward, by layer; `made` is what the rotary module gave, of whatever form."""

    tables: dict[int, Any] = field(default_factory=dict)
    turnings: dict[int, list[Turning]] = field(default_factory=dict)
    positions: list[Tensor] = field(default_factory=list)
    biases: dict[int, Tensor] = field(default_factory=dict)
    made: list[Any] = field(default_factory=list)
    layer: int = -1
    depth: int = 0


@contextmanager
def watched(decoder: Decoder) -> Iterator[Seen]:
    """Look on while a model with rotary tables runs; afterwards everything stands as before."""
    seen, handles = Seen(), []
    replaced: list[tuple[Any, str, Any]] = []
    for index, layer in enumerate(decoder.layers):
        handles.append(layer.register_forward_pre_hook(_of_layer(seen, index), with_kwargs=True))
    handles.append(decoder.rotary.register_forward_pre_hook(_of_rotary(seen), with_kwargs=True))
    handles.append(decoder.rotary.register_forward_hook(lambda module, args, output: seen.made.append(output)))
    # A patched model turns by a method of its own, and would put its function back in place of a watched one.
    turn = LayerRotation.turn
    replaced.append((LayerRotation, "turn", turn))
    LayerRotation.turn = patched_turn(seen, turn)  # type: ignore[method-assign]
    for module, name in rotation_functions(decoder):
        if not isinstance(getattr(module, name), Dispatcher):
            replaced.append((module, name, getattr(module, name)))
            setattr(module, name, looked_at(seen, getattr(module, name)))
    try:
        yield seen
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)
        for handle in handles:
            handle.remove()


def rotation_functions(decoder: Decoder) -> list[tuple[Any, str]]:
    """(modeling module, name in it) of each function that turns queries and keys in these layers."""
    names = dict.fromkeys(
        cls.__module__ for layer in decoder.layers for part in layer.modules() for cls in type(part).__mro__
    )
    found = []
    for module in (sys.modules.get(name) for name in names if not name.startswith("torch")):
        for function, value in vars(module).items() if module else ():
            if function.startswith("apply_rotary") and callable(value):
                found.append((module, function))
    return found


@contextmanager
def watched_biases(layers: tuple[nn.Module, ...]) -> Iterator[Seen]:
    """Look on while a model that adds a bias to its scores (ALiBi) runs."""
    seen = Seen()

    def look(index: int) -> Any:
        def hook(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            bound = inspect.signature(type(layer).forward).bind_partial(layer, *args, **kwargs).arguments
            for name in _BIASES:
                if isinstance(bound.get(name), Tensor):
                    seen.biases[index] = bound[name].detach().double().cpu()

        return hook

    handles = [layer.register_forward_pre_hook(look(i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _of_layer(seen: Seen, index: int) -> Any:
    def hook(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.layer = index
        bound = inspect.signature(type(layer).forward).bind_partial(layer, *args, **kwargs).arguments
        if bound.get("position_embeddings") is not None:
            seen.tables[index] = bound["position_embeddings"]

    return hook


def _of_rotary(seen: Seen) -> Any:
    def hook(rotary: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        if isinstance(positions, Tensor):
            seen.positions.append(positions.detach().cpu())

    return hook


def angles_of(tables: Any, pairs: int) -> Angles | None:
    """Cosines and sines of whatever form of table a layer was given; None for a form that is not known."""
    if isinstance(tables, LayerRotation):
        tables = None if tables.tables is None else tuple(tables.tables)
    if isinstance(tables, Tensor) and tables.is_complex():
        cos, sin = tables.real, tables.imag
    elif isinstance(tables, (tuple, list)) and len(tables) == 2 and all(isinstance(x, Tensor) for x in tables):
        cos, sin = tables
    else:
        return None
    cos, sin = (x.detach().double().cpu() for x in (cos, sin))
    # (B, 1, S, P) in some families; (sin, cos) in GPT-J's, told at position 0.
    cos, sin = ((x.squeeze(1) if x.dim() == 4 and x.shape[1] == 1 else x) for x in (cos, sin))
    cos, sin = ((x[None] if x.dim() == 2 else x) for x in (cos, sin))
    width = cos.shape[-1]
    if cos.dim() != 3 or cos.shape != sin.shape:
        return None
    if not cos[:, 0].any() and sin[:, 0].any():
        cos, sin = sin, cos
    if width != 2 * pairs:
        return Angles(cos, sin, "", width)
    for doubled, (one, two) in {
        "halves": (slice(0, pairs), slice(pairs, None)),
        "neighbours": (slice(0, None, 2), slice(1, None, 2)),
    }.items():
        if all(torch.equal(x[..., one].nan_to_num(), x[..., two].nan_to_num()) for x in (cos, sin)):
            return Angles(cos[..., one], sin[..., one], doubled, width)
    return Angles(cos[..., :pairs], sin[..., :pairs], "apart", width)
