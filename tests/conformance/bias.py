"""Is an attention bias right? Give your own function, and read in plain words what fails.

    from tests.conformance.bias import alibi, failures

    def bias(q_positions, k_positions):      # (Sq,) and (Sk,), integers, in any order
        ...                                  # your model's code
        return bias                          # (H, Sq, Sk): what is added to the scores

    for sentence in failures(bias, alibi(num_heads=12)):
        print(sentence)

Needs torch only. Expectations are ready for ALiBi and T5; for another bias give its own formula to `Expected`. Checks
ask for single queries, shuffled and padded positions, and distances far out, for most faults pass on the square of
one short sequence. Each returns a sentence, or None if all is well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

Bias = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the bias should be.

    Args:
        num_heads: heads that the function gives.
        value: the number for (head, query position, key position), in Python floats.
        causal: only keys up to the query count; otherwise all do.
        relative: a function of the distance alone.
        up_to_rows: a number that all keys of one query share may be added, as BLOOM and MPT do: softmax takes it out.
        exact_to: the largest position at which distances are told apart (tokens).
        mistakes: other formulas that it is often taken for, by a name that ends "it is ...".
    """

    num_heads: int
    value: Callable[[int, int, int], float]
    causal: bool = True
    relative: bool = True
    up_to_rows: bool = False
    exact_to: int = 4099
    mistakes: Sequence[tuple[str, Callable[[int, int, int], float]]] = ()

    def table(
        self, q: Sequence[int], k: Sequence[int], value: Callable[[int, int, int], float] | None = None
    ) -> Tensor:
        """(H, Sq, Sk), float64."""
        value = self.value if value is None else value
        return torch.tensor(
            [[[value(head, m, n) for n in k] for m in q] for head in range(self.num_heads)], dtype=torch.float64
        )

    def seen(self, q: Sequence[int], k: Sequence[int]) -> Tensor:
        """(Sq, Sk): the pairs that count."""
        return torch.tensor([[n <= m or not self.causal for n in k] for m in q])


def alibi(num_heads: int, *, bias_max: float = 8.0, causal: bool = True, up_to_rows: bool = False) -> Expected:
    """ALiBi with the published slopes: those of the power of two below, then every second of twice as many."""
    below = 2 ** int(math.log2(num_heads))
    exponents = [bias_max * h / below for h in range(1, below + 1)]
    exponents += [bias_max * h / (2 * below) for h in range(1, 2 * below + 1, 2)][: num_heads - below]

    def slope_times_distance(exponent_of: Callable[[int], float]) -> Callable[[int, int, int], float]:
        return lambda head, m, n: -(2.0 ** -exponent_of(head)) * (m - n if causal else abs(m - n))

    return Expected(
        num_heads=num_heads,
        value=slope_times_distance(lambda head: exponents[head]),
        causal=causal,
        up_to_rows=up_to_rows,
        mistakes=(
            (
                f"the plain geometric series 2^(-{bias_max:g}h/{num_heads}), which for {num_heads} heads is not "
                "the published list",
                slope_times_distance(lambda head: bias_max * (head + 1) / num_heads),
            ),
            (
                f"a series that starts at slope 1: 2^(-{bias_max:g}h/{num_heads}) counted from h = 0",
                slope_times_distance(lambda head: bias_max * head / num_heads),
            ),
        ),
    )


def t5(weight: Sequence[Sequence[float]], *, bidirectional: bool, max_distance: int = 128) -> Expected:
    """T5's bias from its table, `weight[bucket][head]`."""
    count = len(weight) // 2 if bidirectional else len(weight)
    exact = count // 2

    def bucket(distance: int) -> int:
        if distance < exact:
            return distance
        growth = math.log(distance / exact) / math.log(max_distance / exact) * (count - exact)
        # A distance at which a bucket starts may come out a rounding below it.
        return min(exact + int(growth + 1e-9), count - 1)

    def one_way(head: int, m: int, n: int) -> float:
        return weight[bucket(max(m - n, 0))][head]

    def both_ways(head: int, m: int, n: int) -> float:
        return weight[bucket(abs(m - n)) + (count if n > m else 0)][head]

    mistakes: list[tuple[str, Callable[[int, int, int], float]]] = []
    if bidirectional:
        mistakes.append(("with the two directions exchanged", lambda head, m, n: both_ways(head, n, m)))
        mistakes.append(("with one half of the buckets for both directions", one_way))
    return Expected(
        num_heads=len(weight[0]),
        value=both_ways if bidirectional else one_way,
        causal=not bidirectional,
        mistakes=mistakes,
    )


def failures(bias: Bias, expected: Expected) -> list[str]:
    """Everything that is wrong, a sentence each; empty if all is well."""
    return [sentence for check in CHECKS if (sentence := check(bias, expected)) is not None]


def no_history(bias: Bias, expected: Expected) -> str | None:
    """The same call gives the same answer after a longer one."""
    short = torch.arange(6)
    before = bias(short, short).clone()
    bias(torch.arange(300), torch.arange(300))
    after = bias(short, short)
    if before.shape == after.shape and torch.equal(before, after):
        return None
    return "the same call gives another answer after a longer one"


def shape(bias: Bias, expected: Expected) -> str | None:
    """One number for each head, query and key; where some axis is 1, broadcasting hides what is missing."""
    heads = expected.num_heads
    hints = {
        (heads, 3, 3): "it is built on the number of queries alone",
        (heads, 7, 7): "it is built on the number of keys alone, and a decoding step would add the rows of others",
        (heads, 1, 7): "one row serves all queries; if that is meant (BLOOM, MPT), expand it and say up_to_rows=True",
        (3, 7, heads): "the axis of heads comes first",
    }
    out = bias(torch.arange(4, 7), torch.arange(7))
    return _wrong_shape(out, expected, 3, 7, hints)


def decoding(bias: Bias, expected: Expected) -> str | None:
    """A single query over the cache gets the row that it has in prefill."""
    whole, step = bias(torch.arange(9), torch.arange(9)), bias(torch.tensor([8]), torch.arange(9))
    wrong = _wrong_shape(whole, expected, 9, 9) or _wrong_shape(step, expected, 1, 9)
    if wrong is not None:
        return wrong
    whole, step = _shared_out(whole, expected), _shared_out(step, expected)
    tolerance = _tolerance(expected, [8], range(9))
    if _distance(step, whole[:, 8:]) <= tolerance:
        return None
    hint = ""
    if not step.any():
        hint = ": it gets zeros, so the step has no positions"
    elif _distance(step[..., 1:], whole[:, :1, 1:]) <= tolerance:
        hint = ": it gets the row of the first query, so the length of the cache is not added"
    return f"the query at position 8 gets another row in a decoding step than in prefill{hint}"


def values(bias: Bias, expected: Expected) -> str | None:
    """The numbers, near by; if they are those of a usual mistake, its name."""
    q, k = [11, 4, 30], [0, 3, 4, 9, 11] + ([] if expected.causal else [40])
    wrong = _compare(bias, expected, q, k)
    if wrong is None:
        return None
    head, m, n, given, wanted = wrong
    sentence = f"head {head}, query at {m}, key at {n}: the bias should be {wanted:.6g}, and is {given:.6g}"
    return sentence + _hint(bias, expected, q, k)


def order_of_positions(bias: Bias, expected: Expected) -> str | None:
    """Tokens stand where the positions say, not where they lie in memory."""
    q, k = [40, 2, 41], [41, 0, 2, 40, 1]
    wrong = _compare(bias, expected, q, k)
    if wrong is None or _compare(bias, expected, [0, 1, 2], [0, 1, 2]) is not None:
        return None
    return f"tokens at positions {q} are given the bias of others: positions are counted from the shape"


def left_padding(bias: Bias, expected: Expected) -> str | None:
    """Real tokens have the bias of an unpadded row; padding has position 0, as `cumsum(mask) - 1` gives it."""
    positions = torch.tensor([0, 0, 0, 0, 1, 2, 3])
    alone, padded = bias(torch.arange(4), torch.arange(4)), bias(positions, positions)
    wrong = _wrong_shape(alone, expected, 4, 4) or _wrong_shape(padded, expected, 7, 7)
    if wrong is not None:
        return wrong
    difference = _shared_out(padded[:, 3:, 3:], expected) - _shared_out(alone, expected)
    if float((difference.abs() * expected.seen(range(4), range(4))).max()) <= _tolerance(expected, range(4), range(4)):
        return None
    return (
        "real tokens behind 3 tokens of padding on the left get another bias than without padding: "
        "padding changes it, or positions are counted from the shape"
    )


def shifts(bias: Bias, expected: Expected) -> str | None:
    """Where the bias is one of the distance, a query and its keys may move together."""
    if not expected.relative:
        return None
    at = [bias(torch.tensor([start + 5]), torch.arange(start, start + 6)) for start in (0, 7, 1000)]
    wrong = [_wrong_shape(one, expected, 1, 6) for one in at]
    if any(wrong):
        return next(sentence for sentence in wrong if sentence)
    spread = max(_distance(_shared_out(one, expected), _shared_out(at[0], expected)) for one in at)
    if spread <= _tolerance(expected, [1005], range(1000, 1006)):
        return None
    return f"a query and its keys that move together should keep their bias, and it changes by {spread:.2g}"


def every_distance(bias: Bias, expected: Expected) -> str | None:
    """One by one: a bucket border that a rounded logarithm moves is a single distance."""
    if _compare(bias, expected, [20], [0, 7, 20]) is not None:
        return None
    keys = list(range(301))
    wrong = [n for n in reversed(keys) if _compare(bias, expected, [300], [n]) is not None]
    if not wrong:
        return None
    head, m, n, given, wanted = _compare(bias, expected, [300], wrong[:1]) or (0, 300, wrong[0], math.nan, math.nan)
    return (
        f"{len(wrong)} of the distances up to 300 have another bias than they should, the first {m - n}: "
        f"in head {head} it should be {wanted:.6g}, and is {given:.6g}"
    )


def distances_apart(bias: Bias, expected: Expected) -> str | None:
    """Far out, neighbouring distances differ as they should: half precision cannot tell them apart."""
    far = expected.exact_to
    keys = [*range(1, far, far // 300), far - 257]
    wrong = _compare(bias, expected, [far], keys)
    if wrong is None or _compare(bias, expected, [20], range(21)) is not None:
        return None
    given = _shared_out(bias(torch.tensor([far]), torch.tensor(keys)), expected)
    wanted = _shared_out(expected.table([far], keys), expected)
    error = float(((given - wanted).abs() / wanted.abs().clamp(min=1e-30)).max())
    cause = ""
    for dtype in (torch.float16, torch.bfloat16):
        # One rounding of each factor and one of the product.
        if not cause and error <= 2 * torch.finfo(dtype).eps:
            cause = f": it is computed in {str(dtype).removeprefix('torch.')}"
    head, _, n, one, other = wrong
    return f"at distance {far - n} the bias of head {head} should be {other:.7g}, and is {one:.7g}{cause}"


def future(bias: Bias, expected: Expected) -> str | None:
    """Without a causal mask, keys after the query count too."""
    if expected.causal:
        return None
    wrong = _compare(bias, expected, [3, 0], [0, 3, 5, 60])
    if wrong is None or _compare(bias, expected, [9], range(10)) is not None:
        return None
    head, m, n, given, wanted = wrong
    return (
        f"a key {n - m} tokens after its query should have {wanted:.6g} in head {head}, and has {given:.6g}: "
        "it is a bias for causal attention"
    )


# History first, before other checks have made some.
CHECKS = (
    no_history,
    shape,
    decoding,
    values,
    order_of_positions,
    left_padding,
    shifts,
    every_distance,
    distances_apart,
    future,
)


def _wrong_shape(
    out: Tensor,
    expected: Expected,
    queries: int,
    keys: int,
    hints: Mapping[tuple[int, ...], str] = MappingProxyType({}),
) -> str | None:
    given, wanted = tuple(out.shape), (expected.num_heads, queries, keys)
    if given == wanted:
        return None
    hint = f": {hints[given]}" if given in hints else ""
    return f"for {queries} queries and {keys} keys the shape should be {wanted}, and is {given}{hint}"


def _compare(
    bias: Bias, expected: Expected, q: Sequence[int], k: Sequence[int]
) -> tuple[int, int, int, float, float] | None:
    """The worst pair, (head, query, key, given, wanted), if some pair is wrong."""
    out = bias(torch.tensor(list(q)), torch.tensor(list(k)))
    if out.shape != (expected.num_heads, len(q), len(k)):
        return 0, q[0], k[0], math.nan, expected.value(0, q[0], k[0])
    given, wanted = _shared_out(out, expected), _shared_out(expected.table(q, k), expected)
    error = (given - wanted).abs() * expected.seen(q, k)
    if float(error.max()) <= _tolerance(expected, q, k):
        return None
    head, i, j = (int(index) for index in torch.unravel_index(error.argmax(), error.shape))
    return head, q[i], k[j], float(given[head, i, j]), float(wanted[head, i, j])


def _hint(bias: Bias, expected: Expected, q: Sequence[int], k: Sequence[int]) -> str:
    out = bias(torch.tensor(list(q)), torch.tensor(list(k)))
    wanted, tolerance = _shared_out(expected.table(q, k), expected), _tolerance(expected, q, k)
    if out.shape != wanted.shape:
        return ""
    given, seen = _shared_out(out, expected), expected.seen(q, k)

    def same(one: Tensor, other: Tensor) -> bool:
        return float(((one - other).abs() * seen).max()) <= tolerance

    if same(given, -wanted):
        return ": the sign is the other way, so far keys are rewarded"
    for name, value in expected.mistakes:
        if same(given, _shared_out(expected.table(q, k, value), expected)):
            return f": it is {name}"
    order = [next((h for h in range(len(wanted)) if same(one, wanted[h])), None) for one in given]
    if None not in order and order != list(range(len(order))) and len(set(order)) == len(order):
        return f": heads are in another order, {order}"
    by_row = given - wanted
    if same(by_row - by_row[..., :1], torch.zeros_like(by_row)) and not expected.up_to_rows:
        return (
            ": all keys of a query are off by one number, which softmax takes out; "
            "say up_to_rows=True if that is meant (BLOOM, MPT)"
        )
    return ""


def _shared_out(table: Tensor, expected: Expected) -> Tensor:
    """float64, without the number that all keys of a query share, where that is free."""
    table = table.detach().double()
    return table - table[..., :1] if expected.up_to_rows else table


def _tolerance(expected: Expected, q: Sequence[int], k: Sequence[int]) -> float:
    """Eight roundings to float32 of the largest number; of slope times position, if rows may be shifted."""
    largest = float(expected.table(q, k).abs().max())
    if expected.up_to_rows:
        largest = max(largest, float(expected.table([max(*q, *k)], [0]).abs().max()))
    return 8 * 2.0**-24 * largest


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())
