"""`theodolite check`: one line a check, one object for programs, an exit status for scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import planted
from tests.models.conftest import calm  # noqa: F401
from theodolite.cli import main
from theodolite.conformance.verdict import Verdict
from theodolite.report.verdicts import lines, summary


def check(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """The exit status and what is printed; nothing goes to the standard error."""
    capsys.readouterr()
    status = main(["check", *map(str, arguments)])
    printed = capsys.readouterr()
    assert printed.err == ""
    return status, printed.out


class TestPrinted:
    """A person reads it, a script reads the status."""

    def test_a_correct_model(self, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
        status, printed = check(capsys, tiny_llama)
        assert status == 0
        assert printed.startswith("tiny-llama\nllama, 2 layers, rotary positions, stated length 512 tokens")
        for name in ("tables", "rotation", "left padding", "packing", "decode"):
            assert f"pass  {name}" in printed
        assert "note  cast and back" in printed
        assert "cause: a cast rounds the buffers of LlamaRotaryEmbedding" in printed
        assert printed.endswith("2 noted, 13 passed, 2 skipped\n")

    def test_without_rotary_positions(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        planted.gpt2().save_pretrained(tmp_path / "mine")
        status, printed = check(capsys, tmp_path / "mine")
        assert status == 0
        assert "learned absolute" in printed
        assert "note  left padding" in printed

    def test_a_fault(
        self, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from transformers.models.llama import modeling_llama

        monkeypatch.setattr(
            modeling_llama, "apply_rotary_pos_emb", planted.other_layout(modeling_llama.apply_rotary_pos_emb)
        )
        status, printed = check(capsys, tiny_llama)
        assert status == 1
        assert "fail  rotation" in printed
        assert "see: huggingface/candle#3948" in printed


class TestJson:
    """One object, and numbers that JSON has."""

    def test_object(self, tiny_gemma3: Path, capsys: pytest.CaptureFixture[str]) -> None:
        status, printed = check(capsys, tiny_gemma3, "--json", "--dtype", "float64")
        found: dict[str, Any] = json.loads(printed)
        assert status == 0
        assert found["passed"] is True
        assert found["dtype"] == "float64"
        assert found["model_type"] == "gemma3_text"
        assert {verdict["outcome"] for verdict in found["verdicts"]} == {"pass", "note", "skip"}
        lost = next(verdict for verdict in found["verdicts"] if verdict["name"] == "meta init")
        assert lost["deviation"] == "inf"


class TestRefused:
    """Bad input is one line, and status 2."""

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["./nowhere"], "does not exist"),
            (["{folder}"], "is a folder without config.json"),
            (["{model}", "--dtype", "int8"], "dtype: got 'int8'"),
            (["{model}", "--device", "nothing"], "device: got 'nothing'"),
            (["{model}", "--device", "meta"], "meta"),
        ],
    )
    def test_one_line(
        self, arguments: list[str], words: str, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        given = [one.format(folder=tmp_path, model=tiny_llama) for one in arguments]
        capsys.readouterr()
        assert main(["check", *given]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        assert printed.err.startswith("theodolite check: ")
        assert words in printed.err

    def test_a_model_of_too_few_positions(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        short = planted.other("GPT2Config", n_layer=2, n_head=4, n_embd=64, n_positions=40)
        short.save_pretrained(tmp_path / "short")
        capsys.readouterr()
        assert main(["check", str(tmp_path / "short")]) == 2
        printed = capsys.readouterr()
        assert printed.err.count("\n") == 1
        assert "it states 40 tokens, and 48 are needed" in printed.err


class TestLines:
    """What a stranger's file says does nothing to a terminal, and a narrow one cuts nothing."""

    def test_control_characters(self) -> None:
        verdict = Verdict(
            name="tables", outcome="fail", message="a\x1b[2Jb\nc", cause="d\x07", reference="owner/repo#1"
        )
        printed = "\n".join(lines(verdict, 60))
        assert not set("\x1b\x07") & set(printed)
        assert "see: owner/repo#1" in printed

    def test_width(self) -> None:
        verdict = Verdict(
            name="decode", outcome="fail", message="word " * 40, deviation=0.5, tolerance=1e-5, starts_at=1234
        )
        printed = lines(verdict, 70)
        assert max(map(len, printed)) <= 70
        assert "measured: 0.5, where rounding costs up to 1e-05;" in " ".join(" ".join(printed).split())
        assert "from position 1,234" in " ".join(" ".join(printed).split())

    def test_summary(self) -> None:
        verdicts = [Verdict(name="a", outcome=outcome, message="") for outcome in ("pass", "fail", "pass", "skip")]
        assert summary(verdicts) == "1 failed, 2 passed, 1 skipped"
