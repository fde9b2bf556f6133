"""The table in the terminal: whole numbers at any width, no colour in a file, the honest baseline apart."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from theodolite.report import terminal

from . import sample


def printed(made, width, *, tty=False):
    file = io.StringIO()
    terminal.render(
        made, Console(file=file, width=width, force_terminal=tty, color_system="truecolor" if tty else None)
    )
    return file.getvalue()


def table_lines(text):
    """Lines of the table: from its heads to the notes."""
    lines = text.splitlines()
    end = next(index for index, line in enumerate(lines) if line.startswith("ppl: "))
    return lines[:end]


class TestWidths:
    @pytest.mark.parametrize("width", [80, 120])
    @pytest.mark.parametrize("to", [12288, 16384])
    def test_no_number_is_broken_or_cut(self, width, to):
        text = printed(sample.summary(to=to), width)
        assert "…" not in text
        lines = table_lines(text)
        assert all(len(line.rstrip()) <= width for line in lines)
        row = next(line for line in lines if line.startswith("as shipped"))
        assert {"6,000", "10,240", "58%", "23%", "0%"} <= set(row.split())

    def test_all_bands_at_120_columns(self):
        row = next(line for line in printed(sample.summary(), 120).splitlines() if line.startswith("as shipped"))
        assert row.split()[4:10] == ["47.7", "40.1", "48.4", "36.1", "31.2", "52.5"]

    def test_bands_within_the_trained_length_are_joined_at_80_columns(self):
        text = printed(sample.summary(), 80)
        row = next(line for line in text.splitlines() if line.startswith("as shipped"))
        # exp of the mean of ln 47.71, 40.08, 48.40, 36.07.
        assert row.split()[4:7] == ["42.7", "31.2", "52.5"]
        assert "0–8K" in text

    def test_twelve_scalings_and_long_names_lose_nothing(self):
        names = ("none", *(f"yarn:{1 + index / 4}" for index in range(10)), "linear:1.23456789012345678")
        text = printed(sample.summary(names=names, passed=("none",)), 80)
        assert "…" not in text
        assert "linear:1.23456" in text
        assert "789012345678" in text

    def test_a_narrow_terminal_gets_lists(self):
        text = printed(sample.summary(), 30)
        assert "  holds to: 10,240" in text
        assert "  ppl 10–12K: 52.5" in text

    @pytest.mark.parametrize("width", [80, 120])
    def test_maps_of_distances_stand_in_the_same_table(self, width):
        names = ("none", "yarn:2", *sample.MAPS)
        text = printed(sample.summary(names=names, passed=names), width)
        lines = table_lines(text)
        assert all(len(line.rstrip()) <= width for line in lines)
        # A name of fourteen characters stands on one line with its numbers; a longer one is folded, and whole.
        for name in ("self-extend", "leaky-rerope", "dca"):
            row = next(line.split() for line in lines if line.split()[:1] == [name])
            assert {"10,000", "12,288", "68%", "+3.9%"} <= set(row)
        folded = "".join(line[:14].strip() for line in lines)
        assert "self-extend:4:window=1024" in folded
        assert "dca: a map of distances: dca" in text


class TestContent:
    def test_the_truncated_window_stands_apart(self):
        lines = table_lines(printed(sample.summary(), 80))
        index = next(index for index, line in enumerate(lines) if line.startswith("window 8K"))
        assert set(lines[index - 1].strip()) == {"-"}
        assert lines[index].split()[-5:] == ["31.1", "30.9", "–", "–", "–"]

    def test_settings_stay_on_one_line_to_be_copied(self):
        made = sample.summary()
        lines = printed(made, 80).splitlines()
        assert made["settings"]["vllm"] in lines
        assert made["settings"]["llama.cpp"] in lines

    def test_definitions_and_reason_are_printed(self):
        made = sample.summary()
        text = " ".join(printed(made, 80).split())
        assert made["recommendation"]["why"] in text
        for sentence in made["definitions"].values():
            assert sentence in text

    def test_nowhere_is_not_the_same_as_not_measured(self):
        text = printed(sample.summary(names=("none", "linear:2", "linear:4"), passed=("none", "linear:2")), 80)
        rows = {line.split()[0]: line.split() for line in table_lines(text) if line.startswith("linear")}
        assert rows["linear:2"][1:3] == ["nowhere", "nowhere"]
        assert rows["linear:4"][1:3] == ["nowhere", "–"]

    def test_passes_per_length_and_passkey_are_said(self):
        text = printed(sample.with_passkey(sample.summary()), 80)
        assert "dynamic: frequencies depend on the length; passes at 8,192, 12,288" in text
        assert "passkey right, as shipped: " in text
        assert "0 of 3 at 12,288" in text


class TestSafety:
    def test_no_colour_unless_a_terminal(self):
        assert "\x1b" not in printed(sample.summary(), 80)
        assert "\x1b[" in printed(sample.summary(), 80, tty=True)

    def test_names_can_neither_style_nor_move_the_cursor(self):
        text = printed(sample.summary(model="[red]a[/red]\x1b[2J\u202eb"), 80)
        assert "[red]a[/red]" in text
        assert "\x1b" not in text
        assert "\u202e" not in text

    def test_only_reach_measured(self):
        made = sample.summary(passed=()) | {"truncated_window": None, "texts": sample.TEXTS[:1]}
        made["recommendation"] = {"name": None, "why": "No full pass was run."}
        text = printed(made, 80)
        assert "Nothing is recommended" in text
        assert "10,000" in text

    def test_missing_rich_says_what_to_install(self, monkeypatch):
        console = Console(file=io.StringIO())
        monkeypatch.setitem(sys.modules, "rich.text", None)
        with pytest.raises(ImportError, match=r"rich is needed .*pip install 'theodolite\[survey\]'"):
            terminal.render(sample.summary(), console)
