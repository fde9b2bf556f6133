"""Additive positions against transformers' own modules, tiny and random: the same vectors for the same tokens."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    CLIPTextConfig,
    CLIPVisionConfig,
    Dinov2Config,
    Dinov2WithRegistersConfig,
    GPT2Config,
    GPT2Model,
    OPTConfig,
    OPTModel,
    RobertaConfig,
    Siglip2VisionConfig,
    SiglipVisionConfig,
    ViTConfig,
)
from transformers.models.bert.modeling_bert import BertEmbeddings
from transformers.models.clip.modeling_clip import CLIPTextEmbeddings, CLIPVisionEmbeddings
from transformers.models.dinov2.modeling_dinov2 import Dinov2Embeddings
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import Dinov2WithRegistersEmbeddings
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.musicgen.modeling_musicgen import MusicgenSinusoidalPositionalEmbedding
from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding
from transformers.models.pegasus.modeling_pegasus import PegasusSinusoidalPositionalEmbedding
from transformers.models.pegasus_x.modeling_pegasus_x import PegasusXSinusoidalPositionalEmbedding
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings
from transformers.models.roformer.modeling_roformer import RoFormerSinusoidalPositionalEmbedding
from transformers.models.siglip.modeling_siglip import SiglipVisionEmbeddings
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings
from transformers.models.speech_to_text.modeling_speech_to_text import Speech2TextSinusoidalPositionalEmbedding
from transformers.models.vit.modeling_vit import ViTEmbeddings
from transformers.models.vit_mae.modeling_vit_mae import build_2d_sinusoidal_position_embedding
from transformers.models.whisper.modeling_whisper import sinusoids
from transformers.models.xlm.modeling_xlm import create_sinusoidal_embeddings

from theodolite.encodings.embed.learned import LearnedEmbedding
from theodolite.encodings.embed.sinusoidal import Sinusoidal
from theodolite.positions.padding import from_attention_mask

WIDTH, TOKENS = 16, 9
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22, 23, 24, 2, 2, 4, 5]])
LEFT = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
RIGHT = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def xlm(rows, dim):
    return create_sinusoidal_embeddings(rows, dim, torch.empty(rows, dim))


def pegasus_x(rows, dim):
    return PegasusXSinusoidalPositionalEmbedding(dim)(torch.zeros(1, rows, dim))[0]


PAPER_HALVES = {"layout": "halves"}
FAIRSEQ = {"layout": "halves", "spacing": "tensor2tensor"}
# Made of float64 angles, so the same but for the last bit; and of float32 angles, which go wrong with the position.
EXACT = {
    "XLM": (xlm, {}),
    "Marian": (lambda rows, dim: MarianSinusoidalPositionalEmbedding(rows, dim).create_weight(), PAPER_HALVES),
    "Pegasus": (lambda rows, dim: PegasusSinusoidalPositionalEmbedding(rows, dim).create_weight(), PAPER_HALVES),
    "RoFormer": (lambda rows, dim: RoFormerSinusoidalPositionalEmbedding(rows, dim).create_weight(), PAPER_HALVES),
}
FLOAT32 = {
    "Whisper": (sinusoids, FAIRSEQ),
    "M2M100": (M2M100SinusoidalPositionalEmbedding.get_embedding, FAIRSEQ),
    "Speech2Text": (Speech2TextSinusoidalPositionalEmbedding.get_embedding, FAIRSEQ),
    "PEGASUS-X": (pegasus_x, FAIRSEQ),
    "MusicGen": (MusicgenSinusoidalPositionalEmbedding.get_embedding, {**FAIRSEQ, "cos_first": True}),
}


class TestSinusoids:
    """Two spacings of frequencies and three orders of channels are in use under one name."""

    @pytest.mark.parametrize("name", EXACT)
    @pytest.mark.parametrize("dim", [WIDTH, 7])
    def test_from_float64_angles(self, name, dim):
        theirs, options = EXACT[name]
        mine = Sinusoidal(dim, **options).table(torch.arange(600))
        # Both are one rounding from the true value, or from one within 1e-12 of it.
        assert (mine - theirs(600, dim)).abs().max() <= 2.0**-24

    @pytest.mark.parametrize(
        ("name", "dim"),
        # Whisper refuses an odd width and PEGASUS-X fails at it.
        [*((name, WIDTH) for name in FLOAT32), ("M2M100", 7), ("Speech2Text", 7), ("MusicGen", 7)],
    )
    def test_from_float32_angles(self, name, dim):
        theirs, options = FLOAT32[name]
        mine = Sinusoidal(dim, **options).table(torch.arange(600))
        # Their frequency is exp of a rounded product, up to 9.2, and the angle is rounded again: 12 roundings of it
        # at most, and the last bit of the entry.
        allowed = (12 * torch.arange(600)[:, None] + 2) * 2.0**-24
        assert ((mine - theirs(600, dim)).abs() <= allowed).all()

    @pytest.mark.parametrize("attention_mask", [LEFT, RIGHT], ids=["left", "right"])
    def test_m2m100_with_padding(self, attention_mask):
        theirs = M2M100SinusoidalPositionalEmbedding(32, WIDTH, padding_idx=1)
        ids = IDS.masked_fill(attention_mask == 0, 1)
        mine = Sinusoidal(WIDTH, **FAIRSEQ, offset=2)
        out = mine(torch.zeros(2, TOKENS, WIDTH), from_attention_mask(attention_mask), mask=attention_mask)
        assert (out - theirs(ids)).abs().max() <= (12 * TOKENS + 2) * 2.0**-24

    def test_a_grid_is_two_of_them(self):
        # ViT-MAE: rows on the first half of the channels, columns on the second.
        rows, columns = (axis.flatten() for axis in torch.meshgrid(torch.arange(5), torch.arange(7), indexing="ij"))
        x = torch.zeros(1, 35, 32)
        for positions, channels in ((rows, slice(0, 16)), (columns, slice(16, 32))):
            x = Sinusoidal(16, layout="halves", channels=channels)(x, positions)
        assert (x[0] - build_2d_sinusoidal_position_embedding(5, 7, 32)).abs().max() <= 2.0**-24

    @pytest.mark.parametrize("name", {**EXACT, **FLOAT32})
    def test_their_checkpoints_are_recognised(self, name):
        theirs, options = {**EXACT, **FLOAT32}[name]
        mine = Sinusoidal(WIDTH, **options)
        with pytest.warns(UserWarning, match="is not read"):
            mine.load_state_dict({"weight": theirs(1500, WIDTH).half()})

    @pytest.mark.parametrize(("theirs", "mine"), [("Marian", {}), ("Whisper", PAPER_HALVES), ("XLM", PAPER_HALVES)])
    def test_one_laid_out_otherwise_is_not(self, theirs, mine):
        weight = {**EXACT, **FLOAT32}[theirs][0](50, WIDTH)
        with (
            pytest.warns(UserWarning, match="is not read"),
            pytest.raises(RuntimeError, match="layout, spacing, base or cos_first differ"),
        ):
            Sinusoidal(WIDTH, **mine).load_state_dict({"weight": weight})


def learned(weight, **options):
    return LearnedEmbedding.from_weight(weight, **options)


class TestLearned:
    """The same tokens get the same rows; the sums are equal bit for bit, in bfloat16 too."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_bert(self, dtype):
        config = BertConfig(vocab_size=30, hidden_size=WIDTH, max_position_embeddings=12, hidden_dropout_prob=0.0)
        theirs = BertEmbeddings(config).to(dtype)
        positions = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10, 11], [0, 1, 2, 3, 0, 1, 0, 1, 2]])
        words = theirs.word_embeddings(IDS) + theirs.token_type_embeddings(torch.zeros_like(IDS))
        mine = learned(theirs.position_embeddings.weight)(words, positions)
        assert torch.equal(theirs.LayerNorm(mine), theirs(IDS, position_ids=positions))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_gpt2(self, dtype):
        config = GPT2Config(vocab_size=30, n_embd=WIDTH, n_layer=1, n_head=2, n_positions=TOKENS)
        theirs = GPT2Model(config).eval().to(dtype)
        mine = LearnedEmbedding(TOKENS, WIDTH).to(dtype)
        mine.load_state_dict(theirs.wpe.state_dict())
        positions = torch.arange(TOKENS)
        expected = theirs(IDS, position_ids=positions[None], output_hidden_states=True).hidden_states[0]
        assert torch.equal(mine(theirs.wte(IDS), positions), expected)

    @pytest.mark.parametrize("attention_mask", [LEFT, RIGHT], ids=["left", "right"])
    @pytest.mark.parametrize("padding_idx", [1, 3])
    def test_roberta(self, attention_mask, padding_idx):
        config = RobertaConfig(
            vocab_size=30,
            hidden_size=WIDTH,
            max_position_embeddings=padding_idx + 1 + TOKENS,
            pad_token_id=padding_idx,
            hidden_dropout_prob=0.0,
        )
        theirs = RobertaEmbeddings(config)
        ids = IDS.masked_fill(attention_mask == 0, padding_idx)
        words = theirs.word_embeddings(ids) + theirs.token_type_embeddings(torch.zeros_like(ids))
        weight = theirs.position_embeddings.weight
        expected = theirs(ids)
        # Positions from 0, and padding left out.
        mine = learned(weight, padding_idx=padding_idx)
        assert mine.num_positions == TOKENS
        out = mine(words, from_attention_mask(attention_mask), mask=attention_mask)
        assert torch.equal(theirs.LayerNorm(out), expected)
        # transformers' own position numbers, which are rows.
        numbers = from_attention_mask(attention_mask, start=padding_idx + 1, padded=padding_idx)
        assert torch.equal(theirs.LayerNorm(learned(weight)(words, numbers)), expected)

    @pytest.mark.parametrize("attention_mask", [LEFT, RIGHT], ids=["left", "right"])
    def test_opt(self, attention_mask):
        theirs = OPTLearnedPositionalEmbedding(TOKENS, WIDTH)
        mine = learned(theirs.weight, offset=2)
        assert mine.num_positions == TOKENS
        real = attention_mask.bool()
        out = mine(torch.zeros(2, TOKENS, WIDTH), from_attention_mask(attention_mask))
        assert torch.equal(out[real], theirs(attention_mask)[real])

    def test_opt_model(self):
        config = OPTConfig(
            vocab_size=30,
            hidden_size=WIDTH,
            word_embed_proj_dim=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=2,
            ffn_dim=8,
            max_position_embeddings=TOKENS,
        )
        theirs = OPTModel(config).eval()
        mine = LearnedEmbedding(TOKENS, WIDTH, offset=2)
        mine.load_state_dict(theirs.decoder.embed_positions.state_dict())
        hidden = theirs(IDS, attention_mask=LEFT, output_hidden_states=True).hidden_states[0]
        out = mine(theirs.decoder.embed_tokens(IDS), from_attention_mask(LEFT))
        assert torch.equal(out[LEFT.bool()], hidden[LEFT.bool()])

    def test_clip_text(self):
        config = CLIPTextConfig(vocab_size=30, hidden_size=WIDTH, max_position_embeddings=TOKENS)
        theirs = CLIPTextEmbeddings(config)
        mine = learned(theirs.position_embedding.weight)
        assert torch.equal(mine(theirs.token_embedding(IDS), torch.arange(TOKENS)), theirs(IDS))


SQUARE = {"hidden_size": 8, "num_attention_heads": 2, "image_size": 12, "patch_size": 2, "num_channels": 1}
VISION = {
    "ViT": (ViTConfig, ViTEmbeddings, "position_embeddings", 1, {}),
    "DINOv2": (Dinov2Config, Dinov2Embeddings, "position_embeddings", 1, {}),
    "DINOv2 with registers": (
        Dinov2WithRegistersConfig,
        Dinov2WithRegistersEmbeddings,
        "position_embeddings",
        1,
        {"antialias": True},
    ),
    "CLIP": (CLIPVisionConfig, CLIPVisionEmbeddings, "position_embedding", 1, {}),
    "SigLIP": (SiglipVisionConfig, SiglipVisionEmbeddings, "position_embedding", 0, {}),
}
# Theirs is computed in float32: some 32 products of a weight and an entry of at most 5.
ROUNDING = 32 * 5 * 2.0**-24


class TestGrids:
    """Vision tables at another resolution, which is not square and may be smaller."""

    @pytest.mark.parametrize("name", VISION)
    @pytest.mark.parametrize("grid", [(9, 7), (4, 11), (6, 6), (3, 2)])
    def test_interpolate_pos_encoding(self, name, grid):
        config, embeddings, attribute, prefix, options = VISION[name]
        theirs = embeddings(config(**SQUARE))
        holder = getattr(theirs, attribute)
        weight = holder.weight if isinstance(holder, nn.Embedding) else holder
        with torch.no_grad():
            nn.init.normal_(weight)
            patches = torch.zeros(1, prefix + grid[0] * grid[1], 8)
            expected = theirs.interpolate_pos_encoding(patches, 2 * grid[0], 2 * grid[1])
        mine = learned(weight).resize_grid(old=(6, 6), new=grid, prefix=prefix, **options)
        assert (mine.table(torch.arange(mine.num_positions)) - expected).abs().max() <= ROUNDING

    @pytest.mark.parametrize("grid", [(9, 7), (4, 11), (3, 2)])
    def test_siglip2(self, grid):
        config = Siglip2VisionConfig(hidden_size=8, num_patches=36, patch_size=2, num_channels=1)
        theirs = Siglip2VisionEmbeddings(config)
        weight = nn.init.normal_(theirs.position_embedding.weight)
        with torch.no_grad():
            expected = theirs.resize_positional_embeddings(
                weight.reshape(6, 6, 8), torch.tensor([grid]), grid[0] * grid[1]
            )
        mine = learned(weight).resize_grid(old=(6, 6), new=grid, prefix=0, mode="bilinear", antialias=True)
        assert (mine.weight - expected[0]).abs().max() <= ROUNDING
