"""Pictures of what turns queries and keys: one function for each page, named as the page is."""

from __future__ import annotations

import torch
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure

from draw.style import DASHES, DIVERGING, HUES, INK, MUTED, counted, panels, scores
from theodolite import Rotary, RotaryEmbedding, rotary_tables
from theodolite.attention import attend_plainly
from theodolite.encodings import LearnedBase, LengthBase, PerHeadRotary, Policy, XPos
from theodolite.positions.mrope import mrope_positions

__all__ = [
    "learned_frequencies",
    "mrope",
    "partial",
    "per_head",
    "rotary",
    "value_rotation",
    "xpos",
]


def rotary() -> Figure:
    """The table itself, and the score of equal queries and keys by distance."""
    figure, (left, right) = panels(2, widths=(1.1, 1))
    cos = rotary_tables(Rotary(head_dim=64, rope_theta=10_000.0), torch.arange(256)).cos
    image = left.imshow(cos.T, aspect="auto", cmap=DIVERGING, vmin=-1, vmax=1, interpolation="nearest")
    left.set(title="cos of the table, 64 channels", xlabel="position (tokens)", ylabel="pair (0 turns fastest)")
    left.grid(False)
    figure.colorbar(image, ax=left, ticks=(-1, 0, 1), shrink=0.9)
    distances = torch.unique(torch.logspace(0, 17, 700, base=2).long())
    for number, theta in enumerate((1e4, 5e5)):
        rope = RotaryEmbedding(Rotary(head_dim=128, rope_theta=theta))
        line = scores(rope, distances, width=128)[0]
        right.plot(distances, line, color=HUES[number], linestyle=DASHES[number], label=f"base {theta:,.0f}")
    right.axhline(0, color=MUTED, linewidth=0.8)
    right.set_xscale("log", base=2)
    counted(right, 1, 16, 256, 4096, 65536)
    right.set(
        title="score of alike q and k, 128 channels", xlabel="distance (tokens)", ylabel="mean cosine of the pairs"
    )
    right.legend()
    return figure


def partial() -> Figure:
    """How fast each pair of the head turns, and what channels that stand still do to the score."""
    figure, (left, right) = panels(2)
    plans = {
        "all 64 pairs": Rotary(head_dim=128, rope_theta=10_000.0),
        "partial: rotary_dim=64": Rotary(head_dim=128, rope_theta=10_000.0, rotary_dim=64),
        "proportional: live_pairs=32": Rotary(head_dim=128, rope_theta=10_000.0, live_pairs=32),
    }
    distances = torch.unique(torch.logspace(0, 15, 500, base=2).long())
    for number, (name, plan) in enumerate(plans.items()):
        wavelengths = torch.from_numpy(plan.wavelengths())
        live = wavelengths.isfinite()
        style = {"color": HUES[number], "marker": "os^"[number], "markersize": (3, 3, 6)[number]}
        left.plot(
            torch.arange(len(live))[live],
            wavelengths[live],
            linestyle="none",
            markerfacecolor="none",
            label=name,
            **style,
        )
        score = scores(RotaryEmbedding(plan), distances, width=128)[0]
        right.plot(distances, score, color=HUES[number], linestyle=DASHES[number], label=name)
    left.set_yscale("log")
    left.set(title="tokens per turn", xlabel="pair (of 64; where no mark is, nothing turns)", ylabel="tokens")
    right.axhline(0, color=MUTED, linewidth=0.8)
    right.set_xscale("log", base=2)
    counted(right, 1, 16, 256, 4096, 32768)
    right.set(title="score of alike q and k", xlabel="distance (tokens)", ylabel="q.k / 128")
    left.legend(loc="lower right")
    return figure


def mrope() -> Figure:
    """A prompt's positions on three axes, and which axis each pair of the head follows."""
    figure, (left, right) = panels(2, widths=(1.15, 1))
    types = torch.tensor([[0] * 4 + [1] * 12 + [0] * 6])
    positions = mrope_positions(types, spatial_merge_size=2, image_grid_thw=[(1, 6, 8)]).positions[:, 0]
    for axis, name in enumerate(("time", "height", "width")):
        style = {"color": HUES[axis], "linestyle": DASHES[axis], "marker": "os^"[axis], "markersize": 3.5}
        left.plot(positions[axis], label=name, **style)
    left.axvspan(3.5, 15.5, color=MUTED, alpha=0.12, linewidth=0)
    left.text(9.5, 11.2, "image, 3 x 4 tokens", ha="center", color=MUTED)
    left.set(title="positions of text, an image, text", xlabel="token", ylabel="position", ylim=(-0.5, 14))
    left.legend(loc="upper left")
    plans = {
        "blocks\n16, 24, 24": Rotary(head_dim=128, rope_theta=1e6, mrope_section=(16, 24, 24)),
        "alternating\n24, 20, 20": Rotary(
            head_dim=128, rope_theta=5e6, mrope_section=(24, 20, 20), mrope_interleaved=True
        ),
    }
    axis_of_pairs = torch.tensor([plan.axis_of_pairs() for plan in plans.values()])
    palette = ListedColormap(HUES[:3])
    right.imshow(
        axis_of_pairs, aspect="auto", cmap=palette, norm=BoundaryNorm((0, 1, 2, 3), 3), interpolation="nearest"
    )
    right.set(title="axis that each pair follows", xlabel="pair (0 turns fastest)")
    right.set_yticks((0, 1), list(plans))
    right.grid(False)
    return figure


def per_head() -> Figure:
    """Four heads with bases of their own, four with factors of their own."""
    figure, (left, right) = panels(2)
    distances = torch.unique(torch.logspace(0, 14, 400, base=2).long())
    bases = (1e3, 1e4, 1e5, 1e6)
    plans = [Rotary(head_dim=64, rope_theta=theta) for theta in bases]
    wavelengths = [torch.from_numpy(plan.wavelengths()) for plan in plans]
    lines = scores(PerHeadRotary(plans), distances, width=64, heads=len(bases))
    for head, theta in enumerate(bases):
        style = {"color": HUES[head], "linestyle": DASHES[head], "label": f"head {head}: base {theta:,.0f}"}
        left.plot(wavelengths[head], **style)
        right.plot(distances, lines[head], **style)
    left.set_yscale("log")
    left.set(title="tokens per turn", xlabel="pair (of 32)", ylabel="tokens", ylim=(0.5, 1e7))
    left.legend(loc="lower right")
    right.axhline(0, color=MUTED, linewidth=0.8)
    right.set_xscale("log", base=2)
    counted(right, 1, 16, 256, 4096, 16384)
    right.set(title="score of alike q and k", xlabel="distance (tokens)", ylabel="mean cosine of the pairs")
    return figure


def xpos() -> Figure:
    """The decay of each pair, and what it makes of the score."""
    figure, (left, right) = panels(2)
    plan, distances = Rotary(head_dim=64, rope_theta=10_000.0), torch.arange(0, 2049, 4)
    rope = XPos(plan, centre=0)
    pure = rope.tables(distances, amplitude=False).q
    decayed = rope.tables(distances).q
    # The length of each pair is the factor that it is multiplied by.
    factor = (decayed.cos**2 + decayed.sin**2).sqrt() / (pure.cos**2 + pure.sin**2).sqrt()
    for number, pair in enumerate((0, 4, 12, 31)):
        style = {"color": HUES[number], "linestyle": DASHES[number]}
        left.plot(distances, factor[:, pair], label=f"pair {pair}", **style)
    left.set(title="factor of a pair", xlabel="distance (tokens)", ylabel="factor", ylim=(0, 1.05))
    left.legend(loc="center right")
    for number, (name, one) in enumerate((("RoPE", RotaryEmbedding(plan)), ("xPos", rope))):
        line = scores(one, distances, width=64)[0]
        right.plot(distances, line, color=HUES[number], linestyle=DASHES[1 - number], label=name)
    right.axhline(0, color=MUTED, linewidth=0.8)
    right.set(title="score of alike q and k", xlabel="distance (tokens)", ylabel="q.k / 64")
    right.legend()
    return figure


def value_rotation() -> Figure:
    """What a query gets from one key, by distance: with the output turned back, and without."""
    figure, (left, right) = panels(2)
    rope = RotaryEmbedding(Rotary(head_dim=64, rope_theta=10_000.0))
    policy, distances = Policy(rotate=rope, rotate_values=True), torch.arange(0, 129, 2)
    ones = torch.ones(len(distances), 1, 1, 64)
    for number, start in enumerate((200, 1_000)):
        queries = torch.full((len(distances), 1), start)
        keys = queries - distances[:, None]
        turned_back = attend_plainly(policy, ones, ones, ones, queries, keys)
        only_turned = rope.turn_values(ones, rope.tables(keys, amplitude=False))
        style = {"color": HUES[number], "linestyle": "none", "marker": "ox"[number], "markersize": (6, 4)[number]}
        style["markerfacecolor"] = "none"
        for axes, out in ((left, turned_back), (right, only_turned)):
            axes.plot(distances, out[:, 0, 0, 6], label=f"query at {start:,}", **style)
    left.set(
        title="turned, and the output turned back", xlabel="distance of the key (tokens)", ylabel="channel 6 of 64"
    )
    right.set(title="turned only", xlabel="distance of the key (tokens)")
    for axes in (left, right):
        axes.set_ylim(-1.6, 2.1)
        axes.legend(loc="upper center", ncols=2)
    return figure


def learned_frequencies() -> Figure:
    """Bases that are trained to give another rotation's scores, and a base that is a function of the length."""
    figure, (left, right) = panels(2)
    torch.manual_seed(0)
    targets = PerHeadRotary([Rotary(head_dim=64, rope_theta=theta) for theta in (2e3, 5e4)])
    rope, positions = LearnedBase(Rotary(head_dim=64, rope_theta=1e4), num_heads=2), torch.arange(64)
    optimizer, bases = torch.optim.Adam(rope.parameters(), lr=0.05), []
    for _ in range(121):
        bases.append(rope.rope_theta)
        q, k = torch.randn(2, 8, 2, 64, 64)
        wanted, given = (turned[0] @ turned[1].mT for turned in (targets(q, k, positions), rope(q, k, positions)))
        optimizer.zero_grad()
        (wanted - given).square().mean().backward()
        optimizer.step()
    for head, theta in enumerate((2e3, 5e4)):
        left.plot(torch.stack(bases)[:, head], color=HUES[head], label=f"head {head}, given the scores of {theta:,.0f}")
        left.axhline(theta, color=HUES[head], linestyle=DASHES[2], linewidth=1)
    left.set_yscale("log")
    left.set(title="LearnedBase: two bases in training", xlabel="step", ylabel="rope_theta", ylim=(8e2, 4e5))
    left.legend(loc="upper left")
    grows = LengthBase(
        Rotary(head_dim=64, rope_theta=1e4), theta_min=1e3, theta_max=1e6, reference_length=4096, hidden=8
    )
    lengths = (2.0 ** torch.arange(8, 18.1, 0.25)).long()
    right.plot(lengths, grows.rope_theta(lengths).detach(), color=INK, linestyle=DASHES[1], label="at first")
    measured = torch.tensor([4096, 8192, 16384, 32768])
    optimizer = torch.optim.Adam(grows.parameters(), lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        wanted = 1e4 * (measured.double() / 4096) ** 1.5
        (grows.rope_theta(measured).log() - wanted.log()).square().sum().backward()
        optimizer.step()
    right.plot(lengths, grows.rope_theta(lengths).detach(), color=HUES[0], label="fitted to four lengths")
    right.plot(measured, wanted, linestyle="none", marker="o", color=HUES[1], label="the four")
    right.set_yscale("log")
    right.set_xscale("log", base=2)
    counted(right, 256, 4096, 65536)
    right.set(title="LengthBase: the base by length", xlabel="length (tokens)", ylabel="rope_theta", ylim=(8e2, 4e6))
    right.legend(loc="upper left")
    return figure
