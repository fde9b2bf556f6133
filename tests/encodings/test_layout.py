"""Converted weights give the same scores, in every arrangement of rows; what is not understood is refused."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.encodings import rotary_tables
from theodolite.encodings.layout import convert_state_dict, convert_tensor, permutation
from theodolite.kernels import rotate
from theodolite.plan import Rotary

HEADS, KEY_HEADS, WIDTH, HIDDEN, TOKENS = 4, 2, 16, 12, 7
SIZES = {"num_heads": HEADS, "num_key_value_heads": KEY_HEADS, "head_dim": WIDTH}
# Whole heads, the first channels of each, the last.
TURNED = [(16, False), (6, False), (6, True)]
POSITIONS = torch.tensor([[5, 6, 9, 40, 41, 1000, 1001], [3, 0, 77, 8, 8, 512, 4099]])


def other(layout):
    return "interleaved" if layout == "halves" else "halves"


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + 7 * sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def turned(x, rotary_dim, trailing, layout, positions=POSITIONS):
    """x (B, S, H, D) turned pair by pair, as the formula is printed; base 100."""
    out = x.clone()
    first = x.shape[-1] - rotary_dim if trailing else 0
    for i in range(rotary_dim // 2):
        angle = positions.double()[..., None] * 100.0 ** (-2 * i / rotary_dim)
        one, two = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + rotary_dim // 2)
        x1, x2 = x[..., first + one], x[..., first + two]
        out[..., first + one] = x1 * angle.cos() - x2 * angle.sin()
        out[..., first + two] = x1 * angle.sin() + x2 * angle.cos()
    return out


def normed(x, gain):
    """RMSNorm of each head where the gain is (D,) or (H, D), of all heads together where it is (H*D,)."""
    if gain is None:
        return x
    if gain.shape[-1] == x.shape[-1]:
        return x / x.square().mean(-1, keepdim=True).sqrt() * gain
    whole = x.flatten(-2)
    return (whole / whole.square().mean(-1, keepdim=True).sqrt() * gain).view(x.shape)


def scores(weights, rotary_dim, trailing, layout):
    """Scores (B, H, S, S) of one attention whose projections are in `weights`."""
    x = random(2, TOKENS, HIDDEN, seed=3) / 4
    heads = {}
    for name, count in (("q", HEADS), ("k", KEY_HEADS)):
        projected = x @ weights[name].T + weights.get(f"{name}_bias", 0.0)
        projected = normed(projected.view(2, TOKENS, count, -1), weights.get(f"{name}_norm"))
        heads[name] = turned(projected, rotary_dim, trailing, layout)
    keys = heads["k"].repeat_interleave(HEADS // KEY_HEADS, dim=2)
    return torch.einsum("bshd,bthd->bhst", heads["q"], keys)


def projections(norms=None):
    """Weights and biases of queries and keys, with gains of the shapes `norms` asks for."""
    weights = {
        "q": random(HEADS * WIDTH, HIDDEN),
        "k": random(KEY_HEADS * WIDTH, HIDDEN, seed=1),
        "q_bias": random(HEADS * WIDTH, seed=2),
        "k_bias": random(KEY_HEADS * WIDTH, seed=3),
    }
    for name, count in (("q", HEADS), ("k", KEY_HEADS)) if norms else ():
        shape = {"of a head": (WIDTH,), "of each head": (count, WIDTH), "of all": (count * WIDTH,)}[norms]
        weights[f"{name}_norm"] = random(*shape, seed=4)
    return weights


def converted(weights, **options):
    """Each of `projections` by convert_tensor; the part of a bias is that of its projection."""
    return {name: convert_tensor(w, name.removesuffix("_bias"), **SIZES, **options) for name, w in weights.items()}


def close(one, two):
    """Sums of 16 products, of sums of 12, whose sizes add to less than 200: (16 + 2 * 12) * 2^-53 * 200 is 9e-13.

    What differs by more than 1e-2 has another reason.
    """
    return (one - two).abs().max() <= 1e-12


class TestPermutation:
    """The index itself: what the formula says, and nothing outside the channels that turn."""

    def test_values(self):
        assert permutation(8, to="halves") == (0, 2, 4, 6, 1, 3, 5, 7)
        assert permutation(8, to="interleaved") == (0, 4, 1, 5, 2, 6, 3, 7)
        assert permutation(8, 4, to="halves") == (0, 2, 1, 3, 4, 5, 6, 7)
        assert permutation(8, 4, True, to="halves") == (0, 1, 2, 3, 4, 6, 5, 7)

    def test_meta_to_huggingface(self):
        # Printed with the release of Llama: view rows as (H, D/2, 2, in), swap the middle, view back.
        weight = random(HEADS * WIDTH, HIDDEN)
        printed = weight.view(HEADS, WIDTH // 2, 2, HIDDEN).transpose(1, 2).reshape(HEADS * WIDTH, HIDDEN)
        assert torch.equal(convert_tensor(weight, "q", **SIZES, to="halves"), printed)
        back = printed.view(HEADS, 2, WIDTH // 2, HIDDEN).transpose(1, 2).reshape(HEADS * WIDTH, HIDDEN)
        assert torch.equal(back, weight)
        assert torch.equal(convert_tensor(printed, "q", **SIZES, to="interleaved"), back)

    @settings(max_examples=60, deadline=None)
    @given(pairs=st.integers(1, 40), passed=st.integers(0, 20), trailing=st.booleans())
    def test_properties(self, pairs, passed, trailing):
        width, rotary_dim = 2 * pairs + passed, 2 * pairs
        first = passed if trailing else 0
        there = permutation(width, rotary_dim, trailing, to="halves")
        back = permutation(width, rotary_dim, trailing, to="interleaved")
        assert [there[channel] for channel in back] == list(range(width))
        assert [back[channel] for channel in there] == list(range(width))
        # Pair i is pair i in both layouts.
        for i in range(pairs):
            assert (there[first + i], there[first + pairs + i]) == (first + 2 * i, first + 2 * i + 1)
        still = set(range(width)) - set(range(first, first + rotary_dim))
        assert all(there[channel] == back[channel] == channel for channel in still)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((8, 5), "rotary_dim: got 5; it must be even and at most head_dim (8)"),
            ((8, 10), "rotary_dim: got 10; it must be even and at most head_dim (8)"),
            ((7,), "rotary_dim: got 7; it must be even and at most head_dim (7)"),
            ((8, 0), "rotary_dim: got 0; it must be a whole number above 0"),
            ((8.0,), "head_dim: got 8.0; it must be a whole number above 0"),
        ],
    )
    def test_refusals(self, arguments, message):
        with pytest.raises(ValueError) as error:
            permutation(*arguments, to="halves")
        assert str(error.value) == message

    def test_refuses_another_layout(self):
        with pytest.raises(ValueError, match="to: got 'neox'; it must be 'halves' or 'interleaved'"):
            permutation(8, to="neox")


@pytest.mark.parametrize("to", ["halves", "interleaved"])
class TestSameScores:
    """The promise: rotation in the old layout on the old weights is rotation in the new one on the converted."""

    @pytest.mark.parametrize("norms", [None, "of a head", "of each head", "of all"])
    @pytest.mark.parametrize(("rotary_dim", "trailing"), TURNED)
    def test_weights_biases_and_norms(self, to, norms, rotary_dim, trailing):
        weights = projections(norms)
        before = scores(weights, rotary_dim, trailing, other(to))
        after = converted(weights, rotary_dim=rotary_dim, trailing=trailing, to=to)
        assert close(scores(after, rotary_dim, trailing, to), before)
        # None of them may be left behind.
        assert (scores(weights, rotary_dim, trailing, to) - before).abs().max() > 1e-2
        for name in weights:
            assert (scores({**after, name: weights[name]}, rotary_dim, trailing, to) - before).abs().max() > 1e-2

    def test_keys_with_the_count_of_queries_are_wrong(self, to):
        # Keys cut into 4 heads of half the width: what converters did that knew one head count.
        weights = projections()
        before = scores(weights, WIDTH, False, other(to))
        after = converted(weights, to=to)
        wrong = {**SIZES, "num_key_value_heads": HEADS, "head_dim": WIDTH * KEY_HEADS // HEADS}
        for name in ("k", "k_bias"):
            after[name] = convert_tensor(weights[name], "k", **wrong, to=to)
        assert (scores(after, WIDTH, False, to) - before).abs().max() > 1e-2
        with pytest.raises(ValueError) as error:
            convert_tensor(weights["k"], "k", **{**SIZES, "num_key_value_heads": HEADS}, to=to)
        assert str(error.value) == ("tensor: got shape (32, 12); as 'k' it must have 64 rows: 4 heads of head_dim 16")

    @pytest.mark.parametrize("mrope_interleaved", [False, True])
    def test_axes_keep_their_pairs(self, to, mrope_interleaved):
        positions = torch.stack((POSITIONS, POSITIONS.flip(0), POSITIONS.flip(1)))
        sizes = {"head_dim": WIDTH, "rope_theta": 100.0, "rotary_dim": 12}
        plan = Rotary(**sizes, mrope_section=(2, 2, 2), mrope_interleaved=mrope_interleaved)
        tables = rotary_tables(plan, positions)

        def attend(q, k, interleaved):
            q, k = rotate(q, k, tables.cos, tables.sin, interleaved=interleaved, rotary_dim=12, heads_first=False)
            return torch.einsum("bshd,bthd->bhst", q, k.repeat_interleave(HEADS // KEY_HEADS, dim=2))

        q, k = random(2, TOKENS, HEADS, WIDTH), random(2, TOKENS, KEY_HEADS, WIDTH, seed=1)
        channels = list(permutation(WIDTH, 12, to=to))
        before = attend(q, k, to == "halves")
        assert close(attend(q[..., channels], k[..., channels], to == "interleaved"), before)
        assert not close(attend(q, k, to == "interleaved"), before)

    def test_latent_attention(self, to):
        # DeepSeek: the last channels of each query head, and one key for all heads after the latent.
        latent, still, width = 10, 6, 4
        x, q = random(2, TOKENS, HIDDEN) / 4, random(HEADS * (still + width), HIDDEN, seed=1)
        kv_a, k_b = random(latent + width, HIDDEN, seed=2), random(HEADS * still, latent, seed=3)

        def attend(q, kv_a, layout):
            queries = turned((x @ q.T).view(2, TOKENS, HEADS, still + width), width, True, layout)
            compressed = x @ kv_a.T
            shared = turned(compressed[..., None, latent:], width, False, layout).expand(-1, -1, HEADS, -1)
            keys = torch.cat(((compressed[..., :latent] @ k_b.T).view(2, TOKENS, HEADS, still), shared), dim=-1)
            return torch.einsum("bshd,bthd->bhst", queries, keys)

        sizes = {"num_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": still + width, "rotary_dim": width}
        checkpoint = {"q_b_proj.weight": q, "kv_a_proj_with_mqa.weight": kv_a, "kv_b_proj.weight": k_b}
        after, changed = convert_state_dict(checkpoint, **sizes, trailing=True, to=to)
        assert changed == ("q_b_proj.weight", "kv_a_proj_with_mqa.weight")
        before = attend(q, kv_a, other(to))
        assert close(attend(after["q_b_proj.weight"], after["kv_a_proj_with_mqa.weight"], to), before)
        assert not close(attend(q, after["kv_a_proj_with_mqa.weight"], to), before)
        assert not close(attend(after["q_b_proj.weight"], kv_a, to), before)


def fused(q, k, v, arrangement):
    """One projection from three, head by head, as each family's own code takes it apart."""
    q, k, v = (list(x.split(width)) for x, width in ((q, WIDTH), (k, WIDTH), (v, VALUE_WIDTH)))
    if arrangement == "qkv_blocks":
        heads = q + k + v
    elif arrangement == "qkv_grouped":
        group = len(q) // len(k)
        heads = [x for i in range(len(k)) for x in (*q[i * group : (i + 1) * group], k[i], v[i])]
    else:
        quarter = len(q) // 4
        parts = [slice(i * quarter, (i + 1) * quarter) for i in range(4)]
        heads = [x for part in parts for x in (*q[part], *v[part], *k[part])]
    return torch.cat(heads)


VALUE_WIDTH = 10


@pytest.mark.parametrize(("rotary_dim", "trailing"), TURNED)
@pytest.mark.parametrize("inputs", [(), (HIDDEN,)])
class TestFused:
    """A fused projection is converted as its three parts are; values stay, whatever their width."""

    @pytest.mark.parametrize(
        ("arrangement", "key_heads"),
        [("qkv_blocks", 2), ("qkv_blocks", 4), ("qkv_grouped", 4), ("qkv_grouped", 2), ("qkv_grouped", 1),
         ("qkv_codegen", 4)],
    )  # fmt: skip
    def test_parts(self, arrangement, key_heads, inputs, rotary_dim, trailing):
        q, k, v = (
            random(4 * WIDTH, *inputs),
            random(key_heads * WIDTH, *inputs),
            random(key_heads * VALUE_WIDTH, *inputs),
        )
        options = {"num_heads": 4, "num_key_value_heads": key_heads, "head_dim": WIDTH, "v_head_dim": VALUE_WIDTH}
        options |= {"rotary_dim": rotary_dim, "trailing": trailing, "to": "halves"}
        parts = (convert_tensor(q, "q", **options), convert_tensor(k, "k", **options), v)
        whole = convert_tensor(fused(q, k, v, arrangement), arrangement, **options)
        assert torch.equal(whole, fused(*parts, arrangement))

    def test_neox_by_its_own_view(self, inputs, rotary_dim, trailing):
        fused = random(HEADS * 3 * WIDTH, *inputs)
        options = {**SIZES, "num_key_value_heads": HEADS, "rotary_dim": rotary_dim, "trailing": trailing}
        out = convert_tensor(fused, "qkv_grouped", **options, to="halves").view(HEADS, 3, WIDTH, *inputs)
        channels = list(permutation(WIDTH, rotary_dim, trailing, to="halves"))
        q, k, v = fused.view(HEADS, 3, WIDTH, *inputs).unbind(1)
        assert torch.equal(out, torch.stack((q[:, channels], k[:, channels], v), dim=1))

    def test_gates_stay(self, inputs, rotary_dim, trailing):
        q = random(HEADS * 2 * WIDTH, *inputs)
        options = {**SIZES, "rotary_dim": rotary_dim, "trailing": trailing, "to": "halves"}
        queries, gates = q.view(HEADS, 2, WIDTH, *inputs).unbind(1)
        expected = convert_tensor(queries.flatten(0, 1), "q", **options).view(gates.shape)
        out = convert_tensor(q, "q_gated", **options).view(HEADS, 2, WIDTH, *inputs)
        assert torch.equal(out, torch.stack((expected, gates), dim=1))


ROWS = {
    "q": 64, "k": 32, "q_norm": 64, "k_norm": 16, "q_gated": 128,
    "qkv_blocks": 128, "qkv_grouped": 128, "latent_k": 30, "keep": 5,
}  # fmt: skip
DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.uint8, torch.int32, torch.bool,
]  # fmt: skip


class TestRows:
    """Rows move and nothing else happens to them: exact in any dtype, undone by going back, never in place."""

    @pytest.mark.parametrize("part", ROWS)
    @pytest.mark.parametrize("first", ["halves", "interleaved"])
    def test_round_trip(self, part, first):
        tensor = random(ROWS[part]) if part.endswith("norm") else random(ROWS[part], 3)
        kept = tensor.clone()
        options = {**SIZES, "rotary_dim": 6, "trailing": True}
        there = convert_tensor(tensor, part, **options, to=first)
        assert torch.equal(convert_tensor(there, part, **options, to=other(first)), tensor)
        assert torch.equal(there, tensor) == (part == "keep")
        assert torch.equal(tensor, kept)
        assert there.data_ptr() != tensor.data_ptr()

    def test_four_shards(self):
        tensor = random(3 * 64, 3)
        options = {**SIZES, "num_key_value_heads": 4}
        there = convert_tensor(tensor, "qkv_codegen", **options, to="halves")
        assert not torch.equal(there, tensor)
        assert torch.equal(convert_tensor(there, "qkv_codegen", **options, to="interleaved"), tensor)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_dtypes(self, dtype):
        size = torch.empty((), dtype=dtype).element_size()
        stored = torch.randint(0, 2 if dtype == torch.bool else 256, (64, 5 * size), dtype=torch.uint8)
        out = convert_tensor(stored.view(dtype), "q", **SIZES, to="halves")
        assert out.dtype == dtype
        assert torch.equal(out.view(torch.uint8), convert_tensor(stored, "q", **SIZES, to="halves"))

    def test_not_contiguous_and_meta(self):
        tensor = random(5, 64)
        out = convert_tensor(tensor.T, "q", **SIZES, to="halves")
        assert torch.equal(out, convert_tensor(tensor.T.contiguous(), "q", **SIZES, to="halves"))
        assert convert_tensor(torch.empty(64, 5, device="meta"), "q", **SIZES, to="halves").shape == (64, 5)

    def test_parameters_become_plain_tensors(self):
        out = convert_tensor(torch.nn.Parameter(random(64, 5)), "q", **SIZES, to="halves")
        assert type(out) is torch.Tensor
        assert not out.requires_grad

    def test_low_rank(self):
        # B A + W converted is W converted + (B converted) A. Whole numbers, so that sums are exact in any order.
        generator = torch.Generator().manual_seed(0)
        w, b, a = (torch.randint(-9, 9, shape, generator=generator).double() for shape in ((64, 12), (64, 3), (3, 12)))
        merged = convert_tensor(w + b @ a, "q", **SIZES, rotary_dim=6, to="halves")
        apart = [convert_tensor(x, "q", **SIZES, rotary_dim=6, to="halves") for x in (w, b)]
        assert torch.equal(apart[0] + apart[1] @ a, merged)


def layer(prefix="model.layers.0.self_attn.", **more):
    """A small layer of grouped queries, with all that a checkpoint holds beside them."""
    return {
        "model.embed_tokens.weight": random(9, HIDDEN),
        f"{prefix}q_proj.weight": random(64, HIDDEN),
        f"{prefix}q_proj.bias": random(64),
        f"{prefix}k_proj.weight": random(32, HIDDEN),
        f"{prefix}v_proj.weight": random(32, HIDDEN),
        f"{prefix}o_proj.weight": random(HIDDEN, 64),
        f"{prefix}q_norm.weight": random(16),
        f"{prefix}k_norm.weight": random(16),
        f"{prefix}sinks": random(4),
        "model.layers.0.mlp.up_proj.weight": random(64, HIDDEN),
        **{prefix + key: value for key, value in more.items()},
    }


class TestStateDict:
    """A whole checkpoint by its keys: what moved is told, the rest is the same object."""

    def test_what_moves(self):
        given = layer()
        kept = {key: tensor.clone() for key, tensor in given.items()}
        out, changed = convert_state_dict(given, **SIZES, rotary_dim=6, to="halves")
        names = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "q_norm.weight", "k_norm.weight")
        assert changed == tuple(f"model.layers.0.self_attn.{name}" for name in names)
        assert list(out) == list(given)
        for key, tensor in given.items():
            assert torch.equal(tensor, kept[key])
            assert (out[key] is tensor) == (key not in changed)
        for key in changed:
            part = key.split(".")[-2].removesuffix("_proj")
            assert torch.equal(out[key], convert_tensor(given[key], part, **SIZES, rotary_dim=6, to="halves"))
        back, again = convert_state_dict(out, **SIZES, rotary_dim=6, to="interleaved")
        assert again == changed
        assert all(torch.equal(back[key], kept[key]) for key in kept)

    @pytest.mark.parametrize(
        ("names", "part"), [({"wq": "q", "wk": "k"}, "attention."), ({"query": "q", "key": "k"}, "attention.self.")]
    )
    def test_other_names(self, names, part):
        given = {f"layers.{i}.{part}{name}.weight": random(64, HIDDEN) for i in range(2) for name in names}
        options = {**SIZES, "num_key_value_heads": 4, "to": "halves"}
        assert convert_state_dict(given, **options).changed == tuple(given)

    def test_norms_in_a_list(self):
        given = layer(**{f"q_layernorm.norms.{i}.weight": random(16) for i in range(4)})
        changed = convert_state_dict(given, **SIZES, to="halves").changed
        assert sum("norms" in key for key in changed) == 4

    def test_adapters_alone(self):
        prefix = "base_model.model.model.layers.3.self_attn."
        given = {
            f"{prefix}q_proj.lora_A.weight": random(3, HIDDEN),
            f"{prefix}q_proj.lora_B.weight": random(64, 3),
            f"{prefix}q_proj.lora_magnitude_vector": random(64),
            f"{prefix}v_proj.lora_B.weight": random(32, 3),
        }
        out, changed = convert_state_dict(given, **SIZES, to="halves")
        assert changed == (f"{prefix}q_proj.lora_B.weight", f"{prefix}q_proj.lora_magnitude_vector")
        expected = convert_tensor(given[changed[0]], "q", **SIZES, to="halves")
        assert torch.equal(out[changed[0]], expected)

    def test_adapters_in_place(self):
        names = ("q_proj.base_layer.weight", "q_proj.lora_A.default.weight", "q_proj.lora_B.default.weight",
                 "k_proj.base_layer.weight")  # fmt: skip
        shapes = ((64, HIDDEN), (3, HIDDEN), (64, 3), (32, HIDDEN))
        given = {f"layers.0.self_attn.{name}": random(*shape) for name, shape in zip(names, shapes, strict=True)}
        changed = convert_state_dict(given, **SIZES, to="halves").changed
        assert [key.split("self_attn.")[1] for key in changed] == [names[0], names[2], names[3]]

    def test_fused_names_must_be_explained(self):
        given = {"h.0.attn.query_key_value.weight": random(128, HIDDEN), "h.0.attn.query_key_value.bias": random(128)}
        with pytest.raises(ValueError) as error:
            convert_state_dict(given, **SIZES, to="halves")
        assert str(error.value).startswith(
            "h.0.attn.query_key_value.weight: 'query_key_value' looks like queries or keys, and the name does not say "
            "how the rows stand; give names={'query_key_value': part}, where part is one of ['q', 'k', "
        )
        results = []
        for part in ("qkv_blocks", "qkv_grouped"):
            out, changed = convert_state_dict(given, **SIZES, to="halves", names={"query_key_value": part})
            assert changed == tuple(given)
            key = changed[0]
            assert torch.equal(out[key], convert_tensor(given[key], part, **SIZES, to="halves"))
            results.append(out[key])
        assert not torch.equal(*results)

    def test_shards(self):
        given = {key: value for key, value in layer().items() if "k_proj" not in key}
        with pytest.raises(ValueError) as error:
            convert_state_dict(given, **SIZES, to="halves")
        assert str(error.value) == (
            "model.layers.0.self_attn: got weights for ['k_norm', 'q', 'q_norm']; queries and keys turn together, so "
            "both must be here under known names (give `names`); shard=True if the checkpoint is in parts"
        )
        options = {**SIZES, "to": "halves", "shard": True}
        assert len(convert_state_dict(given, **options, sites=["model.layers.*.self_attn"]).changed) == 4
        head = {"lm_head.weight": random(9, 3)}
        assert convert_state_dict(head, **options, sites=["model.layers.*.self_attn"]).changed == ()
        # One shard may hold no more than the queries of a vision tower.
        with pytest.raises(ValueError) as error:
            convert_state_dict(given, **options)
        assert str(error.value) == (
            "sites: queries and keys are in ['model.layers.*.self_attn'], and other shards may have more; "
            "give a list of those to convert"
        )

    def test_sites_that_can_be_gone_through_once(self):
        given = layer()
        for shard in (False, True):
            sites = (site for site in ["model.layers.*.self_attn"])
            assert len(convert_state_dict(given, **SIZES, to="halves", sites=sites, shard=shard).changed) == 5

    def test_nothing_found(self):
        with pytest.raises(ValueError, match="state_dict: no queries or keys were found in it"):
            convert_state_dict({"lm_head.weight": random(9, 3)}, **SIZES, to="halves")


class TestQuantised:
    """Integers and their scales move together, so that what they stand for is the converted weight."""

    def test_scales_of_rows(self):
        stored = torch.randint(-128, 128, (64, 12), dtype=torch.int8)
        weights = {
            "q_proj.weight": stored,
            "q_proj.weight_scale": random(64, 1),
            "q_proj.weight_zero_point": random(64),
        }
        weights |= {"q_proj.input_scale": random(1), "q_proj.weight_shape": torch.tensor([64, 12])}
        out, changed = convert_state_dict(weights, **SIZES, to="halves", shard=True, sites=[""])
        assert changed == tuple(weights)[:3]
        real = stored * weights["q_proj.weight_scale"] + weights["q_proj.weight_zero_point"][:, None]
        after = out["q_proj.weight"] * out["q_proj.weight_scale"] + out["q_proj.weight_zero_point"][:, None]
        assert torch.equal(after, convert_tensor(real, "q", **SIZES, to="halves"))

    def test_one_scale(self):
        weights = {"q_proj.weight": torch.zeros(64, 12, dtype=torch.int8), "q_proj.weight_scale": random(1)}
        out, changed = convert_state_dict(weights, **SIZES, to="halves", shard=True, sites=[""])
        assert changed == ("q_proj.weight",)
        assert out["q_proj.weight_scale"] is weights["q_proj.weight_scale"]

    def test_scales_of_blocks_at_deepseeks_widths(self):
        # 192 rows a head, the last 64 turn, 128 share a scale: no row leaves its block.
        sizes = {"num_heads": 4, "num_key_value_heads": 4, "head_dim": 192, "rotary_dim": 64, "trailing": True}
        weights = {}
        for name, rows in (("q_b_proj", 768), ("kv_a_proj_with_mqa", 576)):
            weights[f"a.{name}.weight"] = torch.randint(-9, 9, (rows, 3), dtype=torch.int8)
            weights[f"a.{name}.weight_scale_inv"] = random(math.ceil(rows / 128), 1)
        with pytest.raises(ValueError) as error:
            convert_state_dict(weights, **sizes, to="halves")
        assert str(error.value) == (
            "a.q_b_proj.weight_scale_inv: got shape (6, 1); scales of blocks need the rows_per_scale"
        )
        out, changed = convert_state_dict(weights, **sizes, to="halves", rows_per_scale=128)
        assert changed == ("a.q_b_proj.weight", "a.kv_a_proj_with_mqa.weight")

        def real(checkpoint, name):
            stored = checkpoint[f"a.{name}.weight"]
            return stored * checkpoint[f"a.{name}.weight_scale_inv"].repeat_interleave(128, dim=0)[: len(stored)]

        for name, part in (("q_b_proj", "q"), ("kv_a_proj_with_mqa", "latent_k")):
            assert torch.equal(real(out, name), convert_tensor(real(weights, name), part, **sizes, to="halves"))

    def test_scales_of_blocks_that_rows_would_leave(self):
        weights = {"a.q_proj.weight": random(64, 3), "a.q_proj.weight_scale_inv": random(8, 1)}
        with pytest.raises(ValueError) as error:
            convert_state_dict(weights, **SIZES, to="halves", rows_per_scale=8)
        assert str(error.value) == (
            "a.q_proj.weight_scale_inv: rows would leave their blocks of 8; dequantise the weight first"
        )
        with pytest.raises(ValueError, match=r"got shape \(8, 1\); as 'q' with rows_per_scale 16 it must have 4 rows"):
            convert_state_dict(weights, **SIZES, to="halves", rows_per_scale=16)

    @pytest.mark.parametrize("leaf", ["qweight", "weight.absmax", "qzeros", "scales", "hada_w1_a"])
    def test_unknown_storage(self, leaf):
        with pytest.raises(ValueError) as error:
            convert_state_dict({f"a.q_proj.{leaf}": random(64, 2)}, **SIZES, to="halves")
        assert str(error.value) == (
            f"a.q_proj.{leaf}: {leaf!r} is not known here, and may hold rows of queries or keys; "
            "convert the checkpoint before it is quantised or adapted in this way"
        )


# The words that hold queries or keys, as each model's code has them.
MODELS = {
    "llama": {"q_proj", "k_proj"},
    "qwen2": {"q_proj", "k_proj"},
    "qwen3": {"q_proj", "k_proj", "q_norm", "k_norm"},
    "phi3": {"qkv_proj"},
    "gpt_neox": {"query_key_value"},
    "falcon": {"query_key_value"},
    "gpt2": {"c_attn"},
    "deepseek_v3": {"q_b_proj", "kv_a_proj_with_mqa"},
    "bert": {"query", "key"},
    "t5": {"q", "k"},
    "mamba": set(),
}
SMALL = {
    "vocab_size": 32, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
    "num_layers": 2, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "first_k_dense_replace": 1,
    "n_routed_experts": 8,
}  # fmt: skip


class TestModels:
    """What looks like queries or keys is what a model has of them: nothing else of it stands in a converter's way."""

    @pytest.mark.parametrize("model_type", MODELS)
    def test_everything_else_is_passed_over(self, model_type):
        config = transformers.AutoConfig.for_model(model_type, **SMALL)
        with torch.device("meta"):
            keys = list(transformers.AutoModel.from_config(config).state_dict())
        mine, others = [], {}
        for key in keys:
            if MODELS[model_type] & set(key.split(".")):
                mine.append(key)
            else:
                others[key] = torch.zeros(2, 2)
        with pytest.raises(ValueError, match="no queries or keys were found"):
            convert_state_dict(others, **SIZES, to="halves")
        assert bool(mine) == bool(MODELS[model_type])
        for key in mine:
            with pytest.raises(ValueError, match=r"looks like queries or keys|must have|trailing|must be here"):
                convert_state_dict({key: torch.zeros(3, 2)}, **SIZES, to="halves")


class TestRefused:
    """A row left behind or moved by mistake shows in no shape; so what is not certain is an error."""

    @pytest.mark.parametrize(
        "name",
        ["to_q", "self_attn.q_conv", "lin_k", "Wqkv", "wqkv", "W_pack", "c_attn", "qk_proj", "kv_proj", "q1", "in_qkvz",
         "key_proj", "linear_qkv", "self_attn.in_proj", "attention.in_proj", "attn.in_proj_weight", "qkvproj",
         "queryproj", "qProj", "keyLayer", "QProj", "toQ", "toqkv", "attnQuery", "queryKeyValue", "querykeyvalue",
         "qnorm", "kLayerNorm", "knorm", "WQuery", "WQKV", "linearq", "projkv", "qlin", "kv", "SelfAttention.q"],
    )  # fmt: skip
    def test_looks_like_queries_or_keys(self, name):
        with pytest.raises(ValueError, match="looks like queries or keys"):
            convert_state_dict({f"layers.0.{name}.weight": random(64, 3)}, **SIZES, to="halves")

    @pytest.mark.parametrize(
        "name",
        ["mamba.in_proj.weight", "tokens.weight", "blocks.weight", "mlp.gate_proj.weight", "attn.mask_token",
         "tok.weight", "link.weight", "ink_proj.weight", "vproj.weight", "toV.weight", "quantizer.weight",
         "keyboard.weight", "kernel.weight", "VProj.weight", "knowledge.weight"],
    )  # fmt: skip
    def test_does_not(self, name):
        with pytest.raises(ValueError, match="no queries or keys were found"):
            convert_state_dict({name: random(64, 3)}, **SIZES, to="halves")

    def test_one_number_needs_no_explanation(self):
        given = layer(k_scale=torch.tensor(0.5))
        assert "model.layers.0.self_attn.k_scale" not in convert_state_dict(given, **SIZES, to="halves").changed

    def test_two_homes(self):
        given = {**layer(), **layer("vision.blocks.0.attn."), "vision.blocks.0.attn.qkv.weight": random(9, 9)}
        with pytest.raises(ValueError) as error:
            convert_state_dict(given, **SIZES, to="halves")
        assert str(error.value) == (
            "sites: queries and keys are in ['model.layers.*.self_attn', 'vision.blocks.*.attn']; "
            "give a list of those to convert"
        )
        changed = convert_state_dict(given, **SIZES, to="halves", sites=["model.layers.*.self_attn"]).changed
        assert len(changed) == 5
        assert not any("vision" in key for key in changed)

    @pytest.mark.parametrize("sites", [["model.layers.*.attn"], "model.layers.*.self_attn", ""])
    def test_sites_that_are_not_there(self, sites):
        with pytest.raises(ValueError) as error:
            convert_state_dict(layer(), **SIZES, to="halves", sites=sites)
        assert str(error.value) == (
            f"sites: got {sites!r}; it must be a list, and queries and keys are in ['model.layers.*.self_attn']"
        )

    def test_indexer_of_latent_attention(self):
        # DeepSeek-V3.2 turns the indexer by halves, leading, and attention interleaved, trailing.
        given = layer(**{"indexer.wq_b.weight": random(64, 3), "indexer.wk.weight": random(16, 3)})
        with pytest.raises(ValueError, match=r"model.layers.\*.self_attn.indexer"):
            convert_state_dict(given, **SIZES, to="halves")

    def test_names_can_keep(self):
        given = layer(**{"q_conv.weight": random(64, 3)})
        assert len(convert_state_dict(given, **SIZES, to="halves", names={"q_conv": "keep"}).changed) == 5
        with pytest.raises(ValueError, match="part: got 'queries'; it must be one of"):
            convert_state_dict(given, **SIZES, to="halves", names={"q_conv": "queries"})

    def test_names_that_match_nothing(self):
        options = {**SIZES, "to": "halves"}
        with pytest.raises(ValueError) as error:
            convert_state_dict(layer(), **options, names={"qproj": "q"})
        assert str(error.value) == "names: got 'qproj', and no key has that name between its dots"
        with pytest.raises(ValueError) as error:
            convert_state_dict(layer(), **options, names={"self_attn.q_proj": "q"})
        assert str(error.value) == (
            "names: got 'self_attn.q_proj', and no key has that name between its dots: "
            "it is a part of 'model.layers.0.self_attn.q_proj.weight' that no dots enclose"
        )
        # Another part of the checkpoint may have it.
        sites = ["model.layers.*.self_attn"]
        convert_state_dict(layer(), **options, names={"qproj": "q"}, shard=True, sites=sites)

    @pytest.mark.parametrize(
        ("part", "shape", "message"),
        [
            ("q", (60, 3), "got shape (60, 3); as 'q' it must have 64 rows: 4 heads of head_dim 16"),
            ("q", (), "got shape (); as 'q' it must have 64 rows: 4 heads of head_dim 16"),
            ("k_norm", (64,),
             "got shape (64,); as 'k_norm' it must have (16,), (2, 16) or 32 rows: 2 heads of head_dim 16"),
            ("q_norm", (64, 1),
             "got shape (64, 1); as 'q_norm' it must have (16,), (4, 16) or 64 rows: 4 heads of head_dim 16"),
            ("q_gated", (64, 3),
             "got shape (64, 3); as 'q_gated' it must have 128 rows: "
             "4 heads of head_dim 16, each with a gate of as many"),
            ("qkv_grouped", (96, 3),
             "got shape (96, 3); as 'qkv_grouped' it must have 128 rows: "
             "4 query heads and 2 key heads of head_dim 16, 2 value heads of 16"),
        ],
    )  # fmt: skip
    def test_shapes(self, part, shape, message):
        with pytest.raises(ValueError) as error:
            convert_tensor(torch.zeros(shape), part, **SIZES, to="halves")
        assert str(error.value) == f"tensor: {message}"

    def test_names_the_key(self):
        with pytest.raises(ValueError, match=r"^model.layers.0.self_attn.k_proj.weight: got shape \(32, 12\); as 'k' "):
            convert_state_dict(layer(), **{**SIZES, "num_key_value_heads": 4}, to="halves")

    def test_latent_keys(self):
        options = {**SIZES, "rotary_dim": 6, "to": "halves"}
        with pytest.raises(
            ValueError, match=r"trailing: got False; where keys are latent \(tensor\) the last 6 channels"
        ):
            convert_tensor(random(30, 3), "latent_k", **options)
        with pytest.raises(ValueError, match="tensor: got 6 rows; it must have a latent before the 6 rows"):
            convert_tensor(random(6, 3), "latent_k", **options, trailing=True)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"num_key_value_heads": 3}, "num_key_value_heads: got 3; it must divide num_heads (4)"),
            ({"num_heads": 0}, "num_heads: got 0; it must be a whole number above 0"),
            ({"num_key_value_heads": None}, "num_key_value_heads: got None; it must be a whole number above 0"),
            ({"v_head_dim": True}, "v_head_dim: got True; it must be a whole number above 0"),
            ({"to": "neox"}, "to: got 'neox'; it must be 'halves' or 'interleaved'"),
        ],
    )
    def test_sizes(self, change, message):
        with pytest.raises(ValueError) as error:
            convert_tensor(random(64, 3), "q", **{**SIZES, "to": "halves", **change})
        assert str(error.value) == message

    def test_codegen_shards(self):
        with pytest.raises(ValueError, match="num_heads: got 4, and 2 key-value heads; for 'qkv_codegen'"):
            convert_tensor(random(96, 3), "qkv_codegen", **SIZES, to="halves")

    def test_not_a_tensor(self):
        with pytest.raises(ValueError, match="tensor: got ndarray; it must be a tensor"):
            convert_tensor(random(64, 3).numpy(), "q", **SIZES, to="halves")
