"""`theodolite compare` as it is typed: the main job on real text, killed and gone on, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.compare.conftest import own_accelerator  # noqa: F401
from theodolite.cli.main import main

TINY = ["--hidden", "16", "--layers", "1", "--heads", "2", "--length", "16", "--rows", "4", "--steps", "8"]
TINY += ["--test-rows", "4", "--device", "cpu"]


def command(out: Path, *more: str) -> list[str]:
    return ["compare", *TINY, "-o", str(out), *more]


class TestRuns:
    def test_writes_its_result_its_page_and_its_picture(self, tmp_path, capsys):
        assert main(command(tmp_path / "out", "--quick", "--fine-tune", "2")) == 0
        said = capsys.readouterr().out
        result = json.loads((tmp_path / "out" / "compare.json").read_text())
        assert result["policies"] == ["sinusoidal", "rope", "t5", "alibi"]
        assert result["seeds"] == [0, 1, 2]
        assert result["lengths"] == [16, 32, 64, 128]
        assert {e["scaling"] for e in result["extension"]} == {"none", "linear", "ntk", "yarn"}
        for name in ("compare.json", "compare.html", "compare.png"):
            assert (tmp_path / "out" / name).stat().st_size
            assert name in said
        assert "At the training length, 16 tokens," in said

    def test_a_task(self, tmp_path, capsys):
        out = tmp_path / "out"
        assert main(command(out, "--task", "copy:symbols=4", "--policies", "nope", "rope+logn", "--seeds", "1")) == 0
        result = json.loads((out / "compare.json").read_text())
        assert result["data"]["name"] == "copy:symbols=4"
        assert "With 1 seed nothing is claimed" in capsys.readouterr().out

    def test_a_killed_run_goes_on(self, tmp_path):
        arguments = ["--policies", "rope", "alibi", "nope", "--scaling", "", "--fine-tune", "0", "--steps", "40"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        program = [sys.executable, "-m", "theodolite"]
        whole = [*program, *command(tmp_path / "whole", *arguments)]
        subprocess.run(whole, check=True, timeout=240, env=environment, capture_output=True)
        killed = 0
        for _ in range(30):
            process = subprocess.Popen(
                [*program, *command(tmp_path / "killed", *arguments)],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stored = _lines(tmp_path / "killed")
            while process.poll() is None and _lines(tmp_path / "killed") < stored + 4:
                time.sleep(0.01)
            if process.poll() is not None:
                break
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
        assert killed >= 2
        assert process.returncode == 0
        first, second = (json.loads((tmp_path / name / "compare.json").read_text()) for name in ("whole", "killed"))
        for cell in (*first["cells"], *second["cells"]):
            del cell["tokens_per_second"], cell["seconds"]
        assert first == second


def _lines(folder: Path) -> int:
    path = folder / "results.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


class TestRefuses:
    """One sentence each, exit status 2, before anything is trained."""

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (["--policies", "rpoe"], "no part is named 'rpoe'"),
            (["--policies", "rope", "rope:theta=1e4"], "rope stands twice"),
            (["--task", "cpoy"], "no task is named 'cpoy'"),
            (["--task", "copy", "--text", "moby-dick"], "give a task or --text"),
            (["--task", "copy", "--policies", "learned"], "no positions past 16"),
            (["--text", "nothing.txt"], "no file 'nothing.txt'"),
            (["--tokens", "words"], "bytes, bpe:4096"),
            (["--times", "1,x"], "--times"),
            (["--times", "2,4"], "ascending from 1"),
            (["--seeds", "0"], "--seeds"),
            (["--test-rows", "100000"], "rows of 128 tokens are needed"),
            (["--hidden", "17"], "hidden_size"),
            (["--lr", "nan"], "lr"),
            (["--scaling", "fancy"], "fancy"),
            (["--device", "cuda"], "device"),
        ],
    )
    def test_in_one_sentence(self, tmp_path, capsys, given, said):
        assert main(command(tmp_path / "out", *given)) == 2
        error = capsys.readouterr().err
        assert error.startswith("theodolite compare: ")
        assert said in error
        assert error.count("\n") == 1
        assert not (tmp_path / "out").exists()

    def test_a_file_in_the_place_of_results(self, tmp_path, capsys):
        (tmp_path / "out").write_text("")
        assert main(command(tmp_path / "out")) == 2
        assert "is a file; give a folder" in capsys.readouterr().err
