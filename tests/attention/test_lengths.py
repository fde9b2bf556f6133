"""Frequencies that follow a sequence's length: chosen for each row, turned again exactly, and never mixed."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.attention import Attention, Cache, attend_by_policy, attend_plainly
from theodolite.encodings import Policy, RotaryEmbedding, SharedTables, XPos
from theodolite.encodings.rotate import rerotation, tables
from theodolite.encodings.rotate.learned import LearnedBase, LeRoPE
from theodolite.encodings.rotate.length_base import LengthBase
from theodolite.encodings.rotate.parts import RotateByChannel, RotateByHead
from theodolite.encodings.rotate.per_head import PerHeadRotary
from theodolite.plan import DynamicNTK, LongRoPE, Mask, Rotary, YaRN, YaRNByLength

HEADS, KEY_HEADS, DIM, TOKENS, L = 4, 2, 8, 41, 16
PLAN = Rotary(head_dim=DIM, rope_theta=100.0)
SCALINGS = {
    "dynamic NTK": DynamicNTK(factor=4, original_max_position_embeddings=L),
    "LongRoPE": LongRoPE(
        short_factor=(1.0, 1.1, 1.3, 1.2),
        long_factor=(1.0, 2.0, 3.5, 4.0),
        original_max_position_embeddings=L,
        factor=4.0,
    ),
    "YaRN by request": YaRNByLength(yarn=YaRN(factor=4, original_max_position_embeddings=L)),
}
LAYOUTS = {
    "whole": {},
    "partial": {"rotary_dim": 4, "interleaved": True},
    "trailing": {"rotary_dim": 4, "trailing": True, "live_pairs": 1},
}


def plan_of(name: str, **layout) -> Rotary:
    plan, scaling = replace(PLAN, **layout), SCALINGS[name]
    if isinstance(scaling, LongRoPE):
        pairs = plan.rotary_dim // 2
        scaling = replace(scaling, short_factor=scaling.short_factor[:pairs], long_factor=scaling.long_factor[:pairs])
    return replace(plan, scaling=scaling)


def policy_of(name: str, **options) -> Policy:
    return Policy(rotate=RotaryEmbedding(plan_of(name)), **options)


def projected(rows: int, dtype=torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = [(rows, heads, TOKENS, DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def filled(policy: Policy, lengths, tokens: int = 20, cache: Cache | None = None) -> Cache:
    cache = Cache() if cache is None else cache
    _, k, v = projected(len(lengths))
    cache.append(policy, k[:, :, :tokens], v[:, :, :tokens], torch.arange(tokens), lengths=lengths)
    return cache


def one_more(cache: Cache, policy: Policy, lengths, **options) -> None:
    _, k, v = projected(len(cache.kept().k))
    cache.append(policy, k[:, :, 20:21], v[:, :, 20:21], torch.arange(20, 21), lengths=lengths, **options)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@contextmanager
def tables_in_float64():
    """Tables without their rounding to float32, so that what is left of a difference is a difference of angles."""

    def table(angles, amplitude, dtype=None):
        return angles.cos() * amplitude, angles.sin() * amplitude

    def table_by_block(angles, rows, pairs, amplitude):
        return table(angles(slice(0, rows), torch.empty(rows, pairs, dtype=torch.float64)), amplitude)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tables, "cos_sin", table)
        patched.setattr(tables, "cos_sin_by_block", table_by_block)
        patched.setattr(rerotation, "cos_sin_by_block", table_by_block)
        yield


def turned_in_complex(k: torch.Tensor, old: Rotary, new: Rotary, positions: torch.Tensor) -> torch.Tensor:
    """Keys of pairs (i, i + D/2), each a complex number times `ratio * exp(i (w_new - w_old) p)`, in float64."""
    first, second = k.double().chunk(2, -1)
    angle = positions[:, None].double() * torch.from_numpy(new.inv_freq() - old.inv_freq())
    turn = torch.polar(torch.full_like(angle, new.attention_factor() / old.attention_factor()), angle)
    turned = torch.complex(first, second) * turn
    return torch.cat((turned.real, turned.imag), -1)


@st.composite
def feedings(draw):
    """Numbers of tokens that add up to all, each with the lengths of the rows as they are then said to be."""
    rows, left, steps = draw(st.integers(1, 3)), TOKENS, []
    length = st.one_of(st.integers(1, 80), st.sampled_from([L, L + 1]))
    while left:
        tokens = draw(st.integers(1, left) if draw(st.booleans()) else st.just(1))
        steps.append((tokens, draw(st.lists(length, min_size=rows, max_size=rows))))
        left -= tokens
    return rows, steps


class TestAFollowingCache:
    """At every step it is one pass at the lengths of that step: rows cross, and cross back, by themselves."""

    @settings(max_examples=60, deadline=None)
    @given(
        name=st.sampled_from(sorted(SCALINGS)),
        layout=st.sampled_from(sorted(LAYOUTS)),
        values=st.booleans(),
        window=st.sampled_from([None, 7]),
        feeding=feedings(),
        first=st.sampled_from([0, 3000]),
    )
    def test_equals_one_pass(self, name, layout, values, window, feeding, first):
        rows, steps = feeding
        rope = RotaryEmbedding(plan_of(name, **LAYOUTS[layout]))
        policy = Policy(rotate=rope, rotate_values=values, mask=Mask(sliding_window=window))
        (q, k, v), at, start = projected(rows), torch.arange(first, first + TOKENS), 0
        cache = Cache(follow_lengths=True, window=window)
        with tables_in_float64():
            for tokens, lengths in steps:
                now, so_far = slice(start, start + tokens), slice(0, start + tokens)
                cache.append(policy, k[:, :, now], v[:, :, now], at[now], lengths=lengths)
                kept, visible = cache.kept(), cache.sees(at[now])
                given_ = {"visible": visible, "lengths": lengths}
                out = attend_by_policy(
                    policy, q[:, :, now], kept.k, kept.v, at[now], kept.positions, turned=True, **given_
                )
                whole = attend_plainly(
                    policy, q[:, :, now], k[:, :, so_far], v[:, :, so_far], at[now], at[so_far], lengths=lengths
                )
                # float64 throughout: a turn at 3,041 radians is off by 5e-13, and 41 of them add up.
                assert apart(out, whole) < 1e-9
                cache.evict()
                start += tokens

    @settings(max_examples=40, deadline=None)
    @given(name=st.sampled_from(sorted(SCALINGS)), feeding=feedings())
    def test_as_it_is_rounded(self, name, feeding):
        rows, steps = feeding
        policy, (_, k, v), start = policy_of(name), projected(rows), 0
        cache, turns = Cache(follow_lengths=True), torch.zeros(rows)
        old = [None] * rows
        for tokens, lengths in steps:
            now = slice(start, start + tokens)
            cache.append(policy, k[:, :, now], v[:, :, now], torch.arange(TOKENS)[now], lengths=lengths)
            new = [policy.rotate.rotary.at_length(length) for length in lengths]
            turns += torch.tensor([float(start > 0 and a != b) for a, b in zip(old, new, strict=True)])
            old, start = new, start + tokens
        _, fresh = policy.turn(None, k, SharedTables(torch.arange(TOKENS), lengths=lengths))
        pairs = k.unflatten(-1, (2, -1)).norm(dim=-2).repeat(1, 1, 1, 2)
        # Every rotation, those of both sides, has two entries within 6e-8 of the true ones times the factor; what is
        # off already is multiplied by the ratio of the factors later.
        factor = policy.rotate.rotary.attention_factor()
        bound = (turns[:, None, None, None] + 2) * 2**0.5 * 6e-8 * factor**2 * pairs
        assert ((cache.kept().k - fresh).abs() <= bound).all()

    @settings(max_examples=40, deadline=None)
    @given(
        name=st.sampled_from(sorted(SCALINGS)),
        counts=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=2, max_size=6),
        left=st.booleans(),
    )
    def test_rows_that_grow_apart(self, name, counts, left):
        # Each row counts its own tokens, and is said to be as long as it is; padding stands on either side.
        torch.manual_seed(0)
        module = Attention(16, HEADS, policy_of(name), num_kv_heads=KEY_HEADS, head_dim=DIM).double()
        module.requires_grad_(False)
        x, seen, cache = torch.randn(3, 54, 16, dtype=torch.float64), [0, 0, 0], Cache(follow_lengths=True)
        with tables_in_float64():
            for step in counts:
                tokens = max(*step, 1)
                new, at = torch.zeros(3, tokens, 16, dtype=torch.float64), torch.zeros(3, tokens, dtype=torch.int64)
                real = torch.zeros(3, tokens, dtype=torch.bool)
                for row, count in enumerate(step):
                    here = slice(tokens - count, tokens) if left else slice(0, count)
                    there = slice(seen[row], seen[row] + count)
                    new[row, here], at[row, here], real[row, here] = x[row, there], torch.arange(54)[there], True
                    seen[row] += count
                lengths = [max(length, 1) for length in seen]
                out = module(new, at, cache=cache, real=real, lengths=lengths)
                for row, count in enumerate(step):
                    alone = x[row : row + 1, : seen[row]]
                    if count:
                        whole = module(alone, torch.arange(seen[row]), lengths=[seen[row]])[0, -count:]
                        assert apart(out[row, real[row]], whole) < 1e-9

    def test_decoding_across_the_boundary(self):
        # Through the module, in float32, as it is served: 12 tokens, then one by one to 24.
        torch.manual_seed(0)
        x, at = torch.randn(2, 24, 16), torch.arange(24)
        for name in SCALINGS:
            module = Attention(16, HEADS, policy_of(name), num_kv_heads=KEY_HEADS, head_dim=DIM).requires_grad_(False)
            cache, out = Cache(follow_lengths=True), []
            for start, end in ((0, 12), *((token, token + 1) for token in range(12, 24))):
                now = slice(start, end)
                out.append(module(x[:, now], at[now], cache=cache, lengths=[end, 9]))
            long = module(x, at, lengths=[24, 9])
            # The row that crossed, at its last token; the row that did not, at all of them.
            assert apart(out[-1][0, -1], long[0, -1]) < 1e-5
            assert apart(torch.cat(out, 1)[1], long[1]) < 1e-5
            assert apart(long[0, -1], module(x, at, lengths=[9, 9])[0, -1]) > 1e-3


class TestOneRotation:
    """A key is turned once by the difference of its angles and rounded once; others are not touched."""

    @pytest.mark.parametrize("name", SCALINGS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_against_complex_numbers(self, name, dtype):
        policy, (_, k, v), at = policy_of(name), projected(3, dtype), torch.arange(500, 541)
        cache = Cache()
        cache.append(policy, k, v, at, lengths=[10, 30, 10])
        before = cache.kept().k.clone()
        cache.turn_to(policy, lengths=[40, 30, 16])
        after, plan = cache.kept().k, policy.rotate.rotary
        assert torch.equal(after[1:], before[1:])
        exact = turned_in_complex(before[0], plan.at_length(10), plan.at_length(40), at)
        length = exact.unflatten(-1, (2, -1)).norm(dim=-2).repeat(1, 1, 2)
        # Two entries of the table, two products and a sum, in float32; then one rounding to the dtype.
        bound = 5 * 2.0**-24 * length + torch.finfo(dtype).eps / 2 * exact.abs() + torch.finfo(dtype).tiny
        assert ((after[0].double() - exact).abs() <= bound).all()
        assert not torch.equal(after[0], before[0])
        assert torch.equal(cache.kept().v, v)

    @pytest.mark.parametrize("name", SCALINGS)
    def test_to_and_from_another_plan(self, name):
        policy, (_, k, v) = policy_of(name, rotate_values=True), projected(2)
        other = Policy(rotate=RotaryEmbedding(replace(PLAN, rope_theta=5000.0)), rotate_values=True)
        cache = filled(policy, [40, 9], TOKENS)
        with tables_in_float64():
            cache = filled(policy, [40, 9], TOKENS)
            cache.turn_to(other)
            at = SharedTables(torch.arange(TOKENS))
            assert apart(cache.kept().k, other.turn(None, k, at)[1]) < 1e-12
            assert apart(cache.kept().v, other.turn_values(v, at)) < 1e-12
            cache.turn_to(policy, lengths=torch.tensor([10, 50]))
            at = SharedTables(torch.arange(TOKENS), lengths=[10, 50])
            assert apart(cache.kept().k, policy.turn(None, k, at)[1]) < 1e-12
            assert apart(cache.kept().v, policy.turn_values(v, at)) < 1e-12

    @pytest.mark.parametrize("name", SCALINGS)
    def test_moved(self, name):
        policy, (_, k, v) = policy_of(name, rotate_values=True), projected(2)
        with tables_in_float64():
            cache = filled(policy, [40, 9], TOKENS)
            cache.move(500)
            at = SharedTables(torch.arange(500, 500 + TOKENS), lengths=[40, 9])
            assert apart(cache.kept().k, policy.turn(None, k, at)[1]) < 1e-12
            assert apart(cache.kept().v, policy.turn_values(v, at)) < 1e-12

    def test_rows_in_another_order_keep_their_lengths(self):
        policy, rows = policy_of("LongRoPE"), torch.tensor([1, 1, 0])
        cache = filled(policy, [40, 9])
        cache.select(rows)
        with pytest.raises(ValueError, match=r"turned by .* at lengths \[9, 9, 40\], .* at lengths \[40, 9, 9\]"):
            one_more(cache, policy, [40, 9, 9])
        one_more(cache, policy, [9, 16, 41])
        with tables_in_float64():
            cache = filled(policy, [40, 9])
            cache.select(rows)
            cache.turn_to(policy, lengths=[9, 40, 9])
            at = SharedTables(torch.arange(20), lengths=[9, 40, 9])
            assert apart(cache.kept().k, policy.turn(None, projected(2)[1][rows, :, :20], at)[1]) < 1e-12


class TestARowIsTurnedOneWay:
    """A length that leaves a row's frequencies as they are is no change; one that does not is refused."""

    @pytest.mark.parametrize("name", SCALINGS)
    def test_up_to_the_original_length(self, name):
        policy = policy_of(name)
        cache = filled(policy, [3, 16])
        before = cache.kept().k.clone()
        one_more(cache, policy, [16, 1])
        assert torch.equal(cache.kept().k[:, :, :20], before)
        with pytest.raises(ValueError, match=r"at lengths \[16, 1\], and this layer turns by .* at lengths \[17, 1\]"):
            one_more(cache, policy, [17, 1])
        assert len(cache) == 21

    @pytest.mark.parametrize(("name", "refused"), [("dynamic NTK", True), ("LongRoPE", False)])
    def test_past_it(self, name, refused):
        policy = policy_of(name)
        cache = filled(policy, [17, 40])
        if refused:
            with pytest.raises(ValueError, match=r"use Cache\(turned=False\) where frequencies change, Cache\(follow"):
                one_more(cache, policy, [18, 40])
        else:
            one_more(cache, policy, [18, 17])

    def test_a_row_that_was_emptied_chooses_anew(self):
        policy = policy_of("YaRN by request")
        cache = filled(policy, [9, 9])
        cache.truncate(torch.tensor([0, 20]))
        one_more(cache, policy, [40, 9])
        cache.truncate(0)
        one_more(cache, policy, [9, 40])


DEPENDENT = {
    "per head": lambda plan: PerHeadRotary([PLAN, plan]),
    "by head": lambda plan: RotateByHead([(RotaryEmbedding(PLAN), 1), (RotaryEmbedding(plan), 1)]),
    "LeRoPE": LeRoPE,
    "learned base": LearnedBase,
    "base by length": lambda plan: LengthBase(PLAN, theta_min=10.0, theta_max=1e6, reference_length=16),
}
INDEPENDENT = {
    "rotary": lambda: RotaryEmbedding(PLAN),
    "per head": lambda: PerHeadRotary([PLAN, replace(PLAN, rope_theta=500.0)]),
    "by channel": lambda: RotateByChannel([(RotaryEmbedding(PLAN), DIM)]),
    "LeRoPE": lambda: LeRoPE(PLAN),
    "xPos": lambda: XPos(PLAN, centre=0),
}


class TestNeverMixed:
    """Every way to read keys of one length by queries of another is an error, and leaves the cache as it was."""

    @pytest.mark.parametrize("follow", [False, True])
    @pytest.mark.parametrize("name", DEPENDENT)
    def test_rotations_of_other_kinds(self, name, follow):
        rotate = DEPENDENT[name](replace(PLAN, scaling=SCALINGS["dynamic NTK"]))
        policy = Policy(rotate=rotate).requires_grad_(False)
        cache = filled(policy, [10, 10], cache=Cache(follow_lengths=follow))
        one_more(cache, policy, [10, 10])
        before = cache.kept().k.clone()
        with pytest.raises(ValueError, match=r"cache: .* turned .* use Cache\(turned=False\)"):
            one_more(cache, policy, [10, 40])
        assert torch.equal(cache.kept().k, before)
        one_more(cache, policy, [10, 10])

    @pytest.mark.parametrize("name", INDEPENDENT)
    def test_lengths_of_no_effect(self, name):
        # Layers of several kinds share one forward's lengths.
        policy = Policy(rotate=INDEPENDENT[name]()).requires_grad_(False)
        cache = filled(policy, [10, 10])
        one_more(cache, policy, [10, 40])
        assert len(cache) == 21

    def test_tables_of_other_lengths(self):
        policy, at = policy_of("LongRoPE"), torch.arange(20, 21)
        for follow in (False, True):
            cache = filled(policy, [9, 9], cache=Cache(follow_lengths=follow))
            with pytest.raises(ValueError, match=r"tables: they are of lengths \(9, 40\); lengths are \(9, 9\)"):
                one_more(cache, policy, [9, 9], tables=SharedTables(at, lengths=[9, 40]))
        cache = filled(policy, [9, 9])
        with pytest.raises(ValueError, match=r"at lengths \[9, 9\], and this layer turns by .* at lengths \[9, 40\]"):
            one_more(cache, policy, None, tables=SharedTables(at, lengths=[9, 40]))
        one_more(cache, policy, None, tables=SharedTables(at, lengths=[9, 9]))

    def test_another_base_is_not_followed(self):
        policy = policy_of("LongRoPE")
        cache = filled(policy, [9, 9], cache=Cache(follow_lengths=True))
        other = Policy(rotate=RotaryEmbedding(replace(policy.rotate.rotary, rope_theta=500.0)))
        for wrong in (other, Policy()):
            with pytest.raises(ValueError, match=r"cache: its keys were turned by .*100\.0"):
                one_more(cache, wrong, [9, 40])
        with pytest.raises(ValueError, match=r"cache: its keys were turned by .*, values too"):
            one_more(cache, policy_of("LongRoPE", rotate_values=True), [9, 9])

    def test_values_that_turned_or_did_not(self):
        policy = policy_of("LongRoPE")
        cache = filled(policy, [9, 9])
        with pytest.raises(ValueError, match="cache: the keys were turned by nothing, and are turned again from a Rot"):
            filled(Policy(), [9, 9]).turn_to(policy, lengths=[9, 9])
        with pytest.raises(ValueError, match="policy: rotate_values differs from that of the keys and values"):
            cache.turn_to(policy_of("LongRoPE", rotate_values=True), lengths=[9, 9])

    def test_no_length(self):
        policy = policy_of("LongRoPE")
        _, k, v = projected(2)
        for cache in (Cache(), Cache(follow_lengths=True)):
            with pytest.raises(ValueError, match="rotary: 'longrope' has frequencies that depend on the length"):
                cache.append(policy, k, v, torch.arange(TOKENS))
        cache = filled(policy, [9, 9], cache=Cache(follow_lengths=True))
        with pytest.raises(ValueError, match="rotary: 'longrope' has frequencies that depend on the length"):
            one_more(cache, policy, None)
        for lengths, text in ((None, "policy: got .* give lengths="), ([9, 9, 9], "lengths: got 3 for 2 rows")):
            with pytest.raises(ValueError, match=text):
                cache.turn_to(policy, lengths=lengths)

    @pytest.mark.parametrize("axes", [True, False])
    def test_keys_that_stand_elsewhere(self, axes):
        # The mask goes by the number of a token, its angles by the axes of a picture, or by whatever tables say.
        plan = replace(plan_of("dynamic NTK"), mrope_section=(2, 1, 1) if axes else None)
        policy, cache = Policy(rotate=RotaryEmbedding(plan)), Cache(follow_lengths=True)

        def at(first, last, lengths):
            places = torch.arange(first, last).expand(3, 2, -1) if axes else 2 * torch.arange(first, last)
            return SharedTables(places, lengths=lengths)

        _, k, v = projected(2)
        cache.append(policy, k[:, :, :20], v[:, :, :20], torch.arange(20), tables=at(0, 20, [9, 9]))
        # One token in its place does not bring the others to theirs.
        one_more(
            cache,
            policy,
            None,
            tables=at(20, 21, [9, 16]) if axes else SharedTables(torch.tensor([20]), lengths=[9, 16]),
        )
        before = cache.kept().k.clone()
        with pytest.raises(ValueError, match="cache: its keys were turned at other positions than it keeps"):
            one_more(cache, policy, None, tables=at(20, 21, [9, 40]))
        with pytest.raises(ValueError, match="cache: its keys were turned at other positions than it keeps"):
            cache.turn_to(policy, lengths=[9, 40])
        assert torch.equal(cache.kept().k, before)
        cache.truncate(0)
        same = SharedTables(torch.arange(20), lengths=[9, 9])
        policy = policy_of("dynamic NTK")
        cache.append(policy, k[:, :, :20], v[:, :, :20], torch.arange(20).expand(2, 20), tables=same)
        one_more(cache, policy, [9, 40])

    def test_an_error_leaves_the_keys_as_they_were(self):
        policy = policy_of("dynamic NTK")
        cache = filled(policy, [9, 9], cache=Cache(follow_lengths=True, capacity=20))
        before = cache.kept().k.clone()
        with pytest.raises(ValueError, match="cache: 20 of its 20 slots are in use"):
            one_more(cache, policy, [40, 40])
        _, k, v = projected(2)
        cache.capacity = None
        with pytest.raises(ValueError, match="k: got"):
            cache.append(policy, k[:, :, :1, :6], v[:, :, :1], torch.arange(20, 21), lengths=[40, 40])
        with pytest.raises(ValueError, match=r"k: got shape \(1, 2, 1, 8\), .* the cache has \(2, 2, S, 8\)"):
            cache.append(policy, k[:1, :, :1], v[:1, :, :1], torch.arange(20, 21), lengths=[40])
        with pytest.raises(ValueError, match=r"policy: got .*; keys are turned again to a RotaryEmbedding"):
            cache.turn_to(Policy(rotate=XPos(PLAN, centre=0)))
        assert torch.equal(cache.kept().k, before)
        one_more(cache, policy, [9, 9])

    def test_keys_as_projected_follow_anyway(self):
        with pytest.raises(ValueError, match="follow_lengths: got True with turned=False"):
            Cache(turned=False, follow_lengths=True)
