"""From a config to modules: what the plan says, with what the model learned loaded into it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from theodolite.encodings.build import build, build_embed
from theodolite.plan import Bias, Embedding, LayerPlan, Mask, ModelPlan, Rotary
from theodolite.plan.huggingface import read_config

Q, K = torch.arange(50, 57), torch.arange(40, 57)


def layer_of(config: Any) -> LayerPlan:
    return read_config(config.to_dict(), source="a test's config").layers[0]


class TestBiases:
    """Each kind of bias that a config can name becomes the class that has it."""

    def test_bloom(self):
        policy = build(layer_of(transformers.BloomConfig(n_layer=1, n_head=12, hidden_size=24)), num_heads=12)
        slopes = policy.bias.slopes()
        assert slopes[:3].tolist() == [0.5, 0.25, 0.125]
        assert slopes[8].item() == pytest.approx(2**-0.5)

    def test_mpt_with_another_bias_max(self):
        config = transformers.MptConfig(n_layers=1, n_heads=4, d_model=8, attn_config={"alibi_bias_max": 16})
        assert build(layer_of(config), num_heads=4).bias.slopes().tolist() == [2**-4, 2**-8, 2**-12, 2**-16]

    def test_falcon_scales_slopes_with_the_scores(self):
        config = transformers.FalconConfig(num_hidden_layers=1, num_attention_heads=4, hidden_size=64, alibi=True)
        assert build(layer_of(config), num_heads=4).bias.slopes()[0].item() == 2**-2 * 16**-0.5

    def test_t5_decoder(self):
        policy = build(layer_of(transformers.T5Config(num_layers=1)), num_heads=8)
        assert policy.bias.weight.shape == (32, 8)
        assert policy.score_scale == 1.0
        # A decoder does not look ahead: all later keys are in one bucket.
        later = policy.dense_bias(torch.tensor([0]), torch.tensor([1, 50]))
        assert torch.equal(later[..., 0], later[..., 1])

    def test_deberta_with_and_without_buckets(self):
        sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "relative_attention": True}
        sizes["pos_att_type"] = ["c2p", "p2c"]
        buckets = transformers.DebertaV2Config(**sizes, position_buckets=16, max_relative_positions=64)
        policy = build(layer_of(buckets), num_heads=4, head_dim=8, hidden_size=32)
        assert (policy.bias.position_buckets, policy.bias.max_relative_positions) == (16, 64)
        assert policy.score_scale == pytest.approx((3 * 8) ** -0.5)
        plain = transformers.DebertaConfig(**sizes, max_relative_positions=64)
        assert build(layer_of(plain), num_heads=4, head_dim=8, hidden_size=32).bias.position_buckets is None

    def test_deberta_with_one_term_and_a_layer_norm(self):
        """Another number of terms is another scale of all scores."""
        config = transformers.DebertaV2Config(
            num_hidden_layers=1, hidden_size=32, num_attention_heads=4, relative_attention=True, position_buckets=16,
            max_relative_positions=64, pos_att_type=["p2c"], norm_rel_ebd="layer_norm", layer_norm_eps=1e-3,
        )  # fmt: skip
        policy = build(layer_of(config), num_heads=4, head_dim=8, hidden_size=32)
        assert policy.bias.pos_att_type == ("p2c",)
        assert policy.score_scale == pytest.approx((2 * 8) ** -0.5)
        norm = policy.bias.rel_embeddings.LayerNorm
        assert norm.eps == 1e-3
        with torch.no_grad():
            norm.weight.zero_()
        policy.reset_parameters()
        assert (norm.weight == 1).all()

    def test_deberta_with_attention_s_own_projections(self):
        """Projections of its own would start as noise in a model that has learned others."""
        layer = LayerPlan(bias=Bias(kind="deberta", buckets=32, max_distance=64, terms=("c2p",), share_att_key=True))
        sizes = {"num_heads": 4, "head_dim": 8, "hidden_size": 32}
        with pytest.raises(ValueError, match="key_proj: got None; this bias has attention's own projections"):
            build(layer, **sizes, query_proj=torch.nn.Linear(32, 32))
        projection = torch.nn.Linear(32, 32)
        assert build(layer, **sizes, key_proj=projection).bias.pos_key_proj is projection

    def test_a_clamped_transformer_xl(self):
        layer = layer_of(transformers.XLNetConfig(n_layer=1, d_model=32, n_head=4, clamp_len=5))
        assert build(layer, num_heads=4, head_dim=8, hidden_size=32).bias.clamp_length == 5

    def test_widths_that_are_needed(self):
        layer = LayerPlan(bias=Bias(kind="transformer-xl"))
        assert build(layer, num_heads=4, head_dim=8, hidden_size=32).bias.num_heads == 4
        with pytest.raises(ValueError, match="hidden_size: got None; a bias of kind 'transformer-xl' needs it"):
            build(layer, num_heads=4, head_dim=8)

    def test_encoders_see_both_ways(self):
        layer = LayerPlan(bias=Bias(kind="alibi"), mask=Mask(causal=False))
        bias = build(layer, num_heads=4).dense_bias(torch.tensor([5]), torch.tensor([3, 7]))
        assert torch.equal(bias[..., 0], bias[..., 1])
        assert (bias < 0).all()


class TestWhatIsNoLayer:
    """A plan of something else is named in the error, with what to write instead."""

    MODEL = ModelPlan(model_type="m", max_position_embeddings=8, layers=(LayerPlan(),) * 2)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (MODEL, r"layer: got a ModelPlan, .*\[build\(layer, num_heads=...\) for layer in plan.layers\]"),
            (Rotary(head_dim=8, rope_theta=1e4), r"layer: got a Rotary, .*LayerPlan\(rotate=rotary\)"),
            (Bias(kind="alibi"), r"layer: got a Bias, .*LayerPlan\(bias=bias\)"),
            (Embedding(kind="sinusoidal"), r"layer: got an Embedding, .*build_embed\(plan.embed, dim=...\)"),
            ({"rotate": None}, "layer: got a dict, give one of plan.layers"),
        ],
        ids=["model", "rotary", "bias", "embedding", "dict"],
    )
    @pytest.mark.parametrize("sizes", [{}, {"num_heads": 4}], ids=["alone", "heads"])
    def test_build(self, given, message, sizes):
        with pytest.raises(ValueError, match=message):
            build(given, **sizes)

    def test_heads_are_needed(self):
        with pytest.raises(ValueError, match="num_heads: got None; give the query heads of the whole model"):
            build(LayerPlan())

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (MODEL, r"embed: got a ModelPlan, .*build_embed\(plan.embed, dim=...\)"),
            (None, "embed: got None; this model adds no positions to its embeddings"),
            (Rotary(head_dim=8, rope_theta=1e4), "embed: got a Rotary; give plan.embed"),
        ],
        ids=["model", "none", "rotary"],
    )
    def test_build_embed(self, given, message):
        with pytest.raises(ValueError, match=message):
            build_embed(given, dim=8)


class TestEmbeddings:
    """Added positions: rows and offsets as the family counts them."""

    @pytest.mark.parametrize(
        "config",
        [
            transformers.MarianConfig(d_model=16, vocab_size=20, pad_token_id=1),
            transformers.PegasusConfig(d_model=16, vocab_size=20, pad_token_id=1),
            transformers.M2M100Config(d_model=16, vocab_size=20, pad_token_id=1, max_position_embeddings=64),
            transformers.XGLMConfig(d_model=16, vocab_size=20, max_position_embeddings=64),
        ],
        ids=lambda config: config.model_type,
    )
    def test_sinusoids_of_real_models(self, config):
        """Their own table, row by row, where tokens are counted as the model counts them."""
        from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
        from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
        from transformers.models.pegasus.modeling_pegasus import PegasusSinusoidalPositionalEmbedding
        from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding

        positions = torch.arange(40)
        if config.model_type in ("marian", "pegasus"):
            kind = {"marian": MarianSinusoidalPositionalEmbedding, "pegasus": PegasusSinusoidalPositionalEmbedding}
            module = kind[config.model_type](64, 16)
            module.weight.data.copy_(module.create_weight())
            theirs = module(torch.Size((1, 40)))
        elif config.model_type == "m2m_100":
            module = M2M100SinusoidalPositionalEmbedding(64, 16, 1)
            theirs = module(torch.full((1, 40), 5))[0]
        else:
            module = XGLMSinusoidalPositionalEmbedding(64, 16, 1)
            theirs = module(positions[None], 0)[0]
        ours = build_embed(read_config(config.to_dict(), source="a test's config").embed, dim=16).table(positions)
        # float32 angles of at most 41 radians, off by two roundings of them.
        assert (ours - theirs.reshape(40, 16)).abs().max() < 41 * 2 * 2**-24 + 2**-23

    def test_opt(self):
        config = transformers.OPTConfig(hidden_size=16, max_position_embeddings=32, num_hidden_layers=1)
        embed = build_embed(read_config(config.to_dict(), source="a test's config").embed, dim=16)
        assert embed.weight.shape == (34, 16)
        with pytest.raises(ValueError, match="32"):
            embed.table(torch.tensor([32]))

    def test_a_table_without_an_end(self):
        with pytest.raises(ValueError, match="rows: got None; a learned table needs the number of positions"):
            build_embed(Embedding(kind="learned"), dim=8)
