"""Configs that are no language model's, or whose layers see both ways: what transformers' code does, or no plan."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
import torch

from theodolite.plan import PlanError
from theodolite.plan.families import known
from theodolite.plan.families.unrotated import UNROTATED
from theodolite.plan.huggingface import read_config

transformers = pytest.importorskip("transformers")
CONFIG_MAPPING = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING

SMALL = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 40, "intermediate_size": 16,
    "embedding_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def as_json(config: Any) -> dict[str, Any]:
    """The config as its file has it."""
    text: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return text


def config_classes() -> list[Any]:
    """Every config class that transformers has, parts of others included."""
    found: dict[Any, None] = {}

    def walk(kind: Any) -> None:
        if kind not in found and hasattr(kind, "sub_configs"):
            found[kind] = None
            for part in kind.sub_configs.values():
                walk(part)

    for name in CONFIG_MAPPING:
        walk(CONFIG_MAPPING[name])
    return list(found)


class TestOtherKindsOfModel:
    """What a family's code does is known or it is not read: no default makes a language model of an image encoder."""

    def test_no_plan_without_a_row(self) -> None:
        """A family that a later transformers adds fails here until it has been looked at."""
        guessed, read = [], 0
        for kind in config_classes():
            try:
                config = as_json(kind())
            except Exception:
                # Some are not complete without a part, each with an error of its own.
                continue
            try:
                plan = read_config(config)
            except PlanError:
                continue
            read += 1
            if not known(plan.model_type) and plan.model_type not in UNROTATED:
                guessed.append(plan.model_type)
        assert not guessed
        assert read > 200

    @pytest.mark.parametrize("name", ["dinov3_vit", "llama4_vision_model", "sapiens2", "qwen3_5_vision", "pixtral"])
    def test_image_encoders_that_turn(self, name: str) -> None:
        config = as_json(CONFIG_MAPPING[name]())
        turning = "; its rotation is over rows and columns" if any("rope" in key for key in config) else ""
        with pytest.raises(PlanError, match=f"model_type: got '{name}'; an image encoder" if turning else name):
            read_config(config)

    @pytest.mark.parametrize("name", ["vit", "clip_vision_model", "siglip_vision_model"])
    def test_image_encoders_that_do_not(self, name: str) -> None:
        with pytest.raises(PlanError, match=f"'{name}'; an image encoder: its positions are rows and columns, which"):
            read_config(as_json(CONFIG_MAPPING[name]()))

    @pytest.mark.parametrize("name", ["wav2vec2-bert", "wav2vec2-conformer", "lasr_encoder", "glmasr_encoder"])
    def test_encoders_of_sound(self, name: str) -> None:
        with pytest.raises(PlanError, match=f"'{name}'; an encoder of sound: no reading of its positions is known"):
            read_config(as_json(CONFIG_MAPPING[name]()))

    @pytest.mark.parametrize(
        "name", ["embedding_gemma2_text", "esmc", "ultrabert", "neomme", "t5gemma2_text", "dia_encoder", "beam"]
    )
    def test_texts_whose_code_is_another(self, name: str) -> None:
        """Both directions, or scores scaled otherwise, behind a config like Llama's."""
        with pytest.raises(PlanError, match=f"'{name}'; no reading of this family's positions is known"):
            read_config(as_json(CONFIG_MAPPING[name]()))

    @pytest.mark.parametrize(
        ("name", "keys"),
        [
            *((name, keys) for name in ("bert", "roberta", "electra", "albert", "luke", "mpnet", "roformer", "esm")
              for keys in ({}, {"is_decoder": True})),
            ("xlm", {}), ("xlm", {"causal": True}), ("xlnet", {}), ("xlnet", {"attn_type": "uni"}),
            ("llama", {}), ("llama", {"is_causal": False}), ("gpt2", {}), ("eurobert", {}), ("modernbert", {}),
        ],
    )  # fmt: skip
    def test_the_direction_is_the_model_s(self, name: str, keys: dict[str, Any]) -> None:
        """The last token is another: does the first one's output change?"""
        config = CONFIG_MAPPING[name](**SMALL, **({"d_head": 16} if name == "xlnet" else {}), **keys)
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config).double().eval()
        ids = torch.arange(5, 15).repeat(2, 1)
        ids[1, -1] = 30
        with torch.no_grad():
            first, other = model(input_ids=ids)[0][:, 0]
        # One row is computed as the other is, so what is not seen changes no bit but by the order of sums.
        changes = float((first - other).abs().max()) > 1e-9
        assert {layer.mask.causal for layer in read_config(as_json(config)).layers} == {not changes}
