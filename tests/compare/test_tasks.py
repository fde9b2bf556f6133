"""Tasks: every answer follows from the row, by a solver that knows the definition alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from theodolite.compare.batch import IGNORE, Batch
from theodolite.compare.tasks import TASKS, read_data
from theodolite.plan import PlanError

NAMES = [
    "copy",
    "copy:kind=repeated",
    "copy:kind=unique",
    "reverse",
    "flip-flop",
    "flip-flop:ignore=0.1:test=0.98",
    "recall",
    "recall:pairs=3",
    "passkey",
    "passkey:digits=2",
    "counting",
    "counting:highest=3",
]


def answers(name: str, ids: list[int]) -> dict[int, int]:
    """What should follow at each place where something is asked."""
    kind, _, rest = name.partition(":")
    settings = dict(piece.split("=") for piece in rest.split(":") if piece)
    if kind in ("copy", "reverse"):
        n = ids.index(0)
        said = ids[:n]
        again = (said[::-1] if kind == "reverse" else said) + [1]
        return {n + i: token for i, token in enumerate(again) if n + i < len(ids)}
    if kind == "flip-flop":
        found, last = {}, None
        for place in range(0, len(ids) - 1, 2):
            if ids[place] == 0:
                last = ids[place + 1]
            elif ids[place] == 1:
                found[place] = last
        return found
    if kind == "recall":
        pairs = int(settings.get("pairs", 8))
        begin = len(ids) - 2 * pairs
        beside = {ids[p]: ids[p + 1] for p in range(begin) if ids[p] < 64}
        return {p: beside[ids[p]] for p in range(begin, len(ids), 2)}
    if kind == "passkey":
        digits = int(settings.get("digits", 4))
        at, ask = ids.index(0), len(ids) - digits
        assert ids[ask] == 1
        return {ask + i: ids[at + 1 + i] for i in range(digits)}
    highest = int(settings.get("highest", 9))
    found, count, skip = {}, 0, False
    for place, token in enumerate(ids):
        if skip:
            skip = False
        elif token == 3:
            found[place], skip = 4 + min(count, highest), True
        else:
            count = 0 if token == 2 else count + (token == 0)
    return found


def asked(batch: Batch, row: int) -> dict[int, int]:
    return {i: int(t) for i, t in enumerate(batch.targets[row]) if t != IGNORE}


@pytest.mark.parametrize("name", NAMES)
class TestAnswers:
    """A model that fails at a row fails by itself: the row says all that is needed."""

    @pytest.mark.parametrize("length", [32, 33, 41])
    def test_follow_from_the_row(self, name, length):
        data = read_data(name)
        for batch in (
            data.training_batch(3, rows=9, length=length, seed=1),
            data.test_batch(2, rows=9, length=length),
        ):
            assert batch.ids.shape == batch.targets.shape == (9, length)
            assert batch.positions.tolist() == list(range(length))
            assert batch.ids.min() >= 0
            assert batch.ids.max() < data.vocab_size
            assert batch.targets.max() < data.vocab_size
            for row in range(9):
                wanted = answers(data.name, batch.ids[row].tolist())
                assert wanted
                assert asked(batch, row) == wanted

    def test_what_follows_an_answer_is_it(self, name):
        """Given the right tokens before it: the next token of the row is the target, except past the row's end."""
        batch = read_data(name).training_batch(0, rows=20, length=40, seed=0)
        for row in range(20):
            for place, target in asked(batch, row).items():
                assert place == 39 or batch.ids[row, place + 1] == target

    def test_are_drawn_by_their_numbers(self, name):
        data = read_data(name)
        first = data.training_batch(5, rows=4, length=32, seed=2)
        data.training_batch(6, rows=4, length=32, seed=2)
        assert torch.equal(first.ids, read_data(name).training_batch(5, rows=4, length=32, seed=2).ids)
        for other in (
            data.training_batch(5, rows=4, length=32, seed=3),
            data.training_batch(6, rows=4, length=32, seed=2),
            data.test_batch(0, rows=4, length=32),
        ):
            assert not torch.equal(first.ids, other.ids)
        whole = data.test_batch(0, rows=6, length=32)
        assert torch.equal(whole.ids[2:5], data.test_batch(2, rows=3, length=32).ids)

    def test_names_are_brought_into_one_form(self, name):
        assert read_data(read_data(name).name) == read_data(name)


class TestDefinitions:
    """Each task is as hard as it says."""

    def test_copies_have_all_lengths_in_training_and_the_longest_in_tests(self):
        data = read_data("copy")
        rows = data.training_batch(0, rows=3000, length=21, seed=0).ids.tolist()
        counts = Counter(len(answers("copy", ids)) - 1 for ids in rows)
        assert sorted(counts) == list(range(1, 11))
        # Chi-square with 9 degrees of freedom is above 33.7 once in 10,000 times.
        assert sum((counts[n] - 300) ** 2 / 300 for n in range(1, 11)) < 33.7
        for length in (21, 22, 64):
            batch = data.test_batch(0, rows=5, length=length)
            assert all(len(asked(batch, row)) == (length - 1) // 2 + 1 for row in range(5))

    def test_repeated_symbols_are_one(self):
        for ids in read_data("copy:kind=repeated").test_batch(0, rows=5, length=32).ids.tolist():
            assert len(set(ids[: ids.index(0)])) == 1

    def test_unique_symbols_are_apart(self):
        for ids in read_data("copy:kind=unique").test_batch(0, rows=5, length=60).ids.tolist():
            assert len(set(ids[: ids.index(0)])) == ids.index(0)

    @pytest.mark.parametrize(("name", "test", "chance"), [("flip-flop", False, 0.8), ("flip-flop:test=0.1", True, 0.1)])
    def test_flip_flop_ignores_as_often_as_it_says(self, name, test, chance):
        data, size = read_data(name), {"rows": 40, "length": 402}
        batch = data.test_batch(0, **size) if test else data.training_batch(0, seed=0, **size)
        inner = batch.ids[:, 2:-2:2]
        n = inner.numel()
        assert abs(float((inner == 2).float().mean()) - chance) < 4 * (chance * (1 - chance) / n) ** 0.5
        assert bool((batch.ids[:, 0] == 0).all())
        assert bool((batch.ids[:, 400] == 1).all())

    def test_recall_asks_every_key_once(self):
        for ids in read_data("recall").test_batch(0, rows=10, length=64).ids.tolist():
            keys = [token for token in ids[:48] if token < 64]
            assert len(keys) == len(set(keys)) == 8
            assert sorted(ids[48::2]) == sorted(keys)

    def test_passkeys_are_anywhere(self):
        batch = read_data("passkey").test_batch(0, rows=2000, length=24)
        places = [ids.index(0) for ids in batch.ids.tolist()]
        counts = np.bincount(places, minlength=16)
        # Sixteen places are left before the question; chi-square with 15 degrees of freedom: 1 in 10,000.
        assert len(counts) == 16
        assert float(((counts - 125.0) ** 2 / 125.0).sum()) < 44.3

    def test_counting_has_all_answers(self):
        batch = read_data("counting").training_batch(0, rows=200, length=100, seed=0)
        answered = Counter(batch.targets[batch.targets != IGNORE].tolist())
        assert sorted(answered) == list(range(4, 14))
        # The commonest answer is one in five at 100 tokens, and more often in shorter rows.
        assert 0.15 < max(answered.values()) / sum(answered.values()) < 0.45


class TestRefuses:
    """A task that cannot be is said at once."""

    @pytest.mark.parametrize(
        ("name", "match"),
        [
            ("cpoy", "no task is named 'cpoy'; allowed: copy, reverse"),
            ("copy:kind=fancy", "kind"),
            ("copy:backwards=true", "'backwards' is no setting of it"),
            ("reverse:kind=repeated", "backwards it is the same"),
            ("recall:pairs=x", "pairs is 'x', which is no number"),
            ("recall:pairs=0", "pairs"),
            ("recall:pairs=99", "at most as many as the 64 keys"),
            ("recall:pairs=2:pairs=3", "'pairs' stands twice"),
            ("flip-flop:ignore=1.5", "ignore"),
            ("passkey:digits=1.5", "digits"),
            ("counting:highest=0", "highest"),
        ],
    )
    def test_names(self, name: str, match: str):
        with pytest.raises(PlanError, match=match):
            read_data(name)

    @pytest.mark.parametrize("name", TASKS)
    def test_rows_that_are_too_short(self, name: str):
        data: Any = read_data(name)
        least = data.task.least
        data.require(length=least, longest=least, rows=1)
        assert asked(data.test_batch(0, rows=1, length=least), 0)
        with pytest.raises(PlanError, match=f"needs {least} tokens a row"):
            data.require(length=least - 1, longest=64, rows=1)

    def test_more_unique_symbols_than_there_are(self):
        data = read_data("copy:kind=unique:symbols=10")
        data.test_batch(0, rows=1, length=22)
        data.require(length=22, longest=22, rows=1)
        with pytest.raises(PlanError, match="at most 22 tokens"):
            data.require(length=8, longest=23, rows=1)
