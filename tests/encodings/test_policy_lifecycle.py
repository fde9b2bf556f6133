"""A block that attends under a policy: compiled once for all lengths, exported, trained in half precision."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from theodolite.encodings import ALiBi, Fire, LeRoPE, LogN, Policy, RotaryEmbedding, SSMax, T5Bias
from theodolite.plan import Mask, Rotary, YaRN

HEADS, WIDTH = 4, 64
PLAN = Rotary(head_dim=16, rope_theta=1e4, scaling=YaRN(factor=4, original_max_position_embeddings=32))
POLICIES = {
    "rotary": lambda: Policy(rotate=RotaryEmbedding(PLAN)),
    "window": lambda: Policy(rotate=RotaryEmbedding(PLAN), mask=Mask(sliding_window=5)),
    "rotary and alibi": lambda: Policy(rotate=RotaryEmbedding(PLAN), bias=ALiBi(HEADS), scale=LogN(16)),
    "learned": lambda: Policy(rotate=LeRoPE(PLAN), bias=Fire(HEADS, hidden=4), scale=SSMax(HEADS)),
    "t5": lambda: Policy(bias=T5Bias(HEADS, bidirectional=False)),
    "by head": lambda: Policy.by_head([(Policy(rotate=RotaryEmbedding(PLAN)), 2), (Policy(bias=ALiBi(2)), 2)]),
    "nope": Policy,
}
EVERY = pytest.mark.parametrize("name", POLICIES)


class Block(nn.Module):
    """Attention as a user would write it."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mask = self.policy.attn_mask(positions, positions, q=q, k=k, dtype=q.dtype)
        q, k = self.policy.turn(q, k, positions)
        scale = self.policy.score_scale
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return self.out(out.transpose(1, 2).flatten(-2))


def block(name: str) -> Block:
    torch.manual_seed(0)
    return Block(POLICIES[name]())


def given(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, tokens, WIDTH, generator=torch.Generator().manual_seed(1)), torch.arange(100, 100 + tokens)


@EVERY
class TestLifecycle:
    """What a training script does with a model."""

    def test_compiles_at_most_twice_for_all_lengths(self, name):
        torch._dynamo.reset()
        model, counter = block(name), torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
        for tokens in (8, 9, 33, 64):
            x, positions = given(tokens)
            torch.testing.assert_close(compiled(x, positions), model(x, positions), rtol=1e-4, atol=1e-5)
        assert counter.frame_count <= 2

    def test_exports_with_a_length_that_varies(self, name):
        model, tokens = block(name), torch.export.Dim("tokens", min=2, max=512)
        exported = torch.export.export(model, given(9), dynamic_shapes=({1: tokens}, {0: tokens}))
        x, positions = given(24)
        torch.testing.assert_close(exported.module()(x, positions), model(x, positions), rtol=1e-4, atol=1e-5)

    def test_trains_in_half_precision_after_inference(self, name):
        model = block(name).bfloat16()
        x, positions = given(9)
        with torch.inference_mode():
            model(x.bfloat16(), positions)
        model(x.bfloat16(), positions).square().sum().backward()
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None, key
            assert parameter.grad.isfinite().all(), key

    def test_state_dict_has_what_is_learned(self, name):
        model = block(name)
        assert set(model.state_dict()) == {key for key, _ in model.named_parameters()}
        other = block(name)
        other.load_state_dict(model.state_dict())

    def test_meta_then_materialised(self, name):
        with torch.device("meta"):
            model = Block(POLICIES[name]())
        model = model.to_empty(device="cpu")
        model.policy.reset_parameters()
        for linear in (model.qkv, model.out):
            linear.reset_parameters()
        assert model(*given(9)).isfinite().all()
