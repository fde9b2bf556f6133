"""Pictures of what is added to scores by distance alone: one function for each page, named as the page is."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from draw.style import DASHES, HUES, INK, MUTED, counted, panels
from theodolite.encodings import ALiBi, Fire, Kerple, T5Bias, alibi_slopes
from theodolite.encodings.bias.base import Bias

__all__ = ["alibi", "fire", "kerple", "t5"]


def alibi() -> Figure:
    """The slopes of a count that is no power of two, and what attention makes of a bias alone."""
    figure, (left, right) = panels(2)
    for number, rule in enumerate(("published", "geometric")):
        slopes = alibi_slopes(12, rule=rule)
        style = {"color": HUES[number], "marker": "os"[number], "markerfacecolor": "none", "linestyle": "none"}
        left.plot(range(12), slopes, label=f'rule="{rule}"', **style)
    left.set_yscale("log", base=2)
    left.set(title="slopes of 12 heads", xlabel="head", ylabel="slope (per token)", xticks=range(0, 12, 2))
    left.legend()
    weights = _by_distance(ALiBi(8), 4096).softmax(-1)
    for number, head in enumerate((0, 3, 5, 7)):
        right.plot(range(1, 4097), weights[head], color=HUES[number], linestyle=DASHES[number], label=f"head {head}")
    _by_log_distance(right, 1, 16, 256, 4096)
    right.set_yscale("log")
    right.set(title="weight of a key where all are alike", ylabel="weight", ylim=(1e-6, 2))
    right.legend(title="of 8 heads", loc="upper right")
    return figure


def t5() -> Figure:
    """Which bucket a distance falls into, and a curve that the buckets can follow only so far."""
    figure, (left, right) = panels(2)
    far = torch.arange(-160, 161)
    kinds = {"causal": T5Bias(1, bidirectional=False), "bidirectional": T5Bias(1, bidirectional=True)}
    for number, (name, bias) in enumerate(kinds.items()):
        style = {"color": HUES[number], "marker": "os"[number], "markersize": 2, "linestyle": "none"}
        left.plot(far, bias.bucket(far), label=name, **style)
    left.set(title="buckets (32, up to 128 tokens)", xlabel="key minus query (tokens)", ylabel="bucket", ylim=(-1, 41))
    left.legend(loc="upper left", ncols=2)
    causal, distances = kinds["causal"], torch.arange(2048)
    wanted = -torch.log1p(distances.float())
    buckets = causal.bucket(-distances)
    with torch.no_grad():
        for bucket in range(32):
            causal.weight[bucket, 0] = wanted[buckets == bucket][:64].mean()
        right.plot(distances + 1, wanted, color=INK, linewidth=1, label="-ln(1 + r)")
        right.plot(distances + 1, _by_distance(causal, 2048)[0], color=HUES[0], label="32 buckets set to it")
    right.axvline(114, color=MUTED, linewidth=0.8)
    right.text(126, -0.4, "last bucket\nfrom 113", color=MUTED, va="top")
    _by_log_distance(right, 1, 8, 64, 512, 2048)
    right.set(title="what buckets can say", ylabel="bias")
    right.legend(loc="lower left")
    return figure


def kerple() -> Figure:
    """Both kernels with a few parameters."""
    figure, (left, right) = panels(2)
    for axes, kind, pairs in (
        (left, "log", ((1.0, 0.01), (1.0, 0.1), (1.0, 1.0), (2.0, 1.0))),
        (right, "power", ((1.0, 0.2), (0.5, 0.5), (0.05, 1.0), (0.01, 2.0))),
    ):
        bias = Kerple(len(pairs), kind=kind)
        with torch.no_grad():
            bias.r1.copy_(torch.tensor([r1 for r1, _ in pairs]))
            bias.r2.copy_(torch.tensor([r2 for _, r2 in pairs]))
            lines = _by_distance(bias, 4096)
        for head, (r1, r2) in enumerate(pairs):
            name = f"r1 = {r1:g}, r2 = {r2:g}" + (", ALiBi" if kind == "power" and r2 == 1 else "")
            axes.plot(range(1, 4097), lines[head], color=HUES[head], linestyle=DASHES[head], label=name)
        _by_log_distance(axes, 1, 8, 64, 512, 4096)
        axes.set(title=kind, ylim=(-18, 9.5), yticks=range(-15, 1, 5))
        axes.legend(loc="upper left")
    left.set_ylabel("bias")
    return figure


def fire() -> Figure:
    """One head fitted to the logarithm of the distance within 512 tokens, read by later queries."""
    figure, (left, right) = panels(2)
    torch.manual_seed(0)
    bias, at = Fire(1), torch.arange(0, 512, 7)
    distance = at[:, None] - at
    seen, wanted = distance >= 0, -torch.log1p(distance.clamp(min=0).float())
    optimizer = torch.optim.Adam(bias.parameters(), lr=0.02)
    for _ in range(600):
        optimizer.zero_grad()
        (bias.dense(at, at)[0, 0] - wanted)[seen].square().mean().backward()
        optimizer.step()
    for number, query in enumerate((511, 2047, 8191)):
        with torch.no_grad():
            line = _by_distance(bias, query + 1)[0]
        style = {"color": HUES[number], "linestyle": DASHES[number], "label": f"query at {query:,}"}
        left.plot(range(1, query + 2), line, **style)
        right.plot(torch.arange(query + 1) / query, line, **style)
    left.plot(range(1, 8193), -torch.log1p(torch.arange(8192).float()), color=INK, linewidth=0.8, label="-ln(1 + r)")
    _by_log_distance(left, 1, 8, 64, 512, 8192)
    left.set(title="by distance", ylabel="bias")
    left.legend(loc="lower left")
    right.set(title="by share of the way back", xlabel="distance / position of the query")
    return figure


def _by_distance(bias: Bias, tokens: int) -> Tensor:
    """The bias of the last of so many queries by the distance of the key, from 0: (H, tokens)."""
    return bias.dense(torch.tensor([tokens - 1]), torch.arange(tokens))[0, :, 0].flip(-1)


def _by_log_distance(axes: Axes, *ticks: int) -> None:
    axes.set_xscale("log", base=2)
    counted(axes, *ticks)
    axes.set_xlabel("distance + 1 (tokens)")
