"""Distances that a map has changed: the scores are those of the mapped distances, however the sequence is fed."""

from __future__ import annotations

import math

import pytest
import torch

from theodolite.attention import Attention, Cache, attend_relatively
from theodolite.encodings import ALiBi, LogN, Policy, RotaryEmbedding
from theodolite.plan import Mask, Rotary, YaRN
from theodolite.positions import AttentionSinks, DualChunk, LeakyReRoPE, LMInfinite, ReRoPE, SelfExtend

HEADS, KEY_HEADS, DIM, TOKENS = 4, 2, 8, 300
PLAN = Rotary(head_dim=DIM, rope_theta=100.0)
MAPS = [
    ReRoPE(window=20),
    LeakyReRoPE(window=20, factor=4),
    SelfExtend(group_size=4, window=20),
    LMInfinite(window=20, sinks=3),
    AttentionSinks(window=20, sinks=3),
    DualChunk(chunk_size=40, local_size=8),
]


def named(relative) -> str:
    return type(relative).__name__


def policy(**options) -> Policy:
    return Policy(rotate=RotaryEmbedding(options.pop("plan", PLAN)), **options)


def qkv(tokens: int = TOKENS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, tokens, DIM, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]


def by_distance(q, k, v, at, relative, plan=PLAN, visible=None) -> torch.Tensor:
    """Every score by its mapped distance r: the sum over pairs of q and k turned by r, in float64."""
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
    distance = relative.relative(at, at).double()
    angle = distance[..., None] * torch.tensor(plan.inv_freq())
    half = DIM // 2
    a, b, c, d = q[..., :half], q[..., half:], k[..., :half], k[..., half:]
    cos, sin = angle.cos(), angle.sin()

    def summed(x, y, by):
        return torch.einsum("bhsp,bhtp,stp->bhst", x, y, by)

    same, cross = summed(a, c, cos) + summed(b, d, cos), summed(a, d, sin) - summed(b, c, sin)
    scores = (same + cross) * DIM**-0.5 * plan.attention_factor() ** 2
    seen = relative.seen(at, at) & (at[:, None] >= at)
    scores = scores.masked_fill(~(seen if visible is None else seen & visible), -math.inf)
    return torch.softmax(scores, -1) @ v


class TestMaps:
    """Scores by the distances that the map gives."""

    @pytest.mark.parametrize("relative", MAPS, ids=named)
    def test_scores_follow_the_map(self, relative) -> None:
        q, k, v = qkv()
        at = torch.arange(TOKENS)
        out = attend_relatively(policy(), q, k, v, at, at, relative)
        # Tables of float32.
        assert (out - by_distance(q, k, v, at, relative)).abs().max() < 1e-5
        plain = attend_relatively(policy(), q, k, v, at, at, ReRoPE(window=TOKENS))
        assert (out - plain).abs().max() > 0.05

    def test_with_a_scaling_and_a_scale(self) -> None:
        q, k, v = qkv(90)
        at, plan = (
            torch.arange(90),
            Rotary(head_dim=DIM, rope_theta=100.0, scaling=YaRN(factor=4, original_max_position_embeddings=16)),
        )
        out = attend_relatively(policy(plan=plan, scale=LogN(8)), q, k, v, at, at, MAPS[0])
        factors = LogN(8).factors(at).double()[..., None]
        assert (out - by_distance(q * factors, k, v, at, MAPS[0], plan)).abs().max() < 1e-5

    @pytest.mark.parametrize("relative", MAPS, ids=named)
    def test_gradients_reach_everything(self, relative) -> None:
        q, k, v = (x[..., :70, :].clone().requires_grad_() for x in qkv())
        at = torch.arange(70)
        mine = torch.autograd.grad(attend_relatively(policy(), q, k, v, at, at, relative).sin().sum(), (q, k, v))
        true = torch.autograd.grad(by_distance(q, k, v, at, relative).sin().sum(), (q, k, v))
        assert all((a - b).abs().max() < 1e-5 for a, b in zip(mine, true, strict=True))

    def test_rows_that_see_nothing(self) -> None:
        q, k, v = qkv(30)
        at, visible = torch.arange(30), torch.ones(2, 1, 30, dtype=torch.bool)
        visible[0, :, :10] = False
        out = attend_relatively(policy(), q, k, v, at, at, MAPS[2], visible=visible)
        assert (out[0, :, :10] == 0).all()
        right = by_distance(q, k, v, at, MAPS[2], visible=visible[:, None])
        assert (out - right)[0, :, 10:].abs().max() < 1e-5
        assert (out - right)[1].abs().max() < 1e-5


class TestFed:
    """In one pass or many, with keys as they were projected."""

    @pytest.mark.parametrize("relative", MAPS, ids=named)
    def test_chunks(self, relative) -> None:
        torch.manual_seed(0)
        module = (
            Attention(32, HEADS, policy(), num_kv_heads=KEY_HEADS, relative=relative).double().requires_grad_(False)
        )
        x, at = torch.randn(2, 120, 32, dtype=torch.float64), torch.arange(120)
        whole, cache, start = module(x, at), Cache(turned=False), 0
        assert module.path(x, at).name == "pieces"
        for part in (1, 30, 1, 1, 60, 27):
            now = slice(start, start + part)
            assert (module(x[:, now], at[now], cache=cache) - whole[:, now]).abs().max() < 1e-9
            start += part
        with pytest.raises(ValueError, match=r"cache: a map of distances .*; use Cache\(turned=False\)"):
            module(x, at, cache=Cache())

    def test_learned_sinks(self) -> None:
        module = Attention(32, HEADS, policy(mask=Mask(sinks=True)), relative=MAPS[0]).double().requires_grad_(False)
        x, at = torch.randn(1, 40, 32, dtype=torch.float64), torch.arange(40)
        before = module(x, at)
        module.sinks += 30
        assert module(x, at).abs().max() < 1e-6 < before.abs().max()


class TestRefusals:
    """A map is for what turns, and for nothing else."""

    @pytest.mark.parametrize(
        ("made", "text"),
        [
            (Policy(), "turns nothing"),
            (Policy(rotate=RotaryEmbedding(PLAN), bias=ALiBi(HEADS)), "has ALiBi"),
            (Policy(rotate=RotaryEmbedding(PLAN), rotate_values=True), "has turned values"),
        ],
    )
    def test_policies(self, made, text) -> None:
        q, k, v = qkv(5)
        with pytest.raises(ValueError, match=f"relative: .* {text}"):
            attend_relatively(made, q, k, v, torch.arange(5), torch.arange(5), MAPS[0])
