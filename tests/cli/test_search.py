"""`theodolite search` from the command line, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.survey.folders import write_model
from theodolite.cli import main
from theodolite.report.search_picture import draw_search
from theodolite.survey.texts import builtin_text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny-llama", "llama")


def run(*arguments: str) -> int:
    return main(["search", *arguments])


class TestSearch:
    """The same command twice gives the same files, and says where they are."""

    def test_files_and_words(self, model, tmp_path, capsys):
        out = tmp_path / "found"
        command = (str(model), "--to", "1k", "--evaluations", "12", "--dtype", "float32", "-o", str(out))
        assert run(*command) == 0
        said = capsys.readouterr().out
        assert "It did not win" in said
        assert f"result: {out / 'search.json'}" in said
        assert '"rope_parameters"' in said
        files = {path.name: path.read_bytes() for path in out.iterdir() if path.suffix in (".json", ".png")}
        assert set(files) == {"search.json", "search.png"}
        assert run(*command) == 0
        assert {path.name: path.read_bytes() for path in out.iterdir() if path.name in files} == files
        told = json.loads(files["search.json"])
        assert str(out) in told["settings"]["theodolite"]

    def test_hostile_names_are_drawn_as_text(self, model, tmp_path):
        out = tmp_path / "found"
        assert run(str(model), "--to", "1k", "--evaluations", "4", "--space", "yarn", "-o", str(out)) == 0
        result = json.loads((out / "search.json").read_text())
        result["model"] = "$x^2$ \x1b[31m\n" + "long" * 200
        assert draw_search(result, tmp_path).read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(("arguments", "message"), [
        (("--to", "512"), "trained for 512 tokens; give more"),
        (("--to", "1k", "--space", "magic"), "one or more of yarn, pairs"),
        (("--to", "1k", "--against", "magic"), "magic"),
        (("--to", "1k", "--evaluations", "1"), "evaluations: got 1"),
        (("--to", "1k", "--text", "nowhere.txt"), "no file 'nowhere.txt'"),
    ])  # fmt: skip
    def test_refusals(self, model, tmp_path, capsys, arguments, message):
        assert run(str(model), *arguments, "-o", str(tmp_path / "out")) == 2
        told = capsys.readouterr().err
        assert told.startswith("theodolite search: ")
        assert message in told
        assert told.count("\n") == 1

    def test_too_little_text(self, model, tmp_path, capsys):
        text = tmp_path / "text.txt"
        text.write_text(builtin_text("moby-dick")[:3000])
        assert run(str(model), "--to", "1k", "--text", str(text), "-o", str(tmp_path / "out")) == 2
        assert "a search to 1,024 tokens needs 2,050, half of them to confirm" in capsys.readouterr().err

    def test_a_file_for_a_folder(self, model, tmp_path, capsys):
        (tmp_path / "out").write_text("")
        assert run(str(model), "--to", "1k", "-o", str(tmp_path / "out")) == 2
        assert "is a file; give a folder" in capsys.readouterr().err
