"""Files that are small on the disk, or at the largest size that is read, and would take minutes or gigabytes."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import judge
from theodolite.models.safetensors_header import count_parameters

MIB = 2**20
HEADER = b"GGUF\3\0\0\0"
LAYERS: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 100_000, "hidden_size": 64, "num_attention_heads": 4,
    "max_position_embeddings": 8192, "rope_theta": 1e4,
}  # fmt: skip
BASES: dict[str, Any] = {
    "model_type": "granite_swa", "num_hidden_layers": 1000, "hidden_size": 4096, "num_attention_heads": 32,
    "max_position_embeddings": 8192, "attention_multiplier": 0.1, "layer_types": ["full_attention"] * 1000,
    "layer_rope_theta": [10_000 + i for i in range(1000)], "rope_theta": 1e4,
}  # fmt: skip


def key(kind: int, *rest: bytes) -> bytes:
    """A file of one key of that type."""
    return HEADER + struct.pack("<QQQ", 0, 1, 1) + b"a" + struct.pack("<I", kind) + b"".join(rest)


ZEROS = {
    "keys": (HEADER + struct.pack("<QQ", 0, 2**40), "more than 65,536 keys"),
    "some keys": (HEADER + struct.pack("<QQ", 0, 60_000), "the key '' is there twice"),
    "tensors": (HEADER + struct.pack("<QQ", 2**40, 0), "more than 131,072 tensors"),
    "some tensors": (HEADER + struct.pack("<QQ", 90_000, 0), "the tensor '' is there twice"),
    "strings": (key(9, struct.pack("<IQ", 8, 2**26)), "more than 4,194,304 strings in lists"),
    "lists": (key(9, struct.pack("<IQ", 9, 2**26)), "more than 65,536 lists in lists"),
    "numbers": (key(9, struct.pack("<IQ", 0, 2**29)), "general.architecture"),
    "text": (key(8, struct.pack("<Q", 2**29)), "more than 16,777,216 bytes of text"),
}


def cost(path: Path, *arguments: str) -> judge.Verdict:
    """What `inspect` does with a file, and that it costs no more than the judge allows."""
    verdict = judge.Verdict()
    before = judge._settle_memory()
    judge._inspect(verdict, path, *arguments)
    assert judge._status("VmHWM") - before < judge.MOST_BYTES
    assert verdict.faults == []
    return verdict


class TestZeros:
    """Zeros past the end of a file take no room, and are names, numbers and lists of length nothing without end."""

    @pytest.mark.parametrize("what", ZEROS)
    def test_a_file_of_a_gigabyte(self, tmp_path: Path, what: str) -> None:
        path = tmp_path / "m.gguf"
        data, reason = ZEROS[what]
        path.write_bytes(data)
        os.truncate(path, 2**30)
        assert reason in cost(path).refusal

    @pytest.mark.parametrize("name", ["m.gguf", "config.json", "m.bin"])
    def test_zeros_alone(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 2**30)
        assert cost(tmp_path / name).refusal

    def test_many_long_lists(self, tmp_path: Path) -> None:
        """Each is short enough to be kept, and together they are not."""
        one = struct.pack("<IIQ", 9, 0, 90_000) + bytes(90_000)
        keys = b"".join(struct.pack("<Q", 4) + b"%04d" % i + one for i in range(200))
        (tmp_path / "m.gguf").write_bytes(HEADER + struct.pack("<QQ", 0, 200) + keys)
        assert "more than 1,048,576 numbers in lists" in cost(tmp_path / "m.gguf").refusal


class TestJson:
    """Seventeen megabytes of brackets are a gigabyte of lists."""

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ('{"a":[' + "[]," * (5 * 2**20) + "[]]}", "more than 1,048,576 values"),
            ('{"a":[' + "1," * (7 * 2**20) + "1]}", "more than 1,048,576 values"),
            ("{" + ",".join(f'"{i}":{{}}' for i in range(700_000)) + "}", "more than 1,048,576 values"),
            ('{"a":[' + "[]," * 500_000 + "[]]}", "model_type"),
            ('{"a":"\U0001f600' + "x" * (15 * MIB) + '"}', "model_type"),
            (" " * (17 * MIB), "at most 16,777,216 are read"),
            ('{"a":' * 2_000_000, "more than 1,048,576 values"),
            ('{"a":' * 500_000, "nested deeper than 32"),
            ('{"model_type":' + "9" * (15 * MIB) + "}", "config.json"),
        ],
        ids=["lists", "numbers", "objects", "fewer lists", "wide letters", "spaces", "deep", "less deep", "a number"],
    )
    def test_texts(self, tmp_path: Path, text: str, reason: str) -> None:
        path = tmp_path / "config.json"
        path.write_text(text, encoding="utf-8")
        assert reason in cost(path).refusal

    def test_a_safetensors_header(self, tmp_path: Path) -> None:
        path = tmp_path / "m.safetensors"
        for text in (b"[" * (2**25 - 9), b'{"a":[' + b"[]," * 900_000 + b"[]]}"):
            path.write_bytes(len(text).to_bytes(8, "little") + text)
            verdict = judge.Verdict()
            before = judge._settle_memory()
            judge._count(path, verdict)
            assert judge._status("VmHWM") - before < 1.5 * judge.MOST_BYTES
            assert verdict.faults == []
            assert not verdict.accepted
        path.write_bytes((2**25 + 1).to_bytes(8, "little"))
        with pytest.raises(ValueError, match=r"m\.safetensors.* 33,554,433 bytes, and at most 33,554,432 are read"):
            count_parameters(path)


class TestManyLayers:
    """A few bytes state as many layers as anyone likes, and lists of layers as many kinds of them."""

    @pytest.mark.parametrize("arguments", [(), ("--json",), ("--for", "vllm")], ids=["text", "json", "for"])
    @pytest.mark.parametrize("config", [LAYERS, BASES], ids=["layers", "bases"])
    def test_they_are_read_soon(self, tmp_path: Path, config: dict[str, Any], arguments: tuple[str, ...]) -> None:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        assert cost(path, *arguments).refusal == ""

    def test_a_difference(self, tmp_path: Path) -> None:
        paths = [tmp_path / "config.json", tmp_path / "other.json"]
        paths[0].write_text(json.dumps(LAYERS))
        paths[1].write_text(json.dumps({**LAYERS, "rope_theta": 5e5}))
        cost(paths[0], "--diff", str(paths[1]))
