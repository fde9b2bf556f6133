"""What a patch hangs on a model: plain objects, so that a patched model can be copied and pickled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from theodolite.models.rotation import Carrier, LayerRotation, PositionTables, install
from theodolite.plan import Rotary


class SelectRotation:
    """Before a decoder layer: the tables of this forward become the rotation of this layer."""

    def __init__(self, rotary: Rotary | None) -> None:
        self.rotary = rotary
        self.inv_freq = () if rotary is None else tuple(rotary.inv_freq().tolist())

    def __call__(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        for name, value in kwargs.items():
            if isinstance(value, PositionTables):
                # torch hands a dict of this call alone.
                kwargs[name] = self.of(value)
        if any(isinstance(value, PositionTables) for value in args):
            args = tuple(self.of(value) if isinstance(value, PositionTables) else value for value in args)
        return args, kwargs

    def of(self, tables: PositionTables) -> LayerRotation:
        """The rotation of this layer in a forward."""
        return LayerRotation(self.rotary, None if self.rotary is None else tables.of(self.rotary, self.inv_freq))


class PatchedForward:
    """The patched `rotary_emb.forward`: takes note of the positions.

    Args:
        functions: those that turn by what it returns.
        previous: the `forward` that stood in its place on this module, if there was one.
        common: the rotation of all layers; None where each is to select its own.
    """

    def __init__(self, functions: tuple[tuple[str, str], ...], previous: Any, common: SelectRotation | None) -> None:
        self.functions, self.previous, self.common = functions, previous, common

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Carrier:
        # A copy or an unpickled model comes with its hooks, but no one has counted it yet.
        for module_name, name in self.functions:
            install(module_name, name, self)
        tables = PositionTables(position_ids, x.device)
        return tables if self.common is None else self.common.of(tables)


class CheckRotation:
    """After a decoder layer: a rotation that the plan asks for and the layer's code left out is an error.

    What a layer's code does is the same in every forward, so that the first is looked at and the hook then goes: a
    layer without hooks is called faster by torch.
    """

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, LayerRotation) and value.rotary is not None:
                if not value.used:
                    raise RuntimeError(
                        f"layers[{self.index}].rotate: the plan turns queries and keys in this layer, and the model's "
                        "code for it does not; give rotate=None for this layer"
                    )
                # The next layer may be given the same.
                value.used = False
                if not torch.compiler.is_compiling():
                    remove_hooks(layer, CheckRotation)


def remove_hooks(layer: nn.Module, *kinds: type) -> None:
    """Take the hooks of these kinds off a layer, also while it runs them and from several threads."""
    for hooks, with_kwargs in (
        (layer._forward_pre_hooks, layer._forward_pre_hooks_with_kwargs),
        (layer._forward_hooks, layer._forward_hooks_with_kwargs),
    ):
        for key in [key for key, hook in list(hooks.items()) if isinstance(hook, kinds)]:
            hooks.pop(key, None)
            with_kwargs.pop(key, None)
