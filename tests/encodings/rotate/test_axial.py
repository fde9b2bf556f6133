"""Rotations along axes: exact at any place, relative on each axis, and nothing that a framework could spoil."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import pytest
import torch
from mpmath import mp, mpf
from torch._dynamo.testing import CompileCounter

from tests import oracle
from theodolite.encodings.policy import Policy
from theodolite.encodings.rotate.axial import AxialRotary
from theodolite.encodings.rotate.parts import RotateByChannel
from theodolite.encodings.rotate.rotary import RotaryEmbedding
from theodolite.encodings.shared import SharedTables
from theodolite.plan import Rotary, YaRN
from theodolite.plan.axial import Axial
from theodolite.positions.fractional_grids import centred_patch_positions
from theodolite.positions.grids import patch_positions, patches_of_grids, with_special_tokens

HEAD = 24
UNIT = 2.0**-24
FAMILIES = {
    "qwen": Axial.qwen_vl(HEAD),
    "pixtral": Axial.pixtral(HEAD),
    "gemma 4": Axial.gemma4(HEAD),
    "llama 4": Axial.llama4(HEAD),
    "dinov3": Axial.dinov3(HEAD),
    "alternating": dataclasses.replace(Axial.qwen_vl(HEAD), alternating=True),
    "three axes": Axial(head_dim=HEAD, rope_theta=1e4, axes_dim=(4, 8, 8)),
    "three small heads": Axial(head_dim=HEAD, rope_theta=1e4, axes_dim=(4, 8, 8), halves_per_axis=True),
    "scaled": Axial(head_dim=HEAD, rope_theta=1e4, scaling=YaRN(factor=4, original_max_position_embeddings=16)),
}


@pytest.fixture(params=FAMILIES)
def axial(request) -> Axial:
    return FAMILIES[request.param]


def inputs(axial: Axial, tokens: int = 15, dtype: torch.dtype = torch.float32):
    """q with 4 heads, k with 2, and random places, another for each of two rows."""
    generator = torch.Generator().manual_seed(tokens)
    q, k = (torch.randn(2, heads, tokens, axial.head_dim, generator=generator).to(dtype) for heads in (4, 2))
    return q, k, torch.randint(-3, 40, (len(axial.axes_dim), 2, tokens), generator=generator)


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)


def score_error(axial: Axial, q: torch.Tensor, k: torch.Tensor) -> float:
    """An entry of a table is off by UNIT, a turned channel by 2 of them and the roundings of 3 operations, on each
    side: 10 UNIT of the largest |q| |k|, twice for two scores that are compared, times the amplitude squared."""
    sizes = float(q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max())
    return 20 * UNIT * sizes * axial.attention_factor() ** 2


class TestExact:
    """Every entry within 6e-8 of the truth, in whole positions and in fractions."""

    def assert_row(self, axial: Axial, positions: torch.Tensor, frequencies: list[mpf]) -> None:
        tables = AxialRotary(axial).tables(positions)
        for token in range(positions.shape[2]):
            with mp.workdps(oracle.DIGITS):
                places = [mpf(float(positions[axis, 0, token])) for axis in axial.axis_of_pairs()]
                angles = [place * frequency for place, frequency in zip(places, frequencies, strict=True)]
                cos, sin = [mp.cos(angle) for angle in angles], [mp.sin(angle) for angle in angles]
            assert oracle.worst_error(tables.cos[0, token].numpy(), cos) <= 6e-8
            assert oracle.worst_error(tables.sin[0, token].numpy(), sin) <= 6e-8

    def test_far_away(self):
        positions = torch.tensor([[[2**24, -77, 12_345_678]], [[3, 2**24 - 1, -(2**24)]]])
        self.assert_row(Axial.qwen_vl(HEAD), positions, oracle.plain(1e4, HEAD // 2) * 2)

    @pytest.mark.parametrize("positions", [
        centred_patch_positions(3, 5, normalize_coords="max")[:, None],
        torch.tensor([[[2.0**24 / 7]], [[-(2.0**24) / 7]]], dtype=torch.float64),
    ])  # fmt: skip
    def test_fractions_in_turns(self, positions):
        with mp.workdps(oracle.DIGITS):
            frequencies = [2 * mp.pi * mp.power(100, -mpf(4 * i) / HEAD) for i in range(HEAD // 4)] * 2
        self.assert_row(Axial.dinov3(HEAD), positions, frequencies)


class TestRelative:
    """A score depends on the distances along the axes alone, and on each axis through its own pairs alone."""

    @pytest.mark.parametrize("axis", [0, 1, 2])
    def test_shift_along_one_axis(self, axial, axis):
        axis = min(axis, len(axial.axes_dim) - 1)
        rope, (q, k, positions) = AxialRotary(axial), inputs(axial)
        moved = positions.clone()
        moved[axis] += 1000
        here, there = scores(*rope(q, k, positions)), scores(*rope(q, k, moved))
        assert float((here - there).abs().max()) <= score_error(axial, q, k)
        moved[axis, :, ::2] += 1
        assert float((here - scores(*rope(q, k, moved))).abs().max()) > 1000 * score_error(axial, q, k)

    def test_an_axis_turns_its_own_pairs(self, axial):
        rope, (_, _, positions) = AxialRotary(axial), inputs(axial)
        tables = rope.tables(positions)
        for axis in range(len(axial.axes_dim)):
            moved = positions.clone()
            moved[axis] += 3
            changed = (rope.tables(moved).sin != tables.sin).any(dim=(0, 1))
            assert torch.equal(changed, torch.tensor(axial.axis_of_pairs()) == axis)

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_text_on_equal_axes_is_one_axis(self, interleaved):
        """One spectrum dealt out by turns, at the same place on all axes: RoPE as in text, bit for bit."""
        for dims in ((12, 12), (8, 8, 8)):
            axial = Axial(
                head_dim=HEAD, rope_theta=1e4, axes_dim=dims,
                shared_spectrum=True, alternating=True, interleaved=interleaved,
            )  # fmt: skip
            q, k, positions = inputs(axial)
            text = RotaryEmbedding(Rotary(head_dim=HEAD, rope_theta=1e4, interleaved=interleaved))
            expected = text(q, k, positions[0])
            assert same(AxialRotary(axial)(q, k, positions[:1].expand_as(positions)), expected)

    def test_pixtral_on_equal_axes_has_the_scores_of_one_axis(self):
        """The same spectrum in another order of pairs: channels permuted alike in q and k."""
        axial = Axial.pixtral(HEAD)
        q, k, positions = inputs(axial)
        order = torch.cat((torch.arange(0, 12, 2), torch.arange(1, 12, 2)))
        order = torch.cat((order, order + 12))
        text = RotaryEmbedding(Rotary(head_dim=HEAD, rope_theta=1e4))
        turned = AxialRotary(axial)(q[..., order], k[..., order], positions[:1].expand_as(positions))
        assert same(turned, [x[..., order] for x in text(q, k, positions[0])])

    def test_layouts_of_pairs_have_the_same_scores(self):
        """Halves, interleaved and small heads differ by a permutation of channels."""
        pairs = torch.arange(12)
        halves = torch.stack((pairs, pairs + 12), 1)
        stretch = torch.cat([torch.stack((pairs[:6], pairs[:6] + 6), 1) + start for start in (0, 12)])
        interleaved = torch.stack((2 * pairs, 2 * pairs + 1), 1)
        q, k, positions = inputs(Axial.qwen_vl(HEAD))
        expected = AxialRotary(Axial.qwen_vl(HEAD))(q, k, positions)
        for options, places in (({"interleaved": True}, interleaved), ({"halves_per_axis": True}, stretch)):
            order = torch.empty(HEAD, dtype=torch.int64)
            order[places.flatten()] = halves.flatten()
            rope = AxialRotary(Axial(head_dim=HEAD, rope_theta=1e4, **options))
            assert same(rope(q[..., order], k[..., order], positions), [x[..., order] for x in expected])

    def test_small_heads_are_rotations_side_by_side(self):
        axial = FAMILIES["three small heads"]
        q, k, positions = inputs(axial)
        parts = [(RotaryEmbedding(Rotary(head_dim=dim, rope_theta=1e4)), dim) for dim in axial.axes_dim]
        alone = RotateByChannel([*parts, (None, 4)], axis_of_parts=[0, 1, 2, 0])
        assert same(AxialRotary(axial)(q, k, positions), alone(q, k, positions))

    def test_channels_that_do_not_turn(self):
        for name in ("three axes", "three small heads"):
            q, k, positions = inputs(FAMILIES[name])
            out, _ = AxialRotary(FAMILIES[name])(q, k, positions)
            assert torch.equal(out[..., 20:], q[..., 20:])
            assert not torch.equal(out[..., 16:20], q[..., 16:20])

    def test_frames_of_a_video(self):
        """Three axes: a later frame is another place, the same patch of the same frame is not."""
        axial = FAMILIES["three axes"]
        positions = patches_of_grids([(2, 2, 4)], spatial_merge_size=2, time=True)[:, None]
        q, k, _ = inputs(axial, tokens=16)
        q, k = q[:, :, :1].expand_as(q), k[:, :, :1].expand_as(k)
        together = scores(*AxialRotary(axial)(q, k, positions))
        first, second = together[..., :8, :8], together[..., 8:, 8:]
        assert float((first - second).abs().max()) <= score_error(axial, q, k)
        assert float((first - together[..., :8, 8:]).abs().max()) > 1000 * score_error(axial, q, k)


class TestApplied:
    """Forward is tables, then rotation, whatever the layout; backwards it is undone."""

    @pytest.mark.parametrize("prefix", [0, 3])
    @pytest.mark.parametrize("heads_first", [True, False])
    def test_every_way_to_call(self, axial, heads_first, prefix):
        rope, (q, k, positions) = AxialRotary(axial), inputs(axial)
        options = {"heads_first": heads_first, "prefix": prefix}
        places, tables = positions[:, :, prefix:], rope.tables(positions[:, :, prefix:])
        zeros = with_special_tokens(places, before=prefix)
        if axial.attention_factor() == 1:
            expected = rope(q, k, zeros)
        else:
            # Angle 0 leaves the attention factor; a prefix is not multiplied by it.
            expected = tuple(torch.cat((x[:, :, :prefix], y[:, :, prefix:]), 2)
                             for x, y in zip((q, k), rope(q, k, zeros), strict=True))  # fmt: skip
        if not heads_first:
            q, k, expected = q.transpose(1, 2), k.transpose(1, 2), [x.transpose(1, 2) for x in expected]
        assert same(rope(q, k, places, **options), expected)
        assert same(rope.apply_tables(q, k, tables, **options), expected)
        assert torch.equal(rope.turn(q, tables, **options), expected[0])
        assert rope(q, None, places, **options)[1] is None
        assert torch.equal(rope(None, k, places, **options)[1], expected[1])
        copies = q.clone(), k.clone()
        out = rope.apply_tables(*copies, tables, inplace=True, **options)
        assert out[0] is copies[0]
        assert out[1] is copies[1]
        assert same(copies, expected)

    def test_turned_back(self, axial):
        rope, (q, _, positions) = AxialRotary(axial), inputs(axial)
        tables = rope.tables(positions, amplitude=False)
        assert tables.cos.abs().max() <= 1
        back = rope.turn_output_back(rope.turn_values(q, tables), tables)
        # Two rotations of 4 UNIT of |x1| + |x2| each, as for one output.
        assert float((back - q).abs().max()) <= 16 * UNIT * float(q.abs().max())
        assert not torch.equal(rope.turn_values(q, tables), q)

    def test_gradient_is_the_rotation_back(self, axial):
        rope, (q, _, positions) = AxialRotary(axial), inputs(axial)
        tables, weight = (
            rope.tables(positions[:, :, 2:]),
            torch.randn(q.shape, generator=torch.Generator().manual_seed(3)),
        )
        leaf = q.clone().requires_grad_()
        (rope.apply_tables(leaf, None, tables, prefix=2)[0] * weight).sum().backward()
        assert torch.equal(leaf.grad, rope.turn(weight, tables, conjugate=True, prefix=2))
        inside = q.clone().requires_grad_()
        written, _ = rope.apply_tables(inside * 1, None, tables, prefix=2, inplace=True)
        (written * weight).sum().backward()
        assert torch.equal(inside.grad, leaf.grad)

    def test_token_by_token(self, axial):
        rope, (q, k, positions) = AxialRotary(axial), inputs(axial)
        whole = rope(q, k, positions)
        for token in range(q.shape[2]):
            one = slice(token, token + 1)
            alone = rope(q[:, :, one], k[:, :, one], positions[:, :, one])
            assert same(alone, [x[:, :, one] for x in whole])

    def test_one_row_of_places_serves_all(self, axial):
        rope, (q, k, positions) = AxialRotary(axial), inputs(axial)
        assert same(rope(q, k, positions[:, :1]), rope(q, k, positions[:, :1].expand_as(positions)))

    def test_places_without_a_batch_serve_all(self, axial):
        rope, (q, k, positions) = AxialRotary(axial), inputs(axial)
        one = positions[:, 0]
        tables = rope.tables(one)
        assert tables.cos.shape == (15, axial.rotary_dim // 2)
        assert same(tables, [table[0] for table in rope.tables(one[:, None])])
        expected = rope(q, k, one[:, None].expand(-1, 2, -1))
        assert same(rope(q, k, one), expected)
        assert same(rope(q, k, one[:, 3:], prefix=3), rope(q, k, one[:, None, 3:], prefix=3))
        assert torch.equal(rope.turn(q, tables), expected[0])
        assert rope.tables(one.to("meta")).cos.shape == tables.cos.shape

    def test_in_a_policy_tables_are_made_once(self, axial):
        q, k, positions = inputs(axial)
        tables = SharedTables(positions)
        first, second = Policy(rotate=AxialRotary(axial)), Policy(rotate=AxialRotary(copy.deepcopy(axial)))
        assert tables.of(first.rotate) is tables.of(second.rotate)
        assert same(first.turn(q, k, tables), AxialRotary(axial)(q, k, positions))


class TestWithstands:
    """Dtypes, casts, compilers, frameworks: the same bits."""

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_rounds_once_to_the_dtype_of_q(self, axial, dtype):
        rope, (q, k, positions) = AxialRotary(axial), inputs(axial, dtype=dtype)
        out = rope(q, k, positions)
        assert [x.dtype for x in out] == [dtype, dtype]
        if dtype != torch.float64:
            assert same(out, [x.to(dtype) for x in rope(q.float(), k.float(), positions)])

    @pytest.mark.parametrize("change", ["half", "bfloat16", "double", "meta"])
    def test_casts_and_the_meta_device(self, axial, change):
        q, k, positions = inputs(axial)
        expected = AxialRotary(axial)(q, k, positions)
        if change == "meta":
            with torch.device("meta"):
                rope = AxialRotary(axial)
            assert rope(q.to("meta"), None, positions.to("meta"))[0].shape == q.shape
            rope = rope.to_empty(device="cpu")
            rope.reset_parameters()
        else:
            rope = getattr(AxialRotary(axial), change)()
        assert same(rope(q, k, positions), expected)

    def test_autocast_inference_then_training(self, axial):
        rope, (q, k, positions) = AxialRotary(axial), inputs(axial)
        expected = rope(q, k, positions)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert same(rope(q, k, positions), expected)
        with torch.inference_mode():
            tables = rope.tables(positions)
            assert same(rope(q, k, positions), expected)
        q.requires_grad_()
        out, _ = rope.apply_tables(q, k, tables)
        out.sum().backward()
        assert torch.equal(out, expected[0])
        assert q.grad.abs().min() > 0

    def test_state_copies_and_repr(self, axial):
        rope, (q, k, positions) = AxialRotary(axial), inputs(axial)
        assert rope.state_dict() == {}
        assert list(rope.parameters()) == list(rope.buffers()) == []
        for other in (copy.deepcopy(rope), pickle.loads(pickle.dumps(rope))):
            assert same(other(q, k, positions), rope(q, k, positions))
        assert repr(axial) in repr(rope)
        with pytest.warns(UserWarning, match="AxialRotary: the checkpoint's inv_freq is not read"):
            rope.load_state_dict({"inv_freq": torch.ones(3)})

    @pytest.mark.parametrize(("name", "prefix"), [("qwen", 0), ("gemma 4", 2), ("three axes", 2)])
    def test_compiled_for_any_length(self, name, prefix):
        torch._dynamo.reset()
        axial = FAMILIES[name]
        rope, counter = AxialRotary(axial), CompileCounter()
        compiled = torch.compile(rope, fullgraph=True, dynamic=True, backend=counter)
        for tokens in (8, 9, 23, 64):
            q, k, positions = inputs(axial, tokens)
            expected = rope(q, k, positions[:, :, prefix:], prefix=prefix)
            assert same(compiled(q, k, positions[:, :, prefix:], prefix=prefix), expected)
        assert counter.frame_count <= 2

    @pytest.mark.parametrize("name", ["qwen", "gemma 4"])
    def test_compiled_with_gradients(self, name):
        torch._dynamo.reset()
        axial = FAMILIES[name]
        rope, (q, k, positions) = AxialRotary(axial), inputs(axial)
        compiled = torch.compile(rope, fullgraph=True, backend="aot_eager")
        grads = []
        for run in (rope, compiled):
            leaf = q.clone().requires_grad_()
            out = run(leaf, k, positions[:, :, 1:], prefix=1)[0]
            out.square().sum().backward()
            grads += [out.detach(), leaf.grad]
        assert same(grads[:2], grads[2:])

    @pytest.mark.parametrize("name", ["dinov3", "three small heads"])
    def test_exported_for_any_length(self, name):
        axial = FAMILIES[name]
        rope, (q, k, positions) = AxialRotary(axial), inputs(axial, 16)
        tokens = torch.export.Dim("tokens", min=2, max=4096)
        shapes = {"q": {2: tokens}, "k": {2: tokens}, "positions": {2: tokens}}
        exported = torch.export.export(rope, (q, k, positions), dynamic_shapes=shapes).module()
        for length in (16, 2, 61):
            q, k, positions = inputs(axial, length)
            assert same(exported(q, k, positions), rope(q, k, positions))


class TestRefusals:
    """What cannot be right is refused, in words."""

    ROPE = AxialRotary(Axial.gemma4(HEAD))

    def test_what_is_no_plan(self):
        with pytest.raises(ValueError, match=r"axial: got a Rotary; it must be an Axial, for example Axial.qwen_vl"):
            AxialRotary(Rotary(head_dim=HEAD, rope_theta=1e4))

    @pytest.mark.parametrize(
        ("positions", "text"),
        [
            (torch.zeros(15), r"positions: got shape \(15,\); it must be \(axes, S\) or \(axes, B, S\)"),
            (torch.zeros(2, 1, 1, 15), r"positions: got shape \(2, 1, 1, 15\); it must be \(axes, S\) or"),
            (patch_positions(3, 5).T, "positions: got 15 axes; this encoding has 2, and they are the first dimension"),
            (torch.zeros(3, 1, 15), r"positions: got 3 axes; this encoding has 2, .* here \(3, 1, 15\)"),
            ([[1, 2]], "positions: got a list; they must be a tensor"),
            (torch.zeros(2, 1, 15).bfloat16(), "positions: got torch.bfloat16; give integers, or float32"),
            (torch.full((2, 1, 15), 2**24 + 1), "positions: got 16777217; the tables are exact up to"),
            (torch.zeros(2, 1, 14), r"positions: got 14 and a prefix of 0 for the 15 tokens of q .*\(B, H, S, D\)"),
        ],
    )
    def test_positions(self, positions, text):
        q, k, _ = inputs(self.ROPE.axial)
        with pytest.raises(ValueError, match=text):
            self.ROPE(q, k, positions)

    @pytest.mark.parametrize("axial", [Axial.gemma4(HEAD), Axial.qwen_vl(HEAD)])
    @pytest.mark.parametrize("width", [20, 28])
    def test_another_width_of_head(self, axial, width):
        rope, q = AxialRotary(axial), torch.zeros(2, 4, 15, width)
        for call in (
            lambda: rope(None, q, torch.zeros(2, 1, 15)),
            lambda: rope.turn(q, rope.tables(torch.zeros(2, 1, 15))),
        ):
            with pytest.raises(
                ValueError, match=rf"[kx]: got shape \(2, 4, 15, {width}\); its last must be head_dim, 24"
            ):
                call()

    @pytest.mark.parametrize(
        ("prefix", "text"),
        [
            (-1, "prefix: got -1; it must be at least 0"),
            (True, "prefix: got a bool; give a Python int"),
            (1.0, "prefix: got a float; give a Python int"),
            (5, "positions: got 14 and a prefix of 5 for the 15 tokens of q"),
        ],
    )
    def test_prefix(self, prefix, text):
        q, k, positions = inputs(self.ROPE.axial)
        with pytest.raises(ValueError, match=text):
            self.ROPE(q, k, positions[:, :, 1:], prefix=prefix)

    def test_prefix_past_all_tokens(self):
        q, k, positions = inputs(self.ROPE.axial)
        tables = self.ROPE.tables(positions)
        with pytest.raises(ValueError, match=r"q: got shape \(2, 4, 15, 24\) and a prefix of 16"):
            self.ROPE.apply_tables(q, k, tables, prefix=16)
        with pytest.raises(ValueError, match=r"x: got shape \(4, 15, 24\) and a prefix of 1; .* four dimensions"):
            self.ROPE.turn(q[0], tables, prefix=1)

    @pytest.mark.parametrize("axial", [Axial.gemma4(HEAD), Axial.qwen_vl(HEAD)])
    def test_twice_in_place(self, axial):
        q, _, positions = inputs(axial)
        rope = AxialRotary(axial)
        both = torch.zeros(*q.shape[:-1], HEAD + HEAD // 2)
        for one, other in ((q, q), (both[..., :HEAD], both[..., HEAD // 2 :])):
            with pytest.raises(ValueError, match="k: it shares elements with q, which in place would be turned twice"):
                rope.apply_tables(one, other, rope.tables(positions), inplace=True)

    def test_the_plan_is_fixed(self):
        with pytest.raises(AttributeError):
            self.ROPE.axial = Axial.qwen_vl(HEAD)
        assert math.isclose(self.ROPE.axial.rope_theta, 100)
