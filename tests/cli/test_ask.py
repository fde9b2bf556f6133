"""`theodolite ask` on a tiny model: what it prints, what it keeps, what it refuses."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.ask.pdfs import pdf
from theodolite.ask.documents import read_document
from theodolite.ask.session import Session
from theodolite.models import load
from theodolite.survey.texts import builtin_text

from .conftest import ROOT, Theodolite

QUESTION = "Who is Ishmael?"
COMMON = ("--device", "cpu", "--dtype", "float32", "--max-tokens", 12)


@pytest.fixture
def short(tmp_path: Path) -> Path:
    path = tmp_path / "moby.txt"
    path.write_text(builtin_text("moby-dick")[3000:3700], encoding="utf-8")
    return path


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """More than the 512 tokens that the model was trained on."""
    path = tmp_path / "long.txt"
    path.write_text(builtin_text("moby-dick")[3000:6000], encoding="utf-8")
    return path


def short_of(path: Path, characters: int) -> Path:
    made = path.with_name("short.txt")
    made.write_text(path.read_text(encoding="utf-8")[:characters], encoding="utf-8")
    return made


def process(*arguments: object, text: str = "", **options: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "theodolite", "ask", *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="surrogateescape",
        # A shell that runs the tests in the background lets them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


class TestAnswers:
    """The answer, its passages and what was read, as `Session` has them."""

    def test_json(self, theodolite: Theodolite, tiny_llama: Path, short: Path) -> None:
        status, printed = theodolite("ask", short, QUESTION, "--model", tiny_llama, *COMMON, "--json")
        assert status == 0, printed
        found = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
        loaded = load(str(tiny_llama), dtype=torch.float32, device="cpu")
        document = read_document(short)
        with Session(loaded, [document], room=600) as session:
            true = session.answer(QUESTION, count=12)
            tokens = session.document_tokens
        assert found == {
            "model": "tiny-llama",
            "documents": ["moby.txt"],
            "tokens": tokens,
            "scaling": "none",
            "why": "as shipped: within the 512 of training",
            "question": QUESTION,
            "answer": true.text,
            "passages": [vars(passage) for passage in true.passages],
        }
        assert len(found["passages"]) == 3
        assert "tokens, moby.txt and what is asked of it" in printed

    def test_text(self, theodolite: Theodolite, tiny_llama: Path, short: Path) -> None:
        status, printed = theodolite("ask", short, QUESTION, "--model", tiny_llama, *COMMON, "--passages", 1)
        assert status == 0, printed
        assert "Most attended to:\n  1. moby.txt, line" in printed
        assert "reading as shipped: within the 512 of training" in printed

    def test_longer_than_trained(
        self, theodolite: Theodolite, tiny_llama: Path, long: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        status, printed = theodolite("ask", long, QUESTION, "--model", tiny_llama, *COMMON, "--scaling", "yarn:4")
        assert status == 0, printed
        assert "reading yarn:4, as asked" in printed
        # A long answer is no reason to scale what is short.
        tiny = short_of(long, 300)
        status, printed = theodolite("ask", tiny, QUESTION, "--model", tiny_llama, *COMMON[:4], "--max-tokens", 600)
        assert status == 0, printed
        assert "tokens are too few to try scalings on" in printed
        status, printed = theodolite("ask", long, QUESTION, "--model", tiny_llama, *COMMON)
        assert status == 0, printed
        assert "longer than the 512 tokens of training" in printed
        assert "copied from all over this text" in printed

    def test_by_a_survey(self, theodolite: Theodolite, tiny_llama: Path, long: Path, tmp_path: Path) -> None:
        folder = tmp_path / "found"
        book = tmp_path / "book.txt"
        book.write_text(builtin_text("moby-dick")[:40_000], encoding="utf-8")
        given = ("--device", "cpu", "--dtype", "float32", "--out", folder, "--to", 2048, "--passes", 1, "--no-far")
        status, printed = theodolite("survey", tiny_llama, "--text", book, *given, "--scaling", "none,yarn:4")
        assert status == 0, printed
        status, printed = theodolite("ask", long, QUESTION, "--model", tiny_llama, *COMMON, "--survey", folder)
        assert status == 0, printed
        assert "holds, by the survey to 2,048: as shipped" in printed

    def test_nothing_reaches_the_terminal(self, theodolite: Theodolite, tiny_llama: Path, tmp_path: Path) -> None:
        path = tmp_path / "hostile.txt"
        path.write_text("\x1b]0;owned\x07\x1b[2J Ishmael \u202e goes to sea.", encoding="utf-8")
        status, printed = theodolite("ask", path, QUESTION, "--model", tiny_llama, *COMMON)
        assert status == 0, printed
        assert "Ishmael" in printed
        assert not set(printed) & set("\x1b\x07\u202e")

    def test_names_that_are_alike(self, theodolite: Theodolite, tiny_llama: Path, short: Path, tmp_path: Path) -> None:
        other = tmp_path / "b" / "moby.txt"
        other.parent.mkdir()
        other.write_text("Another text.", encoding="utf-8")
        status, printed = theodolite("ask", short, other, QUESTION, "--model", tiny_llama, *COMMON, "--json")
        assert status == 0, printed
        found = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
        assert found["documents"] == [str(short), str(other)]

    def test_a_question_longer_than_a_name_can_be(self, theodolite: Theodolite, tiny_llama: Path, short: Path) -> None:
        status, printed = theodolite("ask", short, "why " * 80, "--model", tiny_llama, *COMMON)
        assert status == 0, printed

    def test_several_documents(self, theodolite: Theodolite, tiny_llama: Path, short: Path, tmp_path: Path) -> None:
        page = tmp_path / "page.html"
        page.write_text("<h1>Whales</h1><p>A whale is a spouting fish with a horizontal tail.</p>", encoding="utf-8")
        status, printed = theodolite("ask", short, page, QUESTION, "--model", tiny_llama, *COMMON, "--json")
        assert status == 0, printed
        found = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
        assert found["documents"] == ["moby.txt", "page.html"]


class TestKept:
    """--save-cache: nothing is read twice, and nothing is taken for what it is not."""

    def test_read_once(self, theodolite: Theodolite, tiny_llama: Path, short: Path, tmp_path: Path) -> None:
        kept = tmp_path / "kept"
        asked = ("ask", short, QUESTION, "--model", tiny_llama, *COMMON, "--save-cache", kept)
        status, first = theodolite(*asked)
        assert status == 0, first
        status, second = theodolite(*asked)
        assert status == 0, second
        assert "tokens were read before" in second
        assert "... reading" not in second
        assert first.split("Most attended")[1] == second.split("Most attended")[1]

    def test_another_text(self, theodolite: Theodolite, tiny_llama: Path, short: Path, tmp_path: Path) -> None:
        kept = tmp_path / "kept"
        status, printed = theodolite("ask", short, QUESTION, "--model", tiny_llama, *COMMON, "--save-cache", kept)
        assert status == 0, printed
        before = kept.read_bytes()
        short.write_text(short.read_text(encoding="utf-8") + "And so on.", encoding="utf-8")
        status, printed = theodolite("ask", short, QUESTION, "--model", tiny_llama, *COMMON, "--save-cache", kept)
        assert status == 2
        assert f"{kept}: it is of another text" in printed
        assert kept.read_bytes() == before

    def test_frequencies_that_follow_the_length(
        self, theodolite: Theodolite, tiny_llama: Path, long: Path, tmp_path: Path
    ) -> None:
        kept = tmp_path / "kept"
        asked = ("ask", long, "--model", tiny_llama, *COMMON, "--scaling", "dynamic", "--save-cache", kept)
        status, printed = theodolite(*asked[:2], "Who is Ishmael, and where does he go?", *asked[2:])
        assert status == 0, printed
        status, printed = theodolite(*asked[:2], QUESTION, *asked[2:])
        assert status == 0, printed
        assert "tokens were read before" in printed

    def test_through_a_link(self, theodolite: Theodolite, tiny_llama: Path, short: Path, tmp_path: Path) -> None:
        link = tmp_path / "link"
        link.symlink_to(tmp_path / "kept")
        status, printed = theodolite("ask", short, QUESTION, "--model", tiny_llama, *COMMON, "--save-cache", link)
        assert status == 0, printed
        assert link.is_symlink()
        assert (tmp_path / "kept").is_file()

    def test_a_full_disk_costs_no_answer(self, tiny_llama: Path, short: Path, tmp_path: Path) -> None:
        limit = f"ulimit -f 20; exec {sys.executable} -m theodolite ask "
        asked = [short, QUESTION, "--model", tiny_llama, *COMMON, "--json", "--save-cache", tmp_path / "kept"]
        done = subprocess.run(
            ["bash", "-c", limit + shlex.join(map(str, asked))],
            cwd=ROOT, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["question"] == QUESTION
        assert "not kept: " in done.stderr
        assert not list(tmp_path.glob("*kept*"))


class TestChat:
    """Questions by the line; the documents are read once."""

    def test_questions(self, tiny_llama: Path, short: Path) -> None:
        with process(short, QUESTION, "--chat", "--model", tiny_llama, *COMMON, "--json") as chat:
            asked = f"Where does he go?\nok?\udcff\n{'why ' * 2000}\nAgain?\n\nNever asked.\n"
            out, told = chat.communicate(asked, timeout=120)
        assert chat.returncode == 0, told
        found = [json.loads(line)["question"] for line in out.splitlines()]
        assert found == [QUESTION, "Where does he go?", "ok?\ufffd", "Again?"]
        assert "this question is too long" in told
        assert told.count("... reading") == 1

    def test_interrupted(self, tiny_llama: Path, short: Path, tmp_path: Path) -> None:
        kept = tmp_path / "kept"
        with process(short, "--chat", "--model", tiny_llama, *COMMON, "--save-cache", kept) as chat:
            assert chat.stderr is not None
            told = ""
            while "read 3" not in told and "read 2" not in told:
                line = chat.stderr.readline()
                assert line, told
                told += line
            time.sleep(0.5)
            chat.send_signal(signal.SIGINT)
            chat.communicate(timeout=60)
        assert chat.returncode == 130
        assert kept.is_file()


class TestRefusals:
    """What cannot be asked is one line that says what to do, before a model is loaded."""

    def test_said(self, theodolite: Theodolite, short: Path, tmp_path: Path) -> None:
        latin, scan = tmp_path / "latin.txt", tmp_path / "scan.pdf"
        latin.write_bytes("Für Élise".encode("latin-1"))
        scan.write_bytes(pdf([""]))
        for arguments, words in (
            ([QUESTION], f"documents: got the question '{QUESTION}' and no document to ask about"),
            ([short], "the last word is the question, and"),
            ([short, short], "the last word is the question, and"),
            ([tmp_path / "none.txt", QUESTION], "none.txt"),
            ([tmp_path, QUESTION], "is a folder"),
            ([latin, QUESTION], "encoding"),
            ([scan, QUESTION], "OCR"),
            ([short, QUESTION, "--max-tokens", 0], "max-tokens: got 0"),
            ([short, QUESTION, "--passages", -1], "passages: got -1"),
            ([short, QUESTION, "--temperature", "nan"], "temperature: got nan"),
            ([short, QUESTION, "--model", tmp_path / "nothing"], "does not exist"),
            ([short, "  "], "question: it is empty"),
            ([short, ""], "question: it is empty"),
            ([short, "moby-dick"], "the last word is the question, and"),
            ([short, QUESTION, "--save-cache", tmp_path / "no" / "folder"], "is no file in a folder that exists"),
            ([short, QUESTION, "--save-cache", tmp_path], "is no file in a folder that exists"),
            ([short, QUESTION, "--temperature", "1e-40"], "temperature: got 1e-40"),
            ([short, QUESTION, "--seed", 10**20], "seed: got"),
            ([short, QUESTION, "--scaling", "yarrn"], "scaling: got 'yarrn'"),
        ):
            status, printed = theodolite("ask", *arguments)
            assert status == 2, (arguments, printed)
            lines = [line for line in printed.splitlines() if line.startswith("theodolite ask: ")]
            assert len(lines) == 1, printed
            assert words in lines[0], printed
            assert "Traceback" not in printed
            assert "loading" not in printed
