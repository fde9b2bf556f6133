"""Moving keys that are rotated already: one rotation, one rounding, and the key that a fresh rotation would give."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf

from tests import oracle
from theodolite.encodings import RotaryEmbedding
from theodolite.encodings.rotate.learned import LeRoPE
from theodolite.encodings.rotate.rerotation import rerotate, rerotation_tables
from theodolite.plan import DynamicNTK, Linear, LongRoPE, Rotary, YaRN

PROMISE = 6e-8
PLAN = Rotary(head_dim=16, rope_theta=10000.0)
YARN = replace(PLAN, scaling=YaRN(factor=4, original_max_position_embeddings=64))
AXES = replace(PLAN, mrope_section=(2, 3, 3))
LAYOUTS = [
    {"interleaved": interleaved, "rotary_dim": width, "trailing": trailing}
    for interleaved, width, trailing in itertools.product([False, True], [16, 8], [False, True])
]


def keys(dtype: torch.dtype = torch.float32, tokens: int = 9) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 2, tokens, 16, generator=generator, dtype=torch.float64).to(dtype)


def fresh(plan: Rotary, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return RotaryEmbedding(plan)(None, k, positions)[1]


def pair_length(k: torch.Tensor, plan: Rotary) -> torch.Tensor:
    """For every channel the length of its pair, which bounds it wherever it is turned; its own size where it is not."""
    length, width = k.double().abs(), plan.rotary_dim
    turning = length[..., -width:] if plan.trailing else length[..., :width]
    pairs = turning.unflatten(-1, (-1, 2) if plan.interleaved else (2, -1))
    dim = -1 if plan.interleaved else -2
    turning.copy_(pairs.norm(dim=dim, keepdim=True).expand_as(pairs).flatten(-2))
    return length


def assert_close(moved: torch.Tensor, k: torch.Tensor, plan: Rotary, positions: torch.Tensor) -> None:
    """`moved` against the exact rotation of the unrotated keys `k`."""
    assert moved.dtype == k.dtype
    exact = fresh(plan, k.double(), positions)
    # Each of two rotations: two entries within 2^-24, sqrt(2) of that together; two products and a sum, 1 and 1. The
    # exact one has its entries. In all 8.3, of the length of the pair.
    rounding = 9 * 2.0**-24
    if k.dtype != torch.float32:
        # Rounded once when first rotated, and once when moved.
        rounding += 1.01 * torch.finfo(k.dtype).eps
    assert ((moved.double() - exact).abs() <= rounding * plan.attention_factor() * pair_length(k, plan)).all()


class TestMoves:
    """A moved key is the key of its new place: caches shift, drop tokens and join without the model."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_all_by_one_number(self, layout, dtype):
        plan, k, positions = replace(YARN, **layout), keys(dtype), torch.arange(600, 609)
        for by in (-500, -600, 0, 1, 100_000):
            assert_close(rerotate(fresh(plan, k, positions), rotary=plan, by=by), k, plan, positions + by)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_each_by_its_own(self, dtype):
        k, positions = keys(dtype), torch.arange(600, 609)
        for by in (torch.tensor([0, 1, -3, 7, -600, 5, 5, 90_000, 2]), torch.arange(-9, 9).reshape(2, 9)):
            moved = rerotate(fresh(YARN, k, positions), rotary=YARN, by=by)
            new = positions + by
            assert_close(moved, k, YARN, new)

    def test_channels_that_do_not_turn_pass_bit_for_bit(self):
        plan = replace(PLAN, rotary_dim=8, trailing=True)
        k = fresh(plan, keys(torch.bfloat16), torch.arange(9))
        assert torch.equal(rerotate(k, rotary=plan, by=17)[..., :8], k[..., :8])

    def test_by_nothing_is_the_key_itself(self):
        k = keys(torch.bfloat16)
        assert torch.equal(rerotate(k, rotary=YARN, by=0), k)
        positions = torch.arange(100_000, 100_009)
        assert torch.equal(rerotate(k, old=YARN, new=YARN, positions=positions), k)

    def test_the_length_does_not_grow(self):
        # With the attention factor a second time it would grow by 1.139 at each move.
        k = keys(torch.float64)
        moved = k
        for _ in range(50):
            moved = rerotate(moved, rotary=YARN, by=3)
        assert (moved.norm(dim=-1) / k.norm(dim=-1) - 1).abs().max() <= 50 * 2 * PROMISE

    def test_three_axes_by_one_number_is_all_axes(self):
        k = keys()
        positions = torch.stack([torch.arange(18).reshape(2, 9) * step for step in (1, 2, 5)])
        rotated = fresh(AXES, k, positions)
        assert_close(rerotate(rotated, rotary=AXES, by=-40), k, AXES, positions - 40)
        assert torch.equal(
            rerotate(rotated, rotary=AXES, by=-40),
            rerotate(rotated, rotary=AXES, by=torch.full((3, 2, 9), -40)),
        )

    def test_three_axes_each_by_its_own(self):
        k = keys()
        positions = torch.stack([torch.arange(18).reshape(2, 9) * step for step in (1, 2, 5)])
        by = torch.tensor([-3, 10, 700])[:, None, None].expand(3, 2, 9)
        assert_close(rerotate(fresh(AXES, k, positions), rotary=AXES, by=by), k, AXES, positions + by)

    def test_equal_axes_are_one_axis(self):
        k = keys()
        by = torch.arange(9).expand(3, 2, 9)
        assert torch.equal(rerotate(k, rotary=AXES, by=by), rerotate(k, rotary=PLAN, by=by[0]))

    def test_tokens_first_and_in_place(self):
        k = fresh(PLAN, keys(), torch.arange(9))
        expected = rerotate(k, rotary=PLAN, by=5)
        other = rerotate(k.transpose(1, 2), rotary=PLAN, by=5, heads_first=False)
        assert torch.equal(other.transpose(1, 2), expected)
        assert rerotate(k, rotary=PLAN, by=5, inplace=True) is k
        assert torch.equal(k, expected)

    def test_gradients_pass(self):
        k = keys(torch.float64, tokens=3).requires_grad_()
        assert torch.autograd.gradcheck(lambda k: rerotate(k, rotary=YARN, by=7), k)


class TestOneMoveOrMany:
    """Roundings add up: move once from keys that are kept, not token by token."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_500_moves_of_one(self, dtype):
        k, positions = keys(dtype), torch.arange(1000, 1009)
        rotated, true = fresh(PLAN, k, positions), fresh(PLAN, k.double(), positions - 500)
        once = rerotate(rotated, rotary=PLAN, by=-500)
        assert_close(once, k, PLAN, positions - 500)
        many = rotated
        for _ in range(500):
            many = rerotate(many, rotary=PLAN, by=-1)
        errors = [float((x.double() - true).norm() / true.norm()) for x in (once, many)]
        assert errors[1] > 20 * errors[0]


class TestOtherFrequencies:
    """From one plan to another, at the same places or at new ones: dynamic scaling with a cache that stays right."""

    @settings(max_examples=40, deadline=None)
    @given(
        old_theta=st.floats(1e3, 1e7),
        new_theta=st.floats(1e3, 1e7),
        factor=st.floats(1, 32),
        old_position=st.integers(0, 2**24),
        new_position=st.integers(0, 2**24),
    )
    def test_tables_are_exact(self, old_theta, new_theta, factor, old_position, new_position):
        old = replace(PLAN, rope_theta=old_theta)
        new = replace(PLAN, rope_theta=new_theta, scaling=YaRN(factor=factor, original_max_position_embeddings=2048))
        positions = torch.tensor([old_position]), torch.tensor([new_position])
        cos, sin = rerotation_tables(old=old, new=new, positions=positions[0], new_positions=positions[1])
        with mp.workdps(oracle.DIGITS):
            before, after = oracle.plain(old_theta, 16), oracle.yarn(new_theta, 16, factor, 2048)
            angles = [b * new_position - a * old_position for a, b in zip(before, after, strict=True)]
            amplitude = mpf("0.1") * mp.log(mpf(factor)) + 1
            assert oracle.worst_error(cos[0].numpy(), [amplitude * mp.cos(x) for x in angles]) <= PROMISE * amplitude
            assert oracle.worst_error(sin[0].numpy(), [amplitude * mp.sin(x) for x in angles]) <= PROMISE * amplitude

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_keys(self, dtype, layout):
        old = replace(PLAN, scaling=YaRN(factor=2, original_max_position_embeddings=64), **layout)
        new = replace(PLAN, scaling=YaRN(factor=8, original_max_position_embeddings=64), **layout)
        k, positions, new_positions = keys(dtype), torch.arange(600, 609), torch.arange(18).reshape(2, 9)
        rotated = fresh(old, k, positions)
        assert_close(rerotate(rotated, old=old, new=new, positions=positions), k, new, positions)
        moved = rerotate(rotated, old=old, new=new, positions=positions, new_positions=new_positions)
        assert_close(moved, k, new, new_positions)

    @pytest.mark.parametrize(
        "scaling",
        [
            DynamicNTK(factor=2, original_max_position_embeddings=16),
            LongRoPE(short_factor=(1.0,) * 8, long_factor=(3.0,) * 8, original_max_position_embeddings=16, factor=4.0),
        ],
    )
    def test_a_plan_that_depends_on_the_length(self, scaling):
        plan, k, positions = replace(PLAN, scaling=scaling), keys(), torch.arange(9)
        short, long = plan.at_length(9), plan.at_length(40)
        moved = rerotate(fresh(short, k, positions), old=short, new=long, positions=positions)
        assert_close(moved, k, long, positions)
        for arguments in ({"old": plan, "new": long}, {"old": short, "new": plan}):
            with pytest.raises(ValueError, match=r"(old|new): '.*' has frequencies that depend .* settle them with"):
                rerotate(k, positions=positions, **arguments)
        with pytest.raises(ValueError, match=r"rotary: '.*' has frequencies that depend .* settle them with"):
            rerotate(k, rotary=plan, by=3)

    def test_text_keys_for_a_model_of_three_axes(self):
        k, positions = keys(), torch.arange(30, 39)
        new_positions = torch.stack([torch.arange(18).reshape(2, 9) * step for step in (1, 2, 5)])
        moved = rerotate(
            fresh(PLAN, k, positions), old=PLAN, new=AXES, positions=positions, new_positions=new_positions
        )
        assert_close(moved, k, AXES, new_positions)
        back = rerotate(moved, old=AXES, new=PLAN, positions=new_positions, new_positions=positions)
        # Two moves.
        assert ((back - fresh(PLAN, k, positions)).abs() <= 24 * 2.0**-24 * k.norm(dim=-1, keepdim=True)).all()

    def test_fractions(self):
        k, positions = keys(), torch.arange(9)
        linear = replace(PLAN, scaling=Linear(factor=4))
        moved = rerotate(
            fresh(linear, k, positions), old=PLAN, new=linear, positions=positions.double() / 4, new_positions=positions
        )
        assert_close(moved, k, linear, positions)

    def test_is_the_move_where_the_plan_stays(self):
        k, positions = fresh(YARN, keys(), torch.arange(9)), torch.arange(9)
        moved = rerotate(k, old=YARN, new=YARN, positions=positions, new_positions=positions + 70)
        # Entries within the promise of the same value.
        difference = (moved - rerotate(k, rotary=YARN, by=70)).abs()
        assert (difference <= 8 * PROMISE * k.norm(dim=-1, keepdim=True)).all()

    def test_tables_once_for_all_layers(self):
        positions = torch.arange(9)
        tables = rerotation_tables(old=PLAN, new=YARN, positions=positions, new_positions=positions + 3)
        assert tables.cos.shape == (9, 8)
        k = fresh(PLAN, keys(), positions)
        expected = rerotate(k, old=PLAN, new=YARN, positions=positions, new_positions=positions + 3)
        assert torch.equal(RotaryEmbedding(YARN).apply_tables(None, k, tables)[1], expected)


class TestSurroundings:
    """Modes, devices and compilers have no say."""

    @pytest.mark.parametrize("form", ["by", "old and new"])
    def test_compiled(self, form):
        torch._dynamo.reset()
        positions = torch.arange(9)

        def moved(k, by, plan):
            if form == "by":
                return rerotate(k * 2, rotary=plan, by=by)
            return rerotate(k * 2, old=PLAN, new=plan, positions=positions, new_positions=positions + by)

        compiled = torch.compile(moved, backend="aot_eager")
        k, by = keys(torch.bfloat16), torch.arange(18).reshape(2, 9)
        # A plan that differs in nothing but its base is not taken for the one that was compiled.
        for plan in (YARN, replace(YARN, rope_theta=500.0)):
            assert torch.equal(compiled(k, by, plan), moved(k, by, plan))

    def test_tables_from_outside_need_no_break(self):
        torch._dynamo.reset()
        rope, positions = RotaryEmbedding(YARN), torch.arange(9)
        tables = rerotation_tables(old=PLAN, new=YARN, positions=positions)
        compiled = torch.compile(lambda k, t: rope.apply_tables(None, k, t)[1], fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(keys(), tables), rope.apply_tables(None, keys(), tables)[1])

    def test_autocast_and_inference_mode(self):
        k, positions = keys(), torch.arange(9)
        arguments = {"old": PLAN, "new": YARN, "positions": positions, "new_positions": positions + 70}
        expected = rerotate(k, **arguments)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(rerotate(k, **arguments), expected)
        with torch.inference_mode():
            assert torch.equal(rerotate(k, **arguments), expected)

    def test_meta(self):
        k, positions = keys().to("meta"), torch.arange(9, device="meta")
        assert rerotate(k, rotary=PLAN, by=positions).is_meta
        assert rerotate(k, old=PLAN, new=YARN, positions=positions).is_meta
        with pytest.raises(ValueError, match="positions: they are on the meta device and have no values"):
            rerotate(keys(), old=PLAN, new=YARN, positions=positions)


class TestRefusals:
    """Plans that turned other channels, and arguments of both forms at once, are named."""

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"rotary_dim": 8}, "new: got rotary_dim 8; it must be that of old, 16: other channels were turned"),
            ({"interleaved": True}, "new: got interleaved True; it must be that of old, False"),
            ({"trailing": True}, "new: got trailing True; it must be that of old, False"),
            ({"head_dim": 32, "rotary_dim": 16}, "new: got head_dim 32; it must be that of old, 16"),
        ],
    )
    def test_of_plans(self, change, text):
        with pytest.raises(ValueError, match=text):
            rerotate(keys(), old=PLAN, new=replace(PLAN, **change), positions=torch.arange(9))

    @pytest.mark.parametrize("name", ["rotary", "old", "new"])
    @pytest.mark.parametrize(
        ("given", "text"),
        [
            (RotaryEmbedding(PLAN), "got a RotaryEmbedding, a module; it must be a Rotary, the plan: give its .rotary"),
            (LeRoPE(PLAN), "got a LeRoPE, .* its frequencies are learned, and its .rotary is where they began"),
            (10000.0, r"got a float; it must be a Rotary, for example Rotary\(head_dim=64"),
        ],
    )
    def test_of_what_is_no_plan(self, name, given, text):
        move = {"rotary": given, "by": -3}
        change = {"old": PLAN, "new": PLAN, "positions": torch.arange(9), name: given}
        with pytest.raises(ValueError, match=f"{name}: {text}"):
            rerotate(keys(), **(move if name == "rotary" else change))
        if name != "rotary":
            with pytest.raises(ValueError, match=f"{name}: {text}"):
                rerotation_tables(**change)

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ({"rotary": PLAN}, "rerotate: give rotary and by, or old, new and positions"),
            ({"old": PLAN, "new": PLAN}, "rerotate: give rotary and by, or old, new and positions"),
            ({"rotary": PLAN, "by": 3, "positions": torch.arange(9)}, "rerotate: give rotary and by, or old"),
            ({"rotary": PLAN, "by": 2.5}, "by: got 2.5; give a whole number of tokens, or a tensor"),
            ({"rotary": PLAN, "by": True}, "by: got True; give a whole number"),
            ({"rotary": PLAN, "by": torch.arange(9).half()}, r"by: got torch.float16; give integers"),
            ({"rotary": PLAN, "by": torch.arange(8)}, r"by: got 8 for the 9 tokens of k .* heads_first=False reads"),
            ({"rotary": AXES, "by": torch.arange(9)}, r"by: got shape \(9,\); it must be \(axes, B, S\)"),
            ({"rotary": AXES, "by": torch.zeros(2, 1, 9, dtype=torch.int64)}, "by: got 2 axes; this encoding has 3"),
            ({"old": PLAN, "new": YARN, "positions": torch.arange(8)}, "positions: got 8 for the 9 tokens of k"),
            (
                {"old": PLAN, "new": YARN, "positions": torch.arange(9), "new_positions": torch.arange(8)},
                "new_positions: got 8 tokens; positions have 9",
            ),
            (
                {"old": PLAN, "new": AXES, "positions": torch.arange(9)},
                r"new_positions: got None; the old plan has mrope_section None and the new one \(2, 3, 3\)",
            ),
            (
                {
                    "old": PLAN,
                    "new": PLAN,
                    "positions": torch.zeros(2, 9).long(),
                    "new_positions": torch.zeros(3, 9).long(),
                },
                r"new_positions: got shape \(3, 9\); its rows must be those of positions, \(2, 9\), or one",
            ),
            (
                {"old": PLAN, "new": PLAN, "positions": torch.full((9,), 2**24 + 1)},
                r"positions: got 16777217; the tables are exact up to 2\*\*24",
            ),
        ],
    )
    def test_of_arguments(self, arguments, text):
        with pytest.raises(ValueError, match=text):
            rerotate(keys(), **arguments)
