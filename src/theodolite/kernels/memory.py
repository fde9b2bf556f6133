"""Whether two tensors share an element: what is written must be nothing else that is read."""

from __future__ import annotations

from typing import cast

from torch import Tensor


def share_elements(one: Tensor, other: Tensor) -> bool:
    """Whether they may share one: exact for views with equal strides (slices of a fused projection, whose elements
    stand in turn), and for others whether the stretches of memory that they lie in meet.

    Both are on one device.
    """
    if not stretches_meet(one, other):
        return False
    size, offset = one.element_size(), other.data_ptr() - one.data_ptr()
    if one.dim() != other.dim() or size != other.element_size() or offset % size:
        return True
    axes = list(zip(_strides(one, other), one.shape, other.shape, strict=True))
    if any(stride is None for stride, *_ in axes) or overlaps_itself(one) or overlaps_itself(other):
        return True
    return _meet(offset // size, sorted(cast(list[tuple[int, int, int]], axes), reverse=True))


def require_aligned(**tensors: Tensor | None) -> None:
    """Refuse memory that begins within an element, as that of a buffer from elsewhere may.

    Raises:
        ValueError: it names the argument.
    """
    for name, x in tensors.items():
        if x is not None and x.data_ptr() % x.element_size():
            raise ValueError(f"{name}: it begins within an element of memory; give a copy")


def stretches_meet(one: Tensor, other: Tensor) -> bool:
    """Whether the memory from the first to the last element of the one meets that of the other."""
    begin, other_begin = one.data_ptr(), other.data_ptr()
    end, other_end = begin + span(one) * one.element_size(), other_begin + span(other) * other.element_size()
    return one.numel() > 0 and other.numel() > 0 and begin < other_end and other_begin < end


def span(x: Tensor) -> int:
    """Elements from the first to behind the last, as they lie in memory."""
    if x.numel() == 0:
        return 0
    return 1 + sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True))


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements may stand in one place: it is expanded, or its axes run into each other."""
    reached = 1
    for stride, length in sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1):
        if stride < reached:
            return True
        reached = stride * (length - 1) + reached
    return False


def _strides(one: Tensor, other: Tensor) -> list[int | None]:
    """The stride of each dimension where both have the same, None where they do not; one element has any."""
    both = zip(one.shape, one.stride(), other.shape, other.stride(), strict=True)
    return [s if s == t or m == 1 else t if n == 1 else None for n, s, m, t in both]


def _meet(offset: int, axes: list[tuple[int, int, int]]) -> bool:
    """Whether steps along the axes (stride, length, other's length), from -(other's length) to the length, make up the
    offset between the first elements."""
    axes = [axis for axis in axes if axis[1] > 1 or axis[2] > 1]

    def reached(left: int, axis: int) -> bool:
        if axis == len(axes):
            return left == 0
        stride, ours, others = axes[axis]
        near = left // stride
        return any(-others < step < ours and reached(left - step * stride, axis + 1) for step in {near, near + 1})

    return reached(offset, 0)
