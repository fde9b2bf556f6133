"""Widths that a config need not state, or that its family's code does not read: what transformers has of them."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from theodolite.plan.families import family_of
from theodolite.plan.families.family import NAMES
from theodolite.plan.families.table import FAMILIES
from theodolite.plan.families.widths import HEAD_DIMS, PARTIAL
from theodolite.plan.huggingface import read_config
from theodolite.plan.huggingface.layer_rotary import head_dim_of

pytest.importorskip("transformers")
CONFIG_MAPPING = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING

# No division of the two comes near a width that any class has.
HIDDEN, HEADS = 240, 10


def class_of(family: str) -> Any:
    """The config class of the family's text model; None where transformers has none of its own."""
    for name in (f"{family}_text", family):
        if name in CONFIG_MAPPING:
            kind = CONFIG_MAPPING[name]
            return None if "text_config" in kind.sub_configs else kind
    return None


CLASSES = {family: class_of(family) for family in FAMILIES if not FAMILIES[family].latent}
NAMED = [family for family, kind in CLASSES.items() if kind is not None]


class TestHeadWidths:
    """Qwen 3 of 2,560 channels and 32 heads has heads of 128, not 80, and its config need not say so."""

    def test_the_classes_are_looked_at(self) -> None:
        assert len(NAMED) > 100
        assert set(HEAD_DIMS) <= set(NAMED)

    @pytest.mark.parametrize("family", NAMED)
    def test_it_is_that_of_the_class(self, family: str) -> None:
        kind, row = CLASSES[family], family_of(family)
        stated = [getattr(kind, name, None) for name in NAMES["head_dim"]]
        own = next((width for width in stated if isinstance(width, int)), HIDDEN // HEADS)
        silent = {**row.defaults, "hidden_size": HIDDEN, "num_attention_heads": HEADS}
        assert head_dim_of(silent, row, 0, None) == own

    @pytest.mark.parametrize(("family", "width"), [("qwen3", 128), ("gemma", 256), ("qwen2", 80), ("gpt_oss", 64)])
    def test_a_config_that_states_none(self, family: str, width: int) -> None:
        keys = {"num_hidden_layers": 2, "hidden_size": 2560, "num_attention_heads": 32, "rope_theta": 1e6}
        raw = {"model_type": family, "max_position_embeddings": 4096, "sliding_window": None, **keys}
        (rotary,) = read_config({**raw, "layer_types": ["full_attention"] * 2}).rotaries
        config = CONFIG_MAPPING[family](**keys)
        assert rotary.head_dim == width == (getattr(config, "head_dim", None) or 2560 // 32)


# What passes unturned is split off under one of these names.
_SPLIT = re.compile(r"\b(q_pass|query_pass|k_pass|rotary_ndims)\b|\[\.\.\., : ?(self\.)?rotary_dim")


def model_source(family: str) -> str | None:
    """The source of the family's model; None where transformers has none."""
    module = CLASSES[family].__module__.replace("configuration_", "modeling_")
    spec = importlib.util.find_spec(module)
    return None if spec is None or spec.origin is None else Path(spec.origin).read_text(encoding="utf-8")


class TestPartsOfAHead:
    """Llama with partial_rotary_factor 0.5 turns all of its channels in transformers, and half of them elsewhere."""

    @pytest.mark.parametrize("family", NAMED)
    def test_which_families_can(self, family: str) -> None:
        source = model_source(family)
        if source is not None:
            assert (_SPLIT.search(source) is not None) == (family in PARTIAL)
