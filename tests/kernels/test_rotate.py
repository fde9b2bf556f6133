"""The rotation held to its float64 oracle, in every layout, width, dtype and stride."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from theodolite.encodings import rotary_tables
from theodolite.kernels import rotate
from theodolite.kernels.reference import rotate_reference
from theodolite.plan import Rotary, YaRN

# Unit roundoff of float32: each product and each sum is off by at most this much, relatively.
U32 = 2.0**-24


def tables(tokens: int, pairs: int, *, start: int = 11, batch: int | None = None):
    positions = torch.arange(start, start + tokens)
    if batch is not None:
        positions = positions + 1000 * torch.arange(batch)[:, None]
    return rotary_tables(Rotary(head_dim=2 * pairs, rope_theta=10000.0), positions)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def oracle(x, cos, sin, *, interleaved=False, rotary_dim=None, trailing=False):
    """The whole head in float64, (B, H, S, D), and the bound on a float32 result: two products and a sum, rounded."""
    rotary_dim = x.shape[-1] if rotary_dim is None else rotary_dim
    start = x.shape[-1] - rotary_dim if trailing else 0
    turning = x[..., start : start + rotary_dim]
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    out, bound = x.double().clone(), torch.zeros_like(x, dtype=torch.float64)
    out[..., start : start + rotary_dim] = rotate_reference(turning, cos, sin, interleaved=interleaved)
    # |x1 cos| + |x2 sin| for either half of a pair, by turning magnitudes so that nothing cancels.
    half = rotary_dim // 2
    a, b = (turning[..., 0::2], turning[..., 1::2]) if interleaved else (turning[..., :half], turning[..., half:])
    a, b, c, s = a.double().abs(), b.double().abs(), cos.double().abs(), sin.double().abs()
    sums = a * c + b * s, b * c + a * s
    joined = torch.stack(sums, -1).flatten(-2) if interleaved else torch.cat(sums, -1)
    bound[..., start : start + rotary_dim] = 2.1 * U32 * joined
    return out, bound


LAYOUTS = list(itertools.product([False, True], [None, 16], [False, True]))


class TestAgainstTheOracle:
    """Every layout, odd lengths, batches and grouped heads: a fault in one of them passes at position 0 or B=1."""

    @pytest.mark.parametrize(("interleaved", "rotary_dim", "trailing"), LAYOUTS)
    @pytest.mark.parametrize("tokens", [1, 63, 100, 2000])
    def test_float32(self, tokens, interleaved, rotary_dim, trailing):
        q, k = randn(2, 4, tokens, 32), randn(2, 1, tokens, 32, seed=1)
        layout = {"interleaved": interleaved, "rotary_dim": rotary_dim, "trailing": trailing}
        cos, sin = tables(tokens, (rotary_dim or 32) // 2, batch=2)
        for x, out in zip((q, k), rotate(q, k, cos, sin, **layout), strict=True):
            expected, bound = oracle(x, cos, sin, **layout)
            assert ((out.double() - expected).abs() <= bound).all()

    @pytest.mark.parametrize(("interleaved", "rotary_dim", "trailing"), LAYOUTS)
    def test_float64_is_computed_in_float64(self, interleaved, rotary_dim, trailing):
        q = randn(2, 4, 63, 32, dtype=torch.float64)
        layout = {"interleaved": interleaved, "rotary_dim": rotary_dim, "trailing": trailing}
        cos, sin = tables(63, (rotary_dim or 32) // 2)
        expected, bound = oracle(q, cos, sin, **layout)
        assert ((rotate(q, None, cos, sin, **layout)[0] - expected).abs() <= bound * 2.0**-29).all()

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

    @pytest.mark.parametrize("tokens", [1, 2000])
    def test_many_blocks_or_one(self, tokens, monkeypatch):
        q, (cos, sin) = randn(2, 3, tokens, 16), tables(tokens, 8, batch=2)
        whole = rotate(q, None, cos, sin)[0]
        monkeypatch.setattr("theodolite.kernels.eager._BLOCK", 64)
        assert torch.equal(rotate(q, None, cos, sin)[0], whole)
        assert torch.equal(rotate(q.clone(), None, cos, sin, inplace=True)[0], whole)

    @pytest.mark.parametrize("shape", [(0, 2, 5, 8), (1, 0, 5, 8), (1, 2, 0, 8)])
    def test_nothing_to_turn(self, shape):
        assert rotate(torch.empty(shape), None, *tables(shape[2], 4))[0].shape == shape


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

    def test_transposed_channels_and_expanded_heads(self):
        cos, sin = tables(9, 8)
        q = randn(2, 3, 16, 9).transpose(2, 3)
        k = randn(2, 1, 9, 16).expand(2, 3, 9, 16)
        out = rotate(q, k, cos, sin)
        expected = rotate(q.contiguous(), k.contiguous(), cos, sin)
        assert torch.equal(out[0], expected[0])
        assert torch.equal(out[1], expected[1])

    def test_inplace_on_a_tensor_that_overlaps_itself_is_refused(self):
        k = randn(2, 1, 9, 16).expand(2, 3, 9, 16)
        with pytest.raises(RuntimeError, match="k: it overlaps itself"):
            rotate(None, k, *tables(9, 8), inplace=True)

    def test_strided_tables(self):
        cos, sin = tables(9, 8)
        wide = torch.stack([cos, sin], -1)
        q = randn(1, 2, 9, 16)
        assert torch.equal(rotate(q, None, wide[..., 0], wide[..., 1])[0], rotate(q, None, cos, sin)[0])


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

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"q": torch.zeros(2, 9, 8)}, r"q: got shape \(2, 9, 8\); it must have four dimensions"),
            ({"q": torch.zeros(1, 2, 9, 8, dtype=torch.int64)}, "q: got torch.int64; it must be float16, bfloat16"),
            (
                {"k": torch.zeros(1, 2, 8, 8)},
                r"cos: got shape \(9, 4\); for k of shape \(1, 2, 8, 8\) read as \(B, H, S",
            ),
            ({"heads_first": False}, r"cos: got shape \(9, 4\); for q .* read as \(B, S, H, D\)"),
            ({"cos": torch.ones(9, 8)}, r"cos: got shape \(9, 8\); .* rotary_dim 8 it must be \(9, 4\) or \(1, 9, 4\)"),
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
    def test_names_the_argument(self, change, text):
        cos, sin = tables(9, 4)
        given = {"q": torch.zeros(1, 2, 9, 8), "k": torch.zeros(1, 1, 9, 8), "cos": cos, "sin": sin, **change}
        with pytest.raises(ValueError, match=text):
            rotate(**given)

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

    @pytest.mark.parametrize(("interleaved", "rotary_dim", "trailing"), LAYOUTS)
    def test_does_not_leak(self, interleaved, rotary_dim, trailing):
        assert torch.empty(3).isnan().all()
        q = randn(2, 3, 63, 32).transpose(1, 2).contiguous().transpose(1, 2)
        layout = {"interleaved": interleaved, "rotary_dim": rotary_dim, "trailing": trailing}
        out = rotate(q, None, *tables(63, (rotary_dim or 32) // 2), **layout)[0]
        assert out.isfinite().all()


class Operations(TorchDispatchMode):
    """Counts the operations that touch data; views are free."""

    VIEWS = ("slice", "unsqueeze", "narrow", "view", "select", "alias", "detach")

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::")
        if name not in self.VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class TestCost:
    """No joining of halves, no copy of a table, no scratch that grows with the input."""

    @pytest.mark.parametrize("inplace", [False, True])
    @pytest.mark.parametrize(("dtype", "casts"), [(torch.float32, 0), (torch.bfloat16, 2)])
    def test_operations_of_one_block(self, dtype, casts, inplace):
        q, (cos, sin) = randn(1, 4, 9, 32, dtype=dtype), tables(9, 16)
        with Operations() as seen:
            rotate(q, None, cos, sin, inplace=inplace)
        expected = ["mul"] * 4 + ["add_", "sub_"] + ["copy_"] * 2 + ["_to_copy"] * casts
        expected += [] if inplace else ["empty_like"]
        assert sorted(seen.names) == sorted(expected)

    def test_backward_turns_once_and_saves_only_tables(self):
        q, (cos, sin) = randn(1, 4, 9, 32).requires_grad_(), tables(9, 16)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
            out = rotate(q, None, cos, sin)[0]
        assert saved == [cos.numel(), sin.numel()]
        grad = torch.ones_like(out)
        with Operations() as seen:
            out.backward(grad)
        assert seen.names.count("mul") == 4
        assert not {"cat", "neg", "clone"} & set(seen.names)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("inplace", [False, True])
    def test_peak_memory(self, dtype, inplace):
        q, (cos, sin) = randn(1, 8, 8192, 64, dtype=dtype), tables(8192, 32)
        size = q.numel() * q.element_size()
        rotate(q[:, :, :64], None, cos[:64], sin[:64])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            rotate(q, None, cos, sin, inplace=inplace)
        now = peak = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                now += event.nbytes()
                peak = max(peak, now)
        # Four float32 scratch tensors of 1 MiB (two halves, one product, the cast of a half twice), and the output.
        assert peak <= (0 if inplace else size) + 6 * 2**20
        assert peak >= 2**20


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
    def test_shared_elements_are_refused(self, views):
        x = self.fused().unflatten(-1, (6, 8)).transpose(1, 2)
        kept = x.clone()
        with pytest.raises(ValueError, match="k: it shares elements with q"):
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
