"""The small decoder against one written out in numpy, and what paired comparisons rest on: weights by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from theodolite.attention import Cache
from theodolite.encodings import ALiBi, Policy, RotaryEmbedding, Sinusoidal, T5Bias
from theodolite.models.decoder import Decoder
from theodolite.plan import Mask, Rotary
from theodolite.positions import visible_in_documents

VOCAB, WIDTH, HEADS, HEAD = 13, 24, 3, 8


def rope() -> Policy:
    return Policy(rotate=RotaryEmbedding(Rotary(head_dim=HEAD, rope_theta=100.0)))


def mixed() -> list[Policy]:
    return [rope(), Policy(bias=ALiBi(HEADS)), Policy(mask=Mask(sliding_window=3))]


def decoder(policies: list[Policy], **given: object) -> Decoder:
    return Decoder(VOCAB, WIDTH, HEADS, policies, **given).initialise(seed=3)  # type: ignore[arg-type]


def by_hand(model: Decoder, ids: np.ndarray, *, sinusoids: bool, groups: int, normed: bool) -> np.ndarray:
    """The whole model in float64: rope, ALiBi and a window of 3, layer by layer."""
    weights = {name: tensor.detach().double().numpy() for name, tensor in model.named_parameters()}
    n = len(ids)
    at = np.arange(n)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight

    def turned(x: np.ndarray) -> np.ndarray:
        angles = at[:, None] * 100.0 ** (-2 * np.arange(HEAD // 2) / HEAD)
        a, b = x[..., : HEAD // 2], x[..., HEAD // 2 :]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)

    x = weights["tokens.weight"][ids] * np.sqrt(WIDTH)
    if sinusoids:
        w = 10000.0 ** (-2 * np.arange(WIDTH // 2) / WIDTH)
        table = np.zeros((n, WIDTH))
        table[:, 0::2], table[:, 1::2] = np.sin(at[:, None] * w), np.cos(at[:, None] * w)
        x = x + table
    for i in range(3):
        part = f"layers.{i}."
        h = norm(x, weights[part + "attention_norm.weight"])
        q, k, v = (
            (h @ weights[part + f"attention.{name}_proj.weight"].T).reshape(n, -1, HEAD).transpose(1, 0, 2)
            for name in "qkv"
        )
        if normed:
            q = norm(q, weights[part + "attention.q_norm.weight"])
            k = norm(k, weights[part + "attention.k_norm.weight"])
        if i == 0:
            q, k = turned(q), turned(k)
        k, v = np.repeat(k, HEADS // groups, 0), np.repeat(v, HEADS // groups, 0)
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(HEAD)
        distance = at[:, None] - at[None, :]
        if i == 1:
            scores = scores - np.array([2**-4.0, 2**-8.0, 2**-2.0])[:, None, None] * distance
        hidden = (distance < 0) | ((distance > 2) if i == 2 else False)
        scores = np.where(hidden, -np.inf, scores)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out = (p / p.sum(-1, keepdims=True)) @ v
        x = x + out.transpose(1, 0, 2).reshape(n, -1) @ weights[part + "attention.o_proj.weight"].T
        h = norm(x, weights[part + "mlp_norm.weight"])
        gate, up = h @ weights[part + "mlp.gate.weight"].T, h @ weights[part + "mlp.up.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[part + "mlp.down.weight"].T
    return norm(x, weights["norm.weight"]) @ weights["tokens.weight"].T


class TestFormula:
    """What the decoder computes is what its docstring says."""

    @pytest.mark.parametrize("sinusoids", [False, True])
    @pytest.mark.parametrize("groups", [3, 1])
    @pytest.mark.parametrize("normed", [False, True])
    def test_logits(self, sinusoids, groups, normed):
        model = decoder(
            mixed(),
            embed=Sinusoidal(WIDTH) if sinusoids else None,
            num_kv_heads=groups,
            qk_norm=1e-6 if normed else None,
        ).double()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
        ids = torch.randint(VOCAB, (11,), generator=torch.Generator().manual_seed(0))
        found = model(ids[None], torch.arange(11))[0].detach().numpy()
        # Tables, slopes and sinusoids are rounded once to float32, 6e-8 each; logits are of order 1.
        wanted = by_hand(model, ids.numpy(), sinusoids=sinusoids, groups=groups, normed=normed)
        assert found == pytest.approx(wanted, abs=2e-6)

    def test_slopes_are_those_of_three_heads(self):
        assert ALiBi(HEADS).slopes().tolist() == pytest.approx([2**-4, 2**-8, 2**-2])

    def test_widths(self):
        assert decoder([rope()]).layers[0].mlp.gate.weight.shape == (64, WIDTH)
        assert decoder([rope()], mlp_size=40).layers[0].mlp.gate.weight.shape == (40, WIDTH)

    def test_a_model_without_layers_is_none(self):
        with pytest.raises(ValueError, match="policies: got none"):
            decoder([])


class TestCausal:
    """A token says nothing to those before it, in every way to run the model."""

    def test_later_tokens_change_nothing(self):
        model, at = decoder(mixed()), torch.arange(9)
        ids = torch.arange(9)[None] % VOCAB
        other = ids.clone()
        other[0, 5:] = 12
        assert torch.equal(model(ids, at)[:, :5], model(other, at)[:, :5])

    @torch.no_grad()
    def test_token_by_token(self):
        model, ids = decoder(mixed()).double(), torch.arange(9)[None] % VOCAB
        whole = model(ids, torch.arange(9))
        caches = [Cache() for _ in model.layers]
        steps = [model(ids[:, i : i + 1], torch.tensor([i]), caches=caches) for i in range(9)]
        # Roundings of float64 in sums of another order.
        assert torch.allclose(torch.cat(steps, 1), whole, atol=1e-12, rtol=0)

    def test_packed_documents_are_apart(self):
        model = decoder(mixed()).double()
        first, second = torch.arange(4)[None], torch.arange(5, 10)[None]
        packed = model(
            torch.cat([first, second], 1),
            torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4]),
            visible=visible_in_documents(torch.tensor([[0] * 4 + [1] * 5])),
        )
        apart = torch.cat([model(first, torch.arange(4)), model(second, torch.arange(5))], 1)
        assert torch.allclose(packed, apart, atol=1e-12, rtol=0)


class TestWeights:
    """Two models that differ in one part agree in all others, or a difference between them is a difference of luck."""

    def test_are_those_of_the_seed_and_the_name(self):
        first, second = decoder([rope(), rope()]), decoder([Policy(bias=T5Bias(HEADS, bidirectional=False)), Policy()])
        a, b = first.state_dict(), second.state_dict()
        assert set(b) - set(a) == {"layers.0.attention.policy.bias.weight"}
        assert all(torch.equal(a[name], b[name]) for name in a)
        other = decoder([rope(), rope()]).initialise(seed=4).state_dict()
        assert not any(torch.equal(a[name], other[name]) for name in a if "norm" not in name)

    def test_no_two_are_alike(self):
        state = decoder([rope(), rope()]).state_dict()
        assert not torch.equal(state["layers.0.mlp.gate.weight"], state["layers.0.mlp.up.weight"])
        assert not torch.equal(state["layers.0.mlp.gate.weight"], state["layers.1.mlp.gate.weight"])

    def test_other_draws_are_left_alone(self):
        model = decoder([rope()])
        torch.manual_seed(0)
        wanted = torch.rand(3)
        torch.manual_seed(0)
        model.initialise(seed=9)
        assert torch.equal(torch.rand(3), wanted)

    @pytest.mark.parametrize("depth", [1, 8])
    def test_a_fresh_model_knows_nothing_and_says_so(self, depth):
        model = Decoder(256, 64, 2, [Policy() for _ in range(depth)]).initialise(0)
        logits = model(torch.arange(200)[None], torch.arange(200))
        # Normed states against rows of variance 1/E: logits of variance 1.
        assert 0.8 < float(logits.detach().std()) < 1.25

    def test_the_state_has_no_positions(self):
        state = decoder([rope(), Policy(bias=ALiBi(HEADS))], embed=Sinusoidal(WIDTH)).state_dict()
        assert not [name for name in state if "policy" in name or "embed" in name]

    def test_on_the_meta_device(self):
        with torch.device("meta"):
            model = Decoder(VOCAB, WIDTH, HEADS, mixed())
        model = model.to_empty(device="cpu").initialise(seed=3)
        wanted = decoder(mixed()).state_dict()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
        at = torch.arange(6)
        assert torch.equal(model(at[None], at), decoder(mixed())(at[None], at))
