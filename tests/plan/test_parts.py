"""Encoder-decoders have two plans: which one is read is asked for and said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from theodolite.plan import Bias, Embedding, Mask, PlanError
from theodolite.plan.describe import describe
from theodolite.plan.huggingface import read_config, read_config_file, write_config

T5: dict[str, Any] = {
    "model_type": "t5", "num_layers": 3, "num_decoder_layers": 2, "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128, "is_encoder_decoder": True,
}  # fmt: skip
BART: dict[str, Any] = {
    "model_type": "bart", "encoder_layers": 3, "decoder_layers": 2, "num_hidden_layers": 9,
    "max_position_embeddings": 1024,
}  # fmt: skip
WHISPER: dict[str, Any] = {
    "model_type": "whisper", "encoder_layers": 4, "decoder_layers": 2, "num_hidden_layers": 4,
    "max_source_positions": 1500, "max_target_positions": 448,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 1e4,
}  # fmt: skip
BERT = {"model_type": "bert", "num_hidden_layers": 2, "max_position_embeddings": 512}


class TestTheEncoder:
    """A decoder's plan for an encoder is another mask, other buckets, and as many layers as the other has."""

    def test_t5(self) -> None:
        plan = read_config(T5, part="encoder")
        assert plan.part == "encoder"
        assert len(plan.layers) == 3
        assert {layer.mask for layer in plan.layers} == {Mask(causal=False)}
        assert plan.layers[0].bias == Bias(kind="t5", buckets=32, max_distance=128)
        assert plan.layers[0].score_scale == 1.0
        assert describe(plan) == "T5's bucketed biases on the scores, in its encoder"

    def test_bart(self) -> None:
        plan = read_config(BART, part="encoder")
        assert (len(plan.layers), plan.layers[0].mask.causal) == (3, False)
        assert plan.embed == Embedding(kind="learned", rows=1024, offset=2)

    def test_whisper_counts_frames_and_has_sines(self) -> None:
        plan = read_config(WHISPER, part="encoder")
        assert plan.embed == Embedding(kind="sinusoidal", layout="halves", spacing="tensor2tensor")
        assert (plan.max_position_embeddings, len(plan.layers)) == (1500, 4)
        decoder = read_config(WHISPER)
        assert decoder.embed == Embedding(kind="learned", rows=448)
        assert (decoder.max_position_embeddings, len(decoder.layers)) == (448, 2)

    def test_longt5_sees_a_window_on_both_sides(self) -> None:
        keys = {**T5, "model_type": "longt5", "local_radius": 127}
        assert read_config(keys, part="encoder").layers[0].mask == Mask(causal=False, sliding_window=128)
        assert read_config(keys).layers[0].mask == Mask()

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ({**T5, "model_type": "longt5", "local_radius": 127, "encoder_attention_type": "transient-global"},
             "encoder_attention_type: got 'transient-global'; a plan can say 'local'"),
            ({**BART, "model_type": "bigbird_pegasus"}, "attention_type: got None; a plan can say 'original_full'"),
            ({**T5, "model_type": "udop"}, "part: got 'encoder'; its biases follow rows and columns of a page too"),
        ],
    )  # fmt: skip
    def test_what_a_plan_has_no_words_for(self, keys: dict[str, Any], message: str) -> None:
        assert read_config(keys).part == "decoder"
        with pytest.raises(PlanError, match=message):
            read_config(keys, part="encoder")


class TestTheDecoder:
    """It is what is read where nothing is asked for, and the plan says so."""

    @pytest.mark.parametrize("keys", [T5, BART, WHISPER], ids=lambda keys: keys["model_type"])
    def test_it_is_the_default_and_is_said(self, keys: dict[str, Any]) -> None:
        plan = read_config(keys)
        assert plan == read_config(keys, part="decoder")
        assert plan.part == "decoder"
        assert len(plan.layers) == 2
        assert all(layer.mask.causal for layer in plan.layers)
        assert describe(plan).endswith(", in its decoder")

    @pytest.mark.parametrize("part", ["encoder", "decoder"])
    @pytest.mark.parametrize("keys", [T5, BART, WHISPER], ids=lambda keys: keys["model_type"])
    def test_what_was_read_is_written_back(self, keys: dict[str, Any], part: Any) -> None:
        assert write_config(read_config(keys, part=part), keys) == keys


class TestOneStack:
    """A model of one stack has one plan, and no other is made up."""

    def test_an_encoder_alone(self) -> None:
        alone = {**T5, "is_encoder_decoder": False, "is_decoder": False}
        assert read_config(alone) == read_config(alone, part="encoder") == read_config(T5, part="encoder")
        with pytest.raises(PlanError, match="part: got 'decoder'; is_encoder_decoder=False says that there is an enc"):
            read_config(alone, part="decoder")

    @pytest.mark.parametrize("keys", [T5, BART], ids=lambda keys: keys["model_type"])
    def test_a_decoder_alone(self, keys: dict[str, Any]) -> None:
        alone = {**keys, "is_encoder_decoder": False, "is_decoder": True}
        assert read_config(alone) == read_config(keys)
        with pytest.raises(PlanError, match="part: got 'encoder'; is_encoder_decoder=False says that there is a dec"):
            read_config(alone, part="encoder")

    def test_a_decoder_is_no_encoder(self) -> None:
        assert read_config(LLAMA, part="decoder") == read_config(LLAMA)
        assert read_config(LLAMA).part is None
        with pytest.raises(PlanError) as caught:
            read_config(LLAMA, part="encoder", source="a file")
        assert str(caught.value) == (
            "part in a file: got 'encoder'; 'llama' has one stack of layers, a decoder: leave part out"
        )
        with pytest.raises(PlanError, match="'mamba' has one stack of layers, a decoder"):
            read_config({"model_type": "mamba", "num_hidden_layers": 2}, part="encoder")

    def test_an_encoder_is_no_decoder(self) -> None:
        assert read_config(BERT, part="encoder") == read_config(BERT)
        with pytest.raises(PlanError, match="part: got 'decoder'; 'bert' has one stack of layers, an encoder"):
            read_config(BERT, part="decoder")
        assert read_config({**BERT, "is_decoder": True}, part="decoder").layers[0].mask.causal

    def test_another_word(self) -> None:
        with pytest.raises(PlanError, match="part: got 'both'; allowed: None, 'decoder', 'encoder'"):
            read_config(T5, part="both")  # type: ignore[arg-type]

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(T5))
        assert read_config_file(tmp_path, part="encoder") == read_config(T5, part="encoder")


class TestBothWays:
    """Whether a query sees what follows it is a key of the config in some families, and none in others."""

    @pytest.mark.parametrize(
        ("keys", "causal"),
        [
            ({"model_type": "xlnet", "n_layer": 1}, False),
            ({"model_type": "xlnet", "n_layer": 1, "attn_type": "bi"}, False),
            ({"model_type": "xlnet", "n_layer": 1, "attn_type": "uni"}, True),
            ({"model_type": "xlm", "n_layers": 1, "max_position_embeddings": 8}, False),
            ({"model_type": "xlm", "n_layers": 1, "max_position_embeddings": 8, "causal": True}, True),
            ({**BERT, "is_decoder": True}, True),
            ({**BERT, "model_type": "albert", "is_decoder": True}, False),
            ({**LLAMA, "is_causal": False}, False),
            ({**LLAMA, "model_type": "roformer", "rope_theta": None, "is_decoder": True}, True),
        ],
    )
    def test_the_mask(self, keys: dict[str, Any], causal: bool) -> None:
        assert {layer.mask.causal for layer in read_config(keys).layers} == {causal}

    def test_is_causal_where_code_differs(self) -> None:
        with pytest.raises(PlanError, match="is_causal: got False; not all of these families' code heeds it"):
            read_config({"model_type": "gpt2", "n_layer": 1, "n_positions": 8, "is_causal": False})

    def test_longformer_sees_half_its_width_on_each_side(self) -> None:
        keys = {"model_type": "longformer", "num_hidden_layers": 2, "max_position_embeddings": 64, "pad_token_id": 1}
        plan = read_config({**keys, "attention_window": [8, 16]})
        assert [layer.mask for layer in plan.layers] == [
            Mask(causal=False, sliding_window=5),
            Mask(causal=False, sliding_window=9),
        ]
        assert read_config({**keys, "attention_window": 8}).layers[1] == plan.layers[0]

    def test_without_any_positions_it_is_told_apart_from_a_decoder(self) -> None:
        keys = {"model_type": "deberta-v2", "num_hidden_layers": 1, "max_position_embeddings": 8}
        plan = read_config({**keys, "position_biased_input": False})
        assert describe(plan) == "no positions: its attention sees both ways and no order"
