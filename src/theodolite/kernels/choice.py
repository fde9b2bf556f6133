"""Which implementation turns a tensor: the fastest that is there, unless another is asked for."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

from torch import Tensor

from theodolite.kernels import eager, native
from theodolite.kernels.layout import Layout

Turns = Sequence[tuple[Tensor, Tensor]]
Implementation = Callable[[Turns, Tensor, Tensor, "Tensor | None", Layout], None]

NAMES = ("native", "triton", "eager")
_LOGGER = logging.getLogger("theodolite")


def _from_environment() -> str | None:
    name = os.environ.get("THEODOLITE_KERNEL") or None
    if name is not None and name not in NAMES:
        raise ValueError(f"THEODOLITE_KERNEL: got {name!r}; there are {', '.join(NAMES)}")
    return name


# THEODOLITE_KERNEL=eager shows whether a fault is the library's.
_ENVIRONMENT = _from_environment()
_asked: ContextVar[str | None] = ContextVar("theodolite_implementation", default=_ENVIRONMENT)
_said: set[str] = set()


@contextlib.contextmanager
def use(name: str) -> Iterator[None]:
    """Within a `with` block of this thread, turn by one implementation: "native", "triton" or "eager".

    What that one cannot do (tensors of another device, heads with gaps between their channels) the plain one does.

    Raises:
        ValueError: there is none of that name, or it is not there; the message says why.
    """
    if name not in NAMES:
        raise ValueError(f"implementation: got {name!r}; there are {', '.join(NAMES)}")
    reason = _why_not(name)
    if reason is not None:
        raise ValueError(f"implementation: {name} is not there: {reason}")
    token = _asked.set(name)
    try:
        yield
    finally:
        _asked.reset(token)


def asked() -> str | None:
    """What `use`, or the environment variable THEODOLITE_KERNEL, asks for."""
    return _asked.get()


def active() -> str:
    """What turns tensors on the CPU: "native" or "eager"."""
    return "eager" if asked() == "eager" or native.load() is None else "native"


def pick(turns: Turns, cos: Tensor, sin: Tensor, layout: Layout) -> Implementation:
    """The implementation for a call in the canonical form."""
    x, name = turns[0][1], asked()
    if name == "eager" or x.is_meta:
        return eager.rotate_into
    if x.is_cpu and name in (None, "native"):
        if native.load() is None:
            _say_once("native", f"rotations on the CPU take the slower path: {native.why_not()}")
        elif native.supports(turns, cos, sin, layout):
            return native.rotate_into
    elif name == "triton" or x.device.type in ("cuda", "xpu"):
        if _why_not("triton") is None:
            from theodolite.kernels import triton_rotation

            if triton_rotation.supported(x) or name == "triton":
                return triton_rotation.rotate_into
        else:
            _say_once("triton", f"rotations on {x.device.type} take the slower path: {_why_not('triton')}")
    return eager.rotate_into


def describe() -> list[tuple[str, str]]:
    """What rotates where, in words, for a person."""
    library = native.load()
    if library is None:
        cpu = f"plain torch: {native.why_not()}"
    elif asked() == "eager":
        cpu = "plain torch: asked for by THEODOLITE_KERNEL or use()"
    else:
        threads = "threads of torch" if library.threaded else "one thread (torch lends its own from 2.10)"
        cpu = f"native, {library.chosen_set}, {threads}"
    reason = _why_not("triton") or ("asked for eager" if asked() == "eager" else None)
    gpu = "triton" if reason is None else f"plain torch: {reason}"
    return [("rotation on the CPU", cpu), ("rotation on a GPU", gpu)]


def _why_not(name: str) -> str | None:
    if name == "native":
        return native.why_not()
    if name == "triton" and importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    return None


def _say_once(what: str, sentence: str) -> None:
    if what not in _said:
        _said.add(what)
        _LOGGER.warning("theodolite: %s; `theodolite info` says how to get the faster one", sentence)
