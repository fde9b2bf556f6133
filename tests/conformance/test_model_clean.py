"""A correct model passes, family by family; what transformers itself gets wrong is told by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.conftest import calm  # noqa: F401
from tests.models.tiny import FAMILIES, own_plan, tiny
from theodolite.conformance import Verdict, assert_conforms, check_model
from theodolite.models import patch, patched, unpatch

from . import planted

# Of transformers 5.24, found with nothing planted.
KNOWN = {
    # The list of factors changes at 4,096 tokens, and cached keys keep the short one (vllm-project/vllm#27414).
    "phi3-longrope": {"decode across the original length"},
}
NOTES = {
    # Its masks are made without position_ids, so that documents in one row see each other.
    "gpt_oss": {"packing"},
}
ON_CAST = {"cast and back", "meta init"}
UNROTATED: dict[str, tuple[Any, set[str]]] = {
    "gpt2": (planted.gpt2, {"left padding"}),
    "bloom": (planted.bloom, set()),
    "bloom-12": (lambda: planted.bloom(12), set()),
    "opt": (
        lambda: planted.other(
            "OPTConfig", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, ffn_dim=64, word_embed_proj_dim=64,
            max_position_embeddings=128,
        ),
        {"packing"},
    ),
    "mpt": (lambda: planted.other("MptConfig", n_layers=2, n_heads=4, d_model=64, max_seq_len=128), set()),
    "falcon-alibi": (
        lambda: planted.other("FalconConfig", num_hidden_layers=2, num_attention_heads=4, hidden_size=64, alibi=True),
        set(),
    ),
    "xglm": (
        lambda: planted.other(
            "XGLMConfig", num_layers=2, attention_heads=4, d_model=64, ffn_dim=64, max_position_embeddings=128
        ),
        {"left padding", "packing", *ON_CAST},
    ),
    "gptj": (lambda: planted.other("GPTJConfig", n_layer=2, n_head=4, n_embd=64, rotary_dim=8), ON_CAST),
    "mamba": (lambda: planted.other("MambaConfig", num_hidden_layers=2, hidden_size=64), set()),
}  # fmt: skip


def names(verdicts: tuple[Verdict, ...], outcome: str) -> set[str]:
    return {verdict.name for verdict in verdicts if verdict.outcome == outcome}


class TestClean:
    """A false alarm costs a day, and the next true one is not believed."""

    @pytest.mark.parametrize("family", FAMILIES)
    def test_rotary(self, family: str) -> None:
        verdicts = check_model(tiny(family))
        assert names(verdicts, "fail") == KNOWN.get(family, set()), [str(one) for one in verdicts if one.failed]
        # A cast after loading rounds inv_freq in every family, and to_empty loses it.
        assert names(verdicts, "note") == ON_CAST | NOTES.get(family, set())
        assert {"tables", "rotation", "decode", "chunked prefill", "left padding"} <= names(verdicts, "pass")

    @pytest.mark.parametrize("family", UNROTATED)
    def test_unrotated(self, family: str) -> None:
        make, notes = UNROTATED[family]
        verdicts = check_model(make())
        assert names(verdicts, "fail") == set(), [str(one) for one in verdicts if one.failed]
        assert names(verdicts, "note") == notes

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_in_another_dtype(self, dtype: torch.dtype) -> None:
        verdicts = check_model(tiny("llama", dtype=dtype))
        assert names(verdicts, "fail") == set(), [str(one) for one in verdicts if one.failed]

    def test_every_skip_says_why(self) -> None:
        for model in (planted.gpt2(), planted.bloom(), tiny("llama4")):
            assert all(one.message for one in check_model(model) if one.outcome == "skip")


class TestPatched:
    """A patched model has exact tables, and no cast reaches them."""

    def test_nothing_fails_and_casts_leave_no_mark(self) -> None:
        model = tiny("llama")
        with patched(model, own_plan(model)):
            verdicts = {verdict.name: verdict for verdict in check_model(model)}
        assert {name for name, one in verdicts.items() if one.outcome not in ("pass", "skip")} == set()
        assert verdicts["tables"].outcome == "pass"
        assert (verdicts["tables"].deviation or 1.0) < 2.0**-23

    def test_dynamic_ntk_settled_for_a_length(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, plan = planted.dynamic(monkeypatch)
        assert {"history", "decode across the original length"} <= names(check_model(model, plan), "fail")
        patch(model, plan, length=512)
        settled = check_model(model, plan.at_length(512))
        unpatch(model)
        assert names(settled, "fail") == set(), [str(one) for one in settled if one.failed]


class TestNothingIsChanged:
    """A check that leaves a mark has spoilt the model that it was to vouch for."""

    @pytest.mark.parametrize("family", ["llama", "gemma3", "phi3-longrope"])
    def test_weights_buffers_hooks_and_mode(self, family: str) -> None:
        model = tiny(family).train()
        before = {name: value.clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
        check_model(model)
        after = dict((*model.named_parameters(), *model.named_buffers()))
        assert before.keys() == after.keys()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
        assert model.training
        assert all(parameter.grad is None for parameter in model.parameters())


class TestAsserting:
    """One line in someone's test."""

    def test_passes(self) -> None:
        assert_conforms(tiny("llama"))

    def test_raises_with_the_cause(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, _ = planted.b4(monkeypatch)
        with pytest.raises(AssertionError, match=r"LlamaForCausalLM: \d checks failed\n(.|\n)*rounded to bfloat16"):
            assert_conforms(model)

    @pytest.mark.parametrize("given", [None, torch.nn.Linear(2, 2), "llama"])
    def test_no_model(self, given: Any) -> None:
        with pytest.raises(TypeError, match=r"model: got .*; give a causal language model of transformers"):
            check_model(given)
