"""xPos: exact, relative, about a centre that does not move."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf

from tests import oracle
from theodolite.encodings import RotaryEmbedding
from theodolite.encodings.rotate.xpos import XPos
from theodolite.plan import DynamicNTK, Rotary, YaRN

PROMISE = 6e-8
PLAN = Rotary(head_dim=16, rope_theta=10000.0)


def zeta(dim: int, gamma: float = 0.4) -> list[mpf]:
    """The paper's: (2i/d + gamma) / (1 + gamma)."""
    with mp.workdps(oracle.DIGITS):
        return [(mpf(2 * i) / dim + mpf(gamma)) / (1 + mpf(gamma)) for i in range(dim // 2)]


def factors(dim: int, offset, scale_base: float = 512, gamma: float = 0.4) -> list[mpf]:
    with mp.workdps(oracle.DIGITS):
        return [mp.power(z, mpf(offset) / mpf(scale_base)) for z in zeta(dim, gamma)]


def inputs(dim: int = 16, tokens: int = 9, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, tokens, dim, generator=generator, dtype=torch.float64)
    return q.to(dtype), torch.randn(2, 2, tokens, dim, generator=generator, dtype=torch.float64).to(dtype)


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)


class TestTables:
    """Every entry within 6e-8 of the truth, times its factor where that is above 1."""

    @settings(max_examples=40, deadline=None)
    @given(
        pairs=st.integers(1, 64),
        centre=st.integers(-100_000, 100_000),
        offset=st.integers(-30_000, 30_000),
        gamma=st.floats(0.3, 4.0),
        factor=st.floats(1.0, 32.0),
    )
    def test_are_exact(self, pairs, centre, offset, gamma, factor):
        scaling = YaRN(factor=factor, original_max_position_embeddings=2048)
        plan = Rotary(head_dim=2 * pairs, rope_theta=1e4, scaling=scaling)
        amplitude = float(0.1 * oracle.mp.log(factor) + 1)
        tables = XPos(plan, centre=centre, gamma=gamma).tables(torch.tensor([centre + offset]))
        turn = oracle.cos_sin(oracle.yarn(1e4, 2 * pairs, factor, 2048), centre + offset, amplitude)
        for mine, sign in ((tables.q, 1), (tables.k, -1)):
            for table, true in zip(mine, turn, strict=True):
                grown = factors(2 * pairs, sign * offset, gamma=gamma)
                for entry, value, factor_i in zip(table[0].tolist(), true, grown, strict=True):
                    allowed = PROMISE * max(1.0, amplitude * float(factor_i))
                    assert abs(mpf(entry) - value * factor_i) <= allowed

    def test_the_formula_of_the_peers_is_the_papers(self):
        for dim in (8, 64, 128):
            for i, value in enumerate(zeta(dim)):
                assert abs(value - (2 * i + mpf("0.4") * dim) / (mpf("1.4") * dim)) < 1e-15

    def test_at_the_centre_nothing_is_scaled(self):
        tables = XPos(PLAN, centre=70).tables(torch.tensor([70]))
        plain = RotaryEmbedding(PLAN).tables(torch.tensor([70]))
        for mine in (tables.q, tables.k):
            # Each is within the promise of the same value.
            assert (mine.cos - plain.cos).abs().max() <= 2 * PROMISE
            assert (mine.sin - plain.sin).abs().max() <= 2 * PROMISE

    def test_without_amplitude_nothing_is_scaled_anywhere(self):
        tables = XPos(PLAN, centre=70).tables(torch.arange(9), amplitude=False)
        assert tables.q is tables.k
        assert torch.equal(tables.q.cos, RotaryEmbedding(PLAN).tables(torch.arange(9)).cos)


class TestRelative:
    """The score of a pair depends on its distance alone: not on the centre, and not on where both stand."""

    def test_is_the_papers_score(self):
        q, k = inputs()
        rope = XPos(PLAN, centre=40)
        at_q, at_k = torch.arange(60, 69), torch.tensor([0, 3, 5, 17, 30, 44, 51, 52, 60])
        mine = scores(rope(q, None, at_q)[0], rope(None, k, at_k)[1])
        decay, inv_freq = zeta(16), oracle.plain(1e4, 16)
        for m in range(9):
            for n in range(9):
                distance = int(at_q[m] - at_k[n])
                true, size = mpf(0), 0.0
                for i in range(8):
                    angle, factor = distance * inv_freq[i], mp.power(decay[i], mpf(distance) / 512)
                    a, b = (mpf(float(q[1, 3, m, j])) for j in (i, i + 8))
                    c, d = (mpf(float(k[1, 1, n, j])) for j in (i, i + 8))
                    true += factor * (mp.cos(angle) * (a * c + b * d) - mp.sin(angle) * (b * c - a * d))
                    size += float(factor) * float(mp.hypot(a, b) * mp.hypot(c, d))
                # Four float32 entries a pair, each relative to its factor (below 1.2 here).
                assert abs(float(true) - float(mine[1, 3, m, n])) <= 4 * 1.2 * PROMISE * size + 1e-12

    @settings(max_examples=20, deadline=None)
    @given(centre=st.integers(-3000, 3000), shift=st.integers(-3000, 3000))
    def test_any_centre_and_any_shift(self, centre, shift):
        q, k = inputs()
        positions = torch.arange(9) * 37
        at_zero = scores(*XPos(PLAN, centre=0)(q, k, positions))
        moved = scores(*XPos(PLAN, centre=centre)(q, k, positions + shift))
        size = scores(*(x.norm(dim=-1, keepdim=True) for x in (q, k)))
        # Distances below 300 either way: a factor of at most e^0.75, and eight entries off by the promise.
        assert ((moved - at_zero).abs() <= 8 * 2.2 * PROMISE * size).all()

    def test_a_score_decays_with_distance(self):
        q = torch.ones(1, 1, 1, 2, dtype=torch.float64)
        rope = XPos(Rotary(head_dim=2, rope_theta=2.0), centre=0)
        near, far = (rope(q, None, torch.tensor([m]))[0].norm() for m in (0, 512))
        # One pair: zeta = 0.4 / 1.4.
        assert abs(far / near - 0.4 / 1.4) < 1e-6

    def test_a_larger_call_does_not_move_the_centre(self):
        # The fault of the peers: keys of a call of 9 tokens do not fit queries of a call of 18.
        _, k = inputs(tokens=18)
        rope = XPos(PLAN, centre=4)
        _, short = rope(None, k[:, :, :9], torch.arange(9))
        _, long = rope(None, k, torch.arange(18))
        assert torch.equal(short, long[:, :, :9])


class TestReach:
    """Positions whose factors leave the range of a dtype are refused in words, not turned into infinities."""

    def test_numbers(self):
        rope = XPos(Rotary(head_dim=128, rope_theta=1e4), centre=0)
        reach = {dtype: rope.reach(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
        assert list(reach.values()) == [3966, 35694, 35694, 35694]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_factors_are_normal_numbers_within_and_not_beyond(self, dtype):
        rope, info = XPos(PLAN, centre=0), torch.finfo(dtype)
        within, beyond = (factors(16, rope.reach(dtype) + more)[0] for more in (0, 1))
        for factor in (within, 1 / within):
            assert info.tiny <= factor <= info.max
        assert beyond < info.tiny or 1 / beyond > info.max

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_32k_tokens_about_the_middle(self, dtype):
        positions = torch.arange(0, 32_768, 1111)
        q, k = inputs(tokens=len(positions), dtype=dtype)
        rope = XPos(PLAN, centre=16_384)
        turned = rope(q, k, positions)
        assert all(x.isfinite().all() for x in turned)
        mine = scores(*turned)
        base = RotaryEmbedding(PLAN)(q.double(), k.double(), positions)
        true, size = torch.zeros_like(mine), torch.zeros_like(mine)
        # Pairs of a key that follows its query are for the mask to drop.
        offset = (positions[:, None] - positions).double() / 512
        behind = offset >= 0
        for pair, z in enumerate(zeta(16)):
            of_pair = [x[..., [pair, pair + 8]] for x in base]
            true += scores(*of_pair) * float(z) ** offset
            size += scores(*(x.norm(dim=-1, keepdim=True) for x in of_pair)) * float(z) ** offset
        # Two roundings to the dtype, of half a step each; the entries, products and sums of two float32 rotations.
        allowed = (1.01 * torch.finfo(dtype).eps + 16 * PROMISE) * size
        assert ((mine - true).abs() <= allowed)[..., behind].all()

    def test_32k_tokens_in_float16_are_refused(self):
        q, k = inputs(tokens=2, dtype=torch.float16)
        rope = XPos(PLAN, centre=16_384)
        with pytest.raises(
            ValueError,
            match=r"q: got torch.float16 and a position 16384 tokens from the centre 16384; the factors of xPos stay "
            r"in its range up to 3966 tokens: use bfloat16 or float32, or a larger scale_base",
        ):
            rope(q, k, torch.tensor([0, 20_000]))
        with pytest.raises(ValueError, match=r"k: got torch.float16"):
            rope(None, k, torch.tensor([0, 20_000]))
        # A slower decay reaches that far.
        turned = XPos(PLAN, centre=16_384, scale_base=4096)(q, k, torch.tensor([0, 20_000]))
        assert all(x.isfinite().all() for x in turned)

    def test_beyond_float32(self):
        with pytest.raises(
            ValueError, match=r"positions: got 35695, 35695 tokens from the centre 0; .* up to 35694 tok"
        ):
            XPos(PLAN, centre=0).tables(torch.tensor([3, 35_695]))

    def test_an_attention_factor_takes_room(self):
        plan = Rotary(head_dim=16, rope_theta=1e4, scaling=YaRN(factor=64, original_max_position_embeddings=64))
        assert XPos(plan, centre=0).reach(torch.float16) != XPos(PLAN, centre=0).reach(torch.float16)
        q, _ = inputs(tokens=1)
        far = XPos(plan, centre=0).reach(torch.float16)
        for position in (far, -far):
            assert XPos(plan, centre=0)(torch.ones_like(q).half(), None, torch.tensor([position]))[0].isfinite().all()

    def test_compiled_graphs_refuse_what_float32_cannot_hold(self):
        torch._dynamo.reset()
        compiled = torch.compile(XPos(PLAN, centre=0), fullgraph=True, backend="eager")
        with pytest.raises(ValueError, match="positions: got 40000"):
            compiled(*inputs(tokens=1), torch.tensor([40_000]))


class TestRefusals:
    """What has no meaning here is named."""

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"centre": float("inf")}, "centre: got inf; it must be a finite number, a position in tokens"),
            ({"centre": 0, "scale_base": 0}, "scale_base: got 0; it must be a finite number above 0"),
            ({"centre": 0, "gamma": -1.0}, "gamma: got -1.0; it must be a finite number above 0"),
        ],
    )
    def test_of_arguments(self, options, text):
        with pytest.raises(ValueError, match=text):
            XPos(PLAN, **options)

    def test_of_plans(self):
        with pytest.raises(ValueError, match=r"rotary: got mrope_section \(2, 3, 3\); xPos decays along one axis"):
            XPos(Rotary(head_dim=16, rope_theta=1e4, mrope_section=(2, 3, 3)), centre=0)
        dynamic = DynamicNTK(factor=2, original_max_position_embeddings=64)
        with pytest.raises(ValueError, match="rotary: 'dynamic' has frequencies that depend on the length"):
            XPos(Rotary(head_dim=16, rope_theta=1e4, scaling=dynamic), centre=0)

    def test_of_positions(self):
        with pytest.raises(ValueError, match=r"positions: got torch.float16; give integers, or float32 or float64"):
            XPos(PLAN, centre=0).tables(torch.arange(4).half())
        with pytest.raises(ValueError, match="positions: they are on the meta device"):
            XPos(PLAN, centre=0).tables(torch.arange(4, device="meta"), device="cpu")

    def test_of_scaled_tables_for_values(self):
        rope = XPos(PLAN, centre=0)
        with pytest.raises(ValueError, match=r"tables: they carry xPos's decay, .* make them with amplitude=False"):
            rope.turn_values(inputs()[1], rope.tables(torch.arange(9)))

    def test_of_one_tensor_twice_in_place(self):
        rope, (q, _) = XPos(PLAN, centre=0), inputs()
        with pytest.raises(ValueError, match="k: it shares elements with q"):
            rope.apply_tables(q, q, rope.tables(torch.arange(9)), inplace=True)
