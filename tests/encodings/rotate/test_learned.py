"""Trained frequencies: the plan's tables to begin with, exact wherever they go, and gradients that are the slope."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mpmath import mp, mpf

from tests import oracle
from theodolite.encodings import RotaryEmbedding
from theodolite.encodings.rotate.learned import LearnedBase, LeRoPE
from theodolite.encodings.rotate.per_head import PerHeadRotary
from theodolite.plan import DynamicNTK, Linear, LongRoPE, Rotary, YaRN, YaRNByLength

PROMISE = 6e-8
PLAN = Rotary(head_dim=16, rope_theta=10000.0)
YARN = replace(PLAN, scaling=YaRN(factor=4, original_max_position_embeddings=64))
PART = replace(PLAN, rotary_dim=8, interleaved=True, trailing=True)
AXES = replace(PLAN, mrope_section=(2, 3, 3))
STILL = replace(PLAN, live_pairs=5)
FAR = torch.tensor([0, 1, 511, 512, 40_000, 1_048_575, 2**24 - 1])


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def inputs(dtype: torch.dtype = torch.float64, tokens: int = 5):
    generator = torch.Generator().manual_seed(0)
    shape = 2, 4, tokens, 16
    return torch.randn(shape, generator=generator, dtype=dtype), torch.randn(shape, generator=generator, dtype=dtype)


class TestBeginsAtThePlan:
    """Before the first step the tables are those of the plan bit for bit: adding the module changes no model."""

    @pytest.mark.parametrize("plan", [PLAN, YARN, PART, STILL, replace(PLAN, scaling=Linear(factor=3))])
    @pytest.mark.parametrize("build", [LearnedBase, LeRoPE])
    def test_bit_for_bit(self, build, plan):
        assert same(build(plan).tables(FAR), RotaryEmbedding(plan).tables(FAR))
        pure = build(plan).tables(FAR, amplitude=False)
        assert same(pure, RotaryEmbedding(plan).tables(FAR, amplitude=False))

    @pytest.mark.parametrize("build", [LearnedBase, LeRoPE])
    def test_axes_and_fractions(self, build):
        positions = torch.randint(0, 2**24, (3, 2, 9), generator=torch.Generator().manual_seed(0))
        assert same(build(AXES).tables(positions), RotaryEmbedding(AXES).tables(positions))
        fractions = positions[0].double() / 3
        assert same(build(PLAN).tables(fractions), RotaryEmbedding(PLAN).tables(fractions))

    def test_per_head(self):
        tables = LearnedBase(YARN, num_heads=3).tables(FAR)
        assert same(tables, PerHeadRotary([YARN] * 3).tables(FAR))

    @pytest.mark.parametrize("build", [LearnedBase, LeRoPE])
    def test_by_the_lengths_of_rows(self, build):
        dynamic = replace(PLAN, scaling=DynamicNTK(factor=2, original_max_position_embeddings=16))
        long = LongRoPE(
            short_factor=(1.0,) * 8, long_factor=(2.0,) * 8, original_max_position_embeddings=16, factor=4.0
        )
        positions = torch.arange(20).expand(2, 20)
        for plan in (dynamic, replace(PLAN, scaling=long)):
            expected = RotaryEmbedding(plan).tables(positions, lengths=[9, 50])
            assert same(build(plan).tables(positions, lengths=[9, 50]), expected)
            with pytest.raises(ValueError, match=r"rotary: '.*' has frequencies that depend on the length"):
                build(plan).tables(positions)
            with pytest.raises(ValueError, match=r"lengths: got 3 for positions of shape \(2, 20\); one per row"):
                build(plan).tables(positions, lengths=[1, 2, 3])

    @pytest.mark.parametrize("build", [LearnedBase, LeRoPE])
    def test_put_back_after_training(self, build):
        rope = build(YARN)
        with torch.no_grad():
            for parameter in rope.parameters():
                parameter += 1
        assert not same(rope.tables(FAR), RotaryEmbedding(YARN).tables(FAR))
        rope.reset_parameters()
        assert same(rope.tables(FAR), RotaryEmbedding(YARN).tables(FAR))


class TestOneAttentionFactor:
    """What is learned has one attention factor for all rows: a plan whose factor follows the length is refused."""

    def test_refused(self):
        asked = replace(PLAN, scaling=YaRNByLength(yarn=YaRN(factor=4, original_max_position_embeddings=16)))
        with pytest.raises(ValueError, match="rotary: the attention factor of 'yarn-by-length' depends on the length"):
            LearnedBase(asked)
        LearnedBase(asked.at_length(17))


class TestExactWhereverItGoes:
    """Within 6e-8 of the truth at the parameter's own value, in any dtype of the parameter."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_base(self, dtype):
        rope = LearnedBase(PLAN, num_heads=2)
        rope.log_ratio.data = torch.tensor([0.7, -1.3], dtype=dtype)
        tables = rope.tables(FAR)
        assert tables.cos.dtype == torch.float32
        for head in range(2):
            with mp.workdps(oracle.DIGITS):
                theta = 10_000 * mp.exp(mpf(float(rope.log_ratio[head].detach())))
            assert abs(float(rope.rope_theta[head]) / float(theta) - 1) < 1e-14
            self.check(tables.cos[0, head], tables.sin[0, head], oracle.plain(theta, 16))

    def test_every_frequency(self):
        rope = LeRoPE(PLAN)
        with torch.no_grad():
            rope.alpha.copy_(torch.linspace(-1, 0.5, 8))
        tables = rope.tables(FAR)
        with mp.workdps(oracle.DIGITS):
            inv_freq = [
                f * mp.exp(mpf(float(alpha)))
                for f, alpha in zip(oracle.plain(1e4, 16), rope.alpha.tolist(), strict=True)
            ]
        self.check(tables.cos, tables.sin, inv_freq)

    def check(self, cos, sin, inv_freq):
        for row, position in enumerate(FAR.tolist()):
            true = oracle.cos_sin(inv_freq, position)
            # exp in float64 is a last bit off, which 2**24 radians enlarge.
            assert oracle.worst_error(cos[row].detach().numpy(), true[0]) <= 1.2 * PROMISE
            assert oracle.worst_error(sin[row].detach().numpy(), true[1]) <= 1.2 * PROMISE

    def test_float64_parameters_give_float64_tables(self):
        rope = LeRoPE(AXES).double()
        positions = torch.randint(0, 5000, (3, 2, 9), generator=torch.Generator().manual_seed(0))
        tables, expected = rope.tables(positions), RotaryEmbedding(AXES).tables(positions)
        assert tables.cos.dtype == torch.float64
        assert (tables.cos - expected.cos).abs().max() <= PROMISE
        assert (tables.sin - expected.sin).abs().max() <= PROMISE

    def test_a_ramp_stays_where_the_plan_has_it(self):
        rope = LearnedBase(YARN).double()
        with torch.no_grad():
            rope.log_ratio += 0.5
        expected = [f * mp.exp(mpf("-0.5") * 2 * pair / 16) for pair, f in enumerate(oracle.yarn(1e4, 16, 4, 64))]
        amplitude = float(0.1 * mp.log(4) + 1)
        true = oracle.cos_sin(expected, 77, amplitude)
        tables = rope.tables(torch.tensor([77]))
        assert oracle.worst_error(tables.cos[0].detach().numpy(), true[0]) < 1e-12
        assert oracle.worst_error(tables.sin[0].detach().numpy(), true[1]) < 1e-12

    def test_a_still_pair_stays_still(self):
        rope = LeRoPE(STILL)
        with torch.no_grad():
            rope.alpha += 3
        tables = rope.tables(FAR)
        assert (tables.cos[:, 5:] == 1).all()
        assert (tables.sin[:, 5:] == 0).all()


CASES = {
    "base": (lambda: LearnedBase(YARN), {}),
    "base per head": (lambda: LearnedBase(PART, num_heads=2), {}),
    "a part of the heads": (lambda: LearnedBase(PLAN, num_heads=4), {"heads": slice(1, 3)}),
    "LeRoPE": (lambda: LeRoPE(YARN), {}),
    "LeRoPE of axes": (lambda: LeRoPE(AXES), {}),
    "base by rows": (
        lambda: LearnedBase(
            replace(PLAN, scaling=DynamicNTK(factor=2, original_max_position_embeddings=4)), num_heads=2
        ),
        {"lengths": [3, 9]},
    ),
}


class TestGradients:
    """What the optimiser gets is the slope of the loss; peers that detach or round the table train nothing."""

    @pytest.mark.parametrize("name", CASES)
    def test_against_finite_differences(self, name):
        build, options = CASES[name]
        rope = build().double()
        (parameter,) = rope.parameters()
        generator = torch.Generator().manual_seed(1)
        start = (0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)).requires_grad_()
        positions = torch.tensor([[3, 1, 4, 1, 5], [0, 2, 6, 5, 3]])
        if "axes" in name:
            positions = torch.stack([positions, positions * 2, positions // 2])
        q, k = (x[:, :2].requires_grad_() for x in inputs())
        key = next(iter(dict(rope.named_parameters())))

        def turned(value, q, k):
            return torch.func.functional_call(rope, {key: value}, (q, k, positions), options)

        assert torch.autograd.gradcheck(lambda value: turned(value, q.detach(), k.detach()), start)
        assert torch.autograd.gradcheck(turned, (start, q, k), fast_mode=True)
        assert torch.autograd.gradgradcheck(turned, (start, q, k), fast_mode=True)

    def test_of_the_loss_with_respect_to_theta(self):
        # By hand: the loss at two bases, by plans and not by the module.
        q, k = inputs(tokens=9)
        positions = torch.arange(30, 39)

        def loss(theta: float) -> float:
            inv_freq = [float(f) for f in oracle.plain(theta, 16)]
            angle = positions[:, None].double() * torch.tensor(inv_freq, dtype=torch.float64)
            turned = []
            for x in (q, k):
                first, second = x[..., :8], x[..., 8:]
                cos, sin = angle.cos(), angle.sin()
                turned.append(torch.cat([first * cos - second * sin, second * cos + first * sin], -1))
            return float((turned[0] @ turned[1].transpose(-1, -2)).softmax(-1).square().sum())

        rope = LearnedBase(PLAN).double()
        turned = rope(q, k, positions)
        (turned[0] @ turned[1].transpose(-1, -2)).softmax(-1).square().sum().backward()
        h = 0.1
        slope = 10_000 * (loss(10_000 + h) - loss(10_000 - h)) / (2 * h)
        # d theta / d log_ratio = theta. The third derivative is left out: angles up to 39 radians give 39^2 / 6 of the
        # first, times (h / theta)^2; differences of a loss of about 50 in float64 are off by 50 * 2^-52 / h.
        size = float(rope.log_ratio.grad.abs())
        assert abs(float(rope.log_ratio.grad) - slope) <= 10 * 39**2 / 6 * 1e-10 * size + 10_000 * 50 * 2.0**-52 / h
        assert size > 0.01

    @pytest.mark.parametrize("build", [LearnedBase, LeRoPE])
    def test_in_float32_is_that_of_float64(self, build):
        gradients = []
        for dtype in (torch.float32, torch.float64):
            rope = build(PLAN).to(dtype)
            q, k = (x.to(dtype) for x in inputs(tokens=33))
            rope(q, k, torch.arange(100, 133))[0].square().mul(k).sum().backward()
            (parameter,) = rope.parameters()
            gradients.append(parameter.grad.double())
        # Each of 33 tokens at up to 132 with 128 entries, rounded a few times; the sum itself is in float64.
        size = 132 * 33 * 4 * 6 * 16
        assert (gradients[0] - gradients[1]).abs().max() <= 8 * 2.0**-24 * size
        assert gradients[1].abs().max() > 1

    def test_a_head_learns_from_its_own_heads(self):
        rope = LearnedBase(PLAN, num_heads=4)
        q, k = (x.float() for x in inputs())
        rope(q[:, 1:3], k[:, 1:3], torch.arange(5), heads=slice(1, 3))[1].pow(3).sum().backward()
        grad = rope.log_ratio.grad
        assert grad[0] == grad[3] == 0
        assert (grad[1:3] != 0).all()

    def test_of_half_precision_parameters(self):
        rope = LearnedBase(PLAN)
        rope.log_ratio.data = rope.log_ratio.data.bfloat16()
        q, k = (x.bfloat16() for x in inputs())
        rope(q, k, torch.arange(5))[1].float().pow(3).sum().backward()
        assert rope.log_ratio.grad.dtype == torch.bfloat16
        assert rope.log_ratio.grad.abs() > 0

    def test_at_positions_made_in_inference_mode(self):
        with torch.inference_mode():
            positions = torch.arange(5, dtype=torch.float64)
        rope = LeRoPE(PLAN)
        rope.tables(positions).cos.sum().backward()
        assert rope.alpha.grad is not None

    def test_of_cos_alone(self):
        rope = LeRoPE(PLAN).double()
        rope.tables(torch.tensor([2])).cos.sum().backward()
        inv_freq = torch.from_numpy(PLAN.inv_freq())
        expected = -2 * inv_freq * (2 * inv_freq).sin()
        assert (rope.alpha.grad - expected).abs().max() < 1e-12

    def test_training_moves_the_base_towards_what_made_the_data(self):
        truth = RotaryEmbedding(replace(PLAN, rope_theta=20_000.0))
        rope = LearnedBase(PLAN)
        q, k = (x.float() for x in inputs(tokens=64))
        positions = torch.arange(64)
        target = torch.einsum("bhqd,bhkd->bhqk", *truth(q, k, positions))
        optimiser = torch.optim.Adam(rope.parameters(), lr=0.05)
        for _ in range(60):
            optimiser.zero_grad()
            (torch.einsum("bhqd,bhkd->bhqk", *rope(q, k, positions)) - target).square().mean().backward()
            optimiser.step()
        assert abs(float(rope.rope_theta) - 20_000) < 400


class TestSharding:
    """The parameter is one that shards, and a rank turns its own heads."""

    def test_no_parameter_without_a_dimension(self):
        assert LearnedBase(PLAN).log_ratio.shape == (1,)
        assert LearnedBase(PLAN, num_heads=3).log_ratio.shape == (3,)
        assert LeRoPE(PART).alpha.shape == (4,)

    def test_a_part_of_the_heads(self):
        rope = LearnedBase(PLAN, num_heads=4)
        with torch.no_grad():
            rope.log_ratio.copy_(torch.tensor([0.1, -0.4, 0.9, 2.0]))
        q, k = (x.float() for x in inputs())
        whole = rope(q, k, torch.arange(5))
        part = rope(q[:, 2:], k[:, 2:], torch.arange(5), heads=slice(2, 4))
        assert same(part, (whole[0][:, 2:], whole[1][:, 2:]))

    def test_refusals(self):
        with pytest.raises(ValueError, match=r"heads: got slice\(0, 1, None\); all heads share one base"):
            LearnedBase(PLAN).tables(torch.arange(5), heads=slice(0, 1))
        with pytest.raises(ValueError, match="num_heads: got 0; it must be a whole number of at least 1, or None"):
            LearnedBase(PLAN, num_heads=0)
        with pytest.raises(ValueError, match=r"positions: got torch.float16; give integers"):
            LeRoPE(PLAN).tables(torch.arange(5).half())
        with pytest.raises(ValueError, match="positions: got 16777217; the tables are exact up to"):
            LeRoPE(PLAN).tables(torch.tensor([2**24 + 1]))
        with pytest.raises(ValueError, match="positions: got 16777217; the tables are exact up to"):
            LeRoPE(PLAN).double().tables(torch.tensor([2**24 + 1]))
        with pytest.raises(ValueError, match="positions: got 2 axes; this encoding has 3"):
            LeRoPE(AXES).tables(torch.zeros(2, 1, 5, dtype=torch.int64))
        with pytest.raises(ValueError, match="positions: they are on the meta device"):
            LeRoPE(PLAN).tables(torch.arange(5, device="meta"), device="cpu")
