"""Folders that are damaged, absurd or out to harm: one sentence each, and nothing read that lies elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from theodolite.models import LoadError, load, resolve, weights_bytes
from theodolite.models.errors import refusing
from theodolite.plan import PlanError

from .tiny import logits, tokens
from .tiny_files import write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "tiny")
    return tmp_path / "tiny"


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refusal(folder: Path) -> str:
    with pytest.raises(LoadError) as caught:
        load(str(folder), device="cpu")
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 350 + len(str(folder)) * 2
    return message


class TestConfig:
    """What transformers raises over a config is not what a caller has to know."""

    @pytest.mark.parametrize(
        "changes",
        [
            {"vocab_size": "many"},
            {"vocab_size": -5},
            {"intermediate_size": [1, 2]},
            {"num_key_value_heads": 0},
            {"num_key_value_heads": 3},
            {"hidden_act": "nonsense"},
            {"hidden_act": {}},
            {"rms_norm_eps": "x"},
            {"pad_token_id": 10**9},
            {"dtype": "nonsense"},
            {"quantization_config": 7},
            {"architectures": 5, "vocab_size": None},
            {"auto_map": 7},
        ],
        ids=str,
    )
    def test_values_that_make_no_sense(self, folder: Path, changes: dict[str, Any]) -> None:
        edit_config(folder, **changes)
        assert str(folder) in refusal(folder)

    @pytest.mark.parametrize("model_type", [["llama"], {"llama": 1}, 5, None, "x" * 10_000], ids=lambda v: str(v)[:9])
    def test_a_type_that_is_no_name(self, folder: Path, model_type: Any) -> None:
        edit_config(folder, model_type=model_type)
        assert "which transformers does not know" in refusal(folder)

    @pytest.mark.parametrize("levels", [50, 100_000])
    def test_deep_nesting(self, folder: Path, levels: int) -> None:
        (folder / "config.json").write_text('{"model_type": ' + "[" * levels + "]" * levels + "}")
        assert "config.json cannot be read: it is nested deeper than 32" in refusal(folder)

    def test_a_byte_order_mark(self, folder: Path) -> None:
        before = load(str(folder), dtype="float32", device="cpu")
        file = folder / "config.json"
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
        after = load(str(folder), dtype="float32", device="cpu")
        assert torch.equal(logits(after.model, tokens(9)), logits(before.model, tokens(9)))
        assert type(after.tokenizer) is type(before.tokenizer)

    @pytest.mark.parametrize(
        "changes",
        [{"vocab_size": 10**9}, {"intermediate_size": 10**10}, {"hidden_size": 2**40, "head_dim": 16}],
        ids=str,
    )
    def test_sizes_that_the_files_do_not_hold_are_not_allocated(self, folder: Path, changes: dict[str, Any]) -> None:
        edit_config(folder, **changes)
        assert "lacks weights: its config asks for" in refusal(folder)

    def test_a_thousand_million_layers(self, folder: Path) -> None:
        edit_config(folder, num_hidden_layers=10**9)
        with pytest.raises(PlanError, match="num_hidden_layers"):
            load(str(folder), device="cpu")

    def test_weights_of_another_shape_are_named(self, folder: Path) -> None:
        edit_config(folder, intermediate_size=72)
        assert "lacks weights: model.layers.0.mlp.down_proj.weight of shape 64x72 (there is 64x64)" in refusal(folder)


class TestBoundary:
    """Everything becomes one sentence, but for what is no fault of the file."""

    @pytest.mark.parametrize(
        ("error", "says"),
        [
            (KeyError("x"), "it: KeyError: 'x'"),
            (ZeroDivisionError("division by zero"), "it: ZeroDivisionError: division by zero"),
            (RecursionError(), "it: RecursionError"),
            (ValueError("one\ntwo"), "it: one"),
            (RuntimeError("field 'a':\n    must be b\nmore"), "it: field 'a': must be b"),
            (OSError("x" * 1000), "it: " + "x" * 296 + " ..."),
        ],
    )
    def test_what_is_told(self, error: Exception, says: str) -> None:
        with pytest.raises(LoadError) as caught, refusing("it"):
            raise error
        assert str(caught.value) == says

    @pytest.mark.parametrize("error", [MemoryError("no"), KeyboardInterrupt(), LoadError("as it is")])
    def test_what_is_passed_on(self, error: BaseException) -> None:
        with pytest.raises(type(error)) as caught, refusing("it"):
            raise error
        assert caught.value is error


def tensor_file(path: Path, header: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))


class TestSafetensorsHeader:
    """Headers that are JSON and still no header."""

    @pytest.mark.parametrize(
        "header",
        [
            b"[1]", b"17", b"null", b'{"a": 5}', b'{"a": {}}', b'{"a": {"shape": "64"}}', b'{"a": {"shape": ["6"]}}',
            b'{"a": {"shape": [-1]}}', b'{"a": {"shape": [true]}}', b'{"a": {"shape": [1e3]}}', b"\xff\xfe{}",
            b'{"a": ' + b"[" * 100_000, 
            b'{"a": ' + b"[" * 99 + b"]" * 99 + b"}", b'{"a": {"shape": [' + b"9" * 5000 + b"]}}",
        ],
        ids=lambda header: header[:24].decode(errors="replace"),
    )  # fmt: skip
    def test_is_refused(self, folder: Path, header: bytes) -> None:
        tensor_file(folder / "model.safetensors", header)
        assert "model.safetensors is no safetensors file" in refusal(folder)
        with pytest.raises(LoadError, match="is no safetensors file"):
            weights_bytes(resolve(str(folder)))


class TestIndex:
    """The list of weight files is data of a stranger: it names files of the folder, and safetensors only."""

    @pytest.fixture
    def index(self, folder: Path) -> Path:
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        return folder / "model.safetensors.index.json"

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ("[]", "it holds no JSON object"),
            ("", "cannot be read: Expecting value"),
            ("[" * 100_000, "nested deeper than 32"),
            ("{}", "names no weight files"),
            ('{"weight_map": {}}', "names no weight files"),
            ('{"weight_map": ["part.safetensors"]}', "names no weight files"),
            ('{"weight_map": {"a": 5}}', "names '5', which is no safetensors file in the same folder"),
            ('{"weight_map": {"a": ["part.safetensors"]}}', "which is no safetensors file in the same folder"),
            ('{"weight_map": {"a": "../part.safetensors"}}', "names '../part.safetensors', which is no safetensors"),
            ('{"weight_map": {"a": "/part.safetensors"}}', "names '/part.safetensors', which is no safetensors"),
            ('{"weight_map": {"a": "..\\\\part.safetensors"}}', "which is no safetensors file in the same folder"),
            ('{"weight_map": {"a": "pytorch_model.bin"}}', "names 'pytorch_model.bin', which is no safetensors"),
            ('{"weight_map": {"a": "other.safetensors"}}', "names other.safetensors, which is not there"),
        ],
    )
    def test_is_refused(self, folder: Path, index: Path, content: str, says: str) -> None:
        index.write_text(content)
        message = refusal(folder)
        assert message.startswith(str(index))
        assert says in message

    def test_one_that_is_right_is_read(self, folder: Path, index: Path) -> None:
        weights = load_file(folder / "part.safetensors")
        save_file(weights, folder / "part.safetensors", metadata={"format": "pt"})
        index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, "part.safetensors")}))
        assert load(str(folder), device="cpu").name == "tiny"
