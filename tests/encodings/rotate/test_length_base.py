"""A base that grows with the length: within its bounds and never falling, whatever the weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf

from tests import oracle
from theodolite.encodings import RotaryEmbedding
from theodolite.encodings.rotate.length_base import LengthBase
from theodolite.plan import DynamicNTK, Linear, Rotary, YaRN

PLAN = Rotary(head_dim=16, rope_theta=10000.0)
BOUNDS = {"theta_min": 1e3, "theta_max": 1e7, "reference_length": 4096}
LENGTHS = [1, 2, 100, 4095, 4096, 4097, 8192, 100_000, 1_048_576, 2**24]


def build(plan: Rotary = PLAN, **options) -> LengthBase:
    return LengthBase(plan, **{**BOUNDS, **options})


def with_weights(hidden: int, seed: int, size: float, dtype: torch.dtype = torch.float32) -> LengthBase:
    rope = build(hidden=hidden)
    generator = torch.Generator().manual_seed(seed)
    for parameter in rope.parameters():
        parameter.data = (size * torch.randn(parameter.shape, generator=generator)).to(dtype)
    return rope


class TestAnyWeights:
    """Training may put the weights anywhere; the base stays between its bounds and does not fall with length."""

    @settings(max_examples=80, deadline=None)
    @given(
        hidden=st.integers(1, 12),
        seed=st.integers(0, 2**31),
        size=st.sampled_from([1e-3, 0.1, 1.0, 10.0, 1e3, 1e20, 1e37]),
        lengths=st.lists(st.integers(1, 2**24), min_size=2, max_size=30),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    )
    def test_bounded_and_not_falling(self, hidden, seed, size, lengths, dtype):
        theta = with_weights(hidden, seed, size, dtype).rope_theta(sorted(lengths))
        assert theta.isfinite().all()
        # The last bits of exp and log in float64.
        assert (theta >= 1e3 * (1 - 1e-14)).all()
        assert (theta <= 1e7 * (1 + 1e-14)).all()
        assert (theta[1:] >= theta[:-1] * (1 - 1e-12)).all()

    def test_is_the_formula(self):
        rope = with_weights(3, 2, 1.0)
        gain, slope, shift, offset = ([mpf(x) for x in parameter.tolist()] for parameter in rope.parameters())
        for length, theta in zip(LENGTHS, rope.rope_theta(LENGTHS).tolist(), strict=True):
            with mp.workdps(oracle.DIGITS):
                octaves = mp.log(mpf(length) / 4096, 2)
                logit = mp.log(mp.log(mpf(10)) / mp.log(mpf(1000))) + offset[0]
                for g, s, t in zip(gain, slope, shift, strict=True):
                    logit += mp.log(1 + mp.exp(g)) * mp.tanh(mp.log(1 + mp.exp(s)) * octaves + t)
                true = 1000 * mpf(10_000) ** (1 / (1 + mp.exp(-logit)))
            assert abs(theta / float(true) - 1) < 1e-13

    def test_neighbours(self):
        theta = with_weights(8, 0, 2.0).rope_theta(torch.arange(1, 20_000))
        assert (theta[1:] >= theta[:-1] * (1 - 1e-14)).all()
        assert theta[-1] > 1.5 * theta[0]

    def test_it_can_learn_a_target(self):
        # ABF by hand: twice the length, about twice the base.
        rope = build()
        lengths = torch.tensor([2048, 4096, 8192, 16_384, 32_768])
        target = 1e4 * torch.tensor([1.0, 1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
        optimiser = torch.optim.Adam(rope.parameters(), lr=0.3)
        for _ in range(100):
            optimiser.zero_grad()
            (rope.rope_theta(lengths).log() - target.log()).square().mean().backward()
            optimiser.step()
        assert (rope.rope_theta(lengths).log() - target.log()).abs().max() < 0.2


class TestBeginsNearThePlan:
    """Before training it is the plan's base at the reference, and nearly so elsewhere; nothing is drawn at random."""

    @pytest.mark.parametrize("hidden", [1, 2, 7, 8])
    @pytest.mark.parametrize("theta", [1001.0, 1e4, 9.9e6])
    def test_of_the_base(self, hidden, theta):
        rope = build(replace(PLAN, rope_theta=theta), hidden=hidden)
        assert abs(float(rope.rope_theta([4096]).detach()) / theta - 1) < 1e-9
        ratio = (rope.rope_theta(LENGTHS).detach() / theta).log().abs()
        # The units together move the logit by at most 0.01, and a sigmoid is no steeper than 1/4.
        assert ratio.max() <= 0.0025 * float(torch.tensor(1e4).log()) * (1 + 1e-6)

    def test_of_the_tables(self):
        positions = torch.arange(40)[None]
        tables, expected = build().tables(positions, lengths=[4096]), RotaryEmbedding(PLAN).tables(positions)
        assert (tables.cos - expected.cos).abs().max() <= 2 * 6e-8
        assert (tables.sin - expected.sin).abs().max() <= 2 * 6e-8

    def test_put_back(self):
        rope, fresh = with_weights(8, 0, 1.0), build()
        rope.reset_parameters()
        assert all(torch.equal(a, b) for a, b in zip(rope.parameters(), fresh.parameters(), strict=True))


class TestTables:
    """Each row is turned by the base of its own length, exactly."""

    @pytest.mark.parametrize("scaling", [None, Linear(factor=4), YaRN(factor=4, original_max_position_embeddings=1024)])
    def test_are_those_of_the_base(self, scaling):
        plan = PLAN if scaling is None else replace(PLAN, scaling=scaling)
        rope = with_weights(8, 3, 1.0)
        rope.rotary, rope._inv_freq = plan, tuple(plan.inv_freq().tolist())
        positions = torch.tensor([[0, 5, 100_000], [7, 2**24, 3], [1, 2, 3]])
        lengths = [4096, 2**20, 3]
        tables, theta = rope.tables(positions, lengths=lengths), rope.rope_theta(lengths)
        for row in range(3):
            with mp.workdps(oracle.DIGITS):
                ratio = mpf(float(theta[row].detach())) / 10_000
                inv_freq = [mpf(f) * ratio ** (-mpf(2 * pair) / 16) for pair, f in enumerate(plan.inv_freq())]
            for token in range(3):
                true = oracle.cos_sin(inv_freq, int(positions[row, token]), plan.attention_factor())
                # The base is off in its last bits, which up to 2**24 radians enlarge.
                for table, values in zip(tables, true, strict=True):
                    assert oracle.worst_error(table[row, token].detach().numpy(), values) <= 1.15 * 1.4 * 6e-8

    def test_three_axes(self):
        rope = LengthBase(replace(PLAN, mrope_section=(2, 3, 3)), **BOUNDS)
        positions = torch.arange(9).expand(3, 2, 9)
        one = build().tables(positions[0], lengths=[5000, 90])
        many = rope.tables(positions, lengths=[5000, 90])
        assert torch.equal(many.cos, one.cos)
        assert torch.equal(many.sin, one.sin)

    def test_lengths_as_numbers_or_as_a_tensor(self):
        rope, positions = with_weights(8, 3, 1.0), torch.arange(9).expand(2, 9)
        numbers = rope.tables(positions, lengths=[300, 9000])
        tensor = rope.tables(positions, lengths=torch.tensor([300, 9000]))
        assert torch.equal(numbers.cos, tensor.cos)
        assert not torch.equal(numbers.cos[0], numbers.cos[1])

    def test_a_row_alone_as_in_a_batch(self):
        rope, positions = with_weights(8, 3, 1.0), torch.arange(9).expand(2, 9)
        both = rope.tables(positions, lengths=[300, 9000])
        for row, length in enumerate([300, 9000]):
            alone = rope.tables(positions[row : row + 1], lengths=[length])
            assert torch.equal(alone.cos[0], both.cos[row])


class TestGradients:
    """Every weight of the network gets the slope of the loss, through tables and rotation."""

    @pytest.mark.parametrize("hidden", [1, 3])
    def test_against_finite_differences(self, hidden):
        rope = with_weights(hidden, 5, 1.0, torch.float64)
        generator = torch.Generator().manual_seed(0)
        q = torch.randn(2, 2, 4, 16, generator=generator, dtype=torch.float64)
        positions = torch.tensor([[3, 1, 4, 1], [0, 2, 6, 5]])
        names, weights = zip(*rope.named_parameters(), strict=True)

        def turned(*values):
            arguments = (q, q[:, :1], positions), {"lengths": [900, 70_000]}
            return torch.func.functional_call(rope, dict(zip(names, values, strict=True)), *arguments)

        assert torch.autograd.gradcheck(turned, weights)
        assert torch.autograd.gradgradcheck(turned, weights, fast_mode=True)

    def test_none_is_stuck_at_the_start(self):
        rope = build()
        rope.rope_theta([64, 65_536]).log().sum().backward()
        assert all((parameter.grad != 0).all() for parameter in rope.parameters())


class TestCachedKeys:
    """The trap: a key cached at one length does not fit a query of another, and is turned again exactly."""

    def test_are_turned_again(self):
        rope = with_weights(8, 3, 1.0)
        generator = torch.Generator().manual_seed(0)
        k = torch.randn(1, 2, 9, 16, generator=generator, dtype=torch.float64)
        positions = torch.arange(100, 109)[None]
        _, before = rope(None, k, positions, lengths=[300])
        _, after = rope(None, k, positions, lengths=[30_000])
        size = k.norm(dim=-1, keepdim=True)
        assert ((before - after).norm(dim=-1, keepdim=True) > 0.1 * size).any()
        pure = {length: rope.tables(positions, lengths=[length], amplitude=False) for length in (300, 30_000)}
        _, again = rope.apply_tables(None, rope.turn_output_back(before, pure[300]), pure[30_000])
        # Four rotations by entries that are each within 6e-8.
        assert ((again - after).abs() <= 4 * 1.5 * 6e-8 * size).all()


class TestRefusals:
    """The length is never guessed, and bounds that bound nothing are named."""

    @pytest.mark.parametrize(
        ("lengths", "text"),
        [
            (None, "lengths: got None; the base depends on it: give the tokens of each row's whole sequence"),
            ([5], r"lengths: got 1 for positions of shape \(2, 9\); one per row of \(B, S\) is needed"),
            ([5, 0], "lengths: got 0; each must be a whole number of at least 1 token"),
            ([5, 2.5], "lengths: got 2.5; each must be a whole number"),
            (torch.tensor([5, -1]), "lengths: got -1; each must be a whole number of at least 1 token"),
            (torch.tensor([5.0, 6.0]), "lengths: got torch.float32; give integers"),
            (torch.tensor(5), r"lengths: got shape \(\); it must be \(B,\), one for each row"),
            (5, r"lengths: got 5; give a whole number for each row, in a list or a tensor \(B,\)"),
        ],
    )
    def test_of_lengths(self, lengths, text):
        with pytest.raises(ValueError, match=text):
            build().tables(torch.arange(9).expand(2, 9), lengths=lengths)

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            (
                {"theta_min": 2e4},
                r"rotary: got rope_theta 10000; it must lie between theta_min \(20000\) and theta_max",
            ),
            ({"theta_max": 1e4}, "rotary: got rope_theta 10000; it must lie between"),
            ({"theta_min": 1}, "theta_min: got 1; it must be a finite number above 1"),
            ({"theta_max": float("inf")}, "theta_max: got inf; it must be a finite number above 1"),
            ({"reference_length": 0}, "reference_length: got 0; it must be a whole number of at least 1"),
            ({"hidden": 1.5}, "hidden: got 1.5; it must be a whole number of at least 1"),
        ],
    )
    def test_of_arguments(self, options, text):
        with pytest.raises(ValueError, match=text):
            build(**options)

    def test_of_a_plan_that_depends_on_the_length_itself(self):
        scaling = DynamicNTK(factor=2, original_max_position_embeddings=64)
        with pytest.raises(ValueError, match="rotary: 'dynamic' has frequencies that depend on the length"):
            build(replace(PLAN, scaling=scaling))
