"""Patching changes what it says and nothing else, in every order, and comes off without a trace."""

from __future__ import annotations

import copy
import gc
import pickle
from dataclasses import replace

import pytest
import torch
import transformers
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.llama import modeling_llama

from theodolite.models import current_plan, patch, patched, rotation, unpatch
from theodolite.plan import Linear, ModelPlan, YaRN

from .tiny import logits, own_plan, spread, tiny, tiny_config, tokens


def with_base(plan: ModelPlan, *bases: float) -> ModelPlan:
    """The plan with these bases, one a layer."""
    layers = (
        replace(layer, rotate=replace(layer.rotate, rope_theta=base))
        for layer, base in zip(plan.layers, bases, strict=True)
        if layer.rotate is not None
    )
    return replace(plan, layers=tuple(layers))


def differs(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, in units of the spread."""
    return float((a - b).abs().max()) / spread(b)


class TestUnpatch:
    """The very objects that were there are there again."""

    def test_forward_function_hooks_and_scaling_are_the_same_objects(self) -> None:
        model = tiny("deepseek_v3-yarn")
        module = __import__(type(model).__module__, fromlist=["x"])
        functions = module.apply_rotary_pos_emb, module.apply_rotary_pos_emb_interleave
        scaling = [layer.self_attn.scaling for layer in model.model.layers]
        attributes = {name: set(vars(m)) for name, m in model.named_modules()}
        plan = own_plan(model)
        patch(model, replace(plan, layers=tuple(replace(layer, score_scale=0.5) for layer in plan.layers)))
        assert module.apply_rotary_pos_emb is not functions[0]
        assert model.model.layers[0].self_attn.scaling == 0.5
        unpatch(model)
        assert (module.apply_rotary_pos_emb, module.apply_rotary_pos_emb_interleave) == functions
        assert all(layer.self_attn.scaling is s for layer, s in zip(model.model.layers, scaling, strict=True))
        assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())

    def test_an_instance_forward_of_someone_else_is_put_back(self) -> None:
        model = tiny("llama")
        own = model.model.rotary_emb.forward
        model.model.rotary_emb.forward = own
        with patched(model, own_plan(model)):
            pass
        assert model.model.rotary_emb.forward is own

    def test_a_model_that_is_not_patched_is_left_alone(self) -> None:
        unpatch(tiny("llama"))

    def test_no_state_enters_the_model(self) -> None:
        model = tiny("llama")
        keys, buffers = list(model.state_dict()), [name for name, _ in model.named_buffers()]
        with patched(model, own_plan(model)):
            logits(model, tokens(5))
            assert list(model.state_dict()) == keys
            assert [name for name, _ in model.named_buffers()] == buffers


class TestOrder:
    """Patches replace one another; they never pile up."""

    def test_the_second_patch_replaces_the_first(self) -> None:
        model, ids = tiny("llama"), tokens(40)
        plan = own_plan(model)
        linear = plan.with_scaling(Linear(factor=4.0))
        patch(model, plan)
        patch(model, linear)
        twice = logits(model, ids)
        assert current_plan(model) == linear
        unpatch(model)
        with patched(model, linear):
            assert torch.equal(twice, logits(model, ids))

    def test_a_refused_patch_leaves_the_one_before(self) -> None:
        model, ids = tiny("llama"), tokens(40)
        plan = own_plan(model).with_scaling(Linear(factor=4.0))
        patch(model, plan)
        before = logits(model, ids)
        with pytest.raises(ValueError, match="layers: the plan"):
            patch(model, replace(plan, layers=plan.layers[:1]))
        assert current_plan(model) == plan
        assert torch.equal(logits(model, ids), before)
        unpatch(model)

    def test_blocks_nest(self) -> None:
        model, ids = tiny("llama"), tokens(40)
        plan = own_plan(model)
        outer, inner = plan.with_scaling(Linear(factor=2.0)), plan.with_scaling(Linear(factor=8.0))
        with patched(model, outer):
            before = logits(model, ids)
            with pytest.raises(RuntimeError, match="on purpose"), patched(model, inner):
                raise RuntimeError("on purpose")
            assert torch.equal(logits(model, ids), before)
        assert current_plan(model) is None

    def test_a_model_and_its_decoder_are_one(self) -> None:
        model, ids = tiny("llama"), tokens(40)
        plain, plan = logits(model, ids), own_plan(model).with_scaling(Linear(factor=4.0))
        patch(model, own_plan(model))
        patch(model.model, plan)
        assert current_plan(model) == plan
        unpatch(model)
        assert torch.equal(logits(model, ids), plain)

    def test_models_in_one_process_do_not_meet(self) -> None:
        # Patched models that other tests dropped still count until they are collected.
        gc.collect()
        one, two, ids = tiny("llama"), tiny("llama"), tokens(40)
        plain = logits(two, ids)
        patch(one, own_plan(one).with_scaling(Linear(factor=4.0)))
        assert torch.equal(logits(two, ids), plain)
        patch(two, own_plan(two))
        unpatch(one)
        assert isinstance(modeling_llama.apply_rotary_pos_emb, rotation.Dispatcher)
        assert differs(logits(two, ids), plain) < 1e-4
        unpatch(two)
        assert not isinstance(modeling_llama.apply_rotary_pos_emb, rotation.Dispatcher)

    def test_copies_and_pickles_stay_patched_on_their_own(self) -> None:
        model, ids = tiny("llama"), tokens(40)
        plain = logits(model, ids)
        patch(model, own_plan(model).with_scaling(Linear(factor=4.0)))
        scaled = logits(model, ids)
        copied, pickled = copy.deepcopy(model), pickle.dumps(model)
        unpatch(model)
        for other in (copied, pickle.loads(pickled)):
            assert torch.equal(logits(other, ids), scaled)
            assert torch.equal(logits(model, ids), plain)
            unpatch(other)
            assert torch.equal(logits(other, ids), plain)


class TestPerLayer:
    """Each layer follows its own policy, whatever the family shares."""

    def test_two_bases_in_a_family_that_has_one_module(self) -> None:
        # The judge: hidden states after one layer, from two models of one base each.
        model, ids = tiny("llama"), tokens(60)
        plan = own_plan(model)
        with torch.inference_mode(), patched(model, with_base(plan, 1e4, 50.0)):
            mixed = model(ids, output_hidden_states=True, use_cache=False)
        with torch.inference_mode(), patched(model, with_base(plan, 1e4, 1e4)):
            first = model(ids, output_hidden_states=True, use_cache=False)
        assert torch.equal(mixed.hidden_states[1], first.hidden_states[1])
        assert differs(mixed.logits, first.logits) > 1e-3

    def test_swapped_bases_of_gemma3_equal_a_model_configured_so(self) -> None:
        swapped = {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e6},
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
        judge, model, ids = tiny("gemma3", rope_parameters=swapped), tiny("gemma3"), tokens(60)
        with patched(model, own_plan(judge)):
            assert differs(logits(model, ids), logits(judge, ids)) < 1e-4

    def test_a_layer_without_rotation_equals_one_configured_so(self) -> None:
        judge, model, ids = tiny("smollm3"), tiny("smollm3", no_rope_layers=[1, 1]), tokens(60)
        assert own_plan(judge).layers[1].rotate is None
        with patched(model, own_plan(judge)):
            assert differs(logits(model, ids), logits(judge, ids)) < 1e-4

    def test_tables_are_made_once_per_forward_and_encoding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = []
        real = rotation.tables_of
        monkeypatch.setattr(rotation, "tables_of", lambda r, *a, **k: made.append(r) or real(r, *a, **k))
        for family, distinct in (("llama", 1), ("gemma3", 2)):
            model = tiny(family, num_hidden_layers=4)
            made.clear()
            with patched(model, own_plan(model)):
                logits(model, tokens(9))
                logits(model, tokens(7))
            assert len(made) == 2 * distinct
            assert len(set(made)) == distinct

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_layers_are_looked_at_once_and_then_called_without_hooks_they_need_not(self, family: str) -> None:
        model = tiny(family, num_hidden_layers=4)
        selects = 4 if len(set(own_plan(model).rotaries)) > 1 else 0
        layers = [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]
        assert len(layers) == 4
        with patched(model, own_plan(model)):
            assert sum(len(layer._forward_hooks) for layer in layers) == 4
            first = logits(model, tokens(9))
            assert sum(len(layer._forward_hooks) + len(layer._forward_hooks_with_kwargs) for layer in layers) == 0
            assert sum(len(layer._forward_pre_hooks) for layer in layers) == selects
            assert torch.equal(logits(model, tokens(9)), first)
        with patched(model, own_plan(model)):
            assert sum(len(layer._forward_hooks) for layer in layers) == 4


class TestScoreScale:
    """The plan's multiplier of the scores is the model's."""

    def test_yarn_of_deepseek_sets_the_softmax_scale(self) -> None:
        # mscale_all_dim squared: 1.45 at factor 8; left out, it shows from position 1 on.
        model, judge, ids = tiny("deepseek_v3"), tiny("deepseek_v3-yarn"), tokens(60)
        with patched(model, own_plan(judge)):
            assert model.model.layers[0].self_attn.scaling == pytest.approx(
                24**-0.5 * (0.1 * torch.tensor(8.0).log().item() + 1) ** 2
            )
            assert differs(logits(model, ids), logits(judge, ids)) < 1e-4

    def test_a_scale_that_the_plan_does_not_state_is_asked_for(self) -> None:
        model = tiny("gemma2")
        plan = own_plan(model)
        silent = replace(plan, layers=tuple(replace(layer, score_scale=None) for layer in plan.layers))
        with pytest.raises(
            ValueError, match=r"layers\[0\].score_scale: the plan leaves it at .*; say which in the plan"
        ):
            patch(model, silent)


class TestForms:
    """Where the decoder is not the whole model, or is called in other ways."""

    def test_the_text_decoder_inside_a_model_of_images_and_text(self) -> None:
        vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                  "image_size": 28, "patch_size": 14}  # fmt: skip
        config = transformers.Gemma3Config(
            text_config=tiny_config("gemma3").to_dict(), vision_config=vision, mm_tokens_per_image=4
        )
        torch.manual_seed(0)
        model, ids = transformers.Gemma3ForConditionalGeneration(config).eval(), tokens(60)
        before = logits(model, ids)
        with patched(model, own_plan(model)):
            assert isinstance(modeling_gemma3.apply_rotary_pos_emb, rotation.Dispatcher)
            assert differs(logits(model, ids), before) < 1e-4

    def test_the_bare_decoder(self) -> None:
        model = tiny("llama").model
        ids = tokens(30)
        with torch.inference_mode():
            before = model(ids).last_hidden_state
            with patched(model, own_plan(model)):
                assert differs(model(ids).last_hidden_state, before) < 1e-4

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_gradient_checkpointing(self, reentrant: bool) -> None:
        model, ids = tiny("llama", dtype=torch.float64).train(), tokens(30)
        grads = []
        with patched(model, own_plan(model).with_scaling(Linear(factor=4.0))):
            for checkpointing in (False, True):
                if checkpointing:
                    model.activation_checkpointing_enable({"use_reentrant": reentrant})
                model.zero_grad()
                model.get_input_embeddings().requires_grad_()
                model(ids, labels=ids, use_cache=False).loss.backward()
                grads.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
        assert torch.equal(grads[0], grads[1])

    def test_axes_of_qwen2_vl(self) -> None:
        text = {**tiny_config("qwen2").to_dict(), "model_type": "qwen2_vl_text"}
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        vision = {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64}
        torch.manual_seed(0)
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision)
        model, ids = transformers.Qwen2VLForConditionalGeneration(config).eval(), tokens(40, batch=2)
        positions = torch.stack([torch.arange(40), torch.arange(40) // 2, torch.arange(40) % 7])
        more = {"position_ids": positions[:, None].expand(3, 2, 40), "attention_mask": torch.ones_like(ids)}
        before, text_only = logits(model, ids, **more), logits(model, ids)
        with patched(model, own_plan(model)):
            assert differs(logits(model, ids, **more), before) < 1e-4
            assert differs(logits(model, ids), text_only) < 1e-4
        assert differs(before, text_only) > 1e-2


def test_a_compiled_model_is_the_same() -> None:
    model, ids = tiny("llama"), tokens(40)
    with patched(model, own_plan(model)):
        before = logits(model, ids)
        # The eager backend runs the traced graph as it is: what is tested is that tracing loses nothing.
        assert differs(logits(torch.compile(model, backend="eager"), ids), before) < 1e-5


def test_yarn_on_a_plain_llama_equals_a_model_configured_so() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048}
    judge, model, ids = tiny("llama", rope_parameters=yarn), tiny("llama"), tokens(300)
    scaling = YaRN(factor=4.0, original_max_position_embeddings=2048)
    with patched(model, own_plan(model).with_scaling(scaling)):
        assert differs(logits(model, ids), logits(judge, ids)) < 1e-4
