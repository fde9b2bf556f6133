"""ALiBi on the page: each line is where its slope puts it, and no name of a head is made up."""

from __future__ import annotations

import dataclasses
import math

import pytest

from theodolite.encodings import alibi_slopes
from theodolite.plan.huggingface import read_config
from theodolite.plan.open import Opened
from theodolite.report import plan_page
from theodolite.report.alibi_figure import alibi_figure

BLOOM = {"model_type": "bloom", "n_layer": 2, "hidden_size": 64, "seq_length": 2048}


class TestLines:
    """Both axes are logarithms, so a slope is a straight line whose ends say everything."""

    @pytest.mark.parametrize("heads", [1, 3, 8, 12, 32])
    def test_ends(self, heads: int) -> None:
        plan = read_config({**BLOOM, "hidden_size": 5 * heads, "n_head": heads})
        made = alibi_figure(plan)
        assert made is not None
        slopes = alibi_slopes(heads)
        low, high = math.log(min(slopes)), math.log(max(slopes) * 2047)
        assert len(made["lines"]) == min(heads, 8)
        for line in made["lines"]:
            slope = slopes[int(line["name"].removeprefix("head "))]
            for height, taken in ((line["y1"], slope), (line["y2"], slope * 2047)):
                place = (made["bottom"] - height) / (made["bottom"] - made["top"])
                assert place == pytest.approx((math.log(taken) - low) / (high - low), abs=1e-4)
            assert (line["x1"], line["x2"]) == (made["left"], made["right"])
        assert made["words"].startswith(f"{heads} heads, slopes {max(slopes):.4g} to {min(slopes):.4g}")

    def test_heads_that_are_not_stated(self) -> None:
        made = alibi_figure(read_config(BLOOM))
        assert made is not None
        assert made["words"].startswith("8 heads (assumed: the file states none)")

    def test_a_model_without_it(self) -> None:
        llama = {"model_type": "llama", "num_hidden_layers": 2, "head_dim": 16, "rope_theta": 1e4}
        assert alibi_figure(read_config(llama)) is None


class TestPage:
    def test_it_is_drawn_and_told(self) -> None:
        plan = read_config({**BLOOM, "n_head": 4})
        opened = Opened(plan=plan, name="m", location="m", kind="config", raw={})
        text = plan_page.page(opened, ())
        assert text.count('<path class="line" d="M') == 4
        assert "4 heads, slopes 0.25 to 0.003906 per token" in text
        without = dataclasses.replace(plan.layers[0], bias=None)
        bare = dataclasses.replace(opened, plan=dataclasses.replace(plan, layers=(without,)))
        assert "ALiBi by distance" not in plan_page.page(bare, ())
