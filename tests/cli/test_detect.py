"""`theodolite detect` as it is run: the answer, each layer's, JSON, and one line for what is wrong."""

from __future__ import annotations

import json

import numpy as np

from tests.models.test_detect import paired, write


class TestDetect:
    """The answer stands in the first line, and in JSON under `layout`."""

    def test_answers(self, theodolite, tmp_path):
        file = tmp_path / "x.safetensors"
        q, k = paired("interleaved")
        write(file, [q] * 2, [k] * 2)
        status, printed = theodolite("detect", file, "--head-dim", 16, "-v")
        lines = printed.splitlines()
        assert status == 0
        assert lines[0] == f"{file}: interleaved"
        assert lines[2] == "  2 of 2 layers say so on their own"
        assert [line.split()[0] for line in lines[-2:]] == ["0", "1"]
        status, printed = theodolite("detect", file, "--head-dim", 16, "--json")
        found = json.loads(printed)
        assert (status, found["layout"], found["layers_agreeing"], len(found["layers"])) == (0, "interleaved", 2, 2)
        assert found["confidence"] > 0.9999

    def test_cannot_tell_is_an_answer(self, theodolite, tmp_path):
        generator = np.random.default_rng(0)
        write(tmp_path / "x.safetensors", [generator.normal(size=(4, 16, 8))], [generator.normal(size=(2, 16, 8))])
        status, printed = theodolite("detect", tmp_path / "x.safetensors", "--head-dim", 16)
        assert status == 0
        assert printed.splitlines()[0].endswith(": cannot tell")
        status, printed = theodolite("detect", tmp_path / "x.safetensors", "--head-dim", 16, "--json")
        assert (json.loads(printed)["layout"], json.loads(printed)["confidence"]) == (None, 0.0)

    def test_names_are_escaped(self, theodolite, tmp_path):
        name = "model.layers.0.self_attn.\x1b[31m"
        write(tmp_path / "x.safetensors", *([x] for x in paired("halves")), prefix=name + "{}")
        status, printed = theodolite("detect", tmp_path / "x.safetensors", "--head-dim", 24)
        assert status == 2
        assert printed.startswith("theodolite detect: model.layers.0.self_attn.\N{REPLACEMENT CHARACTER}[31m0.k_proj")
        assert "\x1b" not in printed
        assert len(printed.splitlines()) == 1

    def test_missing(self, theodolite, tmp_path):
        status, printed = theodolite("detect", tmp_path / "none")
        assert (status, printed) == (2, f"theodolite detect: {tmp_path / 'none'} does not exist\n")
