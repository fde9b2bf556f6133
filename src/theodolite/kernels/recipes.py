"""Calls of the native rotation that were checked once: the next one whose tensors lie alike goes straight to it.

A decoding step turns a few thousand numbers, which takes a microsecond; checking what it was given takes ten. All that
a check depends on is in the key of its recipe: shapes, strides, dtypes and options. What else matters (devices,
gradients, graphs) is looked at every time, and where the tensors begin, by the library itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from theodolite.kernels import native
from theodolite.kernels.choice import asked
from theodolite.kernels.layout import Layout
from theodolite.kernels.operands import Tables, canonical
from theodolite.kernels.outputs import check_memory
from theodolite.kernels.recording import is_watched

Key = tuple[Any, ...]

# Every length of a prompt is a recipe of its own.
_MOST = 4096
_NATIVE = (None, "native")
_empty_like = torch.empty_like


class Recipe:
    """A checked call.

    Args:
        made: how the library was told of it.
        heads_first: how memory that may be shared is looked at.
        inplace: it writes where it reads.
    """

    __slots__ = ("address", "apart", "apart_address", "function", "heads_first", "inplace", "made", "made_apart")

    def __init__(self, made: native.Recipe, *, heads_first: bool, inplace: bool) -> None:
        self.made, self.heads_first, self.inplace = made, heads_first, inplace
        self.function, self.address = made.function, made.address
        # Slices of one projection lie between each other; that they share nothing was seen at this distance.
        self.apart: int | None = None
        self.made_apart = native.Call.from_buffer_copy(made.call)
        self.made_apart.apart = True
        self.apart_address = native.address_of(self.made_apart)


_recipes: dict[Key, Recipe] = {}


def attempt(
    q: Tensor | None,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    out_q: Tensor | None,
    out_k: Tensor | None,
    options: Key,
) -> tuple[Key | None, tuple[Tensor | None, Tensor | None] | None]:
    """Turn by the recipe of a call like this one.

    Returns:
        The key of the call, None where it is none for recipes: ordinary tensors on the CPU that ask for no gradient
        and that nothing watches. And q and k turned, None where there is no recipe (yet).

    Raises:
        ValueError: a position has no row, or memory is shared; nothing is written then.
    """
    # Written out for the usual call: every look at a tensor is a twentieth of a microsecond.
    if is_watched():
        return None, None
    recording = torch.is_grad_enabled()
    if q is not None and k is not None and positions is out_q is out_k is None:
        if not (
            type(q) is type(k) is type(cos) is type(sin) is Tensor
            and q.is_cpu
            and k.is_cpu
            and cos.is_cpu
            and sin.is_cpu
            and not (q.is_neg() or k.is_neg() or cos.is_neg() or sin.is_neg())
            and not (recording and (q.requires_grad or k.requires_grad or cos.requires_grad or sin.requires_grad))
        ):
            return None, None
        key: Key = (
            q.shape,
            q.stride(),
            q.dtype,
            k.shape,
            k.stride(),
            k.dtype,
            cos.shape,
            cos.stride(),
            cos.dtype,
            sin.shape,
            sin.stride(),
            sin.dtype,
            options,
        )
    else:
        tensors = q, k, cos, sin, positions, out_q, out_k
        for x in tensors:
            if x is not None and (
                type(x) is not Tensor or not x.is_cpu or x.is_neg() or (recording and x.requires_grad)
            ):
                return None, None
        key = (*(None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors), options)
    recipe = _recipes.get(key)
    if recipe is None or asked() not in _NATIVE:
        return key, None
    return key, _follow(recipe, q, k, cos, sin, positions, out_q, out_k)


def remember(
    key: Key,
    xs: Sequence[Tensor | None],
    outs: Sequence[Tensor | None],
    tables: Tables,
    layout: Layout,
    *,
    heads_first: bool,
    inplace: bool,
) -> None:
    """Keep the recipe of a call that has passed every check, if it is one that the library takes whole.

    Args:
        outs: where it went; new tensors lie as `empty_like` lays them.
    """
    library = native.load()
    turns = [
        (canonical(out, heads_first), canonical(x, heads_first))
        for x, out in zip(xs, outs, strict=True)
        if x is not None and out is not None
    ]
    first = turns[0][1]
    alike = all((x.dtype, x.shape[0], x.shape[3]) == (first.dtype, first.shape[0], first.shape[3]) for _, x in turns)
    if (
        library is None
        or asked() not in _NATIVE
        or not alike
        or not native.supports(turns, tables.cos, tables.sin, layout)
    ):
        return
    if len(_recipes) >= _MOST:
        _recipes.clear()
    made = native.Recipe(library, turns, *tables, layout, second=xs[0] is None)
    _recipes[key] = Recipe(made, heads_first=heads_first, inplace=inplace)


def _follow(
    recipe: Recipe,
    q: Tensor | None,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    out_q: Tensor | None,
    out_k: Tensor | None,
) -> tuple[Tensor | None, Tensor | None] | None:
    if recipe.inplace:
        out_q, out_k = q, k
    written = recipe.inplace or out_q is not None or out_k is not None
    at_q = at_out_q = at_k = at_out_k = None
    if q is not None:
        at_q = q.data_ptr()
        if out_q is None:
            out_q = _empty_like(q)
        at_out_q = at_q if out_q is q else out_q.data_ptr()
    if k is not None:
        at_k = k.data_ptr()
        if out_k is None:
            out_k = _empty_like(k)
        at_out_k = at_k if out_k is k else out_k.data_ptr()
    rest = cos.data_ptr(), sin.data_ptr(), None if positions is None else positions.data_ptr()
    known = recipe.apart is not None and at_q is not None and at_k is not None and at_k - at_q == recipe.apart
    address = recipe.apart_address if known else recipe.address
    outcome = recipe.function(address, at_q, at_out_q, at_k, at_out_k, *rest)
    if outcome == native.OVERLAP:
        named = {"q": q, "k": k}
        outputs = {"q": out_q, "k": out_k}
        check_memory(named, outputs, {"cos": cos, "sin": sin, "positions": positions}, recipe.heads_first)
        if recipe.inplace and at_q is not None and at_k is not None:
            recipe.apart = at_k - at_q
        outcome = recipe.function(recipe.apart_address, at_q, at_out_q, at_k, at_out_k, *rest)
    if outcome == native.WITHOUT_MEMORY:
        return None
    if outcome:
        native.refuse(outcome, cos, positions)
    if written:
        # What autograd saved of them is not there any more.
        increment_version([x for x in (out_q, out_k) if x is not None])
    return out_q, out_k
