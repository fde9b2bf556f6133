"""Faults that people met, planted in tiny models of transformers: each gives the model and what its plan should be.

Names are the rows of the kinds of fault: A pair layout, B precision, C buffers, D and E lengths, F YaRN, G config,
H width, I batches, J caches, K state, M learned tables, N ALiBi.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.bloom import modeling_bloom
from transformers.models.llama import modeling_llama

from tests.models.tiny import own_plan, tiny
from theodolite.plan import ModelPlan, Rotary, YaRN

Planted = tuple[Any, ModelPlan]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 2048}
SMALL = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.05}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def other(name: str, **sizes: Any) -> Any:
    """A tiny model of a family without rotary positions."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(getattr(transformers, name)(**SMALL, **sizes)).eval()


def gpt2() -> Any:
    return other("GPT2Config", n_layer=2, n_head=4, n_embd=64, n_positions=128)


def bloom(heads: int = 4) -> Any:
    return other("BloomConfig", n_layer=2, n_head=heads, hidden_size=8 * heads)


def scaled(rope: dict[str, Any], **more: Any) -> tuple[Any, ModelPlan, Rotary]:
    """A Llama with a scaling, its plan, and its rotary encoding."""
    model = tiny("llama", rope_parameters=rope, **more)
    plan = own_plan(model)
    return model, plan, plan.rotaries[0]


def tables(model: Any, make: Callable[[Tensor], Tensor], amplitude: float = 1.0, twice: str = "halves") -> Planted:
    """The model with its angles (B, S, P) computed by `make` from position_ids."""

    def forward(x: Tensor, position_ids: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        angles = make(position_ids)
        full = torch.cat((angles, angles), -1) if twice == "halves" else angles.repeat_interleave(2, -1)
        return (full.cos() * amplitude).to(x.dtype), (full.sin() * amplitude).to(x.dtype)

    model.model.rotary_emb.forward = forward
    return model, own_plan(model)


def inv_freq(model: Any) -> Tensor:
    found: Tensor = model.model.rotary_emb.original_inv_freq.clone()
    return found


def with_inv_freq(model: Any, plan: ModelPlan, frequencies: Any) -> Planted:
    model.model.rotary_emb.inv_freq = torch.as_tensor(frequencies).float()
    return model, plan


def turning(monkeypatch: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Planted:
    """A Llama whose function that turns queries and keys is another one."""
    present = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", functools.wraps(present)(make(present)))
    model = tiny("llama")
    return model, own_plan(model)


def positions_given(model: Any, change: Callable[[Tensor], Tensor]) -> Planted:
    """The model whose decoder is given other position_ids than it was called with (or would count by itself)."""

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("position_ids") is None:
            past = kwargs.get("cache") or kwargs.get("past_key_values")
            start = 0 if past is None else past.get_seq_length()
            ids = args[0] if args else kwargs["input_ids"]
            kwargs["position_ids"] = torch.arange(start, start + ids.shape[1])[None]
        kwargs["position_ids"] = change(kwargs["position_ids"])
        return args, kwargs

    model.get_decoder().register_forward_pre_hook(hook, with_kwargs=True)
    return model, own_plan(model)


def other_layout(present: Any) -> Any:
    def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        half = cos.shape[-1] // 2
        cos, sin = (x[..., :half].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for x in (cos, sin))
        return tuple(x * cos + torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2) * sin for x in (q, k))

    return turn


def a2(monkeypatch: Any) -> Planted:
    return turning(monkeypatch, other_layout)


def a3(monkeypatch: Any) -> Planted:
    model = tiny("llama")
    return tables(model, lambda p: p[..., None] * inv_freq(model), twice="neighbours")


def a4(monkeypatch: Any) -> Planted:
    return turning(
        monkeypatch, lambda f: lambda q, k, cos, sin, unsqueeze_dim=1: f(*f(q, k, cos, sin), cos, sin, unsqueeze_dim)
    )


def b1(monkeypatch: Any) -> Planted:
    model = tiny("llama")
    return tables(model, lambda p: (inv_freq(model)[None, :, None] @ p[:, None, :].float()).transpose(1, 2))


def b2(monkeypatch: Any) -> Planted:
    model = tiny("llama")
    return tables(model, lambda p: p.bfloat16().float()[..., None] * inv_freq(model))


def b3(monkeypatch: Any) -> Planted:
    model = tiny("llama")
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer.bfloat16()
    return model, own_plan(model)


def b4(monkeypatch: Any) -> Planted:
    model, weights = tiny("llama"), tiny("llama").state_dict()
    model.bfloat16().float().load_state_dict(weights)
    return model, own_plan(model)


def b5(monkeypatch: Any) -> Planted:
    model = tiny("llama")
    exact = inv_freq(model)

    def make(p: Tensor) -> Tensor:
        low = exact.bfloat16().float()
        return torch.where(p[..., None] < 1024, p[..., None] * exact, p[..., None] * low)

    return tables(model, make)


def b7(monkeypatch: Any) -> Planted:
    model = tiny("llama")
    before = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: tuple(
        table.bfloat16().float() for table in before(x, position_ids)
    )
    return model, own_plan(model)


def b8(monkeypatch: Any) -> Planted:
    return positions_given(tiny("llama"), lambda p: p.bfloat16())


def c1(monkeypatch: Any) -> Planted:
    model = tiny("llama")
    return with_inv_freq(model, own_plan(model), torch.full((8,), float("nan")))


def c1_garbage(monkeypatch: Any) -> Planted:
    model = tiny("llama")
    return with_inv_freq(model, own_plan(model), torch.tensor([2.2e20, 4.6e-41, 3.0, 0, 1e-3, 7.1, -2.0, 1.0]))


def c2(monkeypatch: Any) -> Planted:
    model = tiny("llama")
    return with_inv_freq(model, own_plan(model), torch.zeros(8))


def c3(monkeypatch: Any) -> Planted:
    model = tiny("llama")
    again = torch.cat((inv_freq(model).bfloat16(), torch.zeros(8).bfloat16())).view(torch.float32)
    return with_inv_freq(model, own_plan(model), again)


def dynamic(monkeypatch: Any) -> Planted:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    return scaled(rope, max_position_embeddings=256)[:2]


def long_rope() -> Any:
    return tiny("phi3-longrope", max_position_embeddings=8192)


def e1(monkeypatch: Any) -> Planted:
    model = long_rope()
    return model, own_plan(model)


def e3(monkeypatch: Any) -> Planted:
    model = long_rope()
    plan = own_plan(model)
    rotary = plan.rotaries[0]
    return tables(model, lambda p: p[..., None] * torch.from_numpy(rotary.inv_freq(length=8192)).float(),
                  rotary.attention_factor())[0], plan  # fmt: skip


def f1(monkeypatch: Any) -> Planted:
    plan = scaled(YARN)[1]
    return scaled({**YARN, "factor": 1.25})[0], plan


def f2(monkeypatch: Any) -> Planted:
    rope = {**YARN, "rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0}
    plan = scaled({**rope, "truncate": False}, head_dim=64)[1]
    return scaled({**rope, "truncate": True}, head_dim=64)[0], plan


def f4(monkeypatch: Any) -> Planted:
    model = tiny("deepseek_v3-yarn")
    for layer in model.model.layers:
        layer.self_attn.scaling = layer.self_attn.qk_head_dim**-0.5
    return model, own_plan(model)


def f5(monkeypatch: Any) -> Planted:
    model, plan, rotary = scaled({**YARN, "mscale": 1.0, "mscale_all_dim": 1.0})
    assert isinstance(rotary.scaling, YaRN)
    model.model.rotary_emb.attention_scaling = rotary.scaling.magnitude(1.0)
    return model, plan


def _ramp(rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Plain frequencies, and how much of each is interpolated."""
    plain = torch.tensor([rotary.rope_theta ** (-2 * i / rotary.rotary_dim) for i in range(rotary.rotary_dim // 2)])
    assert isinstance(rotary.scaling, YaRN)
    low, high = rotary.scaling.ramp_ends(rotary.rope_theta, rotary.rotary_dim)
    return plain, ((torch.arange(len(plain)) - low) / (high - low)).clamp(0, 1)


def f7(monkeypatch: Any) -> Planted:
    model, plan, rotary = scaled(YARN, head_dim=32)
    plain, g = _ramp(rotary)
    return with_inv_freq(model, plan, plain * g + plain / 4 * (1 - g))


def f8(monkeypatch: Any) -> Planted:
    model, plan, rotary = scaled(YARN, head_dim=32)
    plain, g = _ramp(rotary)
    return with_inv_freq(model, plan, 1 / ((1 - g) / plain + g * 4 / plain))


def f8_power(monkeypatch: Any) -> Planted:
    model, plan, rotary = scaled(YARN, head_dim=32)
    plain, g = _ramp(rotary)
    return with_inv_freq(model, plan, plain * 4**-g)


def f11(monkeypatch: Any) -> Planted:
    def again(f: Any) -> Any:
        def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
            q, k = f(q, k, cos, sin, unsqueeze_dim)
            return q, k * 1.138629

        return turn

    return turning(monkeypatch, again)


def g1(monkeypatch: Any) -> Planted:
    plan = scaled({**PLAIN, "rope_theta": 1e6})[1]
    return tiny("llama"), plan


def g2(monkeypatch: Any) -> Planted:
    plan = scaled(YARN)[1]
    model = tiny("llama")
    model.model.rotary_emb.attention_scaling = plan.rotaries[0].attention_factor()
    return model, plan


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}  # fmt: skip


def g4(monkeypatch: Any) -> Planted:
    plan = scaled(LLAMA3, head_dim=32)[1]
    return scaled({"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}, head_dim=32)[0], plan


def g5(monkeypatch: Any) -> Planted:
    plan = scaled(LLAMA3, head_dim=32)[1]
    return scaled({**LLAMA3, "factor": 8.0}, head_dim=32)[0], plan


def g5_dropped(monkeypatch: Any) -> Planted:
    plan = scaled(LLAMA3, head_dim=32)[1]
    return scaled({**PLAIN, "rope_theta": 5e5}, head_dim=32)[0], plan


def g6(monkeypatch: Any) -> Planted:
    model = tiny("gemma3")
    rotary = model.model.rotary_emb
    present = type(rotary).forward
    # Every kind of layer gets the tables of those that see everything.
    rotary.forward = lambda x, position_ids, layer_type=None: present(rotary, x, position_ids, "full_attention")
    return model, own_plan(model)


def h1(monkeypatch: Any) -> Planted:
    model = tiny("gpt_neox")
    plan = own_plan(model)
    head = plan.rotaries[0].head_dim
    full = torch.tensor([10000.0 ** (-2 * i / head) for i in range(head // 2)])

    def forward(x: Tensor, position_ids: Tensor) -> Any:
        angles = position_ids[..., None] * full
        return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()

    model.gpt_neox.rotary_emb.forward = forward
    return model, plan


def h2(monkeypatch: Any) -> Planted:
    model = tiny("gpt_neox")
    rotary = own_plan(model).rotaries[0]
    wrong = [rotary.rope_theta ** (-2 * i / rotary.head_dim) for i in range(rotary.rotary_dim // 2)]
    model.gpt_neox.rotary_emb.inv_freq = torch.tensor(wrong)
    return model, own_plan(model)


def h6(monkeypatch: Any) -> Planted:
    model = tiny("smollm3")
    for layer in model.model.layers:
        layer.self_attn.use_rope = not layer.self_attn.use_rope
    return model, own_plan(model)


def h6_turned(monkeypatch: Any) -> Planted:
    model = tiny("smollm3")
    for layer in model.model.layers:
        layer.self_attn.use_rope = True
    return model, own_plan(model)


def i1(monkeypatch: Any) -> Planted:
    return positions_given(gpt2(), lambda p: torch.arange(p.shape[-1]).expand_as(p) if p.shape[-1] > 1 else p)


def i1_rotary(monkeypatch: Any) -> Planted:
    return positions_given(tiny("llama"), lambda p: torch.arange(p.shape[-1]).expand_as(p))


def i2(monkeypatch: Any) -> Planted:
    model = gpt2()
    return model, own_plan(model)


def i3(monkeypatch: Any) -> Planted:
    # Positions go on across documents, so that nothing tells them apart.
    return positions_given(gpt2(), lambda p: p.amin() + torch.arange(p.shape[-1]).expand_as(p))


def i4(monkeypatch: Any) -> Planted:
    model = tiny("gpt_oss")
    return model, own_plan(model)


def i8(monkeypatch: Any) -> Planted:
    model = tiny("llama")
    before = model.model.rotary_emb.forward

    def forward(x: Tensor, position_ids: Tensor) -> Any:
        return tuple(table[:1].expand_as(table) for table in before(x, position_ids))

    model.model.rotary_emb.forward = forward
    return model, own_plan(model)


def i8_kernel(monkeypatch: Any) -> Planted:
    return turning(
        monkeypatch, lambda f: lambda q, k, cos, sin, unsqueeze_dim=1: f(q, k, cos[:1], sin[:1], unsqueeze_dim)
    )


def j1(monkeypatch: Any) -> Planted:
    return positions_given(tiny("llama"), lambda p: p - p[..., :1] if int(p.max()) < 64 else p)


def j1_twice(monkeypatch: Any) -> Planted:
    return positions_given(tiny("llama"), lambda p: p + p[..., :1] if int(p.max()) < 64 else p)


def j3(monkeypatch: Any) -> Planted:
    model = tiny("llama")
    return tables(model, lambda p: p.clamp(max=4095)[..., None] * inv_freq(model))


def j3_wrapped(monkeypatch: Any) -> Planted:
    model = tiny("llama")
    return tables(model, lambda p: (p % 4096)[..., None] * inv_freq(model))


def j6(monkeypatch: Any) -> Planted:
    # After 40 tokens the counter is the number of rows that are kept.
    return positions_given(tiny("llama"), lambda p: p.clamp(max=39) if p.shape[-1] == 1 else p)


def j9(monkeypatch: Any) -> Planted:
    def zeros(f: Any) -> Any:
        def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
            q, k = f(q, k, cos, sin, unsqueeze_dim)
            if q.shape[2] == 1 and len(q) > 1:
                q[1:], k[1:] = 0, 0
            return q, k

        return turn

    return turning(monkeypatch, zeros)


def k3(monkeypatch: Any) -> Planted:
    model = tiny("llama")
    state = {"delta": 0}

    def shifted(p: Tensor) -> Tensor:
        moved = p + (torch.arange(p.shape[-1]) > 20) * state["delta"]
        state["delta"] = max(state["delta"], int(p.min() > 1000))
        return moved

    return positions_given(model, shifted)


def m3(monkeypatch: Any) -> Planted:
    return positions_given(gpt2(), lambda p: p.clamp(max=127))


def alibi(monkeypatch: Any, change: Callable[..., Tensor], heads: int = 4) -> Planted:
    present = modeling_bloom.build_alibi_tensor
    assert len(inspect.signature(present).parameters) == 3
    model = bloom(heads)

    def build(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        return change(present(attention_mask, num_heads, dtype), attention_mask, num_heads)

    monkeypatch.setattr(modeling_bloom, "build_alibi_tensor", build)
    monkeypatch.setattr(modeling_bloom.BloomModel, "build_alibi_tensor", lambda self, *a, **k: build(*a, **k))
    return model, own_plan(model)


def n1(monkeypatch: Any) -> Planted:
    def plain(bias: Tensor, mask: Tensor, heads: int) -> Tensor:
        slopes = 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)
        table = slopes[None, :, None] * (mask.cumsum(-1) - 1)[:, None]
        return table.reshape(bias.shape).to(bias.dtype)

    return alibi(monkeypatch, plain, heads=12)


def n3(monkeypatch: Any) -> Planted:
    queries = {"count": 0}

    def zero(bias: Tensor, mask: Tensor, heads: int) -> Tensor:
        return torch.zeros_like(bias) if queries["count"] == 1 else bias

    def count(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        queries["count"] = (args[0] if args else kwargs["input_ids"]).shape[1]

    model, plan = alibi(monkeypatch, zero)
    model.transformer.register_forward_pre_hook(count, with_kwargs=True)
    return model, plan


def n4(monkeypatch: Any) -> Planted:
    return alibi(monkeypatch, lambda bias, mask, heads: (bias * 1.007).bfloat16().to(bias.dtype))
