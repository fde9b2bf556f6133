"""Pictures of biases that read what stands at a query or a key: one function for each page, named as the page is."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure
from torch import Tensor

from draw.style import DASHES, DIVERGING, HUES, MUTED, panels
from theodolite.encodings import CoPE, DisentangledBias, ForgettingGate, LowRankBias, ShawBias, TransformerXLBias
from theodolite.encodings.bias.deberta_buckets import log_bucket

__all__ = ["cope", "deberta", "forgetting_gate", "low_rank", "shaw", "transformer_xl"]


def transformer_xl() -> Figure:
    """What a query asks of distances, and how heads differ in it, with the weights as they are drawn at first."""
    figure, (left, right) = panels(2)
    torch.manual_seed(2)
    distances = torch.arange(-64, 129)
    q = torch.randn(1, 2, 3, 64)[:, :1].expand(1, 2, 3, 64)
    # A key of zeros leaves the term of the distance alone.
    keys = torch.zeros(1, 2, len(distances), 64)
    with torch.no_grad():
        plain = TransformerXLBias(2, 64, hidden_size=512)
        lines = plain.dense(torch.zeros(3).long(), -distances, q=q, k=keys)[0]
        clamped = TransformerXLBias(2, 64, hidden_size=512, clamp_length=48)
        clamped.load_state_dict(plain.state_dict())
        held = clamped.dense(torch.zeros(3).long(), -distances, q=q, k=keys)[0]
    for query in range(3):
        left.plot(distances, lines[0, query], color=HUES[query], linestyle=DASHES[query], label=f"query {query}")
    left.set(title="three queries, one head", ylabel="bias")
    for number, (line, name) in enumerate(
        ((lines[0, 0], "head 0"), (lines[1, 0], "head 1"), (held[0, 0], "head 0, clamp_length=48"))
    ):
        right.plot(distances, line, color=HUES[number], linestyle=DASHES[number], label=name)
    right.set(title="one query, two heads")
    for axes in (left, right):
        axes.axvline(0, color=MUTED, linewidth=0.8)
        axes.set(xlabel="query minus key (tokens)", ylim=(-1.3, 1.9))
        axes.legend(loc="upper right")
    return figure


def deberta() -> Figure:
    """Buckets by distance, and the two terms for a text of three words."""
    figure, (left, middle, right) = panels(3, height=3.1, widths=(1.15, 1, 1))
    distances = torch.arange(-700, 701)
    buckets = log_bucket(distances, position_buckets=256, max_relative_positions=512)
    left.plot(distances, buckets, color=HUES[0])
    left.plot(distances, distances, color=MUTED, linewidth=0.8, linestyle=DASHES[1])
    left.set(title="buckets of v3", xlabel="query minus key (tokens)", ylabel="bucket", ylim=(-290, 290))
    torch.manual_seed(3)
    words = torch.randn(2, 1, 1, 3, 64)[..., torch.tensor([0, 0, 1, 2, 0, 1, 1, 2, 0, 2, 1, 0, 0, 1, 2, 2]), :]
    at, terms = torch.arange(16), {"c2p": "c2p: by query", "p2c": "p2c: by key"}
    made = []
    for term in terms:
        bias = DisentangledBias(1, 64, hidden_size=64, max_relative_positions=8, pos_att_type=(term,))
        with torch.no_grad():
            made.append(bias.dense(at, at, q=words[0], k=words[1])[0, 0])
    most = float(torch.stack(made).abs().max())
    for axes, scores, title in zip((middle, right), made, terms.values(), strict=True):
        image = axes.imshow(scores, cmap=DIVERGING, vmin=-most, vmax=most, interpolation="nearest")
        axes.set(title=title, xlabel="key (token)", xticks=(0, 5, 10, 15), yticks=(0, 5, 10, 15))
        axes.grid(False)
    middle.set_ylabel("query (token)")
    figure.colorbar(image, ax=right, label="bias", shrink=0.75)
    return figure


def shaw() -> Figure:
    """The bias of three queries by distance, and what positions alone add to the output."""
    figure, (left, right) = panels(2)
    torch.manual_seed(0)
    bias, distances = ShawBias(1, 64, 16), torch.arange(-32, 33)
    with torch.no_grad():
        lines = bias.dense(torch.zeros(3).long(), distances, q=torch.randn(1, 1, 3, 64))[0, 0]
        # Each query puts all its weight on one key.
        one_key = torch.eye(len(distances))[None, None]
        added = bias.values(one_key, torch.zeros(len(distances)).long(), distances)[0, 0]
    for number in range(3):
        style = {"color": HUES[number], "linestyle": DASHES[number], "drawstyle": "steps-mid"}
        left.plot(distances, lines[number], label=f"query {number}", **style)
        right.plot(distances, added[:, number], label=f"channel {number}", **style)
    left.set(title="added to the scores", ylabel="bias", ylim=(-0.75, 0.95))
    right.set(title="added to the output", ylabel="output of a weight of 1", ylim=(-0.3, 0.38))
    for axes in (left, right):
        axes.set(xlabel="key minus query (tokens); clip 16", xticks=range(-32, 33, 16))
        axes.legend(loc="upper center", ncols=3)
    return figure


def cope() -> Figure:
    """Positions as one query counts them, and as all queries count full stops."""
    figure, (left, right) = panels(2)
    tokens, most = 64, 64
    stops = torch.zeros(tokens, dtype=torch.bool)
    stops[torch.tensor([6, 15, 19, 33, 41, 54])] = True
    kinds = {
        "every token": torch.full((tokens,), 40.0),
        "half of each": torch.zeros(tokens),
        "full stops": torch.where(stops, 40.0, -40.0),
    }
    counted = {name: _positions(logits, most) for name, logits in kinds.items()}
    for number, (name, positions) in enumerate(counted.items()):
        left.plot(positions[-1].flip(0), color=HUES[number], linestyle=DASHES[number], label=f"counts {name}")
    left.set(title="positions seen by the last query", xlabel="distance (tokens)", ylabel="position")
    left.legend(loc="upper left")
    after = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    image = right.imshow(
        counted["full stops"].masked_fill(after, torch.nan), cmap="cividis", interpolation="nearest", vmin=0, vmax=6
    )
    right.set(title="queries that count full stops", xlabel="key (token)", ylabel="query (token)")
    right.grid(False)
    figure.colorbar(image, ax=right, label="position", shrink=0.9)
    return figure


def _positions(logits: Tensor, most: int) -> Tensor:
    """The positions themselves, (S, S), where keys have these logits for every query."""
    tokens = len(logits)
    bias = CoPE(1, 2, most)
    with torch.no_grad():
        # The second channel is 1 in queries, and its embedding is the position's own number.
        bias.pos_emb[0, 1] = torch.arange(most)
        k = torch.stack((logits * 2**0.5, torch.zeros(tokens)), dim=-1)[None, None]
        return bias.dense(torch.arange(tokens), torch.arange(tokens), q=torch.ones(1, 1, tokens, 2), k=k)[0, 0]


def forgetting_gate() -> Figure:
    """The bias of one query with constant gates and with gates that shut at the start of a part."""
    figure, (left, right) = panels(2)
    tokens, starts = 96, torch.tensor([30, 66])
    bias = ForgettingGate(1, 1)
    with torch.no_grad():
        bias.weight.fill_(1.0)
        constant = torch.full((tokens,), 3.0)
        shut = torch.full((tokens,), 5.0)
        shut[starts] = -4.0
        drawn = 3 + 1.5 * torch.randn(tokens, generator=torch.Generator().manual_seed(0))
        texts = {"constant gates: ALiBi": constant, "gates of random input": drawn, "two gates nearly shut": shut}
        at, scores = torch.arange(tokens), {}
        for name, logits in texts.items():
            state = bias.state(logits[None, :, None])
            scores[name] = bias.dense(at, at, q_state=state, k_state=state)[0, 0]
    for number, (name, score) in enumerate(scores.items()):
        left.plot(score[-1].flip(0), color=HUES[number], linestyle=DASHES[number], label=name)
    left.set(title="bias of the last query", xlabel="distance (tokens)", ylabel="bias", ylim=(-11.5, 0.5))
    left.legend(loc="lower left")
    after = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    image = right.imshow(
        scores["two gates nearly shut"].masked_fill(after, torch.nan), cmap="cividis", interpolation="nearest"
    )
    right.set(title="two gates nearly shut", xlabel="key (token)", ylabel="query (token)")
    right.grid(False)
    figure.colorbar(image, ax=right, label="bias", shrink=0.9)
    return figure


def low_rank() -> Figure:
    """Four curves set by hand, and three queries that mix them."""
    figure, (left, right) = panels(2)
    extent, distance = 64, torch.arange(64)
    curves = {
        "near": (-distance / 6).exp(),
        "far": (distance / 63).square(),
        "the token before": (distance == 1).float(),
        "every eighth": (2 * torch.pi * distance / 8).cos(),
    }
    bias = LowRankBias(1, 4, rank=4, extent=extent)
    with torch.no_grad():
        bias.weight.copy_(torch.eye(4))
        bias.curves.copy_(torch.stack(list(curves.values())))
    for number, (name, curve) in enumerate(zip(curves, bias.curves.detach(), strict=True)):
        left.plot(curve, color=HUES[number], linestyle=DASHES[number], label=name)
    left.set(title="four curves", xlabel="distance (tokens)", ylabel="value", ylim=(-1.1, 1.9))
    left.legend(loc="upper center", ncols=2)
    mixes = torch.tensor([[2.0, 0.0, 0.0, 0.3], [-1.0, 1.5, 0.0, 0.0], [0.0, 0.0, 2.5, 0.0]])
    with torch.no_grad():
        lines = bias.dense(torch.full((3,), 95), torch.arange(96), x=mixes[None])[0, 0].flip(-1)
    for number, name in enumerate(("near, and eighths", "far, not near", "the token before")):
        right.plot(lines[number], color=HUES[number], linestyle=DASHES[number], label=f"query {number}: {name}")
    right.axvline(extent, ymax=0.7, color=MUTED, linewidth=0.8)
    right.text(extent + 1, -0.9, "beyond the\nextent: 0", color=MUTED, va="center")
    right.set(title="what three queries mix", xlabel="distance (tokens)", ylabel="bias", ylim=(-1.4, 3.7))
    right.legend(loc="upper right")
    return figure
