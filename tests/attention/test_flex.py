"""FlexAttention's path, which a GPU takes, run uncompiled on the CPU: the numbers of every pair written out."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.attention.test_by_policy import ALiBiByPlace, rope
from theodolite.attention import Attention, attend_by_policy, attend_plainly, flex, path_of
from theodolite.encodings import (
    ALiBi,
    BiasByHead,
    BiasSum,
    CoPE,
    DisentangledBias,
    Fire,
    ForgettingGate,
    Kerple,
    LogN,
    LowRankBias,
    Policy,
    ShawBias,
    T5Bias,
    TransformerXLBias,
)
from theodolite.plan import Mask
from theodolite.positions import visible_in_documents, visible_keys

HEADS, KEY_HEADS, DIM, WIDTH, TOKENS = 4, 2, 16, 64, 37
MAKERS = {
    "rope": lambda: {"rotate": rope(), "scale": LogN(4)},
    "alibi": lambda: {"bias": ALiBi(HEADS, symmetric=True)},
    "t5": lambda: {"bias": T5Bias(HEADS, bidirectional=True, std=1.0)},
    "two": lambda: {"rotate": rope(), "bias": BiasSum([ALiBi(HEADS, symmetric=True), Kerple(HEADS)])},
    "by head": lambda: {"bias": BiasByHead([(Kerple(3), 3), (None, 1)])},
    "fire": lambda: {"bias": Fire(HEADS)},
    "gate": lambda: {"bias": ForgettingGate(HEADS, WIDTH)},
    "of another": lambda: {"bias": ALiBiByPlace(HEADS, symmetric=True)},
}
MASKS = {"causal": Mask(), "all": Mask(causal=False), "window": Mask(sliding_window=9), "chunk": Mask(chunk=16)}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "DEVICES", ("cpu", "cuda"))


def attend(*arguments, **options) -> torch.Tensor:
    with warnings.catch_warnings():
        # It says that it is slow uncompiled.
        warnings.simplefilter("ignore")
        return attend_by_policy(*arguments, **options)


def qkv(queries: int = TOKENS, keys: int = TOKENS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, heads, tokens, DIM, generator=generator)
        for heads, tokens in ((HEADS, queries), (KEY_HEADS, keys), (KEY_HEADS, keys))
    ]


def close(found: torch.Tensor, true: torch.Tensor) -> None:
    # Sums of 37 products of float32, each rounded: 37 * 6e-8 of numbers up to 5.
    torch.testing.assert_close(found, true, rtol=0, atol=1e-5)


class TestEqualsEveryPair:
    """Any policy that can be said pair by pair, under any mask, for padding, documents and decoding."""

    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize("made", MAKERS)
    def test_forward(self, made: str, mask: str) -> None:
        if made == "gate" and mask == "all":
            pytest.skip("it forgets what is before a query")
        policy, positions = Policy(**MAKERS[made](), mask=MASKS[mask]), torch.arange(TOKENS)
        x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
        given = {"x": x} if made == "gate" else {}
        fused = made == "rope" and mask in ("causal", "all")
        assert path_of(policy, positions).name == ("fused" if fused else "flex")
        with torch.no_grad():
            close(attend(policy, *qkv(), positions, **given), attend_plainly(policy, *qkv(), positions, **given))

    @pytest.mark.parametrize("made", ["rope", "t5", "fire"])
    def test_what_is_visible(self, made: str) -> None:
        policy = Policy(**MAKERS[made]())
        padding = torch.ones(2, TOKENS, dtype=torch.int64)
        padding[0, :5] = 0
        documents = torch.tensor([[0] * 20 + [1] * 17, [0] * 3 + [1] * 34])
        rows = torch.stack([torch.arange(TOKENS), torch.arange(100, 100 + TOKENS)])
        by_head = torch.rand(2, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(2)) > 0.3
        for positions, visible in (
            (rows, None),
            (rows, visible_keys(padding)),
            (torch.arange(TOKENS), visible_in_documents(documents)),
            (torch.arange(TOKENS), by_head),
        ):
            with torch.no_grad():
                found = attend(policy, *qkv(), positions, visible=visible)
                close(found, attend_plainly(policy, *qkv(), positions, visible=visible))

    def test_behind_a_cache(self) -> None:
        policy = Policy(**MAKERS["two"]())
        at = torch.arange(TOKENS - 3, TOKENS), torch.arange(TOKENS)
        with torch.no_grad():
            close(attend(policy, *qkv(3), *at), attend_plainly(policy, *qkv(3), *at))

    def test_positions_of_several_axes_go_by_their_order(self) -> None:
        policy, order = Policy(bias=ALiBi(HEADS)), torch.arange(TOKENS).flip(0)
        positions = torch.arange(TOKENS)
        with torch.no_grad():
            found = attend(policy, *qkv(), positions, order=order)
            close(found, attend_plainly(policy, *qkv(), positions, order=order))

    @pytest.mark.parametrize("made", ["t5", "two", "fire", "by head"])
    def test_gradients_of_what_is_learned(self, made: str) -> None:
        # Of queries and keys FlexAttention has none on the CPU.
        policy, positions = Policy(**MAKERS[made]()), torch.arange(TOKENS)
        weights = torch.randn(2, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(3))
        found, true = (
            torch.autograd.grad((out * weights).sum(), list(policy.parameters()))
            for out in (attend(policy, *qkv(), positions), attend_plainly(policy, *qkv(), positions))
        )
        for one, other in zip(found, true, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


class TestWhereItIsTaken:
    """On a GPU, for what it can say; the path tells."""

    def test_devices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(flex, "DEVICES", ("cuda",))
        policy, positions = Policy(bias=ALiBi(HEADS)), torch.arange(TOKENS)
        assert path_of(policy, positions).name == "distance"
        assert path_of(policy, positions, device="cuda").name == "flex"
        assert path_of(policy, positions, device="cuda", dtype=torch.float64).name == "distance"
        assert path_of(policy, positions, device="cuda", sinks=torch.zeros(HEADS)).name == "blocks"
        assert path_of(Policy(rotate=rope()), positions, device="cuda").name == "fused"
        monkeypatch.setenv("THEODOLITE_FLEX", "0")
        assert path_of(policy, positions, device="cuda").name == "distance"

    def test_what_cannot_be_said_pair_by_pair(self) -> None:
        for bias in (CoPE(HEADS, DIM, 8), TransformerXLBias(HEADS, DIM, hidden_size=WIDTH), ShawBias(HEADS, DIM, 5)):
            assert path_of(Policy(bias=bias), torch.arange(TOKENS)).name == "blocks"
        assert LowRankBias(HEADS, WIDTH, rank=2, extent=64).by_pair
        assert DisentangledBias(HEADS, DIM, hidden_size=WIDTH, max_relative_positions=8).by_pair

    def test_another_formula_says_so_for_itself(self) -> None:
        class Other(ALiBi):
            def _dense(self, q_positions, k_positions, content, heads):
                return super()._dense(q_positions, k_positions, content, heads) * 2

        assert not Other(HEADS).by_pair
        assert path_of(Policy(bias=Other(HEADS)), torch.arange(TOKENS)).name == "blocks"

    def test_the_module(self, monkeypatch: pytest.MonkeyPatch) -> None:
        policy = Policy(bias=T5Bias(HEADS, bidirectional=False, std=1.0))
        attention = Attention(WIDTH, HEADS, policy, num_kv_heads=KEY_HEADS)
        attention.requires_grad_(False)
        x, positions = torch.randn(2, TOKENS, WIDTH), torch.arange(TOKENS)
        assert attention.path(x, positions).name == "flex"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = attention(x, positions)
        monkeypatch.setattr(flex, "DEVICES", ("cuda",))
        close(found, attention(x, positions))
