"""ALiBi: the published slopes, and a bias that belongs to positions."""

from __future__ import annotations

import math

import pytest
import torch

from theodolite.encodings.bias.alibi import ALiBi, alibi_slopes, signed_distance


def oracle(slopes, q_positions, k_positions, *, symmetric=False):
    """(H, Sq, Sk), float64, by loops: -slope * distance."""
    return torch.tensor(
        [
            [[-slope * (abs(m - n) if symmetric else m - n) for n in k_positions] for m in q_positions]
            for slope in slopes
        ],
        dtype=torch.float64,
    )


class TestSlopes:
    """Half of the wrong ALiBis are right for 8 heads."""

    @pytest.mark.parametrize(
        ("heads", "exponents"),
        [
            (1, [8]),
            (2, [4, 8]),
            (4, [2, 4, 6, 8]),
            (8, [1, 2, 3, 4, 5, 6, 7, 8]),
            (16, [0.5 * h for h in range(1, 17)]),
            (3, [4, 8, 2]),
            (6, [2, 4, 6, 8, 1, 3]),
            (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
            (7, [2, 4, 6, 8, 1, 3, 5]),
        ],
    )
    def test_published(self, heads, exponents):
        assert alibi_slopes(heads) == tuple(2.0**-exponent for exponent in exponents)

    def test_geometric_is_another_list_where_heads_are_no_power_of_two(self):
        for heads in (1, 2, 4, 8, 16, 32, 64, 128):
            assert alibi_slopes(heads, rule="geometric") == alibi_slopes(heads)
        for heads in (3, 5, 6, 7, 12, 20, 40, 71):
            expected = [2.0 ** (-8 * h / heads) for h in range(1, heads + 1)]
            assert alibi_slopes(heads, rule="geometric") == pytest.approx(expected, rel=1e-15)
            assert alibi_slopes(heads, rule="geometric") != alibi_slopes(heads)
        assert alibi_slopes(6, rule="geometric")[:2] == pytest.approx([0.39685, 0.15749], abs=1e-5)

    def test_one_published_order(self):
        # Two descriptions are in use: every second slope of twice the power below, appended (BLOOM); and the power
        # above, even ones before odd ones, cut (MPT). They are the same list for every number of heads.
        for heads in range(1, 300):
            above = 1 << (heads - 1).bit_length()
            powers = [2.0 ** (-8 * h / above) for h in range(1, above + 1)]
            reordered = powers if above == heads else (powers[1::2] + powers[::2])[:heads]
            assert alibi_slopes(heads) == tuple(reordered)

    def test_bias_max_is_the_last_exponent(self):
        assert alibi_slopes(4, bias_max=16) == (2.0**-4, 2.0**-8, 2.0**-12, 2.0**-16)
        assert min(alibi_slopes(12, bias_max=6)) == 2.0**-6

    def test_given(self):
        bias = ALiBi.from_slopes([0.3, 0, 1.5])
        assert torch.equal(bias.slopes(), torch.tensor([0.3, 0.0, 1.5]))
        assert bias.num_heads == 3
        positions = torch.arange(4, 7)
        torch.testing.assert_close(
            bias(positions, positions)[0].double(), oracle([0.3, 0, 1.5], [4, 5, 6], [4, 5, 6]), rtol=2.0**-23, atol=0
        )

    def test_in_float32_however_the_module_is_cast(self):
        bias = ALiBi(12).half()
        assert bias.slopes().dtype == torch.float32
        assert torch.equal(bias.slopes(slice(8, 12)), torch.tensor([2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]))


class TestDistance:
    """-slope * (m - n), in every corner where distances were lost."""

    @pytest.mark.parametrize("symmetric", [False, True])
    @pytest.mark.parametrize("heads", [4, 6])
    def test_against_loops(self, heads, symmetric):
        q, k = [5, 0, 1000, 7], [0, 5, 6, 999, 3]
        bias = ALiBi(heads, symmetric=symmetric)(torch.tensor(q), torch.tensor(k))
        # The slope is rounded once, and the product once.
        expected = oracle(alibi_slopes(heads), q, k, symmetric=symmetric)
        torch.testing.assert_close(bias[0].double(), expected, rtol=2.0**-23, atol=0)

    def test_future_keys(self):
        # The causal form rewards them, so it is the mask that hides them; the symmetric one does not.
        causal, symmetric = (ALiBi(8, symmetric=s)(torch.tensor([3]), torch.tensor([5])) for s in (False, True))
        assert (causal > 0).all()
        assert torch.equal(symmetric, -causal)

    def test_every_distance_has_its_own_value(self):
        # In bfloat16 there are 641 for these 2049.
        bias = ALiBi(8).bfloat16()(torch.tensor([2048]), torch.arange(2049))
        assert all(len(head.unique()) == 2049 for head in bias[0, :, 0])

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint32])
    def test_narrow_and_unsigned_positions_do_not_wrap(self, dtype):
        q, k = torch.tensor([120, 3]), torch.tensor([0, 119, 7])
        assert torch.equal(ALiBi(4)(q.to(dtype), k.to(dtype)), ALiBi(4)(q, k))
        assert signed_distance(q.to(dtype)[:, None], k.to(dtype)).tolist() == [[120, 1, 113], [3, -116, -4]]

    def test_far_out(self):
        far = 2**24
        q, k = torch.tensor([far]), torch.tensor([far - 1, far - 2, 0])
        expected = -ALiBi(8).slopes()[:, None] * torch.tensor([1.0, 2.0, float(far)])
        assert torch.equal(ALiBi(8)(q, k)[0, :, 0], expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_fractions(self, dtype):
        q, k = torch.tensor([10.5], dtype=dtype), torch.tensor([10.25, 0.5], dtype=dtype)
        bias = ALiBi(8)(q, k)
        assert bias.dtype == torch.float32
        assert torch.equal(bias[0, :, 0], -ALiBi(8).slopes()[:, None] * torch.tensor([0.25, 10.0]))

    def test_float64_positions_keep_small_steps_far_out(self):
        q, k = (torch.tensor([2.0**30 + step], dtype=torch.float64) for step in (0.5, 0.25))
        assert torch.equal(ALiBi(8)(q, k).flatten(), -ALiBi(8).slopes() * 0.25)


def attention(q, k, v, bias, mask):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(~mask, -torch.inf))


class TestInAttention:
    """What serving does to positions: padding on the left, a cache, ranks."""

    def test_key_positions_alone_are_the_same_after_the_softmax(self):
        # BLOOM, MPT and Falcon add slope * n.
        q, k, v = (torch.randn(1, 6, 9, 8, dtype=torch.float64) for _ in range(3))
        positions, mask = torch.arange(9), torch.ones(9, 9, dtype=torch.bool).tril()
        by_key = ALiBi(6).slopes().double()[None, :, None, None] * positions
        ours = ALiBi(6)(positions, positions).double()
        difference = attention(q, k, v, ours, mask) - attention(q, k, v, by_key, mask)
        # Scores up to 8 * 0.5; a few roundings of float64 each.
        assert difference.abs().max() < 1e-14

    def test_left_padding_changes_nothing(self):
        q, k, v = (torch.randn(1, 6, 5, 8, dtype=torch.float64) for _ in range(3))
        padded = [torch.cat((torch.randn(1, 6, 3, 8, dtype=torch.float64), x), dim=2) for x in (q, k, v)]
        real = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
        positions = (real.cumsum(0) - 1).clamp(min=0)
        short, causal = torch.arange(5), torch.ones(8, 8, dtype=torch.bool).tril()
        alone = attention(q, k, v, ALiBi(6)(short, short).double(), causal[:5, :5])
        together = attention(*padded, ALiBi(6)(positions, positions).double(), causal & real.bool())
        torch.testing.assert_close(together[:, :, 3:], alone, rtol=1e-13, atol=1e-13)

    def test_decoding_over_a_padded_cache(self):
        # Two rows at one step: 7 real tokens in the cache of the first, 4 in that of the second.
        real = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
        k_positions = (real.cumsum(1) - 1).clamp(min=0)
        step = ALiBi(4)(k_positions[:, -1:], k_positions)
        for row, count in ((0, 7), (1, 4)):
            expected = ALiBi(4)(torch.tensor([count - 1]), torch.arange(count))
            assert torch.equal(step[row, :, :, -count:], expected[0])
        assert (step[:, :, 0, :-1] < 0).any()

    def test_shards_of_queries_and_keys_under_context_parallelism(self):
        whole = ALiBi(8)(torch.arange(16), torch.arange(16))
        shards = [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
        for q in shards:
            for k in shards:
                assert torch.equal(ALiBi(8)(torch.tensor(q), torch.tensor(k)), whole[:, :, q][..., k])

    def test_two_ranks_of_four_heads(self):
        # A rank that asks for 4 heads of its own gets the slopes of a model of 4 heads.
        positions = torch.arange(5)
        whole = ALiBi(8)(positions, positions)
        ranks = [ALiBi(8)(positions, positions, heads=slice(4 * rank, 4 * rank + 4)) for rank in range(2)]
        assert torch.equal(torch.cat(ranks, dim=1), whole)
        assert not torch.equal(ALiBi(4)(positions, positions), whole[:, :4])


class TestRefusals:
    """What cannot be a slope."""

    @pytest.mark.parametrize("heads", [0, -1, 2.0, True, "8"])
    def test_heads(self, heads):
        with pytest.raises(ValueError, match=r"num_heads: got .*; it must be a whole number of at least 1"):
            alibi_slopes(heads)
        with pytest.raises(ValueError, match="num_heads: got"):
            ALiBi(heads)

    def test_rule(self):
        with pytest.raises(ValueError, match="rule: got 'mpt'; it must be one of published, geometric"):
            ALiBi(8, rule="mpt")

    @pytest.mark.parametrize("bias_max", [0, -8, math.inf, math.nan])
    def test_bias_max(self, bias_max):
        with pytest.raises(ValueError, match=r"bias_max: got .*; it must be a positive number"):
            ALiBi(8, bias_max=bias_max)

    @pytest.mark.parametrize("slope", [-0.1, math.nan, math.inf])
    def test_given_slopes(self, slope):
        with pytest.raises(ValueError, match=r"slopes: got .*; each must be a number of at least 0"):
            ALiBi.from_slopes([0.5, slope])

    def test_no_slope(self):
        with pytest.raises(ValueError, match="num_heads: got 0"):
            ALiBi.from_slopes([])
