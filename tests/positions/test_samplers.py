"""Positions drawn in training: always in order, always in range, and of the law that the papers print."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from theodolite.positions.samplers import pose_positions, randomized_positions

# Chance that a right sampler fails one statistical test; seeds are fixed, so it either always does or never.
FAILURE = 1e-9


def hoeffding(draws: int, tests: int) -> float:
    """How far a frequency over `draws` draws may be off its probability: 2 exp(-2 n e^2) = FAILURE / tests."""
    return math.sqrt(math.log(2 * tests / FAILURE) / (2 * draws))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SIZES = st.tuples(st.integers(1, 12), st.integers(0, 20), st.integers(1, 4), st.integers(0, 2**32))


class TestEveryDrawIsUsable:
    """Strictly increasing and below the target: no two tokens share a place, and none is out of the table."""

    @settings(max_examples=80, deadline=None)
    @given(SIZES, st.booleans(), st.data())
    def test_pose(self, sizes, random_start, data):
        tokens, more, batch, seed = sizes
        chunks = data.draw(st.integers(1, tokens))
        positions = pose_positions(
            batch,
            tokens,
            max_position_embeddings=tokens + more,
            chunks=chunks,
            random_start=random_start,
            generator=generator(seed),
        )
        assert positions.shape == (batch, tokens)
        assert positions.dtype == torch.int64
        steps = positions.diff(dim=1)
        assert (steps > 0).all()
        assert ((steps > 1).sum(1) < chunks).all()
        assert positions.max() < tokens + more
        assert positions.min() >= 0
        if not random_start:
            assert not positions[:, 0].any()

    @settings(max_examples=80, deadline=None)
    @given(SIZES)
    def test_randomized(self, sizes):
        tokens, more, batch, seed = sizes
        positions = randomized_positions(
            batch, tokens, max_position_embeddings=tokens + more, generator=generator(seed)
        )
        assert positions.shape == (batch, tokens)
        assert positions.dtype == torch.int64
        assert (positions.diff(dim=1) > 0).all()
        assert positions.min() >= 0
        assert positions.max() < tokens + more

    def test_without_room_they_are_the_plain_positions(self):
        plain = torch.arange(9).expand(2, -1)
        assert torch.equal(pose_positions(2, 9, max_position_embeddings=9, chunks=3, generator=generator(0)), plain)
        assert torch.equal(randomized_positions(2, 9, max_position_embeddings=9, generator=generator(0)), plain)

    def test_one_chunk_is_the_plain_positions_or_a_shift_of_them(self):
        plain = torch.arange(5)
        fixed = pose_positions(3, 5, max_position_embeddings=50, chunks=1, generator=generator(1))
        assert torch.equal(fixed, plain.expand(3, -1))
        moved = pose_positions(3, 5, max_position_embeddings=50, chunks=1, random_start=True, generator=generator(1))
        assert torch.equal(moved - moved[:, :1], fixed)
        assert moved[:, 0].unique().numel() == 3


class TestGenerators:
    """Draws come from the generator given, so a run can be repeated, and from nothing else."""

    @pytest.mark.parametrize("sampler", [pose_positions, randomized_positions])
    def test_repeatable_and_apart_from_the_global_state(self, sampler):
        state = torch.random.get_rng_state()
        first = sampler(4, 20, max_position_embeddings=999, generator=generator(5))
        again = sampler(4, 20, max_position_embeddings=999, generator=generator(5))
        other = sampler(4, 20, max_position_embeddings=999, generator=generator(6))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert torch.equal(torch.random.get_rng_state(), state)

    @pytest.mark.parametrize("sampler", [pose_positions, randomized_positions])
    def test_rows_and_calls_differ(self, sampler):
        source = generator(9)
        rows = torch.cat([sampler(4, 20, max_position_embeddings=999, generator=source) for _ in range(2)])
        assert len({tuple(row) for row in rows.tolist()}) == 8


class TestTheLaws:
    """Every position and every distance of the target range is met as often as it should be."""

    DRAWS = 20_000

    def frequencies(self, values: torch.Tensor, outcomes: int) -> torch.Tensor:
        return torch.bincount(values, minlength=outcomes).double() / len(values)

    def test_randomized_every_set_alike(self):
        # The 20 sets of 3 out of 6, each 1/20.
        sets = randomized_positions(self.DRAWS, 3, max_position_embeddings=6, generator=generator(2))
        found, counts = sets.unique(dim=0, return_counts=True)
        assert len(found) == 20
        assert ((counts / self.DRAWS - 1 / 20).abs() <= hoeffding(self.DRAWS, 20)).all()

    def test_randomized_every_set_alike_where_few_are_taken(self):
        # The 35 sets of 3 out of 7: drawn until 3 are different, in about one row of a hundred more than once.
        sets = randomized_positions(self.DRAWS, 3, max_position_embeddings=7, generator=generator(12))
        found, counts = sets.unique(dim=0, return_counts=True)
        assert len(found) == 35
        assert ((counts / self.DRAWS - 1 / 35).abs() <= hoeffding(self.DRAWS, 35)).all()

    def test_randomized_covers_the_range_evenly(self):
        # Each position is in a set with probability L / L'; a set holds it once, so rows are independent trials.
        positions = randomized_positions(self.DRAWS, 12, max_position_embeddings=60, generator=generator(3))
        share = torch.bincount(positions.reshape(-1), minlength=60).double() / self.DRAWS
        assert ((share - 12 / 60).abs() <= hoeffding(self.DRAWS, 60)).all()

    def test_pose_skips_are_uniform(self):
        # With 2 chunks the last position is L - 1 + u, u uniform over 0 to L' - L: the far end is met as often.
        positions = pose_positions(self.DRAWS, 8, max_position_embeddings=40, generator=generator(4))
        skip = self.frequencies(positions[:, -1] - 7, 33)
        assert len(skip) == 33
        assert ((skip - 1 / 33).abs() <= hoeffding(self.DRAWS, 33)).all()

    def test_pose_later_skips_are_uniform_above_the_one_before(self):
        # u2 given u1 is uniform over u1 to R: P(u2 = v) = sum over u1 <= v of 1/(R + 1) * 1/(R + 1 - u1).
        free = 6
        positions = pose_positions(self.DRAWS, 3, max_position_embeddings=3 + free, chunks=3, generator=generator(5))
        expected = torch.tensor(
            [sum(1 / (free + 1 - first) for first in range(last + 1)) / (free + 1) for last in range(free + 1)]
        )
        found = self.frequencies(positions[:, 2] - 2, free + 1)
        assert ((found - expected).abs() <= hoeffding(self.DRAWS, free + 1)).all()
        assert (
            (self.frequencies(positions[:, 1] - 1, free + 1) - 1 / (free + 1)).abs() <= hoeffding(self.DRAWS, 7)
        ).all()

    def test_pose_cuts_are_uniform(self):
        # Where the one gap stands, among the rows that have one.
        positions = pose_positions(self.DRAWS, 8, max_position_embeddings=400, generator=generator(6))
        gaps = (positions.diff(dim=1) > 1).nonzero()[:, 1]
        assert ((self.frequencies(gaps, 7) - 1 / 7).abs() <= hoeffding(len(gaps), 7)).all()

    def test_pose_start_is_uniform_where_asked(self):
        positions = pose_positions(self.DRAWS, 8, max_position_embeddings=20, random_start=True, generator=generator(7))
        assert ((self.frequencies(positions[:, 0], 13) - 1 / 13).abs() <= hoeffding(self.DRAWS, 13)).all()

    def test_pose_meets_every_distance(self):
        positions = pose_positions(4000, 16, max_position_embeddings=128, generator=generator(8))
        distances = positions.unsqueeze(-1) - positions.unsqueeze(-2)
        assert set(distances[distances > 0].tolist()) == set(range(1, 128))


class TestMemory:
    """A range of millions is what the method is for: it costs what the text costs."""

    def test_no_tensor_of_the_whole_range(self):
        class Largest(TorchDispatchMode):
            numbers = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                for one in out if isinstance(out, (tuple, list)) else (out,):
                    self.numbers = max(self.numbers, one.numel() if isinstance(one, torch.Tensor) else 0)
                return out

        with Largest() as largest:
            randomized_positions(3, 50, max_position_embeddings=2**24, generator=generator(10))
        assert largest.numbers <= 3 * 2 * 50


class TestRefusals:
    """A draw that cannot be made is an error, and so is one that cannot be repeated."""

    @pytest.mark.parametrize("sampler", [pose_positions, randomized_positions])
    def test_both(self, sampler):
        with pytest.raises(ValueError, match="max_position_embeddings: got 7 for 8 tokens; it must hold them"):
            sampler(1, 8, max_position_embeddings=7, generator=generator(0))
        with pytest.raises(ValueError, match=r"generator: got a NoneType; give a torch.Generator"):
            sampler(1, 8, max_position_embeddings=9, generator=None)
        with pytest.raises(ValueError, match="batch: got 0; it must be at least 1"):
            sampler(0, 8, max_position_embeddings=9, generator=generator(0))
        with pytest.raises(ValueError, match="tokens: got 0; it must be at least 1"):
            sampler(1, 0, max_position_embeddings=9, generator=generator(0))

    def test_chunks(self):
        with pytest.raises(ValueError, match="chunks: got 4 for 3 tokens; none may be empty"):
            pose_positions(1, 3, max_position_embeddings=9, chunks=4, generator=generator(0))
        with pytest.raises(ValueError, match="chunks: got 0; it must be at least 1"):
            pose_positions(1, 3, max_position_embeddings=9, chunks=0, generator=generator(0))
