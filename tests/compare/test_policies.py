"""Policies by name: what they say is what is built, and equal ones have equal names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.compare.parts import PARTS
from theodolite.compare.policies import parts_table, read_policy
from theodolite.encodings import LearnedEmbedding, LogN, RotaryEmbedding, Sinusoidal
from theodolite.models.decoder import Decoder
from theodolite.plan import NTK, PlanError

DOCUMENT = Path(__file__).parents[2] / "docs" / "policies.md"
SIZE = {"hidden_size": 60, "num_heads": 3, "head_dim": 20, "length": 16}

# What says nothing yet: within the training length, or before its vectors are learned.
STILL = ("nope", "logn", "cope")
TURNING = ["rope", "rope:theta=50000", "rope:partial=0.5", "rope:live=0.5", "xpos", "learned-base", "lerope"]


@st.composite
def layers(draw: st.DrawFn) -> str:
    parts = [
        *draw(st.lists(st.sampled_from(TURNING), max_size=1)),
        *draw(st.lists(st.sampled_from(["alibi", "kerple", "fire"]), max_size=2, unique=True)),
        *draw(st.lists(st.sampled_from(["logn", "ssmax", "sinks"]), max_size=2, unique=True)),
    ]
    window = draw(st.sampled_from(["", "@1", "@7"]))
    return ("+".join(draw(st.permutations(parts))) or "nope") + window


class TestNames:
    """A name can be read back, and says the same whatever order it was written in."""

    @given(st.lists(layers(), min_size=1, max_size=4))
    @settings(max_examples=60, deadline=None)
    def test_the_shortest_form_is_the_same_policy(self, parts):
        spec = read_policy("/".join(parts))
        again = read_policy(spec.name)
        assert again == spec
        assert again.name == spec.name
        built = [p.build(num_layers=4, **SIZE).policies for p in (spec, read_policy("/".join(parts)))]
        assert [str(policy) for policy in built[0]] == [str(policy) for policy in built[1]]

    @pytest.mark.parametrize(
        ("written", "name"),
        [
            ("rope:theta=1e4", "rope"),
            ("rope:50000", "rope:theta=50000"),
            (" logn + rope ", "rope+logn"),
            ("rope/rope", "rope"),
            ("rope/nope/rope/nope", "rope/nope"),
            ("rope/nope/rope", "rope/nope/rope"),
            ("rope/nope/rope/nope/rope/nope", "rope/nope"),
            ("rope/rope/nope/rope/rope/nope/rope/rope/nope", "rope/rope/nope"),
            ("rope:theta=1e16", "rope:theta=1e+16"),
            ("rope:theta=1e+4+logn", "rope+logn"),
            ("sinusoidal:scale=1e-7", "sinusoidal:scale=1e-07"),
            ("rope@064", "rope@64"),
            ("rope+nope", "rope"),
            ("alibi@5", "alibi@5"),
            ("rope:partial=0.50", "rope:partial=0.5"),
            ("sinusoidal:learned=true", "sinusoidal:learned=true"),
        ],
    )
    def test_is_brought_into_one_form(self, written, name):
        spec = read_policy(written)
        assert spec.name == name
        assert read_policy(name) == spec

    @given(st.floats(min_value=1e-300, max_value=1e300), st.integers(1, 7))
    @settings(max_examples=60, deadline=None)
    def test_any_number_is_read_back(self, number, repeats):
        spec = read_policy("/".join([f"sinusoidal:scale={number!r}+rope/sinusoidal:scale={number!r}"] * repeats))
        assert dict(spec.layers[0].parts[0][1])["scale"] == number
        assert len(spec.layers) == 2
        assert read_policy(spec.name) == spec

    @pytest.mark.parametrize(
        ("name", "match"),
        [
            ("", "no part is named ''"),
            ("rpoe", r"no part is named 'rpoe'; allowed: nope, sinusoidal"),
            ("rope:foo=1", r"rope has no setting 'foo'; it has theta \(10000\)"),
            ("alibi:3", "alibi has no setting '3'; it has none"),
            ("rope:theta=nan", "theta is 'nan'"),
            ("rope:theta=-1", "theta is '-1'"),
            ("rope:theta=1e999", "theta is '1e999'"),
            ("rope:theta=[[", "theta is '"),
            ("t5:2.5", "buckets is '2.5'; it must be a whole number"),
            ("t5:buckets=1", "num_buckets"),
            ("sinusoidal:learned=2", "learned is '2'; it must be true or false"),
            ("rope:theta=2:theta=3", "'theta' stands twice"),
            ("rope:partial=0.001", "partial"),
            ("rope:partial=1.5", "partial"),
            ("rope+xpos", "rope and xpos are both rotations"),
            ("sinusoidal+learned", "both vectors for the embeddings"),
            ("rope+rope", "a part stands twice"),
            ("rope@x", "'x' after @ is no window"),
            ("rope@0", "'0' after @ is no window"),
            ("rope@+5", r"'\+5' after @ is no window"),
            pytest.param("rope@" + "9" * 5000, "after @ is no window", id="a window of 5,000 digits"),
            ("t5:buckets=1025:distance=9999", "buckets: at most 1,024"),
            ("shaw:distance=1e30", "it must be a whole number of at most 65,536"),
            ("sinusoidal/rope", "say it alike in all layers"),
            ("kerple:kind=foo", "kind"),
            ("rope//nope", "no part is named ''"),
        ],
    )
    def test_refuses(self, name, match):
        with pytest.raises(PlanError, match=match) as error:
            read_policy(name)
        assert error.value.field == "policy"


class TestSizes:
    """What a model of some size cannot have is refused by the policy's name, whatever size the name was read for."""

    def test_a_share_that_leaves_no_pair(self):
        spec = read_policy("nope/rope:partial=0.05")
        with pytest.raises(PlanError, match=r"'nope/rope:partial=0.05'; partial: a share of the 10 channels") as error:
            spec.build(hidden_size=30, num_layers=2, num_heads=3, head_dim=10, length=16)
        assert error.value.field == "policy"

    def test_what_a_module_refuses(self):
        with pytest.raises(PlanError, match=r"'logn'; train_length") as error:
            read_policy("logn").build(hidden_size=30, num_layers=1, num_heads=3, head_dim=10, length=1)
        assert error.value.field == "policy"


class TestParts:
    """Every part can be built and run, and the document lists each."""

    @pytest.mark.parametrize("name", list(PARTS))
    def test_runs_past_its_training_length(self, name):
        spec = read_policy(name)
        places = spec.build(num_layers=2, **SIZE)
        model = Decoder(11, 60, 3, places.policies, embed=places.embed).initialise(seed=1)
        tokens = spec.longest(SIZE["length"]) or 40
        logits = model(torch.arange(tokens)[None] % 11, torch.arange(tokens))
        logits.sum().backward()
        assert logits.isfinite().all()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())

    @pytest.mark.parametrize("name", [name for name in PARTS if name not in STILL])
    def test_changes_what_the_model_says(self, name):
        ids, at = torch.arange(12)[None] % 11, torch.arange(12)
        plain, other = (
            Decoder(11, 60, 3, places.policies, embed=places.embed).initialise(seed=1)
            for places in (read_policy(n).build(num_layers=1, **SIZE) for n in ("nope", name))
        )
        assert not torch.allclose(plain(ids, at), other(ids, at), atol=1e-6)

    def test_the_document_has_each(self):
        assert parts_table() in DOCUMENT.read_text(encoding="utf-8")


class TestBuilt:
    """What is built is what the name says."""

    def test_windows_and_layers(self):
        masks = [p.mask for p in read_policy("rope@5/nope+sinks").build(num_layers=3, **SIZE).policies]
        assert [(m.sliding_window, m.sinks, m.causal) for m in masks] == [
            (5, False, True),
            (None, True, True),
            (5, False, True),
        ]

    def test_rope(self):
        (policy,) = read_policy("rope:theta=77:partial=0.6").build(num_layers=1, **SIZE).policies
        assert isinstance(policy.rotate, RotaryEmbedding)
        rotary = policy.rotate.rotary
        assert (rotary.rope_theta, rotary.head_dim, rotary.rotary_dim) == (77.0, 20, 12)

    def test_half_and_half(self):
        places = read_policy("sinusoidal:channels=0.5+rope:partial=0.5").build(num_layers=1, **SIZE)
        assert isinstance(places.embed, Sinusoidal)
        assert (places.embed.dim, places.embed.channels) == (30, slice(0, 30))
        assert places.policies[0].rotate.rotary.rotary_dim == 10

    def test_what_follows_the_training_length(self):
        places = read_policy("learned+logn").build(num_layers=1, **SIZE)
        assert isinstance(places.embed, LearnedEmbedding)
        assert places.embed.weight.shape == (16, 60)
        assert isinstance(places.policies[0].scale, LogN)
        assert repr(places.policies[0].scale) == repr(LogN(16)) != repr(LogN(17))
        assert read_policy("learned").longest(16) == 16
        assert read_policy("rope").longest(16) is None

    @pytest.mark.parametrize(
        ("name", "place", "said"),
        [
            ("xpos:scale_base=77", "rotate", {"centre": 8.0, "scale_base": 77.0}),
            ("fire:hidden=5", "bias", {"init_L": 16.0}),
            ("cope:positions=9", "bias", {"max_positions": 9}),
            ("shaw:distance=9", "bias", {"left": 9}),
            ("deberta:distance=9", "bias", {"max_relative_positions": 9}),
            ("learned:std=0.5", "embed", {"std": 0.5}),
            ("sinusoidal:scale=3", "embed", {"strength": 3.0}),
        ],
    )
    def test_settings_arrive(self, name, place, said):
        places = read_policy(name).build(num_layers=1, **SIZE)
        module = places.embed if place == "embed" else getattr(places.policies[0], place)
        assert {key: getattr(module, key) for key in said} == said

    def test_width_of_fire(self):
        (policy,) = read_policy("fire:hidden=5").build(num_layers=1, **SIZE).policies
        assert {tuple(parameter.shape) for parameter in policy.bias.mlp.parameters()} >= {(5, 1), (3, 5)}

    def test_a_learned_scale(self):
        embed = read_policy("sinusoidal:scale=3:learned=true").build(num_layers=1, **SIZE).embed
        assert [parameter.tolist() for parameter in embed.parameters()] == [[3.0]]
        assert not list(read_policy("sinusoidal:scale=3").build(num_layers=1, **SIZE).embed.parameters())

    @pytest.mark.parametrize(("name", "scale"), [("t5", 20**-0.5), ("t5:scaled=false", 1.0), ("alibi", None)])
    def test_score_scale(self, name, scale):
        assert read_policy(name).build(num_layers=1, **SIZE).policies[0].score_scale == scale

    def test_bases_by_head(self):
        (policy,) = read_policy("per-head:theta=10:highest=1000").build(num_layers=1, **SIZE).policies
        assert [rotary.rope_theta for rotary in policy.rotate.rotaries] == pytest.approx([10, 100, 1000])


class TestPlan:
    """A scaling is put on the plan of the rotations, and the same policy is built with it."""

    @pytest.mark.parametrize("name", ["alibi", "nope", "sinusoidal", "rope+alibi", "per-head"])
    def test_has_none(self, name):
        assert read_policy(name).plan(num_layers=2, head_dim=20, length=16) is None

    @pytest.mark.parametrize("name", ["rope", "rope+logn", "rope@8/nope", "lerope", "learned-base", "xpos"])
    def test_is_that_of_the_modules(self, name):
        spec = read_policy(name)
        plan = spec.plan(num_layers=3, head_dim=20, length=16)
        assert plan.max_position_embeddings == 16
        for layer, policy in zip(plan.layers, spec.build(num_layers=3, **SIZE).policies, strict=True):
            assert (layer.rotate is None) == (policy.rotate is None)
            assert layer.mask == policy.mask

    def test_a_scaled_plan_is_built(self):
        spec = read_policy("rope/nope+logn")
        plan = spec.plan(num_layers=2, head_dim=20, length=16).with_scaling(NTK(factor=4.0))
        first, second = spec.build(num_layers=2, plan=plan, **SIZE).policies
        assert first.rotate.rotary == plan.layers[0].rotate
        assert first.rotate.rotary.scaling == NTK(factor=4.0)
        assert second.rotate is None
        assert isinstance(second.scale, LogN)
