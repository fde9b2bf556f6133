"""Writing on after what was read is what transformers' `generate` writes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from tests.models.tiny import own_plan, tiny, tokens
from theodolite.models import patched
from theodolite.models.decode import _processors, decode, stop_tokens
from theodolite.models.reader import Reader
from theodolite.plan import ModelPlan, YaRN
from theodolite.positions import SelfExtend

COUNT, NEW = 40, 25


def generated(model, plan: ModelPlan, ids: torch.Tensor, **options) -> list[int]:
    """What transformers writes on the same tokens and plan."""
    with patched(model, plan), torch.inference_mode():
        out = model.generate(ids[None], attention_mask=torch.ones_like(ids[None]), max_new_tokens=NEW, **options)
    return out[0, len(ids) :].tolist()


def decoded(model, plan: ModelPlan, ids: torch.Tensor, *, chunk: int = 16, relative=None, **options) -> list[int]:
    with patched(model, plan), Reader(model, plan, capacity=len(ids), chunk=chunk, relative=relative) as reader:
        logits = reader.next_logits(ids, torch.arange(len(ids)))
        return list(decode(reader, logits, ids.tolist(), count=NEW, **options))


class TestAsTransformersWrites:
    """Token by token, for every kind of attention and under a scaling."""

    @pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt_oss", "llama4", "deepseek_v3", "smollm3"])
    @pytest.mark.parametrize("chunk", [1, 16, 64])
    def test_greedy(self, family: str, chunk: int) -> None:
        short = {"sliding_window": 24} if family in ("gemma2", "gemma3", "gpt_oss") else {}
        # Tied embeddings write the same token again and again.
        model = tiny(family, dtype=torch.float64, eos_token_id=None, tie_word_embeddings=False, **short)
        ids, plan = tokens(COUNT)[0], own_plan(model)
        true = generated(model, plan, ids, do_sample=False)
        assert len(set(true)) > 3
        assert decoded(model, plan, ids, chunk=chunk) == true

    def test_under_a_scaling(self) -> None:
        model, ids = tiny("llama", dtype=torch.float64, eos_token_id=None), tokens(COUNT)[0]
        plan = own_plan(model).with_scaling(YaRN(factor=8, original_max_position_embeddings=16))
        true = generated(model, plan, ids, do_sample=False)
        assert decoded(model, plan, ids) == true
        assert decoded(model, own_plan(model), ids) != true

    def test_ends_where_transformers_does(self) -> None:
        model, ids = tiny("llama", dtype=torch.float64, eos_token_id=None), tokens(COUNT)[0]
        plan = own_plan(model)
        last = generated(model, plan, ids, do_sample=False)[9]
        model.generation_config.eos_token_id = [last, 96]
        true = generated(model, plan, ids, do_sample=False)
        assert decoded(model, plan, ids, stop=stop_tokens(model, None)) == true
        assert true[-1] == last
        assert len(true) <= 10

    def test_penalties_of_the_models_own_config(self) -> None:
        model, ids = tiny("llama", dtype=torch.float64, eos_token_id=None), tokens(COUNT)[0]
        plan = own_plan(model)
        plain = decoded(model, plan, ids)
        model.generation_config = GenerationConfig(repetition_penalty=1.8, no_repeat_ngram_size=2)
        true = generated(model, plan, ids, do_sample=False)
        assert decoded(model, plan, ids) == true
        assert true != plain

    @pytest.mark.parametrize(
        "said",
        [
            {"suppress_tokens": [40, 41, 42]},
            {"begin_suppress_tokens": "first"},
            {"bad_words_ids": "first"},
            {"min_new_tokens": 12, "eos_token_id": "first"},
        ],
        ids=lambda said: next(iter(said)),
    )
    def test_what_is_not_to_be_written(self, said: dict) -> None:
        model, ids = tiny("llama", dtype=torch.float64, eos_token_id=None), tokens(COUNT)[0]
        plan = own_plan(model)
        plain = decoded(model, plan, ids)
        first = {"begin_suppress_tokens": [plain[0]], "bad_words_ids": [[plain[0]]], "eos_token_id": plain[2]}
        model.generation_config = GenerationConfig(**{k: first[k] if v == "first" else v for k, v in said.items()})
        if "suppress_tokens" in said:
            model.generation_config.suppress_tokens = plain[3:6]
        true = generated(model, plan, ids, do_sample=False)
        stop = [model.generation_config.eos_token_id] if "eos_token_id" in said else []
        found = decoded(model, plan, ids, stop=stop)
        assert found == true
        assert found != plain


class TestDrawn:
    """At a temperature above 0."""

    def test_a_seed_says_what_is_drawn(self) -> None:
        model, ids = tiny("llama", eos_token_id=None), tokens(COUNT)[0]
        one, again, other = (decoded(model, own_plan(model), ids, temperature=1.5, seed=seed) for seed in (1, 1, 2))
        assert one == again
        assert one != other

    def test_cold_is_the_most_likely(self) -> None:
        model, ids = tiny("llama", dtype=torch.float64, eos_token_id=None), tokens(COUNT)[0]
        plan = own_plan(model)
        assert decoded(model, plan, ids, temperature=0.001) == decoded(model, plan, ids)

    def test_limits_of_the_models_own_config(self) -> None:
        model, ids = tiny("llama", dtype=torch.float64, eos_token_id=None), tokens(COUNT)[0]
        plan = own_plan(model)
        plain = decoded(model, plan, ids)
        for limits in (
            {"top_k": 1, "top_p": 1.0},
            {"top_k": 0, "top_p": 1e-6},
            {"top_k": 0, "min_p": 1.0},
            {"top_k": 0, "epsilon_cutoff": 0.9},
        ):
            model.generation_config = GenerationConfig(**limits)
            assert decoded(model, plan, ids, temperature=5.0) == plain
        model.generation_config = GenerationConfig(top_k=0, typical_p=0.5, eta_cutoff=0.1)
        made = [type(one).__name__ for one in _processors(model, 1.0, 9, ())]
        assert made == ["TemperatureLogitsWarper", "TypicalLogitsWarper", "EtaLogitsWarper"]

    @pytest.mark.parametrize("temperature", [-1.0, 1e-40, float("inf"), float("nan")])
    def test_what_cannot_be_drawn_at(self, temperature: float) -> None:
        model = tiny("llama")
        with pytest.raises(ValueError, match="temperature: got"):
            decoded(model, own_plan(model), tokens(COUNT)[0], temperature=temperature)


class TestMapped:
    """At mapped distances every token is that of a pass over all before it."""

    def test_greedy(self) -> None:
        model, ids = tiny("llama", dtype=torch.float64, eos_token_id=None), tokens(COUNT)[0]
        plan, relative = own_plan(model), SelfExtend(window=8, group_size=4)
        found = decoded(model, plan, ids, relative=relative)
        line = ids
        for token in found:
            with Reader(model, plan, capacity=len(line), relative=relative) as reader:
                assert token == int(reader.next_logits(line, torch.arange(len(line))).argmax())
            line = torch.cat((line, torch.tensor([token])))


class TestStopTokens:
    """What ends an answer."""

    @pytest.mark.parametrize(
        ("said", "own", "true"), [(7, 3, (7,)), ([7, 8], 3, (7, 8)), (None, 3, (3,)), (None, None, ())]
    )
    def test_who_says_it(self, said, own, true) -> None:
        model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=said))
        assert stop_tokens(model, SimpleNamespace(eos_token_id=own)) == true
