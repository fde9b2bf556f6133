"""`theodolite show`, and the pictures of `theodolite inspect`: files with the names that are printed, or one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from theodolite.cli import main
from theodolite.report.show.catalogue import ENCODINGS

HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[2J"
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4,
    "max_position_embeddings": 512, "rope_theta": 10000.0,
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def run(capsys, *arguments) -> list[str]:
    """The lines that are printed; nothing goes to the standard error."""
    assert main([*map(str, arguments)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out.splitlines()


def refused(capsys, *arguments) -> str:
    assert main([*map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.isprintable()
    return line.removeprefix(f"theodolite {arguments[0]}: ")


class TestShow:
    """Each file that is printed is there, and no other."""

    def test_the_list_names_every_view(self, capsys):
        lines = run(capsys, "show", "--list")
        assert [line.split()[0] for line in lines[::2]] == list(ENCODINGS)
        assert lines[1].split() == ["views:", "heat,", "curves,", "similarity"]

    def test_all_views_a_file_each(self, capsys, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        names = ["alibi-matrix.png", "alibi-distance.png"]
        assert run(capsys, "show", "alibi", "--length", "32") == names
        assert {path.name for path in tmp_path.iterdir()} == set(names)
        assert all(Path(name).read_bytes().startswith(b"\x89PNG") for name in names)

    def test_one_view_has_exactly_the_name(self, capsys, tmp_path):
        out = tmp_path / "new" / "a.svg"
        assert run(capsys, "show", "rotary", "--view", "hands", "--head-dim", 16, "--out", out) == [str(out)]
        assert out.read_bytes().startswith(b"<?xml")

    def test_several_views_get_names_of_their_own(self, capsys, tmp_path):
        out = tmp_path / "a.pdf"
        wanted = [str(tmp_path / f"a-{view}.pdf") for view in ("decay", "factors")]
        assert run(capsys, "show", "xpos", "--head-dim", 16, "--length", "64", "--out", out) == wanted

    def test_a_model(self, capsys, model, tmp_path):
        printed = run(capsys, "show", model, "--view", "decay", "--scaling", "yarn:2", "--out", tmp_path / "pictures")
        assert printed == [str(tmp_path / "pictures" / "config-decay.png")]

    def test_the_same_command_gives_the_same_bytes(self, capsys, tmp_path):
        for name in ("a.png", "b.png"):
            run(capsys, "show", "fire", "--view", "distance", "--length", "99", "--out", tmp_path / name)
        assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "encoding: give a name that --list prints"),
            (["sinusodial"], "encoding: got 'sinusodial'; did you mean sinusoidal?"),
            (["./nowhere"], "encoding: './nowhere' is none that --list prints, and no model: "),
            (["alibi", "--view", "hands"], "view: got 'hands'; alibi has matrix, distance"),
            (["alibi", "--theta", "500"], "theta: 'alibi' does not read it; it reads --bidirectional, --heads"),
            (["t5", "--out", "x.json"], "out: got 'x.json'; the name must end in .png, .svg, .pdf"),
            (["rotary", "--length", "1"], "length: got 1; it must be from 2 to "),
            (["rotary", "--scaling", "yarn:0.5"], "factor: "),
            (["sinusoidal", "--channels=-1"], "channels: got [-1]; give 1 to 12 of them, each from 0 to 127"),
            (["learned", "--channels", "3,128"], "channels: got [3, 128]; give 1 to 12"),
            (["learned", "--table", "nowhere.npy"], "[Errno 2] No such file"),
        ],
    )
    def test_refusals(self, capsys, tmp_path, monkeypatch, arguments, message):
        monkeypatch.chdir(tmp_path)
        assert refused(capsys, "show", *arguments).startswith(message)
        assert not list(tmp_path.iterdir())

    def test_a_name_that_acts_on_a_terminal(self, capsys):
        assert "\x1b" not in refused(capsys, "show", f"./{HOSTILE}")
        assert "\x1b" not in refused(capsys, "show", "alibi", "--view", HOSTILE)


class TestInspect:
    """The picture and the page stand beside the text, and their names are told by whoever asked."""

    def test_both(self, capsys, model, tmp_path):
        plain = run(capsys, "inspect", model)
        picture, page = tmp_path / "a" / "p.png", tmp_path / "a" / "p.html"
        assert run(capsys, "inspect", model, "--picture", picture, "--html", page) == plain
        assert {path.name for path in (tmp_path / "a").iterdir()} == {"p.png", "p.html"}
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert page.read_text("utf-8").startswith("<!DOCTYPE html>")

    def test_json_stays_json(self, capsys, model, tmp_path):
        lines = run(capsys, "inspect", model, "--json", "--html", tmp_path / "p.html")
        assert json.loads(lines[0])["model_type"] == "llama"

    @pytest.mark.parametrize(("flag", "ends"), [("--picture", ".png, .svg, .pdf"), ("--html", ".html or .htm")])
    def test_no_other_file_is_written_over(self, capsys, model, flag, ends):
        before = model.read_bytes()
        assert refused(capsys, "inspect", model, flag, model).endswith(f"the name must end in {ends}")
        assert model.read_bytes() == before

    def test_nothing_to_draw(self, capsys, tmp_path):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"model_type": "gpt2", "n_layer": 2, "n_positions": 64}))
        message = refused(capsys, "inspect", path, "--picture", tmp_path / "p.png")
        assert "has learned absolute positions, which are in its weights" in message
        assert [one.name for one in tmp_path.iterdir()] == ["config.json"]

    def test_a_folder_that_cannot_be_made(self, capsys, model):
        assert "config.json" in refused(capsys, "inspect", model, "--html", model / "p.html")

    def test_neither_torch_nor_matplotlib_without_the_flags_and_no_torch_with_them(self, model, tmp_path):
        code = (
            "import sys\nfrom theodolite.cli import main\nmain(sys.argv[1:])\n"
            "print([name for name in ('torch', 'matplotlib', 'jinja2') if name in sys.modules])"
        )
        for flags, wanted in (
            ([], "[]"),
            (["--picture", str(tmp_path / "p.png"), "--html", str(tmp_path / "p.html")], "['matplotlib', 'jinja2']"),
        ):
            command = [sys.executable, "-c", code, "inspect", str(model), *flags]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
            assert done.stdout.splitlines()[-1] == wanted
