"""A model's positions: one policy per layer, in the five places where a position can enter attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from theodolite.plan.bias import Bias, Embedding
from theodolite.plan.errors import PlanError, is_number, require_one_of, require_positive, require_whole
from theodolite.plan.rotary import Rotary
from theodolite.plan.scaling import Linear, LongRoPE, Scaling, YaRN

Part = Literal["decoder", "encoder"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """A multiplier of the query that grows with its position: `1 + beta * ln(1 + floor((m + shift) / length))`.

    Llama 4 has `shift=1` on its layers without rotation; Ministral 3 has `shift=0` on all layers.
    """

    beta: float
    length: int
    shift: int = 0

    def __post_init__(self) -> None:
        require_whole(length=self.length)
        require_whole(shift=self.shift, least=0)
        if not is_number(self.beta):
            raise PlanError("beta", self.beta, "it must be a finite number")


@dataclass(frozen=True, kw_only=True)
class Mask:
    """Which keys a query sees.

    Args:
        causal: only those at or before it.
        sliding_window: only the last so many, itself included (tokens).
        chunk: only those in its own block of so many (tokens).
        sinks: each head has a learned logit in the softmax's denominator.
    """

    causal: bool = True
    sliding_window: int | None = None
    chunk: int | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        require_whole(sliding_window=self.sliding_window, chunk=self.chunk)

    @property
    def reach(self) -> int | None:
        """The furthest distance (tokens) between a query and a key that it sees; None for no limit."""
        limits = [size - 1 for size in (self.sliding_window, self.chunk) if size is not None]
        return min(limits) if limits else None


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """The policy of one layer. `rotate=None` and `bias=None` together are NoPE.

    Args:
        score_scale: multiplies q.k before the softmax; None for `head_dim ** -0.5`.
        temperature: multiplies the query by a number of its position.
        layer_type: the model's own name for this kind of layer ("sliding_attention"), where it has one.
    """

    rotate: Rotary | None = None
    bias: Bias | None = None
    score_scale: float | None = None
    temperature: Temperature | None = None
    mask: Mask = field(default_factory=Mask)
    layer_type: str | None = None

    def __post_init__(self) -> None:
        require_positive(score_scale=self.score_scale)


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """All that a model says about positions.

    Args:
        model_type: the family's name as its config has it.
        max_position_embeddings: the length (tokens) that the config states, scaling included.
        layers: one policy a layer, first layer first. Layers without attention (Mamba, DeltaNet) have
            `LayerPlan(layer_type=...)` with nothing in it.
        embed: what is added to the embeddings, or None.
        one_rotary: the model's config and code have one rotary encoding for all layers, so a scaling is for all or
            none. It says how a plan can be carried out and not what it is, so plans are compared without it.
        part: which of the two stacks of an encoder-decoder this is, "encoder" or "decoder"; None where the model has
            one stack of layers.
    """

    model_type: str
    max_position_embeddings: int | None
    layers: tuple[LayerPlan, ...]
    embed: Embedding | None = None
    one_rotary: bool = field(default=False, compare=False)
    part: Part | None = None

    def __post_init__(self) -> None:
        require_one_of("part", self.part, (None, *PARTS))
        require_whole(max_position_embeddings=self.max_position_embeddings)
        object.__setattr__(self, "layers", tuple(self.layers))

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """The distinct rotary encodings, in order of first use."""
        return tuple(dict.fromkeys(layer.rotate for layer in self.layers if layer.rotate is not None))

    @property
    def depends_on_length(self) -> bool:
        """Whether any layer's frequencies change with the length of the sequence."""
        return any(rotary.depends_on_length for rotary in self.rotaries)

    def at_length(self, length: int) -> ModelPlan:
        """This plan with all frequencies settled for sequences of `length` tokens."""
        return self._map_rotaries(lambda layer, rotary: rotary.at_length(length))

    def with_scaling(self, scaling: Scaling) -> ModelPlan:
        """This plan with `scaling` on every rotary layer that can see past the stated length.

        Layers whose window keeps all distances inside it are left as they are: they meet no new distance. Where the
        model has one rotary encoding for all layers (`one_rotary`), they are scaled with the others.
        A native scaling is never dropped: YaRN over YaRN and LongRoPE over LongRoPE replace the settings,
        linear over linear multiplies the factors, and every other pair raises PlanError. In latent attention
        (DeepSeek) YaRN's temperature is split between cos, sin and the scores: the score scale moves along, and over
        a native YaRN the split stays the same.
        """
        self._require_scalable()
        return self._map_scalable(lambda layer: _scaled(layer, scaling))

    def with_rotary(self, rotary: Rotary) -> ModelPlan:
        """This plan with `rotary`, whatever it says, on every rotary layer that `with_scaling` would scale.

        Nothing of the rotary encoding before it is kept: `rotary` is made from it (`scalable`) by who knows what the
        model needs. Score scales, temperatures and masks stay.
        """
        self._require_scalable()
        return self._map_scalable(lambda layer: replace(layer, rotate=rotary))

    @property
    def scalable(self) -> tuple[Rotary, ...]:
        """The distinct rotary encodings of the layers that `with_scaling` would scale, in order of first use."""
        return tuple(dict.fromkeys(layer.rotate for layer in self.layers if layer.rotate and self._scales(layer)))

    def _require_scalable(self) -> None:
        if not self.rotaries:
            raise PlanError("layers", self.model_type, "a scaling needs rotary layers, and this model has none")
        if not any(self._sees_past(layer) for layer in self.layers):
            raise PlanError(
                "sliding_window",
                self.model_type,
                "no rotary layer sees past its window, so no scaling changes anything",
            )

    def _map_scalable(self, change: Callable[[LayerPlan], LayerPlan]) -> ModelPlan:
        return replace(self, layers=tuple(change(layer) if self._scales(layer) else layer for layer in self.layers))

    def _scales(self, layer: LayerPlan) -> bool:
        return layer.rotate is not None and (self.one_rotary or self._sees_past(layer))

    def _sees_past(self, layer: LayerPlan) -> bool:
        if layer.rotate is None:
            return False
        reach, length = layer.mask.reach, self.max_position_embeddings
        return reach is None or (length is not None and reach >= length)

    def _map_rotaries(self, change) -> ModelPlan:  # type: ignore[no-untyped-def]
        layers: Iterable[LayerPlan] = (
            layer if layer.rotate is None else replace(layer, rotate=change(layer, layer.rotate))
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))


def _scaled(layer: LayerPlan, wanted: Scaling) -> LayerPlan:
    assert layer.rotate is not None
    native, stacked, score_scale = layer.rotate.scaling, _stack(layer.rotate.scaling, wanted), layer.score_scale
    # Latent attention is the only one whose turning channels are the last of the head.
    if layer.rotate.trailing:
        if isinstance(native, YaRN) and isinstance(stacked, YaRN):
            stacked = replace(
                stacked,
                mscale=native.mscale if stacked.mscale is None else stacked.mscale,
                mscale_all_dim=native.mscale_all_dim if stacked.mscale_all_dim is None else stacked.mscale_all_dim,
            )
        score_scale = _moved(layer.rotate.head_dim**-0.5, score_scale, native.score_factor(), stacked.score_factor())
    return replace(layer, rotate=replace(layer.rotate, scaling=stacked), score_scale=score_scale)


def _moved(plain: float, score_scale: float | None, was: float, now: float) -> float | None:
    """The score scale with `now` in place of `was`; as a config's reader has it, to the last bit, where it was so."""
    given = plain if score_scale is None else score_scale
    if not math.isclose(given, plain * was):
        return given * (now / was)
    return None if now == 1.0 else plain * now


def _stack(native: Scaling, wanted: Scaling) -> Scaling:
    if type(native) is Scaling or type(wanted) is Scaling:
        return wanted if type(native) is Scaling else native
    if isinstance(native, Linear) and isinstance(wanted, Linear):
        return Linear(factor=native.factor * wanted.factor)
    if native == wanted:
        return native
    if (isinstance(native, YaRN) and isinstance(wanted, YaRN)) or (
        isinstance(native, LongRoPE) and isinstance(wanted, LongRoPE)
    ):
        return wanted
    raise PlanError(
        "scaling",
        wanted.rope_type,
        f"the model already carries {native.rope_type!r}, which must not be lost, and the two do not stack",
    )
