"""Biases that read queries and keys give the scores and outputs of transformers' and x-transformers' own modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import DebertaConfig, DebertaV2Config, Wav2Vec2BertConfig, XLNetConfig
from transformers.models.deberta.modeling_deberta import DisentangledSelfAttention as DebertaAttention
from transformers.models.deberta.modeling_deberta import build_relative_position as distances
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention as DebertaV2Attention
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import (
    Wav2Vec2BertRelPositionalEmbedding,
    Wav2Vec2BertSelfAttention,
)
from transformers.models.xlnet.modeling_xlnet import XLNetModel

from theodolite.encodings.bias.cope import CoPE
from theodolite.encodings.bias.deberta import DisentangledBias, RelativeEmbeddings
from theodolite.encodings.bias.deberta_buckets import log_bucket
from theodolite.encodings.bias.shaw import ShawBias
from theodolite.encodings.bias.transformer_xl import TransformerXLBias

HEADS, HEAD_DIM, HIDDEN, BATCH, TOKENS = 4, 8, 32, 2, 21
TERMS = [["c2p", "p2c"], ["c2p"], ["p2c"]]


def seeded(module):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module.double().eval()


def hidden_states(seed=1, tokens=TOKENS):
    return torch.randn(BATCH, tokens, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def in_heads(x):
    return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)


def weights_of(bias, q, k, q_at, k_at, mask):
    scores = q @ k.mT * bias.scale + bias.dense(q_at, k_at, q=q, k=k)
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)


def padded():
    """(B, 1, S, S): the second row's last five tokens are padding."""
    mask = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    mask[1, -5:] = False
    return mask[:, None, :, None] & mask[:, None, None]


def close(one, other):
    """Float64 against float64; transformers' square root of D and terms is float32, half a unit of 2^-24 off."""
    torch.testing.assert_close(one, other, rtol=0, atol=2**-24 * max(1.0, float(other.detach().abs().max())) * 8)


class TestDebertaV2:
    """Logarithmic buckets, shared vectors of distances, projections of their own or attention's."""

    @staticmethod
    def pair(terms, share, buckets=8, longest=24):
        config = DebertaV2Config(
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            relative_attention=True,
            position_buckets=buckets,
            max_relative_positions=longest,
            pos_att_type=terms,
            share_att_key=share,
        )
        attention = seeded(DebertaV2Attention(config))
        table = seeded(RelativeEmbeddings(buckets if buckets > 0 else longest, HIDDEN))
        names = ("key_proj", "query_proj") if share else ("pos_key_proj", "pos_query_proj")
        key, query = (
            getattr(attention, name) if term in terms else None
            for name, term in zip(names, ("c2p", "p2c"), strict=True)
        )
        bias = DisentangledBias(
            HEADS,
            HEAD_DIM,
            hidden_size=HIDDEN,
            max_relative_positions=longest,
            position_buckets=buckets if buckets > 0 else None,
            pos_att_type=terms,
            rel_embeddings=table,
            pos_key_proj=key,
            pos_query_proj=query,
        )
        return attention, bias, table

    @pytest.mark.parametrize("terms", TERMS)
    @pytest.mark.parametrize("share", [False, True])
    @pytest.mark.parametrize(("buckets", "longest"), [(8, 24), (-1, 6)])
    @torch.no_grad()
    def test_weights_and_outputs(self, terms, share, buckets, longest):
        attention, bias, table = self.pair(terms, share, buckets, longest)
        x, mask, at = hidden_states(), padded(), torch.arange(300, 300 + TOKENS)
        expected, expected_weights = attention(x, mask, output_attentions=True, rel_embeddings=table())
        q, k, v = (in_heads(getattr(attention, f"{name}_proj")(x)) for name in ("query", "key", "value"))
        weights = weights_of(bias, q, k, at, at, mask)
        close(weights, expected_weights)
        close((weights @ v).transpose(1, 2).flatten(2), expected)

    @torch.no_grad()
    def test_scores(self):
        attention, bias, table = self.pair(["c2p", "p2c"], share=False)
        x, at = hidden_states(), torch.arange(TOKENS)
        q, k = in_heads(attention.query_proj(x)), in_heads(attention.key_proj(x))
        theirs = attention.disentangled_attention_bias(q.flatten(0, 1), k.flatten(0, 1), None, table(), 3)
        close(bias.dense(at, at, q=q, k=k), theirs.view(BATCH, HEADS, TOKENS, TOKENS))

    @torch.no_grad()
    def test_fewer_queries_than_keys(self):
        """Theirs fails, and mixes up its bucket arguments on the way; ours gives rows of the square."""
        attention, bias, table = self.pair(["c2p", "p2c"], share=False)
        x, at = hidden_states(), torch.arange(TOKENS)
        q, k = in_heads(attention.query_proj(x)), in_heads(attention.key_proj(x))
        square = attention.disentangled_attention_bias(q.flatten(0, 1), k.flatten(0, 1), None, table(), 3)
        last = bias.dense(at[-4:], at, q=q[:, :, -4:], k=k)
        close(last, square.view(BATCH, HEADS, TOKENS, TOKENS)[:, :, -4:])
        with pytest.raises(RuntimeError, match="must match the size"):
            attention.disentangled_attention_bias(q[:, :, -4:].flatten(0, 1), k.flatten(0, 1), None, table(), 3)

    @pytest.mark.parametrize(("buckets", "longest"), [(256, 512), (32, 128), (64, 256), (10, 21)])
    def test_buckets(self, buckets, longest):
        """Float32 of a logarithm falls on the right side at all of these distances."""
        relative = torch.arange(-3 * longest, 3 * longest + 1)
        theirs = make_log_bucket_position(relative, buckets, longest).long().clamp(-buckets, buckets)
        assert torch.equal(log_bucket(relative, position_buckets=buckets, max_relative_positions=longest), theirs)

    def test_a_bucket_that_float32_moves(self):
        """512 buckets up to 4096 tokens: ceil of 253.99999 and of 254.00001 are two buckets."""
        relative = torch.tensor([1643])
        ours = log_bucket(relative, position_buckets=512, max_relative_positions=4096)
        theirs = make_log_bucket_position(relative, 512, 4096)
        exact = make_log_bucket_position(relative.double(), 512, 4096)
        assert ours != theirs
        assert ours == exact


class TestDeberta:
    """The first DeBERTa: a vector for each distance, q scaled before."""

    @pytest.mark.parametrize("terms", TERMS)
    @pytest.mark.parametrize("longest", [6, 40])
    @torch.no_grad()
    def test_weights_and_outputs(self, terms, longest):
        config = DebertaConfig(
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            relative_attention=True,
            max_relative_positions=longest,
            pos_att_type=terms,
        )
        attention = seeded(DebertaAttention(config))
        table = seeded(nn.Embedding(2 * longest, HIDDEN))
        bias = DisentangledBias(
            HEADS,
            HEAD_DIM,
            hidden_size=HIDDEN,
            max_relative_positions=longest,
            pos_att_type=terms,
            rel_embeddings=table,
            pos_key_proj=getattr(attention, "pos_proj", None),
            pos_query_proj=getattr(attention, "pos_q_proj", None),
        )
        x, mask, at = hidden_states(), padded(), torch.arange(7, 7 + TOKENS)
        relative = distances(x, x)
        expected, expected_weights = attention(
            x, mask, output_attentions=True, relative_pos=relative, rel_embeddings=table.weight
        )
        q, k, v = attention.in_proj(x).unflatten(-1, (HEADS, 3 * HEAD_DIM)).transpose(1, 2).chunk(3, dim=-1)
        q, v = (y + b.view(HEADS, 1, HEAD_DIM) for y, b in ((q, attention.q_bias), (v, attention.v_bias)))
        weights = weights_of(bias, q, k, at, at, mask)
        close(weights, expected_weights)
        close((weights @ v).transpose(1, 2).flatten(2), expected)


class TestXLNet:
    """Both directions, with memory, without its term for segments."""

    @pytest.mark.parametrize("clamp", [-1, 5])
    @pytest.mark.parametrize("memory", [0, 9])
    @torch.no_grad()
    def test_weights_and_outputs(self, clamp, memory):
        config = XLNetConfig(
            d_model=HIDDEN, n_head=HEADS, d_inner=16, n_layer=1, vocab_size=8, clamp_len=clamp, attn_type="bi"
        )
        model = seeded(XLNetModel(config))
        attention = model.layer[0].rel_attn
        bias = TransformerXLBias(
            HEADS,
            HEAD_DIM,
            hidden_size=HIDDEN,
            clamp_length=clamp if clamp > 0 else None,
            r_w_bias=attention.r_w_bias,
            r_r_bias=attention.r_r_bias,
        )
        bias.r_net.weight = nn.Parameter(attention.r.flatten(1).T)
        keys, x = TOKENS + memory, hidden_states(tokens=TOKENS + memory)
        q, k, v, r = (
            torch.einsum("bsh,hnd->bnsd", inputs, weight)
            for inputs, weight in (
                (x[:, memory:], attention.q),
                (x, attention.k),
                (x, attention.v),
                (model.relative_positional_encoding(TOKENS, keys).transpose(0, 1).double(), attention.r),
            )
        )
        expected, expected_weights = attention.rel_attn_core(
            *(y.permute(2, 0, 1, 3) for y in (q, k, v)),
            r.expand(BATCH, -1, -1, -1).permute(2, 0, 1, 3),
            output_attentions=True,
        )
        at = torch.arange(1000, 1000 + keys)
        weights = weights_of(bias, q, k, at[memory:], at, torch.ones(TOKENS, keys, dtype=torch.bool))
        # Their frequencies and sines are float32: at most 30 tokens x 2^-23, and 2^-24, in each of E products.
        atol = (
            31
            * 2**-23
            * float(torch.einsum("bnsd,hnd->bnsh", q + bias.r_r_bias[:, None], attention.r).abs().sum(-1).max())
        )
        torch.testing.assert_close(weights, expected_weights.permute(2, 3, 0, 1), rtol=0, atol=atol * bias.scale)
        # Weights sum to 1: an output is off by as much, times twice the largest value.
        atol_out = 2 * atol * bias.scale * float(v.abs().max())
        torch.testing.assert_close((weights @ v).permute(2, 0, 1, 3), expected, rtol=0, atol=atol_out)
        assert atol * bias.scale < 0.01


def conformer(kind, **more):
    config = Wav2Vec2BertConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        position_embeddings_type=kind,
        max_source_positions=64,
        attn_implementation="eager",
        **more,
    )
    config._attn_implementation = "eager"
    attention = seeded(Wav2Vec2BertSelfAttention(config))
    x = hidden_states()
    q, k, v = (in_heads(linear(x)) for linear in (attention.linear_q, attention.linear_k, attention.linear_v))
    return attention, config, x, q, k, v


class TestConformers:
    """Speech encoders of transformers with the same two encodings."""

    @torch.no_grad()
    def test_shaw(self):
        attention, _, x, q, k, v = conformer(
            "relative_key", left_max_position_embeddings=7, right_max_position_embeddings=3
        )
        bias = ShawBias(HEADS, HEAD_DIM, (7, 3), values=False).double()
        bias.load_state_dict({"relative_keys": attention.distance_embedding.weight})
        at = torch.arange(50, 50 + TOKENS)
        weights = weights_of(bias, q, k, at, at, torch.ones(TOKENS, TOKENS, dtype=torch.bool))
        expected, expected_weights = attention(x)
        torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-13)
        torch.testing.assert_close(
            attention.linear_out((weights @ v).transpose(1, 2).flatten(2)), expected, rtol=0, atol=1e-12
        )

    @torch.no_grad()
    def test_transformer_xl(self):
        """Sines and cosines alternate there; here all sines come first."""
        attention, config, x, q, k, _ = conformer("relative")
        table = Wav2Vec2BertRelPositionalEmbedding(config)(x)
        bias = TransformerXLBias(
            HEADS, HEAD_DIM, hidden_size=HIDDEN, r_w_bias=attention.pos_bias_u, r_r_bias=attention.pos_bias_v
        )
        weight = attention.linear_pos.weight
        bias.r_net.weight = nn.Parameter(torch.cat((weight[:, 0::2], weight[:, 1::2]), dim=1))
        at = torch.arange(TOKENS)
        weights = weights_of(bias, q, k, at, at, torch.ones(TOKENS, TOKENS, dtype=torch.bool))
        _, expected = attention(x, relative_position_embeddings=table.double())
        # Their frequencies and sines are float32: at most 21 tokens x 2^-22, and 2^-24, in each of E products.
        projected = torch.einsum("bnsd,nde->bnse", q + bias.r_r_bias[:, None], weight.view(HEADS, HEAD_DIM, HIDDEN))
        atol = 22 * 2**-22 * float(projected.abs().sum(-1).max()) * bias.scale
        torch.testing.assert_close(weights, expected, rtol=0, atol=atol)
        assert atol < 0.01


class TestCoPE:
    """x-transformers' class, which is the paper's listing: gates from scores that are scaled and masked."""

    @torch.no_grad()
    def test_scores(self):
        xt = pytest.importorskip("x_transformers.x_transformers")
        theirs = xt.CoPE(dim=HEAD_DIM, heads=HEADS, max_pos=6).double()
        nn.init.normal_(theirs.pos_emb)
        ours = CoPE(HEADS, HEAD_DIM, 6).double()
        ours.load_state_dict({"pos_emb": theirs.pos_emb.T[None]})
        q, k = in_heads(hidden_states(1)), in_heads(hidden_states(2))
        at = torch.arange(90, 90 + TOKENS)
        seen = padded() & (at[:, None] >= at)
        scores = (q @ k.mT * HEAD_DIM**-0.5).masked_fill(~seen, -torch.finfo(torch.float64).max)
        out = ours.dense(at, at, q=q, k=k, visible=padded())
        torch.testing.assert_close(out.where(seen, 0), theirs(q, scores).where(seen, 0), rtol=0, atol=1e-12)
