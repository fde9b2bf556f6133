"""The command line on tiny models: what it leaves on disk, and that kills cost nothing that was finished."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from theodolite.report import schema
from theodolite.runs import Store

OPTIONS = ("--dtype", "float32", "--scaling", "none,linear,dynamic,yarn", "--passes", "2", "--passkey")
SCALINGS = ["none", "linear", "dynamic", "yarn"]


def lines(folder: Path) -> list[dict[str, Any]]:
    with (folder / "results.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="session")
def uninterrupted(theodolite, tiny_llama, tmp_path_factory) -> Path:
    """The folder of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole")
    status, printed = theodolite("survey", tiny_llama, *OPTIONS, "--out", out)
    assert status == 0, printed
    return out


class TestWhatIsLeft:
    """Numbers, a page and pictures, of a model that no one has tuned the survey to."""

    @pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma3"])
    def test_files(self, family, request, tmp_path):
        model, out = request.getfixturevalue(family), tmp_path / "out"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "theodolite", "survey", str(model), *OPTIONS, "--out", str(out)],
            capture_output=True,
            text=True,
            env=environment,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        schema.validate(summary)
        jsonschema.validate(summary, schema.load())
        assert summary["model"] == model.name
        assert [s["name"] for s in summary["scalings"]] == SCALINGS
        assert {len(s["recall"]) for s in summary["scalings"]} == {0, 18}
        entries = lines(out)
        assert all({"key", "cell", "result", "what", "seconds"} <= set(entry) for entry in entries)
        assert len({entry["key"] for entry in entries}) == len(entries)
        page = (out / "report.html").read_text(encoding="utf-8")
        assert page.lower().startswith("<!doctype html>")
        assert model.name in page
        pictures = sorted(out.glob("*.png"))
        assert len(pictures) >= 4
        assert all(picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") for picture in pictures)
        assert [path.name for path in out.iterdir() if path.name.startswith(".")] == [".lock"]
        for word in (model.name, "surveying to 768 tokens", "reach  linear", "pass   none", "report.html"):
            assert word in done.stdout


class TestKilled:
    """`kill -9` at any moment: the same command goes on, measures no finished cell again, and ends the same."""

    @pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9, 1.0])
    def test_once(self, theodolite, tiny_llama, uninterrupted, tmp_path, share):
        whole = lines(uninterrupted)
        after = max(1, round(share * len(whole)))
        status, _ = theodolite("survey", tiny_llama, *OPTIONS, "--out", tmp_path, kill_after=after)
        assert status == -signal.SIGKILL
        before = (tmp_path / "results.jsonl").read_bytes()
        assert before.count(b"\n") == after
        assert not (tmp_path / "summary.json").exists()
        status, printed = theodolite("survey", tiny_llama, *OPTIONS, "--out", tmp_path)
        assert status == 0, printed
        assert (tmp_path / "results.jsonl").read_bytes().startswith(before)
        assert [entry["key"] for entry in lines(tmp_path)] == [entry["key"] for entry in whole]
        assert (tmp_path / "summary.json").read_bytes() == (uninterrupted / "summary.json").read_bytes()

    def test_again_and_again(self, theodolite, tiny_llama, uninterrupted, tmp_path):
        whole = len(lines(uninterrupted))
        step = -(-whole // 4)
        statuses = []
        for _ in range(6):
            status, _ = theodolite("survey", tiny_llama, *OPTIONS, "--out", tmp_path, kill_after=step)
            statuses.append(status)
            if status == 0:
                break
        assert statuses == [-signal.SIGKILL] * (whole // step) + [0]
        assert len(lines(tmp_path)) == len({entry["key"] for entry in lines(tmp_path)}) == whole
        assert (tmp_path / "summary.json").read_bytes() == (uninterrupted / "summary.json").read_bytes()


class TestAgain:
    """A folder belongs to one run at a time, and what is in it is not measured again."""

    def test_the_same_command_measures_nothing(self, theodolite, tiny_llama, uninterrupted):
        files = {name: (uninterrupted / name).read_bytes() for name in ("results.jsonl", "summary.json")}
        status, printed = theodolite("survey", tiny_llama, *OPTIONS, "--out", uninterrupted)
        assert status == 0, printed
        assert {name: (uninterrupted / name).read_bytes() for name in files} == files

    def test_a_second_process_is_refused(self, theodolite, tiny_llama, tmp_path):
        with Store(tmp_path):
            status, printed = theodolite("survey", tiny_llama, *OPTIONS, "--out", tmp_path)
        assert status == 2
        assert f"theodolite survey: {tmp_path}: another run is writing here; wait for it or choose" in printed
        assert "Traceback" not in printed
        assert not (tmp_path / "results.jsonl").exists()
