"""Our biases pass every check, and every check catches the fault that it was written for."""

from __future__ import annotations

import math

import pytest
import torch

from theodolite.encodings.bias.alibi import ALiBi, alibi_slopes
from theodolite.encodings.bias.fire import Fire
from theodolite.encodings.bias.kerple import Kerple
from theodolite.encodings.bias.t5 import T5Bias

from .bias import CHECKS, Expected, alibi, failures, t5


def ours(module):
    return lambda q, k: module(q, k)[0]


def t5_module(bidirectional):
    torch.manual_seed(0)
    return T5Bias(4, bidirectional=bidirectional, std=1.0)


def kerple(kind):
    torch.manual_seed(0)
    module = Kerple(4, kind=kind)
    r1, r2 = module.r1.tolist(), module.r2.tolist()

    def value(head, m, n):
        r = abs(m - n)
        return -r1[head] * (math.log1p(r2[head] * r) if kind == "log" else r ** r2[head])

    return module, Expected(num_heads=4, value=value, causal=False)


def fire():
    torch.manual_seed(0)
    module = Fire(4, hidden=6, init_L=16.0)
    state = {name: parameter.double().tolist() for name, parameter in module.state_dict().items()}

    def value(head, m, n):
        x = math.log1p(0.1 * (m - n)) / (math.log1p(0.1 * max(m, 16)) + 1e-6) if n <= m else 0.0
        units = zip(state["mlp.0.weight"], state["mlp.0.bias"], state["mlp.2.weight"][head], strict=True)
        return state["mlp.2.bias"][head] + sum(out * max(0.0, w[0] * x + b) for w, b, out in units)

    return module, Expected(num_heads=4, value=value, relative=False)


class TestOurs:
    """The modules users get, through the checks that users can run on their own."""

    @pytest.mark.parametrize("heads", [1, 4, 6, 12])
    def test_alibi(self, heads):
        assert failures(ours(ALiBi(heads)), alibi(heads)) == []
        assert failures(ours(ALiBi(heads, symmetric=True)), alibi(heads, causal=False)) == []
        assert failures(ours(ALiBi(heads, bias_max=16)), alibi(heads, bias_max=16)) == []

    @pytest.mark.parametrize("bidirectional", [False, True])
    def test_t5(self, bidirectional):
        module = t5_module(bidirectional)
        assert failures(ours(module), t5(module.weight.tolist(), bidirectional=bidirectional)) == []

    @pytest.mark.parametrize("kind", ["log", "power"])
    def test_kerple(self, kind):
        module, expected = kerple(kind)
        assert failures(ours(module), expected) == []

    def test_fire(self):
        module, expected = fire()
        assert failures(ours(module), expected) == []

    @pytest.mark.parametrize("module", [ALiBi(6), ALiBi(6).bfloat16(), ALiBi(6).half()], ids=["", "bfloat16", "half"])
    def test_cast(self, module):
        assert failures(ours(module), alibi(6)) == []

    def test_bloom(self):
        # slope * key position for all queries.
        def by_key(q, k):
            return (torch.tensor(alibi_slopes(6))[:, None, None] * k).expand(-1, len(q), -1)

        assert failures(by_key, alibi(6, up_to_rows=True)) == []


SLOPES = torch.tensor(alibi_slopes(6))[:, None, None]
GEOMETRIC = torch.tensor(alibi_slopes(6, rule="geometric"))[:, None, None]


def distance(q, k):
    return q[:, None] - k[None, :]


def from_shape(q, k):
    return -SLOPES * distance(torch.arange(len(k) - len(q), len(k)), torch.arange(len(k)))


class _Remembers:
    """Keeps the largest table, and takes its corner (the last rows of which belong to other queries)."""

    size = 0

    def __call__(self, q, k):
        self.size = max(self.size, int(max(q.max(), k.max())) + 1)
        return -SLOPES * (distance(q, k) + (1 if self.size > 100 else 0))


FAULTS = {
    "built on the queries": (lambda q, k: -SLOPES * distance(q, q), "it is built on the number of queries alone"),
    "built on the keys": (lambda q, k: -SLOPES * distance(k, k), "it is built on the number of keys alone"),
    "one row for all": (lambda q, k: SLOPES * k, "expand it and say up_to_rows=True"),
    "heads last": (lambda q, k: (-SLOPES * distance(q, k)).permute(1, 2, 0), "the axis of heads comes first"),
    "other heads": (lambda q, k: -SLOPES[:4] * distance(q, k), "should be (6, 3, 7), and is (4, 3, 7)"),
    "zeros at a step": (
        lambda q, k: -SLOPES * (distance(q, k) if len(q) > 1 else torch.zeros(1, len(k))),
        "another row in a decoding step than in prefill: it gets zeros",
    ),
    "no offset for the cache": (
        lambda q, k: -SLOPES * distance(torch.arange(len(q)), torch.arange(len(k))),
        "it gets the row of the first query, so the length of the cache is not added",
    ),
    "positions from the shape": (from_shape, "head 4, query at 30, key at 0: the bias should be -15"),
    "padding on the left": (
        lambda q, k: -SLOPES * (q[:, None] - torch.arange(len(k))),
        "real tokens behind 3 tokens of padding on the left get another bias",
    ),
    "sorted positions": (
        lambda q, k: -SLOPES * distance(q.sort().values, k.sort().values),
        "tokens at positions [40, 2, 41] are given the bias of others",
    ),
    "geometric series": (
        lambda q, k: -GEOMETRIC * distance(q, k),
        "it is the plain geometric series 2^(-8h/6), which for 6 heads is not the published list",
    ),
    "series from 0": (
        lambda q, k: -(GEOMETRIC * 2 ** (8 / 6)) * distance(q, k),
        "it is a series that starts at slope 1",
    ),
    "sign": (lambda q, k: SLOPES * distance(q, k), "the sign is the other way, so far keys are rewarded"),
    "order of heads": (
        lambda q, k: -SLOPES.sort(dim=0, descending=True).values * distance(q, k),
        "heads are in another order, [4, 0, 5, 1, 2, 3]",
    ),
    "key positions where distances are meant": (
        lambda q, k: (SLOPES * k).expand(-1, len(q), -1),
        "all keys of a query are off by one number, which softmax takes out",
    ),
    "bfloat16": (
        lambda q, k: (-SLOPES.bfloat16() * distance(q, k).bfloat16()).float(),
        "it is computed in bfloat16",
    ),
    "float16": (
        lambda q, k: (-SLOPES.half() * distance(q, k).half()).float(),
        "it is computed in float16",
    ),
    "positions in bfloat16": (
        lambda q, k: -SLOPES * distance(q.bfloat16(), k.bfloat16()).float(),
        "a query and its keys that move together should keep their bias, and it changes by",
    ),
    "clipped": (
        lambda q, k: -SLOPES * distance(q, k).clamp(max=2048),
        "at distance 4098 the bias of head 4 should be -2049, and is -1024",
    ),
    "grows with the position": (
        lambda q, k: -SLOPES * distance(q, k) * (1 + q[:, None] / 1000),
        "a query and its keys that move together should keep their bias, and it changes by",
    ),
    "keeps the longest table": (_Remembers, "another answer after a longer one"),
}


def fresh(bias):
    return bias() if isinstance(bias, type) else bias


class TestFaultsAreFound:
    """Each is a fault that shipped somewhere; the sentence names it."""

    @pytest.mark.parametrize("fault", FAULTS)
    def test_by_name(self, fault):
        bias, sentence = FAULTS[fault]
        found = failures(fresh(bias), alibi(6))
        assert any(sentence in line for line in found), found

    def test_a_causal_bias_in_an_encoder(self):
        def blind(q, k):
            return -SLOPES * distance(q, k).clamp(min=0)

        assert failures(blind, alibi(6)) == []
        found = failures(blind, alibi(6, causal=False))
        assert "it is a bias for causal attention" in found[-1]

    def test_directions_of_t5_exchanged(self):
        module = t5_module(True)
        found = failures(lambda q, k: module(k, q)[0].transpose(1, 2), t5(module.weight.tolist(), bidirectional=True))
        assert any("it is with the two directions exchanged" in line for line in found), found

    def test_a_decoder_bias_in_a_t5_encoder(self):
        both, one_way = t5_module(True), T5Bias(4, num_buckets=16, bidirectional=False)
        one_way.weight = torch.nn.Parameter(both.weight[:16].detach())
        found = failures(ours(one_way), t5(both.weight.tolist(), bidirectional=True))
        assert any("it is with one half of the buckets for both directions" in line for line in found), found

    def test_buckets_in_bfloat16(self):
        module = t5_module(True)

        def low(q, k):
            r = distance(q, k)
            growth = (torch.log(r.abs().bfloat16() / 8) / math.log(16) * 8).long()
            bucket = torch.where(r.abs() < 8, r.abs(), (8 + growth).clamp(max=15)) + 16 * (r < 0)
            return module.weight[bucket].permute(2, 0, 1)

        found = failures(low, t5(module.weight.tolist(), bidirectional=True))
        assert any("of the distances up to 300 have another bias than they should, the first 16" in x for x in found)

    def test_every_check_says_why_it_is_there(self):
        assert all(check.__doc__ for check in CHECKS)

    def test_every_check_catches_something(self):
        found = set()
        for bias, _ in FAULTS.values():
            bias = fresh(bias)
            found |= {check.__name__ for check in CHECKS if check(bias, alibi(6)) is not None}
        assert found == {check.__name__ for check in CHECKS} - {"future"}
