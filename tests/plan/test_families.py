"""What the families say in their own way, on configs as their makers released them."""

from __future__ import annotations

from typing import Any

import pytest

from theodolite.plan import NTK, Bias, Embedding, Linear, LongRoPE, PlanError, Scaling, Temperature, YaRN
from theodolite.plan.describe import describe
from theodolite.plan.huggingface import read_config, rope_parameters, write_config

SMALL = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096}


def config(model_type: str, **keys: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SMALL, **keys}


class TestGemma:
    # The text part of gemma-3-4b-it, whole: it states neither base nor heads.
    GEMMA3_4B: dict[str, Any] = {  # noqa: RUF012
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    }

    def test_the_scaling_acts_on_the_global_layers_only(self) -> None:
        """Linear 8 on all layers, or on none, stays fluent and loops after 3,000 tokens."""
        plan = read_config(self.GEMMA3_4B)
        local, far = plan.layers[0], plan.layers[5]
        assert local.rotate is not None
        assert far.rotate is not None
        assert (local.rotate.rope_theta, local.rotate.scaling) == (1e4, Scaling())
        assert (far.rotate.rope_theta, far.rotate.scaling) == (1e6, Linear(factor=8.0))
        assert (local.mask.sliding_window, far.mask.sliding_window) == (1024, None)
        assert [layer.layer_type for layer in plan.layers].count("full_attention") == 5
        assert far.rotate.head_dim == 256

    def test_both_dialects_are_written(self) -> None:
        plan = read_config(self.GEMMA3_4B).with_scaling(Linear(factor=2.0))
        new = write_config(plan, self.GEMMA3_4B)
        old = write_config(plan, self.GEMMA3_4B, dialect="legacy")
        assert read_config(new) == read_config(old) == plan
        assert new["text_config"]["rope_parameters"]["full_attention"]["factor"] == 16.0
        assert old["text_config"]["rope_scaling"] == {"rope_type": "linear", "factor": 16.0}
        assert old["text_config"]["rope_local_base_freq"] == 1e4

    def test_a_flat_dict_is_refused(self) -> None:
        flat = config("gemma3_text", sliding_window=8, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
        with pytest.raises(PlanError, match="in this family it stands by layer type"):
            read_config(flat)

    def test_gemma2_scales_its_scores_by_a_number_of_its_own(self) -> None:
        plan = read_config(config("gemma2", rope_theta=1e4, sliding_window=8, head_dim=16, query_pre_attn_scalar=144))
        assert [layer.score_scale for layer in plan.layers] == [144**-0.5] * 4
        assert [layer.mask.sliding_window for layer in plan.layers] == [8, None, 8, None]
        same = read_config(config("gemma2", rope_theta=1e4, sliding_window=8, head_dim=16, query_pre_attn_scalar=16))
        assert same.layers[0].score_scale is None

    def test_proportional_keeps_width_and_partner(self) -> None:
        """64 frequencies without the zeros behind them pair channel i with i + 64 and drift."""
        plan = read_config(
            config(
                "gemma4_text",
                head_dim=256,
                global_head_dim=512,
                sliding_window=512,
                rope_parameters={
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
                },
                layer_types=["sliding_attention"] * 3 + ["full_attention"],
            )
        )
        far, local = plan.layers[3].rotate, plan.layers[0].rotate
        assert far is not None
        assert local is not None
        assert (far.head_dim, far.rotary_dim, far.live_pairs) == (512, 512, 64)
        assert far.inv_freq()[1] == pytest.approx(0.947464, abs=5e-7)
        assert (far.inv_freq()[64:] == 0).all()
        assert (local.head_dim, local.live_pairs) == (256, None)
        assert plan.layers[0].score_scale == 1.0
        assert rope_parameters(plan)["full_attention"]["partial_rotary_factor"] == 0.25


class TestLayersWithoutRotation:
    @pytest.mark.parametrize("model_type", ["smollm3", "llama4_text"])
    def test_no_rope_layers_of_one_means_that_the_layer_turns(self, model_type: str) -> None:
        """One engine read the name and rotated exactly the layers that must not be."""
        plan = read_config(config(model_type, rope_theta=5e5, no_rope_layers=[1, 1, 1, 0], attention_chunk_size=8))
        assert [layer.rotate is not None for layer in plan.layers] == [True, True, True, False]

    def test_an_empty_or_missing_list_is_every_fourth(self) -> None:
        for keys in ({}, {"no_rope_layers": []}, {"no_rope_layer_interval": 4}):
            plan = read_config(config("llama4_text", rope_theta=5e5, attention_chunk_size=8192, **keys))
            assert [layer.rotate is not None for layer in plan.layers] == [True, True, True, False]
            assert [layer.mask.chunk for layer in plan.layers] == [8192, 8192, 8192, None]

    def test_llama4_warms_the_layers_that_do_not_turn(self) -> None:
        plan = read_config(config("llama4_text", rope_theta=5e5, attention_chunk_size=8192, attn_scale=0.2))
        assert [layer.temperature for layer in plan.layers[:3]] == [None] * 3
        assert plan.layers[3].temperature == Temperature(beta=0.2, length=8192, shift=1)

    def test_cohere2_and_exaone4_turn_only_where_they_have_a_window(self) -> None:
        for model_type in ("cohere2", "exaone4"):
            plan = read_config(config(model_type, rope_theta=5e4, sliding_window=16))
            assert [layer.rotate is not None for layer in plan.layers] == [True, True, True, False]
        assert all(layer.rotate for layer in read_config(config("exaone4", rope_theta=1e6, sliding_window=None)).layers)
        text = read_config(config("exaone4", rope_theta=1e6, sliding_window=16, sliding_window_pattern="LGLL"))
        assert [layer.mask.sliding_window for layer in text.layers] == [16, None, 16, 16]

    def test_granite_with_a_base_of_nought_does_not_turn_there(self) -> None:
        plan = read_config(
            config(
                "granite_swa", rope_theta=1e4, layer_rope_theta=[1e4, 0, 5e4, 0], attention_multiplier=0.5,
                layer_types=["full_attention"] * 4,
            )
        )  # fmt: skip
        assert [layer.rotate and layer.rotate.rope_theta for layer in plan.layers] == [1e4, None, 5e4, None]

    def test_recurrent_layers_have_nothing(self) -> None:
        plan = read_config(config("qwen3_next", rope_theta=1e7, head_dim=16))
        assert [layer.layer_type for layer in plan.layers] == ["linear_attention"] * 3 + ["full_attention"]
        assert [layer.rotate and layer.rotate.rotary_dim for layer in plan.layers] == [None, None, None, 4]

    def test_granite_hybrid_turns_only_when_it_says_so(self) -> None:
        keys = {"rope_theta": 1e4, "attention_multiplier": 0.25, "layer_types": ["mamba", "attention"] * 2}
        assert not read_config(config("granitemoehybrid", **keys)).rotaries
        assert read_config(config("granitemoehybrid", position_embedding_type="rope", **keys)).rotaries


class TestDeepSeek:
    V3: dict[str, Any] = {  # noqa: RUF012
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "max_position_embeddings": 163840,
        "rope_theta": 10000,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
    }  # fmt: skip

    def test_the_last_channels_turn_in_neighbouring_pairs(self) -> None:
        (rotary,) = read_config(self.V3).rotaries
        assert (rotary.head_dim, rotary.rotary_dim, rotary.trailing, rotary.interleaved) == (192, 64, True, True)

    @pytest.mark.parametrize(("mscale", "on_the_scores"), [(1.0, 1.873854), (0.707, 1.589626)])
    def test_the_temperature_stands_on_the_scores(self, mscale: float, on_the_scores: float) -> None:
        """Left out, position 0 is right and later ones are off by up to 0.9."""
        scaling = {**self.V3["rope_scaling"], "mscale": mscale, "mscale_all_dim": mscale}
        plan = read_config({**self.V3, "rope_scaling": scaling})
        assert plan.layers[0].score_scale == pytest.approx(192**-0.5 * on_the_scores, rel=5e-7)
        assert plan.rotaries[0].attention_factor() == 1.0

    def test_a_further_factor_moves_the_temperature_too(self) -> None:
        plan = read_config(self.V3).with_scaling(YaRN(factor=80.0, original_max_position_embeddings=4096))
        assert plan.rotaries[0].attention_factor() == 1.0
        assert plan.layers[0].score_scale == pytest.approx(192**-0.5 * plan.rotaries[0].scaling.magnitude(1.0) ** 2)  # type: ignore[attr-defined]
        assert read_config(write_config(plan, self.V3)) == plan

    def test_an_unknown_latent_family_is_refused(self) -> None:
        with pytest.raises(PlanError, match="qk_rope_head_dim: got 64; latent attention of an unknown family"):
            read_config({**self.V3, "model_type": "deepseek_v9"})


class TestWidths:
    def test_partial_exponents_run_over_the_turned_channels(self) -> None:
        """Run over the whole head they give a lower top-1 that falls with distance."""
        (rotary,) = read_config(config("glm4_moe", head_dim=256, rope_theta=1e6, partial_rotary_factor=0.5)).rotaries
        assert rotary.rotary_dim == 128
        assert rotary.inv_freq()[1] == pytest.approx(0.805842, abs=5e-7)

    @pytest.mark.parametrize(
        ("model_type", "channels"),
        [("glm", 32), ("glm4", 32), ("phi", 32), ("stablelm", 16), ("gpt_neox", 16), ("qwen3_next", 16), ("llama", 64)],
    )
    def test_the_family_default_is_used_where_the_config_is_silent(self, model_type: str, channels: int) -> None:
        (rotary,) = read_config(config(model_type, head_dim=64, rope_theta=1e4)).rotaries
        assert rotary.rotary_dim == channels

    def test_a_stated_head_dim_wins_over_hidden_size_by_heads(self) -> None:
        odd = {"hidden_size": 20, "num_attention_heads": 4, "head_dim": 8}
        assert read_config(config("llama", rope_theta=1e4, **odd) | odd).rotaries[0].head_dim == 8

    def test_gptj_states_channels_and_has_its_base_in_the_code(self) -> None:
        gptj = {"model_type": "gptj", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 2048, "rotary_dim": 8}
        (rotary,) = read_config(gptj).rotaries
        assert (rotary.rotary_dim, rotary.rope_theta, rotary.interleaved) == (8, 1e4, True)
        fewer = read_config({**gptj, "rotary_dim": 4})
        assert write_config(fewer, gptj) == {**gptj, "rotary_dim": 4}
        with pytest.raises(PlanError, match=r"layers\[0\].rotate: got Rotary.*the config can only say Rotary"):
            write_config(fewer.with_scaling(Linear(factor=2.0)), gptj)
        with pytest.raises(PlanError, match="this family's code has one base and no scaling"):
            read_config({**gptj, "rope_scaling": {"type": "linear", "factor": 2.0}})


class TestOtherWords:
    def test_phi3_is_longrope_under_three_names(self) -> None:
        lists = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
        plans = [
            read_config(
                config(
                    "phi3", rope_theta=1e4, rope_scaling={"type": name, **lists}, original_max_position_embeddings=1024
                )
            )
            for name in ("su", "yarn", "longrope")
        ]
        assert plans[0] == plans[1] == plans[2]
        scaling = plans[0].rotaries[0].scaling
        assert isinstance(scaling, LongRoPE)
        assert (scaling.factor, scaling.original_max_position_embeddings) == (4.0, 1024)

    def test_phi3_writes_the_original_length_where_it_overrides(self) -> None:
        lists = {"short_factor": (1.0,) * 8, "long_factor": (3.0,) * 8}
        before = config("phi3", rope_theta=1e4, original_max_position_embeddings=4096)
        plan = read_config(before).with_scaling(
            LongRoPE(**lists, original_max_position_embeddings=1024, factor=4.0)  # type: ignore[arg-type]
        )
        written = write_config(plan, before)
        assert written["original_max_position_embeddings"] == 1024
        assert read_config(written) == plan

    def test_phimoe_states_one_amplitude_twice(self) -> None:
        rope = {
            "type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "short_mscale": 1.24,
            "long_mscale": 1.24, "original_max_position_embeddings": 1024,
        }  # fmt: skip
        plan = read_config(config("phimoe", rope_theta=1e4, rope_scaling=rope))
        assert plan.rotaries[0].attention_factor() == 1.24
        with pytest.raises(PlanError, match="only one attention factor for both lists is known"):
            read_config(config("phimoe", rope_theta=1e4, rope_scaling={**rope, "long_mscale": 1.3}))

    def test_hunyuan_calls_a_fixed_ntk_dynamic(self) -> None:
        rope = {
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0,
            "type": "dynamic",
        }  # fmt: skip
        plan = read_config(config("hunyuan_v1_dense", rope_theta=1e4, rope_scaling=rope))
        assert plan.rotaries[0].scaling == NTK(factor=1000.0)
        assert not plan.depends_on_length

    def test_ministral_warms_every_layer_by_its_rope_dict(self) -> None:
        rope = {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 256,
            "max_position_embeddings": 4096, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
        }  # fmt: skip
        plan = read_config(config("ministral3", rope_parameters=rope))
        assert {layer.temperature for layer in plan.layers} == {Temperature(beta=0.1, length=256)}
        with pytest.raises(PlanError, match=r"llama_4_scaling_beta: got 0\.1; not a key of rope type 'yarn'"):
            read_config(config("llama", rope_parameters={**rope, "max_position_embeddings": None}))

    def test_olmo3_scales_its_full_layers_only(self) -> None:
        rope = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "attention_factor": 1.2079}
        plan = read_config(config("olmo3", rope_theta=5e5, rope_scaling=rope, sliding_window=64))
        assert [layer.rotate.scaling.rope_type for layer in plan.layers if layer.rotate] == ["default"] * 3 + ["yarn"]
        assert plan.rotaries[1].attention_factor() == 1.2079

    def test_modernbert_sees_half_its_local_width_on_each_side(self) -> None:
        keys = {"global_rope_theta": 160000.0, "global_attn_every_n_layers": 3, "local_attention": 128}
        plan = read_config(config("modernbert", local_rope_theta=10000.0, **keys))
        assert [layer.rotate and layer.rotate.rope_theta for layer in plan.layers] == [160000, 10000, 10000, 160000]
        assert (plan.layers[1].mask.reach, plan.layers[1].mask.causal) == (64, False)
        null = read_config(config("modernbert", local_rope_theta=None, **keys))
        assert {rotary.rope_theta for rotary in null.rotaries} == {160000.0}

    def test_gpt_oss_has_sinks_and_every_other_layer_a_window(self) -> None:
        plan = read_config(config("gpt_oss", rope_theta=150000, sliding_window=128))
        assert [layer.mask.sliding_window for layer in plan.layers] == [128, None, 128, None]
        assert all(layer.mask.sinks for layer in plan.layers)

    def test_qwen_has_windows_from_a_layer_on_if_at_all(self) -> None:
        keys = {"rope_theta": 1e6, "sliding_window": 16, "max_window_layers": 3}
        assert {layer.mask.sliding_window for layer in read_config(config("qwen2", **keys)).layers} == {None}
        plan = read_config(config("qwen2", use_sliding_window=True, **keys))
        assert [layer.mask.sliding_window for layer in plan.layers] == [None, None, None, 16]

    def test_qwen3_vl_alternates_its_axes_and_a_contrary_config_is_refused(self) -> None:
        rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}
        keys = {"head_dim": 128, "rope_parameters": {**rope, "mrope_interleaved": True}}
        (rotary,) = read_config(config("qwen3_vl_text", **keys)).rotaries
        assert (rotary.mrope_section, rotary.mrope_interleaved) == ((24, 20, 20), True)
        with pytest.raises(PlanError, match="mrope_interleaved: got False; this family's code has it True"):
            read_config(config("qwen3_vl_text", head_dim=128, rope_parameters={**rope, "mrope_interleaved": False}))

    @pytest.mark.parametrize("model_type", ["deepseek_v4", "nanochat", "ernie4_5_vl_moe_text", "inkling_text"])
    def test_what_a_plan_has_no_words_for_is_refused(self, model_type: str) -> None:
        with pytest.raises(PlanError, match=f"model_type: got '{model_type}'"):
            read_config(config(model_type, rope_theta=1e4))


class TestModelsWithoutRotation:
    @pytest.mark.parametrize(
        ("keys", "embed", "bias", "sentence"),
        [
            (
                {"model_type": "gpt2", "n_positions": 1024, "n_layer": 2},
                Embedding(kind="learned", rows=1024),
                None,
                "learned absolute positions, 1,024 rows",
            ),
            (
                {"model_type": "roberta", "max_position_embeddings": 514, "num_hidden_layers": 2, "pad_token_id": 1},
                Embedding(kind="learned", rows=512, offset=2),
                None,
                "learned absolute positions, 512 rows (the first 2 of its table are not positions)",
            ),
            (
                {"model_type": "roberta", "max_position_embeddings": 514, "num_hidden_layers": 2, "pad_token_id": 3},
                Embedding(kind="learned", rows=510, offset=4),
                None,
                "learned absolute positions, 510 rows (the first 4 of its table are not positions)",
            ),
            (
                {"model_type": "opt", "max_position_embeddings": 2048, "num_hidden_layers": 2},
                Embedding(kind="learned", rows=2048, offset=2),
                None,
                "learned absolute positions, 2,048 rows (the first 2 of its table are not positions)",
            ),
            ({"model_type": "bloom", "n_layer": 2}, None, Bias(kind="alibi"), "ALiBi biases on the scores"),
            (
                {"model_type": "mpt", "n_layers": 2, "attn_config": {"alibi": True}},
                None,
                Bias(kind="alibi"),
                "ALiBi biases on the scores",
            ),
            (
                {"model_type": "mpt", "n_layers": 2, "attn_config": {"alibi": True, "alibi_bias_max": 16}},
                None,
                Bias(kind="alibi", bias_max=16),
                "ALiBi biases on the scores",
            ),
            (
                {
                    "model_type": "falcon",
                    "num_hidden_layers": 2,
                    "alibi": True,
                    "hidden_size": 128,
                    "num_attention_heads": 2,
                },
                None,
                Bias(kind="alibi", slope_factor=0.125, heads=2),
                "ALiBi biases on the scores",
            ),
            (
                {"model_type": "t5", "num_layers": 2, "relative_attention_num_buckets": 32},
                None,
                Bias(kind="t5", buckets=32, max_distance=128),
                "T5's bucketed biases on the scores, in its decoder",
            ),
            (
                {
                    "model_type": "deberta-v2", "num_hidden_layers": 2, "relative_attention": True,
                    "max_position_embeddings": 512, "position_buckets": 256, "position_biased_input": False,
                    "pos_att_type": "p2c|c2p",
                },
                None,
                Bias(kind="deberta", buckets=512, max_distance=512),
                "DeBERTa's relative positions in the scores, stated length 512 tokens",
            ),
            (
                {"model_type": "xlnet", "n_layer": 2, "d_model": 8, "n_head": 2},
                None,
                Bias(kind="transformer-xl"),
                "Transformer-XL's relative positions in the scores",
            ),
            (
                {"model_type": "ctrl", "n_layer": 2, "n_positions": 256},
                Embedding(kind="sinusoidal", layout="halves"),
                None,
                "sinusoidal absolute positions, computed",
            ),
            (
                {"model_type": "m2m_100", "num_hidden_layers": 2, "pad_token_id": 1},
                Embedding(kind="sinusoidal", layout="halves", spacing="tensor2tensor", offset=2),
                None,
                "sinusoidal absolute positions, computed, in its decoder",
            ),
            ({"model_type": "mamba", "num_hidden_layers": 2}, None, None, "no attention, so no positions"),
            (
                {"model_type": "jamba", "num_hidden_layers": 2},
                None,
                None,
                "no positions: its attention has the causal mask alone",
            ),
        ],
    )  # fmt: skip
    def test_it_is_told_in_one_sentence(
        self, keys: dict[str, Any], embed: Embedding | None, bias: Bias | None, sentence: str
    ) -> None:
        plan = read_config(keys)
        assert plan.embed == embed
        assert plan.layers[0].bias == bias
        assert not plan.rotaries
        assert len(plan.layers) == 2
        assert describe(plan) == sentence
        assert write_config(plan, keys) == keys

    def test_the_heads_that_alibi_depends_on(self) -> None:
        """32 heads and 30 have other slopes, so plans that differ in them are not the same."""
        keys = {"n_layer": 2, "hidden_size": 4096}
        for model_type, name in (("bloom", "n_head"), ("mpt", "n_heads")):
            bias = read_config({"model_type": model_type, **keys, name: 32}).layers[0].bias
            assert bias == Bias(kind="alibi", heads=32)
            assert bias != read_config({"model_type": model_type, **keys, name: 16}).layers[0].bias
        with pytest.raises(PlanError, match=r"hidden_size: got 4096; it must be a multiple of the heads \(30\)"):
            read_config({"model_type": "bloom", **keys, "n_head": 30})

    def test_an_unknown_kind_of_row_is_refused(self) -> None:
        keys = {"model_type": "bert", "max_position_embeddings": 512, "num_hidden_layers": 2}
        with pytest.raises(PlanError, match="position_embedding_type: got 'relative_key'; known: 'absolute', 'alibi'"):
            read_config({**keys, "position_embedding_type": "relative_key"})


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            config("llama", rope_theta=100000),
            "rotary positions in all 4 layers (base 100,000, 16 channels), stated length 4,096 tokens",
        ),
        (
            config("llama", rope_theta=1e4, rope_scaling={"type": "dynamic", "factor": 2.0}),
            "rotary positions in all 4 layers (base 10,000, 16 channels, dynamic NTK 2 past 4,096 tokens), "
            "stated length 4,096 tokens",
        ),
        (
            config("gpt_oss", rope_theta=150000, sliding_window=128, partial_rotary_factor=0.5, head_dim=16),
            "rotary positions in 2 of 4 layers that see 128 tokens (base 150,000, 8 of 16 channels), "
            "rotary positions in 2 of 4 layers (base 150,000, 8 of 16 channels), stated length 4,096 tokens",
        ),
    ],
)
def test_rotary_positions_are_told_in_one_sentence(keys: dict[str, Any], sentence: str) -> None:
    assert describe(read_config(keys)) == sentence
