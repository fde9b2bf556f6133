"""The views of each kind of encoding, by name: each is drawn when it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from theodolite.report.show import biases, hands, rotations, vectors
from theodolite.report.show.canvas import Figure
from theodolite.report.show.settings import SCALINGS, Settings

if TYPE_CHECKING:
    from theodolite.encodings import Bias
    from theodolite.plan import ModelPlan, Rotary

Pictures = dict[str, Callable[[], Figure]]
VECTORS = ("heat", "curves", "similarity")
ROTATIONS = ("decay", "wavelengths", "coverage", "hands", "similarity")
BIASES = ("matrix", "distance")
MOST_POSITIONS, MOST_PAIRS, MOST_DISTANCES = 1024, 512, 65_536
"""Positions of a table, positions on each side of a matrix, and distances of a curve that are drawn, at most."""
_PANELS, _LINES = 4, 8


def vector_pictures(name: str, table: Any, settings: Settings) -> Pictures:
    """The views of vectors that are added to embeddings, (S, D).

    Raises:
        ValueError: `settings.channels` has one that they do not have, or more than 12.
    """
    chosen = settings.channels or spread(table.shape[1], 6)
    # Before anything is drawn: of several views the first would stand in a file already.
    vectors.require_channels(chosen, table.shape[1])
    return {
        "heat": lambda: vectors.heat_map(table, name=name),
        "curves": lambda: vectors.curves(table, channels=chosen, name=name),
        "similarity": lambda: vectors.similarity(table, name=name),
    }


def rotation_pictures(rotaries: Mapping[str, Rotary], settings: Settings, *, trained: int) -> Pictures:
    """The views of rotations, by name."""
    import numpy as np

    from theodolite.plan.derived import settled_inv_freq

    length = settings.tokens(4 * trained)

    def alike() -> Figure:
        name, rotary = next(iter(rotaries.items()))
        inv_freq = settled_inv_freq(rotary, length)
        angles = np.multiply.outer(np.arange(settings.tokens(256, MOST_POSITIONS)), inv_freq[inv_freq > 0])
        table = np.concatenate((np.cos(angles), np.sin(angles)), axis=1)
        return vectors.similarity(table, name="rotary" if name == "none" else f"rotary, {name}")

    return {
        "decay": lambda: rotations.decay(rotaries, length=length, trained=trained),
        "wavelengths": lambda: rotations.wavelengths(rotaries, length=length, trained=trained),
        "coverage": lambda: rotations.coverage(rotaries, length=trained),
        "hands": lambda: hands.clock_hands(rotaries, position=settings.position, length=length),
        "similarity": alike,
    }


def bias_pictures(name: str, bias: Bias, settings: Settings, *, log: bool = False) -> Pictures:
    """The views of a bias that reads positions alone; of many heads some are drawn, first and last among them."""
    import torch

    def dense(queries: Any, keys: Any, heads: Sequence[int]) -> Any:
        with torch.no_grad():
            return bias.dense(queries, keys)[0, list(heads)].double().numpy()

    def matrix() -> Figure:
        at = torch.arange(settings.tokens(128, MOST_PAIRS))
        shown = spread(bias.num_heads, _PANELS)
        labels = [f"head {head}" for head in shown]
        return biases.bias_matrix(dense(at, at, shown), name=name, labels=labels, causal=not settings.bidirectional)

    def distance() -> Figure:
        count, shown = settings.tokens(1024, MOST_DISTANCES), spread(bias.num_heads, _LINES)
        after = count - 1 if settings.bidirectional else 0
        keys = torch.arange(count + after)
        made = dense(torch.tensor([count - 1]), keys, shown)[:, 0, ::-1]
        distances = (count - 1 - keys).numpy()[::-1]
        lines = {f"head {head}": line for head, line in zip(shown, made, strict=True)}
        return biases.bias_by_distance(lines, distances=distances, name=name, log=log and not after)

    return {"matrix": matrix, "distance": distance}


def index_pictures(
    name: str, what: str, index: Callable[[Any], Any], settings: Settings, *, usual: int = 256
) -> Pictures:
    """The views of whole numbers by query minus key (tokens): buckets, clipped distances."""
    import torch

    def matrix() -> Figure:
        at = torch.arange(settings.tokens(128, MOST_PAIRS))
        made = index(at[:, None] - at).double().numpy()
        causal = not settings.bidirectional
        return biases.bias_matrix(made[None], name=name, labels=[""], causal=causal, what=what)

    def distance() -> Figure:
        count = settings.tokens(usual, MOST_DISTANCES)
        distances = torch.arange(1 - count if settings.bidirectional else 0, count)
        lines = {what: index(distances).double().numpy()}
        return biases.bias_by_distance(lines, distances=distances.numpy(), name=name, what=what, steps=True)

    return {"matrix": matrix, "distance": distance}


def scaled(rotary: Rotary, settings: Settings, usual: str = SCALINGS) -> dict[str, Rotary]:
    """A rotation under each scaling that is asked for, by the scaling's name; unscaled it is the first.

    Raises:
        ValueError: a scaling that there is not, or that is a map of distances.
    """
    from theodolite.plan import LayerPlan, ModelPlan

    layers = (LayerPlan(rotate=rotary),)
    plan = ModelPlan(model_type="rotary", layers=layers, max_position_embeddings=settings.trained)
    return {name: made.rotaries[0] for name, made in scaled_plans(plan, settings, usual).items()}


def scaled_plans(plan: ModelPlan, settings: Settings, usual: str) -> dict[str, ModelPlan]:
    """A model's plan under each scaling that is asked for, by the scaling's name; as it is it is the first."""
    from theodolite.survey.scalings import parse_scalings

    asked = usual if settings.scaling is None else settings.scaling
    trained = plan.max_position_embeddings or settings.trained
    candidates = parse_scalings(asked, plan, to=settings.tokens(4 * trained))
    for candidate in candidates:
        if candidate.relative is not None:
            raise ValueError(
                f"scaling: got {candidate.name!r}, a map of distances, which leaves frequencies as they are; "
                f"`theodolite show {candidate.name}` draws it"
            )
    return {candidate.name: candidate.plan for candidate in candidates}


def spread(count: int, most: int) -> tuple[int, ...]:
    """0 to count - 1, or `most` of them at even steps, first and last among them."""
    if count <= most:
        return tuple(range(count))
    return tuple(round(number * (count - 1) / (most - 1)) for number in range(most))
