"""Attention on a quicker path gives what every pair written out gives, forward and backward."""

from __future__ import annotations

import logging

import pytest
import torch

from theodolite.attention import attend_by_policy, attend_plainly, by_policy, path_of
from theodolite.encodings import (
    ALiBi,
    BiasByHead,
    BiasSum,
    CoPE,
    Fire,
    ForgettingGate,
    Kerple,
    LogN,
    Policy,
    RotaryEmbedding,
    ShawBias,
    T5Bias,
)
from theodolite.encodings.bias.base import PairwiseBias
from theodolite.plan import Mask, Rotary
from theodolite.positions import visible_keys

HEADS, KEY_HEADS, DIM = 4, 2, 16


class ByPosition(PairwiseBias):
    """One of someone else's: it depends on where the query stands."""

    def _value(self, q_position, k_position, head, *parameters):
        return (q_position % 3) * 0.5 - k_position % 2 + 0 * head


class ALiBiByPlace(ALiBi):
    """One made from another that goes by the distance, and that does not."""

    def _value(self, q_position, k_position, head, *parameters):
        return super()._value(q_position, k_position, head, *parameters) + (k_position % 5) * 0.3


class AddsOnes(ALiBi):
    """One that adds to the output, without saying so anywhere else."""

    def values(self, weights, q_positions, k_positions, *, heads=None):
        return weights.sum(-1, keepdim=True).expand(*weights.shape[:3], DIM) * 0.25


def rope() -> RotaryEmbedding:
    return RotaryEmbedding(Rotary(head_dim=DIM, rope_theta=1e4))


MAKERS = {
    "nope": dict,
    "rope": lambda: {"rotate": rope()},
    "rope, log-n": lambda: {"rotate": rope(), "scale": LogN(4)},
    "values turned": lambda: {"rotate": rope(), "rotate_values": True},
    "alibi": lambda: {"bias": ALiBi(HEADS, symmetric=True)},
    "t5": lambda: {"bias": T5Bias(HEADS, bidirectional=True, std=1.0)},
    "kerple": lambda: {"bias": Kerple(HEADS)},
    "two": lambda: {"rotate": rope(), "bias": BiasSum([ALiBi(HEADS, symmetric=True), Kerple(HEADS, kind="power")])},
    "by head": lambda: {"bias": BiasByHead([(Kerple(3), 3), (None, 1)])},
    "fire": lambda: {"bias": Fire(HEADS)},
    "of a position": lambda: {"bias": ByPosition(HEADS)},
    "of another": lambda: {"bias": ALiBiByPlace(HEADS, symmetric=True)},
    "shaw": lambda: {"bias": ShawBias(HEADS, DIM, 5)},
    "adds": lambda: {"bias": AddsOnes(HEADS, symmetric=True)},
}
MASKS = {
    "causal": Mask(),
    "all": Mask(causal=False),
    "window": Mask(sliding_window=40),
    "window both ways": Mask(causal=False, sliding_window=40),
    "chunk": Mask(chunk=64),
}
# Queries, keys, and the position of the first query behind that of the first key.
SPANS = [(1, 1, 0), (5, 5, 0), (600, 600, 0), (1, 700, 699), (300, 610, 310), (530, 600, 20), (9, 50, 100)]


def made(maker, mask: Mask) -> Policy:
    torch.manual_seed(0)
    policy = Policy(**MAKERS[maker](), mask=mask).double()
    for parameter in policy.parameters():
        torch.nn.init.uniform_(parameter, 0.1, 0.9)
    return policy


def tensors(queries: int, keys: int, batch: int = 2, dtype=torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    shapes = (batch, HEADS, queries, DIM), (batch, KEY_HEADS, keys, DIM), (batch, KEY_HEADS, keys, DIM)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def both(policy: Policy, q, k, v, *positions, **options):
    """Result and gradients of q, k, v and what is learned: on the path, and with every pair written out."""
    found = []
    for attend in (attend_by_policy, attend_plainly):
        out = attend(policy, q, k, v, *positions, **options)
        wanted = [x for x in (q, k, v, *policy.parameters()) if x.requires_grad]
        weight = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
        grads = torch.autograd.grad((out * weight).sum(), wanted, allow_unused=True)
        found.append(
            (out.detach(), *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, wanted, strict=True)))
        )
    return found


def hold(found, tolerance: float = 1e-11) -> None:
    for mine, true in zip(*found, strict=True):
        assert mine.shape == true.shape
        assert mine.dtype == true.dtype
        assert not mine.isnan().any()
        assert (mine - true).abs().max() <= tolerance * (1 + true.abs().max())


class TestTheSame:
    """Path by path, the numbers of the definition."""

    @pytest.mark.parametrize("span", SPANS, ids=str)
    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize("maker", MAKERS)
    def test_forward_and_backward(self, maker, mask, span):
        queries, keys, ahead = span
        policy = made(maker, MASKS[mask])
        q, k, v = tensors(queries, keys)
        hold(both(policy, q, k, v, torch.arange(7 + ahead, 7 + ahead + queries), torch.arange(7, 7 + keys)))

    @pytest.mark.parametrize("maker", ["rope", "alibi", "t5", "fire"])
    def test_rows_of_their_own(self, maker):
        policy = made(maker, Mask())
        q, k, v = tensors(300, 300)
        together = torch.stack((torch.arange(300), torch.arange(50, 350)))
        hold(both(policy, q, k, v, together))
        apart = together.clone()
        apart[1, 100:] += 9
        hold(both(policy, q, k, v, apart))
        hold(both(policy, q, k, v, together, torch.stack((torch.arange(300), torch.arange(49, 349)))))

    @pytest.mark.parametrize("maker", ["rope", "t5", "shaw", "adds"])
    @pytest.mark.parametrize("rows", [1, 300])
    def test_padding_and_rows_that_see_nothing(self, maker, rows):
        policy = made(maker, Mask())
        q, k, v = tensors(300, 300)
        attention_mask = torch.ones(2, 300, dtype=torch.long)
        attention_mask[0, :270] = 0
        visible = visible_keys(attention_mask).expand(-1, rows, -1)
        hold(both(policy, q, k, v, torch.arange(300), visible=visible))

    @pytest.mark.parametrize("maker", ["rope", "kerple"])
    def test_sinks(self, maker):
        policy = made(maker, Mask(sliding_window=20, sinks=True))
        q, k, v = tensors(300, 300)
        sinks = torch.randn(HEADS, dtype=torch.float64, requires_grad=True)
        hold(both(policy, q, k, v, torch.arange(300), sinks=sinks))
        grads = [
            torch.autograd.grad(f(policy, q, k, v, torch.arange(300), sinks=sinks).sin().sum(), sinks)[0]
            for f in (attend_by_policy, attend_plainly)
        ]
        assert (grads[0] - grads[1]).abs().max() < 1e-10
        assert grads[0].abs().min() > 0

    def test_content(self):
        q, k, v = tensors(300, 300)
        cope = Policy(bias=CoPE(HEADS, DIM, max_positions=32)).double()
        torch.nn.init.normal_(cope.bias.pos_emb)
        hold(both(cope, q, k, v, torch.arange(300)))
        forgets = Policy(bias=ForgettingGate(HEADS, 32)).double()
        x = torch.randn(2, 300, 32, dtype=torch.float64)
        hold(both(forgets, q, k, v, torch.arange(300), x=x), 1e-7)

    def test_order(self):
        policy = made("rope", Mask())
        q, k, v = tensors(40, 40)
        order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
        hold(both(policy, q, k, v, torch.arange(40), order=order))

    @pytest.mark.parametrize("maker", ["rope", "t5", "kerple", "fire"])
    @pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8)])
    def test_lower_precision(self, maker, dtype, unit):
        policy = made(maker, Mask(sliding_window=200)).float()
        exact = tensors(600, 600)
        q, k, v = (x.detach().to(dtype) for x in exact)
        true = attend_plainly(policy.double(), q.double(), k.double(), v.double(), torch.arange(600))
        out = attend_by_policy(policy.float(), q, k, v, torch.arange(600))
        assert out.dtype == dtype
        # Scores, weights and sums of a few hundred terms each: a few tens of units of values below 4.
        assert (out.double() - true).abs().max() <= 64 * unit


class TestThePath:
    """The choice can be asked for, and a slower one says so, once."""

    def path(self, maker, mask, span=(600, 600, 0), **options):
        queries, keys, ahead = span
        return path_of(made(maker, mask), torch.arange(ahead, ahead + queries), torch.arange(keys), **options)

    @pytest.mark.parametrize(
        ("maker", "mask", "span", "name", "reason"),
        [
            ("rope", Mask(), (600, 600, 0), "fused", "no bias, and causal"),
            ("rope, log-n", Mask(causal=False), (600, 600, 0), "fused", "no bias and no mask"),
            ("rope", Mask(), (1, 600, 599), "distance", "no bias, and every key is seen"),
            ("rope", Mask(), (300, 600, 300), "distance", "a mask that depends on the distance alone"),
            ("rope", Mask(sliding_window=9), (600, 600, 0), "distance", "a mask that depends on the distance alone"),
            ("alibi", Mask(), (600, 600, 0), "distance", "ALiBi that depends on the distance alone"),
            ("two", Mask(), (600, 600, 0), "distance", "BiasSum that depends"),
            ("by head", Mask(), (600, 600, 0), "distance", "BiasByHead that depends"),
            ("fire", Mask(), (600, 600, 0), "blocks", "Fire is no function of the distance alone"),
            ("rope", Mask(chunk=8), (600, 600, 0), "blocks", "a mask in chunks goes by the place in them"),
            ("rope", Mask(), (600, 600, -3), "blocks", "a query sees no key"),
            ("rope", Mask(sliding_window=5), (600, 600, 5), "blocks", "a query sees no key"),
        ],
    )
    def test_which(self, maker, mask, span, name, reason):
        path = self.path(maker, mask, span)
        assert path.name == name
        assert path.reason.startswith(reason)

    def test_what_is_visible_and_where_tokens_stand(self):
        seen = torch.ones(1, 600, 600, dtype=torch.bool)
        assert self.path("rope", Mask(), visible=seen).name == "blocks"
        for positions in (torch.tensor([0, 1, 2, 4, 5, 6]), torch.arange(6.0), torch.tensor([[0, 1, 2, 3, 4, 6]] * 2)):
            assert path_of(made("rope", Mask()), positions).name == "blocks"

    def test_a_slower_one_says_so_once(self, caplog, monkeypatch):
        monkeypatch.setattr(by_policy, "_said", set())
        q, k, v = tensors(6, 6)
        with caplog.at_level(logging.WARNING, logger="theodolite"):
            for _ in range(2):
                attend_by_policy(made("fire", Mask()), q, k, v, torch.arange(6))
                attend_by_policy(made("rope", Mask()), q, k, v, torch.arange(6))
        assert [record.message for record in caplog.records] == [
            "theodolite: attention under Policy(Fire, causal) takes the slower path, blocks: "
            "Fire is no function of the distance alone"
        ]


class TestMemory:
    """Scratch grows with the tokens and not with their pairs, in the backward too."""

    @pytest.mark.parametrize("maker", ["rope", "alibi", "t5", "kerple", "fire"])
    def test_peak(self, maker):
        from torch.profiler import ProfilerActivity, profile

        peaks = []
        for tokens in (1024, 2048):
            policy = made(maker, Mask()).float()
            q, k, v = (x.detach().requires_grad_() for x in tensors(tokens, tokens, 1, torch.float32))
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
                attend_by_policy(policy, q, k, v, torch.arange(tokens)).sum().backward()
            live = peak = 0
            for event in seen.profiler.kineto_results.events():
                if event.name() == "[memory]":
                    live += event.nbytes()
                    peak = max(peak, live)
            peaks.append(peak)
        # Of all pairs there would be 16 MiB a tensor at 2,048 tokens (4 heads of float32), and four times as much.
        assert peaks[1] < 2.5 * peaks[0]
