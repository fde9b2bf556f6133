"""The forget gate: sums of logarithms that stay right at any length, whole, in pieces, packed or padded."""

from __future__ import annotations

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.profiler import ProfilerActivity, profile

from theodolite.encodings.bias.forgetting import ForgettingGate

HEADS, WIDTH = 3, 6
UNIT = 2.0**-24
LONG = 100_000


def gate(dtype=torch.float32, offset=0.5, heads=HEADS) -> ForgettingGate:
    """Gates that differ by head and by token: f from about 0.2 to 0.9."""
    made = ForgettingGate(heads, WIDTH).to(dtype)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        made.weight.copy_(0.3 * torch.randn(heads, WIDTH, generator=generator))
        made.bias.copy_(offset + torch.linspace(-0.5, 0.5, heads))
    return made


def layer_input(batch=2, tokens=21, dtype=torch.float32):
    return torch.randn(batch, tokens, WIDTH, generator=torch.Generator().manual_seed(tokens)).to(dtype)


def log_gates(made: ForgettingGate, x) -> torch.Tensor:
    """ln sigmoid of the gate's own float32 sums, (B, H, S), float64, by another road: -ln(1 + e^-z)."""
    z = torch.nn.functional.linear(x.float(), made.weight.float(), made.bias.float()).double()
    return -torch.log1p(torch.exp(-z)).transpose(1, 2)


def bound(difference: float, largest: float, distance: int) -> float:
    return 2**-22 * abs(difference) + (2**-45 + 2**-53 * distance) * largest


def dense(made, state, q=None, **options):
    tokens = state.shape[2]
    q = slice(0, tokens) if q is None else q
    positions = torch.arange(tokens)
    return made.dense(positions[q], positions, q_state=state[:, :, q], k_state=state, **options)


def over_pairs(mod, batch, heads, q_tokens, k_tokens):
    """A score_mod over all pairs as FlexAttention runs it: vectorised over scalars."""
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        mod = torch.vmap(mod, in_dims=(0, *dims))
    scores = torch.ones(batch, heads, q_tokens, k_tokens)
    return mod(scores, *(torch.arange(n) for n in (batch, heads, q_tokens, k_tokens))) - 1


class TestFormula:
    """ln of the product of the gates after the key, up to the query's own (2503.02130, eq. 5)."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_equals_the_printed_one(self, dtype):
        made, x = gate(), layer_input(dtype=dtype)
        logs = log_gates(made, x)
        bias = dense(made, made.state(x))
        assert bias.shape == (2, HEADS, 21, 21)
        assert bias.dtype == torch.float32
        largest = logs.sum(-1).abs().max().item()
        for b, h, m, n in ((0, 0, 20, 0), (1, 2, 7, 3), (1, 0, 5, 4), (0, 1, 13, 13), (1, 1, 20, 19)):
            expected = math.fsum(logs[b, h, n + 1 : m + 1].tolist())
            assert abs(bias[b, h, m, n].item() - expected) <= bound(expected, largest, m - n)

    def test_equals_the_running_sum_of_the_kernels(self):
        """flash-linear-attention's naive_forgetting_attn: float32 gates, their cumsum, its differences."""
        made, x = gate(), layer_input()
        summed = log_gates(made, x).float().cumsum(-1)
        theirs = summed[..., None] - summed[:, :, None]
        assert (dense(made, made.state(x)) - theirs).abs().max() <= 21 * 4 * UNIT * summed.abs().max()

    def test_a_constant_gate_is_alibi(self):
        slopes = torch.tensor([2.0 ** (-8 * h / HEADS) for h in range(1, HEADS + 1)], dtype=torch.float64)
        made = ForgettingGate(HEADS, WIDTH).double()
        with torch.no_grad():
            made.weight.zero_()
            # sigmoid(b) = e^-s.
            made.bias.copy_(-torch.log(torch.expm1(slopes)))
        bias = dense(made, made.state(layer_input(dtype=torch.float64)))[0]
        distance = torch.arange(21)[:, None] - torch.arange(21)
        assert bias.dtype == torch.float64
        # 21 additions, and a logarithm of an exponential of size 1.
        assert (bias + slopes[:, None, None] * distance).abs().max() <= 21 * 32 * 2**-53

    def test_starts_at_gates_of_a_half(self):
        made = ForgettingGate(2, 4)
        state = made.state(torch.zeros(1, 3, 4))
        assert state.double().sum(-1)[0, 0].tolist() == pytest.approx([k * math.log(0.5) for k in (1, 2, 3)], abs=1e-14)
        assert list(made.state_dict()) == ["weight", "bias"]


@pytest.fixture(scope="module")
def long():
    made, x = gate(offset=0.0), layer_input(1, LONG)
    with torch.no_grad():
        return made, made.state(x), log_gates(made, x)


class TestExactAtAnyLength:
    """At 100 000 tokens the sum is -69 000 and one float32 of it is 4e-3 off; the bias is not."""

    @pytest.mark.parametrize("distance", [0, 1, 2, 9, 63, 1000, 99_990])
    def test_within_the_bound(self, long, distance):
        made, state, logs = long
        m, largest = LONG - 3, logs.sum(-1).abs().max().item()
        assert largest > 69_000
        q, k = torch.tensor([m]), torch.tensor([m - distance])
        bias = made.dense(q, k, q_state=state[:, :, q], k_state=state[:, :, k])
        for head in range(HEADS):
            expected = math.fsum(logs[0, head, m - distance + 1 : m + 1].tolist())
            assert abs(bias[0, head, 0, 0].item() - expected) <= bound(expected, largest, distance)

    def test_one_float32_would_not_do(self, long):
        _, state, logs = long
        near = state[..., 0].diff()[0] - logs[0, :, 1:].float()
        assert near.abs().max() > 3e-3
        both = state.double().sum(-1).diff()[0] - logs[0, :, 1:]
        assert both.abs().max() < 1e-8

    def test_gates_that_forget_almost_nothing(self):
        made = gate(offset=16.0)
        x = layer_input(1, 5000)
        logs = log_gates(made, x)
        assert logs.abs().max() < 4e-6
        bias = dense(made, made.state(x), slice(4990, 5000))
        for m, n in ((4995, 4994), (4999, 0)):
            expected = math.fsum(logs[0, 1, n + 1 : m + 1].tolist())
            assert abs(bias[0, 1, m - 4990, n].item() - expected) <= 2**-22 * abs(expected)


class TestPieces:
    """The state of the last token is all that the next one needs; where the pieces are cut does not show."""

    @pytest.mark.parametrize("cuts", [[1] * 21, [5, 16], [20, 1], [7, 7, 7]])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_pieces_make_the_whole(self, cuts, dtype):
        made, x = gate(dtype, offset=-3.0), layer_input(dtype=dtype)
        whole, states, last = made.state(x), [], None
        for piece in x.split(cuts, 1):
            states.append(made.state(piece, last))
            last = states[-1][:, :, -1]
        joined = torch.cat(states, 2)
        # Each piece adds the pair's rounding, and the projection of fewer rows may round otherwise.
        unit = UNIT if dtype == torch.float32 else 2**-53
        tolerance = 21 * 4 * WIDTH * unit * log_gates(made, x).abs().max()
        assert joined.dtype == dtype
        assert (joined.double().sum(-1) - whole.double().sum(-1)).abs().max() <= tolerance
        assert (dense(made, joined) - dense(made, whole)).abs().max() <= 2 * tolerance

    def test_the_sum_itself_loses_nothing(self):
        """The same gates in every piece: 2000 steps of decoding against one pass, at the pair's own precision."""
        made = gate(offset=0.0)
        with torch.no_grad():
            made.weight.zero_()
        x = layer_input(1, 2000)
        whole, last = made.state(x), None
        for token in range(2000):
            last = made.state(x[:, token : token + 1], last)[:, :, -1]
        total = whole[:, :, -1].double().sum(-1)
        # Each step rounds the pair to 48 bits, and the sum in one pass to 53.
        assert (last.double().sum(-1) - total).abs().max() <= 2000 * 2**-48 * total.abs().max()

    def test_a_query_of_a_step_against_the_cache(self):
        made, x = gate(), layer_input()
        cache = made.state(x[:, :20])
        new = made.state(x[:, 20:], cache[:, :, -1])
        keys = torch.cat((cache, new), 2)
        step = made.dense(torch.tensor([20]), torch.arange(21), q_state=new, k_state=keys)
        whole = dense(made, made.state(x), slice(20, 21))
        assert (step - whole).abs().max() <= 21 * 4 * WIDTH * UNIT

    @pytest.mark.parametrize("before", [1, 5, 13])
    def test_packed_behind_other_documents_or_padding(self, before):
        """What came before cancels: no restart is needed, and one does no harm."""
        made, x = gate(), layer_input()
        alone = dense(made, made.state(x[:, before:]))
        packed = dense(made, made.state(x))[:, :, before:, before:]
        causal = torch.ones(alone.shape[-2:], dtype=torch.bool).tril()
        largest = log_gates(made, x).sum(-1).abs().max()
        assert ((packed - alone) * causal).abs().max() <= (2**-21 + 4 * WIDTH * UNIT) * largest
        restarted = torch.cat((made.state(x[:, :before]), made.state(x[:, before:])), 2)
        again = dense(made, restarted)[:, :, before:, before:]
        assert ((again - alone) * causal).abs().max() <= 2 * UNIT * largest


class TestScoreMod:
    """The function for FlexAttention gives the numbers of the tensor, and holds two numbers a token."""

    def test_equals_dense(self):
        made, x = gate(), layer_input()
        state = made.state(x)
        mod = made.score_mod(torch.arange(19, 21), torch.arange(21), q_state=state[:, :, 19:], k_state=state)
        found, expected = over_pairs(mod, 2, HEADS, 2, 21), dense(made, state, slice(19, 21))
        # Adding it to a score of 1 and taking that away rounds twice.
        assert (found - expected).abs().max() <= 2 * UNIT * (1 + expected.abs().max())

    def test_holds_no_pairs(self):
        made, state = gate(), gate().state(layer_input())
        mod = made.score_mod(torch.arange(21), torch.arange(21), q_state=state, k_state=state)
        held = [cell.cell_contents for cell in mod.__closure__ if isinstance(cell.cell_contents, torch.Tensor)]
        # FlexAttention's compiler refuses views of one buffer.
        assert len({tensor.untyped_storage().data_ptr() for tensor in held}) == 4
        assert all(tensor.is_contiguous() for tensor in held)
        assert max(tensor.numel() for tensor in held) == 2 * HEADS * 21

    def test_one_state_for_a_batch(self):
        made, state = gate(), gate().state(layer_input(batch=1))
        mod = made.score_mod(torch.arange(21), torch.arange(21), q_state=state, k_state=state)
        found = over_pairs(mod, 2, HEADS, 21, 21)
        assert torch.equal(found[0], found[1])
        assert made.slopes() is None


class TestGradients:
    """The rounded part carries the whole gradient."""

    def test_gradcheck(self):
        made, x = gate(torch.float64), layer_input(2, 5, torch.float64).requires_grad_()
        previous = torch.randn(2, HEADS, 2, dtype=torch.float64, requires_grad=True)

        def run(x, weight, bias, previous):
            with torch.nn.utils.stateless._reparametrize_module(made, {"weight": weight, "bias": bias}):
                state = made.state(x, previous)
                return made.dense(torch.arange(5), torch.arange(5), q_state=state, k_state=state), state.sum(-1)

        assert torch.autograd.gradcheck(run, (x, made.weight, made.bias, previous))

    def test_float32_gives_the_gradients_of_float64(self):
        weight = torch.randn(2, HEADS, 21, 21, dtype=torch.float64)
        grads = []
        for dtype in (torch.float32, torch.float64):
            made = gate(dtype)
            (dense(made, made.state(layer_input().to(dtype))) * weight.to(dtype)).sum().backward()
            grads.append(torch.cat((made.weight.grad.double().flatten(), made.bias.grad.double())))
        # Sums of 2 * 21 * 21 weights times at most 21 tokens.
        assert (grads[0] - grads[1]).abs().max() <= 2 * 21 * 21 * 21 * UNIT * weight.abs().max()
        assert grads[1].abs().min() > 0


class TestMemory:
    """No form holds more than its own output, there and back."""

    @staticmethod
    def peak(run) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            kept = run()
        changes = [(e.start_ns(), e.nbytes()) for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
        held, most = 0, 0
        for _, size in sorted(changes, key=lambda change: change[0]):
            held += size
            most = max(most, held)
        del kept
        return most

    def test_forward_and_backward(self):
        made, positions = gate(), torch.arange(600)
        state = made.state(layer_input(2, 600)).detach().requires_grad_()
        output = 2 * HEADS * 600 * 600 * 4
        kept = []

        def forward():
            kept.append(made.dense(positions, positions, q_state=state, k_state=state))

        assert self.peak(forward) <= 1.05 * output
        grad = torch.ones_like(kept[0])
        assert self.peak(lambda: kept[0].backward(grad)) <= 1.05 * output


class TestBehaviour:
    """Casts, compilers, frameworks and ranks."""

    def test_under_autocast(self):
        made, x = gate(), layer_input()
        expected = made.state(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = made.state(x)
            bias = dense(made, inside)
        assert torch.equal(inside, expected)
        assert torch.equal(bias, dense(made, expected))

    @pytest.mark.parametrize("cast", ["half", "bfloat16"])
    def test_weights_of_half_precision(self, cast):
        made, x = gate(), layer_input()
        small = getattr(gate(), cast)()
        made.load_state_dict(small.state_dict())
        assert small.weight.dtype != torch.float32
        assert torch.equal(small.state(x), made.state(x))

    def test_from_the_meta_device(self):
        with torch.device("meta"):
            made = ForgettingGate(HEADS, WIDTH)
        assert made.state(layer_input().to("meta")).shape == (2, HEADS, 21, 2)
        made.to_empty(device="cpu")
        torch.manual_seed(0)
        made.reset_parameters()
        torch.manual_seed(0)
        for one, other in zip(made.parameters(), ForgettingGate(HEADS, WIDTH).parameters(), strict=True):
            assert torch.equal(one, other)
        assert made.weight.std().item() == pytest.approx(0.02, rel=0.5)

    def test_heads_of_a_rank(self):
        made, x = gate(heads=4), layer_input()
        whole, bias = made.state(x), dense(made, made.state(x))
        for start in (0, 2):
            mine = slice(start, start + 2)
            first = made.state(x[:, :9], heads=mine)
            state = torch.cat((first, made.state(x[:, 9:], first[:, :, -1], heads=mine)), 2)
            assert torch.allclose(state.sum(-1), whole[:, mine].sum(-1), rtol=21 * 8 * UNIT, atol=0)
            assert torch.equal(dense(made, whole[:, mine], heads=mine), bias[:, mine])

    def test_inference_then_training(self):
        made, x = gate(), layer_input()
        with torch.inference_mode():
            first = dense(made, made.state(x))
        out = dense(made, made.state(x))
        out.sum().backward()
        assert torch.equal(out, first)
        assert made.weight.grad.isfinite().all()

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = gate()

        def forward(self, x, positions):
            state = self.gate.state(x)
            return self.gate.dense(positions, positions, q_state=state, k_state=state)

    def test_compiled_for_any_length(self):
        torch._dynamo.reset()
        layer, counter = self.Layer(), CompileCounter()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
        for tokens in (8, 9, 33, 64):
            x, positions = layer_input(tokens=tokens), torch.arange(tokens)
            assert torch.equal(compiled(x, positions), layer(x, positions))
        assert counter.frame_count <= 2

    # The compiler's own imports use what newer Pythons deprecate.
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_a_compiler_keeps_the_pair(self):
        """Compilers drop a cast down and up again, and with it all that the second number is for."""
        torch._dynamo.reset()
        made, x = gate(offset=-4.0), layer_input(1, 3000)
        compiled = torch.compile(made.state, fullgraph=True)
        with torch.no_grad():
            found, expected = (state.double().sum(-1) for state in (compiled(x), made.state(x)))
        logs = log_gates(made, x)
        # The compiler's own projection and logarithm may differ by units of float32, in each of 3000 gates.
        difference = (found.diff() - expected.diff()).abs().max()
        assert difference <= 8 * WIDTH * UNIT * logs.abs().max()
        assert difference < 0.1 * expected.abs().max() * UNIT

    def test_exported_for_any_length(self):
        layer, tokens = self.Layer(), torch.export.Dim("tokens", min=2, max=4096)
        shapes = {"x": {1: tokens}, "positions": {0: tokens}}
        exported = torch.export.export(layer, (layer_input(tokens=16), torch.arange(16)), dynamic_shapes=shapes)
        for length in (16, 61):
            x, positions = layer_input(tokens=length), torch.arange(length)
            assert torch.equal(exported.module()(x, positions), layer(x, positions))


class TestRefusals:
    """What cannot work is said by name."""

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda g: ForgettingGate(2, 0), "hidden_size: got 0; it must be at least 1"),
            (lambda g: ForgettingGate(0, 4), "num_heads: got 0; it must be a whole number of at least 1"),
            (lambda g: g.state(torch.zeros(2, 3, 5)), r"x: got torch.float32 of shape \(2, 3, 5\); .* hidden_size = 6"),
            (lambda g: g.state(torch.zeros(2, 3, 6).long()), "x: got torch.int64 of shape"),
            (
                lambda g: g.state(torch.zeros(2, 3, 6), torch.zeros(2, 3)),
                r"previous: got shape \(2, 3\); it must be \(B, H, 2\) = \(2, 3, 2\)",
            ),
            (
                lambda g: g.dense(torch.arange(3), torch.arange(3), k_state=torch.zeros(1, 3, 3, 2)),
                "q_state: got None; ForgettingGate reads q_state, k_state",
            ),
            (
                lambda g: dense(g, torch.zeros(1, 3, 4)[..., None]),
                r"q_state: got shape \(1, 3, 4, 1\); it must be \(B, H, S, 2\) = \(B, 3, 4, 2\)",
            ),
            (
                lambda g: dense(g, torch.zeros(1, 3, 4, 2), heads=slice(0, 2)),
                r"q_state: got shape \(1, 3, 4, 2\); it must be \(B, H, S, 2\) = \(B, 2, 4, 2\)",
            ),
        ],
    )
    def test_said(self, call, message):
        with pytest.raises(ValueError, match=message):
            call(gate())
