"""Position policies by name: `rope`, `rope:theta=50000`, `rope+logn`, `sinusoidal:channels=0.5+rope:partial=0.5`,
`rope@64/rope@64/nope`. docs/policies.md has the language and a table of the parts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from theodolite.compare.parts import PARTS, Host, Part
from theodolite.encodings import Embed, Policy, Rotate
from theodolite.plan import LayerPlan, Mask, ModelPlan, PlanError, Rotary
from theodolite.plan.errors import is_number

FIELD = "policy"
_JOINS = re.compile(r"\+(?!\d)")
"""A + between parts; one before a digit is that of an exponent."""
_LARGEST = 65_536
"""Whole numbers in settings are counts of what memory is kept for."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """The modules of a policy: what is added to the embeddings, and one `Policy` a layer."""

    embed: Embed | None
    policies: list[Policy]


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """What a name says of one layer: parts by name with all their settings, and a window (tokens)."""

    parts: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]
    window: int | None

    def of(self, place: str) -> list[tuple[Part, dict[str, Any]]]:
        return [(PARTS[name], dict(settings)) for name, settings in self.parts if PARTS[name].place == place]

    def has(self, name: str) -> bool:
        return any(part == name for part, _ in self.parts)

    @property
    def mask(self) -> Mask:
        return Mask(sliding_window=self.window, sinks=self.has("sinks"))

    @property
    def name(self) -> str:
        named = "+".join(_named(PARTS[part], dict(settings)) for part, settings in self.parts)
        return named if self.window is None else f"{named}@{self.window}"


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """A policy by name; equal policies have equal names.

    Args:
        name: in its shortest form, parts in a fixed order, defaults left out.
    """

    name: str
    layers: tuple[_Layer, ...] = field(repr=False)

    def longest(self, length: int) -> int | None:
        """The most tokens that it can read when trained at `length`; None for no limit."""
        limits = [
            part.longest(length, **settings)
            for part, settings in self.layers[0].of("embed")
            if part.longest is not None
        ]
        return min(limits, default=None)

    def build(
        self,
        *,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        length: int,
        plan: ModelPlan | None = None,
    ) -> Places:
        """Fresh modules for a model that is trained at `length` tokens; what is learned is each layer's own.

        Args:
            plan: as `plan` gives it with a scaling put on it: rotations are those of its layers.

        Raises:
            PlanError: settings that a model of this size cannot have.
        """
        with _of_policy(self.name):
            return self._build(hidden_size, num_layers, num_heads, head_dim, length, plan)

    def _build(
        self, hidden_size: int, num_layers: int, num_heads: int, head_dim: int, length: int, plan: ModelPlan | None
    ) -> Places:
        host = Host(hidden_size=hidden_size, num_heads=num_heads, head_dim=head_dim, length=length)
        embeds = self.layers[0].of("embed")
        embed = None
        for part, settings in embeds:
            assert part.make is not None
            embed = part.make(host, **settings)
        policies = []
        for i in range(num_layers):
            layer = self._layer(i)
            rotary = None if plan is None else plan.layers[i].rotate
            policies.append(_policy(layer, host, rotary))
        return Places(embed=embed, policies=policies)

    def plan(self, *, num_layers: int, head_dim: int, length: int) -> ModelPlan | None:
        """The plan of its rotations, to put a scaling on; None where it has none, or one that no scaling is for."""
        layers = []
        for i in range(num_layers):
            layer = self._layer(i)
            rotary = None
            for part, settings in layer.of("rotate"):
                if not part.scalable or layer.of("bias"):
                    return None
                assert part.rotary is not None
                rotary = part.rotary(head_dim, **settings)
            layers.append(LayerPlan(rotate=rotary, mask=layer.mask))
        if not any(layer.rotate is not None for layer in layers):
            return None
        return ModelPlan(model_type=self.name, max_position_embeddings=length, layers=tuple(layers))

    def _layer(self, index: int) -> _Layer:
        return self.layers[index % len(self.layers)]


def read_policy(name: str) -> PolicySpec:
    """The policy of that name.

    Raises:
        PlanError: an unknown part or setting, a value out of range, parts that cannot stand together.
    """
    layers = tuple(_read_layer(name, text) for text in name.strip().split("/"))
    embeds = {tuple(part for part in layer.parts if PARTS[part[0]].place == "embed") for layer in layers}
    if len(embeds) > 1:
        raise PlanError(FIELD, name, "what is added to the embeddings is the whole model's: say it alike in all layers")
    layers = _once(layers)
    spec = PolicySpec(name="/".join(layer.name for layer in layers), layers=layers)
    # Settings are checked by what is made of them, for a model of any size.
    spec.build(hidden_size=64, num_layers=len(layers), num_heads=2, head_dim=32, length=64)
    return spec


@contextmanager
def _of_policy(name: str) -> Iterator[None]:
    """What a part refuses, as an error of the policy."""
    try:
        yield
    except PlanError as error:
        raise PlanError(FIELD, name, f"{error.field}: {error.allowed}") from None
    except ValueError as error:
        raise PlanError(FIELD, name, str(error)) from None


def _once(layers: tuple[_Layer, ...]) -> tuple[_Layer, ...]:
    """The shortest run of layers that gives these by repeating it."""
    count = len(layers)
    periods = (p for p in range(1, count + 1) if layers == layers[:p] * (count // p))
    return layers[: next(periods)]


def parts_table() -> str:
    """All parts as a Markdown table, which docs/policies.md has."""
    rows = ["| part | place | settings | what it is | source |", "|---|---|---|---|---|"]
    for part in PARTS.values():
        settings = ", ".join(f"{key}={_shown(value)}" for key, value in part.settings.items())
        rows.append(f"| `{part.name}` | {part.place} | {settings} | {part.what} | {part.source} |")
    return "\n".join(rows)


def _policy(layer: _Layer, host: Host, rotary: Rotary | None) -> Policy:
    rotate: Rotate | None = None
    for part, settings in layer.of("rotate"):
        assert part.rotary is not None
        assert part.turn is not None
        own = part.rotary(host.head_dim, **settings) if rotary is None else rotary
        rotate = part.turn(own, host, **settings)
    made: dict[str, Any] = {
        place: [part.make(host, **settings) for part, settings in layer.of(place) if part.make is not None]
        for place in ("bias", "scale")
    }
    scales = [part.score_scale(host, **settings) for part, settings in layer.of("bias") if part.score_scale is not None]
    return Policy(
        rotate=rotate,
        bias=_one(made["bias"]),
        scale=_one(made["scale"]),
        score_scale=next((scale for scale in scales if scale is not None), None),
        mask=layer.mask,
    )


def _one(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else parts or None


def _read_layer(name: str, text: str) -> _Layer:
    named, at, window = text.partition("@")
    if at and not re.fullmatch(r"0*[1-9][0-9]{0,12}", window):
        raise PlanError(FIELD, name, f"{window!r} after @ is no window: give tokens, such as rope@64")
    written = _JOINS.split(named)
    parts = dict(_read_part(name, part) for part in written)
    if len(parts) < len(written):
        raise PlanError(FIELD, name, f"a part stands twice in {text!r}")
    for place, kind in (("rotate", "rotations"), ("embed", "vectors for the embeddings")):
        several = [part for part in parts if PARTS[part].place == place]
        if len(several) > 1:
            raise PlanError(FIELD, name, f"{' and '.join(several)} are both {kind}, of which a layer has one")
    if len(parts) > 1:
        parts.pop("nope", None)
    order = list(PARTS)
    return _Layer(
        parts=tuple(sorted(parts.items(), key=lambda part: order.index(part[0]))), window=int(window) if at else None
    )


def _read_part(name: str, text: str) -> tuple[str, tuple[tuple[str, Any], ...]]:
    kind, *given = (piece.strip() for piece in text.split(":"))
    if kind not in PARTS:
        raise PlanError(FIELD, name, f"no part is named {kind!r}; allowed: {', '.join(PARTS)}")
    settings, said = dict(PARTS[kind].settings), set()
    for i, piece in enumerate(given):
        key, equals, value = piece.partition("=")
        if not equals and i == 0 and settings:
            key, value = next(iter(settings)), piece
        if key not in settings:
            raise PlanError(FIELD, name, f"{kind} has no setting {key!r}; {_allowed(settings)}")
        if key in said:
            raise PlanError(FIELD, name, f"{key!r} stands twice in {text!r}")
        said.add(key)
        settings[key] = _value(name, key, value, settings[key])
    return kind, tuple(settings.items())


def _allowed(settings: dict[str, Any]) -> str:
    return "it has none" if not settings else "it has " + ", ".join(f"{k} ({_shown(v)})" for k, v in settings.items())


def _value(name: str, key: str, text: str, usual: Any) -> Any:
    """A value of the same type as the default."""
    if isinstance(usual, str):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(usual, bool):
        if isinstance(value, bool):
            return value
        raise PlanError(FIELD, name, f"{key} is {text!r}; it must be true or false")
    if not is_number(value) or value <= 0:
        raise PlanError(FIELD, name, f"{key} is {text!r}; it must be a finite number above 0")
    if isinstance(usual, int):
        if value != int(value) or value > _LARGEST:
            raise PlanError(FIELD, name, f"{key} is {text!r}; it must be a whole number of at most {_LARGEST:,}")
        return int(value)
    return float(value)


def _named(part: Part, settings: dict[str, Any]) -> str:
    changed = [(key, value) for key, value in settings.items() if value != part.settings[key]]
    return ":".join([part.name, *(f"{key}={_shown(value)}" for key, value in changed)])


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
    return str(value)
