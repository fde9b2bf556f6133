"""The frequencies that a checkpoint holds, compared with those of the module that it is loaded into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_KEYS = ("inv_freq", "original_inv_freq", "freqs")


def refuse_others(
    state_dict: dict[str, Any], prefix: str, fixed: Sequence[Sequence[float]], plan: str, error_msgs: list[str]
) -> None:
    """Take stored frequencies that are none of the `fixed` out of a state dict, each with an error.

    Args:
        state_dict: what is being loaded.
        prefix: of the module's keys.
        fixed: the sets of frequencies that the module turns by; none where they depend on the length.
        plan: what to call them in the text.
        error_msgs: where the errors go.
    """
    for key in _KEYS:
        stored = state_dict.get(prefix + key)
        if not fixed or not isinstance(stored, Tensor) or not all(_are_others(stored, one) for one in fixed):
            continue
        del state_dict[prefix + key]
        pairs = len(fixed[0])
        if stored.shape[0] != pairs:
            error_msgs.append(
                f"{prefix}{key}: the checkpoint has {stored.shape[0]} frequencies, and {plan} has {pairs}: it is of "
                "another model, whose heads have another width"
            )
            continue
        error_msgs.append(
            f"{prefix}{key}: the checkpoint's frequencies, {stored[0].item():.6g} to {stored[-1].item():.6g}, "
            f"are not those of {plan}, {fixed[0][0]:.6g} to {fixed[0][-1]:.6g}; base or scaling differ, or they were "
            "learned (LeRoPE)"
        )


def _are_others(stored: Tensor, inv_freq: Sequence[float]) -> bool:
    """Whether it is a set of frequencies, and another one; what was never filled is none."""
    if stored.dim() != 1 or not stored.is_floating_point() or stored.numel() == 0:
        return False
    if stored.shape[0] != len(inv_freq):
        return True
    if stored.is_meta:
        return False
    given, true = stored.detach().to("cpu", torch.float64), torch.tensor(inv_freq, dtype=torch.float64, device="cpu")
    if not bool((given.isfinite() & (given >= 0)).all()) or bool((given.diff() > 0).any()) or not given.any():
        return False
    # bfloat16 keeps 8 bits, and what is below its least number is 0 in float16.
    return bool(((given - true).abs() > 2.0**-8 * true + 2.0**-24).any())
