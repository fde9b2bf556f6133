"""What cannot be done is one sentence on the terminal and exit status 2, never a traceback."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from theodolite.cli import loading, main, survey

NO_ROTARY = {
    "bert": ("BertConfig", "BertLMHeadModel", "learned absolute positions, 512 rows"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", "learned absolute positions, 1,024 rows"),
    "t5": ("T5Config", "T5ForConditionalGeneration", "T5"),
    "bloom": ("BloomConfig", "BloomForCausalLM", "ALiBi"),
}
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "d_ff": 32,
    "d_kv": 16,
}
# An interpreter in which a package is not installed.
WITHOUT = """
import sys
from importlib.machinery import PathFinder
missing = sys.argv.pop(1)
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] == missing else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Without
from theodolite.cli import main
sys.exit(main(sys.argv[1:]))
"""


def refused(result: tuple[int, str]) -> str:
    """The one line of a refusal."""
    status, printed = result
    assert status == 2, printed
    assert "Traceback" not in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("theodolite survey: ")]
    return line.removeprefix("theodolite survey: ")


class TestModels:
    """A model that cannot be surveyed is told from its files, before its weights are read."""

    @pytest.mark.parametrize("family", NO_ROTARY)
    def test_without_rotary_positions(self, theodolite, tmp_path, family):
        config, model, instead = NO_ROTARY[family]
        made = getattr(transformers, config)(**SMALL, is_decoder=family == "bert")
        getattr(transformers, model)(made).save_pretrained(tmp_path)
        line = refused(theodolite("survey", tmp_path, "--out", tmp_path / "out"))
        assert line.startswith(f"{family} has no rotary positions; it has ")
        assert instead in line
        assert not (tmp_path / "out").exists()

    def test_only_a_pickle(self, theodolite, tiny_llama, tmp_path):
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((tiny_llama / name).read_bytes())
        torch.save({}, tmp_path / "pytorch_model.bin")
        line = refused(theodolite("survey", tmp_path, "--out", tmp_path / "out"))
        assert "has only pytorch_model.bin, which is a pickle and never opened" in line

    def test_larger_than_the_memory(self, theodolite, tiny_llama, tmp_path):
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((tiny_llama / name).read_bytes())
        # Only the header is read: 2 TiB of bfloat16 that are not there.
        shape = [2**20, 2**20]
        header = json.dumps({"big": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 2**41]}}).encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        line = refused(theodolite("survey", tmp_path, "--out", tmp_path / "out"))
        assert line.startswith(f"Loading {tmp_path.name} needs 2048.0 GiB and ")
        assert line.endswith("GiB are free on cpu; take a smaller model, or another machine")


class TestArguments:
    """An argument that means nothing is repeated with what is allowed."""

    def test_a_length_beyond_the_memory(self, theodolite, tiny_llama, tmp_path, monkeypatch):
        line = refused(theodolite("survey", tiny_llama, "--out", tmp_path, "--to", "16777k"))
        assert line.startswith("to: got 17179648; positions end at 16777216")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--text", "/nowhere/a.txt"), "text: no file '/nowhere/a.txt'; give a UTF-8 text file"),
            (("--scaling", "roap"), "scaling: got 'roap'; allowed: none, linear"),
            (("--to", "12"), "to: got 12; at least 352 tokens"),
            (("--dtype", "int8"), "dtype: got 'int8'; allowed: 'auto'"),
            (("--device", "abacus"), "device: got 'abacus', which cannot be used here (Expected one of cpu, cuda"),
            (("--passes", "-1"), "passes: got -1"),
        ],
    )
    def test_one_line(self, theodolite, tiny_llama, tmp_path, arguments, message):
        assert refused(theodolite("survey", tiny_llama, "--out", tmp_path / "out", *arguments)).startswith(message)

    def test_a_text_that_is_too_short(self, theodolite, tiny_llama, tmp_path):
        (tmp_path / "a.txt").write_text("Call me Ishmael. " * 10)
        line = refused(theodolite("survey", tiny_llama, "--text", tmp_path / "a.txt", "--out", tmp_path / "out"))
        assert line.startswith("text: 769 tokens are needed for this length, and a.txt has ")

    def test_a_file_where_the_folder_should_be(self, theodolite, tiny_llama, tmp_path):
        (tmp_path / "out").write_text("")
        assert "is a file; give a folder" in refused(theodolite("survey", tiny_llama, "--out", tmp_path / "out"))

    def test_a_store_that_is_none(self, theodolite, tiny_llama, tmp_path):
        (tmp_path / "results.jsonl").write_text("my notes\n")
        line = refused(theodolite("survey", tiny_llama, "--out", tmp_path))
        assert line.startswith(f"{tmp_path / 'results.jsonl'}: line 1 is not a result of a survey")
        assert (tmp_path / "results.jsonl").read_text() == "my notes\n"

    @pytest.mark.parametrize(("text", "number"), [("16384", 16384), ("16k", 16384), ("16,384", 16384), ("1_000", 1000)])
    def test_numbers_of_tokens(self, text, number):
        assert loading.tokens_argument(text) == number

    @pytest.mark.parametrize("text", ["", "k", "1.5k", "many", "-16k", "١٦k", "9" * 4400])
    def test_what_is_no_number_of_tokens(self, text):
        with pytest.raises(argparse.ArgumentTypeError, match="a number of tokens is 16384 or 16k"):
            loading.tokens_argument(text)


class TestInterrupted:
    """Ctrl-C is no error: it says how to go on."""

    def test_status_130(self, monkeypatch, capsys):
        def interrupt(options: object) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr(survey, "run", interrupt)
        assert main(["survey"]) == 130
        assert "the same command goes on from here" in capsys.readouterr().err

    def test_a_fault_of_the_program_is_not_hidden(self, monkeypatch):
        def fail(options: object) -> int:
            raise AttributeError("a fault")

        monkeypatch.setattr(survey, "run", fail)
        with pytest.raises(AttributeError, match="a fault"):
            main(["survey"])


class TestMissingExtras:
    """A package that is not there is named before anything is measured, with the command that installs it."""

    @pytest.mark.parametrize("package", ["transformers", "rich", "matplotlib", "jinja2", "psutil"])
    def test_what_to_install(self, tiny_llama: Path, tmp_path: Path, package: str) -> None:
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT, package, "survey", str(tiny_llama), "--out", str(tmp_path / "out")],
            capture_output=True,
            text=True,
            timeout=300,
        )
        line = refused((done.returncode, done.stderr))
        assert line.startswith(f"a survey needs {package} (No module named '{package}'")
        assert line.endswith("install it with: pip install 'theodolite[survey]'")
        assert not (tmp_path / "out").exists()
