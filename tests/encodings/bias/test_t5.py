"""T5's buckets, by whole numbers, and its learned table."""

from __future__ import annotations

import math
import shutil
import warnings

import mpmath
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from theodolite.encodings.bias.t5 import T5Bias, bucket_starts


def formula(relative, *, num_buckets, max_distance, bidirectional):
    """The bucket of one relative position, from the printed formula, with 60 digits."""
    bucket, count = 0, num_buckets
    if bidirectional:
        count //= 2
        bucket = count if relative > 0 else 0
        distance = abs(relative)
    else:
        distance = max(-relative, 0)
    exact = count // 2
    if distance < exact:
        return bucket + distance
    with mpmath.workdps(60):
        ratio = mpmath.log(mpmath.mpf(distance) / exact) / mpmath.log(mpmath.mpf(max_distance) / exact)
        # A value that is a whole number but for the last of 60 digits is that number.
        growth = int(mpmath.floor(ratio * (count - exact) + mpmath.mpf(10) ** -40))
    return bucket + min(exact + growth, count - 1)


SETTINGS = [
    {"num_buckets": 32, "max_distance": 128},
    {"num_buckets": 8, "max_distance": 16},
    {"num_buckets": 320, "max_distance": 800},
    {"num_buckets": 18, "max_distance": 128},
    {"num_buckets": 4, "max_distance": 64},
    {"num_buckets": 6, "max_distance": 200},
]


class TestBuckets:
    """At the borders a logarithm in the wrong precision moves a bucket."""

    @pytest.mark.parametrize("bidirectional", [False, True], ids=["decoder", "encoder"])
    @pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "of".join(str(number) for number in s.values()))
    def test_the_formula_with_sixty_digits(self, setting, bidirectional):
        relative = [*range(-1000, 1001, 7), *range(-140, 141), -(2**24), 2**24]
        expected = [formula(r, **setting, bidirectional=bidirectional) for r in relative]
        bias = T5Bias(1, **setting, bidirectional=bidirectional)
        assert bias.bucket(torch.tensor(relative)).tolist() == expected

    def test_where_buckets_start(self):
        causal = [*range(17), 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
        assert bucket_starts(32, 128) == tuple(causal)
        assert bucket_starts(16, 128) == (*range(9), 12, 16, 23, 32, 46, 64, 91)

    def test_known_values(self):
        encoder, decoder = (T5Bias(1, bidirectional=both) for both in (True, False))
        known = {-200: 15, -64: 14, -16: 10, -15: 9, -8: 8, -7: 7, -1: 1, 0: 0, 1: 17, 8: 24, 16: 26, 64: 30, 128: 31}
        assert encoder.bucket(torch.tensor(list(known))).tolist() == list(known.values())
        known = {-127: 31, -113: 31, -112: 30, -64: 26, -20: 17, -16: 16, -15: 15, -8: 8, 0: 0, 1: 0, 500: 0}
        assert decoder.bucket(torch.tensor(list(known))).tolist() == list(known.values())

    def test_a_longer_distance_is_never_in_a_lower_bucket(self):
        assert (T5Bias(1, bidirectional=False).bucket(-torch.arange(5000)).diff() >= 0).all()

    def test_of_any_shape_and_integer(self):
        bias = T5Bias(1, bidirectional=True)
        relative = torch.tensor([[-100, 3], [0, 127]], dtype=torch.int8)
        assert bias.bucket(relative).tolist() == [[15, 19], [0, 31]]
        assert bias.bucket(relative).dtype == torch.int64


class TestTable:
    """The learned numbers, where transformers keeps them."""

    @pytest.mark.parametrize("bidirectional", [False, True])
    def test_each_pair_reads_its_bucket(self, bidirectional):
        bias = T5Bias(3, max_distance=64, bidirectional=bidirectional)
        q, k = [40, 3, 200], [0, 41, 39, 3, 90]
        dense = bias(torch.tensor(q), torch.tensor(k))
        for i, m in enumerate(q):
            for j, n in enumerate(k):
                bucket = formula(n - m, num_buckets=32, max_distance=64, bidirectional=bidirectional)
                assert torch.equal(dense[0, :, i, j], bias.weight[bucket])

    def test_takes_the_weight_of_a_checkpoint(self):
        holder = torch.nn.Module()
        holder.relative_attention_bias = T5Bias(4, bidirectional=True)
        weight = torch.randn(32, 4)
        holder.load_state_dict({"relative_attention_bias.weight": weight}, strict=True)
        assert torch.equal(holder.relative_attention_bias.weight, weight)

    def test_gradients_of_a_long_sequence_count_the_pairs(self):
        bias = T5Bias(2, bidirectional=False)
        positions = torch.arange(700)
        bias(positions, positions).sum().backward()
        counts = bias.bucket(positions[None, :] - positions[:, None]).flatten().bincount(minlength=32)
        assert torch.equal(bias.weight.grad, counts[:, None].expand(-1, 2).float())

    def test_initial_spread(self):
        torch.manual_seed(0)
        # 32 x 64 draws: their standard deviation is within 5 % of the true one, at 3 sigma.
        weight = T5Bias(64, bidirectional=True, std=512**-0.5).weight.detach()
        assert float(weight.std()) == pytest.approx(512**-0.5, rel=0.05)

    def test_scores_are_not_divided(self):
        assert T5Bias.score_scale == 1.0


class TestOneCompiledKernel:
    """FlexAttention with the bias inside, as it runs on an accelerator."""

    @pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
    def test_equals_the_dense_form(self):
        torch.manual_seed(0)
        bias = T5Bias(4, num_buckets=8, max_distance=16, bidirectional=True, std=1.0)
        q_positions = torch.stack((torch.arange(3, 20), torch.arange(17)))
        k_positions = torch.arange(21)
        q, k, v = (torch.randn(2, 4, length, 16) for length in (17, 21, 21))
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=bias(q_positions, k_positions), scale=bias.score_scale
        )
        torch._dynamo.reset()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = torch.compile(flex_attention)(
                q, k, v, score_mod=bias.score_mod(q_positions, k_positions), scale=bias.score_scale
            )
        torch._dynamo.reset()
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


class TestRefusals:
    """Buckets that cannot be."""

    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ({"num_buckets": 31, "bidirectional": True}, "num_buckets: got 31; each direction has half of them"),
            ({"num_buckets": 2, "bidirectional": True}, "num_buckets: got 2; each direction needs at least 2"),
            ({"num_buckets": 1, "bidirectional": False}, "num_buckets: got 1; each direction needs at least 2"),
            ({"max_distance": 16, "bidirectional": False}, "max_distance: got 16; it must be above 16"),
            ({"max_distance": 8, "bidirectional": True}, "max_distance: got 8; it must be above 8"),
        ],
    )
    def test_settings(self, setting, message):
        with pytest.raises(ValueError, match=message):
            T5Bias(4, **setting)

    def test_whole_numbers_only(self):
        with pytest.raises(ValueError, match="num_buckets: got a float; give a Python int"):
            T5Bias(4, num_buckets=32.0, bidirectional=True)
        with pytest.raises(ValueError, match="max_distance: got a float; give a Python int"):
            T5Bias(4, max_distance=128.0, bidirectional=True)

    def test_direction_is_not_guessed(self):
        with pytest.raises(TypeError, match="bidirectional"):
            T5Bias(4)

    def test_fractions(self):
        bias = T5Bias(4, bidirectional=True)
        with pytest.raises(ValueError, match=r"q_positions: got torch\.float32; give integers"):
            bias(torch.arange(3.0), torch.arange(3))
        with pytest.raises(ValueError, match=r"k_positions: got torch\.float64; give integers"):
            bias(torch.arange(3), torch.arange(3.0, dtype=torch.float64))
        with pytest.raises(ValueError, match=r"relative_position: got torch\.float32; give integers"):
            bias.bucket(torch.arange(3.0))

    @pytest.mark.parametrize("std", [-1.0, math.inf, math.nan])
    def test_std(self, std):
        with pytest.raises(ValueError, match=r"std: got .*; it must be a number of at least 0"):
            T5Bias(4, bidirectional=True, std=std)
