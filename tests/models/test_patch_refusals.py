"""What does not fit is said before anything is changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from theodolite.models import patch, patched, rotation
from theodolite.plan import Bias, Embedding, Mask, Temperature

from .tiny import VOCABULARY, logits, own_plan, tiny, tokens


class TestRefusals:
    """What does not fit is said before anything is changed; the message names both sides."""

    def test_number_of_layers(self) -> None:
        model = tiny("llama")
        plan = own_plan(tiny("llama", num_hidden_layers=3))
        with pytest.raises(
            ValueError, match=r"layers: the plan \(llama\) has 3 layers, the model \(LlamaModel\) has 2"
        ):
            patch(model, plan)

    def test_head_dim(self) -> None:
        plan = own_plan(tiny("llama", head_dim=32))
        with pytest.raises(ValueError, match="the plan has 32, the model has 16"):
            patch(tiny("llama"), plan)

    def test_a_length_is_needed_where_frequencies_depend_on_it(self) -> None:
        model = tiny("phi3-longrope")
        with pytest.raises(ValueError, match=r"length: the frequencies of this plan \(longrope\) depend on the tokens"):
            patch(model, own_plan(model))

    def test_places_other_than_the_rotation(self) -> None:
        model = tiny("mistral")
        plan = own_plan(model)
        with pytest.raises(ValueError, match=r"embed: the plan has Embedding\(.*\), the model has None; patch changes"):
            patch(model, replace(plan, embed=Embedding(kind="learned", rows=10)))
        for name, value in (
            ("bias", Bias(kind="alibi")),
            ("temperature", Temperature(beta=0.1, length=512)),
            ("mask", Mask(sliding_window=64)),
        ):
            other = replace(plan.layers[1], **{name: value})
            with pytest.raises(ValueError, match=rf"layers\[1\].{name}: the plan has .*; patch changes rotate and"):
                patch(model, replace(plan, layers=(plan.layers[0], other)))

    def test_a_layer_that_turns_nothing(self) -> None:
        model = tiny("smollm3")
        plan = own_plan(tiny("smollm3", no_rope_layers=[1, 1]))
        with pytest.raises(ValueError, match=r"layers\[1\].rotate: the plan turns .* the model turns nothing there"):
            patch(model, plan)

    def test_a_rotation_that_the_code_of_a_layer_leaves_out_is_found_when_it_runs(self) -> None:
        model = tiny("cohere2")
        plan = own_plan(model)
        everywhere = replace(plan, layers=(plan.layers[0], replace(plan.layers[1], rotate=plan.layers[0].rotate)))
        with (
            patched(model, everywhere),
            pytest.raises(RuntimeError, match=r"layers\[1\].rotate: .* the model's code for it does not"),
        ):
            logits(model, tokens(5))

    def test_another_width_than_the_model_hands_over(self) -> None:
        model = tiny("phi")
        plan = own_plan(model)
        wider = tuple(replace(layer, rotate=replace(layer.rotate, rotary_dim=16)) for layer in plan.layers)
        # Phi slices the 8 channels that turn before it hands them over.
        with patched(model, replace(plan, layers=wider)), pytest.raises(ValueError, match="hands over 8 channels"):
            logits(model, tokens(5))

    def test_tables_that_reach_arithmetic_fail(self) -> None:
        tables = rotation.PositionTables(torch.arange(3)[None], torch.device("cpu"))
        with pytest.raises(AttributeError, match=r"asked for \.unsqueeze of cos, sin or freqs_cis"):
            modeling_llama.apply_rotary_pos_emb(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), *tables)
        with patched(model := tiny("llama"), own_plan(model)), pytest.raises(RuntimeError, match="outside its decoder"):
            modeling_llama.apply_rotary_pos_emb(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), *tables)

    @pytest.mark.parametrize(
        ("config", "loader", "has"),
        [
            ("GPT2Config", AutoModelForCausalLM, "gpt2 has no rotary positions; it has learned absolute positions"),
            ("BertConfig", AutoModel, "bert has no rotary positions; it has learned absolute positions"),
            ("T5Config", AutoModel, "t5 has no rotary positions; it has T5's bucketed biases on the scores"),
            ("BloomConfig", AutoModelForCausalLM, "bloom has no rotary positions; it has ALiBi"),
        ],
    )
    def test_a_model_without_rotary_says_what_it_has(self, config: str, loader: Any, has: str) -> None:
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
        more = {"d_model": 32, "d_kv": 8, "d_ff": 32} if config == "T5Config" else {}
        model = loader.from_config(getattr(transformers, config)(**(more or sizes)))
        with pytest.raises(ValueError, match=has):
            patch(model, own_plan(tiny("llama")))
