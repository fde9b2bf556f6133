"""The pictures: there for what was measured, the same for the same numbers, safe against any name."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest

from theodolite.report import pictures, sentences, style
from theodolite.report.figures import perplexity, perplexity_between, plain, shortened, span
from theodolite.report.panels import spread, wrapped

from . import sample

ALL = {"reach", "perplexity", "recall", "wavelengths", "overview"}
TWELVE = ("none", "linear:1.5", "linear:2", "linear:4", "ntk:1.5", "ntk:2", "ntk:4", "dynamic", "dynamic:2")
TWELVE = (*TWELVE, "yarn:1.5", "yarn:2", "yarn:4")


def pixels(path):
    """Width and height from a PNG's header."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


class TestDraw:
    def test_writes_every_picture_and_leaves_no_other_file(self, tmp_path):
        drawn = pictures.draw(sample.summary(), tmp_path / "new")
        assert set(drawn) == ALL
        assert {path.name for path in (tmp_path / "new").iterdir()} == {f"{name}.png" for name in ALL}
        assert pixels(drawn["overview"]) == (1600, 800)
        assert all(pixels(path)[0] >= 1200 for path in drawn.values())

    @pytest.mark.parametrize(("name", "kind"), [("overview", "png"), ("recall", "svg")])
    def test_same_numbers_give_the_same_bytes(self, name, kind):
        first, second = (pictures.render(sample.summary(), name, kind=kind) for _ in range(2))
        assert first == second

    def test_twelve_scalings(self, tmp_path):
        made = sample.summary(names=TWELVE, passed=TWELVE, to=16384, model="m" * 200)
        assert set(pictures.draw(made, tmp_path)) == ALL

    def test_maps_of_distances(self, tmp_path):
        names = ("none", *sample.MAPS)
        made = sample.summary(names=names, passed=names) | {"recommendation": {"name": "dca", "why": "It holds."}}
        assert set(pictures.draw(made, tmp_path)) == ALL

    def test_far_below_the_trained_length(self, tmp_path):
        # A label at the trained length would stand far off the panel, and no layout holds it: matplotlib warns.
        names = ("none", "linear:2", "yarn:2")
        made = sample.summary(names=names, passed=names, to=2048) | {"truncated_window": None, "trained_length": 65536}
        assert set(pictures.draw(made, tmp_path)) == ALL

    def test_one_scaling(self, tmp_path):
        made = sample.summary(names=("none",), passed=("none",)) | {"truncated_window": None}
        assert set(pictures.draw(made, tmp_path)) == ALL

    def test_without_passes_there_is_reach_and_an_overview_of_it(self, tmp_path):
        made = sample.summary(passed=()) | {"truncated_window": None}
        for scaling in made["scalings"]:
            scaling["far_reach"] = []
        assert set(pictures.draw(made, tmp_path)) == ALL - {"perplexity", "recall"}

    def test_nothing_measured_draws_only_wavelengths(self, tmp_path):
        made = sample.summary(names=("none",), passed=()) | {"truncated_window": None}
        made["scalings"][0] |= {"reach": [], "far_reach": [], "reaches": None}
        assert set(pictures.draw(made, tmp_path)) == {"wavelengths"}

    def test_pairs_that_stand_still_are_left_out(self):
        made = sample.summary()
        for scaling in made["scalings"]:
            scaling["inv_freq"] = {key: [1.0, 0.1, 0.0] for key in ("plain", "scaled")}
        assert pictures.render(made, "wavelengths", kind="png")

    @pytest.mark.parametrize("model", ["cost $5 and $6", "$\\frac{1}{0}$", "模型 \U0001f600", "a\nb\x00", "<a&\"'>"])
    @pytest.mark.parametrize("kind", ["png", "svg"])
    def test_any_name_draws_without_a_warning(self, model, kind):
        assert pictures.render(sample.summary(model=model), "overview", kind=kind)

    def test_a_user_style_changes_nothing(self):
        import matplotlib

        expected = pictures.render(sample.summary(), "reach", kind="png")
        with matplotlib.rc_context({"text.usetex": True, "axes.facecolor": "red", "font.size": 30}):
            assert pictures.render(sample.summary(), "reach", kind="png") == expected

    def test_missing_matplotlib_says_what_to_install(self, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match=r"matplotlib is needed .*pip install 'theodolite\[survey\]'"):
            pictures.draw(sample.summary(), tmp_path)

    def test_a_wrong_summary_draws_nothing(self, tmp_path):
        with pytest.raises(ValueError, match=r"summary\.to: missing"):
            pictures.draw({k: v for k, v in sample.summary().items() if k != "to"}, tmp_path)
        assert not list(tmp_path.iterdir())


class TestTitles:
    def test_state_what_was_found(self):
        made = sample.summary(names=("none", "yarn:2"), passed=("none", "yarn:2"))
        assert sentences.perplexity_title(made) == (
            "Perplexity at 10–12K tokens: 52.5 as shipped, 31.3 with yarn:2, 30.9 truncated to 8,192"
        )
        assert sentences.recall_title(made) == (
            "Recall at 12,288 tokens: 23% as shipped, 68% with yarn:2 (25% can be guessed)"
        )
        assert sentences.reach_title(made) == (
            "In 12,288 tokens, as shipped it copies from 6,000 tokens back; with yarn:2 from 10,000 tokens back"
        )
        assert sentences.wavelengths_title(made).startswith("yarn:2 leaves 11 of 32 pairs as they were")

    def test_a_map_leaves_frequencies_as_they_were(self):
        names = ("none", "self-extend")
        made = sample.summary(names=names, passed=names)
        assert sentences.wavelengths_title(made) == (
            "self-extend leaves every pair as it was: it maps distances instead"
        )
        made["scalings"][1]["relative"] = None
        assert sentences.wavelengths_title(made) == "self-extend leaves every pair as it was"
        # A summary of an earlier version says nothing of maps.
        del made["scalings"][1]["relative"]
        assert sentences.wavelengths_title(made) == "self-extend leaves every pair as it was"

    def test_claim_nothing_that_was_not_measured(self):
        made = sample.summary(passed=()) | {"truncated_window": None}
        assert sentences.perplexity_title(made) == "Perplexity by position"
        assert sentences.recall_title(made) == "Recall by length and depth"


class TestStyle:
    def test_a_colour_belongs_to_a_name_and_differs_by_factor(self):
        assert len({style.colour(name) for name in TWELVE}) == len(TWELVE)
        assert style.line_styles(["yarn:2"], None)["yarn:2"]["color"] == style.colour("yarn:2")

    def test_every_scaling_and_every_map_has_a_colour_of_its_own(self):
        names = ("none", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope")
        maps = ("self-extend", "dca", "rerope", "leaky-rerope", "sinks", "lm-infinite")
        assert len({style.colour(name) for name in (*names, *maps)}) == len(names) + len(maps)

    def test_labels_stand_apart_inside_the_panel(self):
        for wanted in ([0.5, 0.5, 0.5], [0.0, 0.0, 0.01], [0.98, 0.99, 1.0], [0.1, 0.12, 0.9]):
            moved = spread(wanted, 0.05)
            assert all(b - a >= 0.05 - 1e-12 for a, b in pairwise(moved))
            assert 0 <= moved[0] <= moved[-1] <= 1 + 1e-12
        assert spread([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])

    def test_lines_of_a_title_are_even(self):
        assert wrapped("one two three four five six seven eight", 34).count("\n") == 1

    def test_characters_without_a_glyph_become_boxes(self):
        assert style.words("a\U000e0101b") == "a\N{WHITE SQUARE}b"


class TestNumbers:
    def test_joined_bands_give_the_perplexity_of_their_tokens(self):
        bands = [{"from": 0, "to": 100, "perplexity": 10.0}, {"from": 100, "to": 400, "perplexity": 1000.0}]
        # (1 * ln 10 + 3 * ln 1000) / 4 = ln 10^2.5
        assert perplexity_between(bands, 0, 400) == pytest.approx(10**2.5)
        assert perplexity_between(bands, 0, 300) is None
        assert perplexity_between(bands[1:], 0, 400) is None

    def test_written_with_the_digits_that_matter(self):
        assert [perplexity(value) for value in (31.24, 238.68, 12345.6, 3.4e7, None)] == [
            "31.2",
            "239",
            "12,346",
            "3.4e7",
            "–",
        ]
        assert [span(edges) for edges in ((0, 2048), (8192, 10240), (8000, 9500))] == ["0–2K", "8–10K", "8,000–9,500"]

    def test_text_is_made_harmless(self):
        assert plain("a\nb\x1bc\u202ed") == "a b\ufffdc\ufffdd"
        assert shortened("abcdefghij", 5) == "ab…ij"
