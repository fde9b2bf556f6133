"""What each policy does to attention, held to float64 written out from the papers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from theodolite.attention import Attention
from theodolite.compare.parts import PARTS
from theodolite.compare.policies import read_policy

HEADS, WIDTH, HIDDEN, TRAINED, TOKENS = 3, 10, 30, 8, 41
SIZE = {"hidden_size": HIDDEN, "num_heads": HEADS, "head_dim": WIDTH, "length": TRAINED}
EPS = 2.0**-24
"""Half a unit in the last place of float32, relative: what one rounding costs."""


def built(name):
    """One layer's attention in float64, with inputs (1, S, hidden) and its policy's modules."""
    torch.manual_seed(3)
    places = read_policy(name).build(num_layers=1, **SIZE)
    attention = Attention(HIDDEN, HEADS, places.policies[0], head_dim=WIDTH).double()
    return attention, torch.randn(1, TOKENS, HIDDEN, dtype=torch.float64), places


def projected(attention, x):
    """q, k, v (H, S, D) in numpy."""
    return (
        (x[0].numpy() @ p.weight.detach().numpy().T).reshape(len(x[0]), HEADS, WIDTH).transpose(1, 0, 2)
        for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )


def by_hand(attention, x, *, turn=None, bias=0.0, scale=None, factors=None, window=None, sinks=None):
    """Output (S, hidden), and how far float32 tables and biases may move each of it."""
    q, k, v = projected(attention, x)
    at = np.arange(q.shape[1])
    distance = at[:, None] - at[None]
    if turn is not None:
        q, k = turn(q, at), turn(k, at)
    scale = WIDTH**-0.5 if scale is None else scale
    scores = q @ k.transpose(0, 2, 1) * scale
    scores = scores * (1.0 if factors is None else factors(at)[:, None]) + bias
    # Four roundings of tables (cos and sin, of q and of k), two of a scale, two of a bias, against what they multiply.
    norms = np.linalg.norm(q, axis=-1).max() * np.linalg.norm(k, axis=-1).max()
    grown = 1.0 if factors is None else factors(at).max()
    error = EPS * (6 * norms * grown * scale + 2 * np.abs(bias).max())
    hidden = (distance < 0) | (distance >= (len(at) if window is None else window))
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - scores.max(-1, keepdims=True))
    weights, o = weights / total, attention.o_proj.weight.detach().numpy().T
    out, most = (
        (weights @ values).transpose(1, 0, 2).reshape(len(at), -1) @ mixed
        for values, mixed in ((v, o), (np.abs(v), np.abs(o)))
    )
    # Scores that are e off move a weight by e^2e - 1 of itself.
    return out, math.expm1(2 * error) * most + 1e-13


def rotation(theta=10000.0, width=WIDTH, live=None):
    """Pairs (i, i + width / 2) of the first `width` channels; pairs past `live` stand still."""

    def turn(x, at):
        pairs = width // 2
        frequencies = np.array([theta ** (-2 * i / width) for i in range(pairs)])
        frequencies[pairs if live is None else live :] = 0.0
        angles = at[:, None] * frequencies
        first, second = x[..., :pairs], x[..., pairs:width]
        turned = (
            first * np.cos(angles) - second * np.sin(angles),
            second * np.cos(angles) + first * np.sin(angles),
            x[..., width:],
        )
        return np.concatenate(turned, axis=-1)

    return turn


def per_head_rotation(x, at):
    return np.stack([rotation(theta)(x[h : h + 1], at)[0] for h, theta in enumerate((1e3, 1e4, 1e5))])


def xpos(x, at, side):
    """A query's pairs times zeta^((m - c) / S), a key's times its inverse."""
    zeta = np.array([(2 * i / WIDTH + 0.4) / 1.4 for i in range(WIDTH // 2)])
    factors = zeta ** (side * (at[:, None] - TRAINED / 2) / 512.0)
    return rotation()(x, at) * np.concatenate((factors, factors), axis=-1)


def distances():
    at = np.arange(TOKENS)
    return at[:, None] - at[None]


def alibi():
    # Three heads: those of two, 1/16 and 1/256, and the first of what four have between them.
    return -np.array([2.0**-4, 2.0**-8, 2.0**-2])[:, None, None] * distances()


def log_n(at):
    return np.maximum(1.0, np.log(at + 1.0) / math.log(TRAINED))


def t5_buckets(distance, buckets, furthest):
    """Half of the buckets one distance each, the rest by logarithm, to the last."""
    exact = buckets // 2
    far = exact + np.floor(
        np.log(np.maximum(distance, exact) / exact) / math.log(furthest / exact) * (buckets - exact) + 1e-9
    )
    return np.where(distance < exact, np.maximum(distance, 0), np.minimum(far, buckets - 1)).astype(int)


class TestAttention:
    """A layer under a policy gives what the policy's formula gives, far past the training length."""

    @pytest.mark.parametrize(
        ("name", "given"),
        [
            ("nope", {}),
            ("nope@5", {"window": 5}),
            ("rope", {"turn": rotation()}),
            ("rope:theta=50", {"turn": rotation(50.0)}),
            ("rope:partial=0.4", {"turn": rotation(width=4)}),
            ("rope:live=0.4", {"turn": rotation(live=2)}),
            ("rope:partial=0.8:live=0.4", {"turn": rotation(width=8, live=2)}),
            ("rope:partial=0.4:live=0.9", {"turn": rotation(width=4)}),
            ("rope+logn", {"turn": rotation(), "factors": log_n}),
            ("learned-base:theta=99", {"turn": rotation(99.0)}),
            ("lerope", {"turn": rotation()}),
            ("per-head", {"turn": per_head_rotation}),
            ("alibi", {"bias": alibi()}),
            ("alibi@5", {"bias": alibi(), "window": 5}),
            ("rope+alibi@7", {"turn": rotation(), "bias": alibi(), "window": 7}),
            ("ssmax", {"factors": lambda at: 0.43 * np.log(at + 1.0)}),
        ],
    )
    def test_is_the_formula(self, name, given):
        attention, x, _ = built(name)
        out = attention(x, torch.arange(TOKENS)).detach()[0].numpy()
        wanted, allowed = by_hand(attention, x, **given)
        assert (np.abs(out - wanted) <= allowed).all()

    def test_xpos(self):
        attention, x, _ = built("xpos")
        out = attention(x, torch.arange(TOKENS)).detach()[0].numpy()
        sides = iter((1, -1))
        wanted, allowed = by_hand(attention, x, turn=lambda part, at: xpos(part, at, next(sides)))
        assert (np.abs(out - wanted) <= allowed).all()

    def test_sinks(self):
        attention, x, _ = built("nope+sinks@6")
        with torch.no_grad():
            attention.sinks.copy_(torch.tensor([-1.0, 0.5, 2.0]))
        out = attention(x, torch.arange(TOKENS)).detach()[0].numpy()
        wanted, allowed = by_hand(attention, x, window=6, sinks=np.array([-1.0, 0.5, 2.0]))
        assert (np.abs(out - wanted) <= allowed).all()

    @pytest.mark.parametrize(("name", "scale"), [("t5:7:distance=23", None), ("t5:7:distance=23:scaled=false", 1.0)])
    def test_t5(self, name, scale):
        attention, x, _ = built(name)
        weight = torch.randn(7, HEADS, dtype=torch.float64)
        with torch.no_grad():
            attention.policy.bias.weight.copy_(weight)
        out = attention(x, torch.arange(TOKENS)).detach()[0].numpy()
        bias = weight.numpy()[t5_buckets(distances(), 7, 23)].transpose(2, 0, 1)
        wanted, allowed = by_hand(attention, x, bias=bias, scale=scale)
        assert (np.abs(out - wanted) <= allowed).all()

    @pytest.mark.parametrize("kind", ["log", "power"])
    def test_kerple(self, kind):
        attention, x, _ = built(f"kerple:{kind}")
        first, second = (p.detach().double().numpy().reshape(-1, 1, 1) for p in attention.policy.bias.parameters())
        n = np.maximum(distances(), 0)
        bias = -first * np.log1p(second * n) if kind == "log" else -first * n**second
        out = attention(x, torch.arange(TOKENS)).detach()[0].numpy()
        wanted, allowed = by_hand(attention, x, bias=bias)
        assert (np.abs(out - wanted) <= allowed).all()


class TestEmbedded:
    """What is added to the embeddings is the paper's, on the channels that the name says."""

    def test_half_sinusoidal_half_rotary(self):
        attention, x, places = built("sinusoidal:channels=0.4:scale=0.5+rope:partial=0.4")
        at = np.arange(TOKENS)
        angles = at[:, None] * np.array([10000 ** (-2 * i / 12) for i in range(6)])
        added = np.zeros((TOKENS, HIDDEN))
        added[:, 0:12:2], added[:, 1:12:2] = 0.5 * np.sin(angles), 0.5 * np.cos(angles)
        with_positions = places.embed(x, torch.arange(TOKENS))
        # A sine is rounded to float32, and multiplied in it.
        assert np.abs(with_positions[0].numpy() - x[0].numpy() - added).max() <= 2 * EPS
        out = attention(with_positions, torch.arange(TOKENS)).detach()[0].numpy()
        wanted, allowed = by_hand(attention, with_positions, turn=rotation(width=4))
        assert (np.abs(out - wanted) <= allowed).all()

    def test_learned_ends_at_the_training_length(self):
        _, x, places = built("learned")
        rows = places.embed.weight.detach().numpy()
        assert rows.shape == (TRAINED, HIDDEN)
        added = places.embed(x[:, :TRAINED], torch.arange(TRAINED)) - x[:, :TRAINED]
        assert np.abs(added[0].detach().numpy() - rows).max() <= 1e-14
        with pytest.raises(ValueError, match="8"):
            places.embed(x[:, : TRAINED + 1], torch.arange(TRAINED + 1))


class TestEveryPart:
    """Any part runs in a layer of odd sizes, at positions far past the training length."""

    @pytest.mark.parametrize("name", [name for name, part in PARTS.items() if part.longest is None])
    @pytest.mark.parametrize(("heads", "width", "trained"), [(1, 2, 2), (3, 10, 7), (5, 6, 33)])
    def test_is_finite(self, name, heads, width, trained):
        hidden = heads * width
        places = read_policy(name).build(
            hidden_size=hidden, num_layers=1, num_heads=heads, head_dim=width, length=trained
        )
        attention = Attention(hidden, heads, places.policies[0], head_dim=width)
        x, positions = torch.randn(2, 9, hidden), torch.arange(9) + 8 * trained
        x = x if places.embed is None else places.embed(x, positions)
        assert attention(x, positions).isfinite().all()
