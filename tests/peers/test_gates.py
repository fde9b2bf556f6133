"""Biases of the layer's input against their authors': transformers' Inkling, and the forget gate of FoX."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional
from transformers.models.inkling.modeling_inkling import InklingAttention
from transformers.models.inkling2.modeling_inkling2 import Inkling2RelativePositionBias

from theodolite.encodings.bias.forgetting import ForgettingGate
from theodolite.encodings.bias.low_rank import LowRankBias
from theodolite.encodings.scale.temperature import LogScale

UNIT = 2.0**-24
HEADS, WIDTH, TOKENS = 4, 24, 33
SMALL = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 6,
    "num_hidden_layers": 2,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "d_rel": 5,
    "rel_extent": 11,
    "attn_implementation": "eager",
}


def filled(module: torch.nn.Module) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


def layer_input(tokens=TOKENS):
    return torch.randn(2, tokens, WIDTH, generator=torch.Generator().manual_seed(2))


def given_to_attention(layer: InklingAttention, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The query and the bias that an Inkling layer hands to its attention function."""
    seen = []

    def attention(module, query, key, value, mask, position_bias=None, **options):
        seen.append((query, position_bias))
        return torch.zeros_like(query).transpose(1, 2), None

    monkeypatch.setattr(sys.modules[InklingAttention.__module__], "eager_attention_forward", attention)
    with torch.no_grad():
        layer(layer_input(), attention_mask=None)
    return seen[0]


class TestInkling:
    """The bias that its layers add: 1024 distances in the global ones, the window in the local ones."""

    @pytest.mark.parametrize(("layer", "extent"), [(0, 6), (1, 11)])
    @pytest.mark.parametrize("floor", [None, 7])
    def test_bias_and_query(self, layer, extent, floor, monkeypatch):
        config = transformers.InklingTextConfig(**SMALL, log_scaling_n_floor=floor, log_scaling_alpha=0.3)
        theirs = filled(InklingAttention(config, layer))
        query, expected = given_to_attention(theirs, monkeypatch)
        scale = LogScale(alpha=0.3, length=floor) if floor and layer == 1 else None
        ours = LowRankBias(HEADS, WIDTH, 5, extent=extent, scale=scale)
        ours.load_state_dict({"weight": theirs.r_proj.weight, "curves": theirs.rel_logits_proj.proj})
        positions = torch.arange(TOKENS)
        with torch.no_grad():
            found = ours.dense(positions, positions, x=layer_input())
        # Sums of WIDTH and of 5 products, in another order.
        assert (found - expected).abs().max() <= 2 * (WIDTH + 5 + 4) * UNIT * expected.abs().max() * WIDTH
        assert torch.equal(found == 0, expected == 0)
        assert expected.abs().max() > 0.1
        if scale is not None:
            plain = transformers.InklingTextConfig(**SMALL, log_scaling_n_floor=None)
            unscaled, _ = given_to_attention(filled(InklingAttention(plain, layer)), monkeypatch)
            assert (scale(unscaled, positions) - query).abs().max() <= 8 * UNIT * query.abs().max()
            assert not torch.equal(unscaled, query)


class TestInkling2:
    """A clip on the mix, and in global layers the temperature of the scores on the bias as well."""

    @pytest.mark.parametrize("log_scaling", [True, False])
    @pytest.mark.parametrize("threshold", [0.5, 8.0])
    def test_bias(self, log_scaling, threshold):
        options = {**SMALL, "rel_l2_clip_threshold": threshold, "log_scaling_n_floor": 7, "log_scaling_alpha": 0.3}
        theirs = filled(
            Inkling2RelativePositionBias(transformers.Inkling2TextConfig(**options), HEADS, 11, log_scaling)
        )
        scale = LogScale(alpha=0.3, length=7) if log_scaling else None
        ours = LowRankBias(HEADS, WIDTH, 5, extent=11, l2_clip=threshold, scale=scale)
        weights = {"weight": theirs.linear.weight, "curves": theirs.proj, "mix_scale": theirs.norm.scale}
        ours.load_state_dict(weights)
        q, k = torch.arange(20, 20 + TOKENS), torch.arange(20 + TOKENS)
        with torch.no_grad():
            expected = theirs(layer_input(), q[:, None] - k, q[None])
            found = ours.dense(q, k, x=layer_input())
        assert (found - expected).abs().max() <= 2 * (WIDTH + 5 + 8) * UNIT * expected.abs().max() * WIDTH
        assert expected.abs().max() > 0.02

    def test_the_defaults_are_its_own(self):
        config = transformers.Inkling2TextConfig()
        ours = LowRankBias(2, 8, extent=config.rel_extent)
        assert ours.rank == config.d_rel == transformers.InklingTextConfig().d_rel


class TestForgettingTransformer:
    """The authors' layer: `logsigmoid(fgate_proj(x))`, and flash-linear-attention's `naive_forgetting_attn`."""

    def test_attention(self):
        projection = filled(torch.nn.Linear(WIDTH, HEADS))
        gate = ForgettingGate(HEADS, WIDTH)
        gate.load_state_dict(projection.state_dict())
        q, k, v = (torch.randn(2, HEADS, TOKENS, 8) for _ in range(3))
        x, positions, causal = layer_input(), torch.arange(TOKENS), torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        with torch.no_grad():
            decays = functional.logsigmoid(projection(x)).cumsum(1).transpose(1, 2)
            scores = q @ k.mT * 8**-0.5 + decays[..., None] - decays[:, :, None]
            expected = scores.masked_fill(~causal, -torch.inf).softmax(-1) @ v
            state = gate.state(x)
            bias = gate.dense(positions, positions, q_state=state, k_state=state)
            found = functional.scaled_dot_product_attention(q, k, v, bias.masked_fill(~causal, -torch.inf))
        # Their sum is made in float32; an error of the scores is one of the weights, relatively.
        worst = TOKENS * 4 * UNIT * decays.abs().max() + 64 * UNIT * scores.abs().max()
        assert (found - expected).abs().max() <= 2 * worst * v.abs().max()
        without = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert (without - expected).abs().max() > 0.1
