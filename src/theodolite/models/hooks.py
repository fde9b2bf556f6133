"""What a patch hangs on a model: plain objects, so that a patched model can be copied and pickled."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from theodolite.models.rotation import LayerRotation, PositionTables, install
from theodolite.plan import Rotary


class PatchedForward:
    """The patched `rotary_emb.forward`: takes note of the positions, computes nothing yet."""

    def __init__(self, functions: tuple[tuple[str, str], ...], previous: Any) -> None:
        self.functions, self.previous = functions, previous

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> PositionTables:
        # A copy or an unpickled model comes with its hooks, but no one has counted it yet.
        for module_name, name in self.functions:
            install(module_name, name, self)
        return PositionTables(position_ids, x.device)


class SelectRotation:
    """Before a decoder layer: the tables of this forward become the rotation of this layer."""

    def __init__(self, rotary: Rotary | None) -> None:
        self.rotary = rotary
        self.inv_freq = () if rotary is None else tuple(rotary.inv_freq().tolist())

    def __call__(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        for name, value in kwargs.items():
            if isinstance(value, PositionTables):
                # torch hands a dict of this call alone.
                kwargs[name] = self._of(value)
        if any(isinstance(value, PositionTables) for value in args):
            args = tuple(self._of(value) if isinstance(value, PositionTables) else value for value in args)
        return args, kwargs

    def _of(self, tables: PositionTables) -> LayerRotation:
        return LayerRotation(self.rotary, None if self.rotary is None else tables.of(self.rotary, self.inv_freq))


class CheckRotation:
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
