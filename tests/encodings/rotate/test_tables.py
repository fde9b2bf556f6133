"""Rotary tables: exact, and a function of what they are given and of nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracle
from theodolite.encodings import rotary_tables
from theodolite.plan import NTK, DynamicNTK, Linear, LongRoPE, Rotary, YaRN

PROMISE = 6e-8
FURTHEST = 2**24


def rotary(head_dim: int = 64, rope_theta: float = 10000.0, **options) -> Rotary:
    return Rotary(head_dim=head_dim, rope_theta=rope_theta, **options)


def equal(tables, others) -> bool:
    return torch.equal(tables.cos, others.cos) and torch.equal(tables.sin, others.sin)


def assert_promise(encoding: Rotary, inv_freq, positions: list[float], *, dtype=torch.int64, amplitude=1.0) -> None:
    tables = rotary_tables(encoding, torch.tensor(positions, dtype=dtype))
    for row, position in enumerate(positions):
        cos, sin = oracle.cos_sin(inv_freq, position, amplitude)
        allowed = PROMISE * max(1.0, amplitude)
        assert oracle.worst_error(tables.cos[row].numpy(), cos) <= allowed
        assert oracle.worst_error(tables.sin[row].numpy(), sin) <= allowed


class TestPrecisionPromise:
    """Every entry within 6e-8 of the truth up to 2^24: peers are off by 3e-4 at 8 K and by 7e-2 at 1 M."""

    @settings(max_examples=60, deadline=None)
    @given(
        rope_theta=st.floats(1e2, 1e8),
        pairs=st.integers(1, 128),
        positions=st.lists(st.integers(-FURTHEST, FURTHEST), min_size=1, max_size=3),
    )
    def test_any_base_width_and_position(self, rope_theta, pairs, positions):
        assert_promise(rotary(2 * pairs, rope_theta), oracle.plain(rope_theta, 2 * pairs), positions)

    @pytest.mark.parametrize("rope_theta", [1e2, 1e4, 5e5, 1e6, 1e8])
    @pytest.mark.parametrize("head_dim", [2, 6, 80, 256])
    def test_at_the_far_end(self, rope_theta, head_dim):
        far = [FURTHEST, FURTHEST - 1, FURTHEST - 511, FURTHEST - 512, -FURTHEST]
        assert_promise(rotary(head_dim, rope_theta), oracle.plain(rope_theta, head_dim), far)

    def test_a_long_random_table(self):
        positions = np.random.default_rng(7).integers(0, FURTHEST, 5000)
        tables = rotary_tables(rotary(8, 5e5), torch.from_numpy(positions))
        inv_freq = oracle.plain(5e5, 8)
        for row in range(0, 5000, 23):
            cos, sin = oracle.cos_sin(inv_freq, int(positions[row]))
            assert oracle.worst_error(tables.cos[row].numpy(), cos) <= PROMISE
            assert oracle.worst_error(tables.sin[row].numpy(), sin) <= PROMISE

    @settings(max_examples=40, deadline=None)
    @given(position=st.floats(-FURTHEST, FURTHEST), rope_theta=st.floats(1e2, 1e8))
    def test_fractional_positions(self, position, rope_theta):
        assert_promise(rotary(16, rope_theta), oracle.plain(rope_theta, 16), [position], dtype=torch.float64)

    @settings(max_examples=30, deadline=None)
    @given(
        factor=st.floats(1.0, 64.0),
        length=st.integers(1024, 2**18),
        position=st.integers(-FURTHEST, FURTHEST),
        rope_theta=st.floats(1e3, 1e7),
    )
    def test_with_an_attention_factor(self, factor, length, position, rope_theta):
        scaling = YaRN(factor=factor, original_max_position_embeddings=length)
        amplitude = float(0.1 * oracle.mp.log(factor) + 1)
        inv_freq = oracle.yarn(rope_theta, 64, factor, length)
        assert_promise(rotary(64, rope_theta, scaling=scaling), inv_freq, [position], amplitude=amplitude)

    @settings(max_examples=20, deadline=None)
    @given(factor=st.floats(1.0, 64.0), position=st.integers(0, FURTHEST))
    def test_under_linear_and_ntk(self, factor, position):
        linear = [f / oracle.mpf(factor) for f in oracle.plain(1e4, 32)]
        assert_promise(rotary(32, scaling=Linear(factor=factor)), linear, [position])
        assert_promise(rotary(32, scaling=NTK(factor=factor)), oracle.ntk(1e4, 32, factor), [position])


# The float32 nearest to the true value, as bits: cos of the four pairs, then sin.
GOLDEN = {
    (1e4, 1): "3f0a5140 3f7eb898 3f7ffcb9 3f7ffff8 3f576aa4 3dcc7576 3c23d657 3a83126d",
    (1e4, 1000): "3f0ff813 3f5cc0ee bf56cd64 3f0a5140 3f53ae61 bf01a12e bf0b44f8 3f576aa4",
    (1e4, 131071): "bf51675e 3f6e2af5 bf495071 3f23eb83 bf13430a 3ebbbedb bf1e241a bf44a329",
    (1e4, 1048575): "3f49bd23 bf589ff0 3f21de6c 3f40fa12 bf1d9959 bf086add bf465447 bf2836c7",
    (1e4, 2**24): "3f2056b4 bec90ed6 3dee8222 3ee31a3f bf47917c bf6b6f84 bf7e420f 3f65704e",
    (5e5, 1): "3f0a5140 3f7fd1aa 3f7fffef 3f800000 3f576aa4 3d19ff7d 3ab95d1e 385f10c4",
    (5e5, 1000): "3f0ff813 3f7ee44d 3e1fafb4 3f7fa357 3f53ae61 bdbe5ac4 3f7cde3b 3d59bc17",
    (5e5, 131071): "bf51675e bf7ec071 bf7ffdad 3f45d616 bf13430a 3dc9fff3 bc09f092 3f227890",
    (5e5, 1048575): "3f49bd23 3f5d409e 3f7f3c89 3f359226 bf1d9959 bf00c6c5 3d9e0ee6 bf347752",
    (5e5, 2**24): "3f2056b4 3cb44185 3e9d37f5 3f7faf27 bf47917c bf7ff022 3f73a1ce 3d4b6432",
}


class TestGolden:
    """Tables are the same bits on every machine, so logits do not depend on where a table was built."""

    @pytest.mark.parametrize(("rope_theta", "position"), GOLDEN)
    def test_bits(self, rope_theta, position):
        tables = rotary_tables(rotary(8, rope_theta), torch.tensor([position]))
        bits = np.concatenate([tables.cos[0].numpy(), tables.sin[0].numpy()]).view(np.uint32)
        assert " ".join(f"{value:08x}" for value in bits) == GOLDEN[rope_theta, position]


class TestNothingDependsOnHistory:
    """The same call gives the same answer: peers keep the longest table seen, or the dtype of the first call."""

    def test_whatever_was_called_before(self):
        dynamic = rotary(scaling=DynamicNTK(factor=2, original_max_position_embeddings=32))
        first = rotary_tables(dynamic.at_length(20), torch.arange(20))
        rotary_tables(dynamic.at_length(4096), torch.arange(4096))
        rotary_tables(rotary(rope_theta=5e5), torch.arange(20))
        rotary_tables(rotary(), torch.arange(20, dtype=torch.float64) / 3)
        assert equal(rotary_tables(dynamic.at_length(20), torch.arange(20)), first)

    def test_the_result_is_the_callers_own(self):
        first = rotary_tables(rotary(), torch.arange(5))
        first.cos.fill_(float("nan"))
        assert torch.isfinite(rotary_tables(rotary(), torch.arange(5)).cos).all()

    def test_growing_never_changes_a_row(self):
        long = rotary_tables(rotary(), torch.arange(9001))
        for tokens in (1, 31, 33, 511, 4096, 4097):
            short = rotary_tables(rotary(), torch.arange(tokens))
            assert torch.equal(short.cos, long.cos[:tokens])
            assert torch.equal(short.sin, long.sin[:tokens])


class TestRowsAreIndependent:
    """A row depends on its own position alone: a decode step must meet the keys that its prefill has cached."""

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.lists(st.integers(-FURTHEST, FURTHEST), min_size=7, max_size=7), min_size=1, max_size=9))
    def test_alone_as_in_a_batch(self, rows):
        batch = rotary_tables(rotary(32), torch.tensor(rows))
        assert batch.cos.shape == (len(rows), 7, 16)
        for row, positions in enumerate(rows):
            alone = rotary_tables(rotary(32), torch.tensor(positions))
            assert torch.equal(batch.cos[row], alone.cos)
            assert torch.equal(batch.sin[row], alone.sin)
            one = rotary_tables(rotary(32), torch.tensor(positions[3:4]))
            assert torch.equal(one.cos[0], batch.cos[row, 3])

    def test_beside_fractions(self):
        mixed = rotary_tables(rotary(), torch.tensor([3.0, 0.25, 1e6, 7.125], dtype=torch.float64))
        whole = rotary_tables(rotary(), torch.tensor([3, 1_000_000]))
        assert torch.equal(mixed.cos[::2], whole.cos)

    def test_of_a_strided_view(self):
        positions = torch.arange(60).view(20, 3).T
        assert equal(rotary_tables(rotary(), positions), rotary_tables(rotary(), positions.contiguous()))

    @pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
    def test_none_at_all(self, shape):
        assert rotary_tables(rotary(), torch.zeros(shape, dtype=torch.int64)).cos.shape == (*shape, 32)


class TestDtypesOfPositions:
    """Positions count tokens; a dtype that cannot count past 256 merges neighbours."""

    @pytest.mark.parametrize(
        "dtype",
        ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64"],
    )
    def test_all_that_can_count_agree(self, dtype):
        positions = torch.arange(100)
        given = rotary_tables(rotary(), positions.to(getattr(torch, dtype)))
        assert equal(given, rotary_tables(rotary(), positions))
        assert given.cos.dtype == given.sin.dtype == torch.float32

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.complex64])
    def test_the_others_are_refused(self, dtype):
        with pytest.raises(ValueError, match=rf"positions: got {dtype}; give integers, or float32 or float64"):
            rotary_tables(rotary(), torch.zeros(4).to(dtype))

    @pytest.mark.parametrize("factor", [1.0, 2.0, 3.0, 7.3])
    def test_linear_scaling_is_a_division_of_positions(self, factor):
        positions = torch.tensor([0, 1, 2, 63, 1000, 131_071, 10_000_000])
        scaled = rotary_tables(rotary(scaling=Linear(factor=factor)), positions)
        divided = rotary_tables(rotary(), positions.double() / factor)
        # Both are within the promise of the same value.
        assert (scaled.cos - divided.cos).abs().max() <= 2 * PROMISE
        assert (scaled.sin - divided.sin).abs().max() <= 2 * PROMISE


class TestRefusals:
    """Bad positions are an error that names them; a wrong table is worse than none."""

    @pytest.mark.parametrize(
        ("positions", "text"),
        [
            (torch.tensor(3), r"positions: got shape \(\); it must be \(S,\) or \(B, S\)"),
            (
                torch.zeros(3, 2, 4, dtype=torch.int64),
                r"positions: got shape \(3, 2, 4\); it must be \(S,\) or \(B, S\)",
            ),
            (torch.tensor([0, 2**24 + 1]), r"positions: got 16777217; the tables are exact up to 2\*\*24 = 16777216"),
            (torch.tensor([5, -(2**24) - 1]), "positions: got -16777217"),
            (torch.tensor([-(2**24) - 1]), "positions: got -16777217"),
            (torch.tensor([2**63], dtype=torch.uint64), "positions: got 9223372036854775808"),
            (torch.tensor([1.0, float("nan")]), "positions: got nan"),
            (torch.tensor([float("inf")]), "positions: got inf"),
            (torch.tensor([1.0], requires_grad=True), "positions: they require a gradient"),
        ],
    )
    def test_of_positions(self, positions, text):
        with pytest.raises(ValueError, match=text):
            rotary_tables(rotary(), positions)


class TestSettingsHaveNoSay:
    """Autocast, default dtypes and devices change what torch makes; they must not change an angle."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast(self, dtype):
        expected = rotary_tables(rotary(), torch.arange(300))
        with torch.autocast("cpu", dtype=dtype):
            assert equal(rotary_tables(rotary(), torch.arange(300)), expected)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_default_dtype(self, dtype):
        expected = rotary_tables(rotary(), torch.arange(300))
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            tables = rotary_tables(rotary(), torch.arange(300))
        finally:
            torch.set_default_dtype(before)
        assert tables.cos.dtype == torch.float32
        assert equal(tables, expected)

    def test_default_device(self):
        positions = torch.arange(300)
        expected = rotary_tables(rotary(), positions)
        with torch.device("meta"):
            tables = rotary_tables(rotary(), positions)
        assert equal(tables, expected)

    def test_inference_mode(self):
        with torch.inference_mode():
            tables = rotary_tables(rotary(), torch.arange(300))
        assert equal(tables, rotary_tables(rotary(), torch.arange(300)))
        # Made there, they can still be saved for a backward pass.
        x = torch.randn(300, 32, requires_grad=True)
        (x * tables.cos).sum().backward()
        assert torch.equal(x.grad, tables.cos)


class TestMetaPositions:
    """A model traced for its shapes has positions without values: its tables have shapes without values."""

    @pytest.mark.parametrize("shape", [(7,), (2, 7)])
    def test_shapes_only(self, shape):
        tables = rotary_tables(rotary(), torch.zeros(shape, dtype=torch.int64, device="meta"))
        assert tables.cos.is_meta
        assert tables.sin.is_meta
        assert tables.cos.shape == tables.sin.shape == (*shape, 32)
        assert tables.cos.dtype == torch.float32

    def test_no_values_are_invented(self):
        with pytest.raises(ValueError, match="positions: they are on the meta device and have no values"):
            rotary_tables(rotary(), torch.arange(7, device="meta"), device="cpu")

    def test_each_device_after_the_other(self):
        expected = rotary_tables(rotary(), torch.arange(7))
        assert rotary_tables(rotary(), torch.arange(7), device="meta").cos.is_meta
        assert equal(rotary_tables(rotary(), torch.arange(7)), expected)


LONGROPE = LongRoPE(
    short_factor=(1.0,) * 8,
    long_factor=tuple(1.0 + pair for pair in range(8)),
    original_max_position_embeddings=16,
    factor=4.0,
)
DYNAMIC = DynamicNTK(factor=2, original_max_position_embeddings=16)


class TestLengthDependentFrequencies:
    """Settled once for each sequence, by its own length: cached keys never meet a query of another base."""

    @pytest.mark.parametrize("scaling", [LONGROPE, DYNAMIC])
    def test_refused_until_settled(self, scaling):
        with pytest.raises(ValueError, match=rf"rotary: '{scaling.rope_type}' has frequencies that depend .*at_length"):
            rotary_tables(rotary(16, scaling=scaling), torch.arange(8))

    @pytest.mark.parametrize("scaling", [LONGROPE, DYNAMIC])
    def test_each_row_of_a_batch_by_its_own_length(self, scaling):
        encoding = rotary(16, scaling=scaling)
        positions = torch.arange(40).expand(2, 40)
        tables = rotary_tables(encoding, positions, lengths=[8, 40])
        for row, length in enumerate([8, 40]):
            alone = rotary_tables(encoding.at_length(length), positions[row])
            assert torch.equal(tables.cos[row], alone.cos)
            assert torch.equal(tables.sin[row], alone.sin)
        assert not torch.equal(tables.sin[0], tables.sin[1])

    def test_a_short_row_keeps_the_trained_frequencies(self):
        tables = rotary_tables(rotary(16, scaling=DYNAMIC), torch.arange(16).expand(2, 16), lengths=[16, 64])
        assert torch.equal(tables.cos[0], rotary_tables(rotary(16), torch.arange(16)).cos)

    @pytest.mark.parametrize("scaling", [LONGROPE, DYNAMIC])
    def test_decoding_meets_what_the_prefill_cached(self, scaling):
        settled = rotary(16, scaling=scaling).at_length(24)
        whole = rotary_tables(settled, torch.arange(24))
        for position in range(24):
            step = rotary_tables(settled, torch.tensor([[position]]))
            assert torch.equal(step.cos[0, 0], whole.cos[position])
            assert torch.equal(step.sin[0, 0], whole.sin[position])

    def test_a_fixed_encoding_takes_lengths_too(self):
        positions = torch.arange(8).expand(3, 8)
        assert equal(rotary_tables(rotary(), positions, lengths=[1, 2, 3]), rotary_tables(rotary(), positions))

    def test_one_length_per_row(self):
        with pytest.raises(ValueError, match=r"lengths: got 2 for positions of shape \(3, 8\); one per row"):
            rotary_tables(rotary(16, scaling=DYNAMIC), torch.arange(8).expand(3, 8), lengths=[8, 40])


class TestAmplitude:
    """Moving a rotated key is a pure rotation: the attention factor a second time would let it grow at each shift."""

    YARN = YaRN(factor=4, original_max_position_embeddings=64)

    def test_is_the_attention_factor_once(self):
        full = rotary_tables(rotary(scaling=self.YARN), torch.arange(50))
        pure = rotary_tables(rotary(scaling=self.YARN), torch.arange(50), amplitude=False)
        norm = pure.cos.double().square() + pure.sin.double().square()
        # cos^2 + sin^2 of two numbers that are each off by at most the promise.
        assert (norm - 1).abs().max() <= 2 * np.sqrt(2) * PROMISE
        ratio = (full.cos.double().square() + full.sin.double().square()).sqrt()
        assert (ratio - 1.138629436111989).abs().max() <= 1.14 * np.sqrt(2) * PROMISE


class TestMultipleAxes:
    """Axes and frequencies are separate matters: text, which has equal axes, must be ordinary RoPE."""

    @pytest.mark.parametrize(
        ("section", "interleaved", "head_dim", "scaling"),
        [
            ((16, 24, 24), False, 128, None),
            ((24, 20, 20), True, 128, None),
            ((11, 11, 10), True, 64, None),
            ((24, 20, 20), True, 128, YaRN(factor=4, original_max_position_embeddings=1024)),
        ],
    )
    def test_equal_axes_are_one_axis_bit_for_bit(self, section, interleaved, head_dim, scaling):
        options = {} if scaling is None else {"scaling": scaling}
        many = rotary(head_dim, 1e6, mrope_section=section, mrope_interleaved=interleaved, **options)
        positions = torch.randint(0, FURTHEST, (2, 70), generator=torch.Generator().manual_seed(0))
        assert equal(
            rotary_tables(many, positions.expand(3, 2, 70)), rotary_tables(rotary(head_dim, 1e6, **options), positions)
        )

    @pytest.mark.parametrize("tokens", [9, 1100])
    @pytest.mark.parametrize(("section", "interleaved"), [((16, 24, 24), False), ((24, 20, 20), True)])
    def test_each_pair_follows_its_axis_under_yarn(self, section, interleaved, tokens):
        scaling = YaRN(factor=4, original_max_position_embeddings=1024)
        many = rotary(128, 1e6, mrope_section=section, mrope_interleaved=interleaved, scaling=scaling)
        positions = torch.randint(0, 100_000, (3, 2, tokens), generator=torch.Generator().manual_seed(0))
        tables = rotary_tables(many, positions)
        by_axis = [rotary_tables(rotary(128, 1e6, scaling=scaling), axis) for axis in positions]
        for pair, axis in enumerate(many.axis_of_pairs()):
            assert torch.equal(tables.cos[..., pair], by_axis[axis].cos[..., pair])
            assert torch.equal(tables.sin[..., pair], by_axis[axis].sin[..., pair])

    def test_partial_width_as_well(self):
        part = rotary(256, 1e7, rotary_dim=64, mrope_section=(11, 11, 10), mrope_interleaved=True)
        positions = torch.arange(20).expand(3, 1, 20)
        assert rotary_tables(part, positions).cos.shape == (1, 20, 32)
        assert equal(rotary_tables(part, positions), rotary_tables(rotary(64, 1e7), positions[0]))

    @pytest.mark.parametrize(
        ("shape", "text"),
        [((2, 7), r"positions: got shape \(2, 7\); it must be \(axes, B, S\)"), ((2, 1, 7), "got 2 axes; .* has 3")],
    )
    def test_positions_without_all_axes_are_refused(self, shape, text):
        many = rotary(128, mrope_section=(16, 24, 24))
        with pytest.raises(ValueError, match=text):
            rotary_tables(many, torch.zeros(shape, dtype=torch.int64))


def peak_memory(run) -> int:
    """The most bytes of tensors that a call holds at once, by the profiler's account of torch's allocator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return int(live.max())


class TestMemory:
    """A table costs its own size and, beside it, a MiB or two and a part of itself, however long it is."""

    @pytest.mark.parametrize("axes", [0, 3])
    @pytest.mark.parametrize("tokens", [1024, 65_536])
    def test_of_a_table(self, axes, tokens):
        encoding = rotary(128, mrope_section=(16, 24, 24)) if axes else rotary(128)
        positions = torch.arange(tokens).expand(axes, 1, tokens) if axes else torch.arange(tokens)
        own = 2 * tokens * 64 * 4
        peak = peak_memory(lambda: rotary_tables(encoding, positions))
        # Float64 scratch of 2**16 entries or a sixteenth of the table: angles, what they are made of, and cos. The
        # positions themselves, in float64, and their absolute values.
        scratch = 3 * max(2**16, tokens * 64 // 16) * 8
        assert own <= peak < own + scratch + 2 * max(1, axes) * tokens * 8 + 4096


class TestThreads:
    """How many threads work on a table is none of its business."""

    def test_any_number(self):
        positions, threads = torch.randint(-FURTHEST, FURTHEST, (3000,)), torch.get_num_threads()
        made = []
        try:
            for number in (1, 2, 5):
                torch.set_num_threads(number)
                made.append(rotary_tables(rotary(128), positions))
        finally:
            torch.set_num_threads(threads)
        assert equal(made[0], made[1])
        assert equal(made[0], made[2])
        for row in (0, 1023, 1024, 2999):
            alone = rotary_tables(rotary(128), positions[row : row + 1])
            assert torch.equal(alone.cos[0], made[0].cos[row])
            assert torch.equal(alone.sin[0], made[0].sin[row])
