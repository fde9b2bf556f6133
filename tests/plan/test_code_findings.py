"""What a family's code has by itself, or does not read: each is told where it matters, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

from theodolite.plan.findings import Finding, find
from theodolite.plan.huggingface import read_config

SMALL = {
    "num_hidden_layers": 6, "hidden_size": 80, "num_attention_heads": 5, "max_position_embeddings": 8192,
    "rope_theta": 1e4,
}  # fmt: skip


def found(model_type: str, **keys: Any) -> list[Finding]:
    raw = {"model_type": model_type, **SMALL, **keys}
    return list(find(read_config(raw), raw))


def told(model_type: str, **keys: Any) -> list[tuple[str, str]]:
    return [(finding.severity, finding.field) for finding in found(model_type, **keys)]


class TestHeadWidth:
    """A reader that divides has heads of another width, and no shape of the weights fits."""

    def test_one_of_the_family_s_own(self) -> None:
        (finding,) = found("qwen3")
        assert (finding.severity, finding.field, finding.fix) == ("note", "head_dim", "state head_dim 128")
        assert "it is 128 by the family's own code, and 16 in code that divides hidden_size 80" in finding.message

    def test_stated_or_the_same_or_none_of_its_own(self) -> None:
        assert told("qwen3", head_dim=16) == []
        assert told("qwen3", hidden_size=640) == []
        assert told("qwen2") == []


class TestStranger:
    """A family of which nothing is known is read by a convention, and the reader is told so."""

    def test_it_is_told(self) -> None:
        (finding,) = found("foobar")
        assert (finding.severity, finding.field) == ("note", "model_type")
        assert "of 'foobar' nothing is known" in finding.message
        assert told("llama") == []


class TestLocalBase:
    """Gemma 3's layers with a window have a base of their own, and a file need not state it."""

    KEYS: dict[str, Any] = {"sliding_window": 512, "head_dim": 256, "rope_theta": 1e6}  # noqa: RUF012

    def test_it_is_told_where_only_the_other_is_stated(self) -> None:
        (finding,) = found("gemma3_text", **self.KEYS)
        assert (finding.severity, finding.field) == ("note", "rope_local_base_freq")
        assert finding.fix == "state rope_local_base_freq 10000"

    def test_stated_or_of_no_layer(self) -> None:
        assert told("gemma3_text", **self.KEYS, rope_local_base_freq=1e4) == []
        assert told("gemma3_text", **self.KEYS, layer_types=["full_attention"] * 6) == []


class TestPartsOfAHead:
    """vLLM turns half of the head, transformers all of it or nothing at all: the file is read in two ways."""

    @pytest.mark.parametrize("keys", [{"partial_rotary_factor": 0.5}, {"rotary_dim": 8}])
    def test_a_family_whose_code_does_not_read_it(self, keys: dict[str, Any]) -> None:
        (finding,) = found("llama", **keys)
        assert (finding.severity, finding.field) == ("warning", "partial_rotary_factor")
        assert "8 of 16 channels turn by it, as vLLM reads it, and transformers' code of 'llama'" in finding.message

    def test_it_stands_in_the_rope_dict_too(self) -> None:
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        assert told("llama", rope_theta=None, rope_parameters=rope) == [("warning", "partial_rotary_factor")]

    def test_one_whose_code_does(self) -> None:
        assert told("stablelm", partial_rotary_factor=0.5) == []
        assert told("llama", partial_rotary_factor=1.0) == []
        # Nothing is known of what its code reads.
        assert told("foobar", partial_rotary_factor=0.5) == [("note", "model_type")]
