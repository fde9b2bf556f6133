"""Tensors on several devices: what may be moved is moved, and the rest is refused by name, with both devices."""

from __future__ import annotations

import re

import pytest
import torch

from theodolite.encodings.bias.cope import CoPE
from theodolite.encodings.bias.deberta import DisentangledBias, RelativeEmbeddings
from theodolite.encodings.bias.fire import Fire
from theodolite.encodings.bias.forgetting import ForgettingGate
from theodolite.encodings.bias.kerple import Kerple
from theodolite.encodings.bias.low_rank import LowRankBias
from theodolite.encodings.bias.shaw import ShawBias
from theodolite.encodings.bias.transformer_xl import TransformerXLBias

HEADS, HEAD_DIM, HIDDEN, TOKENS = 2, 4, 8, 5
BIASES = {
    "kerple": lambda: Kerple(HEADS),
    "kerple, power": lambda: Kerple(HEADS, kind="power"),
    "fire": lambda: Fire(HEADS),
    "low rank": lambda: LowRankBias(HEADS, HIDDEN, 3, extent=4),
    "transformer-xl": lambda: TransformerXLBias(HEADS, HEAD_DIM, hidden_size=HIDDEN),
    "transformer-xl, clamped": lambda: TransformerXLBias(HEADS, HEAD_DIM, hidden_size=HIDDEN, clamp_length=2),
    "shaw": lambda: ShawBias(HEADS, HEAD_DIM, 2),
    "cope": lambda: CoPE(HEADS, HEAD_DIM, 6),
    "forgetting": lambda: ForgettingGate(HEADS, HIDDEN),
    "deberta": lambda: DisentangledBias(HEADS, HEAD_DIM, hidden_size=HIDDEN, max_relative_positions=16),
    "deberta, buckets": lambda: DisentangledBias(
        HEADS,
        HEAD_DIM,
        hidden_size=HIDDEN,
        max_relative_positions=16,
        position_buckets=8,
        rel_embeddings=RelativeEmbeddings(8, HIDDEN, layer_norm_eps=1e-7),
    ),
}


def given(bias, **devices):
    """What the bias reads, each tensor on the CPU unless another device is given by its name."""
    generator = torch.Generator().manual_seed(1)
    made = {
        "q": torch.randn(1, HEADS, TOKENS, HEAD_DIM, generator=generator, device="cpu"),
        "k": torch.randn(1, HEADS, TOKENS, HEAD_DIM, generator=generator, device="cpu"),
        "x": torch.randn(1, TOKENS, HIDDEN, generator=generator, device="cpu"),
    }
    if "q_state" in bias.reads:
        made["q_state"] = made["k_state"] = bias.state(made["x"].to(bias.weight.device)).detach()
    made = {name: tensor for name, tensor in made.items() if name in bias.reads}
    at = torch.tensor([3, 0, 4, 1, 9], device="cpu")
    made |= {"q_positions": at, "k_positions": at}
    return {name: tensor.to(devices.get(name, tensor.device)) for name, tensor in made.items()}


def forms(bias, **tensors):
    """The dense form, and that of score_mod written out."""
    found = [bias.dense(**tensors)]
    score_mod = bias.score_mod(**tensors)
    if score_mod is not None:
        zero = torch.zeros((), device="cpu")
        number = [torch.tensor(i, device="cpu") for i in range(TOKENS)]
        found += [score_mod(zero, number[0], number[1], m, n) for m in number for n in number]
    return found


class TestTwoDevices:
    """torch says "Expected all tensors to be on the same device" somewhere inside, and no argument's name."""

    @pytest.mark.parametrize("form", ["dense", "score_mod"])
    @pytest.mark.parametrize("name", BIASES)
    def test_each_argument_is_named(self, name, form):
        bias = BIASES[name]()
        if getattr(bias, form)(**given(bias)) is None:
            pytest.skip("it has no such form")
        for argument in given(bias):
            tensors = given(bias, **{argument: "meta"})
            if (name, argument) in {("forgetting", "q_positions"), ("forgetting", "k_positions")}:
                # Their number is all that is read.
                getattr(bias, form)(**tensors)
                continue
            with pytest.raises(ValueError) as error:
                getattr(bias, form)(**tensors)
            assert re.match(r"([qk]_(positions|state)|[qkx]): got a tensor on (the )?(meta|cpu)", str(error.value))
            assert "meta" in str(error.value)
            assert "cpu" in str(error.value)

    @pytest.mark.parametrize("name", BIASES)
    def test_parameters_elsewhere(self, name):
        bias = BIASES[name]().to("meta")
        tensors = given(BIASES[name]())
        if name == "forgetting":
            with pytest.raises(ValueError, match="x: got a tensor on cpu, and the parameters of ForgettingGate are on"):
                bias.state(torch.zeros(1, TOKENS, HIDDEN))
            return
        with pytest.raises(
            ValueError,
            match=rf"(q_positions|q|x): got a tensor on cpu, and the parameters of {type(bias).__name__} are on meta",
        ):
            bias.dense(**tensors)
        everywhere = given(bias, **dict.fromkeys(tensors, "meta"))
        assert bias.dense(**everywhere).shape == (1, HEADS, TOKENS, TOKENS)

    def test_words(self):
        with pytest.raises(ValueError) as error:
            Kerple(2)(torch.arange(3), torch.arange(3, device="meta"))
        assert str(error.value) == (
            "k_positions: got a tensor on meta, and the parameters of Kerple are on cpu; put both on one device"
        )
        q = torch.zeros(1, HEADS, 3, HEAD_DIM)
        with pytest.raises(ValueError) as error:
            BIASES["shaw"]()(torch.arange(3), torch.arange(3, device="meta"), q=q)
        assert str(error.value) == (
            "k_positions: got a tensor on the meta device, which has no values, and q is on cpu"
        )

    def test_values_and_states(self):
        weights, at = torch.zeros(1, HEADS, 3, 3), torch.arange(3)
        with pytest.raises(ValueError, match="weights: got a tensor on meta, and the parameters of ShawBias are on"):
            BIASES["shaw"]().values(weights.to("meta"), at, at)
        with pytest.raises(ValueError, match=r"q_positions: got a tensor on the meta device, .* weights is on cpu"):
            BIASES["shaw"]().values(weights, at.to("meta"), at)
        with pytest.raises(ValueError, match=r"previous: got a tensor on the meta device, .* x is on cpu"):
            BIASES["forgetting"]().state(torch.zeros(1, 3, HIDDEN), torch.zeros(1, HEADS, 2, device="meta"))
        q, visible = torch.zeros(1, HEADS, 3, HEAD_DIM), torch.ones(1, 3, 3, dtype=torch.bool, device="meta")
        with pytest.raises(ValueError, match=r"visible: got a tensor on the meta device, .* q is on cpu"):
            BIASES["cope"]().dense(at, at, q=q, k=q, visible=visible)


class TestAnyDefaultDevice:
    """What a program makes its tensors on by default has no say: here nothing is made but beside what is given."""

    @pytest.mark.parametrize("name", BIASES)
    def test_the_same_bits(self, name):
        bias = BIASES[name]()
        tensors = given(bias)
        plain = forms(bias, **tensors)
        with torch.device("meta"):
            found = forms(bias, **tensors)
        assert all(map(torch.equal, found, plain))


class TestIntegersOfAnyWidth:
    """Unsigned positions wrap where they are subtracted."""

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8])
    @pytest.mark.parametrize("name", BIASES)
    def test_the_same_bits(self, name, dtype):
        bias = BIASES[name]()
        tensors = given(bias)
        narrow = {key: tensor.to(dtype) if "positions" in key else tensor for key, tensor in tensors.items()}
        assert all(map(torch.equal, forms(bias, **narrow), forms(bias, **tensors)))
