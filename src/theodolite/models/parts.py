"""Where the rotary positions of a transformers model live: its text decoder, layers and attention modules."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

# Forms of rotation functions that a patch can stand in for, by the names of their parameters.
_KNOWN_PARAMETERS = frozenset({"q", "k", "x", "xq", "xk", "cos", "sin", "freqs_cis", "position_ids", "unsqueeze_dim"})


@dataclass(frozen=True)
class Decoder:
    """The parts of a model that a patch touches.

    Args:
        module: the text decoder; it owns `rotary` and `layers`.
        rotary: computes cos and sin once per forward (once per layer type in some families).
        layers: the decoder layers, first layer first.
        functions: (name of the modeling module, name in it) of each function that applies cos and sin in these layers.
    """

    module: nn.Module
    rotary: nn.Module
    layers: tuple[nn.Module, ...]
    functions: tuple[tuple[str, str], ...]

    def attention(self, index: int) -> nn.Module | None:
        """The attention module of a layer that takes rotary tables, or None (Mamba, DeltaNet)."""
        for module in self.layers[index].modules():
            if module is not self.layers[index] and takes_tables(module):
                return module
        return None


def find_owner(model: nn.Module) -> nn.Module | None:
    """The text decoder with rotary positions inside `model`, possibly `model` itself, or None if there is none."""
    for module in _candidates(model):
        if isinstance(getattr(module, "rotary_emb", None), nn.Module) and _layers(module):
            return module
    return None


def find_decoder(model: nn.Module) -> Decoder | None:
    """The parts of the text decoder with rotary positions inside `model`, or None if there is none."""
    owner = find_owner(model)
    if owner is None:
        return None
    layers = _layers(owner)
    return Decoder(owner, owner.rotary_emb, layers, tuple(_rotation_functions(layers)))  # type: ignore[arg-type]


def _candidates(model: nn.Module) -> Iterator[nn.Module]:
    # A model of images and text has rotary towers too; transformers says which part decodes text.
    get_decoder = getattr(model, "get_decoder", None)
    if callable(get_decoder):
        yield from get_decoder().modules()
    yield from model.modules()


def _layers(module: nn.Module) -> tuple[nn.Module, ...]:
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) and all(takes_tables(layer) for layer in child):
            return tuple(child)
    return ()


def takes_tables(module: nn.Module) -> bool:
    """Whether the forward of a module has a parameter `position_embeddings`."""
    return "position_embeddings" in inspect.signature(type(module).forward).parameters


def _rotation_functions(layers: tuple[nn.Module, ...]) -> Iterator[tuple[str, str]]:
    classes = dict.fromkeys(cls for layer in layers for module in layer.modules() for cls in type(module).__mro__)
    for name in dict.fromkeys(cls.__module__ for cls in classes):
        if name == "torch" or name.startswith("torch."):
            continue
        module: Any = sys.modules.get(name)
        for function, value in vars(module).items() if module else ():
            if function.startswith("apply_rotary") and callable(value) and _is_known(value):
                yield name, function


def _is_known(function: Any) -> bool:
    return set(inspect.signature(function).parameters) <= _KNOWN_PARAMETERS


def head_dim(attention: nn.Module) -> int | None:
    """Channels of a query head, from the attention module itself; None where it does not say."""
    for name in ("qk_head_dim", "head_dim", "head_size"):
        value = getattr(attention, name, None)
        if isinstance(value, int):
            return value
    return None
