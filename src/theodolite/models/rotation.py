"""What travels through a patched model in place of cos and sin, and the function that turns by it."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from theodolite.encodings.rotate.tables import Tables, tables_of
from theodolite.kernels import rotate
from theodolite.plan import Rotary

Q = TypeVar("Q", Tensor, None)
K = TypeVar("K", Tensor, None)

# Families that turn (B, S, H, D) by a function without `unsqueeze_dim`; the others of that form have (B, H, S, D).
_TOKENS_FIRST = frozenset(f"transformers.models.{name}.modeling_{name}" for name in ("llama4", "gptj", "codegen"))
_TABLE_NAMES = ("cos", "sin", "freqs_cis")
_IGNORED_NAMES = ("position_ids", "unsqueeze_dim")


class Carrier:
    """Stands where transformers has `(cos, sin)`: unpacks into two, and fails at any arithmetic."""

    def __iter__(self) -> Iterator[Carrier]:
        return iter((self, self))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"this model is patched, and its code asked for .{name} of cos, sin or freqs_cis, which a patched model "
            "does not compute: this family uses them in a way that the patch does not know; unpatch(model) restores it"
        )


class PositionTables(Carrier):
    """The tables of one forward: each distinct rotary encoding is computed once, when its first layer asks.

    Args:
        positions: (1, S), (B, S), or (axes, B, S) for multi-axis encodings.
        device: where the tables are put.
    """

    def __init__(self, positions: Tensor, device: torch.device) -> None:
        self.positions, self.device = positions, device
        self._tables: dict[Rotary, Tables] = {}

    def of(self, rotary: Rotary, inv_freq: Sequence[float]) -> Tables:
        """The tables of one encoding, whose frequencies are worked out already, at the positions of this forward."""
        tables = self._tables.get(rotary)
        if tables is None:
            positions = _fit_axes(self.positions, rotary)
            tables = tables_of(rotary, inv_freq, positions, amplitude=True, device=self.device)
            self._tables[rotary] = tables
        return tables

    def to(self, device: Any, *args: Any, **kwargs: Any) -> PositionTables:
        """The same for another device; nothing is moved until a layer asks."""
        device = torch.device(device)
        return self if device == self.device else PositionTables(self.positions, device)


def _fit_axes(positions: Tensor, rotary: Rotary) -> Tensor:
    if rotary.mrope_section is None:
        return positions
    # Text alone has the same position on every axis.
    return positions.expand(len(rotary.mrope_section), -1, -1) if positions.dim() == 2 else positions


class LayerRotation(Carrier):
    """The rotation of one layer, or of all that turn alike, at the positions of this forward.

    `used` tells whether a layer's code has turned by it.

    Args:
        rotary: the encoding; None turns nothing (NoPE).
        tables: its cos and sin.
    """

    def __init__(self, rotary: Rotary | None, tables: Tables | None) -> None:
        self.rotary, self.tables = rotary, tables
        self.used = False

    def to(self, device: Any, *args: Any, **kwargs: Any) -> LayerRotation:
        """The same with its tables on another device."""
        if self.tables is not None:
            # Whoever moves the arguments of a layer hands it this same object, so `used` still tells the truth.
            self.tables = Tables(self.tables.cos.to(device), self.tables.sin.to(device))
        return self

    def turn(self, q: Q, k: K, *, heads_first: bool) -> tuple[Q, K]:
        """Turn queries and keys, whole heads or only the slices of them that turn; either may be None."""
        self.used = True
        rotary, tables = self.rotary, self.tables
        if rotary is None or tables is None:
            return q, k
        for x in (q, k):
            if x is not None and x.size(-1) not in (rotary.head_dim, rotary.rotary_dim):
                raise ValueError(
                    f"rotary_dim: the plan turns {rotary.rotary_dim} channels of a head of {rotary.head_dim}; "
                    f"this model hands over {x.shape[-1]} channels to turn"
                )
        return rotate(
            q,
            k,
            tables.cos,
            tables.sin,
            interleaved=rotary.interleaved,
            rotary_dim=rotary.rotary_dim,
            trailing=rotary.trailing,
            heads_first=heads_first,
        )


class Dispatcher:
    """Replaces `apply_rotary_pos_emb` of a modeling module: ours for our tables, the original for tensors.

    Args:
        module: the modeling module of transformers.
        name: the function's name in it.
    """

    def __init__(self, module: ModuleType, name: str) -> None:
        self.module, self.name = module, name
        self.original: Callable[..., Any] = getattr(module, name)
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        names = self.parameters = tuple(inspect.signature(self.original).parameters)
        # Where each stands in a call.
        self.tables = tuple(at for at, name in enumerate(names) if name in _TABLE_NAMES)
        self.first, self.last = self.tables[0], self.tables[-1]
        self.turned = tuple(at for at, name in enumerate(names) if name not in (*_TABLE_NAMES, *_IGNORED_NAMES))
        self.layout = names.index("unsqueeze_dim") if "unsqueeze_dim" in names else len(names)
        self.least = 1 + max((*self.tables, *self.turned))
        self.default_layout = 2 if module.__name__ in _TOKENS_FIRST else 1
        functools.update_wrapper(self, self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._in_order(args, kwargs) if kwargs or len(args) < self.least else args
        rotation = given[self.first]
        if not isinstance(rotation, LayerRotation) or given[self.last] is not rotation:
            if any(isinstance(given[at], Carrier) for at in self.tables):
                raise RuntimeError(
                    f"{self.name}: rotary tables of a patched model reached attention outside its decoder layers; "
                    "call the model, not a part of it, or unpatch(model) first"
                )
            return self.original(*args, **kwargs)
        layout = given[self.layout] if len(given) > self.layout else self.default_layout
        if layout not in (1, 2):
            raise RuntimeError(
                f"{self.name}: got unsqueeze_dim={layout}; a patched model turns (B, H, S, D) or (B, S, H, D)"
            )
        if len(self.turned) == 1:
            return rotation.turn(given[self.turned[0]], None, heads_first=layout == 1)[0]
        q, k = self.turned
        return rotation.turn(given[q], given[k], heads_first=layout == 1)

    def _in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments in the order of the parameters, None for those that are left out."""
        named = {"unsqueeze_dim": self.default_layout, **dict(zip(self.parameters, args, strict=False)), **kwargs}
        return tuple(named.get(name) for name in self.parameters)


_LOCK = threading.Lock()


def install(module_name: str, name: str, user: Any) -> None:
    """Put a dispatcher in the module under `name`, once, and count `user` among those that need it."""
    module = import_module(module_name)
    present = getattr(module, name)
    if isinstance(present, Dispatcher) and user in present.users:
        return
    with _LOCK:
        present = getattr(module, name)
        if not isinstance(present, Dispatcher):
            present = Dispatcher(module, name)
            setattr(module, name, present)
        present.users.add(user)


def release(module_name: str, name: str, user: Any) -> None:
    """Take `user` off the count; the last one gone, the original function stands there again."""
    module = import_module(module_name)
    with _LOCK:
        present = getattr(module, name)
        if isinstance(present, Dispatcher):
            present.users.discard(user)
            if not present.users:
                setattr(module, name, present.original)
