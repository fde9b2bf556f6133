"""Which encodings can be shown, and the views of each: `pictures_of("alibi", Settings())["matrix"]()` draws one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from theodolite.report.show import biases
from theodolite.report.show.canvas import Figure
from theodolite.report.show.pictures import (
    BIASES,
    MOST_DISTANCES,
    MOST_PAIRS,
    MOST_POSITIONS,
    ROTATIONS,
    VECTORS,
    Pictures,
    bias_pictures,
    index_pictures,
    rotation_pictures,
    scaled,
    spread,
    vector_pictures,
)
from theodolite.report.show.settings import Settings
from theodolite.report.show.stored import read_table

_THETA, _HEADS = 10_000.0, 8


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """An encoding that can be shown: what it is, its views, the settings that it reads, and what makes its pictures."""

    means: str
    views: Sequence[str]
    reads: Sequence[str]
    make: Callable[[str, Settings], Pictures]


def pictures_of(name: str, settings: Settings) -> Pictures:
    """The views of the encoding with that name; each draws its figure when it is called.

    Raises:
        ValueError: a name that no encoding has, or settings that it cannot take.
    """
    kind = name.partition(":")[0]
    if kind not in ENCODINGS:
        raise ValueError(f"encoding: got {name!r}; there are {', '.join(ENCODINGS)}")
    if name != kind and ENCODINGS[kind].make is not _map:
        raise ValueError(f"encoding: got {name!r}; {kind!r} takes no settings in its name, see --help")
    return ENCODINGS[kind].make(name, settings)


@contextmanager
def _seeded(settings: Settings) -> Iterator[None]:
    """What is initialised here comes from the seed, and the generator of whoever called is left alone."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        yield


def _sinusoidal(name: str, settings: Settings) -> Pictures:
    import torch

    from theodolite.encodings import Sinusoidal

    encoding = Sinusoidal(settings.dim, base=settings.theta or _THETA)
    table = encoding.table(torch.arange(settings.tokens(256, MOST_POSITIONS))).numpy()
    # The slower half hardly moves in so few tokens.
    lively = tuple(sorted({2 * (settings.dim * part // 20) for part in range(6)}))
    return vector_pictures(name, table, replace(settings, channels=settings.channels or lively))


def _learned(name: str, settings: Settings) -> Pictures:
    from theodolite.encodings import LearnedEmbedding

    if settings.table is not None:
        rows = read_table(settings.table, settings.key)
        return vector_pictures(name, rows[: settings.tokens(MOST_POSITIONS, MOST_POSITIONS)], settings)
    with _seeded(settings):
        table = LearnedEmbedding(settings.tokens(256, MOST_POSITIONS), settings.dim).weight.detach().numpy()
    return vector_pictures("learned, as it is initialised", table, settings)


def _rotary(name: str, settings: Settings) -> Pictures:
    from theodolite.plan import Rotary

    rotary = Rotary(head_dim=settings.head_dim, rope_theta=settings.theta or _THETA)
    return rotation_pictures(scaled(rotary, settings), settings, trained=settings.trained)


def _xpos(name: str, settings: Settings) -> Pictures:
    import torch

    from theodolite.encodings import XPos
    from theodolite.plan import Rotary

    rotary = Rotary(head_dim=settings.head_dim, rope_theta=settings.theta or _THETA)
    encoding = XPos(rotary, centre=0)
    count = settings.tokens(2048, min(MOST_DISTANCES, encoding.reach(torch.float32)))
    distances = torch.arange(count)

    def decay() -> Figure:
        turned, decayed = encoding.tables(distances, amplitude=False).q.cos, encoding.tables(distances).q.cos
        lines = {"RoPE": turned.double().mean(-1).numpy(), "xPos": decayed.double().mean(-1).numpy()}
        what = "score of alike q and k"
        return biases.bias_by_distance(lines, distances=distances.numpy(), name="xPos beside RoPE", what=what)

    def factors() -> Figure:
        tables = encoding.tables(distances).q
        sizes = (tables.cos.double() ** 2 + tables.sin.double() ** 2).sqrt()
        lines = {f"pair {pair}": sizes[:, pair].numpy() for pair in spread(rotary.rotary_dim // 2, 5)}
        return biases.bias_by_distance(lines, distances=distances.numpy(), name="xPos", what="factor of a pair")

    return {"decay": decay, "factors": factors}


def _alibi(name: str, settings: Settings) -> Pictures:
    from theodolite.encodings import ALiBi

    bias = ALiBi(settings.heads or _HEADS, symmetric=settings.bidirectional)
    return bias_pictures("ALiBi", bias, settings)


def _kerple(name: str, settings: Settings) -> Pictures:
    from theodolite.encodings import Kerple

    kind = name.removeprefix("kerple-")
    with _seeded(settings):
        bias = Kerple(settings.heads or _HEADS, kind=kind)
    return bias_pictures(f"KERPLE ({kind}), as it is initialised", bias, settings, log=kind == "log")


def _fire(name: str, settings: Settings) -> Pictures:
    import torch

    from theodolite.encodings import Fire

    with _seeded(settings):
        bias, title = Fire(settings.heads or _HEADS), "FIRE, as it is initialised"

    def distance() -> Figure:
        count = settings.tokens(8192, MOST_DISTANCES)
        distances = torch.arange(count)
        lines = {}
        for query in (count // 16, count // 4, count - 1):
            with torch.no_grad():
                made = bias.dense(torch.tensor([query]), torch.arange(query + 1))[0, 0, 0].flip(-1).double()
            padding = torch.full((count - len(made),), float("nan"), dtype=torch.float64)
            lines[f"query at {query:,}"] = torch.cat((made, padding)).numpy()
        name = f"{title}, head 0"
        return biases.bias_by_distance(lines, distances=distances.numpy(), name=name, log=True)

    return {**bias_pictures(title, bias, settings), "distance": distance}


def _t5(name: str, settings: Settings) -> Pictures:
    from theodolite.encodings import T5Bias

    bias = T5Bias(1, bidirectional=settings.bidirectional)
    title = f"T5, {bias.num_buckets} buckets up to {bias.max_distance} tokens"
    return index_pictures(title, "bucket", lambda distance: bias.bucket(-distance), settings)


def _shaw(name: str, settings: Settings) -> Pictures:
    return index_pictures(
        "Shaw, clip 16", "vector", lambda distance: (-distance).clamp(-16, 16) + 16, settings, usual=64
    )


def _deberta(name: str, settings: Settings) -> Pictures:
    from theodolite.encodings import log_bucket

    def index(distance: Any) -> Any:
        return log_bucket(distance, position_buckets=256, max_relative_positions=512)

    title = "DeBERTa-v3, 256 buckets up to 512 tokens"
    return index_pictures(title, "bucket", index, settings, usual=1024)


def _map(name: str, settings: Settings) -> Pictures:
    import torch

    from theodolite.plan import LayerPlan, ModelPlan, Rotary
    from theodolite.survey.scalings import candidate_of

    rotary = Rotary(head_dim=settings.head_dim, rope_theta=settings.theta or _THETA)
    plan = ModelPlan(model_type="rotary", layers=(LayerPlan(rotate=rotary),), max_position_embeddings=settings.trained)
    count = settings.tokens(4 * settings.trained, MOST_DISTANCES)
    relative = candidate_of(name, plan, to=count).relative
    if relative is None:
        raise ValueError(f"encoding: {name!r} moves no distance in {count:,} tokens; give a longer --length")
    title = f"{name}, trained to {settings.trained:,} tokens"

    def seen(queries: Any, keys: Any) -> Any:
        made = relative.relative(queries, keys).double()
        return made.masked_fill(~relative.seen(queries, keys), float("nan")).numpy()

    def matrix() -> Figure:
        at = torch.tensor(spread(count, MOST_PAIRS))
        return biases.bias_matrix(
            seen(at, at)[None], name=title, labels=[""], what="distance seen", positions=at.numpy()
        )

    def distance() -> Figure:
        keys = torch.arange(count)
        line = seen(torch.tensor([count - 1]), keys)[0, ::-1]
        lines = {"true distance": keys.double().numpy(), f"seen by the query at {count - 1:,}": line}
        return biases.bias_by_distance(lines, distances=keys.numpy(), name=title, what="distance seen")

    return {"matrix": matrix, "distance": distance}


_MAPS = {
    "self-extend": "Self-Extend: true distances nearby, groups far away",
    "dca": "dual chunk attention",
    "rerope": "ReRoPE: no distance beyond a window",
    "leaky-rerope": "leaky ReRoPE: distances beyond a window shortened",
    "sinks": "attention sinks: a window and the first tokens",
    "lm-infinite": "LM-Infinite: a window and the first tokens, distances limited",
}
_OF_BIASES = ("length", "heads", "bidirectional")
_OF_INDICES = ("length", "bidirectional")
_OF_ROTATIONS = ("length", "trained", "scaling", "position", "theta", "head_dim")
_LISTED: tuple[tuple[str, str, Sequence[str], Sequence[str], Callable[[str, Settings], Pictures]], ...] = (
    ("sinusoidal", "sines and cosines of the position", VECTORS, ("length", "dim", "theta", "channels"), _sinusoidal),
    (
        "learned",
        "a learned vector for each position (--table FILE)",
        VECTORS,
        ("length", "dim", "channels", "table", "key", "seed"),
        _learned,
    ),
    ("rotary", "rotary, under each of --scaling", ROTATIONS, _OF_ROTATIONS, _rotary),
    ("xpos", "xPos: rotary that decays", ("decay", "factors"), ("length", "theta", "head_dim"), _xpos),
    ("alibi", "ALiBi: a slope for each head", BIASES, _OF_BIASES, _alibi),
    ("t5", "T5's buckets of distances", BIASES, _OF_INDICES, _t5),
    ("kerple-log", "KERPLE, the logarithmic kernel", BIASES, (*_OF_BIASES, "seed"), _kerple),
    ("kerple-power", "KERPLE, the power kernel", BIASES, (*_OF_BIASES, "seed"), _kerple),
    ("fire", "FIRE: a network of the relative distance", BIASES, ("length", "heads", "seed"), _fire),
    ("shaw", "Shaw's clipped distances", BIASES, _OF_INDICES, _shaw),
    ("deberta", "DeBERTa-v3's buckets of distances", BIASES, _OF_INDICES, _deberta),
    *((name, means, BIASES, ("length", "trained"), _map) for name, means in _MAPS.items()),
)
ENCODINGS = {
    name: Encoding(means=means, views=views, reads=reads, make=make) for name, means, views, reads, make in _LISTED
}
"""Encodings by the names that `theodolite show` has for them."""
