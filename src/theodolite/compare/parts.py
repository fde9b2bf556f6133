"""What the names of policies are made of: each part acts in one place, with settings of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from theodolite.encodings import (
    ALiBi,
    CoPE,
    DisentangledBias,
    Fire,
    ForgettingGate,
    Kerple,
    LearnedBase,
    LearnedEmbedding,
    LeRoPE,
    LogN,
    PerHeadRotary,
    RotaryEmbedding,
    Rotate,
    ShawBias,
    Sinusoidal,
    SSMax,
    T5Bias,
    TransformerXLBias,
    XPos,
)
from theodolite.plan import PlanError, Rotary

Place = Literal["embed", "rotate", "bias", "scale", "mask"]


@dataclass(frozen=True, kw_only=True)
class Host:
    """The model that a policy is for; `length` is what it is trained at (tokens)."""

    hidden_size: int
    num_heads: int
    head_dim: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a policy.

    Args:
        name: as policies have it.
        place: where it acts.
        what, source: for the table in docs/policies.md.
        settings: by name, with their defaults, the one that may go without its name first.
        make: of an `Embed`, `Bias` or `Scale`, from (host, **settings); None for what a mask says.
        rotary: the plan of a rotation, from (head_dim, **settings).
        turn: the rotation, from (plan, host, **settings).
        scalable: whether a scaling of its plan, after training, is one of the rotation.
        longest: the most tokens that it can read, from (training length, **settings).
        score_scale: what q.k is multiplied by, where it is not what the bias was made for, from (host, **settings).
    """

    name: str
    place: Place
    what: str
    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[..., Any] | None = None
    rotary: Callable[..., Rotary] | None = None
    turn: Callable[..., Rotate] | None = None
    scalable: bool = True
    longest: Callable[..., int] | None = None
    score_scale: Callable[..., float | None] | None = None


def _rotary(head_dim: int, theta: float = 10000.0, partial: float = 1.0, live: float = 1.0, **others: Any) -> Rotary:
    """A rotation of a share of the channels, or of a share of the pairs, fastest first."""
    width, pairs = 2 * round(head_dim * partial / 2), round(head_dim / 2 * live)
    for name, share, count in (("partial", partial, width), ("live", live, pairs)):
        if not 0 < share <= 1 or not count:
            raise PlanError(name, share, f"a share of the {head_dim} channels that leaves a pair: above 0, at most 1")
    return Rotary(
        head_dim=head_dim,
        rope_theta=float(theta),
        rotary_dim=width,
        live_pairs=None if live == 1 else min(pairs, width // 2),
    )


def _per_head(rotary: Rotary, host: Host, theta: float, highest: float) -> Rotate:
    steps = max(1, host.num_heads - 1)
    bases = (theta * (highest / theta) ** (i / steps) for i in range(host.num_heads))
    return PerHeadRotary([Rotary(head_dim=host.head_dim, rope_theta=base) for base in bases])


def _sinusoidal(host: Host, scale: float, channels: float, learned: bool) -> Sinusoidal:
    width = 2 * round(host.hidden_size * channels / 2)
    if not 0 < channels <= 1 or not width:
        raise PlanError("channels", channels, f"a share of the {host.hidden_size} channels: above 0, at most 1")
    part = None if width == host.hidden_size else slice(0, width)
    return Sinusoidal(width, strength=float(scale), learn_strength=learned, channels=part)


def _t5(host: Host, buckets: int, distance: int, scaled: bool) -> T5Bias:
    if buckets > _MOST_BUCKETS:
        raise PlanError("buckets", buckets, f"at most {_MOST_BUCKETS:,}")
    return T5Bias(host.num_heads, num_buckets=buckets, max_distance=distance, bidirectional=False)


_MOST_BUCKETS = 1024
"""Where buckets start is worked out in whole numbers, which grow with their count."""
_THETA = {"theta": 10000.0}

PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        Part(name="nope", place="mask", what="nothing: the causal mask alone", source="2305.19466"),
        Part(
            name="sinusoidal",
            place="embed",
            what="sines and cosines of the position, added to the embeddings; `channels` is the share of them that "
            "gets any, `learned` trains the scale",
            source="1706.03762, 3.5",
            settings={"scale": 1.0, "channels": 1.0, "learned": False},
            make=_sinusoidal,
        ),
        Part(
            name="learned",
            place="embed",
            what="a learned vector for each position of the training length, and none past it",
            source="1705.03122; GPT-2",
            settings={"std": 0.02},
            make=lambda host, std: LearnedEmbedding(host.length, host.hidden_size, std=float(std)),
            longest=lambda length, std: length,
        ),
        Part(
            name="rope",
            place="rotate",
            what="rotation of queries and keys; `partial` is the share of the channels that turn, `live` that of the "
            "pairs, fastest first",
            source="2104.09864",
            settings={"theta": 10000.0, "partial": 1.0, "live": 1.0},
            rotary=_rotary,
            turn=lambda rotary, host, **settings: RotaryEmbedding(rotary),
        ),
        Part(
            name="xpos",
            place="rotate",
            what="rotation, and a decay with the distance: slower with a larger `scale_base` (tokens)",
            source="2212.10554",
            settings={"theta": 10000.0, "scale_base": 512.0},
            rotary=lambda head_dim, theta, scale_base: _rotary(head_dim, theta),
            turn=lambda rotary, host, theta, scale_base: XPos(
                rotary, centre=host.length / 2, scale_base=float(scale_base)
            ),
        ),
        Part(
            name="learned-base",
            place="rotate",
            what="rotation whose base is trained, one a layer",
            source="docs/rotation.md",
            settings=_THETA,
            rotary=_rotary,
            turn=lambda rotary, host, theta: LearnedBase(rotary),
        ),
        Part(
            name="per-head",
            place="rotate",
            what="rotation with a base of its own in each head, from `theta` to `highest` in equal ratios",
            source="HARPE; Ms-PoE, 2403.04797",
            settings={"theta": 1000.0, "highest": 100000.0},
            rotary=lambda head_dim, theta, highest: _rotary(head_dim, theta),
            turn=_per_head,
            scalable=False,
        ),
        Part(
            name="lerope",
            place="rotate",
            what="rotation whose every frequency is trained",
            source="2607.10134",
            settings=_THETA,
            rotary=_rotary,
            turn=lambda rotary, host, theta: LeRoPE(rotary),
        ),
        Part(
            name="alibi",
            place="bias",
            what="a penalty that grows with the distance, a slope a head",
            source="2108.12409",
            make=lambda host: ALiBi(host.num_heads),
        ),
        Part(
            name="t5",
            place="bias",
            what="a learned number for each bucket of distances, to `distance` tokens; `scaled` divides q.k by the "
            "root of the head's width, which T5 itself does not",
            source="1910.10683",
            settings={"buckets": 32, "distance": 128, "scaled": True},
            make=_t5,
            # T5's own initialisation makes up for what it does not divide, and the decoder's does not.
            score_scale=lambda host, buckets, distance, scaled: host.head_dim**-0.5 if scaled else None,
        ),
        Part(
            name="kerple",
            place="bias",
            what="a learned kernel of the distance: its logarithm, or a power",
            source="2205.09921",
            settings={"kind": "log"},
            make=lambda host, kind: Kerple(host.num_heads, kind=kind),
        ),
        Part(
            name="fire",
            place="bias",
            what="a small network of the distance over the position",
            source="2310.04418",
            settings={"hidden": 32},
            make=lambda host, hidden: Fire(host.num_heads, hidden=hidden, init_L=float(host.length)),
        ),
        Part(
            name="shaw",
            place="bias",
            what="learned vectors of the distance for keys and values, to `distance` tokens",
            source="1803.02155",
            settings={"distance": 64},
            make=lambda host, distance: ShawBias(host.num_heads, host.head_dim, distance),
        ),
        Part(
            name="transformer-xl",
            place="bias",
            what="queries against projected sinusoids of the distance, with a bias for content and one for position",
            source="1901.02860",
            make=lambda host: TransformerXLBias(host.num_heads, host.head_dim, hidden_size=host.hidden_size),
        ),
        Part(
            name="deberta",
            place="bias",
            what="content against learned vectors of the distance, both ways, to `distance` tokens",
            source="2006.03654",
            settings={"distance": 128},
            make=lambda host, distance: DisentangledBias(
                host.num_heads, host.head_dim, hidden_size=host.hidden_size, max_relative_positions=distance
            ),
        ),
        Part(
            name="cope",
            place="bias",
            what="positions that count what a gate lets through, to `positions`",
            source="2405.18719",
            settings={"positions": 64},
            make=lambda host, positions: CoPE(host.num_heads, host.head_dim, positions),
        ),
        Part(
            name="fox",
            place="bias",
            what="a gate a token by which what is before it is forgotten",
            source="2503.02130",
            make=lambda host: ForgettingGate(host.num_heads, host.hidden_size),
        ),
        Part(
            name="logn",
            place="scale",
            what="scores times ln(tokens seen) / ln(training length), past that length",
            source="Su 2021; 2202.12172",
            make=lambda host: LogN(host.length),
        ),
        Part(
            name="ssmax",
            place="scale",
            what="scores times a learned multiple of ln(tokens seen)",
            source="2501.19399",
            make=lambda host: SSMax(host.num_heads),
        ),
        Part(
            name="sinks",
            place="mask",
            what="a learned logit a head in the softmax's denominator",
            source="gpt-oss",
        ),
    )
}
