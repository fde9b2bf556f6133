"""A comparison's table, sentences, pictures and page: every figure is the result's, and names are data."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

from tests.report.comparisons import LENGTHS, LOSSES, comparison, task

pytest.importorskip("matplotlib")

from rich.console import Console

from theodolite.report import compare_plots
from theodolite.report.compare_page import draw_comparison, write_comparison_page
from theodolite.report.compare_table import render_comparison, tables
from theodolite.report.compare_words import difference, quality, sentences


def printed(result: dict[str, Any], width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    render_comparison(result, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


class TestTable:
    def test_every_loss_stands_in_its_place(self):
        (_, head, rows), (_, other_head, others) = tables(comparison())
        assert head[:5] == ["policy", "128 (trained)", "256", "512", "1,024"]
        assert [row[0] for row in rows] == list(LOSSES)
        for row, losses in zip(rows, LOSSES.values(), strict=True):
            for cell, loss in zip(row[1:], losses, strict=False):
                assert abs(float(cell.split()[0]) - loss) < 0.002
        assert other_head[3:] == head[1:5]
        assert [row[:3] for row in others] == [
            ["rope", "none", ""],
            ["rope", "linear", ""],
            ["rope", "ntk", ""],
            ["rope", "linear", "plain"],
        ]
        assert [row[6] for row in others] == ["3.600", "4.250*", "2.500*", "2.125*"]

    def test_what_is_beyond_doubt_is_marked(self):
        rows = {row[0]: row for row in tables(comparison())[0][2]}
        at_training, longest = ({name: row[i] for name, row in rows.items()} for i in (1, 4))
        assert not at_training["alibi"].endswith("*")
        assert at_training["sinusoidal<b>"].endswith("*")
        assert longest["rope"].endswith("*")
        assert longest["learned"] == "stops"

    def test_half_of_the_interval(self):
        q = quality(comparison(), 1024)["alibi"]
        assert f"±{(q['interval'][1] - q['interval'][0]) / 2:.3f}" in tables(comparison())[0][2][1][4]

    def test_costs(self):
        rows = tables(comparison())[0][2]
        assert [row[5:] for row in rows] == [
            ["600,000", "20.0", "1.00 x"],
            ["600,001", "21.0", "1.10 x"],
            ["600,002", "22.0", "1.20 x"],
            ["600,003", "23.0", "1.30 x"],
        ]

    def test_a_task_has_shares(self):
        (heading, _, rows) = tables(task())[0]
        assert "rows right" in heading
        assert rows[1][4].startswith("71.0%")

    def test_is_printed_whole(self):
        text = printed(comparison())
        for name in LOSSES:
            assert name in text
        assert "book & <i>" in text


class TestSentences:
    def test_name_the_best_and_who_is_apart(self):
        first, second, *others = sentences(comparison())
        assert first.startswith(
            "At the training length, 128 tokens, rope is best, 2.000 nats a token; within noise of that: alibi;"
        )
        assert "learned +0.050 (+0.050 to +0.050)" in first
        assert second.startswith("At 1,024 tokens, alibi is best, 1.960 nats a token; beyond noise: rope +1.640")
        assert "It ends there, having no positions past: learned at 128." in others
        assert (
            "rope as it was trained goes furthest under ntk: 2.500 nats a token at 1,024 (-1.100 against none)."
            in others
        )
        assert any("after fine-tuning goes furthest under linear, plain: 2.125" in line for line in others)

    @pytest.mark.parametrize("seeds", [1, 2])
    def test_few_seeds_claim_nothing(self, seeds):
        said = sentences(comparison(seeds=seeds))
        assert said[-1] == f"With {seeds} seed{'s' * (seeds > 1)} nothing is claimed: give 3 at least."
        assert not any("beyond noise" in line for line in said)
        assert "*" not in "".join(cell for row in tables(comparison(seeds=seeds))[0][2] for cell in row)

    def test_a_diverged_run_is_said(self):
        assert any("rope (seed 1: the loss was nan by step 7)" in line for line in sentences(comparison(diverged=True)))

    def test_a_task_is_ranked_by_what_is_right(self):
        assert sentences(task())[1].startswith(
            "At 1,024 tokens, alibi is best, 71.0% rows right; beyond noise: rope -41.0%"
        )

    def test_differences_turn_round(self):
        result = comparison()
        one, other = difference(result, "rope", "alibi", 512), difference(result, "alibi", "rope", 512)
        assert one["mean"] == -other["mean"] == pytest.approx(1.03)
        assert one["interval"] == [-other["interval"][1], -other["interval"][0]]
        with pytest.raises(KeyError, match="no difference"):
            difference(result, "rope", "learned", 512)


PICTURES = [
    compare_plots.by_length,
    compare_plots.by_position,
    compare_plots.by_gain,
    compare_plots.by_cost,
    compare_plots.by_step,
    compare_plots.overview,
]


class TestPictures:
    @pytest.mark.parametrize("draw", PICTURES)
    @pytest.mark.parametrize("seeds", [1, 3])
    def test_are_the_same_bytes_again(self, draw, seeds):
        first = compare_plots.render(comparison(seeds=seeds), draw)
        assert first is not None
        assert first == compare_plots.render(comparison(seeds=seeds), draw)

    @pytest.mark.parametrize("draw", PICTURES)
    def test_nothing_to_draw(self, draw):
        result = comparison() | {"quality": [], "by_position": [], "gain": [], "cells": []}
        assert compare_plots.render(result, draw) is None

    def test_what_is_lost_leaves_the_panel(self):
        """A model at 9 nats does not press those at 2 onto a line."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4), layout="constrained")
        assert compare_plots.by_length(figure, comparison())
        low, high = figure.axes[0].get_ylim()
        assert low < 1.96 < high < 9

    def test_of_a_task(self):
        assert compare_plots.render(task(), compare_plots.by_length) is not None
        assert compare_plots.render(task(), compare_plots.by_position) is None

    def test_for_a_readme(self, tmp_path):
        assert draw_comparison(comparison(), tmp_path).read_bytes().startswith(b"\x89PNG")


class TestPage:
    def test_names_are_data(self, tmp_path):
        page = write_comparison_page(comparison(), tmp_path / "compare.html").read_text(encoding="utf-8")
        assert "<b>sinusoidal" not in page
        assert "sinusoidal<b>" not in page
        assert "sinusoidal&lt;b&gt;" in page
        assert "book &amp; &lt;i&gt;" in page

    def test_needs_nothing_beside_it(self, tmp_path):
        page = write_comparison_page(comparison(), tmp_path / "compare.html").read_text(encoding="utf-8")
        assert not re.findall(r'(?:src|href)="(?!data:)', page)
        assert "<script" not in page
        assert page.count('<img src="data:image/svg+xml;base64,') == 5

    @pytest.mark.parametrize(
        "result", [comparison(), comparison(seeds=1), comparison(diverged=True, extension=False), task()]
    )
    def test_has_every_figure_of_the_tables(self, result, tmp_path):
        page = write_comparison_page(result, tmp_path / "compare.html").read_text(encoding="utf-8")
        for _, head, rows in tables(result):
            for cell in [*head, *(cell for row in rows for cell in row[1:])]:
                assert cell in page
        assert str(LENGTHS[0]) in page
