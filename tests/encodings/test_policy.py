"""A policy is a composition: what it is made of acts, in order, and nothing else does."""

from __future__ import annotations

import pytest
import torch

from theodolite.attention import attend_plainly
from theodolite.encodings.bias.alibi import ALiBi
from theodolite.encodings.bias.combined import BiasByHead, BiasSum
from theodolite.encodings.bias.cope import CoPE
from theodolite.encodings.bias.deberta import DisentangledBias
from theodolite.encodings.bias.forgetting import ForgettingGate
from theodolite.encodings.bias.shaw import ShawBias
from theodolite.encodings.bias.t5 import T5Bias
from theodolite.encodings.embed.sinusoidal import Sinusoidal
from theodolite.encodings.policy import Policy
from theodolite.encodings.rotate.axial import AxialRotary
from theodolite.encodings.rotate.learned import LeRoPE
from theodolite.encodings.rotate.rotary import RotaryEmbedding
from theodolite.encodings.scale.combined import ScaleByHead, ScaleProduct
from theodolite.encodings.scale.constant import ConstantScale
from theodolite.encodings.scale.ssmax import SSMax
from theodolite.encodings.scale.temperature import LogN
from theodolite.encodings.shared import SharedTables
from theodolite.plan import Axial, DynamicNTK, Mask, Rotary
from theodolite.positions import patch_positions, visible_in_documents, visible_keys

Q, K = torch.arange(50, 57), torch.arange(40, 57)


def rope(**options) -> RotaryEmbedding:
    return RotaryEmbedding(Rotary(**{"head_dim": 16, "rope_theta": 1e4, **options}))


def tensors(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def qkv(heads: int = 4, key_heads: int = 2) -> list[torch.Tensor]:
    return tensors((2, heads, 7, 16), (2, key_heads, 17, 16), (2, key_heads, 17, 16))


def softmax_attention(scores, v):
    """Attention from scores (B, H, Sq, Sk) and values that are repeated for their groups, causal by Q and K."""
    scores = scores.masked_fill(K[None] > Q[:, None], -torch.inf)
    return torch.softmax(scores, -1) @ v.repeat_interleave(scores.shape[1] // v.shape[1], 1)


def product(q, k):
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT


class TestImages:
    """Rows of positions and axes of positions look alike; where both are meant, it must be said which."""

    def test_two_dimensions_beside_a_bias(self):
        grid = patch_positions(3, 3)
        q, k, v = tensors(*[(3, 4, 9, 16)] * 3)
        bidirectional = Mask(causal=False)
        alone = Policy(rotate=AxialRotary(Axial.qwen_vl(16)), mask=bidirectional)
        turned = alone.turn(q, k, grid)
        assert torch.equal(turned[0], alone.turn(q, k, grid[:, None])[0])
        assert attend_plainly(alone, q, k, v, grid).shape == q.shape
        for policy in (
            Policy(rotate=alone.rotate, bias=ALiBi(4, symmetric=True), mask=bidirectional),
            Policy(rotate=alone.rotate, scale=LogN(8), mask=bidirectional),
        ):
            with pytest.raises(ValueError, match=r"positions: got shape \(2, 9\), where AxialRotary has axes"):
                attend_plainly(policy, q, k, v, grid)
        for at in (grid, grid[:, None]):
            with pytest.raises(
                ValueError, match=r"positions: got several axes, .* give order=.* or a mask with causal=False"
            ):
                attend_plainly(Policy(rotate=alone.rotate), q, k, v, at)


class TestEachPlace:
    """What acts in a place is what is in that place, with the others untouched."""

    def test_nothing_is_plain_causal_attention(self):
        q, k, v = qkv()
        assert torch.equal(attend_plainly(Policy(), q, k, v, Q, K), softmax_attention(product(q, k) * 16**-0.5, v))
        assert str(Policy()) == "Policy(NoPE, causal)"

    def test_rotate(self):
        q, k, v = qkv()
        turned = rope()(q, None, Q)[0], rope()(None, k, K)[1]
        expected = softmax_attention(product(*turned) * 16**-0.5, v)
        assert torch.equal(attend_plainly(Policy(rotate=rope()), q, k, v, Q, K), expected)

    def test_bias(self):
        q, k, v = qkv()
        expected = softmax_attention(product(q, k) * 16**-0.5 + ALiBi(4).dense(Q, K), v)
        assert torch.equal(attend_plainly(Policy(bias=ALiBi(4)), q, k, v, Q, K), expected)

    def test_scale_multiplies_the_product_and_not_the_bias(self):
        q, k, v = qkv()
        scores = product(q * LogN(8).factors(Q)[..., None], k) * 16**-0.5 + ALiBi(4).dense(Q, K)
        policy = Policy(bias=ALiBi(4), scale=LogN(8))
        assert torch.equal(attend_plainly(policy, q, k, v, Q, K), softmax_attention(scores, v))

    def test_score_scale(self):
        q, k, v = qkv()
        policy = Policy(score_scale=0.5)
        assert torch.equal(attend_plainly(policy, q, k, v, Q, K), softmax_attention(product(q, k) * 0.5, v))

    def test_a_bias_brings_the_score_scale_that_it_was_made_for(self):
        assert Policy(bias=T5Bias(4, bidirectional=False)).score_scale == 1.0
        deberta = DisentangledBias(4, 16, hidden_size=8, max_relative_positions=8)
        assert Policy(bias=[deberta, ALiBi(4)]).score_scale == pytest.approx((3 * 16) ** -0.5)
        assert Policy(bias=deberta, score_scale=0.3).score_scale == 0.3
        assert Policy(bias=ALiBi(4)).score_scale is None
        with pytest.raises(ValueError, match=r"score_scale: got None, and the biases were made for \[1.0, 0.14"):
            Policy(bias=[T5Bias(4, bidirectional=False), deberta])
        assert Policy(bias=[T5Bias(4, bidirectional=False), deberta], score_scale=0.25).score_scale == 0.25

    @pytest.mark.parametrize(
        ("mask", "seen"),
        [
            (Mask(sliding_window=3), lambda r, m, n: 0 <= r < 3),
            (Mask(chunk=4), lambda r, m, n: r >= 0 and m // 4 == n // 4),
            (Mask(causal=False), lambda r, m, n: True),
            (Mask(causal=False, sliding_window=3), lambda r, m, n: abs(r) < 3),
        ],
    )
    def test_mask(self, mask, seen):
        q, k, v = qkv()
        visible = torch.tensor([[seen(int(m - n), int(m), int(n)) for n in K] for m in Q])
        scores = (product(q, k) * 16**-0.5).masked_fill(~visible, -torch.inf)
        expected = torch.softmax(scores, -1) @ v.repeat_interleave(2, 1)
        assert torch.equal(attend_plainly(Policy(mask=mask), q, k, v, Q, K), expected)

    def test_sinks(self):
        q, k, v = qkv()
        policy, sinks = Policy(mask=Mask(sinks=True)), torch.tensor([0.0, 1.0, -1.0, -torch.inf])
        plain = attend_plainly(Policy(), q, k, v, Q, K)
        sunk = attend_plainly(policy, q, k, v, Q, K, sinks=sinks)
        scores = (product(q, k) * 16**-0.5).masked_fill(K[None] > Q[:, None], -torch.inf)
        kept = scores.exp().sum(-1) / (scores.exp().sum(-1) + sinks.double().exp()[:, None])
        assert (sunk - plain * kept[..., None]).abs().max() < 1e-14
        assert torch.equal(sunk[:, 3], plain[:, 3])
        for wrong, given in ((policy, None), (Policy(), sinks)):
            with pytest.raises(ValueError, match="sinks: got"):
                attend_plainly(wrong, q, k, v, Q, K, sinks=given)

    def test_values_carry_relative_positions(self):
        """The same document at another place gives the same output: nothing of the place is left in values."""
        q, k, v = qkv()
        policy = Policy(rotate=rope(rotary_dim=8, trailing=True), rotate_values=True)
        here, there = (attend_plainly(policy, q, k, v, Q + far, K + far) for far in (0, 1000))
        # Tables are float32: each of the four rotations on the way may be 2**-24 off, twice.
        assert (here - there).abs().max() < 16 * 2**-24 * v.abs().max() * q.norm(dim=-1).max() * k.norm(dim=-1).max()
        assert (here - attend_plainly(Policy(rotate=policy.rotate), q, k, v, Q, K)).abs().max() > 0.1
        with pytest.raises(ValueError, match="rotate_values: got True without a rotation"):
            Policy(rotate_values=True)

    def test_rows_of_a_length_of_their_own(self):
        q, k, v = qkv()
        dynamic = rope(scaling=DynamicNTK(factor=2, original_max_position_embeddings=16))
        both = attend_plainly(Policy(rotate=dynamic), q, k, v, Q.expand(2, -1), K.expand(2, -1), lengths=[57, 999])
        alone = attend_plainly(
            Policy(rotate=RotaryEmbedding(dynamic.rotary.at_length(999))), q[1:], k[1:], v[1:], Q[None], K[None]
        )
        assert torch.equal(both[1:], alone)

    def test_a_query_that_sees_nothing_gives_zeros(self):
        q, k, v = qkv()
        out = attend_plainly(Policy(), q, k, v, Q, K, visible=((Q > 52)[:, None] & (K > 0))[None])
        assert torch.equal(out[:, :, :3], torch.zeros_like(out[:, :, :3]))
        assert torch.equal(out[:, :, 3:], attend_plainly(Policy(), q, k, v, Q, K)[:, :, 3:])

    def test_several_axes_have_no_order(self):
        q, k, v = qkv()
        axes = Q.expand(3, 2, -1), K.expand(3, 2, -1)
        everything = torch.ones(1, 1, 17, dtype=torch.bool)
        for ask in (attend_plainly, lambda policy, q, k, v, *at, **more: policy.mask_mod(*at, **more)):
            with pytest.raises(ValueError, match=r"positions: got several axes, of shape \(3, 2, 7\), .* give order="):
                ask(Policy(), q, k, v, *axes, visible=everything)
        # The order that is given is the mask's, and what is visible besides is no order.
        out = attend_plainly(Policy(), q, k, v, *axes, order=(Q, K), visible=everything)
        assert torch.equal(out, attend_plainly(Policy(), q, k, v, Q, K))
        mod = Policy().mask_mod(*axes, order=(Q, K), visible=everything)
        assert [bool(mod(*(torch.tensor(x) for x in (1, 0, 3, j)))) for j in (13, 14)] == [True, False]


class TestMasks:
    """Bias and mask in one tensor, or in two functions, say what the plain attention does."""

    @pytest.mark.parametrize(
        "policy",
        [
            Policy(mask=Mask(sliding_window=4)),
            Policy(bias=ALiBi(4)),
            Policy(bias=ALiBi(4), mask=Mask(chunk=5)),
            Policy(),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("given", [False, True])
    def test_attn_mask(self, policy, given):
        q, k, v = (x.float() for x in qkv(key_heads=4))
        visible = torch.rand(2, 7, 17, generator=torch.Generator().manual_seed(1)) < 0.7 if given else None
        mask = policy.attn_mask(Q, K, visible=visible)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert (out - attend_plainly(policy, q, k, v, Q, K, visible=visible)).abs().max() < 1e-5

    def test_nothing_to_say(self):
        assert Policy(mask=Mask(causal=False)).attn_mask(Q, K) is None
        assert (
            Policy(bias=ALiBi(4), mask=Mask(causal=False)).attn_mask(Q, K, dtype=torch.bfloat16).dtype == torch.bfloat16
        )

    @pytest.mark.parametrize("mask", [Mask(), Mask(sliding_window=4), Mask(chunk=5), Mask(causal=False)], ids=str)
    def test_mask_mod(self, mask):
        policy = Policy(mask=mask)
        rows = torch.stack((Q, Q + 2))
        pairs = policy.visible(rows, K)
        mod = policy.mask_mod(rows, K)
        for batch, i, j in ((0, 0, 0), (1, 6, 16), (1, 2, 3), (0, 3, 13), (0, 3, 14)):
            seen = True if pairs is None else bool(pairs[batch, 0, i, j])
            assert bool(mod(*(torch.tensor(index) for index in (batch, 3, i, j)))) == seen

    def test_mask_mod_of_padding(self):
        real = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
        mod = Policy(mask=Mask(causal=False)).mask_mod(Q, Q, visible=visible_keys(real))
        assert [bool(mod(*(torch.tensor(x) for x in (0, 0, 5, j)))) for j in range(7)] == real[0].bool().tolist()

    def test_mask_mod_of_given_pairs(self):
        visible = torch.rand(2, 1, 7, 17, generator=torch.Generator().manual_seed(1)) < 0.7
        policy = Policy()
        mod, pairs = policy.mask_mod(Q, K, visible=visible), policy.visible(Q, K, visible=visible)
        for batch, head, i, j in ((0, 1, 0, 0), (1, 3, 6, 16), (1, 2, 2, 3), (0, 0, 3, 13)):
            assert bool(mod(*(torch.tensor(x) for x in (batch, head, i, j)))) == bool(pairs[batch, 0, i, j])

    def test_contradictions(self):
        for bias in (ForgettingGate(4, 8), CoPE(4, 16, max_positions=8), BiasSum([ALiBi(4), ForgettingGate(4, 8)])):
            with pytest.raises(ValueError, match=r"mask: got Mask.* is for keys up to the query alone"):
                Policy(bias=bias, mask=Mask(causal=False))

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            (
                {"rotate": Rotary(head_dim=16, rope_theta=1e4)},
                "rotate: got a Rotary; give a Rotate module, such as Rota",
            ),
            ({"rotate": ALiBi(4)}, "rotate: got a ALiBi"),
            ({"bias": rope()}, "bias: got a RotaryEmbedding; give a Bias module or several, or None"),
            ({"bias": [ALiBi(4), LogN(8)]}, "bias: got a LogN; give Bias modules"),
            ({"scale": 3.0}, "scale: got a float; give a Scale module or several"),
            ({"mask": "causal"}, "mask: got a str; give a Mask, such as"),
        ],
    )
    def test_what_is_no_part(self, given, text):
        with pytest.raises(ValueError, match=text):
            Policy(**given)

    @pytest.mark.parametrize(
        ("policy", "change", "text"),
        [
            (Policy(bias=ALiBi(8)), {}, "q: got 4 heads; the policy's ALiBi has 8"),
            (Policy(), {"q": torch.zeros(2, 3, 7, 16)}, "k, v: got shapes .* where Hkv divides H"),
            (
                Policy(),
                {"q": torch.zeros(2, 7, 4, 16)},
                r"q: got shape \(2, 7, 4, 16\) for 7 positions; it must be \(B, H",
            ),
            (
                Policy(),
                {"visible": torch.ones(2, 17, dtype=torch.bool)},
                r"visible: got shape \(2, 17\); .* visible_keys",
            ),
            (Policy(), {"visible": torch.ones(2, 1, 17)}, "visible: got torch.float32; give booleans"),
            (Policy(), {"visible": torch.ones(8, 7, 17, dtype=torch.bool)}, r"visible: got shape \(8, 7, 17\)"),
            (Policy(), {"positions": Q.expand(3, 7)}, "q_positions: got 3 rows for the 2 of q of shape"),
            (Policy(), {"positions": Q * float("nan")}, "q_positions: got nan; all must be finite"),
        ],
    )
    def test_shapes_that_do_not_fit(self, policy, change, text):
        q, k, v = qkv()
        given = {"q": q, "visible": None, "positions": Q, **change}
        with pytest.raises(ValueError, match=text):
            attend_plainly(policy, given["q"], k, v, given["positions"], K, visible=given["visible"])


class TestValuesToo:
    """Shaw's relative values are part of the encoding: an attention that drops them is another one."""

    def test_are_added(self):
        q, k, v = qkv(key_heads=4)
        shaw = ShawBias(4, 16, clip=3).double()
        scores = (product(q, k) + torch.einsum("bhid,ijd->bhij", q, shaw.relative_keys[self.rows()])) * 16**-0.5
        weights = torch.softmax(scores.masked_fill(K[None] > Q[:, None], -torch.inf), -1)
        expected = weights @ v + torch.einsum("bhij,ijd->bhid", weights, shaw.relative_values[self.rows()])
        assert (attend_plainly(Policy(bias=shaw), q, k, v, Q, K) - expected).abs().max() < 1e-13
        by_head = Policy.by_head([(Policy(bias=ALiBi(2)), 2), (Policy(bias=ShawBias(2, 16, clip=3).double()), 2)])
        by_head.bias.biases[1].load_state_dict(shaw.state_dict())
        mixed = attend_plainly(by_head, q, k, v, Q, K)
        assert (mixed[:, 2:] - expected[:, 2:]).abs().max() < 1e-13
        assert torch.equal(mixed[:, :2], attend_plainly(Policy(bias=ALiBi(2)), q[:, :2], k[:, :2], v[:, :2], Q, K))
        summed = attend_plainly(Policy(bias=[shaw, ALiBi(4)]), q, k, v, Q, K)
        assert (summed - attend_plainly(Policy(bias=[ALiBi(4)]), q, k, v, Q, K)).abs().max() > 0.01

    def rows(self):
        return (K[None] - Q[:, None]).clamp(-3, 3) + 3

    def test_with_values_turned_too(self):
        """Both are relative: the same document at another place gives the same output."""
        q, k, v = qkv(key_heads=4)
        shaw = ShawBias(4, 16, clip=3).double()
        policy = Policy(rotate=rope(), bias=shaw, rotate_values=True)
        here, there = (attend_plainly(policy, q, k, v, Q + far, K + far) for far in (0, 7))
        assert (here - there).abs().max() < 16 * 2**-24 * v.abs().max() * q.norm(dim=-1).max() * k.norm(dim=-1).max()
        with pytest.raises(ValueError, match="v: got 8 channels; the policy's vectors for values have 16"):
            attend_plainly(Policy(bias=shaw), q, k, v[..., :8], Q, K)


class TestStates:
    """What a bias keeps with the keys is made of the layer's input where that covers all keys."""

    def test_of_x(self):
        (x,) = tensors((2, 17, 8))
        policy = Policy(bias=ForgettingGate(4, 8).double())
        state = policy.bias.state(x)
        given = policy.dense_bias(K, K, q_state=state, k_state=state)
        assert torch.equal(policy.dense_bias(K, K, x=x), given)
        mod, at = policy.score_mod(K, K, x=x), [torch.tensor(index) for index in (1, 3, 16, 2)]
        assert mod(torch.tensor(0.0), *at) == given[1, 3, 16, 2]
        with pytest.raises(ValueError, match="k_state: got None, and x has 7 tokens for 17 keys"):
            policy.dense_bias(Q, K, x=x[:, :7])


class TestCheckpointed:
    """Layers that are redone in the backward find the tables that they had."""

    def test_learned_tables_prepared(self):
        from torch.utils.checkpoint import checkpoint

        policies = [Policy(rotate=LeRoPE(Rotary(head_dim=16, rope_theta=1e4))) for _ in range(2)]
        q, *_ = (x.float().requires_grad_() for x in qkv())

        # Made where there is no gradient, they are made again where there is one.
        tables = SharedTables(Q)
        with torch.no_grad():
            assert not tables.of(policies[0].rotate).cos.requires_grad
        assert tables.of(policies[0].rotate).cos.requires_grad

        def run(redo):
            tables, out = SharedTables(Q, prepare=policies), q
            for policy in policies:
                turn = lambda x, policy=policy: policy.turn(x, None, tables)[0]  # noqa: E731
                out = checkpoint(turn, out, use_reentrant=False) if redo else turn(out)
            return torch.autograd.grad(out.square().cos().sum(), [q, *(policy.rotate.alpha for policy in policies)])

        assert all(torch.equal(one, other) for one, other in zip(run(True), run(False), strict=True))


class TestPaddingAndDocuments:
    """A row gives the same alone, padded in a batch, and packed beside others: whatever the policy reads."""

    @pytest.mark.parametrize("kind", ["rotary", "alibi", "cope", "forgetting", "temperature"])
    def test_packed_and_padded_as_alone(self, kind):
        torch.manual_seed(0)
        cope, gate = CoPE(4, 16, max_positions=8).double(), ForgettingGate(4, 8).double()
        torch.nn.init.normal_(cope.pos_emb)
        policy = {
            "rotary": Policy(rotate=rope()),
            "alibi": Policy(bias=ALiBi(4)),
            "cope": Policy(bias=cope),
            "forgetting": Policy(bias=gate),
            "temperature": Policy(scale=LogN(2)),
        }[kind]
        q, k, v, x = tensors((1, 4, 9, 16), (1, 2, 9, 16), (1, 2, 9, 16), (1, 9, 8))
        at, document = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4]), torch.tensor([0] * 4 + [1] * 5)
        packed = attend_plainly(policy, q, k, v, at, x=x, visible=visible_in_documents(document))
        second = [part[:, :, 4:] for part in (q, k, v)]
        alone = attend_plainly(policy, *second, at[4:], x=x[:, 4:])
        assert (packed[:, :, 4:] - alone).abs().max() < 1e-6
        # Rubbish before the row, hidden as padding is.
        padded = [torch.cat((torch.full_like(part[:, :, :2], 9.0), part), 2) for part in second]
        x_padded = torch.cat((torch.full_like(x[:, :2], 9.0), x[:, 4:]), 1)
        real = torch.tensor([[False, False, True, True, True, True, True]])
        out = attend_plainly(
            policy, *padded, torch.tensor([[0, 0, 0, 1, 2, 3, 4]]), x=x_padded, visible=visible_keys(real)
        )
        assert (out[:, :, 2:] - alone).abs().max() < 1e-6


class TestTogether:
    """Several in one place are added up or multiplied."""

    def test_biases_are_added_up(self):
        q, k, _ = qkv()
        parts = [ALiBi(4), CoPE(4, 16, max_positions=8).double()]
        torch.nn.init.normal_(parts[1].pos_emb)
        both = Policy(bias=parts).dense_bias(Q, K, q=q, k=k)
        apart = parts[0].dense(Q, K) + parts[1].dense(Q, K, q=q, k=k)
        assert torch.equal(both, apart)
        assert set(BiasSum(parts).reads) == {"q", "k"}

    def test_score_mods_are_added_up(self):
        parts = [ALiBi(4), T5Bias(4, bidirectional=False)]
        mod, dense = BiasSum(parts).score_mod(Q, K), BiasSum(parts).dense(Q, K)
        at = [torch.tensor(index) for index in (0, 3, 2, 5)]
        # Added to the score one after the other, and together in the tensor: one rounding apart.
        assert abs(mod(torch.tensor(0.5), *at) - 0.5 - dense[0, 3, 2, 5]) <= 2**-22
        assert BiasSum([ALiBi(4), CoPE(4, 16, max_positions=8)]).score_mod(Q, K, q=qkv()[0], k=qkv()[1]) is None

    def test_no_function_is_not_no_bias(self):
        q, k, _ = qkv()
        assert Policy().score_mod(Q, K) is None
        with pytest.raises(ValueError, match="score_mod: CoPE cannot be said pair by pair; take `attn_mask`"):
            Policy(bias=CoPE(4, 16, max_positions=8)).score_mod(Q, K, q=q, k=k)

    def test_scales_are_multiplied(self):
        both = ScaleProduct([LogN(8), ConstantScale(3.0)])
        assert torch.equal(both.factors(Q), 3 * LogN(8).factors(Q))

    @pytest.mark.parametrize(
        ("biases", "text"),
        [
            ([], "biases: got none"),
            ([ALiBi(4), ALiBi(8)], r"biases: got \[4, 8\] heads; all must have the same number"),
            ([ForgettingGate(4, 8), ForgettingGate(4, 8)], "biases: got two that keep a state"),
        ],
    )
    def test_refusals(self, biases, text):
        with pytest.raises(ValueError, match=text):
            Policy(bias=biases)


class TestByHead:
    """Heads with policies of their own give what each gives alone."""

    def policies(self):
        return [
            Policy(rotate=rope(), scale=LogN(8), score_scale=16**-0.5),
            Policy(bias=ALiBi(2), score_scale=16**-0.5),
            Policy(rotate=rope(rope_theta=1e6), bias=T5Bias(4, bidirectional=False), score_scale=16**-0.5),
        ]

    def test_each_as_alone(self):
        first, second, third = self.policies()
        torch.nn.init.normal_(third.bias.weight)
        q, k, v = qkv(heads=8, key_heads=4)
        policy = Policy.by_head([(first, 1), (second, 1), (third, 2)], group=2)
        parts = [
            attend_plainly(one, q[:, lo:hi], k[:, lo // 2 : hi // 2], v[:, lo // 2 : hi // 2], Q, K)
            for one, lo, hi in ((first, 0, 2), (second, 2, 4), (third, 4, 8))
        ]
        # Sums over keys may be taken in another order for another number of heads.
        assert (attend_plainly(policy, q, k, v, Q, K) - torch.cat(parts, 1)).abs().max() < 64 * 2**-53 * v.abs().max()

    @pytest.mark.parametrize("heads", [slice(0, 2), slice(2, 8), slice(1, 5), slice(4, 8)])
    def test_heads_of_a_rank(self, heads):
        bias = BiasByHead([(None, 2), (ALiBi(2), 2), (T5Bias(4, bidirectional=False), 4)])
        torch.nn.init.normal_(bias.biases[1].weight)
        whole = bias.dense(Q, K)
        assert torch.equal(bias.dense(Q, K, heads=heads), whole[:, heads])
        mod = bias.score_mod(Q, K, heads=heads)
        if mod is not None:
            for head in range(heads.stop - heads.start):
                at = [torch.tensor(index) for index in (0, head, 6, 1)]
                assert mod(torch.tensor(0.0), *at) == whole[0, heads.start + head, 6, 1]

    def test_content_goes_to_the_heads_that_read_it(self):
        q, k, _ = qkv(heads=8, key_heads=4)
        cope = CoPE(4, 16, max_positions=8).double()
        torch.nn.init.normal_(cope.pos_emb)
        bias = BiasByHead([(ALiBi(4), 4), (cope, 4)])
        assert torch.equal(bias.dense(Q, K, q=q, k=k)[:, 4:], cope.dense(Q, K, q=q[:, 4:], k=k[:, 2:]))
        with pytest.raises(ValueError, match="k: got None; BiasByHead reads q, k"):
            bias.dense(Q, K, q=q)

    def test_groups_are_not_split(self):
        q, k, _ = qkv(heads=8, key_heads=2)
        bias = BiasByHead([(None, 2), (CoPE(6, 16, max_positions=8), 6)])
        with pytest.raises(ValueError, match="parts: heads 2 to 8 split a group of 4 queries"):
            bias.dense(Q, K, q=q, k=k)

    def test_states_of_some_heads(self):
        (x,) = tensors((2, 17, 8))
        gate = ForgettingGate(2, 8).double()
        bias = BiasByHead([(None, 2), (gate, 2)])
        state = bias.state(x)
        whole = bias.dense(K, K, q_state=state, k_state=state)
        own = gate.state(x)
        assert torch.equal(whole[:, 2:], gate.dense(K, K, q_state=own, k_state=own))
        assert whole[:, :2].abs().max() == 0
        later = bias.state(x[:, 9:], bias.state(x[:, :9])[:, :, -1])
        # The running sum is a pair of float32 numbers: the second of them may differ, the sum not.
        assert (later - state[:, :, 9:]).sum(-1).abs().max() < 1e-10
        # A product of fewer rows may be summed in another order.
        assert (bias.state(x, heads=slice(1, 3)) - state[:, 1:3]).abs().max() < 1e-12

    def test_score_scale_of_parts(self):
        t5 = T5Bias(4, bidirectional=False)
        assert BiasByHead([(t5, 4), (None, 2)]).score_scale == 1.0
        with pytest.raises(ValueError, match=r"score_scale: got None, and the biases were made for \[1.0, None\]"):
            Policy(bias=BiasByHead([(t5, 4), (ALiBi(2), 2)]))

    def test_keys_that_nobody_reads_are_not_cut(self):
        bias = BiasByHead([(ALiBi(3), 3), (None, 5)])
        q, k, _ = qkv(heads=8, key_heads=2)
        assert torch.equal(bias.dense(Q, K, q=q, k=k), bias.dense(Q, K))
        cope = BiasByHead([(CoPE(8, 16, max_positions=8), 8)])
        with pytest.raises(ValueError, match="k: got 4 heads for 2 query heads; they must be those of the same rank"):
            cope.dense(Q, K, q=q[:, :2], k=torch.zeros(2, 4, 17, 16), heads=slice(0, 2))

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: ScaleByHead([(SSMax(8), 4)]), "parts: got a SSMax of 8 heads for 4 heads"),
            (lambda: ScaleByHead([(ALiBi(4), 4)]), "parts: got a ALiBi; a part is a Scale module"),
            (lambda: BiasByHead([("x", 2)]), "parts: got a str; a part is a Bias module"),
            (lambda: ScaleProduct([SSMax(8), SSMax(4)]), r"scales: got \[4, 8\] heads"),
            (lambda: ScaleByHead([(SSMax(4), 4), (None, 4)]).factors(Q, heads=slice(4, 12)), "heads: got slice"),
            (lambda: SSMax(8)(torch.zeros(1, 1, 7, 4), Q), "heads: got 8 for the 1 of q of shape"),
            (
                lambda: LogN(8)(torch.zeros(1, 8, 7, 4), Q.expand(3, 7)),
                "positions: got 3 rows for the 1 of q",
            ),
            (lambda: Policy(score_scale=-1.0), "score_scale: got -1.0; it must be a finite number above 0"),
        ],
    )
    def test_refusals(self, make, text):
        with pytest.raises(ValueError, match=text):
            make()

    def test_slopes(self):
        assert BiasByHead([(ALiBi(2), 2), (None, 1)]).slopes().tolist() == [*ALiBi(2).slopes().tolist(), 0.0]
        assert BiasByHead([(ALiBi(2), 2), (T5Bias(1, bidirectional=False), 1)]).slopes() is None

    def test_scales(self):
        scale = ScaleByHead([(LogN(8), 2), (None, 1), (SSMax(3), 3)])
        whole = scale.factors(Q)
        assert whole.shape == (1, 6, 7)
        assert torch.equal(whole[:, :2], LogN(8).factors(Q).expand(1, 2, 7))
        assert torch.equal(whole[:, 2], torch.ones(1, 7))
        assert torch.equal(scale.factors(Q, heads=slice(1, 4)), whole[:, 1:4])

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"mask": Mask(sliding_window=4)}, "mask: got .*; all heads of a layer share it"),
            ({"score_scale": 0.5}, r"score_scale: got \[None, 0.5\]"),
        ],
    )
    def test_what_heads_must_share(self, change, text):
        with pytest.raises(ValueError, match=text):
            Policy.by_head([(Policy(), 1), (Policy(**change), 1)])


class TestHybrids:
    """Compositions that people have published or asked for are no special case."""

    def test_half_sinusoidal_half_rotary(self):
        """The sinusoid on the first half of the embedding's channels, the rotation on the last half of each head's."""
        (x,) = tensors((2, 17, 64))
        added = Sinusoidal(32, channels=slice(0, 32))(x, K)
        assert torch.equal(added[..., 32:], x[..., 32:])
        assert (added[..., :32] - x[..., :32]).abs().max() > 0.5
        q, *_ = qkv()
        turned, _ = Policy(rotate=rope(rotary_dim=8, trailing=True)).turn(q, None, SharedTables(Q))
        assert torch.equal(turned[..., :8], q[..., :8])
        assert not torch.equal(turned[..., 8:], q[..., 8:])

    def test_nope_sees_a_set(self):
        """One causal layer without positions cannot tell the order of what came before; with them it can."""
        q, k, v = qkv()
        order = torch.randperm(10, generator=torch.Generator().manual_seed(1)).tolist()
        order = [*order, *range(10, 17)]
        for policy, same in ((Policy(), True), (Policy(bias=ALiBi(4)), False), (Policy(rotate=rope()), False)):
            one = attend_plainly(policy, q, k, v, Q, K)
            other = attend_plainly(policy, q, k[:, :, order], v[:, :, order], Q, K)
            assert ((one - other).abs().max() < 1e-12) == same

    def test_layers_share_the_tables_of_one_forward(self):
        tables = SharedTables(Q)
        layers = [Policy(rotate=rope()), Policy(), Policy(rotate=rope())]
        q, _, _ = qkv()
        turned = [policy.turn(q, None, tables)[0] for policy in layers]
        assert torch.equal(turned[0], turned[2])
        assert turned[1] is q
        assert len(tables._made) == 1
