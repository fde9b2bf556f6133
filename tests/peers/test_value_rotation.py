"""DeepSeek-V4 of transformers turns one tensor that is key and value, and turns the output back; so does ours."""

from __future__ import annotations

import pytest
import torch

from theodolite.encodings import RotaryEmbedding
from theodolite.plan import Rotary

deepseek = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
configuration = pytest.importorskip("transformers.models.deepseek_v4.configuration_deepseek_v4")

HEADS, HEAD_DIM, ROTARY_DIM = 4, 16, 8


def config():
    return configuration.DeepseekV4Config(
        hidden_size=32,
        num_attention_heads=HEADS,
        head_dim=HEAD_DIM,
        qk_rope_head_dim=ROTARY_DIM,
        q_lora_rank=16,
        o_lora_rank=8,
        o_groups=2,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "sliding_attention"],
        mlp_layer_types=["moe", "moe"],
        sliding_window=64,
        vocab_size=32,
        attn_implementation="eager",
    )


def plan_of(settings) -> Rotary:
    main = settings.rope_parameters["main"]
    assert main["rope_type"] == "default"
    width = int(HEAD_DIM * main["partial_rotary_factor"])
    return Rotary(head_dim=HEAD_DIM, rope_theta=main["rope_theta"], rotary_dim=width, interleaved=True, trailing=True)


class TestFunctions:
    """Their rotation, forth and back, on the last channels of the head."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_forth_and_back(self, dtype):
        settings = config()
        peer, mine = deepseek.DeepseekV4RotaryEmbedding(settings), RotaryEmbedding(plan_of(settings))
        assert mine.rotary_dim == ROTARY_DIM
        positions = torch.arange(9)[None] + 30
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, HEADS, 9, HEAD_DIM, generator=generator).to(dtype)
        cos, sin = peer(torch.zeros(1), positions, layer_type="main")
        tables = mine.tables(positions, amplitude=False)
        # Float32 angles of up to 38 radians, and a rotation; then one rounding on either side.
        bound = 4 * 40 * 2.0**-24 * x.double().norm(dim=-1, keepdim=True)
        step = 0 if dtype == torch.float32 else torch.finfo(dtype).eps
        for theirs, ours in (
            (deepseek.apply_rotary_pos_emb(x, cos, sin), mine.turn_values(x, tables)),
            (deepseek.apply_rotary_pos_emb(x, cos, -sin), mine.turn_output_back(x, tables)),
        ):
            assert ours.dtype == theirs.dtype == dtype
            assert ((theirs.double() - ours.double()).abs() <= bound + step * theirs.double().abs()).all()
            assert torch.equal(ours[..., :ROTARY_DIM], x[..., :ROTARY_DIM])


class TestAttention:
    """A whole attention layer of theirs, with its own weights, and the same layer with our rotations."""

    def layer(self):
        torch.manual_seed(0)
        settings = config()
        attention = deepseek.DeepseekV4Attention(settings, 0).eval()
        with torch.no_grad():
            for parameter in attention.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
        return settings, attention

    def ours(self, settings, layer, x, positions, mask):
        rope = RotaryEmbedding(plan_of(settings))
        tables = rope.tables(positions, amplitude=False)
        shape = *x.shape[:2], -1, HEAD_DIM
        q = layer.q_b_norm(layer.q_b_proj(layer.q_a_norm(layer.q_a_proj(x))).view(shape).transpose(1, 2))
        kv = layer.kv_norm(layer.kv_proj(x)).view(shape).transpose(1, 2)
        q, k = rope.apply_tables(q, kv, tables)
        v = rope.turn_values(kv, tables)
        scores = q @ k.transpose(-1, -2) * HEAD_DIM**-0.5 + mask
        sinks = layer.sinks.view(1, -1, 1, 1).expand(x.shape[0], -1, x.shape[1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        out = rope.turn_output_back(weights @ v, tables).transpose(1, 2)
        return layer.o_b_proj(layer.o_a_proj(out.reshape(*x.shape[:2], settings.o_groups, -1)).flatten(2))

    @pytest.mark.parametrize("start", [0, 37])
    def test_whole_layer(self, start):
        settings, layer = self.layer()
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(2, 9, 32, generator=generator)
        positions = torch.arange(start, start + 9)[None]
        mask = torch.full((9, 9), float("-inf")).triu(1)[None, None]
        tables = deepseek.DeepseekV4RotaryEmbedding(settings)(x, positions, layer_type="main")
        with torch.no_grad():
            theirs, _ = layer(x, {"main": tables}, positions, mask)
            mine = self.ours(settings, layer, x, positions, mask)
            # The error of float32 in the layer as such: the same layer of ours in float64.
            true = self.ours(settings, layer.double(), x.double(), positions, mask.double())
        error = (mine.double() - true).abs().max()
        # Theirs has float32 angles of up to 46 radians besides.
        assert (theirs.double() - true).abs().max() <= 46 * 2.0**-23 * true.abs().max() + 4 * error
        assert (theirs.double() - mine.double()).abs().max() <= 46 * 2.0**-23 * true.abs().max() + 5 * error
        assert true.abs().max() > 0.1
