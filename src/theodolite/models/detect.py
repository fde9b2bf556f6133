"""Which pair layout a checkpoint has, told from its query and key weights alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from theodolite.encodings.layout import Layout
from theodolite.models.gguf_rows import gguf_rows
from theodolite.models.layer_heads import LayerHeads, Width, find_config, heads_of_config, read_raw
from theodolite.models.pair_evidence import Array, Evidence, pair_evidence
from theodolite.models.projection_rows import projection_rows
from theodolite.models.tensor_files import TensorFile, require_readable, tensor_files

LARGEST_CHANCE = 1e-4
"""An answer is given where random pairings would show as much with at most this chance."""
# The other layout must be that much weaker: where both stand out, something else than a rotation orders the channels.
_MARGIN = 2.0


class LayerRows(NamedTuple):
    """Rows (H, R, E) and (K, R, E) of the queries and keys of one layer, of the channels that turn."""

    layer: int
    q: Array
    k: Array


@dataclass(frozen=True)
class LayerVote:
    """One layer: how far either layout stands out, in standard deviations of a random pairing of channels."""

    layer: int
    halves: float
    interleaved: float

    @property
    def layout(self) -> Layout:
        """The layout that stands out more, however little."""
        return "halves" if self.halves >= self.interleaved else "interleaved"


@dataclass(frozen=True)
class Detection:
    """What the weights say.

    Args:
        layout: None where they do not tell.
        chance: that a random pairing of channels, in weights without any order of channels, would stand out as much
            as the better of the two layouts: an upper estimate.
        halves, interleaved: how far either stands out over all layers, in standard deviations of a random pairing.
        layers: the same, layer by layer.
        why: one sentence.
    """

    layout: Layout | None
    chance: float
    halves: float
    interleaved: float
    layers: tuple[LayerVote, ...]
    why: str

    @property
    def confidence(self) -> float:
        """1 - `chance`; 0 where there is no answer."""
        return 0.0 if self.layout is None else 1.0 - self.chance

    @property
    def agreeing(self) -> int:
        """Layers that on their own stand out more in the layout that the whole has; 0 without an answer."""
        return sum(vote.layout == self.layout for vote in self.layers)


def detect_layout(
    source: str | Path,
    *,
    config: str | Path | None = None,
    head_dim: int | None = None,
    rotary_dim: int | None = None,
    trailing: bool = False,
    sites: Iterable[str] | None = None,
) -> Detection:
    """The pair layout of a checkpoint: halves, interleaved, or None for "cannot tell".

    The config is asked for widths and head counts, never for the layout. Weights are read layer by layer.

    Args:
        source: a folder with safetensors, one safetensors file, or a GGUF file, whose tensors are taken as they are.
        config: the config.json or params.json of a lone file.
        head_dim, rotary_dim, trailing: the channels of a head and those that turn, where there is no config.
        sites: where the attention meant is, with * for numbers, where there are several.

    Raises:
        LoadError: files are missing, damaged, or hold no queries and keys that can be read.
        ValueError: the widths do not fit, or nobody says them.
    """
    path = Path(source)
    if path.suffix == ".gguf":
        return judge(LayerRows(*rows) for rows in gguf_rows(path))
    require_readable(path, instead="; its name must end in .gguf")
    heads = given_heads(path, config, head_dim=head_dim, rotary_dim=rotary_dim, trailing=trailing)
    return detect_in(tensor_files(path), heads, sites)


def detect_in(files: Sequence[TensorFile], heads: LayerHeads, sites: Iterable[str] | None = None) -> Detection:
    """`detect_layout` of files whose headers are read already."""
    chosen = None if sites is None else tuple(sites)
    return judge(LayerRows(*rows) for rows in projection_rows(files, heads, chosen))


def given_heads(
    source: Path,
    config: str | Path | None,
    *,
    head_dim: int | None,
    rotary_dim: int | None,
    trailing: bool,
    num_heads: int | None = None,
    num_key_value_heads: int | None = None,
) -> LayerHeads:
    """What the caller says of the heads, or else the config given, or else that of the folder.

    Raises:
        ValueError: nobody says it, or both a config and a width do.
    """
    if head_dim is not None:
        if config is not None:
            raise ValueError("head_dim: got it beside a config, which says it; give one of the two")
        width = Width(head_dim, head_dim if rotary_dim is None else rotary_dim, trailing)
        return LayerHeads(num_heads=num_heads, num_key_value_heads=num_key_value_heads, widths=(width,))
    if rotary_dim is not None or trailing or num_heads is not None or num_key_value_heads is not None:
        raise ValueError("head_dim: widths and counts of heads need it beside them; or give none, and a config")
    file = Path(config) if config is not None else find_config(source) if source.is_dir() else None
    if file is None:
        raise ValueError(f"config: {source} has no config.json or params.json; give one, or the head_dim")
    return heads_of_config(read_raw(file), source=str(file))


def judge(layers: Iterable[LayerRows]) -> Detection:
    """The answer from the layers' rows, gone through once."""
    whole, votes = Evidence(), []
    for layer, q, k in layers:
        evidence = pair_evidence(q, k)
        whole += evidence
        votes.append(LayerVote(layer, *evidence.deviations))
    halves, interleaved = whole.deviations
    better, other = max(halves, interleaved), min(halves, interleaved)
    # Two layouts were tried.
    chance = min(1.0, 2 * _tail(whole, better))
    layout: Layout | None = None
    if not whole.variance:
        why = "its heads turn one pair of channels or none, or are empty, and both layouts are the same"
    elif chance > LARGEST_CHANCE:
        why = "neither layout stands out: nothing turns, or too little was learned, or a head's width is another"
    elif other > better / _MARGIN:
        why = "both layouts stand out, so something else than a rotation orders the channels"
    else:
        layout = "halves" if halves > interleaved else "interleaved"
        why = "channels of its pairs turn together"
    return Detection(layout, chance, halves, interleaved, tuple(votes), why)


def _tail(evidence: Evidence, deviations: float) -> float:
    """The chance of so many standard deviations, of a gamma variable: sums of exponential scores are skewed so."""
    if not evidence.variance or deviations <= 0:
        return 1.0
    shape = torch.tensor(evidence.mean**2 / evidence.variance, dtype=torch.float64)
    above = evidence.mean + deviations * evidence.variance**0.5
    return float(torch.special.gammaincc(shape, torch.tensor(above * evidence.mean / evidence.variance).double()))


def as_json(detection: Detection) -> dict[str, Any]:
    """All of it as JSON has it."""
    return {
        "layout": detection.layout,
        "confidence": detection.confidence,
        "chance": detection.chance,
        "halves": detection.halves,
        "interleaved": detection.interleaved,
        "layers_agreeing": detection.agreeing,
        "why": detection.why,
        "layers": [{**vars(vote), "layout": vote.layout} for vote in detection.layers],
    }
