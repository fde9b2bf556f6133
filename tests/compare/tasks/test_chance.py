"""What a task gives to those that have not learned it, as docs/tasks.md says."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from theodolite.compare.batch import IGNORE
from theodolite.compare.tasks import read_data


def uneven(counts: Counter[int], shares: dict[int, float]) -> float:
    """Chi-square of what was counted against the shares that it should have."""
    total = sum(counts.values())
    assert set(counts) <= set(shares)
    return sum((counts[token] - total * share) ** 2 / (total * share) for token, share in shares.items())


class TestOneAnswerAlways:
    """No answer is likelier than another, so that a share above chance is learned."""

    # Chi-square is above the limit once in 10,000 times, with one degree of freedom less than there are answers.
    @pytest.mark.parametrize(
        ("name", "first", "answers", "limit"),
        [("copy", 3, 32, 69.1), ("reverse", 3, 32, 69.1), ("recall", 64, 64, 113.5), ("passkey", 2, 10, 33.7)],
    )
    @pytest.mark.parametrize("test", [False, True])
    def test_scores_chance(self, name, first, answers, limit, test):
        data = read_data(name)
        size = {"rows": 400, "length": 64}
        batch = data.test_batch(0, **size) if test else data.training_batch(0, seed=0, **size)
        # The end of a copy (1) is no guess.
        said = Counter(batch.targets[(batch.targets != IGNORE) & (batch.targets != 1)].tolist())
        assert uneven(said, {first + i: 1 / answers for i in range(answers)}) < limit

    def test_scores_as_geometry_has_it_in_counting(self):
        """Of what changes the count, a sixth are resets: k comes with (1/6)(5/6)^k, and 9 stands for all above."""
        targets = read_data("counting").training_batch(0, rows=2000, length=400, seed=0).targets.numpy()
        # One question a row, the last, so that they do not depend on each other.
        last = Counter(int(row[row != IGNORE][-1]) - 4 for row in targets)
        shares = {k: 5**k / 6 ** (k + 1) for k in range(9)} | {9: (5 / 6) ** 9}
        assert uneven(last, shares) < 33.7


class TestBetterGuesses:
    """What a guess from the row scores: less than this is nothing learned."""

    @pytest.mark.parametrize("share", [0.8, 0.98, 0.1])
    def test_flip_flop_by_the_last_bit(self, share):
        batch = read_data(f"flip-flop:test={share}").test_batch(0, rows=1500, length=64)
        right = (batch.ids[:, 61] == batch.targets[:, 62]).double().mean()
        expected = 1 - share / 2
        assert abs(float(right) - expected) < 4 * (expected * (1 - expected) / 1500) ** 0.5

    @pytest.mark.parametrize("place", [0, 7])
    def test_recall_by_any_value_of_the_row(self, place):
        batch = read_data("recall").test_batch(0, rows=1500, length=64)
        values = [[token for token in ids[:48] if 64 <= token < 128][place] for ids in batch.ids.tolist()]
        right = np.mean(np.array(values) == batch.targets[:, 48].numpy())
        expected = 1 / 8 + 7 / 8 / 64
        assert abs(right - expected) < 4 * (expected * (1 - expected) / 1500) ** 0.5


class TestRowsOfTests:
    """A model that keeps its training rows in mind answers no test by it."""

    @pytest.mark.parametrize("name", ["copy", "reverse", "flip-flop", "recall", "passkey", "counting"])
    def test_are_not_met_in_training(self, name):
        data = read_data(name)
        known = {
            tuple(ids)
            for step in range(60)
            for ids in data.training_batch(step, rows=32, length=64, seed=0).ids.tolist()
        }
        tested = {tuple(ids) for ids in data.test_batch(0, rows=64, length=64).ids.tolist()}
        assert len(tested) == 64
        assert not tested & known

    def test_of_one_repeated_symbol_are_as_many_as_symbols(self):
        batch = read_data("copy:kind=repeated").test_batch(0, rows=400, length=64)
        assert len({tuple(ids) for ids in batch.ids.tolist()}) == 32


class TestNames:
    """Equal tasks have equal names, and so equal rows."""

    @pytest.mark.parametrize(("one", "other"), [("1", "1.0"), ("0", "-0.0"), ("5e-1", "0.5")])
    def test_of_one_probability(self, one, other):
        for key in ("ignore", "test"):
            first, second = read_data(f"flip-flop:{key}={one}"), read_data(f"flip-flop:{key}={other}")
            assert first == second
            assert first.identity == second.identity
            assert read_data(first.name) == first
