"""Pictures of what rounding does to positions: one function for each page, named as the page is."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure
from torch import Tensor

from draw.style import DASHES, HUES, MUTED, counted, panels
from theodolite import Rotary, RotaryEmbedding
from theodolite.encodings import StoredRotary, rerotate

__all__ = ["quantised_tables", "rerotation"]


def quantised_tables() -> Figure:
    """The largest error of stored entries by position, against float64."""
    figure, axes = panels(height=3.2)
    plan = Rotary(head_dim=128, rope_theta=10_000.0)
    inv_freq = torch.from_numpy(plan.inv_freq())
    starts = torch.arange(0, 131_072, 4096)
    stored = {
        "StoredRotary, int8": StoredRotary(plan, length=131_072 + 256),
        "StoredRotary, bfloat16": StoredRotary(plan, length=131_072 + 256, dtype=torch.bfloat16),
        "StoredRotary, float16": StoredRotary(plan, length=131_072 + 256, dtype=torch.float16),
        "RotaryEmbedding": RotaryEmbedding(plan),
    }
    stretches = starts[:, None] + torch.arange(256)
    for number, (name, rope) in enumerate(stored.items()):
        errors = [_error(rope.tables(at).cos, at, inv_freq) for at in stretches]
        axes.plot(starts, errors, color=HUES[number], linestyle=DASHES[number], label=name)
    errors = [_error((at[:, None].float() * inv_freq.float()).cos(), at, inv_freq) for at in stretches]
    axes.plot(starts, errors, color=MUTED, linestyle=DASHES[5], label="angles in float32")
    axes.set_yscale("log")
    counted(axes, 0, 32_768, 65_536, 98_304, 131_072)
    axes.set(title="error of cos, the largest of 256 positions", xlabel="position (tokens)", ylabel="error")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _error(cos: Tensor, positions: Tensor, inv_freq: Tensor) -> float:
    return float((cos.double() - (positions[:, None].double() * inv_freq).cos()).abs().max())


def rerotation() -> Figure:
    """How far moved keys are from keys rotated afresh, by the number of moves that they were moved in."""
    figure, axes = panels(height=3.2)
    plan, tokens, steps = Rotary(head_dim=64, rope_theta=10_000.0), 256, 512
    rope, positions = RotaryEmbedding(plan), torch.arange(steps, steps + tokens)
    plain = torch.randn(1, 2, tokens, 64, generator=torch.Generator().manual_seed(0))
    for number, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        _, k = rope(None, plain.to(dtype), positions)
        moved, errors = k, []
        for step in range(1, steps + 1):
            moved = rerotate(moved, rotary=plan, by=-1)
            errors.append(_distance(moved, rope(None, plain.double(), positions - step)[1]))
        at_once = _distance(rerotate(k, rotary=plan, by=-steps), rope(None, plain.double(), positions - steps)[1])
        name, colour = str(dtype).removeprefix("torch."), HUES[number]
        axes.plot(range(1, steps + 1), errors, color=colour, linestyle=DASHES[number], label=f"{name}, by -1 each")
        axes.plot(steps, at_once, color=colour, linestyle="none", marker="o", label=f"{name}, once by -{steps}")
    axes.set_yscale("log")
    axes.set_xscale("log", base=2)
    axes.set_xticks((1, 8, 64, 512), ("1", "8", "64", "512"))
    axes.minorticks_off()
    axes.set(title="moved keys against keys rotated afresh", xlabel="moves so far", ylabel="relative error")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _distance(k: Tensor, true: Tensor) -> float:
    return float((k.double() - true).norm() / true.norm())
