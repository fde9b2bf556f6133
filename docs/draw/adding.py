"""Pictures of what is added to token embeddings: one function for each page, named as the page is."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure

from draw.style import DASHES, DIVERGING, HUES, MUTED, counted, panels
from theodolite.encodings import ALiBi, LearnedEmbedding, Sinusoidal
from theodolite.positions.segments import segment_positions

__all__ = ["bilevel", "learned", "sinusoidal"]


def sinusoidal() -> Figure:
    """The table itself, and how alike the vectors of two positions are by distance."""
    figure, (left, right) = panels(2, widths=(1.1, 1))
    table = Sinusoidal(64).table(torch.arange(256))
    image = left.imshow(table.T, aspect="auto", cmap=DIVERGING, vmin=-1, vmax=1, interpolation="nearest")
    left.set(title="table of 64 channels", xlabel="position (tokens)", ylabel="channel")
    left.grid(False)
    figure.colorbar(image, ax=left, ticks=(-1, 0, 1), shrink=0.9)
    distances = torch.unique(torch.logspace(0, 13, 600, base=2).long())
    for number, dim in enumerate((64, 128, 512)):
        encoding = Sinusoidal(dim)
        alike = encoding.table(distances) @ encoding.table(torch.zeros(1, dtype=torch.int64))[0] / (dim / 2)
        right.plot(distances, alike, color=HUES[number], linestyle=DASHES[number], label=f"{dim} channels")
    right.axhline(0, color=MUTED, linewidth=0.8)
    right.set_xscale("log", base=2)
    counted(right, 1, 8, 64, 512, 4096)
    right.set(title="likeness of two positions", xlabel="distance (tokens)", ylabel="PE(p) . PE(p + k) / (dim / 2)")
    right.legend()
    return figure


def learned() -> Figure:
    """Where the rows of a longer table come from: the old rows' only channel is their own number."""
    figure, (left, right) = panels(2)
    rows = 77
    table = LearnedEmbedding.from_weight(torch.arange(rows, dtype=torch.float32)[:, None])
    longer = {
        "stretch": table.resize(248),
        "stretch, keep=20": table.resize(248, keep=20),
        "tile": table.resize(248, method="tile"),
        "last": table.resize(248, method="last"),
    }
    for number, (name, one) in enumerate(longer.items()):
        made_of = one.table(torch.arange(248)).detach()[:, 0]
        left.plot(made_of, color=HUES[number], linestyle=DASHES[number], label=name)
    left.set(title="77 rows made 248", xlabel="position (tokens)", ylabel="old row that it is made of", ylim=(-2, 112))
    left.legend(loc="upper left", ncols=2)
    wide = table.resize(rows**2, method="hierarchical")
    right.plot(wide.table(torch.arange(6 * rows)).detach()[:, 0], color=HUES[0])
    for start in range(0, 6 * rows + 1, rows):
        right.axvline(start, color=MUTED, linewidth=0.6)
    right.set(
        title="hierarchical: first 462 of 5,929",
        xlabel="position (tokens); lines every 77",
        ylabel="mix of two old rows",
    )
    return figure


def bilevel() -> Figure:
    """The two positions of each token of a text, and a bias by the second."""
    figure, (left, right) = panels(2, widths=(1.2, 1))
    lengths = torch.tensor([9, 4, 13, 7, 11, 4])
    ends = torch.zeros(int(lengths.sum()), dtype=torch.bool)
    ends[lengths.cumsum(0) - 1] = True
    segments = segment_positions(ends=ends)
    left.step(range(len(ends)), segments.intra, where="mid", color=HUES[0], label="place in the segment: added")
    left.step(
        range(len(ends)),
        segments.inter,
        where="mid",
        color=HUES[1],
        linestyle=DASHES[1],
        label="number of the segment: ALiBi, rotary, ...",
    )
    left.set(title="six sentences", xlabel="token", ylabel="position", ylim=(-0.5, 17))
    left.legend(loc="upper left")
    bias = ALiBi.from_slopes([0.5]).dense(segments.inter, segments.inter)[0, 0]
    after = torch.ones_like(bias, dtype=torch.bool).triu(1)
    image = right.imshow(bias.masked_fill(after, torch.nan), cmap="cividis", interpolation="nearest")
    right.set(title="ALiBi of the number", xlabel="key (token)", ylabel="query (token)")
    right.grid(False)
    figure.colorbar(image, ax=right, label="bias, slope 1/2", shrink=0.9)
    return figure
