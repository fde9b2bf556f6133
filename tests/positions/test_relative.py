import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.encodings import rotary_tables
from theodolite.kernels import rotate
from theodolite.plan import Rotary
from theodolite.positions.attention_sinks import AttentionSinks
from theodolite.positions.dual_chunk import DualChunk
from theodolite.positions.relative import LeakyReRoPE, LMInfinite, ReRoPE, SelfExtend


def rerope(m, n, window):
    return min(m - n, window)


def leaky(m, n, window, factor):
    r = m - n
    return Fraction(r) if r < window else window + Fraction(r - window) / Fraction(factor)


def self_extend(m, n, window, group):
    return m - n if m - n < window else m // group - n // group + window - window // group


def lm_infinite(m, n, window, sinks):
    return min(m - n, window) if m - n < window or n < sinks else None


def attention_sinks(m, n, window, sinks):
    """StreamingLLM's cache written out: the sinks, then the window, numbered by where they lie in it."""
    last = list(range(max(sinks, m - window + 1), m + 1))
    cache = [*range(min(sinks, m + 1)), *last]
    if n not in cache and m - n < window:
        # A sink that the window still covers.
        return m - n
    return None if n not in cache else cache.index(m) - cache.index(n)


def dual_chunk(m, n, chunk_size, local_size, pinned):
    """The paper's three cases, its lists of query positions written out."""
    s = chunk_size - local_size
    intra = list(range(s))
    successive = [s + i if i < local_size else pinned for i in range(s)]
    if pinned == chunk_size:
        successive = [min(s + i, chunk_size) for i in range(s)]
    if m // s == n // s:
        return intra[m % s] - n % s
    if m // s == n // s + 1:
        return successive[m % s] - n % s
    return pinned - n % s


CASES = [
    (ReRoPE(window=5), lambda m, n: rerope(m, n, 5)),
    (ReRoPE(window=1), lambda m, n: rerope(m, n, 1)),
    (LeakyReRoPE(window=5, factor=3), lambda m, n: leaky(m, n, 5, 3)),
    (LeakyReRoPE(window=4, factor=2.5), lambda m, n: leaky(m, n, 4, Fraction(5, 2))),
    (SelfExtend(window=6, group_size=3), lambda m, n: self_extend(m, n, 6, 3)),
    (SelfExtend(window=7, group_size=4), lambda m, n: self_extend(m, n, 7, 4)),
    (LMInfinite(window=5, sinks=3), lambda m, n: lm_infinite(m, n, 5, 3)),
    (LMInfinite(window=5, sinks=0), lambda m, n: lm_infinite(m, n, 5, 0)),
    (AttentionSinks(window=5, sinks=3), lambda m, n: attention_sinks(m, n, 5, 3)),
    (AttentionSinks(window=4, sinks=0), lambda m, n: attention_sinks(m, n, 4, 0)),
    (AttentionSinks(window=1, sinks=1), lambda m, n: attention_sinks(m, n, 1, 1)),
    (DualChunk(chunk_size=10, local_size=3), lambda m, n: dual_chunk(m, n, 10, 3, 9)),
    (DualChunk(chunk_size=9, local_size=4), lambda m, n: dual_chunk(m, n, 9, 4, 8)),
    (DualChunk(chunk_size=10, local_size=3, pinned=10), lambda m, n: dual_chunk(m, n, 10, 3, 10)),
]
IDS = [str(case[0]) for case in CASES]
# Each beside the map that it is when its numbers say so.
IDENTITIES = [
    ReRoPE(window=20),
    LeakyReRoPE(window=20, factor=8),
    LeakyReRoPE(window=3, factor=1),
    SelfExtend(window=20, group_size=8),
    SelfExtend(window=3, group_size=1),
    LMInfinite(window=20, sinks=2),
    AttentionSinks(window=20, sinks=2),
    DualChunk(chunk_size=20, local_size=5),
    DualChunk(chunk_size=40, local_size=5),
]


def plain(q_positions, k_positions):
    return q_positions[..., :, None] - k_positions[..., None, :]


class TestPrintedFormula:
    """Both forms are the formula of the paper, for every pair that a causal model sees."""

    @pytest.mark.parametrize(("relative_map", "formula"), CASES, ids=IDS)
    def test_dense(self, relative_map, formula):
        q, k = torch.arange(41), torch.arange(41)
        distances, seen = relative_map.relative(q, k), relative_map.seen(q, k)
        for m in range(41):
            for n in range(41):
                expected = formula(m, n) if n <= m else None
                assert seen[m, n] == (expected is not None)
                # m/factor, the shift, their sum, n/factor and the difference are each rounded once, below 64.
                shown = m - n if expected is None else float(expected)
                assert math.isclose(distances[m, n], shown, abs_tol=5 * 2.0**-48)

    @pytest.mark.parametrize(("relative_map", "formula"), CASES, ids=IDS)
    def test_no_pair_is_in_two_groups_and_inside_each_the_difference_is_the_distance(self, relative_map, formula):
        q, k = torch.arange(3, 37), torch.arange(37)
        regions = torch.stack([group.region(k) for group in relative_map.groups(q, k)])
        assert (regions.sum(0) <= 1).all()
        for group, region in zip(relative_map.groups(q, k), regions, strict=True):
            assert group.q.shape == q.shape
            assert group.k.shape == k.shape
            for row, column in region.nonzero().tolist():
                difference = group.q[row] - group.k[column]
                assert math.isclose(difference, formula(row + 3, column), abs_tol=5 * 2.0**-48)

    def test_whole_distances_are_int64_and_fractions_float64(self):
        for relative_map, _ in CASES:
            dtype = torch.float64 if isinstance(relative_map, LeakyReRoPE) else torch.int64
            assert relative_map.relative(torch.arange(9), torch.arange(9)).dtype == dtype

    @settings(max_examples=60, deadline=None)
    @given(
        st.integers(1, 12),
        st.integers(1, 9),
        st.lists(st.integers(0, 200), min_size=1, max_size=6),
        st.lists(st.integers(0, 200), min_size=1, max_size=6),
    )
    def test_any_window_at_any_positions(self, window, other, queries, keys):
        q, k = torch.tensor(queries), torch.tensor(keys)
        size = 2 * window + other
        for relative_map, formula in [
            (ReRoPE(window=window), lambda m, n: rerope(m, n, window)),
            (SelfExtend(window=window, group_size=other), lambda m, n: self_extend(m, n, window, other)),
            (LMInfinite(window=window, sinks=other), lambda m, n: lm_infinite(m, n, window, other)),
            (AttentionSinks(window=window, sinks=other), lambda m, n: attention_sinks(m, n, window, other)),
            (DualChunk(chunk_size=size, local_size=window), lambda m, n: dual_chunk(m, n, size, window, size - 1)),
        ]:
            expected = [[formula(m, n) if n <= m else None for n in keys] for m in queries]
            assert relative_map.seen(q, k).tolist() == [[value is not None for value in row] for row in expected]
            shown = [
                [m - n if value is None else value for n, value in zip(keys, row, strict=True)]
                for m, row in zip(queries, expected, strict=True)
            ]
            assert relative_map.relative(q, k).tolist() == shown


class TestIdentities:
    """Where nothing is beyond the trained length, nothing changes; and the maps meet at the ends of their numbers."""

    @pytest.mark.parametrize("relative_map", IDENTITIES, ids=str)
    def test_short_sequences_are_left_alone(self, relative_map):
        q = torch.arange(20)
        assert torch.equal(relative_map.relative(q, q).to(torch.int64), plain(q, q))
        assert torch.equal(relative_map.relative(q, q), plain(q, q).to(relative_map.relative(q, q).dtype))
        assert torch.equal(relative_map.seen(q, q), plain(q, q) >= 0)

    def test_leaky_with_infinity_is_rerope(self):
        q = torch.arange(50)
        leaky_map = LeakyReRoPE(window=7, factor=math.inf)
        assert torch.equal(leaky_map.relative(q, q), ReRoPE(window=7).relative(q, q).double())

    def test_lm_infinite_sees_rerope_where_it_sees(self):
        q = torch.arange(50)
        lm = LMInfinite(window=7, sinks=4)
        seen = lm.seen(q, q)
        assert torch.equal(lm.relative(q, q)[seen], ReRoPE(window=7).relative(q, q)[seen])
        assert seen.sum(1).max() == 11

    @pytest.mark.parametrize("relative_map", [case[0] for case in CASES[:6]], ids=IDS[:6])
    def test_further_keys_are_never_nearer(self, relative_map):
        q = torch.arange(120)
        distances = relative_map.relative(q, q)
        rises = distances[:, :-1] - distances[:, 1:]
        assert (rises[relative_map.seen(q, q)[:, 1:]] >= 0).all()

    @pytest.mark.parametrize("relative_map", [case[0] for case in CASES], ids=IDS)
    def test_no_distance_is_negative_or_above_the_largest(self, relative_map):
        for tokens in (*range(1, 30), 77):
            q = torch.arange(tokens)
            seen = relative_map.relative(q, q)[relative_map.seen(q, q)]
            assert seen.min() >= 0
            assert math.isclose(seen.max(), relative_map.largest_distance(tokens), abs_tol=5 * 2.0**-48)

    @pytest.mark.parametrize("relative_map", [ReRoPE(window=7), LeakyReRoPE(window=7, factor=4)], ids=str)
    def test_maps_of_the_distance_alone_do_not_see_a_shift(self, relative_map):
        q, k = torch.arange(30, 40), torch.arange(40)
        # Powers of two divide without rounding.
        assert torch.equal(relative_map.relative(q + 12345, k + 12345), relative_map.relative(q, k))

    @pytest.mark.parametrize(
        "relative_map", [ReRoPE(window=7), SelfExtend(window=8, group_size=4), LMInfinite(window=7, sinks=2)], ids=str
    )
    def test_the_far_group_begins_where_the_near_one_ends(self, relative_map):
        q = torch.arange(60)
        near, far = relative_map.groups(q, q)
        if isinstance(relative_map, LMInfinite):
            assert (far.last <= near.first - 1).all()
        else:
            assert torch.equal(far.last, near.first - 1)

    def test_self_extend_reaches_what_its_paper_says(self):
        trained, window, group = 64, 16, 4
        extended = SelfExtend(window=window, group_size=group)
        assert extended.largest_distance((trained - window) * group + window) == trained - 1
        assert extended.largest_distance((trained - window) * group + window + 1) == trained
        uneven = SelfExtend(window=18, group_size=group)
        assert uneven.largest_distance((trained - 18) * group + 16) == trained - 1
        assert uneven.largest_distance((trained - 18) * group + 17) == trained

    def test_dual_chunk_stays_below_the_trained_length(self):
        assert DualChunk(chunk_size=64, local_size=16).largest_distance(10**9) == 63
        # ChunkLlama pins at chunk_size, and so takes three quarters of the trained length for it.
        assert DualChunk(chunk_size=48, local_size=4, pinned=48).largest_distance(10**9) == 48

    def test_dual_chunk_keeps_the_nearest_distances(self):
        q = torch.arange(200)
        near = (plain(q, q) >= 0) & (plain(q, q) <= 5)
        distances = DualChunk(chunk_size=20, local_size=5).relative(q, q)
        assert torch.equal(distances[near], plain(q, q)[near])

    def test_dual_chunk_rotates_keys_once(self):
        q = torch.arange(50)
        keys = [group.k for group in DualChunk(chunk_size=20, local_size=5).groups(q, q)]
        assert all(torch.equal(other, keys[0]) for other in keys)


class TestCalls:
    """Decoding, batches and ragged rows give what the whole gives: a distance depends on its two positions alone."""

    @pytest.mark.parametrize("relative_map", [case[0] for case in CASES], ids=IDS)
    def test_one_query_gives_its_row(self, relative_map):
        q = torch.arange(45)
        whole, seen = relative_map.relative(q, q), relative_map.seen(q, q)
        for m in (0, 6, 19, 44):
            keys = q[: m + 1]
            assert torch.equal(relative_map.relative(q[m : m + 1], keys)[0], whole[m, : m + 1])
            assert torch.equal(relative_map.seen(q[m : m + 1], keys)[0], seen[m, : m + 1])

    @pytest.mark.parametrize("relative_map", [case[0] for case in CASES], ids=IDS)
    def test_rows_with_positions_of_their_own(self, relative_map):
        q, k = torch.tensor([[30, 31, 40], [5, 6, 7]]), torch.tensor([[0, 1, 30, 35], [0, 3, 5, 6]])
        batch, seen = relative_map.relative(q, k), relative_map.seen(q, k)
        assert batch.shape == (2, 3, 4)
        for row in range(2):
            assert torch.equal(batch[row], relative_map.relative(q[row], k[row]))
            assert torch.equal(seen[row], relative_map.seen(q[row], k[row]))
        shared = relative_map.relative(q, k[0])
        assert torch.equal(shared[1], relative_map.relative(q[1], k[0]))

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.uint16, torch.uint64])
    def test_integers_of_any_kind(self, dtype):
        q = torch.arange(100)
        for relative_map, _ in CASES:
            narrow = relative_map.relative(q.to(dtype), q.to(dtype))
            assert narrow.dtype == relative_map.relative(q, q).dtype
            assert torch.equal(narrow, relative_map.relative(q, q))
            assert torch.equal(relative_map.seen(q.to(dtype), q.to(dtype)), relative_map.seen(q, q))

    def test_no_float64_away_from_the_cpu(self):
        q = torch.arange(9, device="meta")
        for relative_map, _ in CASES:
            for group in relative_map.groups(q, q):
                assert group.first.device.type == group.q.device.type == "meta"

    def test_one_graph(self):
        q = torch.arange(50)
        for relative_map in (SelfExtend(window=8, group_size=3), DualChunk(chunk_size=20, local_size=5)):
            compiled = torch.compile(relative_map.relative, fullgraph=True, backend="eager")
            assert torch.equal(compiled(q, q), relative_map.relative(q, q))

    def test_equal_settings_are_equal_maps(self):
        assert ReRoPE(window=5) == ReRoPE(window=5) != ReRoPE(window=6)
        assert len({DualChunk(chunk_size=8, local_size=2), DualChunk(chunk_size=8, local_size=2)}) == 1


class TestAttention:
    """What the maps are for: rotating once for each group gives the scores that rotating for each pair would."""

    @pytest.mark.parametrize("relative_map", [case[0] for case in CASES], ids=IDS)
    def test_scores(self, relative_map):
        torch.manual_seed(0)
        rotary = Rotary(head_dim=8, rope_theta=100.0)
        q_positions, k_positions = torch.arange(25, 40), torch.arange(40)
        q = torch.randn(1, 2, 15, 8, dtype=torch.float64)
        k = torch.randn(1, 2, 40, 8, dtype=torch.float64)

        def turned(x, positions):
            return rotate(x, None, *rotary_tables(rotary, positions))[0]

        merged = torch.zeros(1, 2, 15, 40, dtype=torch.float64)
        for group in relative_map.groups(q_positions, k_positions):
            scores = turned(q, group.q) @ turned(k, group.k).transpose(-1, -2)
            merged = torch.where(group.region(k_positions), scores, merged)

        distances = relative_map.relative(q_positions, k_positions)
        seen = relative_map.seen(q_positions, k_positions)
        for row in range(15):
            every_query = q[:, :, row : row + 1].expand(-1, -1, 40, -1)
            expected = (turned(every_query, distances[row]) * k).sum(-1)
            # Each table entry is off by 6e-8 at most; of a pair of rotations three tables enter each product.
            bound = 3 * 6e-8 * 2 * q[:, :, row].norm(dim=-1)[..., None] * k.norm(dim=-1)
            assert ((merged[:, :, row] - expected).abs() <= bound)[:, :, seen[row]].all()


class TestErrors:
    """Wrong numbers are refused when the map is made, wrong positions when they are given."""

    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda: ReRoPE(window=0), "window: got 0; it must be at least 1"),
            (lambda: ReRoPE(window=2.0), "window: got a float; give "),
            (lambda: LeakyReRoPE(window=4, factor=0.5), "factor: got 0.5; give a number of at least 1"),
            (lambda: LeakyReRoPE(window=4, factor=math.nan), "factor: got nan"),
            (lambda: SelfExtend(window=4, group_size=0), "group_size: got 0"),
            (lambda: LMInfinite(window=4, sinks=-1), "sinks: got -1; it must be at least 0"),
            (lambda: AttentionSinks(window=0), "window: got 0; it must be at least 1"),
            (lambda: AttentionSinks(window=4, sinks=-1), "sinks: got -1; it must be at least 0"),
            (lambda: DualChunk(chunk_size=8, local_size=5), r"local_size: got 5; at most half of chunk_size \(8\)"),
            (
                lambda: DualChunk(chunk_size=8, local_size=2, pinned=6),
                r"pinned: got 6; allowed: 7 \(the paper\), 8 \(ChunkLlama\)",
            ),
            (lambda: ReRoPE(window=4).largest_distance(0), "tokens: got 0; it must be at least 1"),
        ],
    )
    def test_numbers(self, make, words):
        with pytest.raises(ValueError, match=words):
            make()

    def test_positions(self):
        q = torch.arange(4)
        with pytest.raises(ValueError, match=r"q_positions: got torch.float32; give integers"):
            ReRoPE(window=4).groups(q.float(), q)
        with pytest.raises(ValueError, match=r"k_positions: got torch.bfloat16; give integers"):
            ReRoPE(window=4).relative(q, q.bfloat16())
        with pytest.raises(ValueError, match=r"k_positions: got shape \(1, 1, 4\); it must be \(S,\) or \(B, S\)"):
            ReRoPE(window=4).groups(q, q[None, None])
        with pytest.raises(ValueError, match=r"k_positions: got 3 rows; q_positions has 2"):
            ReRoPE(window=4).seen(q.expand(2, 4), q.expand(3, 4))
