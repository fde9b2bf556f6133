"""What is concluded from numbers, on numbers made by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from theodolite.survey import verdict

from .plans import bands, scaling_row


def cells(*pairs: tuple[int, float]) -> list[dict[str, Any]]:
    return [{"distance": distance, "accuracy": accuracy} for distance, accuracy in pairs]


class TestInterval:
    """The 95 % interval holds the true mean about 95 times of 100, and is the same at every call."""

    @staticmethod
    def rows(seed: int, *, blocks: int = 64, within: float = 0.5) -> list[verdict.Nats]:
        """Nats of mean 3 whose neighbours are alike: blocks of 32 share half of their variance."""
        generator = np.random.default_rng(seed)
        shared = np.repeat(generator.standard_normal(blocks) * math.sqrt(within), 32)
        own = generator.standard_normal(blocks * 32) * math.sqrt(1 - within)
        return [(3 + shared + own).astype(np.float32)]

    def test_coverage(self):
        trials = 200
        inside = sum(
            interval.low <= 3 <= interval.high
            for interval in (verdict.interval_of_mean(self.rows(seed)) for seed in range(trials))
        )
        # A percentile bootstrap of 64 blocks covers about 94 %; four standard errors of 200 trials are 6.7 %.
        assert inside / trials > 0.87

    def test_width_is_that_of_the_mean_of_blocks(self):
        widths = [i.high - i.low for i in (verdict.interval_of_mean(self.rows(seed)) for seed in range(50))]
        # The variance of a block's mean is .5 + .5 / 32; of 64 of them, a 64th.
        assert np.mean(widths) == pytest.approx(2 * 1.96 * math.sqrt((0.5 + 0.5 / 32) / 64), rel=0.1)

    def test_neighbours_that_are_alike_make_it_wider(self):
        alike, apart = (verdict.interval_of_mean(self.rows(1, within=w)) for w in (0.9, 0.0))
        assert alike.high - alike.low > 3 * (apart.high - apart.low)

    def test_deterministic(self):
        assert verdict.interval_of_mean(self.rows(3)) == verdict.interval_of_mean(self.rows(3))

    @given(st.lists(st.lists(st.floats(0, 20, width=32), min_size=1, max_size=80), min_size=1, max_size=4))
    def test_the_mean_is_of_tokens_and_inside(self, values):
        rows = [np.asarray(row, dtype=np.float32) for row in values]
        interval = verdict.interval_of_mean(rows)
        everything = np.concatenate(rows).astype(np.float64)
        assert interval.mean == pytest.approx(everything.mean(), abs=1e-9)
        assert everything.min() - 1e-9 <= interval.low <= interval.high <= everything.max() + 1e-9

    def test_a_single_block_has_no_width(self):
        interval = verdict.interval_of_mean([np.asarray([1.0, 2.0], dtype=np.float32)])
        assert (interval.mean, interval.low, interval.high) == (1.5, 1.5, 1.5)


class TestBands:
    """Perplexity by band, cumulative, and beside the window on the same tokens."""

    def test_numbers(self):
        nll = np.log(np.repeat([2.0, 4.0, 8.0], [4, 4, 4])).astype(np.float32)[1:]
        nll = np.append(nll, np.float32(99))
        window = np.log(np.full(4, 16.0)).astype(np.float32)
        made = verdict.bands([nll], length=12, width=4, window=[window], trained=8)
        assert [(b["from"], b["to"]) for b in made] == [(0, 4), (4, 8), (8, 12)]
        assert [b["perplexity"] for b in made] == pytest.approx([2, 4, 8], rel=1e-6)
        # 3, 4 and 4 tokens: the first of the text is predicted from nothing.
        cumulative = [2, 2 ** (11 / 7), 2 ** (23 / 11)]
        assert [b["cumulative"] for b in made] == pytest.approx(cumulative, rel=1e-6)
        assert [b["gain_over_window"] for b in made[:2]] == [None, None]
        assert made[2]["gain_over_window"]["nats"] == pytest.approx(math.log(2), abs=1e-6)

    def test_an_odd_trained_length(self):
        nll = np.ones(14, dtype=np.float32)
        made = verdict.bands([nll], length=13, width=3, window=[np.full(3, 2, np.float32)], trained=10)
        assert [(b["from"], b["gain_over_window"] is None) for b in made][-2:] == [(9, True), (10, False)]


class TestHoldsTo:
    """The end of the last band up to which none is 0.1 nats worse than the reference on the same tokens."""

    SHIPPED = bands(50, 40, 45, 42, 400, 900)
    WINDOW = bands(0, 0, 0, 0, 38, 39)[4:]
    LIMIT = math.exp(verdict.HOLDS_WITHIN)

    def test_shipped_holds_to_its_trained_length(self):
        assert verdict.holds_to(self.SHIPPED, self.SHIPPED, self.WINDOW) == 512

    def test_the_reference_past_the_trained_length_is_the_window(self):
        own = bands(50, 40, 45, 42, 39, 44)
        assert verdict.holds_to(own, self.SHIPPED, self.WINDOW) == 640
        assert verdict.holds_to(own, self.SHIPPED, None) == 768

    def test_just_within_and_just_past(self):
        assert verdict.holds_to(bands(50 * self.LIMIT * 0.999, 99), self.SHIPPED, None) == 128
        assert verdict.holds_to(bands(50 * self.LIMIT * 1.001, 40), self.SHIPPED, None) is None

    def test_a_later_band_that_holds_does_not_count(self):
        assert verdict.holds_to(bands(50, 60, 45, 42, 38, 39), self.SHIPPED, self.WINDOW) == 128

    def test_not_read(self):
        assert verdict.holds_to([], self.SHIPPED, self.WINDOW) is None


class TestReaches:
    """The longest distance before which copying never fell below the threshold."""

    def test_a_dip_ends_it(self):
        assert verdict.reaches(cells((100, 0.9), (300, 0.4), (200, 0.8), (400, 0.9)), 0.5) == 200

    def test_exactly_the_threshold_counts(self):
        assert verdict.reaches(cells((100, 0.5), (200, 0.4999)), 0.5) == 100

    def test_all_none_and_nothing(self):
        assert verdict.reaches(cells((100, 0.9), (200, 0.9)), 0.5) == 200
        assert verdict.reaches(cells((100, 0.4), (200, 0.9)), 0.5) is None
        assert verdict.reaches([], 0.5) is None

    def test_a_model_that_cannot_copy_has_no_threshold(self):
        assert verdict.copying_threshold(0.29, 0.2) is None
        assert verdict.copying_threshold(0.8, 0.2) == pytest.approx(0.5)
        assert verdict.reaches(cells((100, 0.9)), None) is None


class TestRecommend:
    """Nothing is recommended that was not read in full, that does not hold, or that adds nothing."""

    SHIPPED = scaling_row("none", perplexities=(50, 40, 45, 42, 400, 900), holds=512, recall=0.2)
    WINDOW: dict[str, Any] = {"window": 512, "bands": bands(38, 39)}  # noqa: RUF012

    def recommend(self, *others: dict[str, Any], shipped: dict[str, Any] | None = None, **more: Any) -> dict[str, str]:
        settings = {"to": 768, "trained": 512, "window": self.WINDOW, **more}
        return verdict.recommend([shipped or self.SHIPPED, *others], **settings)

    @staticmethod
    def other(name: str, recall: float | None, *, holds: int | None = 768, **more: Any) -> dict[str, Any]:
        read = () if recall is None else (51, 41, 46, 43, 39, 40)
        return scaling_row(name, perplexities=read, holds=holds if read else None, recall=recall, **more)

    def test_the_best_that_holds(self):
        made = self.recommend(self.other("linear", 0.3), self.other("yarn", 0.6), self.other("ntk", 0.9, holds=640))
        assert made["name"] == "yarn"
        assert "yarn holds to 768: perplexity 40.0 over the last 128 tokens" in made["why"]
        assert "where the shipped model has 900.0" in made["why"]
        assert "it recalls 60% of what was read anywhere before, the shipped model 20%, and 20% can be" in made["why"]

    def test_the_truncated_window_is_in_the_reason(self):
        cut = self.recommend(self.other("yarn", 0.6))["why"]
        assert "seeing only the last 512 tokens has 39.0, so for the next token alone no scaling is needed" in cut
        window = {"window": 512, "bands": bands(38, 80)}
        assert (
            "has 80.0, so the far context helps the next token too"
            in self.recommend(self.other("yarn", 0.6), window=window)["why"]
        )
        assert "seeing only" not in self.recommend(self.other("yarn", 0.6), window=None)["why"]

    def test_of_equals_the_cheapest_on_short_text(self):
        dear, cheap = self.other("yarn", 0.60, ratio=1.04), self.other("ntk", 0.58, ratio=1.01)
        assert self.recommend(dear, cheap)["name"] == "ntk"
        worse = self.other("ntk", 0.56, ratio=1.01)
        assert self.recommend(dear, worse)["name"] == "yarn"

    def test_of_full_equals_the_first(self):
        pair = self.other("yarn", 0.6), self.other("ntk", 0.6)
        assert self.recommend(*pair)["name"] == "yarn"
        assert self.recommend(*reversed(pair))["name"] == "ntk"

    def test_too_little_gain(self):
        assert self.recommend(self.other("yarn", 0.2499))["name"] == "none"
        assert self.recommend(self.other("yarn", 0.2501))["name"] == "yarn"

    def test_not_read(self):
        made = self.recommend(self.other("yarn", None))
        assert made["name"] == "none"
        assert "they hold: none was read" in made["why"]
        assert "cut the text to the last 512 tokens" in made["why"]

    def test_read_and_none_holds(self):
        made = self.recommend(self.other("yarn", 0.9, holds=640), self.other("linear", 0.1, holds=None))
        assert made["name"] == "none"
        assert "they hold: yarn to 640, linear nowhere" in made["why"]

    def test_shipped_was_not_read(self):
        made = self.recommend(self.other("yarn", 0.9), shipped=scaling_row("none"))
        assert made["name"] == "none"
        assert "No scaling was read in full" in made["why"]

    def test_a_model_that_does_not_copy_is_told_so(self):
        made = self.recommend(self.other("yarn", 0.9), copies=False)
        assert made["name"] == "none"
        assert "does not continue passages even from near by" in made["why"]

    def test_shipped_holds(self):
        shipped = scaling_row("none", perplexities=(50, 40, 45, 42, 38, 39), holds=768, recall=0.6)
        made = self.recommend(self.other("yarn", 0.61), shipped=shipped)
        assert made["name"] == "none"
        assert (
            "The shipped model holds to 768 by itself and recalls 60% of what was read, the best scaling 61%"
            in (made["why"])
        )
        assert (
            "no scaling that was read in full does both"
            in self.recommend(self.other("yarn", 0.9, holds=640), shipped=shipped)["why"]
        )

    def test_recall_counts_at_the_length_asked_only(self):
        early = scaling_row("yarn", perplexities=(51,), holds=768, recall=0.9, length=512)
        assert self.recommend(early)["name"] == "none"


class TestDefinitions:
    """What is printed beside a result says what the code does."""

    def test_the_numbers_in_the_text_are_those_of_the_code(self):
        assert f"{math.exp(verdict.HOLDS_WITHIN) - 1:.1%}".replace("%", " %") in verdict.DEFINITIONS["holds_to"]
        assert f"({verdict.HOLDS_WITHIN} nats)" in verdict.DEFINITIONS["holds_to"]
        assert f"{verdict.BETTER_BY:.2f} more" in verdict.DEFINITIONS["recommendation"]
        assert f"within {verdict.SAME_WITHIN:.2f}" in verdict.DEFINITIONS["recommendation"]
        assert set(verdict.DEFINITIONS) == {"reaches", "holds_to", "recall", "truncated_window", "recommendation"}
