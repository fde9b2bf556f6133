"""Pictures of what is stretched, multiplied, composed or mapped: one function for each page, named as the page."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from matplotlib.figure import Figure

from draw.style import DASHES, HUES, INK, MUTED, counted, panels
from theodolite import Rotary, RotaryEmbedding
from theodolite.attention import attend_plainly
from theodolite.encodings import ALiBi, LogN, LogScale, Policy, PowerScale, SSMax, Temperature
from theodolite.plan import NTK, DynamicNTK, Linear, Llama3, Scaling, YaRN
from theodolite.positions.dual_chunk import DualChunk
from theodolite.positions.relative import LeakyReRoPE, LMInfinite, RelativeMap, ReRoPE, SelfExtend

__all__ = ["nope_and_hybrids", "positions", "scalings", "score_scales"]


def scalings() -> Figure:
    """By how much each pair is slowed down."""
    figure, (left, right) = panels(2)
    trained = 8192
    plain = Rotary(head_dim=128, rope_theta=500_000.0)
    fixed: dict[str, Scaling] = {
        "Linear(4)": Linear(factor=4),
        "NTK(4)": NTK(factor=4),
        "YaRN(4)": YaRN(factor=4, original_max_position_embeddings=trained),
        "Llama3(4)": Llama3(factor=4, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=trained),
    }
    for number, (name, scaling) in enumerate(fixed.items()):
        slowed = plain.inv_freq() / _scaled(plain, scaling).inv_freq()
        left.plot(plain.wavelengths(), slowed, color=HUES[number], linestyle=DASHES[number], label=name)
    left.set(title="four scalings by 4", ylabel="times slower")
    dynamic = _scaled(plain, DynamicNTK(factor=4, original_max_position_embeddings=trained))
    for number, length in enumerate((8192, 16384, 32768)):
        slowed = plain.inv_freq() / dynamic.inv_freq(length=length)
        name = f"{length // 1024}K tokens"
        right.plot(plain.wavelengths(), slowed, color=HUES[number], linestyle=DASHES[number], label=name)
    right.set(title="DynamicNTK(4) by length")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.axvline(trained, color=MUTED, linewidth=0.8)
        axes.text(trained * 1.25, 0.93 * axes.get_ylim()[1], "trained length", color=MUTED, va="top")
        axes.set_xlabel("tokens per turn, unscaled")
    left.legend(loc="lower right")
    right.legend(loc="upper left")
    return figure


def _scaled(plain: Rotary, scaling: Scaling) -> Rotary:
    return Rotary(head_dim=plain.head_dim, rope_theta=plain.rope_theta, scaling=scaling)


def score_scales() -> Figure:
    """The factor of a query by its position."""
    figure, (left, right) = panels(2)
    positions = torch.unique(torch.logspace(0, 20, 600, base=2).long()) - 1
    scales = {
        "Temperature (Llama 4)": Temperature(beta=0.1, length=8192, shift=1),
        "Temperature (Ministral 3)": Temperature(beta=0.1, length=16384),
        "LogN(8192)": LogN(8192),
        "LogScale (Inkling 2)": LogScale(alpha=0.1, length=128_000),
        "PowerScale (Beam)": PowerScale(exponent=0.1, length=2048),
    }
    for number, (name, scale) in enumerate(scales.items()):
        left.plot(
            positions + 1, scale.factors(positions)[0, 0], color=HUES[number], linestyle=DASHES[number], label=name
        )
    left.set(title="nothing learned", ylabel="factor of the query", ylim=(0.95, 2.1))
    learned = {
        "scale 0.43": SSMax(1),
        "scale 0.1, bias 0.5": SSMax(1, bias=True, initial_scale=0.1, initial_bias=0.5),
    }
    for number, (name, scale) in enumerate(learned.items()):
        factors = scale.factors(positions).detach()[0, 0]
        right.plot(positions + 1, factors, color=HUES[number], linestyle=DASHES[number], label=name)
    right.set(title="SSMax, learned for each head")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        counted(axes, 1, 64, 1024, 16_384, 262_144)
        axes.set_xlabel("tokens seen (position + 1)")
        axes.legend(loc="upper left")
    return figure


def nope_and_hybrids() -> Figure:
    """Attention weights of one query by distance, in four heads of one layer with a policy each."""
    figure, (left, right) = panels(2)
    tokens = 256
    rope = RotaryEmbedding(Rotary(head_dim=64, rope_theta=10_000.0))
    half = RotaryEmbedding(Rotary(head_dim=64, rope_theta=10_000.0, rotary_dim=32, trailing=True))
    parts = {
        "rotary": Policy(rotate=rope),
        "half rotary + ALiBi": Policy(rotate=half, bias=ALiBi(num_heads=1, bias_max=6)),
        "ALiBi": Policy(bias=ALiBi(num_heads=1, bias_max=6)),
        "NoPE": Policy(),
    }
    policy, at = Policy.by_head([(part, 1) for part in parts.values()]), torch.arange(tokens)
    # With one value channel for each key the output is the row of weights.
    values = torch.eye(tokens).expand(1, 4, tokens, tokens)
    alike = torch.ones(1, 4, tokens, 64)
    drawn = torch.randn(2, 400, 1, tokens, 64, generator=torch.Generator().manual_seed(0)).expand(2, 400, 4, tokens, 64)
    for axes, (q, k), title in (
        (left, (alike, alike), "alike q and k"),
        (right, drawn, "random q and k, mean of 400 draws"),
    ):
        last = attend_plainly(policy, q[:, :, -1:], k, values.expand(len(q), -1, -1, -1), at[-1:], at)
        weights = last.mean(0)[:, -1].flip(-1)
        for head, name in enumerate(parts):
            axes.plot(
                weights[head], color=HUES[head], linestyle=DASHES[head], linewidth=1.2, label=f"head {head}: {name}"
            )
        axes.set_yscale("log")
        axes.set(title=title, xlabel="distance of the key (tokens)", ylim=(5e-5, 2))
    left.set_ylabel("weight of the key")
    left.legend(loc="upper right")
    return figure


def positions() -> Figure:
    """The distance at which a query sees a key, by the true one."""
    figure, (left, right) = panels(2)
    query, keys = torch.tensor([4095]), torch.arange(4096)
    maps: dict[str, RelativeMap] = {
        "ReRoPE": ReRoPE(window=512),
        "LeakyReRoPE": LeakyReRoPE(window=512, factor=8),
        "SelfExtend": SelfExtend(window=512, group_size=8),
        "DualChunk": DualChunk(chunk_size=768, local_size=128),
        "LMInfinite": LMInfinite(window=512, sinks=4),
    }
    for number, one in enumerate(maps.values()):
        mapped = one.relative(query, keys)[0].double()
        mapped[~one.seen(query, keys)[0]] = torch.nan
        # Drawn from the nearest key, at distance 0, to the furthest.
        left.plot(mapped.flip(0), color=HUES[number], linestyle=DASHES[number])
    left.set(
        xlabel="true distance (tokens)", ylabel="distance as seen (tokens)", ylim=(-20, 1100), title="query at 4,095"
    )
    lengths = np.arange(256, 16_385, 256)
    measures: dict[str, Callable[[int], float]] = {name: one.largest_distance for name, one in maps.items()}
    for number, (name, largest) in enumerate(measures.items()):
        style = {"color": HUES[number], "linestyle": DASHES[number], "label": name}
        right.plot(lengths, [largest(int(length)) for length in lengths], **style)
    for axes in (left, right):
        axes.plot((0, 16_384), (0, 16_384), color=INK, linewidth=0.8, label="true distance")
    left.set_xlim(-100, 4200)
    counted(right, 0, 4096, 8192, 12288, 16384)
    right.set(xlabel="tokens of the sequence", title="largest distance seen", ylim=(-50, 3900))
    right.legend(loc="upper right", ncols=2)
    return figure
