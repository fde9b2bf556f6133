"""Intervals against tables, and against what they promise: 95 of 100 hold the truth."""

from __future__ import annotations

import numpy as np
import pytest

from theodolite.compare.statistics import Estimate, over_seeds, paired, student


class TestStudent:
    """The points of Student's t, as tables have them."""

    @pytest.mark.parametrize(
        ("freedom", "point"),
        [
            (1, 12.706),
            (2, 4.303),
            (9, 2.262),
            (15, 2.131),
            (16, 2.120),
            (20, 2.086),
            (30, 2.042),
            (120, 1.980),
            (10**6, 1.960),
        ],
    )
    def test_is_the_table(self, freedom, point):
        assert student(freedom) == pytest.approx(point, abs=1e-3)

    def test_falls(self):
        points = [student(n) for n in range(1, 60)]
        assert points == sorted(points, reverse=True)


class TestEstimate:
    def test_by_hand(self):
        found = over_seeds([1.0, 2.0, 4.0])
        assert found.mean == pytest.approx(7 / 3)
        half = 4.303 * np.std([1, 2, 4], ddof=1) / np.sqrt(3)
        assert found.interval == pytest.approx((7 / 3 - half, 7 / 3 + half))

    def test_one_seed_has_no_interval(self):
        assert over_seeds([2.0]) == Estimate(by_seed=(2.0,), mean=2.0, interval=None)

    @pytest.mark.parametrize("values", [[], [np.nan, 1.0], [np.inf]])
    def test_refuses(self, values):
        with pytest.raises(ValueError, match="one finite number a seed"):
            over_seeds(values)

    def test_intervals_hold_the_truth(self):
        rng = np.random.default_rng(0)
        for seeds in (3, 5, 20):
            held = 0
            for _ in range(2000):
                low, high = over_seeds((3 + rng.normal(size=seeds)).tolist()).interval
                held += low <= 3 <= high
            # 2,000 tries of 95 %: four standard deviations are 2 %.
            assert abs(held / 2000 - 0.95) < 0.02


class TestPaired:
    def test_what_is_in_common_drops_out(self):
        luck = np.array([5.0, -3.0, 40.0])
        found = paired((luck + np.array([0.1, 0.12, 0.11])).tolist(), luck.tolist())
        assert found.mean == pytest.approx(0.11)
        assert found.significant
        assert not over_seeds((luck + 0.1).tolist()).significant

    def test_two_seeds_claim_nothing(self):
        assert not paired([1.0, 1.0], [0.0, 0.0]).significant
        assert paired([1.0, 1.0, 1.0], [0.0, 0.0, 0.0]).significant

    def test_nothing_is_no_difference(self):
        assert not paired([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]).significant
        assert not paired([0.1, -0.1, 0.05], [0.0, 0.0, 0.0]).significant

    def test_seeds_must_be_equal(self):
        with pytest.raises(ValueError, match="2 seeds for 1"):
            paired([1.0], [1.0, 2.0])
