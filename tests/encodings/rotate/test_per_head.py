"""Heads that turn by plans of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from theodolite.encodings import RotaryEmbedding
from theodolite.encodings.rotate.per_head import PerHeadRotary
from theodolite.plan import DynamicNTK, Linear, Rotary, YaRN

BASE = Rotary(head_dim=16, rope_theta=10000.0)
BASES = [replace(BASE, rope_theta=theta) for theta in (1e4, 300.0, 1e4, 5e6)]


def inputs(group: int = 2, tokens: int = 13, heads: int = 4):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, heads * group, tokens, 16, generator=generator)
    return q, torch.randn(2, heads, tokens, 16, generator=generator)


def head_by_head(rotaries, q, k, positions, **options):
    """Each key head, and the queries that belong to it, turned alone."""
    group = q.shape[1] // len(rotaries)
    qs, ks = [], []
    for head, rotary in enumerate(rotaries):
        mine = slice(head * group, (head + 1) * group)
        one = RotaryEmbedding(rotary)(q[:, mine], k[:, head : head + 1], positions, **options)
        qs.append(one[0])
        ks.append(one[1])
    return torch.cat(qs, 1), torch.cat(ks, 1)


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class TestEachHeadAlone:
    """A head turns bit for bit as a model would turn it that has this plan alone, its group of queries with it."""

    @pytest.mark.parametrize("group", [1, 2, 3])
    @pytest.mark.parametrize("positions", [torch.arange(5, 18), torch.stack([torch.arange(13), torch.arange(90, 103)])])
    def test_bases(self, group, positions):
        q, k = inputs(group)
        assert same(PerHeadRotary(BASES)(q, k, positions), head_by_head(BASES, q, k, positions))

    def test_factors_and_amplitudes(self):
        yarn = YaRN(factor=4, original_max_position_embeddings=64)
        rotaries = [replace(BASE, scaling=scaling) for scaling in (Linear(factor=1.2), yarn, Linear(factor=1.8), yarn)]
        q, k = inputs()
        positions = torch.arange(100, 113)
        assert same(PerHeadRotary(rotaries)(q, k, positions), head_by_head(rotaries, q, k, positions))
        pure = PerHeadRotary(rotaries).tables(positions, amplitude=False)
        # Two entries, each within 6e-8.
        assert ((pure.cos.double() ** 2 + pure.sin.double() ** 2) - 1).abs().max() <= 3 * 6e-8

    @pytest.mark.parametrize(
        "options",
        [
            {"interleaved": True},
            {"rotary_dim": 8},
            {"rotary_dim": 8, "trailing": True},
            {"mrope_section": (2, 3, 3)},
            {"live_pairs": 3},
        ],
    )
    def test_layouts(self, options):
        rotaries = [replace(rotary, **options) for rotary in BASES]
        q, k = inputs()
        positions = torch.arange(13)
        if "mrope_section" in options:
            positions = torch.stack([positions, positions // 2, positions * 3])[:, None].expand(3, 2, 13)
        assert same(PerHeadRotary(rotaries)(q, k, positions), head_by_head(rotaries, q, k, positions))

    def test_lengths_of_rows(self):
        scaling = DynamicNTK(factor=2, original_max_position_embeddings=8)
        rotaries = [replace(BASE, scaling=scaling), BASE, BASE, BASE]
        q, k = inputs()
        positions = torch.arange(13).expand(2, 13)
        given = PerHeadRotary(rotaries)(q, k, positions, lengths=[8, 40])
        assert same(given, head_by_head(rotaries, q, k, positions, lengths=[8, 40]))
        with pytest.raises(ValueError, match="rotary: 'dynamic' has frequencies that depend on the length"):
            PerHeadRotary(rotaries)(q, k, positions)

    def test_equal_plans_are_one_plan(self):
        q, k = inputs()
        positions = torch.arange(13)
        assert same(PerHeadRotary([BASE] * 4)(q, k, positions), RotaryEmbedding(BASE)(q, k, positions))


class TestTensorParallel:
    """A rank turns its heads as the whole model turns them."""

    @pytest.mark.parametrize("heads", [slice(0, 2), slice(2, 4), slice(1, 2), slice(3, None), slice(None, 3)])
    def test_a_part_of_the_heads(self, heads):
        q, k = inputs()
        positions = torch.arange(7, 20)
        rope = PerHeadRotary(BASES)
        whole = rope(q, k, positions)
        mine = range(4)[heads]
        queries = slice(2 * mine.start, 2 * mine.stop)
        part = rope(q[:, queries], k[:, heads], positions, heads=heads)
        assert same(part, (whole[0][:, queries], whole[1][:, heads]))

    def test_one_table_for_each_head(self):
        rope = PerHeadRotary(BASES)
        assert rope.tables(torch.arange(5)).cos.shape == (1, 4, 5, 8)
        assert rope.tables(torch.zeros(3, 5, dtype=torch.int64), heads=slice(1, 3)).sin.shape == (3, 2, 5, 8)

    @pytest.mark.parametrize("heads", [slice(2, 5), slice(3, 3), slice(-1, 2), slice(0, 4, 2)])
    def test_what_lies_outside_is_refused(self, heads):
        with pytest.raises(
            ValueError, match=r"heads: got slice\(.*\); it must lie within the 4 key-value heads, step 1"
        ):
            PerHeadRotary(BASES).tables(torch.arange(5), heads=heads)

    @pytest.mark.parametrize("given", [2, 8])
    def test_keys_of_other_heads_are_refused(self, given):
        q, k = inputs(heads=given)
        with pytest.raises(
            ValueError, match=rf"k: got {given} heads for tables of 4; .* heads=slice\(first, last \+ 1\)"
        ):
            PerHeadRotary(BASES)(q, k, torch.arange(13))


class TestRefusals:
    """Heads that could not be turned in one call are named, with what differs."""

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            (
                {"head_dim": 32, "rotary_dim": 32},
                "rotaries: got head_dim 32 for head 1 and 16 for head 0; it must agree",
            ),
            ({"rotary_dim": 8}, "rotaries: got rotary_dim 8 for head 1 and 16 for head 0"),
            ({"interleaved": True}, "rotaries: got interleaved True for head 1 and False for head 0"),
            ({"trailing": True}, "rotaries: got trailing True for head 1 and False for head 0"),
            (
                {"mrope_section": (4, 4)},
                r"rotaries: got mrope_section \(4, 4\) for head 1 and None for head 0; the pos",
            ),
        ],
    )
    def test_of_plans_that_differ(self, change, text):
        with pytest.raises(ValueError, match=text):
            PerHeadRotary([BASE, replace(BASE, **change)])

    def test_of_none_and_of_other_things(self):
        with pytest.raises(ValueError, match="rotaries: got none; give one for each key-value head"):
            PerHeadRotary([])
        with pytest.raises(ValueError, match="rotaries: got a float for head 1; each must be a Rotary"):
            PerHeadRotary([BASE, 1e4])

    def test_of_positions(self):
        with pytest.raises(ValueError, match=r"positions: got torch.bfloat16"):
            PerHeadRotary(BASES).tables(torch.arange(5).bfloat16())
