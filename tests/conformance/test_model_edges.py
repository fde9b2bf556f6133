"""Right models of unusual sizes, files and dtypes: nothing fails, no cause is made up, and what cannot run says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tests.models.conftest import calm  # noqa: F401
from tests.models.tiny import tiny
from theodolite.conformance import Verdict, check_model

from . import planted


def verdicts_of(model: Any) -> dict[str, Verdict]:
    return {verdict.name: verdict for verdict in check_model(model)}


def failed(model: Any) -> list[str]:
    return [str(verdict) for verdict in check_model(model) if verdict.failed]


class TestHalfPrecision:
    """A change below rounding is no sign that positions are ignored."""

    def test_too_little_to_tell(self) -> None:
        # Scores of weights this small hardly depend on anything.
        model = tiny("llama", initializer_range=0.01).bfloat16()
        obeyed = verdicts_of(model)["positions obeyed"]
        assert obeyed.outcome == "skip", str(obeyed)
        assert "too little to tell; load it in float32" in obeyed.message
        assert obeyed.cause is None

    def test_ignored_all_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, _ = planted.i1_rotary(monkeypatch)
        obeyed = verdicts_of(model.bfloat16())["positions obeyed"]
        assert obeyed.failed
        assert "position_ids are ignored" in (obeyed.cause or "")


class TestFiles:
    """What files ask of generation and of outputs has nothing to do with positions."""

    @pytest.mark.parametrize(
        "given", [{"stop_strings": ["a"]}, {"num_return_sequences": 3}, {"prompt_lookup_num_tokens": 3}]
    )
    def test_generation_config(self, given: dict[str, Any]) -> None:
        model = tiny("llama")
        present = model.generation_config
        for name, value in given.items():
            setattr(present, name, value)
        assert verdicts_of(model)["left padding"].outcome == "pass"
        assert model.generation_config is present

    def test_no_generation_config(self) -> None:
        model = tiny("llama")
        model.generation_config = None
        assert verdicts_of(model)["left padding"].outcome == "pass"
        assert model.generation_config is None

    def test_outputs_without_names(self) -> None:
        model = tiny("llama")
        model.config.return_dict = False
        assert failed(model) == []
        assert model.config.return_dict is False


class TestSizes:
    """Small tables, few ids, chunks at the very middle."""

    @pytest.mark.parametrize("chunk", [8, 24])
    def test_chunks(self, chunk: int) -> None:
        assert verdicts_of(tiny("llama4", attention_chunk_size=chunk))["positions obeyed"].outcome == "pass"

    @pytest.mark.parametrize("length", [1, 64])
    def test_stated_lengths(self, length: int) -> None:
        assert failed(tiny("llama", max_position_embeddings=length)) == []

    def test_a_rotary_table_that_ends(self) -> None:
        sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "rotary_dim": 8, "n_positions": 64}
        assert failed(planted.other("GPTJConfig", **sizes)) == []

    @pytest.mark.parametrize("ids", [3, 4])
    def test_few_ids(self, ids: int) -> None:
        assert failed(tiny("llama", vocab_size=ids)) == []

    def test_too_few_rows(self) -> None:
        model = planted.other("GPT2Config", n_layer=2, n_head=4, n_embd=64, n_positions=40)
        with pytest.raises(
            ValueError, match=r"it could not be run on 48 tokens .*; it states 40 tokens, and 48 are needed"
        ):
            check_model(model)


class TestOtherModels:
    """A token that sees later ones is asked what has an answer; an encoder with a decoder is refused."""

    def test_bidirectional(self) -> None:
        torch.manual_seed(0)
        sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = transformers.BertLMHeadModel(transformers.BertConfig(intermediate_size=32, **sizes)).eval()
        found = verdicts_of(model)
        assert [str(one) for one in found.values() if one.failed] == []
        assert found["batch"].outcome == "pass"
        for name in ("chunked prefill", "decode"):
            assert "its tokens see later ones" in found[name].message

    def test_encoder_with_a_decoder(self) -> None:
        config = transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
        with pytest.raises(TypeError, match="an encoder with a decoder; give a causal language model"):
            check_model(transformers.T5ForConditionalGeneration(config))

    def test_weights_of_no_numbers(self) -> None:
        model = tiny("llama")
        model.model.layers[0].self_attn.q_proj.weight.data.fill_(float("nan"))
        rotation = verdicts_of(model)["rotation"]
        assert rotation.outcome == "skip"
        assert "no numbers before they are turned" in rotation.message
