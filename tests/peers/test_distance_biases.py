"""ALiBi and T5 biases against transformers and x-transformers: equal where they are right, and where not, why not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers
from transformers import (
    BloomConfig,
    DynamicCache,
    FalconConfig,
    FalconModel,
    MptConfig,
    T5Config,
    WavLMConfig,
    WavLMModel,
)
from transformers.models.bloom.modeling_bloom import BloomAttention, _get_alibi_slopes
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from theodolite.encodings.bias.alibi import ALiBi, alibi_slopes
from theodolite.encodings.bias.t5 import T5Bias

HEADS, HEAD_DIM = 6, 8
WIDTH = HEADS * HEAD_DIM
# float64 attention over 12 keys: a few hundred roundings of values near 1.
EXACT = {"rtol": 1e-12, "atol": 1e-12}
# BLOOM and MPT take the softmax in float32 whatever the model is: probabilities are rounded a few times, and their sum
# with values near 1 goes through one projection.
SOFTMAX_IN_FLOAT32 = {"rtol": 0, "atol": 16 * 2.0**-24}


@pytest.fixture(autouse=True)
def calm() -> Iterator[None]:
    """transformers logs that a module made alone has no model around it."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)


def attention(q, k, v, bias, seen, scale):
    """(B, S, H * D) of q, k and v (B, H, S, D), by the textbook."""
    scores = q @ k.transpose(-1, -2) * scale + bias
    out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    return out.transpose(1, 2).flatten(2)


def heads(x):
    return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)


def causal(tokens, past=0):
    return torch.ones(tokens, tokens + past, dtype=torch.bool).tril(past)


def additive(seen):
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)


def hidden(tokens, rows=2):
    return torch.randn(rows, tokens, WIDTH, generator=torch.Generator().manual_seed(tokens), dtype=torch.float64)


def t5_attention(*, is_decoder, has_bias=True):
    torch.manual_seed(0)
    config = T5Config(
        d_model=WIDTH, d_kv=HEAD_DIM, num_heads=HEADS, is_decoder=is_decoder, dropout_rate=0.0, vocab_size=8
    )
    config._attn_implementation = "eager"
    return T5Attention(config, has_relative_attention_bias=has_bias, layer_idx=0, is_causal=is_decoder).double().eval()


def our_t5(theirs):
    """Our module with the weight that their state dict has under `relative_attention_bias`."""
    holder = torch.nn.Module()
    holder.relative_attention_bias = T5Bias(HEADS, bidirectional=not theirs.is_decoder).double()
    state = {name: value for name, value in theirs.state_dict().items() if name.startswith("relative")}
    holder.load_state_dict(state, strict=True)
    return holder.relative_attention_bias


class TestT5:
    """A stack of T5 runs on our bias, from its own weights."""

    @pytest.mark.parametrize("is_decoder", [False, True], ids=["encoder", "decoder"])
    def test_bias(self, is_decoder):
        theirs = t5_attention(is_decoder=is_decoder)
        ours = our_t5(theirs)
        assert torch.equal(ours(torch.arange(300), torch.arange(300)), theirs.compute_bias(300, 300))
        step = theirs.compute_bias(3, 203, past_seen_tokens=200)
        assert torch.equal(ours(torch.arange(200, 203), torch.arange(203)), step)

    @pytest.mark.parametrize("bidirectional", [False, True])
    @pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (16, 64), (8, 20), (64, 300), (54, 64)])
    def test_buckets(self, num_buckets, max_distance, bidirectional):
        relative = torch.arange(-4000, 4000)
        setting = {"num_buckets": num_buckets, "max_distance": max_distance, "bidirectional": bidirectional}
        theirs = T5Attention._relative_position_bucket(relative, **setting)
        assert torch.equal(T5Bias(1, **setting).bucket(relative), theirs)

    def test_in_bfloat16_their_formula_moves_buckets(self):
        # A port that takes the logarithm in the model's dtype.
        def in_dtype(distance, dtype):
            growth = torch.log(distance.to(dtype) / 8) / torch.log(torch.tensor(16.0, dtype=dtype)) * 8
            return torch.where(distance < 8, distance, (8 + growth.long()).clamp(max=15))

        distance = torch.arange(1, 200)
        ours = T5Bias(1, bidirectional=True).bucket(-distance)
        assert torch.equal(in_dtype(distance, torch.float32), ours)
        assert not torch.equal(in_dtype(distance, torch.bfloat16), ours)

    def test_encoder_layer(self):
        theirs = t5_attention(is_decoder=False)
        x, positions = hidden(11), torch.arange(11)
        seen = torch.ones(2, 1, 1, 11, dtype=torch.bool)
        seen[1, ..., 8:] = False
        expected = theirs(x, mask=additive(seen))[0]
        ours = our_t5(theirs)
        q, k, v = (heads(projection(x)) for projection in (theirs.q, theirs.k, theirs.v))
        out = attention(q, k, v, ours(positions, positions), seen, ours.score_scale)
        torch.testing.assert_close(theirs.o(out), expected, **EXACT)

    def test_decoder_layer_with_a_cache(self):
        theirs, cache = t5_attention(is_decoder=True), DynamicCache()
        ours, x = our_t5(theirs), hidden(12)
        q, k, v = (heads(projection(x)) for projection in (theirs.q, theirs.k, theirs.v))
        done = 0
        for count in (7, 1, 3, 1):
            now, past = slice(done, done + count), done
            expected = theirs(x[:, now], mask=additive(causal(count, past)), cache=cache)[0]
            bias = ours(torch.arange(now.start, now.stop), torch.arange(now.stop))
            out = attention(
                q[:, :, now], k[:, :, : now.stop], v[:, :, : now.stop], bias, causal(count, past), ours.score_scale
            )
            torch.testing.assert_close(theirs.o(out), expected, **EXACT)
            done = now.stop

    def test_cross_attention_has_none(self):
        theirs = t5_attention(is_decoder=True, has_bias=False)
        x, memory = hidden(5), hidden(9)
        out, bias, _ = theirs(x, key_value_states=memory)
        assert not bias.any()
        q, k, v = heads(theirs.q(x)), heads(theirs.k(memory)), heads(theirs.v(memory))
        seen = torch.ones(5, 9, dtype=torch.bool)
        torch.testing.assert_close(theirs.o(attention(q, k, v, 0.0, seen, 1.0)), out, **EXACT)


class TestOtherUsersOfTheBuckets:
    """Models that took T5's buckets over."""

    def test_mpnet(self):
        relative = torch.arange(-600, 600)
        theirs = MPNetEncoder.relative_position_bucket(relative)
        assert torch.equal(T5Bias(1, bidirectional=True).bucket(relative), theirs)

    def test_wavlm(self):
        config = WavLMConfig(hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=HEADS, intermediate_size=8)
        theirs = WavLMModel(config).encoder.layers[0].attention
        ours = T5Bias(
            HEADS, num_buckets=config.num_buckets, max_distance=config.max_bucket_distance, bidirectional=True
        )
        ours.weight = theirs.rel_attn_embed.weight
        positions = torch.arange(1000)
        assert torch.equal(ours(positions, positions)[0], theirs.compute_bias(1000, 1000))


class TestSlopes:
    """One published rule for every number of heads."""

    @pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 8, 12, 14, 16, 20, 24, 40, 71, 112])
    def test_bloom_and_mpt(self, count):
        ours = ALiBi(count).slopes()
        # Theirs are powers of a rounded base in float32: the error grows with the exponent, up to 2 * 128.
        torch.testing.assert_close(_get_alibi_slopes(count, torch.device("cpu")), ours, rtol=256 * 2.0**-24, atol=0)
        mpt = build_mpt_alibi_tensor(count, 2)[:, 0, 0]
        torch.testing.assert_close(-mpt, ours, rtol=4 * 2.0**-24, atol=0)

    def test_alibi_bias_max(self):
        theirs = -build_mpt_alibi_tensor(12, 2, alibi_bias_max=16)[:, 0, 0]
        torch.testing.assert_close(theirs, ALiBi(12, bias_max=16).slopes(), rtol=4 * 2.0**-24, atol=0)


class TestBloom:
    """Its bias is slope * key position: the same attention."""

    def run(self, mask, x, cache=None):
        torch.manual_seed(0)
        config = BloomConfig(hidden_size=WIDTH, n_head=HEADS, attention_dropout=0.0, hidden_dropout=0.0)
        theirs = BloomAttention(config, layer_idx=0).double().eval()
        tokens = mask.shape[1]
        alibi = bloom_alibi(mask, HEADS, torch.float64)
        seen = causal(tokens) & mask.bool()[:, None, None, :]
        # A padding query that sees nothing is left to see itself: its row is not compared.
        seen = seen | torch.eye(tokens, dtype=torch.bool)
        expected = theirs(x, torch.zeros_like(x), alibi, additive(seen), layer_past=cache)[0]
        q, k, v = theirs._reshape(theirs.query_key_value(x))
        return theirs, seen, (q, k, v), expected

    @pytest.mark.parametrize("padding", [0, 4])
    def test_layer_with_left_padding(self, padding):
        mask = torch.ones(2, 11, dtype=torch.long)
        mask[1, :padding] = 0
        theirs, seen, qkv, expected = self.run(mask, hidden(11))
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        ours = ALiBi(HEADS)(positions, positions).double()
        out = theirs.dense(attention(*qkv, ours, seen, HEAD_DIM**-0.5))
        for row, first in ((0, 0), (1, padding)):
            torch.testing.assert_close(out[row, first:], expected[row, first:], **SOFTMAX_IN_FLOAT32)

    def test_a_step_over_the_cache(self):
        mask, x = torch.ones(2, 9, dtype=torch.long), hidden(9)
        theirs, seen, (q, k, v), expected = self.run(mask, x)
        step = ALiBi(HEADS)(torch.tensor([8]), torch.arange(9)).double()
        out = theirs.dense(attention(q[:, :, 8:], k, v, step, seen[:, :, 8:], HEAD_DIM**-0.5))
        torch.testing.assert_close(out, expected[:, 8:], **SOFTMAX_IN_FLOAT32)


class TestMpt:
    """Its bias is slope * (key position - last position)."""

    def test_layer(self):
        torch.manual_seed(0)
        theirs = MptAttention(MptConfig(d_model=WIDTH, n_heads=HEADS, max_seq_len=64), layer_idx=0).double().eval()
        x, positions = hidden(11), torch.arange(11)
        expected = theirs(x, build_mpt_alibi_tensor(HEADS, 64).double(), attention_mask=~causal(11))[0]
        q, k, v = (heads(part) for part in theirs.Wqkv(x).chunk(3, dim=-1))
        ours = ALiBi(HEADS)(positions, positions).double()
        out = theirs.out_proj(attention(q, k, v, ours, causal(11), HEAD_DIM**-0.5))
        torch.testing.assert_close(out, expected, **SOFTMAX_IN_FLOAT32)


class TestFalcon:
    """Its slopes go through bfloat16, and its bias is divided by the square root of the head dim."""

    def test_positions_past_256_are_rounded(self):
        theirs = falcon_alibi(torch.ones(1, 600, dtype=torch.long), 8, torch.float32)[:, 0]
        exact = ALiBi(8).slopes()[:, None] * torch.arange(600)
        assert torch.equal(theirs[:, :257], exact[:, :257])
        assert (theirs - exact).abs().max() == 1.0
        assert torch.equal(-ALiBi(8)(torch.arange(600), torch.tensor([0]))[0, :, :, 0], exact)

    def test_slopes_that_bfloat16_has_not(self):
        theirs = falcon_alibi(torch.ones(1, 2, dtype=torch.long), 12, torch.float32)[:, 0, 1]
        ours = ALiBi(12).slopes()
        assert torch.equal(theirs[:8], ours[:8])
        # Within half a unit in the last of 8 bits, and not equal.
        assert 1e-4 < ((theirs - ours).abs() / ours).max() < 2.0**-8

    @pytest.mark.parametrize(("implementation", "times"), [("sdpa", 1), ("eager", 2)])
    def test_layer(self, implementation, times):
        # The eager path adds the bias to the scores although the mask that it is given has it already.
        config = FalconConfig(
            vocab_size=32,
            hidden_size=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=HEADS,
            alibi=True,
            multi_query=False,
            new_decoder_architecture=False,
        )
        torch.manual_seed(0)
        model = FalconModel._from_config(config, attn_implementation=implementation).double().eval()
        theirs, seen = model.h[0].self_attention, {}
        theirs.register_forward_hook(lambda module, args, out: seen.update(x=args[0], out=out[0]))
        model(torch.arange(22).view(2, 11))
        slopes = [times * slope * HEAD_DIM**-0.5 for slope in alibi_slopes(HEADS)]
        q, k, v = (part.transpose(1, 2) for part in theirs._split_heads(theirs.query_key_value(seen["x"])))
        positions = torch.arange(11)
        ours = ALiBi.from_slopes(slopes)(positions, positions).double()
        out = theirs.dense(attention(q, k, v, ours, causal(11), HEAD_DIM**-0.5))
        # Our slopes are float32 and no longer powers of two.
        torch.testing.assert_close(out, seen["out"], rtol=1e-6, atol=1e-6)


class TestXTransformers:
    """Its biases count in both directions."""

    @pytest.fixture
    def peer(self):
        return pytest.importorskip("x_transformers.x_transformers")

    @pytest.mark.parametrize("count", [4, 6, 12])
    def test_alibi(self, peer, count):
        theirs = peer.AlibiPositionalBias(count)
        ours = ALiBi(count, symmetric=True)
        # Slopes that it rounds as we do, from products of a rounded ratio.
        tolerance = {"rtol": 4 * 2.0**-24, "atol": 0}
        torch.testing.assert_close(theirs(5, 9), ours(torch.arange(4, 9), torch.arange(9))[0], **tolerance)
        q, k = torch.tensor([[3, 90], [7, 7]]), torch.tensor([[0, 2, 50], [7, 8, 9]])
        torch.testing.assert_close(theirs.forward_custom_pos(q, k), ours(q, k), **tolerance)

    def test_some_heads_without(self, peer):
        theirs = peer.AlibiPositionalBias(4, total_heads=6)(7, 7)
        ours = ALiBi.from_slopes([*alibi_slopes(4), 0.0, 0.0], symmetric=True)
        assert torch.equal(theirs, ours(torch.arange(7), torch.arange(7))[0])

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_t5(self, peer, is_causal):
        theirs = peer.RelativePositionBias(HEAD_DIM**0.5, is_causal, heads=HEADS)
        ours = T5Bias(HEADS, bidirectional=not is_causal)
        # It multiplies by the square root of the head dim what its attention divides by it.
        ours.weight = torch.nn.Parameter(theirs.relative_attention_bias.weight.detach() * HEAD_DIM**0.5)
        assert torch.equal(theirs(5, 300), ours(torch.arange(295, 300), torch.arange(300))[0])
