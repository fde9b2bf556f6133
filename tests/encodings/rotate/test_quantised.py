"""Stored tables: as close as promised, of the size promised, and the same rows however they came about."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.encodings import RotaryEmbedding
from theodolite.encodings.rotate import quantised
from theodolite.encodings.rotate.quantised import StoredRotary
from theodolite.encodings.rotate.tables import pair_tables
from theodolite.plan import DynamicNTK, Rotary, YaRN

PLAN = Rotary(head_dim=16, rope_theta=10000.0)
YARN = replace(PLAN, scaling=YaRN(factor=4, original_max_position_embeddings=64))
AXES = replace(PLAN, mrope_section=(2, 3, 3))
# Half a step: of 1/127; of the numbers from 1/2 to 1 in half precision.
WORST = {torch.int8: 1 / 254, torch.float16: 2.0**-12, torch.bfloat16: 2.0**-9}
BYTES = {torch.int8: 1, torch.float16: 2, torch.bfloat16: 2}
DTYPES = pytest.mark.parametrize("dtype", WORST)


def same(one, other) -> bool:
    return torch.equal(one.cos, other.cos) and torch.equal(one.sin, other.sin)


@DTYPES
class TestError:
    """The worst entry is off by what the docstring says, and no better: half a step, times the amplitude."""

    @pytest.mark.parametrize("plan", [PLAN, YARN])
    def test_of_entries(self, dtype, plan):
        amplitude = plan.attention_factor()
        positions = torch.arange(5000)
        stored = StoredRotary(plan, length=5000, dtype=dtype).tables(positions)
        exact = RotaryEmbedding(plan).tables(positions)
        for mine, true in zip(stored, exact, strict=True):
            worst = (mine.double() - true.double()).abs().max()
            assert worst <= amplitude * (WORST[dtype] + 1.2e-7)
            assert worst > 0.98 * amplitude * WORST[dtype]

    def test_of_scores(self, dtype):
        plan = Rotary(head_dim=128, rope_theta=10000.0)
        generator = torch.Generator().manual_seed(0)
        q, k = torch.randn(2, 1, 2, 300, 128, generator=generator, dtype=torch.float64)
        positions = torch.randperm(4096, generator=generator)[:300]

        def scores(rope):
            turned = rope(q, k, positions)
            return turned[0] @ turned[1].transpose(-1, -2) / 128**0.5

        true = scores(RotaryEmbedding(plan))
        off = (scores(StoredRotary(plan, length=4096, dtype=dtype)) - true) / true.std()
        stated = {torch.int8: (4.5e-3, 0.03), torch.float16: (2.4e-4, 0.0015), torch.bfloat16: (1.9e-3, 0.012)}[dtype]
        # The stated root mean square, of 180,000 scores, is as good as its two digits.
        assert abs(float(off.square().mean().sqrt()) / stated[0] - 1) < 0.05
        assert off.abs().max() <= stated[1]

    def test_zero_is_exact(self, dtype):
        tables = StoredRotary(PLAN, length=1, dtype=dtype).tables(torch.tensor([0]))
        assert (tables.cos == 1).all()
        assert (tables.sin == 0).all()

    def test_pure_rotations(self, dtype):
        pure = StoredRotary(YARN, length=50, dtype=dtype).tables(torch.arange(50), amplitude=False)
        assert same(
            pure,
            StoredRotary(
                replace(YARN, scaling=replace(YARN.scaling, attention_factor_given=1.0)), length=9, dtype=dtype
            ).tables(torch.arange(50)),
        )


@DTYPES
class TestMemory:
    """A table is as small as it says."""

    @pytest.mark.parametrize("plan", [PLAN, replace(PLAN, rotary_dim=8), AXES])
    def test_bytes(self, dtype, plan):
        rope = StoredRotary(plan, length=1000, dtype=dtype)
        assert rope.nbytes == 1000 * plan.rotary_dim * BYTES[dtype]
        assert rope.length == 1000

    def test_nothing_is_registered(self, dtype):
        rope = StoredRotary(PLAN, length=1000, dtype=dtype)
        assert rope.state_dict() == {}
        assert list(rope.buffers()) == list(rope.parameters()) == []


@DTYPES
class TestRows:
    """A row is that of its position, whatever else is stored, asked for, or was asked for before."""

    @settings(max_examples=25, deadline=None)
    @given(asked=st.lists(st.lists(st.integers(0, 5000), min_size=3, max_size=3), min_size=1, max_size=5))
    def test_growing_changes_none(self, dtype, asked):
        rope, whole = StoredRotary(YARN, length=7, dtype=dtype), StoredRotary(YARN, length=5001, dtype=dtype)
        first = rope.tables(torch.arange(7))
        for positions in asked:
            given_rows = rope.tables(torch.tensor(positions))
            assert same(given_rows, whole.tables(torch.tensor(positions)))
        assert same(rope.tables(torch.arange(7)), first)

    def test_growth_is_by_at_least_a_half(self, dtype):
        rope = StoredRotary(PLAN, length=100, dtype=dtype)
        rope.tables(torch.tensor([100]))
        assert rope.length == 150
        rope.tables(torch.tensor([1000]))
        assert rope.length == 1001

    def test_three_axes(self, dtype):
        rope = StoredRotary(AXES, length=10, dtype=dtype)
        positions = torch.randint(0, 300, (3, 2, 9), generator=torch.Generator().manual_seed(0))
        tables = rope.tables(positions)
        alone = [StoredRotary(PLAN, length=300, dtype=dtype).tables(axis) for axis in positions]
        for pair, axis in enumerate(AXES.axis_of_pairs()):
            assert torch.equal(tables.cos[..., pair], alone[axis].cos[..., pair])
            assert torch.equal(tables.sin[..., pair], alone[axis].sin[..., pair])

    def test_rows_of_a_batch(self, dtype):
        rope = StoredRotary(PLAN, length=10, dtype=dtype)
        positions = torch.tensor([[3, 9], [2, 0]])
        tables = rope.tables(positions)
        assert tables.cos.shape == (2, 2, 8)
        assert torch.equal(tables.cos[1, 0], rope.tables(torch.tensor([2])).cos[0])
        assert rope.tables(torch.zeros(0, dtype=torch.int64)).cos.shape == (0, 8)

    @pytest.mark.parametrize("count", [torch.uint8, torch.int16, torch.int32, torch.uint64])
    def test_any_integers(self, dtype, count):
        rope = StoredRotary(PLAN, length=10, dtype=dtype)
        assert same(rope.tables(torch.arange(20).to(count)), rope.tables(torch.arange(20)))

    def test_a_result_is_the_callers_own(self, dtype):
        rope = StoredRotary(PLAN, length=10, dtype=dtype)
        first = rope.tables(torch.arange(10))
        kept = first.cos.clone()
        first.cos.fill_(float("nan"))
        assert torch.equal(rope.tables(torch.arange(10)).cos, kept)


@DTYPES
class TestNothingSpoilsIt:
    """No cast, meta device, copy or mode reaches the table."""

    def test_casts(self, dtype):
        rope = StoredRotary(PLAN, length=10, dtype=dtype)
        expected = rope.tables(torch.arange(20))
        for change in (lambda m: m.half(), lambda m: m.double(), lambda m: m.to(torch.bfloat16), copy.deepcopy):
            rope = change(rope)
            assert same(rope.tables(torch.arange(20)), expected)

    def test_on_the_meta_device_and_back(self, dtype):
        expected = StoredRotary(PLAN, length=10, dtype=dtype).tables(torch.arange(20))
        with torch.device("meta"):
            rope = StoredRotary(PLAN, length=10, dtype=dtype)
        rope.to_empty(device="cpu")
        assert same(rope.tables(torch.arange(20)), expected)
        assert rope.tables(torch.arange(20, device="meta")).cos.is_meta
        assert rope.tables(torch.arange(20), device="meta").cos.is_meta
        assert same(rope.tables(torch.arange(20)), expected)

    def test_growth_in_inference_mode(self, dtype):
        rope = StoredRotary(PLAN, length=10, dtype=dtype)
        with torch.inference_mode():
            tables = rope.tables(torch.arange(30))
        x = torch.randn(30, 8, requires_grad=True)
        (x * tables.cos * rope.tables(torch.arange(30)).sin).sum().backward()
        assert x.grad is not None

    def test_a_compiled_graph_gives_the_same_rows_at_any_position(self, dtype):
        torch._dynamo.reset()
        rope = StoredRotary(YARN, length=10, dtype=dtype)
        compiled = torch.compile(lambda p: rope.tables(p), fullgraph=True, backend="eager")
        positions = torch.tensor([0, 9, 10, 70_000])
        assert same(compiled(positions), rope.tables(positions))


class TestRefusals:
    """Nothing clamps or wraps: a position without a row is an error that says so."""

    @pytest.mark.parametrize(
        ("positions", "text"),
        [
            (torch.tensor([3, -1]), "positions: got -1; the table begins at 0"),
            (torch.tensor([2**24 + 1]), r"positions: got 16777217; the tables are exact up to 2\*\*24 = 16777216"),
            (torch.tensor([0.5]), r"positions: got torch.float32; give integers"),
            (
                torch.zeros(2, 3, 4, dtype=torch.int64),
                r"positions: got shape \(2, 3, 4\); it must be \(S,\) or \(B, S\)",
            ),
            ([1, 2], "positions: got a list; they must be a tensor"),
        ],
    )
    def test_of_positions(self, positions, text):
        rope = StoredRotary(PLAN, length=10)
        with pytest.raises(ValueError, match=text):
            rope.tables(positions)
        assert rope.length == 10

    def test_of_axes(self):
        with pytest.raises(ValueError, match="positions: got 2 axes; this encoding has 3"):
            StoredRotary(AXES, length=10).tables(torch.zeros(2, 1, 5, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"positions: got shape \(5,\); it must be \(axes, B, S\)"):
            StoredRotary(AXES, length=10).tables(torch.arange(5))

    def test_of_arguments(self):
        with pytest.raises(ValueError, match=r"dtype: got torch.float32; it must be torch.int8, torch.float16 or"):
            StoredRotary(PLAN, length=10, dtype=torch.float32)
        with pytest.raises(ValueError, match="length: got 0; it must be at least 1"):
            StoredRotary(PLAN, length=0)
        dynamic = replace(PLAN, scaling=DynamicNTK(factor=2, original_max_position_embeddings=64))
        with pytest.raises(ValueError, match=r"rotary: 'dynamic' has frequencies that depend .*; settle them with"):
            StoredRotary(dynamic, length=10)
        assert StoredRotary(dynamic.at_length(100), length=10).length == 10


class TestThreads:
    """Threads that read and lengthen one table see rows that are right, and no table ends shorter."""

    def test_one_short_table(self):
        asked = [torch.tensor([1, last]) for last in (9, 400, 70, 20000, 3000, 50, 9000, 12)] * 4
        expected = [StoredRotary(PLAN, length=20001).tables(positions) for positions in asked]
        for _ in range(5):
            rope = StoredRotary(PLAN, length=2)
            ready = threading.Barrier(len(asked))

            def read(positions, rope=rope, ready=ready):
                ready.wait()
                return rope.tables(positions)

            with ThreadPoolExecutor(len(asked)) as pool:
                made = list(pool.map(read, asked))
            assert all(same(mine, true) for mine, true in zip(made, expected, strict=True))
            assert rope.length >= 20001

    def test_a_thread_that_fell_behind(self):
        # It saw a table that another thread has made longer by the time that it has the lock.
        rope, cpu = StoredRotary(PLAN, length=100), torch.device("cpu")
        long = rope._stored[cpu]

        class Behind(dict):
            seen = iter([long[:4]])

            def get(self, key):
                return next(self.seen, super().get(key))

        rope._stored = Behind({cpu: long})
        assert rope._table(cpu, 50) is long
        assert rope.length == 100

    def test_no_large_scratch(self, monkeypatch):
        sizes = []

        def watched(inv_freq, positions):
            sizes.append(positions.numel())
            return pair_tables(inv_freq, positions)

        monkeypatch.setattr(quantised, "pair_tables", watched)
        rope = StoredRotary(PLAN, length=3)
        rope.tables(torch.tensor([2**15]))
        assert sum(sizes) == rope.length == 2**15 + 1
        # Half a MiB of float64.
        assert max(sizes) * PLAN.rotary_dim // 2 <= 2**16
