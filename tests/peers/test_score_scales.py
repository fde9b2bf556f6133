"""Score scales against transformers' own attention: the scores of a layer with its temperature on and off."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
import transformers
from transformers.models.beam.modeling_beam import BeamAttention, compute_attention_scaling
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.inkling2.modeling_inkling2 import Inkling2LogScale
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention
from transformers.models.ministral3.modeling_ministral3 import Ministral3Attention
from transformers.models.mistral4.modeling_mistral4 import Mistral4Attention
from transformers.models.mistral_large4.modeling_mistral_large4 import (
    MistralLarge4TextAttention,
    MistralLarge4TextSoftmaxScaling,
)

from theodolite.encodings import rotary_tables
from theodolite.encodings.scale.base import Scale
from theodolite.encodings.scale.constant import ConstantScale
from theodolite.encodings.scale.ssmax import SSMax
from theodolite.encodings.scale.temperature import LogScale, PowerScale, Temperature
from theodolite.kernels import rotate
from theodolite.plan import Rotary, YaRN
from theodolite.plan.huggingface import read_config

UNIT = 2.0**-24
HEADS, DIM, WIDTH, TOKENS = 4, 8, 32, 33
SMALL = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": DIM,
    "num_hidden_layers": 4,
    "vocab_size": 64,
    "attn_implementation": "eager",
}
LATENT = {
    **SMALL,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "head_dim": 4,
}


def filled(module: torch.nn.Module) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


@pytest.fixture
def query_of(monkeypatch):
    """The query that a layer's attention function is given, (B, H, S, D), after all that the layer does to it."""

    def run(layer: torch.nn.Module, **inputs: Any) -> torch.Tensor:
        seen = []

        def attention(module, query, key, value, mask, **options):
            seen.append(query)
            return torch.zeros(*query.shape[:2], query.shape[2], value.shape[-1]).transpose(1, 2), None

        monkeypatch.setattr(sys.modules[type(layer).__module__], "eager_attention_forward", attention)
        x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            layer(x, attention_mask=None, **inputs)
        return seen[0]

    return run


def angles(positions: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    turned = positions[..., None] * torch.linspace(1, 0.01, dim)
    return turned.cos(), turned.sin()


def agree(scale: Scale, plain: torch.Tensor, tuned: torch.Tensor, positions: torch.Tensor) -> None:
    """Theirs and ours are two roundings of one product, and their logarithm is a float32 one too."""
    assert (tuned - plain).abs().max() > 0.01
    assert (scale(plain, positions) - tuned).abs().max() <= 16 * UNIT * tuned.abs().max()


class TestLlama4:
    """The layers without rotation: every fourth, by position + 1."""

    @pytest.mark.parametrize("layer", [0, 3])
    def test_scores(self, layer, query_of):
        options = {**SMALL, "attn_scale": 0.3, "floor_scale": 5, "pad_token_id": 0, "no_rope_layers": [1, 1, 1, 0]}
        queries, scales = [], []
        for tuning in (False, True):
            config = transformers.Llama4TextConfig(**options, attn_temperature_tuning=tuning)
            embeddings = torch.complex(*angles(torch.arange(TOKENS)[None], DIM // 2))
            attention = filled(Llama4TextAttention(config, layer))
            queries.append(query_of(attention, position_embeddings=embeddings))
            scales.append(read_config(config.to_dict()).layers[layer].temperature)
        assert scales[0] is None
        if layer == 0:
            assert scales[1] is None
            assert torch.equal(*queries)
            return
        agree(Temperature.from_plan(scales[1]), *queries, torch.arange(TOKENS))
        assert scales[1].shift == 1


class TestMistral:
    """Every layer, after rotation, by the position itself; the query's place is the caller's, not the cache's."""

    POSITIONS = torch.stack((torch.arange(TOKENS), torch.arange(50, 50 + TOKENS)))

    @pytest.mark.parametrize(
        ("kind", "attention", "options", "dim"),
        [
            (transformers.Ministral3Config, Ministral3Attention, SMALL, DIM),
            (transformers.Mistral4Config, Mistral4Attention, {**LATENT, "q_lora_rank": 8}, 4),
        ],
    )
    def test_scores(self, kind, attention, options, dim, query_of):
        queries, plans = [], []
        for beta in (0.0, 0.3):
            rope = {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "llama_4_scaling_beta": beta,
            }
            config = kind(**options, max_position_embeddings=256, rope_parameters=rope)
            cos_sin = tuple(torch.cat((half, half), -1) for half in angles(self.POSITIONS, dim // 2))
            layer = filled(attention(config, 0))
            queries.append(query_of(layer, position_embeddings=cos_sin, position_ids=self.POSITIONS))
            plans.append(read_config(config.to_dict()).layers[0].temperature)
        assert (plans[1].length, plans[1].shift) == (16, 0)
        agree(Temperature.from_plan(plans[1]), *queries, self.POSITIONS)
        assert torch.equal(queries[0][:, :, :16][0], queries[1][:, :, :16][0])
        assert not torch.equal(queries[0][:, :, 16][0], queries[1][:, :, 16][0])


class TestMistralLarge4:
    """A learned multiple of ln(m + 1) and a learned constant for each head."""

    def modules(self, dtype=torch.float32):
        theirs, ours = filled(MistralLarge4TextSoftmaxScaling(HEADS)).to(dtype), SSMax(HEADS, bias=True).to(dtype)
        ours.load_state_dict(theirs.state_dict())
        return theirs, ours

    @pytest.mark.parametrize("heads_first", [True, False])
    def test_scores(self, heads_first):
        theirs, ours = self.modules()
        positions = torch.stack((torch.arange(TOKENS), torch.arange(900_000, 900_000 + TOKENS)))
        q = torch.randn(2, HEADS, TOKENS, DIM) if heads_first else torch.randn(2, TOKENS, HEADS, DIM)
        with torch.no_grad():
            expected = theirs(q, positions, head_dim_first=heads_first)
            found = ours(q, positions, heads_first=heads_first)
        assert (found - expected).abs().max() <= 8 * UNIT * expected.abs().max()

    def test_theirs_counts_in_the_dtype_of_the_query(self):
        """In bfloat16 they round ln(m + 1), and the sum, to 8 bits: up to a hundredth off. Ours rounds the result."""
        theirs, ours = self.modules(torch.bfloat16)
        positions = torch.arange(1000, 3000)[None]
        q = torch.ones(1, HEADS, 2000, 1, dtype=torch.bfloat16)
        scale, bias = (parameter.detach().double()[None, :, None] for parameter in (theirs.scale, theirs.bias))
        true = scale * (positions + 1).double().log() + bias
        with torch.no_grad():
            off = [
                ((out[..., 0].double() - true) / true).abs().max()
                for out in (theirs(q, positions, True), ours(q, positions))
            ]
        assert off[0] > 1.5 * 2**-8
        # Half a unit of 8 bits.
        assert off[1] <= 2**-8 + 64 * UNIT


class TestBeamAndInkling:
    """Temperatures without steps."""

    def test_beam(self, query_of):
        config = transformers.BeamConfig(**SMALL, layer_types=["full_attention"] * 4)
        layer, positions = filled(BeamAttention(config, 0)), torch.arange(9000, 9000 + TOKENS)[None].expand(2, -1)
        scaling = compute_attention_scaling(positions)
        queries = [query_of(layer, position_embeddings=None, attention_scaling=one) for one in (None, scaling)]
        agree(PowerScale(), *queries, positions)

    def test_beam_counts_the_query_itself(self):
        """Its docstring says position / 2048, its code (position + 1) / 2048: the code is what models ran."""
        assert compute_attention_scaling(torch.tensor([[2047]])).item() == pytest.approx(2**0.1, rel=4 * UNIT)
        assert PowerScale().factors(torch.tensor([2047])).item() == pytest.approx(2**0.1, rel=4 * UNIT)

    def test_inkling2(self):
        config = transformers.Inkling2TextConfig(log_scaling_n_floor=1000, log_scaling_alpha=0.2)
        positions = torch.stack((torch.arange(980, 980 + TOKENS), torch.arange(500_000, 500_000 + TOKENS)))
        q = torch.randn(2, TOKENS, HEADS, DIM)
        expected = Inkling2LogScale(config)(q, positions)
        scale = LogScale(alpha=0.2, length=1000)
        agree(scale, q.transpose(1, 2), expected.transpose(1, 2), positions)
        default = transformers.Inkling2TextConfig()
        assert (LogScale().alpha, LogScale().length) == (default.log_scaling_alpha, default.log_scaling_n_floor)


class TestLatentAttention:
    """`mscale_all_dim` squared, on all scores, beside whatever cos and sin carry."""

    @pytest.mark.parametrize(
        ("kind", "attention", "mscale", "factor", "golden"),
        [
            (transformers.DeepseekV2Config, DeepseekV2Attention, 0.707, 40.0, 1.589626),
            (transformers.DeepseekV3Config, DeepseekV3Attention, 1.0, 40.0, 1.873854),
            (transformers.Mistral4Config, Mistral4Attention, 1.0, 128.0, 2.205828),
            (transformers.MistralLarge4TextConfig, MistralLarge4TextAttention, 1.0, 2048.0, 3.106272),
        ],
    )
    def test_softmax_scale(self, kind, attention, mscale, factor, golden):
        said = {"factor": factor, "original_max_position_embeddings": 64, "mscale": mscale, "mscale_all_dim": mscale}
        rope = {"rope_type": "yarn", "rope_theta": 1e4, **said}
        if attention is Mistral4Attention:
            rope["llama_4_scaling_beta"] = 0.1
        layer = attention(kind(**LATENT, q_lora_rank=8, rope_parameters=rope), 0)
        scale = ConstantScale.latent(YaRN(**said))
        assert layer.scaling == pytest.approx((4 + 4) ** -0.5 * scale.value, rel=2**-50)
        assert scale.value == pytest.approx(golden, abs=5e-7)


class TestAmplitude:
    """gpt-oss carries YaRN's temperature on cos and sin; squared on the scores it is the same."""

    def test_gpt_oss(self):
        config = transformers.GptOssConfig(head_dim=64)
        positions = torch.arange(5000, 5000 + TOKENS)[None]
        q, k = torch.randn(1, 2, TOKENS, 64), torch.randn(1, 2, TOKENS, 64)
        cos, sin = GptOssRotaryEmbedding(config)(q, positions)
        theirs_q, theirs_k = apply_rotary_pos_emb(q, k, cos, sin)
        said = read_config(config.to_dict()).layers[0].rotate
        assert isinstance(said.scaling, YaRN)
        bare = YaRN(
            factor=said.scaling.factor,
            original_max_position_embeddings=said.scaling.original_max_position_embeddings,
            truncate=said.scaling.truncate,
            attention_factor_given=1.0,
        )
        tables = rotary_tables(Rotary(head_dim=64, rope_theta=said.rope_theta, scaling=bare), positions)
        ours_q, ours_k = rotate(q.clone(), k.clone(), *tables)
        scale = ConstantScale.squared_attention_factor(said.scaling)
        assert scale.value == pytest.approx((0.1 * math.log(32) + 1) ** 2)
        expected = theirs_q @ theirs_k.mT
        found = scale(ours_q, positions) @ ours_k.mT
        # Their float32 angles at m = 5000 are off by up to half a unit of 8192, 2^-12: so is each of 64 products,
        # by the angle of q and of k. The amplitude itself would show at 0.8 of the scores.
        assert (found - expected).abs().max() <= 64 * 2 * 2**-12 * q.abs().max() * k.abs().max()
        assert (ours_q @ ours_k.mT - expected).abs().max() > 0.3 * expected.abs().max()
