"""From a config to a layer's attention: what `read_config` and `build` make is what transformers' own module gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from theodolite.attention import attend_plainly
from theodolite.encodings import build, build_embed
from theodolite.plan.huggingface import read_config

TOKENS, HEADS, HEAD_DIM, WIDTH = 23, 4, 8, 32
# Not from 0: what is relative is the same anywhere.
POSITIONS = torch.arange(300, 300 + TOKENS)


def seeded(model: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.double().eval()


def in_heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)


def joined(out: torch.Tensor) -> torch.Tensor:
    return out.transpose(1, 2).flatten(2)


def watch(module: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the module is given and gives, call by call."""
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(_: Any, args: Any, kwargs: Any, out: Any) -> None:
        calls.append((args[0] if args else kwargs["hidden_states"], out[0]))

    module.register_forward_hook(record, with_kwargs=True)
    return calls


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(5, 60, (2, TOKENS), generator=torch.Generator().manual_seed(seed))


def close(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """Float64 of both, but for transformers' square root of a width in float32: 2^-24 of scores of at most 8 units."""
    size = max(1.0, float(theirs.abs().max()))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=2.0**-24 * 8 * size)


T5_SIZES = {
    "vocab_size": 64, "d_model": WIDTH, "d_kv": HEAD_DIM, "num_heads": HEADS, "d_ff": 16, "num_layers": 1,
    "num_decoder_layers": 1, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
    "dropout_rate": 0.0, "attn_implementation": "eager",
}  # fmt: skip


class TestT5:
    """A stack of each kind: the encoder's buckets have a side for what follows, the decoder's have not."""

    @pytest.mark.parametrize("part", ["encoder", "decoder"])
    @pytest.mark.parametrize("family", ["T5", "MT5", "UMT5", "SwitchTransformers"])
    @torch.no_grad()
    def test_the_first_layer(self, family: str, part: Any) -> None:
        config = getattr(transformers, f"{family}Config")(**T5_SIZES)
        model = seeded(getattr(transformers, f"{family}Model")(config))
        attention = getattr(model, part).block[0].layer[0].SelfAttention
        calls = watch(attention)
        model(input_ids=tokens(), decoder_input_ids=tokens(1))
        ((x, theirs),) = calls
        plan = read_config(config.to_dict(), part=part)
        policy = build(plan.layers[0], num_heads=HEADS)
        policy.bias.double().load_state_dict({"weight": attention.relative_attention_bias.weight})
        q, k, v = (in_heads(project(x)) for project in (attention.q, attention.k, attention.v))
        close(attention.o(joined(attend_plainly(policy, q, k, v, POSITIONS))), theirs)

    @torch.no_grad()
    def test_the_wrong_part_is_far_off(self) -> None:
        config = transformers.T5Config(**T5_SIZES)
        model = seeded(transformers.T5Model(config))
        attention = model.encoder.block[0].layer[0].SelfAttention
        calls = watch(attention)
        model(input_ids=tokens(), decoder_input_ids=tokens(1))
        ((x, theirs),) = calls
        policy = build(read_config(config.to_dict()).layers[0], num_heads=HEADS)
        policy.bias.double().load_state_dict({"weight": attention.relative_attention_bias.weight})
        q, k, v = (in_heads(project(x)) for project in (attention.q, attention.k, attention.v))
        mine = attention.o(joined(attend_plainly(policy, q, k, v, POSITIONS)))
        assert float((mine - theirs).abs().max()) > 1e-2

    @torch.no_grad()
    def test_the_window_of_longt5(self) -> None:
        config = transformers.LongT5Config(**T5_SIZES, local_radius=4, encoder_attention_type="local")
        model = seeded(transformers.LongT5EncoderModel(config))
        attention = model.encoder.block[0].layer[0].LocalSelfAttention
        calls = watch(attention)
        model(input_ids=tokens())
        ((x, theirs),) = calls
        plan = read_config(transformers.LongT5Config(**T5_SIZES, local_radius=4).to_dict(), part="encoder")
        policy = build(plan.layers[0], num_heads=HEADS)
        policy.bias.double().load_state_dict({"weight": attention.relative_attention_bias.weight})
        q, k, v = (in_heads(project(x)) for project in (attention.q, attention.k, attention.v))
        close(attention.o(joined(attend_plainly(policy, q, k, v, POSITIONS))), theirs)


class TestDeberta:
    """Terms, the scale that counts them, the norm of the vectors, and whose projections they go through."""

    @pytest.mark.parametrize("terms", [["c2p"], ["p2c"], "p2c|c2p", None], ids=["c2p", "p2c", "both", "none"])
    @pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
    @pytest.mark.parametrize("norm", ["none", "layer_norm"])
    @torch.no_grad()
    def test_version_2(self, terms: Any, share: bool, norm: str) -> None:
        config = transformers.DebertaV2Config(
            vocab_size=64, hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=1, intermediate_size=16,
            relative_attention=True, position_buckets=8, max_relative_positions=-1, max_position_embeddings=40,
            pos_att_type=terms, share_att_key=share, norm_rel_ebd=norm, layer_norm_eps=1e-3,
        )  # fmt: skip
        model = seeded(transformers.DebertaV2Model(config))
        attention = model.encoder.layer[0].attention.self
        calls = watch(attention)
        model(input_ids=tokens())
        ((x, theirs),) = calls
        policy = build(
            read_config(config.to_dict()).layers[0],
            num_heads=HEADS,
            head_dim=HEAD_DIM,
            hidden_size=WIDTH,
            key_proj=attention.key_proj,
            query_proj=attention.query_proj,
        )
        assert (policy.bias is None) == (terms is None)
        if policy.bias is not None:
            own = [policy.bias.pos_key_proj, policy.bias.pos_query_proj]
            assert (attention.key_proj in own or attention.query_proj in own) == share
            self.load(policy.bias.double(), model.encoder, attention)
        q, k, v = (in_heads(getattr(attention, f"{name}_proj")(x)) for name in ("query", "key", "value"))
        close(joined(attend_plainly(policy, q, k, v, POSITIONS)), theirs)

    @staticmethod
    def load(bias: Any, encoder: Any, attention: Any) -> None:
        """Every learned name must be there, and no other."""
        own = {
            f"{name}.{key}": value
            for name in ("pos_key_proj", "pos_query_proj", "key_proj", "query_proj")
            if hasattr(bias, f"pos_{name.removeprefix('pos_')}")
            for key, value in getattr(attention, name, torch.nn.Module()).state_dict().items()
        }
        state = {f"rel_embeddings.{k}": v for k, v in encoder.rel_embeddings.state_dict().items()}
        if hasattr(encoder, "LayerNorm"):
            state |= {f"rel_embeddings.LayerNorm.{k}": v for k, v in encoder.LayerNorm.state_dict().items()}
        for name in bias.state_dict():
            if name not in state:
                state[name] = own[name if name in own else name.removeprefix("pos_")]
        bias.load_state_dict(state)

    @pytest.mark.parametrize("terms", [["c2p"], "p2c|c2p"], ids=["c2p", "both"])
    @torch.no_grad()
    def test_version_1(self, terms: Any) -> None:
        config = transformers.DebertaConfig(
            vocab_size=64, hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=1, intermediate_size=16,
            relative_attention=True, max_relative_positions=9, max_position_embeddings=40, pos_att_type=terms,
        )  # fmt: skip
        model = seeded(transformers.DebertaModel(config))
        attention = model.encoder.layer[0].attention.self
        calls = watch(attention)
        model(input_ids=tokens())
        ((x, theirs),) = calls
        layer = read_config(config.to_dict()).layers[0]
        policy = build(layer, num_heads=HEADS, head_dim=HEAD_DIM, hidden_size=WIDTH)
        state = {"rel_embeddings.weight": model.encoder.rel_embeddings.weight}
        for mine, name in (("pos_key_proj", "pos_proj"), ("pos_query_proj", "pos_q_proj")):
            for key, value in getattr(attention, name, torch.nn.Module()).state_dict().items():
                state[f"{mine}.{key}"] = value
        # Theirs has no bias on its vectors' keys.
        if "pos_key_proj.bias" not in state:
            state["pos_key_proj.bias"] = torch.zeros(WIDTH)
        policy.bias.double().load_state_dict(state)
        q, k, v = attention.in_proj(x).unflatten(-1, (HEADS, 3 * HEAD_DIM)).transpose(1, 2).chunk(3, dim=-1)
        q, v = (y + b.view(HEADS, 1, HEAD_DIM) for y, b in ((q, attention.q_bias), (v, attention.v_bias)))
        close(joined(attend_plainly(policy, q, k, v, POSITIONS)), theirs)


class TestEmbeddingsOfTheEncoder:
    """Added positions of the other stack: another length, another kind."""

    def test_whisper(self) -> None:
        config = transformers.WhisperConfig(
            d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=8, decoder_ffn_dim=8, vocab_size=60, max_source_positions=50, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )  # fmt: skip
        theirs = transformers.WhisperModel(config).encoder.embed_positions.weight.detach()
        plan = read_config(config.to_dict(), part="encoder")
        assert plan.max_position_embeddings == len(theirs)
        # Their angles are float32, of at most 50 radians, each off by two roundings.
        ours = build_embed(plan.embed, dim=16).table(torch.arange(50))
        assert float((ours - theirs).abs().max()) < 50 * 2 * 2**-24 + 2**-23

    def test_bart(self) -> None:
        config = transformers.BartConfig(
            d_model=16, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=8, decoder_ffn_dim=8, vocab_size=60, max_position_embeddings=30,
        )  # fmt: skip
        encoder = transformers.BartModel(config).encoder
        plan = read_config(config.to_dict(), part="encoder")
        embed = build_embed(plan.embed, dim=16)
        embed.load_state_dict(encoder.embed_positions.state_dict())
        assert torch.equal(embed.table(torch.arange(30)), encoder.embed_positions.weight[2:])
        assert len(plan.layers) == len(encoder.layers)
