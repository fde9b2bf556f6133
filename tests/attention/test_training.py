"""Training through the attention module: checkpoints, autocast in bfloat16, accelerate."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from theodolite.attention import Attention, attend_by_policy, attend_plainly
from theodolite.encodings import (
    ALiBi,
    CoPE,
    Fire,
    ForgettingGate,
    Kerple,
    LearnedBase,
    LogN,
    Policy,
    RotaryEmbedding,
    SharedTables,
    ShawBias,
    T5Bias,
)
from theodolite.plan import Mask, Rotary
from theodolite.positions import SelfExtend

WIDTH, HEADS, DIM = 64, 4, 16
# Past one block of queries by distance (512), and two of those made one by one (256).
TOKENS = 531
# bfloat16 keeps 8 bits of a number: a rounding is off by half a step, 2**-8 of it at most.
ROUNDING = 2.0**-8
PLAN = Rotary(head_dim=DIM, rope_theta=1e4)


def rope() -> RotaryEmbedding:
    return RotaryEmbedding(PLAN)


CASES: dict[str, tuple[Callable[[], Policy], dict[str, Any]]] = {
    "nope": (Policy, {}),
    "rotary": (lambda: Policy(rotate=rope()), {"bias": True, "out_bias": True}),
    "rotary, grouped": (lambda: Policy(rotate=rope()), {"num_kv_heads": 2}),
    "rotary, normed": (lambda: Policy(rotate=rope()), {"num_kv_heads": 1, "qk_norm": 1e-6}),
    "learned base": (lambda: Policy(rotate=LearnedBase(PLAN)), {}),
    "alibi": (lambda: Policy(bias=ALiBi(HEADS)), {"num_kv_heads": 2}),
    "t5": (lambda: Policy(bias=T5Bias(HEADS, bidirectional=False, std=1.0)), {"num_kv_heads": 2}),
    "t5, normed": (lambda: Policy(bias=T5Bias(HEADS, bidirectional=False)), {"qk_norm": 1e-6}),
    "kerple": (lambda: Policy(bias=Kerple(HEADS)), {}),
    "fire": (lambda: Policy(bias=Fire(HEADS)), {"num_kv_heads": 2, "qk_norm": 1e-6}),
    "gate": (lambda: Policy(bias=ForgettingGate(HEADS, WIDTH)), {}),
    "cope": (lambda: Policy(bias=CoPE(HEADS, DIM, max_positions=32)), {}),
    "shaw": (lambda: Policy(bias=ShawBias(HEADS, DIM, 5)), {}),
    "window": (lambda: Policy(rotate=rope(), mask=Mask(sliding_window=100)), {"num_kv_heads": 2}),
    "sinks": (lambda: Policy(rotate=rope(), mask=Mask(sliding_window=100, sinks=True)), {"num_kv_heads": 2}),
    "log-n": (lambda: Policy(rotate=rope(), scale=LogN(40)), {"qk_norm": 1e-6}),
    "mapped": (lambda: Policy(rotate=rope()), {"relative": SelfExtend(window=64, group_size=4)}),
}
every_case = pytest.mark.parametrize("case", CASES)


def made(case: str) -> Attention:
    torch.manual_seed(0)
    policy, options = CASES[case]
    attention = Attention(WIDTH, HEADS, policy(), **options)
    for name, parameter in attention.policy.named_parameters():
        if "weight" in name and "t5" in case:
            nn.init.normal_(parameter)
    if attention.sinks is not None:
        nn.init.normal_(attention.sinks)
    return attention


def inputs(tokens: int = TOKENS, seed: int = 1) -> torch.Tensor:
    return torch.randn(2, tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def autocast(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def loss_of(out: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient differs by token and channel."""
    weight = torch.cos(torch.arange(out.numel(), dtype=torch.float32)).view_as(out)
    return (out.to(torch.promote_types(out.dtype, torch.float32)) * weight).sum()


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    assert all(bool(one.isfinite().all()) and bool(one.any()) for one in expected)
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class TestCheckpointsChangeNoGradient:
    """What is worked out twice is worked out alike: a gradient that differs trains another model, without a word."""

    @every_case
    @pytest.mark.parametrize("lowered", [False, True], ids=["float32", "autocast"])
    def test_two_layers(self, case: str, lowered: bool) -> None:
        layers = nn.ModuleList([made(case), made(case)])
        positions = torch.arange(7, 7 + TOKENS)
        calls: list[int] = []
        layers[0].register_forward_pre_hook(lambda *_: calls.append(1))

        def block(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            # The sum inside: gradients of x are then added up in the same order.
            return x + layer(x, positions)

        def gradients(reentrant: bool | None) -> list[torch.Tensor]:
            x = inputs().requires_grad_()
            out = x
            with autocast(lowered):
                for layer in layers:
                    again = reentrant is not None
                    out = checkpoint(block, layer, out, use_reentrant=reentrant) if again else block(layer, out)
            wanted = [x, *layers.parameters()]
            for one in wanted:
                one.grad = None
            loss_of(out).backward()
            return [one.grad for one in wanted]

        expected = gradients(None)
        assert len(calls) == 1
        assert equal(gradients(False), expected)
        assert len(calls) == 3
        # The older kind first runs without gradients, for which torch may take another kernel: alike but for roundings,
        # of sums over the tokens in float32, or six to a layer, forward and back, in bfloat16.
        bound = ROUNDING * (6 * 2 * 2) ** 0.5 if lowered else TOKENS * 2.0**-24
        found, whole = (torch.cat([one.flatten() for one in all_]).double() for all_ in (gradients(True), expected))
        assert (found - whole).norm() < bound * whole.norm()
        assert len(calls) == 5

    @pytest.mark.parametrize("case", ["rotary, grouped", "learned base"])
    def test_tables_that_layers_share(self, case: str) -> None:
        layers = nn.ModuleList([made(case), made(case)])
        layers[1].policy.rotate = layers[0].policy.rotate
        positions = torch.arange(TOKENS)

        def gradients(again: bool) -> list[torch.Tensor]:
            x = inputs().requires_grad_()
            tables = SharedTables(positions, prepare=[layers])
            out = x
            for layer in layers:
                if again:
                    out = out + checkpoint(layer, out, positions, tables=tables, use_reentrant=False)
                else:
                    out = out + layer(out, positions, tables=tables)
            return list(torch.autograd.grad(loss_of(out), [x, *layers.parameters()]))

        assert equal(gradients(True), gradients(False))


@torch.no_grad()
def first_order_bound(attention: Attention, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The output in float64, every pair written out, and the error that autocast may have, of its root mean square.

    Six roundings stand in a row on the way of a value (x, two weights, v, attention's output, the result), and ten on
    that of a score (x, weights, product, norm, turn, factor, for q or k), which act by the size of the score.
    Independent, they add up in squares.
    """
    exact, x = copy.deepcopy(attention).double(), x.double()
    q, k, v = exact._project(x, x)
    out = attend_plainly(exact.policy, q, k, v, positions, x=x, sinks=exact.sinks)
    scale = DIM**-0.5 if exact.policy.score_scale is None else exact.policy.score_scale
    if exact.policy.scale is not None:
        q = exact.policy.scale(q, positions)
    scores = float(scale * q.square().mean().sqrt() * k.square().mean().sqrt() * DIM**0.5)
    return exact.o_proj(out.transpose(1, 2).flatten(2)), ROUNDING * (6 + 10 * scores**2) ** 0.5


def relative_error(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.double() - true).square().mean().sqrt() / true.square().mean().sqrt())


class TestAutocast:
    """bfloat16 is for products of matrices: positions, masks and biases stay as exact as without it."""

    @pytest.mark.parametrize("case", [case for case in CASES if case != "mapped"])
    @pytest.mark.parametrize("first", [0, 2**20 + 1])
    def test_near_the_exact_result(self, case: str, first: int) -> None:
        attention, x, positions = made(case), inputs(), torch.arange(first, first + TOKENS)
        # Where distances alone count, the judge stands at the start.
        counts = case in ("fire", "log-n")
        true, bound = first_order_bound(attention, x, positions if counts else torch.arange(TOKENS))
        with autocast():
            out = attention(x, positions)
        assert out.dtype == torch.bfloat16
        assert relative_error(out.detach(), true) < bound

    def test_tables_are_those_without_it(self) -> None:
        positions = torch.arange(2**20 + 1, 2**20 + 1 + TOKENS)
        with autocast():
            cos, sin = SharedTables(positions).of(rope())
        angles = positions.double()[:, None] * 1e4 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
        for table, true in ((cos, angles.cos()), (sin, angles.sin())):
            assert table.dtype == torch.float32
            assert (table.reshape(true.shape).double() - true).abs().max() < 6e-8

    @every_case
    def test_gradients_are_whole_and_wide(self, case: str) -> None:
        attention, x = made(case), inputs().requires_grad_()
        with autocast():
            out = attention(x, torch.arange(TOKENS))
        loss_of(out).backward()
        for name, one in (("x", x), *attention.named_parameters()):
            assert one.grad is not None, name
            assert one.grad.dtype == torch.float32, name
            assert bool(one.grad.isfinite().all()), name
            assert bool(one.grad.any()), name

    @pytest.mark.parametrize("case", [case for case in CASES if case != "mapped"])
    def test_it_has_no_say_in_what_is_bfloat16_already(self, case: str) -> None:
        attention, positions = made(case), torch.arange(TOKENS)
        with torch.no_grad():
            x, q, k, v = (one.bfloat16() for one in (inputs(), *attention._project(inputs(), inputs())))
        learned = [p for p in (*attention.policy.parameters(), attention.sinks) if p is not None]

        def found(lowered: bool, backward_too: bool = False) -> list[torch.Tensor]:
            given = [one.clone().requires_grad_() for one in (q, k, v)]
            with autocast(lowered):
                out = attend_by_policy(attention.policy, *given, positions, x=x, sinks=attention.sinks)
            with autocast(backward_too):
                grads = torch.autograd.grad(loss_of(out), [*given, *learned])
            return [out.detach(), *grads]

        expected = found(False)
        assert equal(found(True), expected)
        if attention.path(inputs(), positions).name != "blocks":
            # A backward inside of autocast lowers the products of torch, and no work of ours.
            assert equal(found(True, backward_too=True), expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("sinks", [False, True])
    def test_a_bias_is_not_rounded(self, sinks: bool, dtype: torch.dtype) -> None:
        # A number that all keys share leaves a softmax as it is; in bfloat16 it would leave nothing of the bias.
        plain, shifted = (Policy(bias=T5Bias(HEADS, bidirectional=False), mask=Mask(sinks=sinks)) for _ in range(2))
        with torch.no_grad():
            plain.bias.weight.normal_(generator=torch.Generator().manual_seed(0))
            shifted.bias.weight.copy_(plain.bias.weight + 1000)
        q, k, v = (
            0.1 * torch.randn(2, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(i)) for i in (1, 2, 3)
        )
        outs = []
        with autocast():
            for policy, sink in ((plain, 0.0), (shifted, 1000.0)):
                logits = torch.full((HEADS,), sink) if sinks else None
                given = q.to(dtype), k.to(dtype), v.to(dtype), torch.arange(TOKENS)
                outs.append(attend_by_policy(policy, *given, sinks=logits).detach().double())
        # At 1000 float32 has steps of 6e-5; an output that lies between two of bfloat16 may go either way.
        assert ((outs[1] - outs[0]).abs() <= 2 * ROUNDING * outs[0].abs() + 1e-4).all()

    def test_a_norm_is_worked_out_in_the_width_of_its_weight(self) -> None:
        attention, x = made("rotary, normed"), inputs(9)
        with torch.no_grad():
            attention.q_norm.weight.normal_(generator=torch.Generator().manual_seed(0))
            with autocast():
                normed = attention._project(x, x)[0]
            flat = (x.bfloat16() @ attention.q_proj.weight.bfloat16().T).double().view(2, 9, HEADS, DIM)
        true = flat / (flat.square().mean(-1, keepdim=True) + 1e-6).sqrt() * attention.q_norm.weight.double()
        assert normed.dtype == torch.bfloat16
        # Rounded once at the end; before, float32 is off by less than a hundredth of that.
        assert ((normed.transpose(1, 2) - true).abs() <= 1.01 * ROUNDING * true.abs()).all()


class Toy(nn.Module):
    """Two layers of attention between an embedding and its transpose; forward gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList([made("rotary, normed"), made("t5"), made("sinks")])
        self.checkpointed = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, positions = self.embed(ids), torch.arange(ids.shape[1])
        for layer in self.layers:
            more = checkpoint(layer, x, positions, use_reentrant=False) if self.checkpointed else layer(x, positions)
            x = x + more
        logits = x[:, :-1] @ self.embed.weight.T
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


@pytest.fixture
def accelerator() -> Iterator[Any]:
    """One of its own, for accelerate keeps its settings for the whole process."""
    accelerate = pytest.importorskip("accelerate")
    state = accelerate.state
    state.AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


class TestAccelerate:
    """What accelerate wraps trains as plain torch does under the same autocast."""

    @pytest.mark.parametrize("checkpointed", [False, True])
    def test_a_step_over_two_batches(self, accelerator: Any, checkpointed: bool) -> None:
        plain, wrapped = Toy(), Toy()
        wrapped.checkpointed = checkpointed
        batches = [torch.randint(50, (2, 67), generator=torch.Generator().manual_seed(i)) for i in (0, 1)]

        optimiser = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        for ids in batches:
            with autocast():
                loss = plain(ids)
            (loss / 2).backward()
        optimiser.step()

        model, optimiser = accelerator.prepare(wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-2))
        for ids in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(ids))
                optimiser.step()
                optimiser.zero_grad()
        trained = dict(accelerator.unwrap_model(model).named_parameters())
        before = dict(Toy().named_parameters())
        for name, parameter in plain.named_parameters():
            assert torch.equal(trained[name], parameter), name
            assert not torch.equal(parameter, before[name]), name
