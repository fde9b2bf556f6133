"""Findings about scalings: lengths and factors, YaRN's fields, frequencies that change with the length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from theodolite.plan.findings.finding import Finding
from theodolite.plan.model import ModelPlan
from theodolite.plan.rotary import Rotary
from theodolite.plan.scaling import DynamicNTK, Linear, Llama3, LongRoPE, YaRN

# Configs round their amplitudes to four digits.
_ROUNDED = 1e-3


def scaling_findings(plan: ModelPlan) -> Iterator[Finding]:
    """Of every distinct rotation."""
    for rotary in plan.rotaries:
        scaling = rotary.scaling
        if isinstance(scaling, (YaRN, Llama3)):
            yield from _lengths(scaling, plan.max_position_embeddings)
        if isinstance(scaling, YaRN):
            yield from _yarn(scaling, rotary)
        if isinstance(scaling, LongRoPE) and scaling.depends_on_length:
            yield from _longrope(scaling, plan.max_position_embeddings)
        if isinstance(scaling, DynamicNTK):
            yield _dynamic(scaling)
        if isinstance(scaling, (Linear, YaRN, Llama3)) and scaling.factor == 1.0:
            yield Finding(
                severity="warning",
                field="factor",
                message=f"the scaling {scaling.rope_type!r} has a factor of 1, so it changes nothing, and engines that "
                "look at its name alone take the model for one that was stretched",
                fix="leave the scaling out, or state the factor that is meant",
                reference="huggingface/transformers#38224",
            )


def _lengths(scaling: YaRN | Llama3, length: int | None) -> Iterator[Finding]:
    original = scaling.original_max_position_embeddings
    if length is None:
        return
    if original > length:
        yield Finding(
            severity="error",
            field="original_max_position_embeddings",
            message=f"the model was trained to {original:,} tokens by it, and max_position_embeddings is {length:,}: a "
            "scaling is for more than was trained, not for less",
            fix="state the trained length here, and the stretched one in max_position_embeddings",
            reference="huggingface/transformers#38224",
        )
        return
    if isinstance(scaling, Llama3):
        yield from _llama3_lengths(scaling, length)
        return
    reach = scaling.factor * original
    if math.isclose(reach, length, rel_tol=1e-9):
        return
    short = reach < length
    yield Finding(
        severity="error" if short else "warning",
        field="factor",
        message=f"factor {scaling.factor:g} times original_max_position_embeddings {original:,} is {reach:,.10g}, and "
        f"max_position_embeddings is {length:,}: "
        + (
            "the frequencies are stretched for fewer tokens than are promised"
            if short
            else "some engines allow the longer length and some the shorter, and older transformers replaced the "
            "factor by the ratio of the lengths"
        ),
        fix=(f"factor {length / original:g}, or " if length > original else "")
        + f"max_position_embeddings {reach:,.10g}",
        reference="huggingface/transformers#38224",
    )


def _llama3_lengths(scaling: Llama3, length: int) -> Iterator[Finding]:
    """Llama 3.1 itself states twice factor times original, and 3.2 half of it."""
    original, reach = (
        scaling.original_max_position_embeddings,
        scaling.factor * scaling.original_max_position_embeddings,
    )
    if original == length and scaling.factor > 1:
        yield Finding(
            severity="warning",
            field="original_max_position_embeddings",
            message=f"it is {original:,}, as max_position_embeddings is: nothing is stretched, and the slow pairs are "
            f"still slowed {scaling.factor:g} times",
            fix="state the length before the stretching (Llama 3.1 has 8,192), or leave the scaling out",
            reference="huggingface/transformers#38224",
        )
    elif 2 * reach < length * (1 - 1e-9):
        yield Finding(
            severity="warning",
            field="factor",
            message=f"factor {scaling.factor:g} times original_max_position_embeddings {original:,} is {reach:,.10g}, "
            f"and max_position_embeddings is {length:,}, more than twice that, which Llama 3.1 has: the slow pairs are "
            "stretched for fewer tokens than are promised",
            fix=f"factor {length / (2 * original):g}, or max_position_embeddings {2 * reach:,.10g}",
            reference="meta-llama/llama-models#241",
        )


def _yarn(scaling: YaRN, rotary: Rotary) -> Iterator[Finding]:
    if not scaling.truncate:
        low, high = scaling.ramp_ends(rotary.rope_theta, rotary.rotary_dim)
        yield Finding(
            severity="note",
            field="truncate",
            message=f"truncate is false, so the ramp runs from pair {low:.4g} to {high:.4g}; engines that always round "
            "its ends have other frequencies between",
            fix="use an engine that reads truncate; llama.cpp rounds always",
            reference="vllm-project/vllm#27722",
        )
    if scaling.attention_factor_given is not None:
        usual = scaling.magnitude(1.0)
        if not math.isclose(scaling.attention_factor_given, usual, rel_tol=_ROUNDED):
            yield Finding(
                severity="warning",
                field="attention_factor",
                message=f"it is {scaling.attention_factor_given:g}, where YaRN has {usual:.6g} for factor "
                f"{scaling.factor:g}; engines that do not read the key scale cos and sin by the latter",
                fix=f"for vLLM and SGLang add attn_factor {scaling.attention_factor_given / usual:.6g}, which they "
                "multiply with their own",
                reference="vllm-project/vllm#48351",
            )
    elif scaling.mscale is not None or scaling.mscale_all_dim is not None:
        yield from _mscale(scaling, latent=rotary.trailing)
    if (scaling.beta_fast, scaling.beta_slow) != (32.0, 1.0):
        step = "; equal, they make a step of the ramp" if scaling.beta_fast == scaling.beta_slow else ""
        yield Finding(
            severity="note",
            field="beta_fast, beta_slow",
            message=f"they are {scaling.beta_fast:g} and {scaling.beta_slow:g}, not the usual 32 and 1{step}; code "
            "that does not read them, or exchanges the two, divides other pairs",
            fix="nothing, where the engine reads both",
            reference="pytorch/torchtitan#3787",
        )


def _mscale(scaling: YaRN, *, latent: bool) -> Iterator[Finding]:
    both = bool(scaling.mscale) and bool(scaling.mscale_all_dim)
    given = f"mscale {scaling.mscale} and mscale_all_dim {scaling.mscale_all_dim}"
    usual = scaling.magnitude(1.0)
    if latent and both:
        yield Finding(
            severity="note",
            field="mscale, mscale_all_dim",
            message=f"{given}: cos and sin are multiplied by {scaling.attention_factor():.6g} and the scores of latent "
            f"attention by {scaling.score_factor():.6g}; code that forgets the latter is right at position 0 alone",
            fix="nothing, where the engine applies both",
            reference="NVIDIA/Megatron-LM#1429",
        )
    elif both and math.isclose(scaling.attention_factor(), usual, rel_tol=_ROUNDED):
        return
    elif both:
        yield Finding(
            severity="warning",
            field="mscale, mscale_all_dim",
            message=f"{given}: cos and sin are multiplied by the ratio of the two, {scaling.attention_factor():.6g}; "
            f"engines that read neither have {usual:.6g}",
            fix=f"state attention_factor {scaling.attention_factor():.6g} in place of both",
            reference="vllm-project/vllm#48621",
        )
    else:
        yield Finding(
            severity="warning",
            field="mscale" if scaling.mscale else "mscale_all_dim",
            message=f"{given}: with one of the two alone transformers has the usual amplitude, {usual:.6g}, and code "
            "after DeepSeek's takes the other for its default",
            fix="state both, or neither and attention_factor",
            reference="vllm-project/vllm#48621",
        )


def _longrope(scaling: LongRoPE, length: int | None) -> Iterator[Finding]:
    original = scaling.original_max_position_embeddings
    yield Finding(
        severity="warning",
        field="long_factor",
        message=f"the divisors change past {original:,} tokens, so keys that were cached before no longer fit the "
        "queries after; and engines that choose a list by the allocated length use the long one for short texts too",
        fix="settle one list for each sequence before it is read (plan.at_length), or read it again at the crossing",
        reference="vllm-project/vllm#27414",
    )
    factor = scaling.factor
    if factor is not None and factor < 1:
        yield Finding(
            severity="error",
            field="factor",
            message=f"it is {factor:g}: a factor divides positions, so it is at least 1; the amplitude is then 1",
            fix="state the stretched length over the trained one",
            reference="arXiv:2402.13753",
        )
    # A factor of 1 is how a config says that there is no amplitude.
    elif factor is not None and factor != 1 and length is not None and scaling.attention_factor_given is None:
        yield from _longrope_factor(factor, original, length)
    short, long = (sum(map(math.log, divisors)) for divisors in (scaling.short_factor, scaling.long_factor))
    if short > long + 1e-9:
        yield Finding(
            severity="error",
            field="short_factor, long_factor",
            message=f"the short list slows the pairs {_mean(scaling.short_factor):.4g} times on the mean and the long "
            f"one {_mean(scaling.long_factor):.4g} times: the list for long texts is the one that divides by more",
            fix="exchange the two lists",
            reference="lablup/mlxcel#1358",
        )
    quick = [name for name in ("short_factor", "long_factor") if min(getattr(scaling, name), default=1.0) < 1]
    if quick:
        yield Finding(
            severity="warning",
            field=", ".join(quick),
            message="some divisors are under 1: those pairs turn faster than in training, which no text of that length "
            "has shown the model",
            fix="divisors of at least 1",
            reference="arXiv:2402.13753",
        )


def _mean(divisors: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(math.fsum(map(math.log, divisors)) / len(divisors))


def _longrope_factor(factor: float, original: int, length: int) -> Iterator[Finding]:
    if math.isclose(factor * original, length, rel_tol=1e-9):
        return
    yield Finding(
        severity="warning",
        field="factor",
        message=f"it is {factor:g}, and max_position_embeddings {length:,} over original_max_position_embeddings "
        f"{original:,} is {length / original:g}: engines derive the amplitude from the one or from the other",
        fix=f"state factor {length / original:g}, or attention_factor",
        reference="huggingface/transformers#38224",
    )


def _dynamic(scaling: DynamicNTK) -> Finding:
    return Finding(
        severity="warning",
        field="rope_type",
        message=f"the base of dynamic NTK grows with every token past {scaling.original_max_position_embeddings:,}, so "
        "keys that were cached before no longer fit the queries after",
        fix="settle the base for the length that is needed (plan.at_length), or take YaRN",
        reference="huggingface/transformers#25104",
    )
