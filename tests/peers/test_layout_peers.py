"""transformers' own models turn converted weights, in the other layout, into the same logits."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

from theodolite.encodings.layout import convert_state_dict, convert_tensor
from theodolite.kernels import rotate

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.2, "attn_implementation": "eager",
}  # fmt: skip
GROUPED = {**COMMON, "num_key_value_heads": 2}
LATENT = {
    **COMMON, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10,
    "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 2,
}  # fmt: skip
POSITIONS = torch.tensor([[3, 4, 5, 9, 700, 701, 702], [0, 1, 2, 3, 3000, 3001, 3050]])
# The weights are float64, but their norms, and in places their rotation and softmax, round to float32 on the way:
# 2^-24 of scores of up to a hundred, in each of two layers, as parts of a probability. (1e-12 is shown without them.)
CLOSE = 2 * 100 * 2.0**-24


def build(config, **sizes):
    """A small random model in float64, its biases and gains random too: they are zeros and ones otherwise."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**sizes)).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "norm" in name:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.3 * noise)
    return model


def logits(model):
    ids = torch.randint(3, 61, POSITIONS.shape, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        # A mask given whole: nothing is packed, however the positions jump.
        mask = torch.full((1, 1, 7, 7), float("-inf"), dtype=torch.float64).triu(1).expand(2, -1, -1, -1)
        return model(input_ids=ids, position_ids=POSITIONS, attention_mask=mask, use_cache=False).logits


def in_the_other_layout(monkeypatch, model, *, interleaved):
    """From here on the model's code turns the other pairs, by its own angles and our rotation."""

    def turn(q, k, cos, sin, unsqueeze_dim=1):
        # Each angle stands twice in their tables: side by side, or half a table apart.
        pairs = slice(None, cos.shape[-1] // 2) if interleaved else slice(None, None, 2)
        options = {"interleaved": interleaved, "rotary_dim": cos.shape[-1], "heads_first": unsqueeze_dim == 1}
        return rotate(q, k, cos[..., pairs], sin[..., pairs], **options)

    module = importlib.import_module(type(model).__module__)
    monkeypatch.setattr(module, "apply_rotary_pos_emb", turn)


def same(one, two):
    """Within the rounding; wrong weights are a thousand times further apart."""
    distance = (one - two).abs().max() / two.abs().max()
    assert distance <= CLOSE or distance > 1000 * CLOSE
    return distance <= CLOSE


def check(monkeypatch, model, *, to, **options):
    before = logits(model)
    in_the_other_layout(monkeypatch, model, interleaved=to == "interleaved")
    # The rotation is in the other layout now, and the weights are not yet.
    assert not same(logits(model), before)
    state_dict, changed = convert_state_dict(model.state_dict(), **options, to=to)
    model.load_state_dict(state_dict)
    assert same(logits(model), before)
    return changed


class TestHalvesToInterleaved:
    """Families that transformers turns by halves, in each arrangement of rows that they store."""

    @pytest.mark.parametrize(
        ("config", "sizes", "options", "per_layer"),
        [
            ("LlamaConfig", {**GROUPED, "attention_bias": True}, {}, 4),
            ("Qwen2Config", GROUPED, {}, 4),
            ("Qwen3Config", {**GROUPED, "head_dim": 32}, {"head_dim": 32}, 4),
            ("Olmo2Config", GROUPED, {}, 4),
            ("PhiConfig", {**GROUPED, "qk_layernorm": True, "partial_rotary_factor": 0.5}, {"rotary_dim": 8}, 8),
            ("StableLmConfig", {**GROUPED, "qk_layernorm": True, "partial_rotary_factor": 0.25}, {"rotary_dim": 4}, 8),
            ("Phi3Config", GROUPED, {"names": {"qkv_proj": "qkv_blocks"}}, 1),
            (
                "GPTNeoXConfig",
                {**COMMON, "rotary_pct": 0.25},
                {"names": {"query_key_value": "qkv_grouped"}, "num_key_value_heads": 4, "rotary_dim": 4},
                2,
            ),
            (
                "FalconConfig",
                {**COMMON, "num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False, "bias": True},
                {"names": {"query_key_value": "qkv_grouped"}},
                2,
            ),
            (
                "FalconConfig",
                {**COMMON, "multi_query": True, "new_decoder_architecture": False, "alibi": False},
                {"names": {"query_key_value": "qkv_grouped"}, "num_key_value_heads": 1},
                1,
            ),
        ],
    )
    def test_logits(self, monkeypatch, config, sizes, options, per_layer):
        options = {"num_heads": 4, "num_key_value_heads": 2, "head_dim": 16, **options}
        changed = check(monkeypatch, build(config, **sizes), to="interleaved", **options)
        assert len(changed) == 2 * per_layer

    def test_gated_queries(self, monkeypatch):
        sizes = {
            **GROUPED, "head_dim": 16, "partial_rotary_factor": 0.5, "layer_types": ["full_attention"] * 2,
            "mlp_only_layers": [0, 1],
        }  # fmt: skip
        model = build("Qwen3NextConfig", **sizes)
        options = {"num_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8}
        with pytest.raises(ValueError, match=r"q_proj.weight: got shape \(128, 64\); as 'q' it must have 64 rows"):
            convert_state_dict(model.state_dict(), **options, to="interleaved")
        check(monkeypatch, model, to="interleaved", names={"q_proj": "q_gated"}, **options)


class TestInterleavedToHalves:
    """Families that transformers turns interleaved."""

    def test_cohere(self, monkeypatch):
        model = build("CohereConfig", **GROUPED, use_qk_norm=True, logit_scale=1.0)
        options = {"num_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        assert len(check(monkeypatch, model, to="halves", **options)) == 8

    def test_codegen(self, monkeypatch):
        sizes = {"vocab_size": 61, "n_embd": 64, "n_layer": 2, "n_head": 8, "rotary_dim": 4, "n_positions": 4096}
        model = build("CodeGenConfig", **sizes, initializer_range=0.2, attn_implementation="eager")
        module = importlib.import_module(type(model).__module__)
        before = logits(model)

        def turn(x, sin, cos):
            return rotate(x, None, cos, sin, heads_first=False)[0]

        monkeypatch.setattr(module, "apply_rotary_pos_emb", turn)
        assert not same(logits(model), before)
        options = {"num_heads": 8, "num_key_value_heads": 8, "head_dim": 8, "rotary_dim": 4, "to": "halves"}
        after, changed = convert_state_dict(model.state_dict(), **options, names={"qkv_proj": "qkv_codegen"})
        assert len(changed) == 2
        model.load_state_dict(after)
        assert same(logits(model), before)

    @pytest.mark.parametrize("q_lora_rank", [24, None])
    def test_deepseek_by_its_own_switch(self, q_lora_rank):
        sizes = {**LATENT, "q_lora_rank": q_lora_rank, "attention_bias": True}
        model = build("DeepseekV3Config", **sizes)
        before = logits(model)
        options = {"num_heads": 4, "num_key_value_heads": 4, "head_dim": 18, "rotary_dim": 8, "trailing": True}
        state_dict, changed = convert_state_dict(model.state_dict(), **options, to="halves")
        query = "q_proj" if q_lora_rank is None else "q_b_proj"
        names = (f"{query}.weight", "kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias")
        assert changed == tuple(f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in names)
        halves = build("DeepseekV3Config", **sizes, rope_interleave=False)
        assert not same(logits(halves), before)
        halves.load_state_dict(state_dict)
        assert same(logits(halves), before)

    def test_deepseek_turns_interleaved_and_answers_in_halves(self):
        # So its tensors differ from ours by the permutation, and the scores do not.
        module = importlib.import_module("transformers.models.deepseek_v3.modeling_deepseek_v3")
        generator = torch.Generator().manual_seed(0)
        q, k = torch.randn(2, 2, 3, 7, 8, generator=generator, dtype=torch.float64).unbind(0)
        angle = POSITIONS[..., None] * 100.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
        cos, sin = angle.cos(), angle.sin()
        theirs = module.apply_rotary_pos_emb_interleave(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
        ours = rotate(q, k, cos, sin, interleaved=True)
        scores = [one @ two.transpose(-1, -2) for one, two in (theirs, ours)]
        assert (scores[0] - scores[1]).abs().max() <= 1e-13
        assert (theirs[0] - ours[0]).abs().max() > 1e-2

    def test_indexer_is_a_home_of_its_own(self):
        # V3.2 turns it by halves whatever the attention does.
        module = importlib.import_module("transformers.models.deepseek_v32.modeling_deepseek_v32")
        sizes = {**LATENT, "q_lora_rank": 24, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
        with torch.device("meta"):
            model = module.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**sizes))
        options = {"num_heads": 4, "num_key_value_heads": 4, "head_dim": 18, "rotary_dim": 8, "trailing": True}
        with pytest.raises(ValueError, match="give a list of those to convert"):
            convert_state_dict(model.state_dict(), **options, to="halves")
        sites = ["model.layers.*.self_attn"]
        changed = convert_state_dict(model.state_dict(), **options, to="halves", sites=sites).changed
        assert len(changed) == 4
        assert not any("indexer" in key for key in changed)


class TestPermuteForRope:
    """transformers' converter knows one head count: right for queries, wrong for the keys of grouped queries."""

    @staticmethod
    def theirs(tensor, heads, inverse=False):
        operation = transformers.PermuteForRope(inverse=inverse)
        config = SimpleNamespace(num_attention_heads=heads)
        return operation.convert({"k_proj": tensor}, ["k_proj"], ["k_proj"], config)["k_proj"]

    @pytest.mark.parametrize("inputs", [(), (12,)])
    @pytest.mark.parametrize("inverse", [False, True])
    def test_same_heads(self, inputs, inverse):
        tensor = torch.arange(64 * (inputs or (1,))[0]).view(64, *inputs)
        options = {"num_heads": 8, "num_key_value_heads": 8, "head_dim": 8}
        ours = convert_tensor(tensor, "k", **options, to="interleaved" if inverse else "halves")
        assert torch.equal(self.theirs(tensor, 8, inverse), ours)

    def test_grouped_queries(self):
        tensor = torch.arange(16 * 3).view(16, 3)
        options = {"num_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
        ours = convert_tensor(tensor, "k", **options, to="halves")
        assert not torch.equal(self.theirs(tensor, 8), ours)
        # Told the right count, it agrees.
        assert torch.equal(self.theirs(tensor, 2), ours)
