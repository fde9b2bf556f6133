"""The attention module: any policy, any kind of heads, positions given."""

from __future__ import annotations

import pytest
import torch

from theodolite.attention import Attention, attend_plainly
from theodolite.encodings import ALiBi, ForgettingGate, Policy, RotaryEmbedding, SharedTables, T5Bias
from theodolite.plan import Mask, Rotary


def rope(head_dim: int = 16) -> RotaryEmbedding:
    return RotaryEmbedding(Rotary(head_dim=head_dim, rope_theta=1e4))


def inputs(tokens: int = 9, width: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, tokens, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(attention: Attention, x, positions, context=None, context_positions=None, **options):
    """Projections written out, heads parted by reshaping, and every pair of tokens."""
    context = x if context is None else context

    def heads(layer, source, count):
        flat = source @ layer.weight.T + (0 if layer.bias is None else layer.bias)
        return flat.reshape(*source.shape[:2], count, attention.head_dim)

    q = heads(attention.q_proj, x, attention.num_heads)
    k, v = (heads(layer, context, attention.num_kv_heads) for layer in (attention.k_proj, attention.v_proj))
    if attention.q_norm is not None:
        q, k = (
            y / (y.square().mean(-1, keepdim=True) + attention.q_norm.eps).sqrt() * norm.weight
            for y, norm in ((q, attention.q_norm), (k, attention.k_norm))
        )
    q, k, v = (y.permute(0, 2, 1, 3) for y in (q, k, v))
    out = attend_plainly(attention.policy, q, k, v, positions, context_positions, x=x, sinks=attention.sinks, **options)
    out = out.permute(0, 2, 1, 3).reshape(*x.shape[:2], -1) @ attention.o_proj.weight.T
    return out if attention.o_proj.bias is None else out + attention.o_proj.bias


def randomised(attention: Attention) -> Attention:
    torch.manual_seed(0)
    for parameter in attention.double().parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return attention


class TestAttention:
    """What it gives is what the definition gives."""

    @pytest.mark.parametrize(
        ("policy", "options"),
        [
            (lambda: Policy(rotate=rope()), {}),
            (lambda: Policy(rotate=rope()), {"num_kv_heads": 2, "bias": True, "out_bias": True}),
            (lambda: Policy(rotate=rope(32)), {"num_kv_heads": 1, "head_dim": 32, "qk_norm": 1e-6}),
            (lambda: Policy(bias=ALiBi(4)), {"num_kv_heads": 2}),
            (lambda: Policy(bias=T5Bias(4, bidirectional=True), mask=Mask(causal=False)), {"qk_norm": 1e-5}),
            (lambda: Policy(rotate=rope(), mask=Mask(sliding_window=4, sinks=True)), {}),
            (lambda: Policy(bias=ForgettingGate(4, 64)), {}),
        ],
    )
    def test_equals_the_definition(self, policy, options):
        attention = randomised(Attention(64, 4, policy(), **options))
        x, positions = inputs(), torch.arange(3, 12)
        out = attention(x, positions)
        assert out.shape == x.shape
        assert (out - by_hand(attention, x, positions)).abs().max() < 1e-11
        assert (out - attention(x, positions, tables=SharedTables(positions))).abs().max() == 0

    def test_attends_to_a_context(self):
        policy = Policy(rotate=rope(), mask=Mask(causal=False))
        attention = randomised(Attention(64, 4, policy, context_size=40))
        x, context = inputs(), inputs(13, 40, seed=1)
        given = torch.arange(9), {"context": context, "context_positions": torch.arange(5, 18)}
        out = attention(x, given[0], **given[1])
        assert (out - by_hand(attention, x, given[0], *given[1].values())).abs().max() < 1e-11
        assert (out - attention(x, given[0], context=context, context_positions=torch.arange(6, 19))).abs().max() > 1e-3

    def test_what_is_visible(self):
        attention = randomised(Attention(64, 4, Policy(rotate=rope())))
        x, positions, visible = inputs(), torch.arange(9), torch.ones(2, 9, 9, dtype=torch.bool)
        visible[1, :, 3] = False
        out = attention(x, positions, visible=visible)
        assert (out - by_hand(attention, x, positions, visible=visible)).abs().max() < 1e-11
        assert attention.path(x, positions).name == "fused"
        assert str(attention.path(x, positions, visible=visible)) == "blocks: what is visible differs by pair"

    def test_under_autocast(self):
        attention = Attention(64, 4, Policy(rotate=rope(), bias=ALiBi(4)), num_kv_heads=2)
        x = inputs(300).float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = attention(x, torch.arange(300))
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
        exact = attention(x.detach(), torch.arange(300))
        # A few products of bfloat16 in a row, of values below 1.
        assert (out.float() - exact).abs().max() < 8 * 2.0**-8 * exact.abs().max()
        assert x.grad.isfinite().all()

    def test_checkpointed_gradients_are_equal(self):
        attention = randomised(Attention(64, 4, Policy(rotate=rope(), bias=T5Bias(4, bidirectional=False))))
        found = []
        for again in (False, True):
            x = inputs(300).requires_grad_()
            if again:
                out = torch.utils.checkpoint.checkpoint(attention, x, torch.arange(300), use_reentrant=False)
            else:
                out = attention(x, torch.arange(300))
            found.append(torch.autograd.grad(out.sin().sum(), [x, *attention.parameters()]))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class TestRefusals:
    """What cannot be built is refused by name."""

    @pytest.mark.parametrize(
        ("arguments", "options", "text"),
        [
            ((64, 4, rope()), {}, "policy: got a RotaryEmbedding; give a Policy"),
            ((64, 4, Policy()), {"num_kv_heads": 3}, "num_kv_heads: got 3; it must divide num_heads=4"),
            ((65, 4, Policy()), {}, "head_dim: got None, and hidden_size=65 is no multiple of num_heads=4"),
            ((64, 4, Policy(bias=ALiBi(8))), {}, "policy: its ALiBi has 8 heads; attention has 4"),
            ((64, 0, Policy()), {}, "num_heads: got 0; it must be at least 1"),
        ],
    )
    def test_building(self, arguments, options, text):
        with pytest.raises(ValueError, match=text):
            Attention(*arguments, **options)

    def test_a_context_without_positions(self):
        with pytest.raises(ValueError, match="context_positions: context and its positions go together"):
            Attention(64, 4, Policy())(inputs().float(), torch.arange(9), context=inputs().float())
