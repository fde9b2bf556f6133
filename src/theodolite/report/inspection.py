"""A plan in words: groups of equal layers, what follows from their rotations, and findings. Plain lines of text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from theodolite.plan.bias import Bias, alibi_slopes
from theodolite.plan.derived import Derived, derive, workable
from theodolite.plan.describe import describe_scaling
from theodolite.plan.layer_json import attends, kind_of, seen_by, usual_length
from theodolite.plan.model import LayerPlan, ModelPlan
from theodolite.plan.rotary import Rotary
from theodolite.plan.scaling import LongRoPE, Scaling

if TYPE_CHECKING:
    from theodolite.plan.differences import Difference
    from theodolite.plan.findings import Finding
    from theodolite.plan.open import Opened

_COLUMN = 16
_INDENT = "  "
# Models have up to some ten kinds of layer; a file may state one for each of thousands.
_MOST_GROUPS = 64


def lines(opened: Opened, findings: Sequence[Finding], *, width: int) -> list[str]:
    """The whole text, in lines of at most `width` characters where the words allow it."""
    plan = opened.plan
    stated = plan.max_position_embeddings
    head = f"{plan.model_type}, {len(plan.layers)} layers, " + (
        "no stated length" if stated is None else f"stated length {stated:,} tokens"
    )
    printed = _wrapped(opened.name, width, "") + _wrapped(head, width, "")
    if opened.location != opened.name:
        printed += _wrapped(f"read from {opened.location}", width, "")
    if plan.embed is not None:
        printed += ["", "embeddings", *_rows(_embed(plan), width)]
    length = usual_length(plan)
    groups = grouped(plan.layers)
    shown = groups[:_MOST_GROUPS]
    worked = frozenset(workable(dict.fromkeys(layer.rotate for layer, _ in shown if layer.rotate is not None)))
    for layer, numbers in shown:
        printed += ["", *_wrapped(f"layers {ranges(numbers)}", width, "")]
        printed += _rows(_layer(layer, length, worked, bare=plan.embed is None), width)
    if len(groups) > len(shown):
        printed += ["", *_wrapped(f"and {len(groups) - len(shown):,} more kinds of layer, which --json has", width, "")]
    printed += ["", *_findings(findings, width)]
    return printed


def grouped(layers: Sequence[LayerPlan]) -> list[tuple[LayerPlan, list[int]]]:
    """Equal layers together, in the order of first use."""
    groups: dict[LayerPlan, list[int]] = {}
    for i, layer in enumerate(layers):
        groups.setdefault(layer, []).append(i)
    return list(groups.items())


def ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as "0-2, 5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def difference_lines(one: str, other: str, found: Sequence[Difference], *, width: int) -> list[str]:
    """Where two plans differ, the first model's value above the other's."""
    if not found:
        return _wrapped(f"{one} and {other} say the same about positions", width, "")
    printed = [*_wrapped(f"- {one}", width, "  "), *_wrapped(f"+ {other}", width, "  ")]
    for difference in found:
        where = f"layers {ranges(difference.layers)}: " if difference.layers else ""
        printed += ["", *_wrapped(f"{where}{difference.field}", width, "  ")]
        printed += _wrapped(f"  - {_value(difference.one)}", width, "    ")
        printed += _wrapped(f"  + {_value(difference.other)}", width, "    ")
    return printed


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(map(_value, value))
    return "none" if value is None else str(value)


def _embed(plan: ModelPlan) -> Iterator[tuple[str, str]]:
    embed = plan.embed
    assert embed is not None
    yield "kind", f"{embed.kind} absolute positions"
    if embed.rows is not None:
        yield "rows", f"{embed.rows:,}" + (f", position 0 in row {embed.offset}" if embed.offset else "")
    if embed.kind == "sinusoidal":
        yield "channels", f"{embed.layout}, {embed.spacing}'s spacing"


def _layer(layer: LayerPlan, length: int | None, worked: frozenset[Rotary], *, bare: bool) -> Iterator[tuple[str, str]]:
    if not attends(layer):
        yield "kind", f"{kind_of(layer)}, no attention and no positions"
        return
    yield "kind", kind_of(layer)
    yield "sees", _mask(layer)
    if layer.rotate is None and layer.bias is None:
        yield "positions", "none of its own (NoPE)" if bare else "those that are added to the embeddings"
    if layer.bias is not None:
        yield "bias", bias_text(layer.bias)
    if layer.rotate is not None:
        yield from _rotation(layer.rotate)
    yield "score scale", _score_scale(layer)
    if layer.temperature is not None:
        warm = layer.temperature
        shift = f" + {warm.shift}" if warm.shift else ""
        yield "temperature", f"1 + {warm.beta:g} ln(1 + floor((position{shift}) / {warm.length:,})) on the query"
    if layer.mask.sinks:
        yield "sinks", "a learned logit per head"
    if layer.rotate is not None and layer.rotate in worked:
        yield from _derived(layer.rotate, derive(layer.rotate, length, seen_by((layer,))))


def bias_text(bias: Bias) -> str:
    """What is added to the scores, in a few words."""
    if bias.kind == "alibi":
        return _alibi(bias)
    kept = f"{bias.buckets:,} learned values a head" if bias.buckets is not None else "learned projections"
    far = "" if bias.max_distance is None else f", distances from {bias.max_distance:,} tokens on share one"
    if bias.kind != "deberta":
        return f"{'T5' if bias.kind == 't5' else 'Transformer-XL'}: {kept}{far}"
    further = [f"terms {' '.join(bias.terms)}"]
    further += [] if bias.layer_norm_eps is None else [f"layer norm {bias.layer_norm_eps:g}"]
    further += ["attention's own projections"] if bias.share_att_key else []
    return ", ".join([f"DeBERTa: {bias.buckets:,} vectors of distances{far}", *further])


def _alibi(bias: Bias) -> str:
    if bias.heads is None:
        return f"ALiBi: distance times a slope per head is taken from the score, slopes down to {_least(bias):.4g}"
    slopes = [bias.slope_factor * slope for slope in alibi_slopes(bias.heads, bias.bias_max)]
    return (
        f"ALiBi, {bias.heads} heads: distance times a slope per head is taken from the score, slopes "
        f"{max(slopes):.4g} to {min(slopes):.4g}"
    )


def _least(bias: Bias) -> float:
    return bias.slope_factor * float(2.0**-bias.bias_max)


def _mask(layer: LayerPlan) -> str:
    mask = layer.mask
    limits = []
    if mask.sliding_window is not None:
        limits.append(f"a window of {mask.sliding_window:,} tokens{'' if mask.causal else ' on each side'}")
    if mask.chunk is not None:
        limits.append(f"its own chunk of {mask.chunk:,} tokens")
    return f"{'what stands before' if mask.causal else 'both ways'}, {' and '.join(limits) or 'at any distance'}"


def _score_scale(layer: LayerPlan) -> str:
    if layer.rotate is None:
        return "head_dim ** -0.5" if layer.score_scale is None else f"{layer.score_scale:.6g}"
    usual = layer.rotate.head_dim**-0.5
    if layer.score_scale is None:
        return f"head_dim ** -0.5 = {usual:.6g}"
    return f"{layer.score_scale:.6g} ({layer.score_scale / usual:.6g} times head_dim ** -0.5)"


def _rotation(rotary: Rotary) -> Iterator[tuple[str, str]]:
    yield "base", f"{rotary.rope_theta:,.10g}"
    yield "channels", _channels(rotary)
    yield "pairs", "neighbouring channels (interleaved)" if rotary.interleaved else "two halves (half-split)"
    if rotary.mrope_section is not None:
        way = "alternating pair by pair" if rotary.mrope_interleaved else "in blocks"
        yield "axes", f"{' + '.join(map(str, rotary.mrope_section))} pairs, {way}"
    yield "scaling", _scaling(rotary.scaling)


def _scaling(scaling: Scaling) -> str:
    if type(scaling) is Scaling:
        return "none"
    if isinstance(scaling, LongRoPE) and not scaling.depends_on_length:
        # Of a GGUF file these are the divisors of Llama 3's scaling.
        least, most = min(scaling.short_factor), max(scaling.short_factor)
        return f"a divisor per pair, {least:.6g} to {most:.6g}"
    return describe_scaling(scaling)


def _channels(rotary: Rotary) -> str:
    if rotary.live_pairs is not None:
        return f"{2 * rotary.live_pairs} of {rotary.head_dim} turn, paired over all {rotary.rotary_dim} (proportional)"
    if rotary.rotary_dim == rotary.head_dim:
        return f"all {rotary.head_dim} turn"
    return f"the {'last' if rotary.trailing else 'first'} {rotary.rotary_dim} of {rotary.head_dim} turn (partial)"


def _derived(rotary: Rotary, numbers: Derived) -> Iterator[tuple[str, str]]:
    factor = rotary.attention_factor()
    if type(rotary.scaling) is not Scaling:
        longest = " by the long list" if isinstance(rotary.scaling, LongRoPE) and rotary.depends_on_length else ""
        yield "slowed by", f"{numbers.effective_factor:.6g} at most{longest}"
        yield "amplitude", f"{factor:.6g} on cos and sin, {factor**2:.6g} on the scores"
    if numbers.shortest_wavelength is None or numbers.longest_wavelength is None:
        yield "wavelengths", "none: no pair turns"
        return
    yield "wavelengths", f"{_tokens(numbers.shortest_wavelength)} to {_tokens(numbers.longest_wavelength)} tokens"
    if numbers.length is not None:
        turning = f"{numbers.unturned_pairs} of {numbers.pairs} pairs"
        narrow = numbers.seen is not None and numbers.seen < numbers.length
        seen = f"the {numbers.seen:,} tokens that a query sees" if narrow else f"{numbers.length:,} tokens"
        yield "incomplete", f"{turning} make no full turn in {seen}"
    first = numbers.first_negative
    found = f"at distance {first:,}" if first is not None else f"not within {numbers.searched:,} tokens"
    yield "mean cosine", f"first negative {found}"
    if numbers.errors is not None:
        for name, errors in (
            ("float32", numbers.errors.float32),
            ("bf16 inv_freq", numbers.errors.bfloat16_inv_freq),
            ("bf16 positions", numbers.errors.bfloat16_positions),
        ):
            cos, sin = errors
            yield name, f"cos off by {cos:.2g}, sin by {sin:.2g} at the end of {numbers.length:,} tokens"


def _tokens(count: float) -> str:
    if count >= 1e12:
        return f"{count:.3g}"
    return f"{count:,.0f}" if count >= 1000 else f"{count:.{max(0, 2 - math.floor(math.log10(count)))}f}"


def _findings(findings: Sequence[Finding], width: int) -> list[str]:
    if not findings:
        return ["findings: none"]
    printed = ["findings"]
    for finding in findings:
        printed += ["", *_wrapped(f"{finding.severity}: {finding.field}", width, _INDENT, first=_INDENT)]
        printed += _wrapped(finding.message, width, _INDENT * 2, first=_INDENT * 2)
        printed += _wrapped(f"change: {finding.fix}", width, _INDENT * 2, first=_INDENT * 2)
        printed += _wrapped(f"see: {finding.reference}", width, _INDENT * 2, first=_INDENT * 2)
    return printed


def _rows(rows: Iterable[tuple[str, str]], width: int) -> list[str]:
    printed = []
    for name, told in rows:
        printed += _wrapped(told, width, " " * (_COLUMN + 2), first=f"{_INDENT}{name}".ljust(_COLUMN + 2))
    return printed


def _wrapped(text: str, width: int, later: str, *, first: str = "") -> list[str]:
    # A path or a reference is copied whole.
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    ) or [first]
