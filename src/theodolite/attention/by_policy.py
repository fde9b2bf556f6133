"""Attention under a policy, on the quickest path that gives what `attend_plainly` gives."""

from __future__ import annotations

import contextlib
import logging
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from theodolite.attention import flex
from theodolite.attention.blocks import Given, attend_in_blocks
from theodolite.attention.distance import Span, attend_by_distance, curve_of
from theodolite.attention.flex import attend_by_flex
from theodolite.attention.plain import check_attention, scale_of
from theodolite.encodings.bias.content import full_precision
from theodolite.encodings.policy import Order, Policy
from theodolite.encodings.rotate.axial import PatchRotate
from theodolite.encodings.rotate.lengths import Lengths
from theodolite.encodings.shared import SharedTables
from theodolite.positions.visible import require_visible

_LOGGER = logging.getLogger("theodolite")
_said: set[str] = set()


class Path(NamedTuple):
    """How attention is worked out, and why so.

    `name` is "fused" (`scaled_dot_product_attention` without a mask, or causal), "distance" (the same in blocks of
    queries, under a mask that is a view of one vector per head), or "blocks" (the same, or a softmax written out,
    under a mask that is made for a block at a time), or "flex" (FlexAttention, on a GPU); a module with a map of
    distances has "pieces".
    All need memory linear in the tokens, forward and backward.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def attend_by_policy(
    policy: Policy,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    k_positions: Tensor | None = None,
    *,
    x: Tensor | None = None,
    visible: Tensor | None = None,
    order: Order | None = None,
    lengths: Lengths | None = None,
    sinks: Tensor | None = None,
    q_state: Tensor | None = None,
    k_state: Tensor | None = None,
    tables: tuple[SharedTables, SharedTables | None] | None = None,
    turned: bool = False,
) -> Tensor:
    """What `attend_plainly` gives, with memory linear in the tokens, forward and backward; `path_of` says how.

    Args:
        q: (B, H, Sq, D), before it is turned, as k (B, Hkv, Sk, D); v (B, Hkv, Sk, E).
        tables: those of queries and of keys in this forward, which layers share; made of the positions by default.
        turned: keys and values are turned already, as a cache keeps them; those of keys are then not needed.
        others: as in `attend_plainly`.

    Returns:
        (B, H, Sq, E) in the dtype of v.

    Raises:
        ValueError: as `attend_plainly`.
    """
    k_positions = q_positions if k_positions is None else k_positions
    check_attention(policy, q, k, v, q_positions, k_positions, sinks, visible)
    path, span = _choose(policy, q_positions, k_positions, visible, order, sinks, (q.device, q.dtype))
    if path.name == "blocks":
        _say_once(policy, path)
    if tables is None:
        of_keys = None if turned else SharedTables(k_positions, lengths=lengths, device=q.device)
        tables = SharedTables(q_positions, lengths=lengths, device=q.device), of_keys
    q_tables, k_tables = tables
    scale = scale_of(policy, q)
    given = None
    if path.name in ("blocks", "flex"):
        if visible is not None:
            visible = require_visible(visible, q.shape[2], k.shape[2])
        q_order, k_order = order if isinstance(order, tuple) else (order, order)
        if x is not None and k_state is None and policy.bias is not None and "k_state" in policy.bias.reads:
            q_state, k_state = _state_of(policy, x, k_positions)
        given = Given(q, k, q_positions, k_positions, x, visible, q_order, k_order, sinks, q_state, k_state)
    turned_q, _ = policy.turn(q, None, q_tables)
    turned_k, turned_v = k, v
    if k_tables is not None and not turned:
        _, turned_k = policy.turn(None, k, k_tables)
        turned_v = policy.turn_values(v, k_tables)
    turned_q, turned_k, turned_v, unlowered = _beside_autocast(turned_q, turned_k, turned_v)
    added = None
    with unlowered:
        if given is not None and path.name == "flex":
            out = attend_by_flex(policy, turned_q, turned_k, turned_v, given, scale)
        elif given is not None:
            out, added = attend_in_blocks(policy, turned_q, turned_k, turned_v, given, scale)
        elif span is not None:
            curve = curve_of(policy, span, q.device, q.dtype)
            out = attend_by_distance(turned_q, turned_k, turned_v, curve, span, policy.mask, scale)
        else:
            out = scaled_dot_product_attention(
                turned_q,
                turned_k,
                turned_v,
                is_causal=policy.mask.causal and q.shape[2] > 1,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
    out = policy.turn_output_back(out, q_tables)
    if added is not None and added.shape != out.shape:
        raise ValueError(f"v: got {v.shape[-1]} channels; the policy's vectors for values have {added.shape[-1]}")
    return (out if added is None else out + added).to(v.dtype)


def path_of(
    policy: Policy,
    q_positions: Tensor,
    k_positions: Tensor | None = None,
    *,
    visible: Tensor | None = None,
    order: Order | None = None,
    sinks: Tensor | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Path:
    """The path that `attend_by_policy` takes for these arguments, with q on `device` in `dtype`."""
    k_positions = q_positions if k_positions is None else k_positions
    return _choose(policy, q_positions, k_positions, visible, order, sinks, (torch.device(device), dtype))[0]


def _choose(
    policy: Policy,
    q_positions: Tensor,
    k_positions: Tensor,
    visible: Tensor | None,
    order: Order | None,
    sinks: Tensor | None,
    of_q: tuple[torch.device, torch.dtype],
) -> tuple[Path, Span | None]:
    """The path, and the span of the positions where it goes by distance."""
    path, span = _choose_here(policy, q_positions, k_positions, visible, order, sinks)
    if path.name != "fused" and flex.takes(policy, *of_q, sinks):
        return Path("flex", "FlexAttention has a kernel for it on this device"), None
    return path, span


def _choose_here(
    policy: Policy,
    q_positions: Tensor,
    k_positions: Tensor,
    visible: Tensor | None,
    order: Order | None,
    sinks: Tensor | None,
) -> tuple[Path, Span | None]:
    """The same without FlexAttention."""
    bias, mask = policy.bias, policy.mask
    for there, reason in (
        (bias is not None and not bias.by_distance, f"{type(bias).__name__} is no function of the distance alone"),
        (bias is not None and bias.adds_values, f"{type(bias).__name__} adds to the output, by the weights"),
        (visible is not None, "what is visible differs by pair"),
        (order is not None, "the mask goes by another order than the positions"),
        (sinks is not None, "sinks take part in the softmax"),
        (mask.chunk is not None, "a mask in chunks goes by the place in them"),
    ):
        if there:
            return Path("blocks", reason), None
    if bias is None and not mask.causal and mask.reach is None:
        return Path("fused", "no bias and no mask"), None
    span = _span(policy, q_positions, k_positions)
    if span is None:
        return Path("blocks", "positions do not follow each other one by one, or differ by row"), None
    if _sees_nothing(policy, span):
        return Path("blocks", "a query sees no key"), None
    if bias is None and mask.reach is None and (span.queries == span.keys and span.ahead == 0):
        return Path("fused", "no bias, and causal"), None
    if bias is None and mask.reach is None and span.ahead >= span.keys - 1:
        return Path("distance", "no bias, and every key is seen"), span
    what = "a mask" if bias is None else type(bias).__name__
    return Path("distance", f"{what} that depends on the distance alone"), span


def _span(policy: Policy, q_positions: Tensor, k_positions: Tensor) -> Span | None:
    """Where positions follow each other; None where they do not, or cannot be looked at."""
    if torch.compiler.is_compiling() or isinstance(policy.rotate, PatchRotate):
        return None
    firsts = []
    for positions in (q_positions, k_positions):
        if positions.is_floating_point() or positions.is_meta or positions.dim() == 3 or not positions.shape[-1]:
            return None
        rows = torch.atleast_2d(positions)
        if rows.shape[-1] > 1 and not bool((rows[:, 1:].long() - rows[:, :-1].long() == 1).all()):
            return None
        firsts.append(rows[:, 0].long())
    ahead = firsts[0] - firsts[1]
    if bool((ahead != ahead[0]).any()):
        return None
    return Span(int(ahead[0]), q_positions.shape[-1], k_positions.shape[-1])


def _sees_nothing(policy: Policy, span: Span) -> bool:
    mask, reach = policy.mask, policy.mask.reach
    before_all = mask.causal and span.ahead < 0
    if reach is None:
        return before_all
    return before_all or span.ahead < -reach or span.furthest - (span.keys - 1) > reach


def _beside_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, AbstractContextManager[Any]]:
    """q, k and v as autocast would have them, and a context in which it lowers nothing else.

    It lowers the mask of a fused attention too, and a bias in half precision cannot tell neighbours apart. Elsewhere
    than on the CPU, kernels want the mask in the dtype of the queries, and autocast sees to it.
    """
    if q.device.type != "cpu" or not torch.is_autocast_enabled("cpu") or q.dtype == torch.float64:
        return q, k, v, contextlib.nullcontext()
    dtype = torch.get_autocast_dtype("cpu")
    return q.to(dtype), k.to(dtype), v.to(dtype), full_precision(q.device)


def _state_of(policy: Policy, x: Tensor, k_positions: Tensor) -> tuple[Tensor | None, Tensor | None]:
    if policy.bias is None or x.shape[1] != k_positions.shape[-1]:
        # The bias says what it needs.
        return None, None
    state = policy.bias.state(x)
    return state, state


def _say_once(policy: Policy, path: Path) -> None:
    sentence = f"attention under {policy} takes the slower path, {path}"
    if sentence not in _said:
        _said.add(sentence)
        _LOGGER.warning("theodolite: %s", sentence)
