"""Training a patched model: checkpoints, autocast in bfloat16, accelerate, packed documents, copies."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from theodolite.models import current_plan, patch, patched, rotation, unpatch
from theodolite.plan import ModelPlan, YaRN
from theodolite.positions import from_cu_seqlens

from .tiny import logits, own_plan, tiny, tokens

# One table for all layers; two kinds of layers; biases; a layer that does not turn; experts and sinks.
FAMILIES = ("llama", "gemma3", "qwen2", "smollm3", "gpt_oss")
every_family = pytest.mark.parametrize("family", FAMILIES)
ROUNDING = 2.0**-8


def yarn(model: Any) -> ModelPlan:
    return own_plan(model).with_scaling(YaRN(factor=4.0, original_max_position_embeddings=2048))


def autocast(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def gradients(model: Any, ids: torch.Tensor, *, lowered: bool = False, **more: Any) -> dict[str, torch.Tensor]:
    """Of every parameter that has one, by name, of one forward and backward."""
    model.zero_grad()
    with autocast(lowered):
        loss = model(input_ids=ids, labels=ids, use_cache=False, **more).loss
    loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    assert all(bool(one.isfinite().all()) for one in expected.values())
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture
def accelerator() -> Iterator[Any]:
    """One of its own, for accelerate keeps its settings for the whole process."""
    accelerate = pytest.importorskip("accelerate")
    state = accelerate.state
    state.AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


class TestCheckpointsChangeNoGradient:
    """Layers that are worked out twice find the tables of the same forward both times."""

    @every_family
    @pytest.mark.parametrize("lowered", [False, True], ids=["float32", "autocast"])
    def test_of_a_scaled_model(self, family: str, lowered: bool) -> None:
        model, ids = tiny(family).train(), tokens(131, batch=2)
        calls: list[int] = []
        model.model.layers[1].self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
        with patched(model, yarn(model)):
            expected = gradients(model, ids, lowered=lowered)
            for reentrant in (False, True):
                model.activation_checkpointing_enable({"use_reentrant": reentrant})
                assert equal(gradients(model, ids, lowered=lowered), expected)
                model.activation_checkpointing_disable()
        assert len(calls) == 5
        assert not equal(gradients(model, ids, lowered=lowered), expected)

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_from_the_first_forward_on(self, family: str) -> None:
        # The hooks that look at a layer once must do so where it is called from inside a checkpoint.
        model, ids = tiny(family).train(), tokens(57)
        with patched(model, yarn(model)):
            expected = gradients(model, ids)
        model.activation_checkpointing_enable()
        with patched(model, yarn(model)):
            assert equal(gradients(model, ids), expected)


class TestAutocast:
    """Weights are lowered for products of matrices; where tokens stand is not."""

    @every_family
    def test_gradients_are_whole_and_wide(self, family: str) -> None:
        model, ids = tiny(family).train(), tokens(131, batch=2)
        with patched(model, yarn(model)):
            found = gradients(model, ids, lowered=True)
        assert found.keys() == dict(model.named_parameters()).keys()
        assert all(one.dtype == torch.float32 and bool(one.isfinite().all()) for one in found.values())
        assert all(bool(one.any()) for one in found.values())

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_far_out_it_is_as_near_as_at_the_start(self, family: str) -> None:
        # Rotary scores go by distance, so that the same text further on differs by roundings alone.
        model, ids = tiny(family).train(), tokens(131)
        positions = torch.arange(131)[None]
        with patched(model, yarn(model)), autocast(), torch.no_grad():
            near, far = (model(ids, position_ids=positions + first, use_cache=False).logits for first in (0, 2**20 + 1))
        # Two layers of some ten roundings on the way of a number, each of them made in both.
        assert float((near - far).double().std() / near.double().std()) < ROUNDING * (2 * 2 * 10) ** 0.5

    def test_a_step_and_out_again(self) -> None:
        model, ids = tiny("llama").train(), tokens(131, batch=2)
        judge = copy.deepcopy(model)
        before = copy.deepcopy(model.state_dict())
        steps = []
        for one in (model, judge):
            patch(one, yarn(one))
            optimiser = torch.optim.AdamW(one.parameters(), lr=1e-3)
            if one is model:
                one.activation_checkpointing_enable()
            gradients(one, ids, lowered=True)
            optimiser.step()
            steps.append(one.state_dict())
        assert steps[0].keys() == before.keys()
        assert all(torch.equal(steps[0][name], steps[1][name]) for name in before)
        assert all(not torch.equal(steps[0][name], before[name]) for name in before)
        scaled = logits(model.eval(), ids)
        unpatch(model)
        fresh = tiny("llama")
        fresh.load_state_dict(model.state_dict())
        assert torch.equal(logits(model, ids), logits(fresh, ids))
        assert not torch.equal(logits(model, ids), scaled)
        unpatch(judge)


class TestAccelerate:
    """What accelerate wraps trains as the model does under the same autocast, and can be unpatched."""

    @pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
    @pytest.mark.parametrize("checkpointed", [False, True])
    def test_a_step(self, accelerator: Any, family: str, checkpointed: bool) -> None:
        plain, wrapped, ids = tiny(family).train(), tiny(family).train(), tokens(131, batch=2)
        with patched(plain, yarn(plain)):
            optimiser = torch.optim.AdamW(plain.parameters(), lr=1e-3)
            expected = gradients(plain, ids, lowered=True)
            optimiser.step()
        patch(wrapped, yarn(wrapped))
        if checkpointed:
            wrapped.activation_checkpointing_enable()
        model, optimiser = accelerator.prepare(wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-3))
        accelerator.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
        inner = accelerator.unwrap_model(model)
        assert equal({name: one.grad for name, one in inner.named_parameters()}, expected)
        optimiser.step()
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in inner.state_dict().items())
        unpatch(model)
        assert current_plan(inner) is None

    def test_patched_after_it_was_prepared(self, accelerator: Any) -> None:
        one, other, ids = tiny("llama").train(), tiny("llama").train(), tokens(57)
        with patched(one, yarn(one)):
            expected = gradients(one, ids, lowered=True)
        model = accelerator.prepare(other)
        with patched(model, yarn(other)):
            accelerator.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
        assert equal({name: parameter.grad for name, parameter in other.named_parameters()}, expected)


class TestPackedDocuments:
    """Documents packed end to end, with positions that restart, give the gradients of each on its own, added up."""

    LENGTHS = (40, 61, 23)

    # The masks of gpt-oss and Qwen3-Next, as transformers 5.24 makes them, do not part documents.
    @pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt_oss"])
    @pytest.mark.parametrize("checkpointed", [False, True])
    def test_gradients_are_those_of_the_documents(self, family: str, checkpointed: bool) -> None:
        model = tiny(family, dtype=torch.float64).train()
        ids, starts = tokens(sum(self.LENGTHS)), [0, 40, 101]
        positions = from_cu_seqlens(torch.tensor([*starts, sum(self.LENGTHS)]))[None]
        documents = ids.split(self.LENGTHS, dim=1)
        labels = ids.clone()
        # The first token of a document is no continuation of the one before it.
        labels[0, starts] = -100
        counted = sum(self.LENGTHS) - len(starts)
        with patched(model, yarn(model)):
            model.zero_grad()
            for document in documents:
                share = (document.shape[1] - 1) / counted
                (share * model(input_ids=document, labels=document, use_cache=False).loss).backward()
            expected = {name: one.grad.clone() for name, one in model.named_parameters()}
            if checkpointed:
                model.activation_checkpointing_enable()
            model.zero_grad()
            model(input_ids=ids, labels=labels, position_ids=positions, use_cache=False).loss.backward()
        for name, one in model.named_parameters():
            # Rotations are worked out in float32 in both, and sums are added up in another order.
            assert (one.grad - expected[name]).abs().max() < 1e-5 * expected[name].abs().max(), name


class TestCopiesInTraining:
    """A copy that is trained on, and weights that are saved and read again, go on as the model would have."""

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    @pytest.mark.parametrize("checkpointed", [False, True])
    def test_a_deep_copy(self, family: str, checkpointed: bool) -> None:
        model, ids = tiny(family).train(), tokens(57)
        if checkpointed:
            model.activation_checkpointing_enable()
        patch(model, yarn(model))
        gradients(model, ids)
        copied = copy.deepcopy(model)
        expected = gradients(model, ids)
        unpatch(model)
        assert equal(gradients(copied, ids), expected)
        assert not equal(gradients(model, ids), expected)
        unpatch(copied)

    def test_state_dicts_round_trip(self) -> None:
        ids = [tokens(57, seed=seed) for seed in (1, 2)]
        model = tiny("gemma3").train()
        patch(model, yarn(model))
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
        gradients(model, ids[0], lowered=True)
        optimiser.step()
        saved = copy.deepcopy((model.state_dict(), optimiser.state_dict()))
        again = tiny("gemma3").train()
        patch(again, yarn(again))
        resumed = torch.optim.AdamW(again.parameters(), lr=1e-3)
        again.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        for one, its in ((model, optimiser), (again, resumed)):
            gradients(one, ids[1], lowered=True)
            its.step()
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
        for one in (model, again):
            unpatch(one)


def test_a_patch_that_training_holds_is_freed() -> None:
    """Nothing of a backward keeps the dispatcher in the modeling module."""
    module = __import__("transformers.models.qwen2.modeling_qwen2", fromlist=["x"])
    model, ids = tiny("qwen2").train(), tokens(57)
    model.activation_checkpointing_enable()
    patch(model, yarn(model))
    gradients(model, ids, lowered=True)
    unpatch(model)
    assert not isinstance(module.apply_rotary_pos_emb, rotation.Dispatcher)
