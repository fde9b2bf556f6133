"""RoPE-Mixed: every pair along a direction of its own, learned, for each head."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.func import functional_call

from theodolite.encodings.rotate.axial import AxialRotary
from theodolite.encodings.rotate.mixed import MixedRotary
from theodolite.plan.axial import Axial
from theodolite.positions.grids import patch_positions

HEAD, HEADS = 12, 2
UNIT = 2.0**-24


def mixed(**options) -> MixedRotary:
    torch.manual_seed(7)
    return MixedRotary(HEAD, HEADS, **options)


def inputs(tokens: int = 15, dtype: torch.dtype = torch.float32):
    """q with 4 heads, k with 2, and places (2, 2, S), another for each of two rows."""
    generator = torch.Generator().manual_seed(tokens)
    q, k = (torch.randn(2, heads, tokens, HEAD, generator=generator).to(dtype) for heads in (4, 2))
    return q, k, torch.randint(-3, 40, (2, 2, tokens), generator=generator)


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2)).detach()


def score_error(q: torch.Tensor, k: torch.Tensor) -> float:
    """A turned channel is off by 5 UNIT (its table, and 3 operations), on each side, in each of two scores."""
    return 20 * UNIT * float(q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max())


class TestBegins:
    """rope-vit's `init_random_2d_freqs`: lengths theta^(-4i/d), directions at right angles, turned head by head."""

    @pytest.mark.parametrize("rope_theta", [10.0, 100.0])
    def test_lengths_and_directions(self, rope_theta):
        x, y = mixed(rope_theta=rope_theta).frequencies.detach().double()
        first, second = slice(0, HEAD // 4), slice(HEAD // 4, None)
        lengths = torch.tensor([rope_theta ** (-4 * i / HEAD) for i in range(HEAD // 4)]).double()
        for part in (first, second):
            # Both coordinates are rounded to float32 once.
            assert ((torch.hypot(x[:, part], y[:, part]) - lengths).abs() <= 2 * UNIT * lengths).all()
        assert torch.equal(x[:, second], -y[:, first])
        assert torch.equal(y[:, second], x[:, first])
        angles = torch.atan2(y, x)[:, first]
        assert ((angles - angles[:, :1]).abs() <= 4 * UNIT).all()
        assert float((angles[0, 0] - angles[1, 0]).abs()) > 0.1

    def test_drawn_over_the_whole_circle(self):
        torch.manual_seed(0)
        x, y = MixedRotary(4, 4000).frequencies.detach()
        angles = torch.atan2(y, x)[:, 0].double()
        # The mean of 4000 points of the circle: each coordinate has a deviation of 1 / sqrt(2 * 4000) = 0.011.
        assert abs(float(angles.cos().mean())) < 0.056
        assert abs(float(angles.sin().mean())) < 0.056

    def test_a_seed_decides_and_reset_draws_anew(self):
        rope, other = mixed(), mixed()
        assert torch.equal(rope.frequencies, other.frequencies)
        rope.reset_parameters()
        assert not torch.equal(rope.frequencies, other.frequencies)


class TestGeneralisesAxial:
    """With directions along the axes it is rope-vit's axial encoding of the same base."""

    def test_equal_to_axial(self):
        rope, (q, k, positions) = mixed(), inputs()
        lengths = torch.tensor([10 ** (-4 * i / HEAD) for i in range(HEAD // 4)], dtype=torch.float64)
        zero = torch.zeros_like(lengths)
        along = torch.stack((torch.cat((lengths, zero)), torch.cat((zero, lengths))))
        rope = rope.double()
        with torch.no_grad():
            rope.frequencies.copy_(along[:, None].expand(-1, HEADS, -1))
        expected = AxialRotary(Axial.rope_vit(HEAD, rope_theta=10))(q, k, positions)
        for mine, axial in zip(rope(q, k, positions), expected, strict=True):
            # The tables are the same to a unit, which each of two products carries to the output.
            assert float((mine - axial).detach().abs().max()) <= 4 * UNIT * float(q.abs().max())

    def test_a_diagonal_is_seen(self):
        """A pair along (1, -1) does not turn where x and y grow alike, which no axial encoding can do."""
        rope, (_, _, positions) = mixed(), inputs()
        with torch.no_grad():
            rope.frequencies.copy_(torch.tensor([0.75, -0.75])[:, None, None].expand_as(rope.frequencies))
        assert same(rope.tables(positions + 5), rope.tables(positions))
        moved = positions + torch.tensor([5, -5])[:, None, None]
        assert not torch.equal(rope.tables(moved).sin, rope.tables(positions).sin)


class TestRelative:
    """A score depends on the distance in x and the distance in y alone."""

    @pytest.mark.parametrize("interleaved", [True, False])
    @pytest.mark.parametrize("axis", [0, 1])
    def test_shift_along_one_axis(self, axis, interleaved):
        rope, (q, k, positions) = mixed(interleaved=interleaved), inputs()
        moved = positions.clone()
        moved[axis] += 1000
        here, there = scores(*rope(q, k, positions)), scores(*rope(q, k, moved))
        assert float((here - there).abs().max()) <= score_error(q, k)
        moved[axis, :, ::2] += 1
        assert float((here - scores(*rope(q, k, moved))).abs().max()) > 1000 * score_error(q, k)

    @pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
    def test_tables_are_exact_far_away(self, dtype):
        """Angles in float64: at 2^24 those in float32 would be off by a whole radian."""
        rope, places = mixed(), torch.tensor([[[2**24, 5]], [[-(2**24), 7]]]).to(dtype)
        cos, sin = (table.detach().double() for table in rope.tables(places))
        f = rope.frequencies.detach().double()
        for token in range(2):
            angles = float(places[0, 0, token]) * f[0] + float(places[1, 0, token]) * f[1]
            # Two products and a sum of up to 2^24 radians in float64, then one rounding.
            assert float((cos[0, :, token] - angles.cos()).abs().max()) <= 2**24 * 4 * 2.0**-53 + UNIT / 2
            assert float((sin[0, :, token] - angles.sin()).abs().max()) <= 2**24 * 4 * 2.0**-53 + UNIT / 2


class TestHeads:
    """Each key-value head has its own directions; the queries of a group have those of their key."""

    @pytest.mark.parametrize("heads_first", [True, False])
    def test_head_by_head(self, heads_first):
        rope, (q, k, positions) = mixed(), inputs()
        expected = rope(q, k, positions)
        for head in range(HEADS):
            own = rope(q[:, 2 * head : 2 * head + 2], k[:, head : head + 1], positions, heads=slice(head, head + 1))
            assert same(own, (expected[0][:, 2 * head : 2 * head + 2], expected[1][:, head : head + 1]))
        if not heads_first:
            q, k, expected = q.transpose(1, 2), k.transpose(1, 2), [x.transpose(1, 2) for x in expected]
        assert same(rope(q, k, positions, heads_first=heads_first), expected)
        assert not torch.equal(rope.tables(positions).sin[:, 0], rope.tables(positions).sin[:, 1])

    def test_a_prefix_passes_bit_for_bit(self):
        rope, (q, k, positions) = mixed(), inputs()
        out = rope(q, k, positions[:, :, 3:], prefix=3)
        behind = rope(q[:, :, 3:], k[:, :, 3:], positions[:, :, 3:])
        for x, turned, alone in zip((q, k), out, behind, strict=True):
            assert torch.equal(turned[:, :, :3], x[:, :, :3])
            assert torch.equal(turned[:, :, 3:], alone)

    def test_one_row_of_places_serves_all(self):
        rope, (q, k, positions) = mixed(), inputs()
        assert rope.tables(positions[:, :1]).cos.shape == (1, HEADS, 15, HEAD // 2)
        assert same(rope(q, k, positions[:, :1]), rope(q, k, positions[:, :1].expand_as(positions)))

    def test_places_without_a_batch_serve_all(self):
        rope, (q, k, positions) = mixed(), inputs()
        one = positions[:, 0]
        assert same(rope.tables(one), rope.tables(one[:, None]))
        assert same(rope(q, k, one), rope(q, k, one[:, None].expand(-1, 2, -1)))
        assert same(rope(q, k, one[:, 3:], prefix=3), rope(q, k, one[:, None, 3:], prefix=3))

    def test_turned_back(self):
        rope, (_, k, positions) = mixed(), inputs()
        tables = rope.tables(positions, amplitude=False)
        back = rope.turn_output_back(rope.turn_values(k, tables), tables)
        assert float((back - k).detach().abs().max()) <= 16 * UNIT * float(k.abs().max())

    def test_in_place_without_a_gradient(self):
        rope, (q, k, positions) = mixed(), inputs()
        expected, copies = rope(q, k, positions), (q.clone(), k.clone())
        with torch.no_grad():
            out = rope.apply_tables(*copies, rope.tables(positions), inplace=True)
        assert out[0] is copies[0]
        assert same(copies, expected)


class TestGradients:
    """What is learned learns: exact derivatives, at full precision."""

    def test_gradcheck(self):
        rope = mixed().double()
        q, k, positions = inputs(tokens=3, dtype=torch.float64)
        q, k = q[:1, :, :, :].requires_grad_(), k[:1].requires_grad_()

        def turned(frequencies, q, k):
            return functional_call(rope, {"frequencies": frequencies}, (q, k, positions[:, :1] / 8))

        frequencies = rope.frequencies.detach().clone().requires_grad_()
        assert torch.autograd.gradcheck(turned, (frequencies, q, k))
        assert torch.autograd.gradgradcheck(turned, (frequencies, q.detach(), k.detach()))

    def test_by_the_printed_formula(self):
        """d angle / d f_x = x: the gradient of a table's sum is the sum of -x sin and x cos."""
        rope, (_, _, positions) = mixed().double(), inputs()
        tables = rope.tables(positions)
        (tables.cos.sum() + 2 * tables.sin.sum()).backward()
        places = positions.double()
        by_angle = (2 * tables.cos - tables.sin).detach()
        for axis in range(2):
            for head in range(HEADS):
                for pair in range(HEAD // 2):
                    expected = float((places[axis] * by_angle[:, head, :, pair]).sum())
                    assert math.isclose(float(rope.frequencies.grad[axis, head, pair]), expected, abs_tol=1e-9)

    def test_in_float32_near_that_in_float64(self):
        grads = []
        for dtype in (torch.float32, torch.float64):
            rope, (q, k, positions) = mixed().to(dtype), inputs(dtype=dtype)
            q, k = rope(q, k, positions)
            (q.sin().sum() + k.cos().sum()).backward()
            assert rope.frequencies.grad.dtype == dtype
            grads.append(rope.frequencies.grad.double())
        # A sum over 2 rows, 15 tokens and 3 heads of place * channel, each off by some 8 UNIT.
        assert float((grads[0] - grads[1]).abs().max()) <= 2 * 15 * 3 * 40 * 2 * 4 * 8 * UNIT
        assert float(grads[1].abs().min()) > 1e-3

    def test_of_a_part_of_the_heads(self):
        rope, (_, k, positions) = mixed(), inputs()
        rope(None, k[:, 1:], positions, heads=slice(1, 2))[1].sum().backward()
        assert float(rope.frequencies.grad[:, 0].abs().max()) == 0
        assert float(rope.frequencies.grad[:, 1].abs().min()) > 0


class TestWithstands:
    """Dtypes, casts, compilers, frameworks."""

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_rounds_once_to_the_dtype_of_q(self, dtype):
        rope, (q, k, positions) = mixed(), inputs(dtype=dtype)
        out = rope(q, k, positions)
        assert [x.dtype for x in out] == [dtype, dtype]
        if dtype != torch.float64:
            assert same(out, [x.to(dtype) for x in rope(q.float(), k.float(), positions)])

    @pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
    def test_casts(self, cast):
        """The parameter is not rounded, nor are the angles."""
        rope, (q, k, positions) = getattr(mixed(), cast)(), inputs()
        tables, exact = rope.tables(positions), mixed().double().tables(positions)
        assert tables.cos.dtype == (torch.float64 if cast == "double" else torch.float32)
        assert same(tables, [table.to(tables.cos.dtype) for table in exact])
        rope(q, k, positions)[0].sum().backward()
        assert rope.frequencies.grad.dtype == rope.frequencies.dtype == tables.cos.dtype

    def test_a_parameter_that_is_rounded_elsewhere(self):
        """FSDP's policies hand over bfloat16: angles are those of the rounded frequencies, exactly."""
        rope, (_, _, positions) = mixed(), inputs()
        rope.frequencies.data = rope.frequencies.data.bfloat16()
        wide = mixed().double()
        with torch.no_grad():
            wide.frequencies.copy_(rope.frequencies)
        tables = rope.tables(positions)
        assert tables.cos.dtype == torch.float32
        assert same(tables, [table.float() for table in wide.tables(positions)])

    def test_from_the_meta_device(self):
        with torch.device("meta"):
            rope = MixedRotary(HEAD, HEADS)
        q, k, positions = inputs()
        assert rope(q.to("meta"), k.to("meta"), positions.to("meta"))[0].shape == q.shape
        assert rope.tables(positions).cos.is_meta
        rope.to_empty(device="cpu")
        torch.manual_seed(7)
        rope.reset_parameters()
        assert same(rope(q, k, positions), mixed()(q, k, positions))
        assert mixed()(q.to("meta"), None, positions.to("meta"))[0].is_meta

    def test_autocast_inference_then_training(self):
        rope, (q, k, positions) = mixed(), inputs()
        expected = [x.detach() for x in rope(q, k, positions)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert same(rope(q, k, positions), expected)
        with torch.inference_mode():
            assert same(rope(q, k, positions), expected)
            places = positions.clone()
        out = rope(q, k, places)
        (out[0].sum() + out[1].sum()).backward()
        assert same([x.detach() for x in out], expected)
        assert float(rope.frequencies.grad.abs().min()) > 0

    def test_state_dict_holds_what_is_learned(self):
        rope, other, (q, k, positions) = mixed(), MixedRotary(HEAD, HEADS), inputs()
        assert list(rope.state_dict()) == ["frequencies"]
        assert list(rope.buffers()) == []
        other.load_state_dict(rope.state_dict())
        for one in (other, copy.deepcopy(rope), pickle.loads(pickle.dumps(rope))):
            assert same(one(q, k, positions), rope(q, k, positions))
        assert repr(rope) == "MixedRotary(head_dim=12, num_heads=2, rope_theta=10, interleaved=True)"

    def test_frequencies_of_others_are_not_dropped_in_silence(self):
        """rope-vit and timm call them `freqs`, a name that elsewhere is derived."""
        with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "freqs"'):
            mixed().load_state_dict({"frequencies": torch.zeros(2, HEADS, HEAD // 2), "freqs": torch.zeros(1)})

    def test_equal_modules_do_not_share_tables(self):
        assert mixed().table_key != mixed().table_key

    def test_compiled_for_any_length(self):
        torch._dynamo.reset()
        rope, counter = mixed(), CompileCounter()
        compiled = torch.compile(rope, fullgraph=True, dynamic=True, backend=counter)
        for tokens in (8, 9, 23, 64):
            q, k, positions = inputs(tokens)
            expected = rope(q, k, positions[:, :, 1:], prefix=1)
            assert same(compiled(q, k, positions[:, :, 1:], prefix=1), expected)
        assert counter.frame_count <= 2

    def test_compiled_with_gradients(self):
        torch._dynamo.reset()
        rope, (q, k, positions) = mixed(), inputs()
        compiled, grads = torch.compile(rope, fullgraph=True, backend="aot_eager"), []
        for run in (rope, compiled):
            rope.zero_grad()
            run(q, k, positions)[0].sin().sum().backward()
            grads.append(rope.frequencies.grad.clone())
        # The same operations, with sums over tokens in another order at most: as between float32 and float64.
        assert float((grads[0] - grads[1]).abs().max()) <= 2 * 15 * 3 * 40 * 2 * 4 * 8 * UNIT

    def test_exported_for_any_length(self):
        rope, (q, k, positions) = mixed(), inputs(16)
        tokens = torch.export.Dim("tokens", min=2, max=4096)
        shapes = {"q": {2: tokens}, "k": {2: tokens}, "positions": {2: tokens}}
        exported = torch.export.export(rope, (q, k, positions), dynamic_shapes=shapes).module()
        for length in (16, 2, 61):
            q, k, positions = inputs(length)
            assert same(exported(q, k, positions), rope(q, k, positions))


class TestRefusals:
    """What cannot be right is refused, in words."""

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ((14, 2), "head_dim: got 14; it must be a multiple of 4"),
            ((0, 2), "head_dim: got 0; it must be at least 4"),
            ((12.0, 2), "head_dim: got a float; give a Python int"),
            ((12, 0), "num_heads: got 0; it must be at least 1"),
            ((12, True), "num_heads: got a bool; give a Python int"),
        ],
    )
    def test_sizes(self, arguments, text):
        with pytest.raises(ValueError, match=text):
            MixedRotary(*arguments)

    @pytest.mark.parametrize("rope_theta", [1.0, None, math.nan, "10"])
    def test_base(self, rope_theta):
        with pytest.raises(ValueError, match=r"rope_theta: got .*; it must be a finite number above 1"):
            MixedRotary(12, 2, rope_theta=rope_theta)

    @pytest.mark.parametrize(
        ("positions", "text"),
        [
            (torch.zeros(15), r"positions: got shape \(15,\); it must be \(axes, S\) or \(axes, B, S\)"),
            (patch_positions(3, 5).T, "positions: got 15 axes; this encoding has 2, and they are the first dimension"),
            (torch.zeros(3, 1, 15), "positions: got 3 axes; this encoding has 2"),
            (torch.zeros(2, 1, 15).half(), "positions: got torch.float16; give integers, or float32 or float64"),
            (torch.full((2, 1, 15), -(2**24) - 1), r"positions: they must be at most 2\*\*24 = 16777216 either way"),
            (torch.full((2, 1, 15), math.nan), "positions: got nan; all must be finite"),
            (torch.zeros(2, 1, 14), "positions: got 14 and a prefix of 0 for the 15 tokens of q"),
            (torch.zeros(2, 1, 15, device="meta"), "positions: they are on the meta device and have no values"),
        ],
    )
    def test_positions(self, positions, text):
        q, k, _ = inputs()
        with pytest.raises(ValueError, match=text):
            mixed()(q, k, positions)

    def test_heads(self):
        q, k, positions = inputs()
        with pytest.raises(
            ValueError, match=r"heads: got slice\(1, 3, None\); it must lie within the 2 key-value heads"
        ):
            mixed()(q, k, positions, heads=slice(1, 3))
        with pytest.raises(ValueError, match="k: got 4 heads for tables of 2; there is one for each key-value head"):
            mixed()(q, torch.cat((k, k), 1), positions)
        with pytest.raises(ValueError, match="cos: it requires a gradient, which needs q as it was; use inplace=False"):
            mixed().apply_tables(q, k, mixed().tables(positions), inplace=True)
