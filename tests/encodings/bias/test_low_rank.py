"""A few curves of the distance, mixed for each query: the printed formula, in every form and at any extent."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.profiler import ProfilerActivity, profile

from theodolite.encodings.bias import content
from theodolite.encodings.bias.low_rank import LowRankBias
from theodolite.encodings.scale.ssmax import SSMax
from theodolite.encodings.scale.temperature import LogScale

HEADS, WIDTH, RANK = 4, 6, 3
UNIT = 2.0**-24
OPTIONS = {
    "Inkling": {},
    "with a clip": {"l2_clip": 0.8},
    "Inkling 2": {"l2_clip": 0.8, "scale": LogScale(alpha=0.3, length=7)},
}


def low_rank(dtype=torch.float32, extent=9, rank=RANK, **options) -> LowRankBias:
    made = LowRankBias(HEADS, WIDTH, rank, extent=extent, **options).to(dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.5 + torch.randn(parameter.shape, generator=generator))
    return made


def layer_input(batch=2, tokens=13, dtype=torch.float32):
    return torch.randn(batch, tokens, WIDTH, generator=torch.Generator().manual_seed(tokens)).to(dtype)


def oracle(made: LowRankBias, x, q_positions, k_positions):
    """One pair at a time, float64: (W_h x_m) P[:, r], for 0 <= r < extent."""
    weight = made.weight.detach().double().view(HEADS, -1, WIDTH)
    curves = made.curves.detach().double()
    out = torch.zeros(x.shape[0], HEADS, x.shape[1], k_positions.shape[-1], dtype=torch.float64)
    for b in range(x.shape[0]):
        q_row, k_row = (p[b] if p.dim() == 2 else p for p in (q_positions, k_positions))
        for h in range(HEADS):
            for i, m in enumerate(q_row.tolist()):
                mix = weight[h] @ x[b, i].double()
                if made.l2_clip is not None:
                    mix = mix * made.mix_scale[h].detach().double()
                    mix = mix * min(1.0, made.l2_clip / (mix.norm().item() + 1e-6))
                if made.scale is not None:
                    mix = mix * made.scale.factors(torch.tensor([m])).double().item()
                for j, n in enumerate(k_row.tolist()):
                    if 0 <= m - n < made.extent:
                        out[b, h, i, j] = mix @ curves[:, m - n]
    return out


def tolerance(made: LowRankBias, x):
    """Sums of WIDTH and of rank products, each rounded; a clip and a factor besides."""
    size = made.weight.abs().sum(1).max() * x.abs().max() * made.curves.abs().sum(0).max()
    size = size * (1 if made.mix_scale is None else made.mix_scale.abs().max())
    return (2 * (WIDTH + made.rank) + 16) * UNIT * size.double().item()


def over_pairs(mod, batch, heads, q_tokens, k_tokens):
    """A score_mod over all pairs as FlexAttention runs it: vectorised over scalars."""
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        mod = torch.vmap(mod, in_dims=(0, *dims))
    scores = torch.zeros(batch, heads, q_tokens, k_tokens)
    return mod(scores, *(torch.arange(n) for n in (batch, heads, q_tokens, k_tokens)))


POSITIONS = {
    "from 0": (torch.arange(13), torch.arange(13)),
    "a step of decoding": (torch.arange(40, 53), torch.arange(20, 53)),
    "rows": (torch.stack((torch.arange(13), torch.arange(70_000, 70_013))), torch.arange(69_980, 70_013)),
    "no order": (torch.arange(13).flip(0), torch.tensor([5, 2, 9, 11, 0])),
}


class TestFormula:
    """(W_h x_m) P[:, m - n], and nothing outside the extent."""

    @pytest.mark.parametrize("options", OPTIONS)
    @pytest.mark.parametrize("positions", POSITIONS)
    def test_equals_the_printed_one(self, options, positions):
        made, x, (q, k) = low_rank(**OPTIONS[options]), layer_input(), POSITIONS[positions]
        bias = made.dense(q, k, x=x)
        assert bias.dtype == torch.float32
        assert bias.shape == (2, HEADS, 13, k.shape[-1])
        expected = oracle(made, x, q, k)
        assert expected.abs().max() > 0.1
        assert (bias.double() - expected).abs().max() <= tolerance(made, x)
        assert torch.equal(bias == 0, expected == 0)

    @pytest.mark.parametrize("extent", [1, 4, 13, 400])
    def test_any_extent(self, extent):
        made, x = low_rank(extent=extent), layer_input()
        q = k = torch.arange(3, 16)
        assert (made(q, k, x=x).double() - oracle(made, x, q, k)).abs().max() <= tolerance(made, x)

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.uint16])
    def test_any_integer(self, dtype):
        """Unsigned positions must not wrap: 3 - 4 is no 255."""
        made, x, positions = low_rank(), layer_input(), torch.arange(13)
        small = positions.to(dtype)
        assert torch.equal(made.dense(small, small, x=x), made.dense(positions, positions, x=x))

    def test_one_curve_for_each_distance_is_a_table_of_the_query(self):
        """With P the unit matrix each head reads its own number for each distance: Shaw's key term, one per head."""
        made, x = low_rank(rank=9, extent=9), layer_input()
        with torch.no_grad():
            made.curves.copy_(torch.eye(9))
        mix = torch.einsum("hre,bse->bhsr", made.weight.view(HEADS, 9, WIDTH), x)
        bias = made.dense(torch.arange(13), torch.arange(13), x=x)
        for m, n in ((12, 12), (8, 3), (4, 0)):
            assert torch.allclose(bias[:, :, m, n], mix[:, :, m, m - n], atol=tolerance(made, x), rtol=0)
        assert bias[:, :, 12, 3].abs().max() == 0

    def test_begins_small(self):
        torch.manual_seed(0)
        made = LowRankBias(16, 64, extent=512, l2_clip=1.0, scale=SSMax(16, bias=True))
        assert made.rank == 16
        assert made.curves.std().item() == pytest.approx(0.02, rel=0.05)
        assert made.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert list(made.state_dict()) == ["weight", "curves", "mix_scale", "scale.scale", "scale.bias"]
        assert list(LowRankBias(2, 4, extent=8).state_dict()) == ["weight", "curves"]


class TestDecoding:
    """A query alone has what it had among others."""

    @pytest.mark.parametrize("options", OPTIONS)
    def test_token_by_token(self, options):
        made, x, positions = low_rank(**OPTIONS[options]), layer_input(), torch.arange(30, 43)
        whole = made.dense(positions, positions, x=x)
        for i in range(13):
            step = made.dense(positions[i : i + 1], positions[: i + 1], x=x[:, i : i + 1])
            assert (step[:, :, 0] - whole[:, :, i, : i + 1]).abs().max() <= tolerance(made, x)


class TestScoreMod:
    """The function for FlexAttention gives the numbers of the tensor, and holds `rank` numbers a token."""

    @pytest.mark.parametrize("options", OPTIONS)
    @pytest.mark.parametrize("positions", POSITIONS)
    def test_equals_dense(self, options, positions):
        made, x, (q, k) = low_rank(**OPTIONS[options]), layer_input(), POSITIONS[positions]
        mine = slice(1, 3)
        mod, dense = made.score_mod(q, k, x=x, heads=mine), made.dense(q, k, x=x, heads=mine)
        found = over_pairs(mod, 2, 2, 13, k.shape[-1])
        assert (found - dense).abs().max() <= tolerance(made, x)

    def test_one_row_of_x_for_a_batch(self):
        made, q = low_rank(), torch.arange(13)
        found = over_pairs(made.score_mod(q, q, x=layer_input(1)), 2, HEADS, 13, 13)
        assert torch.equal(found[0], found[1])
        assert made.slopes() is None

    def test_holds_no_pairs(self):
        made, q = low_rank(extent=4), torch.arange(400)
        mod = made.score_mod(q, q, x=layer_input(1, 400))
        held = [cell.cell_contents for cell in mod.__closure__ if isinstance(cell.cell_contents, torch.Tensor)]
        assert max(tensor.numel() for tensor in held) == HEADS * 400 * RANK


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that a short sequence has several, the last one shorter."""
    monkeypatch.setattr(content, "_BLOCK", 2 * HEADS * 13 * 3)
    monkeypatch.setattr(content, "_PARTS", 100)


class TestGradients:
    """Everything learned, and the layer's input."""

    @pytest.mark.parametrize("options", OPTIONS)
    @pytest.mark.parametrize("rows", [False, True])
    def test_gradcheck(self, options, rows, small_blocks):
        made, x = low_rank(torch.float64, extent=3, **OPTIONS[options]), layer_input(2, 7, torch.float64)
        q = torch.stack((torch.arange(7), torch.arange(4, 11))) if rows else torch.arange(4, 11)
        names, parameters = zip(*made.named_parameters(), strict=True)

        def run(x, *parameters):
            return torch.func.functional_call(made, dict(zip(names, parameters, strict=True)), (q, q), {"x": x})

        assert torch.autograd.gradcheck(run, (x.requires_grad_(), *parameters))

    def test_a_learned_scale(self):
        made, x, q = low_rank(torch.float64, scale=SSMax(HEADS)), layer_input(dtype=torch.float64), torch.arange(13)
        made.dense(q, q, x=x).sum().backward()
        assert made.scale.scale.grad.abs().min() > 0

    def test_blocks_change_nothing(self, monkeypatch):
        made, x, q = low_rank(), layer_input(), torch.arange(13)
        whole = made.dense(q, q, x=x)
        monkeypatch.setattr(content, "_BLOCK", 1)
        monkeypatch.setattr(content, "_PARTS", 100)
        assert torch.equal(made.dense(q, q, x=x), whole)

    def test_float32_gives_the_gradients_of_float64(self):
        q, grads = torch.arange(13), []
        for dtype in (torch.float32, torch.float64):
            made = low_rank(dtype)
            made.dense(q, q, x=layer_input().to(dtype)).square().sum().backward()
            grads.append(made.curves.grad.double())
        scale = grads[1].abs().max()
        # 2 * HEADS * 13 terms for each distance, each a few products.
        assert (grads[0] - grads[1]).abs().max() <= 2 * HEADS * 13 * 16 * UNIT * scale


class TestMemory:
    """No form holds more than its own output and a block of it, whatever the extent, there and back."""

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

    @pytest.mark.parametrize("extent", [16, 20_000])
    def test_forward_and_backward(self, extent):
        tokens, kept = 700, []
        made, q = low_rank(extent=extent, rank=8), torch.arange(700)
        x, output = layer_input(2, tokens), 2 * HEADS * tokens * tokens * 4
        # A block is 1 MiB or a sixteenth of the output, and its backward holds a handful of them, and 8 curves with
        # their indices. The profile of every distance would be 2 * 4 * 700 * 20 000 numbers: 28 outputs.
        block = max(2**20, output / 16)
        assert self.peak(lambda: kept.append(made.dense(q, q, x=x))) <= output + 6 * block
        grad = torch.ones_like(kept[0])
        assert self.peak(lambda: kept[0].backward(grad)) <= 12 * block


class TestBehaviour:
    """Casts, compilers, frameworks and ranks."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_inputs_and_autocast(self, dtype):
        made, x, q = low_rank(**OPTIONS["Inkling 2"]), layer_input(dtype=dtype), torch.arange(13)
        expected = made.dense(q, q, x=x.float())
        assert torch.equal(made.dense(q, q, x=x), expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = made.dense(q, q, x=x)
        assert torch.equal(inside, expected)

    @pytest.mark.parametrize("cast", ["half", "bfloat16"])
    def test_weights_of_half_precision(self, cast):
        small, wide = getattr(low_rank(l2_clip=0.5), cast)(), low_rank(l2_clip=0.5)
        wide.load_state_dict(small.state_dict())
        x, q = layer_input(), torch.arange(13)
        assert torch.equal(small.dense(q, q, x=x), wide.dense(q, q, x=x))

    def test_float64_where_either_is(self):
        x, q = layer_input(), torch.arange(13)
        assert low_rank(torch.float64).dense(q, q, x=x).dtype == torch.float64
        assert low_rank().dense(q, q, x=x.double()).dtype == torch.float64

    def test_from_the_meta_device(self):
        options = {"l2_clip": 1.0, "scale": SSMax(HEADS)}
        with torch.device("meta"):
            made = LowRankBias(HEADS, WIDTH, extent=8, l2_clip=1.0, scale=SSMax(HEADS))
        q = torch.arange(13, device="meta")
        assert made.dense(q, q, x=layer_input().to("meta")).shape == (2, HEADS, 13, 13)
        made.to_empty(device="cpu")
        torch.manual_seed(0)
        made.reset_parameters()
        torch.manual_seed(0)
        for one, other in zip(
            made.parameters(), LowRankBias(HEADS, WIDTH, extent=8, **options).parameters(), strict=True
        ):
            assert torch.equal(one, other)

    def test_heads_of_a_rank(self):
        made, x, q = low_rank(l2_clip=0.7, scale=SSMax(HEADS)), layer_input(), torch.arange(13)
        parts = [made.dense(q, q, x=x, heads=slice(start, start + 2)) for start in (0, 2)]
        assert (torch.cat(parts, 1) - made.dense(q, q, x=x)).abs().max() <= tolerance(made, x)

    def test_inference_then_training(self):
        made, x, q = low_rank(), layer_input(), torch.arange(13)
        with torch.inference_mode():
            first = made.dense(q, q, x=x)
        out = made.dense(q, q, x=x)
        out.sum().backward()
        assert torch.equal(out, first)
        assert made.weight.grad.abs().min() > 0

    @pytest.mark.parametrize("options", OPTIONS)
    def test_compiled_for_any_length(self, options):
        torch._dynamo.reset()
        made, counter = low_rank(**OPTIONS[options]), CompileCounter()
        compiled = torch.compile(made, fullgraph=True, dynamic=True, backend=counter)
        for tokens in (8, 9, 33, 64):
            x, q = layer_input(tokens=tokens), torch.arange(tokens)
            assert (compiled(q, q, x=x) - made(q, q, x=x)).abs().max() <= tolerance(made, x)
        assert counter.frame_count <= 2

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = low_rank()

        def forward(self, positions, x):
            return self.bias.dense(positions, positions, x=x)

    def test_exported_for_any_length(self):
        layer, tokens = self.Layer(), torch.export.Dim("tokens", min=2, max=4096)
        shapes = {"positions": {0: tokens}, "x": {1: tokens}}
        exported = torch.export.export(layer, (torch.arange(16), layer_input(tokens=16)), dynamic_shapes=shapes)
        for length in (16, 61):
            q, x = torch.arange(length), layer_input(tokens=length)
            assert (exported.module()(q, x) - layer(q, x)).abs().max() <= tolerance(layer.bias, x)


class TestRefusals:
    """What cannot work is said by name."""

    Q = torch.arange(13)

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda q: LowRankBias(2, 0, extent=4), "hidden_size: got 0; it must be at least 1"),
            (lambda q: LowRankBias(2, 4, 0, extent=4), "rank: got 0; it must be at least 1"),
            (lambda q: LowRankBias(2, 4, extent=0), "extent: got 0; it must be at least 1"),
            (lambda q: LowRankBias(2, 4, extent=4, l2_clip=0.0), "l2_clip: got 0.0; it must be a finite number above"),
            (lambda q: LowRankBias(2, 4, extent=4, scale=0.1), "scale: got 0.1; it must be a Scale"),
            (lambda q: low_rank().dense(q, q), "x: got None; LowRankBias reads x"),
            (lambda q: low_rank().dense(q, q, x=torch.zeros(2, 13, 5)), r"x: got .*\(2, 13, 5\); .* hidden_size = 6"),
            (lambda q: low_rank().dense(q, q, x=torch.zeros(2, 12, 6)), "x: got 12 tokens for 13 q_positions"),
            (lambda q: low_rank().dense(q.double(), q, x=layer_input()), "q_positions: got torch.float64; give int"),
            (lambda q: low_rank().score_mod(q, q.float(), x=layer_input()), "k_positions: got torch.float32; give int"),
        ],
    )
    def test_said(self, call, message):
        with pytest.raises(ValueError, match=message):
            call(self.Q)
