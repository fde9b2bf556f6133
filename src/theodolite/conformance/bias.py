"""Check of the bias that a model's layers are given, ALiBi's slopes, against the published ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from theodolite.conformance.measured import Float64
from theodolite.conformance.subject import Subject
from theodolite.conformance.verdict import Cause, Verdict, skipped
from theodolite.conformance.watch import Seen, watched_biases

BIAS = "bias"


def bias(subject: Subject) -> Verdict:
    """The slopes of ALiBi that layers are given, head by head, in prefill and for a single query over a cache."""
    layers = subject.plan.layers
    if not any(layer.bias is not None and layer.bias.kind == "alibi" for layer in layers):
        return skipped(BIAS, "its scores get no bias of the distance")
    reads = list(_slopes(subject))
    if not reads:
        return skipped(BIAS, "its layers are given no bias of a form that is known")
    plan = next(layer.bias for layer in layers if layer.bias is not None)
    heads = len(reads[0][1])
    exact = alibi_slopes(heads, plan.bias_max) * plan.slope_factor
    for where, slopes in reads:
        # Falcon gives its layers the slopes, and multiplies them by this factor inside.
        slopes = slopes * plan.slope_factor if np.allclose(slopes * plan.slope_factor, exact, rtol=1e-2) else slopes
        off = np.abs(slopes - exact) / exact
        worst = float(np.nan_to_num(off, nan=np.inf).max())
        tolerance = 2.0**-20 + 256 * torch.finfo(subject.dtype).eps
        if worst > tolerance:
            head = int(np.nan_to_num(off, nan=np.inf).argmax())
            message = f"{where}: the slope of head {head} is {slopes[head]:.6g}, and should be {exact[head]:.6g}"
            cause = _slope_cause(slopes, heads, plan.bias_max, plan.slope_factor, exact)
            return Verdict(
                name=BIAS,
                outcome="fail",
                message=message,
                deviation=worst,
                tolerance=tolerance,
                starts_at=1,
                cause=cause.words if cause else None,
                reference=cause.reference if cause else None,
            )
    return Verdict(
        name=BIAS,
        outcome="pass",
        message=f"the slopes of {heads} heads are the published ones",
        deviation=worst,
        tolerance=tolerance,
    )


def alibi_slopes(heads: int, bias_max: float) -> Float64:
    """The published slopes (heads,): those of the power of two below, then every second of twice as many."""
    below = 2 ** (heads.bit_length() - 1)
    exponents = [bias_max * h / below for h in range(1, below + 1)]
    exponents += [bias_max * h / (2 * below) for h in range(1, 2 * below, 2)][: heads - below]
    return np.asarray(np.exp2(-np.asarray(exponents)))


def _slopes(subject: Subject) -> Iterator[tuple[str, Float64]]:
    layers = _bias_layers(subject)
    heads = getattr(subject.config, "num_attention_heads", None) or getattr(subject.config, "n_head", None)
    ids = subject.tokens(9)
    if not layers or heads is None:
        return
    with watched_biases(layers) as seen:
        subject.logits(ids)
    yield from _read_slopes("prefill", seen, heads)
    past = subject.cache_of(subject.step_on(ids[:, :8]))
    with watched_biases(layers) as seen:
        subject.step_on(ids[:, 8:], past, attention_mask=subject.mask(ids))
    yield from _read_slopes("a step of decoding", seen, heads)


def _read_slopes(where: str, seen: Seen, heads: int) -> Iterator[tuple[str, Float64]]:
    for given in seen.biases.values():
        table = given.reshape(-1, *given.shape[-2:])[:heads]
        if table.shape[0] == heads and table.shape[-1] >= 2:
            row = table[:, -1]
            yield where, ((row[:, -1] - row[:, 0]) / (row.shape[-1] - 1)).numpy()
            return


def _bias_layers(subject: Subject) -> tuple[torch.nn.Module, ...]:
    for module in subject.model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == len(subject.plan.layers):
            return tuple(module)
    return ()


def _slope_cause(
    slopes: Float64,
    heads: int,
    bias_max: float,
    factor: float,
    exact: Float64,
) -> Cause | None:
    plain = factor * np.exp2(-bias_max * np.arange(1, heads + 1) / heads)
    if not slopes.any():
        return Cause(
            words="the bias is zero: it is built on the number of queries", reference="keras-team/keras-hub#2861"
        )
    if np.allclose(slopes, plain, rtol=1e-4):
        words = f"the slopes are the plain series 2^(-{bias_max:g}h/{heads}), which is another one for {heads} heads"
        return Cause(words=words, reference="ml-explore/mlx#343")
    if np.allclose(slopes, -exact, rtol=1e-4):
        return Cause(words="the sign is the other way, so that far keys are rewarded")
    if np.allclose(slopes, exact, rtol=0.02):
        return Cause(words="slopes or bias are rounded to half precision", reference="Dao-AILab/flash-attention#845")
    return None
