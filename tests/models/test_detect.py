"""The layout that weights show: right where pairs were learned, and "cannot tell" where none were."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from theodolite.encodings.layout import convert_tensor
from theodolite.models import LoadError, resolve
from theodolite.models.detect import LARGEST_CHANCE, LayerRows, as_json, detect_layout, judge
from theodolite.models.gguf_cache import converted
from theodolite.models.pair_evidence import Evidence, pair_evidence

from .tiny_files import write_gguf
from .trained_pairs import HEADS, KEY_HEADS, WIDTH, train

LAYOUTS = ["halves", "interleaved"]


def other(layout):
    return "interleaved" if layout == "halves" else "halves"


def rows(q, k, layer=0):
    return LayerRows(layer, q.view(HEADS, WIDTH, -1).numpy(), k.view(KEY_HEADS, WIDTH, -1).numpy())


def paired(layout, *, heads=4, key_heads=2, width=16, inputs=40, seed=0, first=0, total=None, strength=2.0):
    """Random heads (H, D, E), (K, D, E) in which the two channels of a pair share directions, a quarter turn apart."""
    generator = np.random.default_rng(seed)
    total = width if total is None else total
    q, k = generator.standard_normal((heads, total, inputs)), generator.standard_normal((key_heads, total, inputs))
    half = width // 2
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + half)
        a, b = first + a, first + b
        for head in range(heads):
            key = k[head // (heads // key_heads)]
            q[head, a] += strength * key[b]
            q[head, b] -= strength * key[a]
    return q, k


def write(path, q, k, prefix="model.layers.{}.self_attn", more=None):
    """A safetensors file with one layer for each of the weights (H*D, E), (K*D, E) in `q` and `k`."""
    tensors = dict(more or {})
    for layer, (one, two) in enumerate(zip(q, k, strict=True)):
        for name, x in (("q_proj", one), ("k_proj", two)):
            tensors[f"{prefix.format(layer)}.{name}.weight"] = torch.tensor(x).float().flatten(0, -2).contiguous()
    save_file(tensors, path)


class TestMoments:
    """Mean and variance over all pairings are exact: they are compared with every pairing of six channels."""

    def test_every_matching(self):
        q, k = paired("halves", heads=1, key_heads=1, width=6)
        products = (q[0] / np.linalg.norm(q[0], axis=1)[:, None]) @ (k[0] / np.linalg.norm(k[0], axis=1)[:, None]).T
        sizes = {(a, b): abs(products[a, b] - products[b, a]) for a in range(6) for b in range(a + 1, 6)}
        order = sorted(sizes, key=sizes.get)
        score = {pair: -math.log(1 - (order.index(pair) + 0.5) / 15) for pair in order}

        def matchings(left):
            if not left:
                return [()]
            return [((left[0], x), *rest) for x in left[1:] for rest in matchings([y for y in left[1:] if y != x])]

        sums = [sum(score[pair] for pair in matching) for matching in matchings(list(range(6)))]
        assert len(sums) == 15
        mean = sum(sums) / 15
        found = pair_evidence(q, k)
        assert found.mean == pytest.approx(mean, rel=1e-12)
        assert found.variance == pytest.approx(sum((x - mean) ** 2 for x in sums) / 15, rel=1e-9)
        assert found.halves == pytest.approx(score[0, 3] + score[1, 4] + score[2, 5] - mean, rel=1e-9)
        assert found.interleaved == pytest.approx(score[0, 1] + score[2, 3] + score[4, 5] - mean, rel=1e-9)

    def test_query_heads_of_a_key_head_are_one(self):
        # The same query head twice says no more than once: the spread doubles along with the sum.
        q, k = paired("halves", heads=1, key_heads=1)
        once, twice = pair_evidence(q, k), pair_evidence(np.concatenate((q, q)), k)
        assert twice.deviations == pytest.approx(once.deviations, rel=1e-9)
        assert pair_evidence(np.concatenate((q, q)), np.concatenate((k, k))).deviations[0] == pytest.approx(
            once.deviations[0] * 2**0.5, rel=1e-9
        )

    @pytest.mark.parametrize("value", [0.0, 1.0])
    def test_constant_weights_say_nothing(self, value):
        # Equal sizes share a rank: the order in which channels stand decides nothing.
        assert pair_evidence(np.full((2, 8, 5), value), np.full((1, 8, 5), value)).deviations == (0.0, 0.0)

    def test_one_pair_is_both_layouts(self):
        assert pair_evidence(*paired("halves", width=2)) == Evidence()


class TestTrained:
    """Weights that training made tell how they were turned, and stay silent where nothing turned."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_both_ways_and_converted(self, layout):
        q, k = train(layout, seed=0)
        found = judge([rows(q, k)])
        assert found.layout == layout
        assert found.confidence >= 1 - LARGEST_CHANCE
        sizes = {"num_heads": HEADS, "num_key_value_heads": KEY_HEADS, "head_dim": WIDTH, "to": other(layout)}
        moved = judge([rows(convert_tensor(q, "q", **sizes), convert_tensor(k, "k", **sizes))])
        assert moved.layout == other(layout)

    @pytest.mark.parametrize("learned_positions", [False, True])
    def test_nothing_turned(self, learned_positions):
        found = judge([rows(*train(None, seed=0, learned_positions=learned_positions))])
        assert found.layout is None
        assert found.confidence == 0.0
        assert "neither layout stands out" in found.why


class TestRandom:
    """Random weights have no layout: a chance of 1e-4 leaves 0.01 false answers of 100 to expect."""

    @pytest.mark.parametrize("width", [4, 16, 64])
    def test_cannot_tell(self, width):
        for seed in range(100):
            generator = np.random.default_rng([seed, width])
            shapes = (4, width, 24), (2, width, 24)
            layers = [LayerRows(i, *(generator.standard_normal(shape) for shape in shapes)) for i in range(2)]
            assert judge(layers).layout is None

    def test_chances_are_no_smaller_than_they_happen(self):
        generator = np.random.default_rng(0)
        shapes = (1, 16, 24), (1, 16, 24)
        found = [judge([LayerRows(0, *(generator.standard_normal(s) for s in shapes))]).chance for _ in range(1000)]
        # 1000 draws: a share of 0.05 has a standard deviation of 0.007.
        assert sum(chance <= 0.05 for chance in found) / 1000 <= 0.05 + 4 * 0.007

    def test_both_stand_out(self):
        # Neighbours and halves alike: no rotation does that.
        one, two = paired("halves", seed=1), paired("interleaved", seed=2)
        found = judge([LayerRows(0, *one), LayerRows(1, *two)])
        assert found.layout is None
        assert "both layouts stand out" in found.why


@pytest.mark.parametrize("layout", LAYOUTS)
class TestFiles:
    """Whatever the arrangement of rows and whoever says the widths, the same heads are looked at."""

    def test_folder_with_config(self, layout, tmp_path):
        q, k = paired(layout)
        write(tmp_path / "model.safetensors", [q] * 2, [k] * 2)
        config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                  "hidden_size": 40, "head_dim": 16, "rope_theta": 1e4}  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = detect_layout(tmp_path)
        assert (found.layout, found.agreeing, len(found.layers)) == (layout, 2, 2)
        assert json.loads(json.dumps(as_json(found), allow_nan=False))["layout"] == layout

    @pytest.mark.parametrize("trailing", [False, True])
    def test_part_of_the_head(self, layout, trailing, tmp_path):
        file = tmp_path / "lone.safetensors"
        q, k = paired(layout, width=12, total=20, first=8 if trailing else 0)
        write(file, [q] * 2, [k] * 2)
        assert detect_layout(file, head_dim=20, rotary_dim=12, trailing=trailing).layout == layout
        if layout == "halves":
            # Neighbours are neighbours wherever one begins to count.
            assert detect_layout(file, head_dim=20, rotary_dim=12, trailing=not trailing).layout is None

    @pytest.mark.parametrize("family", ["gpt_neox", "phi3", "codegen"])
    def test_fused(self, layout, family, tmp_path):
        key_heads = 2 if family == "phi3" else 4
        q, k = paired(layout, key_heads=key_heads)
        v = np.random.default_rng(5).standard_normal(k.shape)
        if family == "phi3":
            fused, name = np.concatenate((q, k, v)), "self_attn.qkv_proj"
        elif family == "gpt_neox":
            fused, name = np.stack((q, k, v), axis=1), "attention.query_key_value"
        else:
            fused, name = np.stack((q, v, k), axis=1), "attn.qkv_proj"
        weight = torch.tensor(fused).reshape(-1, 40).float()
        save_file(
            {f"transformer.h.{i}.{name}.weight": weight.clone() for i in range(2)}, tmp_path / "model.safetensors"
        )
        config = {"model_type": family, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64,
                  "num_key_value_heads": key_heads, "max_position_embeddings": 64}  # fmt: skip
        config |= {"rotary_dim": 16} if family == "codegen" else {"rope_theta": 1e4, "rotary_pct": 1.0}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert detect_layout(tmp_path).layout == layout

    def test_latent(self, layout, tmp_path):
        # Queries of a latent: q_b (H*(still + R), latent) after q_a (latent, E); one key for all heads.
        generator = np.random.default_rng(0)
        first, gain = generator.standard_normal((12, 40)), (1 + generator.random(12)) * generator.choice((-1, 1), 12)
        q, k = paired(layout, heads=4, key_heads=1, inputs=12)
        # Keys whose products through q_a and its gain are those of the pairs.
        key = (k[0] / gain) @ np.linalg.pinv(first).T
        queries = np.concatenate((generator.standard_normal((4, 8, 12)), q), axis=1)
        tensors = {
            "q_b_proj.weight": queries.reshape(-1, 12),
            "q_a_proj.weight": first,
            "q_a_layernorm.weight": gain,
            "kv_a_proj_with_mqa.weight": np.concatenate((generator.standard_normal((10, 40)), key)),
        }
        layers = {f"model.layers.{i}.self_attn.{name}": torch.tensor(x).float()
                  for i in range(3) for name, x in tensors.items()}  # fmt: skip
        save_file(layers, tmp_path / "model.safetensors")
        config = {"model_type": "deepseek_v3", "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 40,
                  "qk_nope_head_dim": 8, "qk_rope_head_dim": 16, "rope_theta": 1e4}  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert detect_layout(tmp_path).layout == layout


class TestRefusals:
    """What cannot be looked at is said, with what would help."""

    def test_no_widths(self, tmp_path):
        write(tmp_path / "x.safetensors", *([x] for x in paired("halves")))
        with pytest.raises(
            ValueError, match=r"config: .* has no config.json or params.json; give one, or the head_dim"
        ):
            detect_layout(tmp_path / "x.safetensors")

    def test_wrong_width(self, tmp_path):
        write(tmp_path / "x.safetensors", *([x] for x in paired("halves")))
        with pytest.raises(ValueError, match=r"got shape \(32, 40\); it must have the rows of whole heads of 24"):
            detect_layout(tmp_path / "x.safetensors", head_dim=24)

    def test_two_homes(self, tmp_path):
        q, k = paired("halves")
        write(tmp_path / "x.safetensors", [q], [k])
        write(tmp_path / "y.safetensors", [q], [k], prefix="vision.layers.{}.attn")
        both = load_file(tmp_path / "x.safetensors") | load_file(tmp_path / "y.safetensors")
        save_file(both, tmp_path / "z.safetensors")
        with pytest.raises(ValueError, match=r"sites: queries and keys are in \['model.*', 'vision.*'\]"):
            detect_layout(tmp_path / "z.safetensors", head_dim=16)
        assert len(detect_layout(tmp_path / "z.safetensors", head_dim=16, sites=["vision.layers.*.attn"]).layers) == 1

    def test_packed(self, tmp_path):
        words = {f"model.layers.0.self_attn.{n}_proj.weight": torch.zeros(32, 4, dtype=torch.int32) for n in "qk"}
        save_file(words, tmp_path / "x.safetensors")
        with pytest.raises(LoadError, match="I32 holds packed weights"):
            detect_layout(tmp_path / "x.safetensors", head_dim=16)

    def test_nothing_there(self, tmp_path):
        save_file({"x": torch.zeros(2)}, tmp_path / "x.safetensors")
        with pytest.raises(LoadError, match="no layer's queries and keys were found"):
            detect_layout(tmp_path / "x.safetensors", head_dim=16)
        with pytest.raises(LoadError, match="does not exist"):
            detect_layout(tmp_path / "y.safetensors", head_dim=16)
        with pytest.raises(LoadError, match="does not exist"):
            detect_layout(tmp_path / "y.gguf")

    def test_random_gguf(self, tmp_path):
        write_gguf(tmp_path / "x.gguf")
        found = detect_layout(tmp_path / "x.gguf")
        assert (found.layout, len(found.layers)) == (None, 2)


@pytest.mark.model
class TestSmolLM2:
    """A real model: interleaved as llama.cpp stores it, halves as transformers does."""

    def test_raw(self):
        found = detect_layout(resolve("SmolLM2-135M-Instruct").path)
        assert (found.layout, found.agreeing) == ("interleaved", 30)
        assert found.interleaved > 50 > 10 > abs(found.halves)

    def test_converted(self):
        found = detect_layout(converted(resolve("SmolLM2-135M-Instruct")))
        assert (found.layout, found.agreeing) == ("halves", 30)
