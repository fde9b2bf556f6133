"""The walk: it comes to where costs are least, the same way each time, and touches nothing of others."""

from __future__ import annotations

import numpy as np
import pytest

from theodolite.search.optimise import walk
from theodolite.search.space import Coordinate


class Box:
    """A space of five directions of different units; only its coordinates and bounds matter here."""

    coordinates = tuple(
        Coordinate(name=str(i), start=0.5 * unit, step=0.2 * unit, low=0.0, high=2.0 * unit)
        for i, unit in enumerate((1.0, 10.0, 0.1, 1.0, 3.0))
    )

    def inside(self, point):
        return [min(max(float(x), c.low), c.high) for x, c in zip(point, self.coordinates, strict=True)]


def bowl(point):
    """Least at 1.2 units of each direction."""
    units = [c.high / 2 for c in Box.coordinates]
    return sum((x / unit - 1.2) ** 2 for x, unit in zip(point, units, strict=True))


def steps(cost=bowl, **settings):
    return list(walk(Box(), cost, **{"evaluations": 160, "seed": 0, **settings}))


class TestWalk:
    def test_it_finds_the_bottom_of_a_bowl(self):
        last = steps()[-1]
        # The start costs 2.45; CMA-ES gains about an order of magnitude every 30 evaluations here.
        assert last.best_cost < 0.02
        assert last.best_cost == bowl(last.best)

    def test_the_start_is_tried_first_and_counts(self):
        first = steps()[0]
        assert first.points == [[c.start for c in Box.coordinates]]
        assert steps(cost=lambda point: -1.0 if point == first.points[0] else 1.0)[-1].best == first.points[0]

    def test_the_budget(self):
        for evaluations in (2, 7, 9, 20, 160):
            tried = sum(len(step.points) for step in steps(evaluations=evaluations))
            assert tried <= max(evaluations, 3)
            assert tried > evaluations - 9

    def test_more_evaluations_go_the_same_way_further(self):
        short, long = steps(evaluations=50), steps(evaluations=90)
        assert [step.points for step in long[: len(short)]] == [step.points for step in short]

    def test_seeds(self):
        assert steps()[-1].best == steps()[-1].best
        assert steps(seed=1)[-1].best != steps()[-1].best

    def test_points_keep_inside(self):
        for step in steps():
            for point in step.points:
                assert point == Box().inside(point)

    def test_the_random_numbers_of_others_are_left_alone(self):
        np.random.seed(3)
        wanted = np.random.rand(4)
        np.random.seed(3)
        steps(evaluations=30)
        assert np.random.rand(4) == pytest.approx(wanted, abs=0)

    def test_equal_costs_end_in_no_error(self):
        assert steps(cost=lambda point: 1.0)[-1].best_cost == 1.0
