"""Checks of how a rotation may be called: again, in batches, a token at a time, under autocast, with gradients."""

from __future__ import annotations

import copy

import torch
from torch import nn

from theodolite.conformance.asked import ROUNDINGS, Asked, distance
from theodolite.conformance.function_form import both, order, said
from theodolite.conformance.function_values import angles, pairs
from theodolite.conformance.verdict import Cause, Verdict, judged, skipped

# A prime number, above what one block of a kernel holds.
_HEADS = 131


def history(asked: Asked) -> Verdict:
    """The same call gives the same answer after a longer one, and after one in bfloat16: near, and half as far."""
    q, k = asked.inputs(heads=2, tokens=6)
    longer = min(9000, asked.furthest + 1)
    # Some keep a table of the longest call, and put it back for a short one: only a call between them shows it.
    places = [torch.arange(6), torch.arange(max(longer // 2 - 6, 0), max(longer // 2, 6))]
    before = [asked.turn_both(q.clone(), k.clone(), positions) for positions in places]
    long_q, long_k = asked.inputs(heads=2, tokens=longer)
    asked.turn(long_q.bfloat16(), long_k.bfloat16(), torch.arange(longer))
    after = [asked.turn_both(q.clone(), k.clone(), positions) for positions in reversed(places)][::-1]
    errors = [
        0.0 if torch.equal(one.nan_to_num(), two.nan_to_num()) else distance(one, two)
        for one, two in zip(before, after, strict=True)
    ]
    cause = Cause(words="something is kept of the longest call", reference="huggingface/transformers#27226")
    return judged(
        "history",
        max(errors),
        0.0,
        f"the same bits before and after a call of {longer:,} tokens",
        f"the same call gives another answer after one of {longer:,} tokens, by {max(errors):.2g}",
        at=1 if errors[0] else int(places[1][0]),
        cause=cause,
    )


def kinds(asked: Asked) -> Verdict:
    """Outputs are like the inputs in shape and dtype, with fewer key heads than query heads."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q, k = (x.to(dtype) for x in asked.inputs(heads=4, tokens=5, key_heads=2))
        for name, x, out in zip("qk", (q, k), asked.turn(q.clone(), k.clone(), torch.arange(5)), strict=True):
            if out.shape != x.shape or out.dtype != dtype:
                return Verdict(
                    name="shapes and dtypes",
                    outcome="fail",
                    message=f"{name} went in as {_kind(x)} and came out as {_kind(out)}",
                    cause="tables decide the dtype of the result" if out.shape == x.shape else None,
                    cure="cast the result to the dtype of the input",
                    reference="huggingface/transformers#36065",
                )
    return Verdict(name="shapes and dtypes", outcome="pass", message="outputs are like the inputs, grouped keys too")


def _kind(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


def inputs_untouched(asked: Asked) -> Verdict:
    """Queries and keys are not written to unless asked."""
    q, k = asked.inputs(heads=3, tokens=5)
    kept = q.clone(), k.clone()
    asked.rotate(
        q if asked.heads_first else q.transpose(1, 2), k if asked.heads_first else k.transpose(1, 2), torch.arange(5)
    )
    error = max(distance(q, kept[0]), distance(k, kept[1]))
    return judged(
        "inputs",
        error,
        0.0,
        "inputs are left as they were",
        "the inputs are overwritten: a caller that still needs them gets turned ones",
        cause=Cause(words="the rotation is done in place"),
    )


def axes(asked: Asked) -> Verdict:
    """The position is that of the token, not that of the head; tried where both axes have one length."""
    q, k = (x[:, :1, :1].expand(1, 5, 5, -1).contiguous() for x in asked.inputs(heads=1, tokens=1))
    out = asked.turn_both(q, k, torch.arange(5))
    apart = max(distance(one, one[:, :1].expand_as(one)) for one in out.chunk(2, dim=1))
    cause = Cause(words="the axis of heads is taken for the axis of tokens", reference="facebookresearch/xformers#841")
    if apart <= ROUNDINGS * asked.amplitude and torch.equal(out[:, :, 0], out[:, :, 1]):
        return Verdict(
            name="axes",
            outcome="fail",
            message="equal tokens at positions 0 and 1 come out equal",
            deviation=0.0,
            starts_at=1,
            cause="nothing turns along the axis of tokens",
        )
    if apart > ROUNDINGS * asked.amplitude:
        return Verdict(
            name="axes",
            outcome="fail",
            message="equal heads of one token are turned differently",
            deviation=apart,
            tolerance=ROUNDINGS * asked.amplitude,
            starts_at=0,
            cause=cause.words,
            cure=f"where its order is {order(not asked.heads_first)}, give heads_first={not asked.heads_first}",
            reference=cause.reference,
        )
    return _many_heads(asked, apart)


def _many_heads(asked: Asked, apart: float) -> Verdict:
    """As many equal heads as no kernel has in one block: each is turned as the first."""
    q, k = (x[:, :1].expand(1, _HEADS, 3, -1).contiguous() for x in asked.inputs(heads=1, tokens=3))
    off = []
    for name, out in zip(("queries", "keys"), asked.turn(q, k, torch.arange(9, 12)), strict=True):
        errors = [distance(out[:, head], out[:, 0]) for head in range(_HEADS)]
        apart = max(apart, *errors)
        off += [(head, name) for head, error in enumerate(errors) if error > ROUNDINGS * asked.amplitude]
    head, name = min(off, default=(0, ""))
    return judged(
        "axes",
        apart,
        ROUNDINGS * asked.amplitude,
        "positions follow tokens",
        f"of {_HEADS} equal heads of {name}, head {head} is turned differently from head 0",
        at=9,
    )


def positions_obeyed(asked: Asked) -> Verdict:
    """Tokens stand where the positions say: shuffled, with gaps, each as if alone."""
    q, k = asked.inputs(heads=2, tokens=6)
    positions = torch.tensor(asked.places(40, 2, 41, 1000, 0, 2))
    whole = asked.turn_both(q.clone(), k.clone(), positions)
    alone = [
        asked.turn_both(q[:, :, t : t + 1].clone(), k[:, :, t : t + 1].clone(), positions[t : t + 1]) for t in range(6)
    ]
    off = [distance(whole[:, :, t : t + 1], one) for t, one in enumerate(alone)]
    tolerance = ROUNDINGS * asked.amplitude
    bad = next((int(positions[t]) for t, one in enumerate(off) if one > tolerance), None)
    cause = Cause(words="positions are counted from the shape", reference="unslothai/unsloth#3795")
    return judged(
        "positions obeyed",
        max(off),
        tolerance,
        "tokens stand where their positions say",
        f"a token at position {bad} is turned differently among others than alone",
        at=bad,
        cause=cause,
    )


def batch(asked: Asked) -> Verdict:
    """A row of a batch is turned as if alone, at positions of its own."""
    q, k = asked.inputs(heads=2, tokens=4, rows=3)
    positions = torch.tensor([[0], [5], [min(700, asked.furthest - 3)]]) + torch.arange(4)
    return _rows(asked, "batch", q, k, positions)


def decode(asked: Asked) -> Verdict:
    """The same with one token a row, as a step of decoding has it."""
    q, k = asked.inputs(heads=2, tokens=1, rows=3)
    return _rows(asked, "decode", q, k, torch.tensor([[7], [min(700, asked.furthest)], [3]]))


def _rows(asked: Asked, name: str, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> Verdict:
    asked.turn(q.clone(), k.clone(), positions[0])
    try:
        together = asked.turn(q.clone(), k.clone(), positions)
    except Exception as error:
        if isinstance(error, MemoryError):
            raise
        return Verdict(
            name=name,
            outcome="fail",
            message=f"positions of {tuple(positions.shape)}, a row for each of the batch, are not taken: {said(error)}",
            cure="take positions (B, S) besides (S,), and give each row its own tables",
        )
    tolerance = ROUNDINGS * asked.amplitude
    worst, bad = 0.0, None
    for row in range(len(q)):
        one = slice(row, row + 1)
        alone = asked.turn(q[one].clone(), k[one].clone(), positions[one])
        apart = max(distance(a[one], b) for a, b in zip(together, alone, strict=True))
        if apart > tolerance and bad is None:
            bad = row
        worst = max(worst, apart)
    cause = None
    if bad is not None:
        first = asked.exact(q, positions[:1])
        if distance(together[0], first) <= 4 * tolerance:
            cause = Cause(
                words="every row is turned by the positions of the first", reference="linkedin/Liger-Kernel#477"
            )
        elif not together[0][1:].any():
            cause = Cause(words="all rows but the first come out as zeros", reference="ml-explore/mlx#3494")
        elif torch.equal(together[0][1:], q[1:]):
            cause = Cause(words="all rows but the first are not turned", reference="linkedin/Liger-Kernel#477")
    return judged(
        name,
        worst,
        tolerance,
        "each row is turned as if alone",
        f"row {bad} is turned differently in a batch of {len(q)} than alone",
        at=None if bad is None else int(positions[bad, 0]),
        cause=cause,
    )


def autocast(asked: Asked) -> Verdict:
    """Under autocast to bfloat16, angles are those of float32."""
    q, k = asked.inputs(heads=2, tokens=4)
    positions = torch.tensor(asked.places(255, 257, 1001, 4099))
    outside = asked.turn_both(q.clone(), k.clone(), positions)
    with torch.autocast("cpu", torch.bfloat16):
        inside = asked.turn_both(q.clone(), k.clone(), positions)
    error = distance(outside, inside)
    # The result itself may be rounded: that is autocast's own doing.
    tolerance = 3 * 2.0**-8 * asked.amplitude
    cause = Cause(
        words="angles are a matrix product, which autocast computes in bfloat16",
        reference="huggingface/transformers#29285",
    )
    return judged(
        "autocast",
        error,
        tolerance,
        "the same angles under autocast to bfloat16",
        f"under autocast to bfloat16, queries of length 1 come out {error:.2g} apart",
        at=255,
        cause=cause,
    )


def gradient(asked: Asked) -> Verdict:
    """The gradient of a rotation is the rotation back, times the amplitude."""
    if pairs(asked).failed or angles(asked).failed:
        return skipped("gradient", "pairs or angles are other ones than are claimed, and so is their gradient")
    if both(asked).failed:
        return skipped("gradient", "queries and keys are not turned alike, and neither is their gradient")
    q, k = (x.requires_grad_() for x in asked.inputs(heads=2, tokens=5))
    positions = torch.tensor(asked.places(0, 3, 17, 100, 1000))
    # Copies, for one that works in place may not write to what a gradient is asked for.
    out = asked.turn(q.clone(), k.clone(), positions)
    if not all(x.requires_grad for x in out):
        return Verdict(
            name="gradient",
            outcome="fail",
            message="the results have no gradient",
            cause="the rotation is done outside of what autograd sees",
        )
    given = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) for x in out]
    found = torch.autograd.grad(out, (q, k), given)
    worst = 0.0
    for x, g, one in zip((q, k), given, found, strict=True):
        exact_x = x.detach().double().requires_grad_()
        (exact,) = torch.autograd.grad(asked.exact(exact_x, positions), exact_x, g.double())
        worst = max(worst, distance(one, exact) / float(g.norm(dim=-1).max()))
    # Angles of float32 at position 1,000, and three roundings.
    tolerance = ROUNDINGS * asked.amplitude + 24 * 2.0**-24 * 1000
    return judged(
        "gradient",
        worst,
        tolerance,
        "gradients are turned back by the same angles",
        f"the gradient is off by {worst:.2g} of its length",
        cause=Cause(words="the backward pass turns by other angles, pairs or in the same direction"),
    )


def cast(asked: Asked) -> Verdict:
    """Of a module: `.to(bfloat16)` and back changes no angle."""
    name, module = "cast and back", asked.rotate
    if not isinstance(module, nn.Module):
        return skipped(name, "a function is not cast")
    positions = asked.places(1, 100, 4099)
    before = asked.units(positions)
    copied = Asked(
        copy.deepcopy(module).to(torch.bfloat16).to(torch.float32),
        asked.rotary,
        heads_first=asked.heads_first,
        length=asked.length,
        furthest=asked.furthest,
    )
    error = distance(before, copied.units(positions))
    if error == 0.0:
        return judged(name, 0.0, 0.0, "angles are the same after .to(bfloat16) and back", "")
    return Verdict(
        name=name,
        outcome="note",
        deviation=error,
        tolerance=0.0,
        starts_at=1,
        message=f"right as it is; after .to(bfloat16) and back, cos or sin is off by {error:.2g}",
        cause="frequencies are in a float buffer, which a cast rounds",
        cure="keep them out of float buffers",
        reference="NVIDIA-NeMo/Automodel#2549",
    )
