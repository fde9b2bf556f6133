"""Faults that people met in other libraries, shown not to be in a patched model. Names say the fault avoided."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from theodolite.models import patch, patched, rotation, unpatch
from theodolite.plan import DynamicNTK, LongRoPE, ModelPlan

from .tiny import logits, own_plan, spread, tiny, tiny_config, tokens

TRAINED = 32


def dynamic(model, factor: float = 2.0) -> ModelPlan:
    scaling = DynamicNTK(factor=factor, original_max_position_embeddings=TRAINED)
    return own_plan(model).with_scaling(scaling)


def long_and_short(model) -> ModelPlan:
    pairs = own_plan(model).rotaries[0].rotary_dim // 2
    scaling = LongRoPE(
        short_factor=(1.0,) * pairs,
        long_factor=tuple(1.0 + 2.0 * i for i in range(pairs)),
        original_max_position_embeddings=TRAINED,
        factor=4.0,
    )
    return own_plan(model).with_scaling(scaling)


def decode(model, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Logits of a prompt read at once and the rest token by token, with a cache."""
    cache, out = DynamicCache(), []
    with torch.inference_mode():
        for part in (ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)):
            out.append(model(input_ids=part, cache=cache, use_cache=True).logits)
    return torch.cat(out, dim=1)


class TestGroupedQueryPermutation:
    """A1: rows of q are permuted per query head, rows of k per key head; with the wrong count it is gibberish."""

    def test_interleaved_plan_on_permuted_weights_equals_the_model(self) -> None:
        model, ids = tiny("llama", dtype=torch.float64), tokens(50)
        plan = own_plan(model)
        before = logits(model, ids)
        with torch.no_grad():
            for layer in model.model.layers:
                for linear, heads in ((layer.self_attn.q_proj, 4), (layer.self_attn.k_proj, 2)):
                    rows = linear.weight.view(heads, 2, 8, 64)
                    linear.weight.copy_(rows.transpose(1, 2).reshape(linear.weight.shape))
        turned = tuple(replace(layer, rotate=replace(layer.rotate, interleaved=True)) for layer in plan.layers)
        with patched(model, replace(plan, layers=turned)):
            assert float((logits(model, ids) - before).abs().max()) < 1e-5 * spread(before)


class TestCasts:
    """B1, B3, B4: no cast of the model and no autocast reaches the tables."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_cast_after_the_patch_equals_patch_after_the_cast(self, dtype: torch.dtype) -> None:
        ids = tokens(400)
        one, two = tiny("llama"), tiny("llama").to(dtype)
        patch(one, own_plan(one))
        one.to(dtype)
        patch(two, own_plan(two))
        assert torch.equal(logits(one, ids), logits(two, ids))
        unpatch(one)
        unpatch(two)

    def test_there_and_back_leaves_no_mark(self) -> None:
        model, ids = tiny("llama"), tokens(400)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        with patched(model, own_plan(model)):
            before = logits(model, ids)
            model.bfloat16().float().load_state_dict(weights)
            assert torch.equal(logits(model, ids), before)

    def test_float_buffers_cast_behind_our_back(self) -> None:
        model, ids = tiny("llama"), tokens(400)
        with patched(model, own_plan(model)):
            before = logits(model, ids)
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = buffer.bfloat16()
            assert torch.equal(logits(model, ids), before)

    def test_autocast_has_no_say(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = []
        turn = rotation.LayerRotation.turn
        monkeypatch.setattr(
            rotation.LayerRotation, "turn", lambda s, *a, **k: seen.append(s.tables) or turn(s, *a, **k)
        )
        model, ids = tiny("llama"), tokens(300)
        with patched(model, own_plan(model)):
            logits(model, ids)
            with torch.autocast("cpu", torch.bfloat16):
                logits(model, ids)
        assert all(tables.cos.dtype == torch.float32 for tables in seen)
        assert torch.equal(seen[0].cos, seen[-1].cos)


class TestMetaDevice:
    """C1: after meta initialisation and `to_empty`, buffers hold what the memory held; ours are not there to spoil."""

    @pytest.mark.parametrize("patch_first", [False, True])
    def test_to_empty_then_weights(self, patch_first: bool) -> None:
        judge, ids = tiny("llama"), tokens(60)
        before = logits(judge, ids)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.float32).eval()
        if patch_first:
            patch(model, own_plan(model))
        model.to_empty(device="cpu")
        with torch.no_grad():
            for buffer in model.buffers():
                buffer.fill_(float("nan"))
        model.load_state_dict(judge.state_dict())
        if not patch_first:
            patch(model, own_plan(model))
        assert float((logits(model, ids) - before).abs().max()) < 1e-4 * spread(before)
        unpatch(model)


class TestDynamicNTK:
    """D1, D2: one base per patch, so cached keys fit, and no call changes the next one."""

    def test_token_by_token_past_the_trained_length_equals_one_forward(self) -> None:
        model, ids = tiny("llama", dtype=torch.float64), tokens(48)
        with patched(model, dynamic(model), length=48):
            whole = logits(model, ids)
            assert float((decode(model, ids, 20) - whole).abs().max()) < 1e-5 * spread(whole)

    def test_a_long_call_leaves_nothing_for_a_short_one(self) -> None:
        model, ids = tiny("llama"), tokens(64)
        with patched(model, dynamic(model), length=TRAINED):
            fresh = logits(model, ids[:, :TRAINED])
            logits(model, ids)
            assert torch.equal(logits(model, ids[:, :TRAINED]), fresh)

    def test_the_length_decides(self) -> None:
        model, ids = tiny("llama"), tokens(TRAINED)
        plain = logits(model, ids)
        with patched(model, dynamic(model), length=TRAINED):
            within = logits(model, ids)
        with patched(model, dynamic(model), length=4 * TRAINED):
            beyond = logits(model, ids)
        assert float((within - plain).abs().max()) < 1e-4 * spread(plain)
        assert float((beyond - plain).abs().max()) > 1e-2 * spread(plain)


class TestLongRoPE:
    """E1, E3: the set of factors is the sequence's, not the batch's nor the step's."""

    def test_decoding_across_the_boundary_equals_one_forward(self) -> None:
        model, ids = tiny("llama", dtype=torch.float64), tokens(40)
        with patched(model, long_and_short(model), length=40):
            whole = logits(model, ids)
            assert float((decode(model, ids, 24) - whole).abs().max()) < 1e-5 * spread(whole)

    def test_a_short_row_is_the_same_beside_a_long_one(self) -> None:
        model = tiny("llama", dtype=torch.float64)
        ids = tokens(40, batch=2)
        mask = torch.ones_like(ids)
        mask[0, :32] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        for length in (TRAINED, 40):
            with patched(model, long_and_short(model), length=length):
                together = logits(model, ids, attention_mask=mask, position_ids=positions)[0, 32:]
                alone = logits(model, ids[:1, 32:])[0]
            assert float((together - alone).abs().max()) < 1e-5 * spread(alone)

    def test_the_set_follows_the_length(self) -> None:
        model, ids = tiny("llama"), tokens(20)
        with patched(model, long_and_short(model), length=TRAINED):
            short = logits(model, ids)
        with patched(model, long_and_short(model), length=TRAINED + 1):
            long = logits(model, ids)
        assert float((short - long).abs().max()) > 1e-2 * spread(short)


class TestDecodeShape:
    """J9, I8: every row of a batch is turned by its own positions, one token at a time too."""

    def test_rows_at_different_positions(self) -> None:
        model = tiny("llama", dtype=torch.float64)
        ids = tokens(1, batch=3)
        offsets = torch.tensor([[0], [5], [1000]])
        with patched(model, own_plan(model)):
            # One token sees itself alone, and turning it changes nothing; two tokens show a difference of 7.
            pair = torch.cat((ids, ids.flip(0)), dim=1)
            positions = torch.cat((offsets, offsets + 7), dim=1)
            together = logits(model, pair, position_ids=positions, attention_mask=torch.ones_like(pair))
            shifted = logits(model, pair, position_ids=positions + 3, attention_mask=torch.ones_like(pair))
            for row in range(3):
                alone = logits(model, pair[row : row + 1], position_ids=torch.tensor([[0, 7]]),
                               attention_mask=torch.ones(1, 2, dtype=torch.int64))  # fmt: skip
                assert float((together[row] - alone[0]).abs().max()) < 1e-5 * spread(alone)
        assert float((together - shifted).abs().max()) < 1e-5 * spread(together)
