"""The policy that is built from a config gives the attention of transformers' own module, layer by layer."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import pytest
import torch
import transformers

from tests.models.tiny import own_plan, tiny, tokens
from theodolite.attention import attend_plainly
from theodolite.encodings import build
from theodolite.plan import LayerPlan, Mask

TOKENS = 33


@dataclass
class Seen:
    """What one attention layer was given and what it gave: heads first, before rotation."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor


class Spy:
    """Records what passes through a modeling module's rotation and attention functions."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch, layer: type) -> None:
        self.module = sys.modules[layer.__module__]
        self.turned: list[torch.Tensor] = []
        self.projected: dict[str, torch.Tensor] = {}
        self.layers: list[Seen] = []
        for name in dir(self.module):
            if name.startswith("apply_rotary_") and "vision" not in name:
                monkeypatch.setattr(self.module, name, self._rotation(getattr(self.module, name)))
        monkeypatch.setattr(
            self.module, "eager_attention_forward", self._attention(self.module.eager_attention_forward)
        )
        for attention in model.modules():
            if isinstance(attention, layer) and hasattr(attention, "k_proj"):
                attention.q_proj.register_forward_hook(lambda _, __, out: self.projected.__setitem__("q", out))
                attention.k_proj.register_forward_hook(lambda _, __, out: self.projected.__setitem__("k", out))

    def _rotation(self, original):
        def spied(*args, **kwargs):
            first_two = [x.detach().clone() for x in args[:2] if x.is_floating_point() and x.dim() == 4]
            one = kwargs.get("unsqueeze_dim") == 2 or original.__name__ == "apply_rotary_emb"
            self.turned += [x.transpose(1, 2) if one else x for x in first_two]
            return original(*args, **kwargs)

        return spied

    def _attention(self, original):
        def spied(module, query, key, value, *args, **kwargs):
            out, weights = original(module, query, key, value, *args, **kwargs)
            if self.turned:
                q, k = (_put(x, part) for x, part in zip((query, key), self.turned, strict=True))
            else:
                q, k = (
                    self.projected[name].unflatten(-1, (x.shape[1], -1)).transpose(1, 2)
                    for name, x in (("q", query), ("k", key))
                )
            self.layers.append(Seen(q, k, value, out.transpose(1, 2)))
            self.turned = []
            return out, weights

        return spied


def _put(turned: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """The head before rotation: latent attention turns the last channels apart, before joining them to the rest."""
    if part.shape[-1] == turned.shape[-1]:
        return part
    whole = turned.clone()
    whole[..., -part.shape[-1] :] = part
    return whole


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, llama3": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 16}},
    ),
    "llama, yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0,
                             "original_max_position_embeddings": 16}},
    ),
    "gemma3": ("gemma3", {"sliding_window": 5}),
    "glm4": ("glm4", {}),
    "cohere2": ("cohere2", {"sliding_window": 5}),
    "olmo3": ("olmo3", {"sliding_window": 5}),
    "llama4": ("llama4", {"floor_scale": 8, "use_qk_norm": False, "attention_chunk_size": 7}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3, yarn": ("deepseek_v3-yarn", {}),
    "gpt_oss": ("gpt_oss", {"sliding_window": 5}),
    "smollm3": ("smollm3", {}),
}  # fmt: skip


def attention_class(model: Any) -> type:
    layer = next(layer for layer in model.model.layers if hasattr(layer, "self_attn"))
    return type(layer.self_attn)


@pytest.mark.parametrize("case", CASES)
class TestLayerByLayer:
    """Rotation, windows, temperatures, sinks and score scale: all that a layer's plan says, and nothing else."""

    def test_attention_output(self, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
        family, changes = CASES[case]
        model = tiny(family, dtype=torch.float64, attn_implementation="eager", **changes)
        spy = Spy(model, monkeypatch, attention_class(model))
        ids = tokens(TOKENS, batch=2)
        with torch.inference_mode():
            model(input_ids=ids, use_cache=False)
        plan, positions = own_plan(model), torch.arange(TOKENS)
        assert len(spy.layers) == len(plan.layers)
        for number, (layer, seen) in enumerate(zip(plan.layers, spy.layers, strict=True)):
            policy = build(layer, num_heads=seen.q.shape[1])
            sinks = getattr(model.model.layers[number].self_attn, "sinks", None)
            sinks = None if sinks is None else sinks.detach()
            mine = attend_plainly(policy, seen.q, seen.k, seen.v, positions, sinks=sinks)
            # Their angles are float32: off by 9 * 2**-24 of the angle, which moves scores by as much of themselves.
            allowed = 20 * TOKENS * 2.0**-24 * float(seen.q.norm(dim=-1).max() * seen.k.norm(dim=-1).max())
            assert float((mine - seen.out).abs().max()) <= allowed * float(seen.v.abs().max())


class TestThatTheComparisonSees:
    """Another base, window or scale is far outside what the comparison allows."""

    def test_other_policies_differ(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny("llama", dtype=torch.float64, attn_implementation="eager")
        spy = Spy(model, monkeypatch, attention_class(model))
        with torch.inference_mode():
            model(input_ids=tokens(TOKENS), use_cache=False)
        seen, layer = spy.layers[0], own_plan(model).layers[0]
        for other in (
            LayerPlan(rotate=None),
            LayerPlan(rotate=layer.rotate, score_scale=0.2),
            LayerPlan(rotate=layer.rotate, mask=Mask(sliding_window=8)),
        ):
            mine = attend_plainly(build(other, num_heads=4), seen.q, seen.k, seen.v, torch.arange(TOKENS))
            assert float((mine - seen.out).abs().max()) > 1e-3 * float(seen.v.abs().max())


class TestGemma4:
    """Proportional rotation on full layers, another head width there, norms before it, and a score scale of 1."""

    def test_attention_output(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = transformers.Gemma4TextConfig(
            vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_global_key_value_heads=2, head_dim=16, global_head_dim=32, sliding_window=5,
            layer_types=["sliding_attention", "full_attention"], hidden_size_per_layer_input=0, pad_token_id=0,
            attn_implementation="eager",
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
        spy = Spy(model, monkeypatch, attention_class(model))
        with torch.inference_mode():
            model(input_ids=tokens(TOKENS, batch=2), use_cache=False)
        for layer, seen in zip(own_plan(model).layers, spy.layers, strict=True):
            mine = attend_plainly(build(layer, num_heads=4), seen.q, seen.k, seen.v, torch.arange(TOKENS))
            allowed = 20 * TOKENS * 2.0**-24 * float(seen.q.norm(dim=-1).max() * seen.k.norm(dim=-1).max())
            assert float((mine - seen.out).abs().max()) <= allowed * float(seen.v.abs().max())
        # All pairs of the full layer turning is another model, and seen as one.
        whole = replace(layer, rotate=replace(layer.rotate, live_pairs=None))
        other = attend_plainly(build(whole, num_heads=4), seen.q, seen.k, seen.v, torch.arange(TOKENS))
        assert float((other - seen.out).abs().max()) > 10 * allowed * float(seen.v.abs().max())


VISION_LANGUAGE = {
    "qwen2_vl": ("Qwen2VLTextConfig", "qwen2_vl", "Qwen2VLTextModel", [2, 3, 3], False),
    "qwen2_5_vl": ("Qwen2_5_VLTextConfig", "qwen2_5_vl", "Qwen2_5_VLTextModel", [2, 3, 3], False),
    "qwen3_vl": ("Qwen3VLTextConfig", "qwen3_vl", "Qwen3VLTextModel", [4, 2, 2], True),
}


@pytest.mark.parametrize("family", VISION_LANGUAGE)
class TestThreeAxes:
    """Images on three axes: time, height and width each turn their own pairs."""

    def test_attention_output(self, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
        config_name, package, model_name, section, interleaved = VISION_LANGUAGE[family]
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section}
        if interleaved:
            rope["mrope_interleaved"] = True
        config = getattr(transformers, config_name)(
            vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, rope_parameters=rope, attn_implementation="eager",
        )  # fmt: skip
        module = import_module(f"transformers.models.{package}.modeling_{package}")
        torch.manual_seed(0)
        model = getattr(module, model_name)(config).double().eval()
        spy = Spy(model, monkeypatch, type(model.layers[0].self_attn))
        generator = torch.Generator().manual_seed(1)
        positions = torch.stack([torch.randint(0, 40, (2, TOKENS), generator=generator) for _ in range(3)])
        with torch.inference_mode():
            model(input_ids=tokens(TOKENS, batch=2), position_ids=positions, use_cache=False)
        (seen,) = spy.layers
        policy = build(own_plan(model).layers[0], num_heads=4)
        mine = attend_plainly(policy, seen.q, seen.k, seen.v, positions, order=torch.arange(TOKENS))
        allowed = 20 * 40 * 2.0**-24 * float(seen.q.norm(dim=-1).max() * seen.k.norm(dim=-1).max())
        assert float((mine - seen.out).abs().max()) <= allowed * float(seen.v.abs().max())
