"""Attention under any policy by FlexAttention: on a GPU one kernel, forward and backward, and no tensor of pairs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from theodolite.attention.blocks import Given
from theodolite.encodings.policy import Policy

# FlexAttention is compiled there. On the CPU it has no backward, and a forward that is slower than blocks.
DEVICES = ("cuda",)
SWITCH = "THEODOLITE_FLEX"


def takes(policy: Policy, device: torch.device, dtype: torch.dtype, sinks: Tensor | None) -> bool:
    """Whether FlexAttention is there for these, and can say the policy pair by pair."""
    bias = policy.bias
    said = bias is None or (bias.by_pair and not bias.adds_values)
    return device.type in DEVICES and dtype != torch.float64 and sinks is None and said and _is_there()


def attend_by_flex(policy: Policy, q: Tensor, k: Tensor, v: Tensor, given: Given, scale: float) -> Tensor:
    """Attention of q (B, H, S, D) over k (B, G, T, D) and v (B, G, T, E), turned already: (B, H, S, E)."""
    from torch.nn.attention.flex_attention import create_block_mask

    at = given.on(q.device)
    order = None if at.q_order is None or at.k_order is None else (at.q_order, at.k_order)
    mask = None
    if policy.mask.causal or policy.mask.reach is not None or at.visible is not None:
        mod = policy.mask_mod(at.q_positions, at.k_positions, visible=at.visible, order=order)
        rows = max(_rows(x) for x in (at.q_positions, at.k_positions, at.visible, at.q_order, at.k_order))
        heads = 1 if at.visible is None or at.visible.dim() < 4 else at.visible.shape[1]
        make = _compiled(create_block_mask) if q.is_cuda else create_block_mask
        sizes = rows if rows > 1 else None, heads if heads > 1 else None, q.shape[2], k.shape[2]
        mask = make(mod, *sizes, device=str(q.device))
    score_mod = policy.score_mod(at.q_positions, at.k_positions, **at.content())
    out: Tensor = _kernel(q.is_cuda)(
        q, k, v, score_mod=score_mod, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out


def _rows(x: Tensor | None) -> int:
    return 1 if x is None or x.dim() < 2 else x.shape[0]


def _is_there() -> bool:
    """Whether it can be compiled here, and is not switched off by THEODOLITE_FLEX=0."""
    return os.environ.get(SWITCH) != "0" and (find_spec("triton") is not None or "cpu" in DEVICES)


def _kernel(compiled: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    plain: Callable[..., Any] = flex_attention
    return _compiled(plain) if compiled else plain


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
