"""What the rotation promises its callers: layouts, identities, refusals, cost, and that no call depends on another."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from theodolite.encodings import rotary_tables
from theodolite.kernels import api, native, recipes, rotate
from theodolite.plan import Rotary, YaRN

from .cases import exact, formula, implementations, nan, randn, running, same_bits

# The best of the native ones, block by block in torch, and as operations of torch.
WAYS = implementations()[-3:]
LAYOUTS = list(itertools.product([False, True], [None, 16], [False, True]))


def tables(tokens: int, pairs: int, *, start: int = 11, batch: int | None = None):
    positions = torch.arange(start, start + tokens)
    if batch is not None:
        positions = positions + 1000 * torch.arange(batch)[:, None]
    return rotary_tables(Rotary(head_dim=2 * pairs, rope_theta=10000.0), positions)


class TestAgainstTheOracle:
    """With the tables of a model, at lengths that fill no block: the conformance suite has all other calls."""

    @pytest.mark.parametrize(("interleaved", "rotary_dim", "trailing"), LAYOUTS)
    @pytest.mark.parametrize("tokens", [1, 63, 100, 2000])
    def test_float32(self, tokens, interleaved, rotary_dim, trailing):
        q, k = randn(2, 4, tokens, 32), randn(2, 1, tokens, 32, seed=1)
        layout = {"interleaved": interleaved, "rotary_dim": rotary_dim, "trailing": trailing}
        cos, sin = tables(tokens, (rotary_dim or 32) // 2, batch=2)
        for x, out in zip((q, k), rotate(q, k, cos, sin, **layout), strict=True):
            expected, bound = exact(x, cos, sin, **layout)
            assert ((out.double() - expected).abs() <= bound).all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(("interleaved", "rotary_dim", "trailing"), LAYOUTS)
    @pytest.mark.parametrize("inplace", [False, True])
    def test_half_precision_is_the_float32_result_rounded_once(self, dtype, interleaved, rotary_dim, trailing, inplace):
        q = randn(2, 4, 100, 32, dtype=dtype)
        layout = {"interleaved": interleaved, "rotary_dim": rotary_dim, "trailing": trailing}
        cos, sin = tables(100, (rotary_dim or 32) // 2)
        expected = rotate(q.float(), None, cos, sin, **layout)[0].to(dtype)
        assert torch.equal(rotate(q.clone(), None, cos, sin, **layout, inplace=inplace)[0], expected)

    def test_float64_tables_for_any_input(self):
        q = randn(1, 2, 9, 8, dtype=torch.bfloat16)
        cos, sin = tables(9, 4)
        assert torch.equal(rotate(q, None, cos.double(), sin.double())[0], rotate(q, None, cos, sin)[0])


class TestLayouts:
    """The axis of tokens and the partner of a channel are said, never guessed: a wrong guess is silent."""

    @pytest.mark.parametrize("batch", [None, 3])
    def test_heads_first_or_tokens_first(self, batch):
        # As many heads as tokens, so that a wrong axis would fit.
        q, k = randn(3, 5, 5, 16), randn(3, 5, 5, 16, seed=1)
        cos, sin = tables(5, 8, batch=batch)
        expected = rotate(q, k, cos, sin)
        out = rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin, heads_first=False)
        assert torch.equal(out[0].transpose(1, 2), expected[0])
        assert torch.equal(out[1].transpose(1, 2), expected[1])

    def test_all_heads_of_a_token_turn_alike(self):
        q = randn(1, 1, 1, 16).expand(1, 5, 5, 16)
        out = rotate(q, None, *tables(5, 8))[0]
        assert torch.equal(out, out[:, :1].expand_as(out))
        assert not torch.equal(out[:, :, 0], out[:, :, 1])

    def test_interleaved_is_half_split_permuted(self):
        q, (cos, sin) = randn(2, 3, 63, 16), tables(63, 8)
        permutation = torch.cat([torch.arange(0, 16, 2), torch.arange(1, 16, 2)])
        interleaved = rotate(q, None, cos, sin, interleaved=True)[0]
        assert torch.equal(interleaved[..., permutation], rotate(q[..., permutation], None, cos, sin)[0])

    @pytest.mark.parametrize("trailing", [False, True])
    @pytest.mark.parametrize("interleaved", [False, True])
    def test_partners_lie_inside_the_part_that_turns(self, interleaved, trailing):
        q, (cos, sin) = randn(1, 2, 9, 32), tables(9, 6)
        out = rotate(q, None, cos, sin, rotary_dim=12, trailing=trailing, interleaved=interleaved)[0]
        part, rest = (slice(20, None), slice(0, 20)) if trailing else (slice(0, 12), slice(12, None))
        assert torch.equal(
            out[..., part], rotate(q[..., part].contiguous(), None, cos, sin, interleaved=interleaved)[0]
        )
        assert torch.equal(out[..., rest], q[..., rest])

    @pytest.mark.parametrize("inplace", [False, True])
    def test_passing_channels_keep_their_bits(self, inplace):
        q = randn(1, 2, 9, 32, dtype=torch.bfloat16)
        q[..., 12:] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40]).repeat(5).to(torch.bfloat16)
        before = q.clone()
        out = rotate(q, None, *tables(9, 6), rotary_dim=12, inplace=inplace)[0]
        assert torch.equal(out[..., 12:].view(torch.int16), before[..., 12:].view(torch.int16))

    def test_pairs_that_stand_still_pass_through(self):
        plan = Rotary(head_dim=512, rope_theta=1e6, live_pairs=64)
        q = randn(1, 1, 7, 512)
        out = rotate(q, None, *rotary_tables(plan, torch.arange(9, 16)))[0]
        still = [*range(64, 256), *range(320, 512)]
        assert torch.equal(out[..., still], q[..., still])
        assert (out[..., :64] != q[..., :64]).any(-1).all()

    def test_either_may_be_none(self):
        q, (cos, sin) = randn(1, 2, 9, 8), tables(9, 4)
        both = rotate(q, q, cos, sin)
        assert rotate(None, None, cos, sin) == (None, None)
        assert torch.equal(rotate(None, q, cos, sin)[1], both[1])
        assert rotate(q, None, cos, sin)[1] is None


class TestStrides:
    """Views are read as they lie: a fused projection or a transposed cache needs no copy and gives no other bits."""

    @pytest.mark.parametrize("inplace", [False, True])
    @pytest.mark.parametrize("interleaved", [False, True])
    def test_slices_of_a_fused_projection(self, inplace, interleaved):
        fused = randn(2, 63, 8, 32)
        before = fused.clone()
        q, k = fused[:, :, :4], fused[:, :, 4:6]
        cos, sin = tables(63, 16, batch=2)
        options = {"heads_first": False, "interleaved": interleaved}
        expected = rotate(q.contiguous(), k.contiguous(), cos, sin, **options)
        out = rotate(q, k, cos, sin, **options, inplace=inplace)
        assert torch.equal(out[0], expected[0])
        assert torch.equal(out[1], expected[1])
        assert torch.equal(fused[:, :, 6:], before[:, :, 6:])
        assert torch.equal(fused, before) != inplace
        if inplace:
            assert out[0] is q
            assert torch.equal(fused[:, :, :4], expected[0])

    @pytest.mark.parametrize("way", WAYS[:-1])
    def test_results_lie_as_what_was_turned(self, way):
        (cos, sin), q = tables(9, 8), randn(2, 9, 3, 16).transpose(1, 2)
        with running(way):
            for _ in range(2):
                assert rotate(q, None, cos, sin)[0].stride() == torch.empty_like(q).stride()

    def test_packed_sequences(self):
        # Three sequences, one after the other, each with positions of its own.
        q, k, (cos, sin) = randn(16, 4, 8), randn(16, 2, 8, seed=1), tables(20, 4)
        lengths = [5, 1, 10]
        positions = torch.cat([torch.arange(length) + 3 for length in lengths])
        packed = rotate(q, k, cos, sin, positions=positions, heads_first=False)
        for x, out in zip((q, k), packed, strict=True):
            alone = [
                rotate(part[None], None, cos[3 : 3 + len(part)], sin[3 : 3 + len(part)], heads_first=False)[0][0]
                for part in x.split(lengths)
            ]
            assert torch.equal(out, torch.cat(alone))
            first = rotate(x.transpose(0, 1), None, cos, sin, positions=positions)[0]
            assert torch.equal(first.transpose(0, 1), out)

    def test_inplace_on_a_tensor_that_overlaps_itself_is_refused(self):
        k = randn(2, 1, 9, 16).expand(2, 3, 9, 16)
        with pytest.raises(RuntimeError, match="k: it overlaps itself"):
            rotate(None, k, *tables(9, 8), inplace=True)


class TestIdentities:
    """What makes it a relative position: norms stay, and a score knows only the distance."""

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_norms_are_kept(self, interleaved):
        q = randn(2, 3, 100, 32, dtype=torch.float64)
        out = rotate(q, None, *tables(100, 16, start=1_000_000), interleaved=interleaved)[0]
        # cos^2 + sin^2 of entries off by at most 6e-8 each.
        assert (out.norm(dim=-1) / q.norm(dim=-1) - 1).abs().max() <= 2**0.5 * 6e-8

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("shift", [1, 1000, 1_000_003])
    def test_scores_know_only_the_distance(self, interleaved, shift):
        q, k = randn(1, 1, 1, 64, dtype=torch.float64), randn(1, 1, 1, 64, dtype=torch.float64, seed=1)

        def score(query, key):
            turned_q = rotate(q, None, *tables(1, 32, start=query), interleaved=interleaved)[0]
            return (turned_q * rotate(k, None, *tables(1, 32, start=key), interleaved=interleaved)[0]).sum()

        # Each of the four tables moves a turned vector by at most sqrt(2) * 6e-8 of its length.
        bound = 4 * 2**0.5 * 6e-8 * q.norm() * k.norm()
        assert (score(7 + shift, 3 + shift) - score(7, 3)).abs() <= bound
        assert (score(7, 3) - score(3, 7)).abs() > 100 * bound

    @pytest.mark.parametrize("inplace", [False, True])
    @pytest.mark.parametrize(("interleaved", "rotary_dim", "trailing"), LAYOUTS)
    def test_conjugate_is_the_inverse(self, interleaved, rotary_dim, trailing, inplace):
        q = randn(2, 3, 63, 32, dtype=torch.float64)
        cos, sin = tables(63, (rotary_dim or 32) // 2)
        layout = {"interleaved": interleaved, "rotary_dim": rotary_dim, "trailing": trailing}
        there = rotate(q, None, cos, sin, **layout)[0]
        back = rotate(there, None, cos, sin, **layout, conjugate=True, inplace=inplace)[0]
        # cos^2 + sin^2 is off by at most 2 sqrt(2) * 6e-8.
        assert ((back - q).abs() <= 3 * 6e-8 * q.norm(dim=-1, keepdim=True)).all()

    def test_conjugate_is_a_negative_sine(self):
        q, (cos, sin) = randn(2, 3, 63, 32), tables(63, 16)
        assert torch.equal(rotate(q, None, cos, sin, conjugate=True)[0], rotate(q, None, cos, -sin)[0])

    def test_position_zero_changes_nothing(self):
        q = randn(1, 2, 1, 8)
        assert torch.equal(rotate(q, None, *tables(1, 4, start=0))[0], q)

    def test_moving_a_rotated_key(self):
        # Under YaRN a key carries the attention factor once, however often it is moved.
        plan = Rotary(head_dim=32, rope_theta=1e4, scaling=YaRN(factor=4, original_max_position_embeddings=64))
        k = randn(1, 2, 20, 32, dtype=torch.float64)
        positions = torch.arange(20)
        key = rotate(None, k, *rotary_tables(plan, positions))[1]
        for move in (5, 300, -200):
            key = rotate(None, key, *rotary_tables(plan, torch.full((20,), move), amplitude=False))[1]
        direct = rotate(None, k, *rotary_tables(plan, positions + 105))[1]
        # Five tables in all, each off by at most 1.14 * sqrt(2) * 6e-8 of the length.
        assert ((key - direct).abs() <= 5 * 1.14 * 2**0.5 * 6e-8 * direct.norm(dim=-1, keepdim=True)).all()
        back = rotate(None, key, *rotary_tables(plan, positions + 105, amplitude=False), conjugate=True)[1]
        assert (
            (back / plan.attention_factor() - k).abs() <= 6 * 1.14 * 2**0.5 * 6e-8 * k.norm(dim=-1, keepdim=True)
        ).all()


class TestRefusals:
    """A shape that fits by accident is the silent fault; one that does not fit names the argument."""

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"q": torch.zeros(9, 8)}, r"q: got shape \(9, 8\); it must have four dimensions, .* or three where sequ"),
            ({"q": [[0.0]]}, "q: got list; it must be a tensor"),
            ({"q": torch.zeros(9, 2, 8)}, r"cos: got shape \(9, 4\); for q of shape \(9, 2, 8\) read as \(H, T, D\)"),
            ({"q": torch.zeros(1, 2, 9, 8, dtype=torch.int64)}, "q: got torch.int64; it must be float16, bfloat16"),
            (
                {"k": torch.zeros(1, 2, 8, 8)},
                r"cos: got shape \(9, 4\); for k of shape \(1, 2, 8, 8\) read as \(B, H, S",
            ),
            (
                {"heads_first": False},
                r"cos: got shape \(9, 4\); for q .* read as \(B, S, H, D\) .*; or is it \(B, H, S, D\)\? then say "
                "heads_first=True",
            ),
            (
                {"cos": torch.ones(20, 4), "sin": torch.ones(20, 4)},
                r"cos: got shape \(20, 4\); .*; positions= picks the rows of a longer table",
            ),
            (
                {"cos": torch.ones(9, 2), "sin": torch.ones(9, 2)},
                r"cos: got shape \(9, 2\); .*; where part of a head turns, say rotary_dim=4",
            ),
            (
                {"cos": torch.ones(9, 4, dtype=torch.complex64)},
                "cos: got torch.complex64; tables are float32 or float64, .*; of complex ones give .real and .imag",
            ),
            (
                {"cos": torch.ones(9, 5)},
                r"cos: got shape \(9, 5\); .* rotary_dim 8 it must be \(9, 4\) or \(1, 9, 4\), .* or have 8 columns",
            ),
            ({"cos": torch.ones(9, 8)}, r"sin: got shape \(9, 4\); it must be that of cos, \(9, 8\)"),
            ({"cos": torch.ones(8, 4)}, r"cos: got shape \(8, 4\)"),
            ({"cos": torch.ones(2, 9, 4)}, r"cos: got shape \(2, 9, 4\); for q .* it must be \(9, 4\) or \(1, 9, 4\)"),
            ({"cos": torch.ones(4)}, r"cos: got shape \(4,\)"),
            ({"cos": None}, "cos: got a NoneType; it must be a tensor"),
            ({"sin": 1.0}, "sin: got a float; it must be a tensor"),
            ({"cos": torch.ones(9, 4, dtype=torch.int64)}, "cos: got torch.int64; tables are float32 or float64"),
            ({"sin": torch.ones(9, 4, dtype=torch.float64)}, "sin: got torch.float64; it must be that of cos"),
            (
                {"k": torch.zeros(1, 1, 9, 16), "cos": torch.ones(9, 8), "sin": torch.ones(9, 8)},
                "k: got 16 channels a head, and q has 8; say with rotary_dim how many turn",
            ),
            ({"out_q": torch.zeros(1, 2, 8, 8)}, r"out_q: got torch.float32 \(1, 2, 8, 8\) on cpu; it must be as q"),
            ({"out_k": torch.zeros(1, 1, 9, 8).half()}, r"out_k: got torch.float16 .*; it must be as k: torch.float32"),
            ({"out_k": [0.0]}, "out_k: got a list; it must be as k"),
            ({"out_q": torch.zeros(1, 2, 9, 8), "inplace": True}, "out_q: it is given, and inplace=True writes elsew"),
            ({"k": None, "out_k": torch.zeros(1, 1, 9, 8)}, "out_k: it is given, and k is None"),
            ({"sin": torch.ones(3, 9, 4)}, r"sin: got shape \(3, 9, 4\)"),
            ({"sin": torch.ones(9, 4, dtype=torch.bfloat16)}, "sin: got torch.bfloat16; tables are float32 or float64"),
            ({"rotary_dim": 3}, "rotary_dim: got 3; it must be even"),
            ({"rotary_dim": 0}, "rotary_dim: got 0"),
            ({"rotary_dim": 10}, "rotary_dim: got 10; .* at most the 8 channels of q"),
            (
                {"cos": torch.ones(9, 4, requires_grad=True), "inplace": True},
                "cos: it requires a gradient, which needs q as it was; use inplace=False",
            ),
            (
                {"cos": torch.ones(1, 3, 9, 4)},
                r"cos: got shape \(1, 3, 9, 4\); .* or \(1, Ht, 9, 4\) where Ht divides 2",
            ),
            ({"sin": torch.ones(1, 9, 4)}, r"sin: got shape \(1, 9, 4\); it must be that of cos, \(9, 4\)"),
        ],
    )
    def test_names_the_argument(self, change, text, way):
        cos, sin = tables(9, 4)
        given = {"q": torch.zeros(1, 2, 9, 8), "k": torch.zeros(1, 1, 9, 8), "cos": cos, "sin": sin}
        with running(way):
            rotate(**given)
            with pytest.raises(ValueError, match=f"^{text}"):
                rotate(**given | change)

    def test_nothing_is_written_before_all_is_checked(self):
        q, (cos, sin) = randn(1, 2, 9, 8), tables(9, 4)
        before = q.clone()
        with pytest.raises(ValueError, match="k: got shape"):
            rotate(q, torch.zeros(3), cos, sin, inplace=True)
        assert torch.equal(q, before)

    def test_one_tensor_is_not_turned_twice(self):
        q, (cos, sin) = randn(1, 2, 9, 8), tables(9, 4)
        with pytest.raises(ValueError, match="k: it shares elements with q"):
            rotate(q, q, cos, sin, inplace=True)


class TestUninitialisedMemory:
    """Every channel of the output is written: with memory full of NaN, nothing of it shows."""

    @pytest.fixture(autouse=True)
    def _nan_in_new_memory(self):
        torch.use_deterministic_algorithms(True)
        filled, torch.utils.deterministic.fill_uninitialized_memory = (
            torch.utils.deterministic.fill_uninitialized_memory,
            True,
        )
        yield
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(False)

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize(("interleaved", "rotary_dim", "trailing"), LAYOUTS)
    def test_does_not_leak(self, interleaved, rotary_dim, trailing, way):
        assert torch.empty(3).isnan().all()
        q = randn(2, 3, 63, 32).transpose(1, 2).contiguous().transpose(1, 2)
        layout = {"interleaved": interleaved, "rotary_dim": rotary_dim, "trailing": trailing}
        with running(way):
            for _ in range(2):
                out = rotate(q, None, *tables(63, (rotary_dim or 32) // 2), **layout)[0]
                assert out.isfinite().all()


class TestCost:
    """No joining of halves, no copy of a table, no scratch that grows with the input."""

    @staticmethod
    def peak(call) -> int:
        """Bytes of torch's memory that a call holds at once."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            call()
        now = peak = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                now += event.nbytes()
                peak = max(peak, now)
        return peak

    @pytest.mark.parametrize("way", WAYS[:-1])
    @pytest.mark.parametrize("options", [{}, {"interleaved": True}, {"rotary_dim": 32}], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("inplace", [False, True])
    def test_scratch_is_a_few_blocks(self, dtype, inplace, options, way):
        q, (cos, sin) = torch.randn(1, 8, 32768, 64).to(dtype), tables(32768, options.get("rotary_dim", 64) // 2)
        positions, result = torch.arange(32767, -1, -1), 0 if inplace else q.nbytes
        with running(way):
            rotate(q[:, :, :64], None, cos[:64], sin[:64], **options)
            # The first call, and one that is remembered.
            for _ in range(2):
                used = self.peak(lambda: rotate(q, None, cos, sin, positions=positions, inplace=inplace, **options))
                # Eight blocks at most; rows that were picked would be 4 MiB for each table, half of the heads 32 MiB.
                assert result <= used <= result + (0 if way.startswith("native") else 10 * 2**20)

    @pytest.mark.parametrize("way", WAYS[:-1])
    def test_backward_is_a_rotation_of_the_same_cost(self, way):
        q, (cos, sin) = randn(1, 8, 8192, 64).requires_grad_(), tables(8192, 32)
        with running(way):
            out = rotate(q, None, cos, sin)[0]
            grad = torch.ones_like(out)
            forward = self.peak(lambda: rotate(q, None, cos, sin))
            assert self.peak(lambda: torch.autograd.grad(out, q, grad)) <= forward


class TestTurnedTwice:
    """In place, an element that is in q and in k would be turned twice; parts of a fused projection are not."""

    def fused(self):
        return torch.randn(2, 5, 6 * 8, generator=torch.Generator().manual_seed(0))

    @pytest.mark.parametrize(
        "views",
        [
            lambda x: (x, x[:]),
            lambda x: (x, x[:, :2]),
            lambda x: (x[:, :3], x[:, 2:5]),
            lambda x: (x[:, 2:5], x[:, :3]),
            lambda x: (x[:, ::2], x[:, ::3]),
        ],
        ids=["whole", "a part", "overlap", "overlap, behind", "every second and third"],
    )
    @pytest.mark.parametrize("way", WAYS)
    def test_shared_elements_are_refused(self, views, way):
        x = self.fused().unflatten(-1, (6, 8)).transpose(1, 2)
        kept = x.clone()
        with running(way), pytest.raises(ValueError, match="k: it shares elements with q"):
            rotate(*views(x), *tables(5, 4), inplace=True)
        assert torch.equal(x, kept)

    @pytest.mark.parametrize("heads", [(2, 2), (4, 1), (1, 5)])
    def test_parts_of_a_fused_projection(self, heads):
        fused = self.fused()
        x = fused.unflatten(-1, (6, 8)).transpose(1, 2)
        q, k = x[:, : heads[0]], x[:, heads[0] : sum(heads)]
        expected = rotate(q, k, *tables(5, 4))
        rotate(q, k, *tables(5, 4), inplace=True)
        assert torch.equal(q, expected[0])
        assert torch.equal(k, expected[1])

    def test_nothing_is_turned_where_one_is_refused(self):
        q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 5, 8).expand(1, 2, 5, 8)
        kept = q.clone()
        with pytest.raises(RuntimeError, match="k: it overlaps itself"):
            rotate(q, k, *tables(5, 4), inplace=True)
        assert torch.equal(q, kept)


class TestTablesPerHead:
    """Heads with frequencies of their own; grouped queries follow their key."""

    @pytest.mark.parametrize("heads_first", [True, False])
    @pytest.mark.parametrize("inplace", [True, False])
    @pytest.mark.parametrize("rotary_dim", [None, 4])
    @pytest.mark.parametrize("batch", [1, 2])
    def test_each_head_turns_by_its_own(self, heads_first, inplace, rotary_dim, batch):
        generator = torch.Generator().manual_seed(0)
        q, k = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (6, 2))
        cos, sin = torch.randn(2, batch, 2, 5, (rotary_dim or 8) // 2, generator=generator)
        alone = [
            torch.cat(
                [
                    rotate(
                        x[:, [head]],
                        None,
                        *(table[:, head * 2 // x.shape[1]] for table in (cos, sin)),
                        rotary_dim=rotary_dim,
                    )[0]
                    for head in range(x.shape[1])
                ],
                dim=1,
            )
            for x in (q, k)
        ]
        if not heads_first:
            q, k = (x.transpose(1, 2).contiguous() for x in (q, k))
        together = rotate(q, k, cos, sin, rotary_dim=rotary_dim, heads_first=heads_first, inplace=inplace)
        for mine, true, given in zip(together, alone, (q, k), strict=True):
            assert torch.equal(mine if heads_first else mine.transpose(1, 2), true)
            assert (mine is given) == inplace


def gaps(x: Tensor) -> Tensor:
    return torch.stack([x, x + 1], -1)[..., 0]


def beside(x: Tensor) -> Tensor:
    return torch.cat([x, x + 1], -1)[..., : x.shape[-1]]


def columns(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def positions(rows: Any) -> Any:
    return lambda _: torch.as_tensor(rows)


# What a call depends on, one thing at a time: from the arguments of (2, 9, 9, 8) and (9, 4), what they become.
CHANGES: list[dict[str, Any]] = [
    *({"q": change} for change in (gaps, beside, columns, torch._neg_view, Tensor.bfloat16, Tensor.double)),
    *({"k": change} for change in (gaps, beside, columns, torch._neg_view, Tensor.bfloat16, Tensor.double)),
    *({name: lambda x: x[:1].expand(2, -1, -1, -1)} for name in "qk"),
    *({name: lambda x: x[:, :3]} for name in "qk"),
    *({name: lambda x: x[:1]} for name in "qk"),
    *({"cos": change} for change in (gaps, beside, columns, torch._neg_view, lambda x: x[:1].expand(9, -1))),
    *({"sin": change} for change in (gaps, beside, columns, torch._neg_view, lambda x: x[:1].expand(9, -1))),
    *(
        {"cos": change, "sin": change}
        for change in (
            lambda x: x[None],
            lambda x: x[None, None],
            lambda x: torch.stack([x, x + 1]),
            lambda x: (x + torch.arange(9.0)[:, None, None])[None],
            lambda x: torch.cat([x, x + 1], -1),
            Tensor.double,
        )
    ),
    *({name: lambda _: True} for name in ("interleaved", "conjugate", "inplace")),
    {"heads_first": lambda _: False},
    {"rotary_dim": lambda _: 4},
    {"rotary_dim": lambda _: 4, "trailing": lambda _: True},
    {"rotary_dim": lambda _: 4, "cos": lambda x: x[:, :2], "sin": lambda x: x[:, :2]},
    {"positions": positions(range(9))},
    {"positions": positions([range(9), range(8, -1, -1)])},
    {"positions": lambda _: torch.arange(9, dtype=torch.int32)},
    {"positions": lambda _: torch.arange(9, dtype=torch.int16)},
    {"positions": lambda _: torch.arange(18)[::2] // 2},
    {"positions": lambda _: torch.tensor([3]).expand(9)},
    *({name: change} for name in ("out_q", "out_k") for change in (gaps, lambda _: None)),
]


class TestRememberedCalls:
    """A call is checked once, and those like it go straight to the library: none may depend on what was before."""

    @pytest.fixture(autouse=True)
    def _nothing_is_remembered(self, monkeypatch):
        monkeypatch.setattr(recipes, "_recipes", {})

    @pytest.mark.skipif(native.load() is None, reason="there is no library")
    @pytest.mark.parametrize("names", ["q k", "q", "k"])
    @pytest.mark.parametrize("options", ["", "positions", "out", "inplace"])
    def test_the_second_call_is_not_checked_again(self, names, options):
        def turned(tokens: int = 3) -> None:
            xs = {name: randn(1, 2, tokens, 8) for name in names.split()}
            given: dict[str, Any] = {"inplace": options == "inplace"}
            if options == "positions":
                given["positions"] = torch.arange(tokens)
            if options == "out":
                given |= {f"out_{name}": torch.empty_like(x) for name, x in xs.items()}
            rotate(xs.get("q"), xs.get("k"), *tables(tokens, 4), **given)

        turned()
        with mock.patch.object(api, "check", side_effect=AssertionError):
            turned()
            turned()
            with pytest.raises(AssertionError):
                turned(4)

    @pytest.mark.parametrize("form", ["q k", "q", "k", "q k positions", "q k outputs"])
    def test_whatever_changes_is_noticed(self, form):
        def check(change: dict[str, Any]) -> None:
            # As many heads as tokens and rows, so that shapes stay when their meaning changes.
            given: dict[str, Any] = {name: randn(2, 9, 9, 8, seed=ord(name)) for name in form[:3].split()}
            given |= {"cos": randn(9, 4, seed=2), "sin": randn(9, 4, seed=3)}
            given |= {"positions": torch.arange(9).flip(0)} if "positions" in form else {}
            absent = {"q", "k"} - given.keys()
            outputs = {name: change[name] for name in ("out_q", "out_k") if name in change}
            given |= {
                name: changed(given.get(name)) for name, changed in change.items() if name not in {*absent, *outputs}
            }
            given |= dict.fromkeys(absent)
            stored = {
                name: given[name].resolve_neg().clone() for name in ("q", "k", "cos", "sin") if name not in absent
            }
            options = {name: value for name, value in given.items() if name not in stored}
            expected = {x: formula(stored[x], stored["cos"], stored["sin"], **options) for x in "qk" if x in stored}
            if "outputs" in form and not given.get("inplace"):
                places = {f"out_{x}": torch.empty_like(stored[x]) for x in "qk"}
                given |= places | {name: changed(places[name]) for name, changed in outputs.items()}
            for name, result in zip("qk", rotate(**given), strict=True):
                assert result is None if name in absent else same_bits(result.resolve_neg(), expected[name])

        for change in CHANGES:
            if "outputs" in form or not {"out_q", "out_k"} & change.keys():
                for now in ({}, {}, change, change, {}):
                    check(now)

    def test_stored_tables_are_asked_for_every_time(self):
        q, (cos, sin) = randn(1, 2, 9, 8), (table.bfloat16() for table in tables(9, 4))
        for k in (None, q):
            for _ in range(3):
                assert same_bits(rotate(q, k, cos, sin, stored_tables=True)[0], formula(q, cos, sin))
                with pytest.raises(ValueError, match=r"cos: got torch\.bfloat16"):
                    rotate(q, k, cos, sin)

    def test_other_numbers_at_other_places(self):
        for seed in range(4):
            q, k = randn(1, 4, 9, 8, seed=seed), randn(1, 2, 9, 8, seed=seed + 9)
            cos, sin = tables(9, 4, start=seed)
            for x, out in zip((q, k), rotate(q, k, cos, sin), strict=True):
                assert same_bits(out, formula(x, cos, sin))

    def test_other_strides_under_equal_shapes(self):
        wide, (cos, sin) = randn(2, 9, 9, 24), tables(9, 4)
        views = [
            wide[:, :, :, :8].contiguous(),
            wide[..., 8:16],
            wide[..., 8:16].transpose(1, 2),
            wide[..., ::3],
            wide[:1, ..., :8].expand(2, -1, -1, -1),
            wide[:, :1, :1, :8].expand(2, 9, 9, -1),
        ]
        for x in views * 3:
            assert same_bits(rotate(x, None, cos, sin)[0], formula(x, cos, sin))
        strided = torch.stack([cos, sin], -1)
        for c, s in [(cos, sin), strided.unbind(-1), (cos[:1].expand(9, -1), sin)] * 3:
            assert same_bits(rotate(views[0], None, c, s)[0], formula(views[0], c, s))

    def test_in_place_after_out_of_place_and_the_other_way_round(self):
        (cos, sin), q = tables(9, 4), randn(1, 2, 9, 8)
        expected = formula(q, cos, sin)
        for inplace in (False, True, False, True, True, False):
            mine = q.clone()
            out = rotate(mine, None, cos, sin, inplace=inplace)[0]
            assert same_bits(out, expected)
            assert (out is mine) == inplace
            assert torch.equal(mine, q) != inplace

    def test_one_of_two(self):
        (cos, sin), q, k = tables(9, 4), randn(1, 2, 9, 8), randn(1, 2, 9, 8, seed=1)
        for _ in range(3):
            assert rotate(q, None, cos, sin)[1] is None
            assert same_bits(rotate(q, None, cos, sin)[0], formula(q, cos, sin))
            assert rotate(None, k, cos, sin)[0] is None
            assert same_bits(rotate(None, k, cos, sin)[1], formula(k, cos, sin))
            out = nan(1, 2, 9, 8, dtype=torch.float32)
            one, other = rotate(q, k, cos, sin, out_k=out)
            assert other is out
            assert same_bits(one, formula(q, cos, sin))
            assert same_bits(out, formula(k, cos, sin))

    def test_a_longer_table_of_another_call(self):
        q = randn(1, 2, 3, 8)
        for rows in (5, 9, 5, 9, 5):
            (cos, sin), positions = tables(rows, 4), torch.tensor([rows - 1, 0, 2])
            assert same_bits(
                rotate(q, None, cos, sin, positions=positions)[0], formula(q, cos, sin, positions=positions)
            )
            with pytest.raises(ValueError, match=f"positions: got {rows}; the tables have {rows} rows"):
                rotate(q, None, cos, sin, positions=positions + 1)

    def test_decoding_into_a_cache(self):
        (cos, sin), cache = tables(40, 4), nan(2, 2, 32, 8, dtype=torch.bfloat16)
        for step in range(32):
            q, k = (randn(2, heads, 1, 8, dtype=torch.bfloat16, seed=step) for heads in (4, 2))
            positions = torch.tensor([[step], [step + 8]])
            slot = cache[:, :, step : step + 1]
            one, other = rotate(q, k, cos, sin, positions=positions, out_k=slot)
            assert other is slot
            assert same_bits(one, formula(q, cos, sin, positions=positions))
            assert same_bits(slot, formula(k, cos, sin, positions=positions))
            assert cache[:, :, step + 1 :].isnan().all()

    def test_a_gradient_that_only_a_later_call_asks_for(self):
        (cos, sin), q, weight = tables(9, 4), randn(1, 2, 9, 8), randn(1, 2, 9, 8, seed=3)
        for _ in range(2):
            assert not rotate(q, q, cos, sin)[0].requires_grad
            mine = q.clone().requires_grad_()
            one, other = rotate(q, mine, cos, sin)
            assert not one.requires_grad
            assert same_bits(torch.autograd.grad(other, mine, weight)[0], formula(weight, cos, sin, conjugate=True))
            learned = cos.clone().requires_grad_()
            assert torch.autograd.grad(rotate(q, None, learned, sin)[0].sum(), learned)[0].shape == cos.shape
            with torch.no_grad():
                assert not rotate(mine, None, cos, sin)[0].requires_grad
            with pytest.raises(RuntimeError, match="q: a leaf that requires a gradient"):
                rotate(mine, None, cos, sin, inplace=True)

    def test_what_autograd_saved_is_guarded_every_time(self):
        (cos, sin), leaf = tables(9, 4), randn(1, 2, 9, 8).requires_grad_()
        for _ in range(3):
            kept = randn(1, 2, 9, 8)
            loss = (leaf * kept).sum()
            rotate(kept, None, cos, sin, inplace=True)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            kept = randn(1, 2, 9, 8)
            loss = (leaf * kept).sum()
            rotate(randn(1, 2, 9, 8), None, cos, sin, out_q=kept)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    def test_they_are_bounded_and_keep_no_tensor(self, monkeypatch):
        monkeypatch.setattr(recipes, "_MOST", 5)
        for tokens in [*range(1, 20), 3, 17, 3]:
            q, (cos, sin) = randn(1, 2, tokens, 8), tables(tokens, 4)
            for _ in range(2):
                assert same_bits(rotate(q, None, cos, sin)[0], formula(q, cos, sin))
            assert len(recipes._recipes) <= 5
        held = [weakref.ref(x) for x in (q, cos, sin)]
        del q, cos, sin
        gc.collect()
        assert [x() for x in held] == [None] * 3

    @pytest.mark.parametrize("seed", range(4))
    def test_any_calls_one_after_the_other(self, seed):
        choose = random.Random(seed)
        for step in range(150):
            tokens, batch, dtype = (
                choose.choice([1, 5]),
                choose.choice([1, 2]),
                choose.choice([torch.float32, torch.bfloat16]),
            )
            options = {name: choose.random() < 0.3 for name in ("interleaved", "conjugate", "trailing")}
            options["rotary_dim"] = choose.choice([8, 4])
            options["heads_first"] = choose.random() < 0.6
            rows = tokens
            if choose.random() < 0.5:
                rows = 7
                shape = choose.choice([(tokens,), (1, tokens), (batch, tokens)])
                kind = choose.choice([torch.int64, torch.int32, torch.int16])
                options["positions"] = torch.tensor(
                    [choose.randrange(7) for _ in range(shape[0] * (tokens if len(shape) == 2 else 1))], dtype=kind
                ).view(shape)
            cos, sin = randn(2, rows, options["rotary_dim"] // 2, seed=step)
            if choose.random() < 0.2:
                cos, sin = cos.double(), sin.double()
            xs = {}
            for name, heads in (("q", 4), ("k", 2)):
                if choose.random() < 0.8:
                    wide = randn(batch, heads, tokens, 24, dtype=dtype, seed=step)
                    x = choose.choice(
                        [
                            wide[..., :8].contiguous(),
                            wide[..., 8:16],
                            wide[..., ::3],
                            torch._neg_view(wide[..., :8].contiguous()),
                        ]
                    )
                    xs[name] = (
                        x
                        if options["heads_first"]
                        else choose.choice([x.transpose(1, 2), x.transpose(1, 2).contiguous()])
                    )
            expected = {name: formula(x.resolve_neg().clone(), cos, sin, **options) for name, x in xs.items()}
            ways = {"inplace": choose.random() < 0.3}
            if not ways["inplace"]:
                ways |= {f"out_{name}": torch.empty_like(x) for name, x in xs.items() if choose.random() < 0.3}
            asks = choose.random() < 0.2 and len(ways) == 1 and not ways["inplace"]
            for x in xs.values():
                x.requires_grad_(asks)
            with (
                choose.choice([torch.no_grad, torch.enable_grad, torch.inference_mode])(),
                running(choose.choice(WAYS[:1] * 5 + WAYS)),
            ):
                results = rotate(xs.get("q"), xs.get("k"), cos, sin, **options, **ways)
            for name, result in zip("qk", results, strict=True):
                if name in xs:
                    assert same_bits(result.detach().resolve_neg(), expected[name])
                else:
                    assert result is None
