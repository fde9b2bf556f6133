"""Every rotary encoding against transformers' own modules: equal where they are right, and where not, why not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from theodolite.encodings import Tables, rotary_tables
from theodolite.plan import Rotary
from theodolite.plan.huggingface import read_config

TRAINED, ORIGINAL, DIM = 4096, 1024, 64
POSITIONS = torch.tensor([[0, 1, 2, 17, 255, 1023], [1024, 2000, 3001, 4000, 4094, 4095]])
DIVISORS = {
    "short_factor": [1.0 + 0.01 * i for i in range(DIM // 2)],
    "long_factor": [1.0 + 0.9 * i for i in range(DIM // 2)],
}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0},
    "yarn, fractional ramp": {"factor": 4.0, "truncate": False},
    "yarn, two mscales": {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.2},
    "yarn, given attention factor": {"factor": 4.0, "attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2},
    "longrope": DIVISORS,
    "longrope, given attention factor": {**DIVISORS, "attention_factor": 1.3},
    "dynamic": {"factor": 2.0},
    "proportional": {"partial_rotary_factor": 0.25},
    "partial": {"partial_rotary_factor": 0.5},
    "partial linear": {"partial_rotary_factor": 0.25, "factor": 2.0},
}
NEEDS_ORIGINAL = ("llama3", "yarn", "longrope")


@pytest.fixture(autouse=True)
def calm() -> Iterator[None]:
    """transformers logs about keys that it does not expect."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)


def rope_type(name: str) -> str:
    first = name.split(",")[0]
    return {"partial": "default", "partial linear": "linear"}.get(first, first)


def config_of(name: str, kind: Any = transformers.LlamaConfig, **more: Any) -> Any:
    original = {"original_max_position_embeddings": ORIGINAL} if rope_type(name) in NEEDS_ORIGINAL else {}
    rope = {"rope_type": rope_type(name), "rope_theta": 10000.0, **original, **SCALINGS[name]}
    sizes = {"hidden_size": 2 * DIM, "num_attention_heads": 2, "num_hidden_layers": 1, "head_dim": DIM}
    return kind(**sizes, max_position_embeddings=TRAINED, rope_parameters=rope, pad_token_id=None, **more)


def ours(config: Any, *, length: int | None = None) -> Rotary:
    (rotary,) = read_config(config.to_dict(), source="a test's config").rotaries
    return rotary if length is None else rotary.at_length(length)


def theirs(module: Any, positions: torch.Tensor, *more: Any) -> Tables:
    """cos and sin of transformers, half width: its other half is a copy."""
    cos, sin = module(torch.zeros(1), positions, *more)
    half = cos.shape[-1] // 2
    assert torch.equal(cos[..., :half], cos[..., half:])
    return Tables(cos[..., :half], sin[..., :half])


def module_of(config: Any) -> Any:
    # Llama's module ignores `partial_rotary_factor` with no scaling; Phi-3's honours it.
    return (
        Phi3RotaryEmbedding(config)
        if "partial_rotary_factor" in config.rope_parameters
        else LlamaRotaryEmbedding(config)
    )


def assert_close(mine: Tables, other: Tables, rotary: Rotary, positions: torch.Tensor) -> None:
    """Equal to what float32 angles allow.

    transformers' frequencies carry a few float32 roundings (power, division, blend: at most 8 of 2**-24 each), the
    angle one more, so the angle is off by at most `9 * 2**-24 * angle`; cos and sin by as much and their own 2**-24.
    """
    angles = positions[..., None].double() * torch.from_numpy(rotary.inv_freq())
    allowed = (9 * angles + 2) * 2.0**-24 * rotary.attention_factor()
    for a, b in zip(mine, other, strict=True):
        assert bool(((a.double() - b.double()).abs() <= allowed).all())


@pytest.mark.parametrize("name", SCALINGS)
class TestWhereTheyAreRight:
    """The same table from the same config, for a sequence within the trained length and for one past it."""

    def test_tables(self, name: str) -> None:
        config = config_of(name)
        for positions in (POSITIONS[:1], POSITIONS):
            rotary = ours(config, length=int(positions.max()) + 1)
            mine = rotary_tables(rotary, positions)
            assert_close(mine, theirs(module_of(config), positions), rotary, positions)

    def test_dynamic_and_longrope_past_the_trained_length(self, name: str) -> None:
        config = config_of(name)
        positions = torch.arange(0, 3 * TRAINED, 97)[None]
        rotary = ours(config, length=int(positions.max()) + 1)
        assert_close(rotary_tables(rotary, positions), theirs(module_of(config), positions), rotary, positions)

    def test_attention_factor(self, name: str) -> None:
        config = config_of(name)
        assert ours(config).attention_factor() == pytest.approx(module_of(config).attention_scaling, rel=1e-12)


class TestWhereTheyAreWrong:
    """Known faults of transformers 5.24: what theirs gives, and that ours is not that."""

    def test_truncate_is_read_in_a_dict_by_layer_type(self) -> None:
        """transformers looks for `truncate` beside the layer types, so False inside one counts for nothing."""
        rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096}
        got = {}
        for truncate in (True, False):
            config = transformers.Olmo3Config(
                hidden_size=64, num_attention_heads=1, num_hidden_layers=1, layer_types=["full_attention"],
                max_position_embeddings=131072, rope_parameters={
                    "full_attention": {**rope, "truncate": truncate},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 150000.0},
                },
            )  # fmt: skip
            module = Olmo3RotaryEmbedding(config)
            got[truncate] = module.full_attention_inv_freq.double().numpy(), ours(config).inv_freq()
        assert np.array_equal(got[True][0], got[False][0])
        assert np.allclose(got[True][1], got[True][0], rtol=2**-20)
        # gpt-oss states truncate=False for these very numbers; rounding changes pair 17 by 76 %.
        assert got[True][1][17] / got[False][1][17] == pytest.approx(1.76, abs=0.01)

    def test_a_cast_of_the_model_does_not_round_the_frequencies(self) -> None:
        """`.to(bfloat16)` rounds transformers' inv_freq to 8 bits: cos is then off by up to 2 at 4,096 positions."""
        config, positions = config_of("default"), torch.arange(TRAINED)[None]
        module = LlamaRotaryEmbedding(config).to(torch.bfloat16)
        exact = rotary_tables(ours(config), positions)
        cast = theirs(module, positions)
        assert float((cast.cos - exact.cos).abs().max()) > 1.5
        assert_close(exact, theirs(LlamaRotaryEmbedding(config), positions), ours(config), positions)

    def test_dynamic_does_not_remember(self) -> None:
        """After 16,384 tokens transformers keeps that base for a sequence of 6,000."""
        config = config_of("dynamic")
        module, positions = LlamaRotaryEmbedding(config), torch.arange(6000)[None]
        fresh = theirs(module, positions)
        module(torch.zeros(1), torch.tensor([[16383]]))
        assert float((theirs(module, positions).cos - fresh.cos).abs().max()) > 0.1
        rotary = ours(config, length=6000)
        rotary_tables(ours(config, length=16384), torch.tensor([[16383]]))
        assert_close(rotary_tables(rotary, positions), fresh, rotary, positions)

    def test_longrope_of_a_short_row_beside_a_long_one(self) -> None:
        """transformers takes one set of divisors for the whole batch, by its largest position."""
        config = config_of("longrope")
        module = LlamaRotaryEmbedding(config)
        alone = theirs(module, POSITIONS[:1])
        beside = theirs(module, POSITIONS)
        assert float((beside.cos[0] - alone.cos[0]).abs().max()) > 0.1
        mine = rotary_tables(ours(config), POSITIONS, lengths=(1024, 4096))
        short, long = ours(config, length=1024), ours(config, length=4096)
        assert_close(Tables(mine.cos[:1], mine.sin[:1]), alone, short, POSITIONS[:1])
        assert_close(Tables(mine.cos[1:], mine.sin[1:]), theirs(module, POSITIONS[1:]), long, POSITIONS[1:])

    @pytest.mark.parametrize("name", ["dynamic", "yarn", "longrope"])
    def test_head_dim_of_none(self, name: str) -> None:
        """`getattr(config, "head_dim", ...)` without `or`: a head_dim of None is multiplied and raises TypeError."""
        config = config_of(name)
        config.head_dim = None
        with pytest.raises(TypeError):
            LlamaRotaryEmbedding(config)
        assert ours(config).head_dim == DIM


class TestByLayerType:
    """Gemma 3: one base and scaling for full layers, another for sliding ones."""

    def test_both_tables(self) -> None:
        config = transformers.Gemma3TextConfig(
            hidden_size=64, num_attention_heads=2, head_dim=DIM, num_hidden_layers=2,
            layer_types=["sliding_attention", "full_attention"], max_position_embeddings=TRAINED,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            },
        )  # fmt: skip
        plan, module = read_config(config.to_dict(), source="a test's config"), Gemma3RotaryEmbedding(config)
        for layer in plan.layers:
            assert layer.rotate is not None
            assert_close(
                rotary_tables(layer.rotate, POSITIONS),
                theirs(module, POSITIONS, layer.layer_type),
                layer.rotate,
                POSITIONS,
            )
