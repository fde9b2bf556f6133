"""What positions, masks and counts must be, checked in the same words everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from theodolite.positions.traced import is_traced

INTEGERS = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
LARGEST_POSITION = 2**24
"""Rotary tables are exact up to it, either way (tokens)."""
_FRACTIONS = (torch.float32, torch.float64)
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
# Beyond it they skip whole numbers.
_HALF_COUNTS_TO = {torch.bfloat16: 256, torch.float16: 2048}
_SHAPES = {0: "()", 1: "(S,)", 2: "(B, S)", 3: "(axes, B, S)"}


def require_positions(name: str, positions: Tensor, *, dims: tuple[int, ...]) -> None:
    """Refuse what cannot be positions.

    Args:
        name: the caller's name of the argument, for the message.
        positions: integers, or float32 or float64 where fractions are meant; half precision cannot count.
        dims: the numbers of dimensions allowed: 1 is (S,), 2 is (B, S), 3 is (axes, B, S).

    Raises:
        ValueError: not a tensor, another dtype or number of dimensions, or a gradient is asked for.
    """
    _require_tensor(name, positions)
    if positions.dtype not in (*INTEGERS, *_FRACTIONS):
        reason = ""
        if positions.dtype in _HALF_COUNTS_TO:
            reason = f"; {positions.dtype} cannot count past {_HALF_COUNTS_TO[positions.dtype]}"
        raise ValueError(f"{name}: got {positions.dtype}; give integers, or float32 or float64 for fractions{reason}")
    if positions.requires_grad:
        raise ValueError(f"{name}: they require a gradient, and positions give none; detach them")
    _require_dims(name, positions, dims)
    if positions.is_floating_point() and can_read_at_once(positions) and not bool(positions.isfinite().all()):
        raise ValueError(f"{name}: got {positions[~positions.isfinite()][0]}; all must be finite")


def require_integers(name: str, positions: Tensor, *, dims: tuple[int, ...] | None = None) -> None:
    """Refuse what is not a tensor of integers (booleans are none), or has another number of dimensions.

    Raises:
        ValueError: as said.
    """
    _require_tensor(name, positions)
    if positions.dtype not in INTEGERS:
        raise ValueError(f"{name}: got {positions.dtype}; give integers")
    if dims is not None:
        _require_dims(name, positions, dims)


def require_mask(name: str, mask: Tensor, *, dims: tuple[int, ...]) -> None:
    """Refuse what is not a tensor of booleans or integers, or has another number of dimensions.

    Raises:
        ValueError: as said. A float mask is refused even where it holds 0 and 1 alone: an additive mask keeps a
            token by 0, which is how the other kind drops it.
    """
    _require_tensor(name, mask)
    if mask.dtype not in (torch.bool, *INTEGERS):
        raise ValueError(
            f"{name}: got {mask.dtype}; give booleans or integers, 0 for padding. A float mask may be an additive "
            "one, where 0 keeps a token: say which with mask != 0 (0 drops) or mask == 0 (0 keeps)"
        )
    _require_dims(name, mask, dims)


def require_count(name: str, number: int, *, least: int) -> None:
    """Refuse what is not a Python integer of at least `least`.

    Raises:
        ValueError: as said.
    """
    if not isinstance(number, int) or isinstance(number, bool):
        raise ValueError(f"{name}: got a {type(number).__name__}; give a Python int")
    if number < least:
        raise ValueError(f"{name}: got {number}; it must be at least {least}")


def require_values(name: str, tensor: Tensor) -> None:
    """Refuse a tensor on the meta device, where the result follows from its values.

    Raises:
        ValueError: as said.
    """
    if tensor.is_meta:
        raise ValueError(f"{name}: got a tensor on the meta device, which has no values, and they are needed here")


def require_reachable(like: Tensor, of: str, **given: Tensor) -> None:
    """Refuse what would be moved to the device of `like`, called `of`, and has no values to move.

    Raises:
        ValueError: as said.
    """
    for name, tensor in given.items():
        if tensor.is_meta and not like.is_meta:
            raise ValueError(
                f"{name}: got a tensor on the meta device, which has no values, and {of} is on {like.device}"
            )


def integers_of(name: str, given: Tensor | Sequence[Any] | int, *, of: str) -> Tensor:
    """A tensor of integers as it is; whole numbers of Python, nested or not, as int64 on the CPU.

    Args:
        of: what there must be, for the message.

    Raises:
        ValueError: anything else, booleans and fractions among it.
    """
    if isinstance(given, Tensor):
        require_integers(name, given)
        return given
    made = tensor_of(name, given, of=of)
    if made.numel():
        require_integers(name, made)
    return made.to(torch.int64)


def tensor_of(name: str, given: Any, *, of: str, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers of Python as a tensor on the CPU, wherever tensors are made by default; a tensor as it is.

    Raises:
        ValueError: no numbers, or rows of different lengths.
    """
    if isinstance(given, Tensor):
        return given
    try:
        return torch.tensor(given, dtype=dtype, device="cpu")
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{name}: got {given!r}; give {of}") from error


def gatherable(tensor: Tensor) -> Tensor:
    """The same numbers in a dtype whose elements torch can gather: it cannot those of wide unsigned integers."""
    return tensor.to(torch.int64) if tensor.dtype in _UNSIGNED else tensor


def can_read(tensor: Tensor) -> bool:
    """Whether the values can be looked at: not on the meta device, and not while a graph is traced or faked."""
    return not tensor.is_meta and not is_traced(tensor)


def can_read_at_once(tensor: Tensor) -> bool:
    """Whether looking at the values makes no device wait: for checks inside a decoding step."""
    return tensor.device.type == "cpu" and can_read(tensor)


def _require_tensor(name: str, positions: Tensor) -> None:
    if not isinstance(positions, Tensor):
        raise ValueError(f"{name}: got a {type(positions).__name__}; they must be a tensor, one number per token")


def _require_dims(name: str, positions: Tensor, dims: tuple[int, ...]) -> None:
    if positions.dim() not in dims:
        allowed = " or ".join(_SHAPES[number] for number in dims)
        raise ValueError(f"{name}: got shape {tuple(positions.shape)}; it must be {allowed}")
