"""`theodolite convert layout` as it is run: what moves, what is said about it, and refusals in one line."""

from __future__ import annotations

import json
import os
import signal

import pytest
from safetensors.torch import save_file

from tests.models.test_detect import paired, write
from theodolite.cli import main


class TestConvert:
    """A round trip by the command line gives the same bytes, and a second conversion is refused."""

    def test_there_and_back(self, theodolite, tmp_path):
        one, two, three = (tmp_path / f"{name}.safetensors" for name in ("one", "two", "three"))
        q, k = paired("halves")
        write(one, [q] * 2, [k] * 2)
        status, printed = theodolite("convert", "layout", one, two, "--to", "interleaved", "--head-dim", 16)
        assert status == 0
        assert f"{two} is interleaved; {one} is halves: its weights show it" in printed
        assert "4 tensors have rows moved" in printed
        status, printed = theodolite("convert", "layout", two, three, "--to", "half", "--head-dim", 16)
        assert status == 0
        assert three.read_bytes() == one.read_bytes() != two.read_bytes()
        status, printed = theodolite("convert", "layout", two, tmp_path / "x.safetensors", "--to", "interleaved",
                                     "--head-dim", 16)  # fmt: skip
        assert status == 2
        assert printed.startswith(f"theodolite convert: {two} is interleaved already: its weights show it.")
        assert len(printed.splitlines()) == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "one.safetensors", "three.safetensors", "two.safetensors",
        ]  # fmt: skip

    def test_dry_run_lists_all(self, theodolite, tmp_path):
        q, k = paired("halves")
        write(tmp_path / "in.safetensors", [q] * 5, [k] * 5)
        asked = ("convert", "layout", tmp_path / "in.safetensors", tmp_path / "out.safetensors", "--to", "interleaved",
                 "--head-dim", 16, "--dry-run")  # fmt: skip
        status, printed = theodolite(*asked)
        assert status == 0
        assert printed.count("_proj.weight (") == 10
        status, printed = theodolite(*asked, "--json")
        told = json.loads(printed)
        assert (told["written"], told["to"], told["source_layout"], len(told["moved"])) == (
            False, "interleaved", "halves", 10,
        )  # fmt: skip
        assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]

    def test_the_caller_knows_better(self, theodolite, tmp_path):
        q, k = paired("halves")
        write(tmp_path / "in.safetensors", [q] * 2, [k] * 2)
        asked = ("convert", "layout", tmp_path / "in.safetensors", tmp_path / "out.safetensors", "--to", "halves",
                 "--head-dim", 16)  # fmt: skip
        assert theodolite(*asked)[0] == 2
        status, printed = theodolite(*asked, "--from", "interleaved")
        assert status == 0
        assert "you said so" in printed

    def test_bad_input(self, theodolite, tmp_path):
        import torch

        save_file({"x": torch.zeros(2)}, tmp_path / "in.safetensors")
        asked = ("convert", "layout", tmp_path / "in.safetensors", tmp_path / "out.safetensors", "--to", "halves")
        status, printed = theodolite(*asked)
        assert status == 2
        assert "has no config.json or params.json" in printed
        status, printed = theodolite(*asked, "--head-dim", 16)
        assert status == 2
        assert len(printed.splitlines()) == 1

    def test_a_gguf_file_is_called_one(self, theodolite, tmp_path):
        (tmp_path / "in.gguf").write_bytes(b"GGUF\x03\0\0\0")
        status, printed = theodolite("convert", "layout", tmp_path / "in.gguf", tmp_path / "out", "--to", "half")
        assert status == 2
        assert printed.startswith(f"theodolite convert: {tmp_path / 'in.gguf'} is a GGUF file, which is not read here")
        assert len(printed.splitlines()) == 1


class TestTerminated:
    """Whoever ends the command finds nothing half written, whatever the signal that asks for it politely."""

    def test_nothing_lies_about(self, tmp_path, monkeypatch):
        q, k = paired("halves")
        write(tmp_path / "in.safetensors", [q] * 2, [k] * 2)
        before = signal.getsignal(signal.SIGTERM)
        monkeypatch.setattr("theodolite.models.rewritten._moved", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        words = (tmp_path / "in.safetensors", tmp_path / "out.safetensors", "--to", "interleaved", "--head-dim", "16")
        with pytest.raises(SystemExit) as ended:
            main(["convert", "layout", *map(str, words)])
        assert ended.value.code == 143
        assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]
        assert signal.getsignal(signal.SIGTERM) is before
