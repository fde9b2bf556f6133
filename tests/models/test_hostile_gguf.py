"""GGUF files that lack weights, contradict themselves or are out to harm: one sentence, and nothing is cached."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from theodolite.models import LoadError, load, resolve, weights_bytes

from . import tiny_files
from .tiny import logits, tokens
from .tiny_files import write_gguf


def write(path: Path, *, renamed: tuple[str, str] | None = None, **stated: Any) -> Any:
    """The tiny GGUF with one tensor renamed, or other metadata: a value, or None to leave it out."""
    own, add = tiny_files._gguf_name, gguf.GGUFWriter.add_key_value

    def name(given: str) -> str:
        # Whole parts of a name: "output" is not "attn_output".
        return f".{own(given)}".replace(*(f".{part}" for part in renamed))[1:] if renamed else own(given)

    def add_key_value(self: Any, key: str, val: Any, *more: Any, **options: Any) -> None:
        value = stated.get(key.rsplit(".", 1)[-1], val)
        if value is not None:
            add(self, key, value, *more, **options)

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(tiny_files, "_gguf_name", name)
        patching.setattr(gguf.GGUFWriter, "add_key_value", add_key_value)
        return write_gguf(path)


def refusal(file: Path) -> str:
    cache = file.parent / "cache"
    with pytest.raises(LoadError) as caught:
        load(str(file), device="cpu", cache=cache)
    assert not cache.exists() or all(path.suffix == ".lock" for path in cache.iterdir())
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 350 + 2 * len(str(file))
    return message


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


class TestLackingWeights:
    """transformers fills what is missing with random numbers; here it is named."""

    @pytest.mark.parametrize(
        ("renamed", "lacking"),
        [
            (("blk.1.attn_q", "blk.9.attn_q"), "model.layers.1.self_attn.q_proj.weight"),
            (("blk.0.attn_output", "blk.0.attn_other"), "model.layers.0.self_attn.o_proj.weight"),
            (("output_norm", "other_norm"), "model.norm.weight"),
            (("token_embd", "other_embd"), "model.embed_tokens.weight"),
            (("blk.1.", "blk.7."), "it states 2 layers and has nothing for blk.1"),
        ],
    )
    def test_a_tensor_under_another_name(self, file: Path, renamed: tuple[str, str], lacking: str) -> None:
        write(file, renamed=renamed)
        assert refusal(file).endswith(f"lacks weights: {lacking}")

    def test_more_layers_than_weights(self, file: Path) -> None:
        write(file, block_count=3)
        assert refusal(file).endswith("lacks weights: it states 3 layers and has nothing for blk.2")

    def test_a_thousand_million_layers(self, file: Path) -> None:
        write(file, block_count=10**9)
        assert "lacks weights: it states 1000000000 layers" in refusal(file)

    def test_fewer_layers_than_weights(self, file: Path) -> None:
        write(file, block_count=1)
        assert "states 1 layers and has weights of blk.1, which none of them reads" in refusal(file)

    @pytest.mark.parametrize("count", [None, 0])
    def test_no_layers_stated(self, file: Path, count: int | None) -> None:
        write(file, block_count=count)
        assert f"does not state how many layers it has (block_count: got {count})" in refusal(file)

    def test_weights_of_another_shape(self, file: Path) -> None:
        write(file, feed_forward_length=72)
        assert "lacks weights: model.layers.0.mlp.down_proj.weight of shape 64x72 (there is 64x64)" in refusal(file)

    def test_sizes_that_the_file_does_not_hold_are_not_allocated(self, file: Path) -> None:
        write(file, feed_forward_length=2**31)
        assert "lacks weights: its config asks for" in refusal(file)

    def test_an_output_that_is_the_embedding_is_not_missed(self, file: Path) -> None:
        model = write(file, renamed=("output.weight", "unread.weight"))
        model.lm_head.weight = model.model.embed_tokens.weight
        loaded = load(str(file), dtype="float32", device="cpu", cache=file.parent / "cache")
        assert torch.allclose(logits(loaded.model, tokens(9)), logits(model, tokens(9)), atol=1e-5)


class TestMetadata:
    """What makes transformers or the plan stumble is told in one sentence."""

    @pytest.mark.parametrize(
        "stated",
        [
            {"head_count": 0},
            {"head_count": 3},
            {"head_count": None},
            {"head_count_kv": 0},
            {"head_count_kv": 3},
            {"embedding_length": 0},
            {"embedding_length": None},
            {"dimension_count": 0},
            {"architecture": "nonsense"},
            {"architecture": None},
        ],
        ids=str,
    )
    def test_values_that_make_no_sense(self, file: Path, stated: dict[str, Any]) -> None:
        write(file, **stated)
        assert str(file) in refusal(file)


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def header(*parts: bytes, tensors: int = 0, keys: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + b"".join(parts)


class TestHeader:
    """Lengths that a file states are held against its size before anything is allocated."""

    @pytest.mark.parametrize(
        "content",
        [
            header(struct.pack("<Q", 2**63)),
            header(struct.pack("<Q", 2**40)),
            header(text(b"k"), struct.pack("<IQ", 8, 2**63)),
            header(text(b"k"), struct.pack("<IIQ", 9, 4, 2**61)),
            header(text(b"k"), struct.pack("<IIQQ", 9, 8, 5, 2**63)),
            header(text(b"k"), struct.pack("<IIQ", 9, 77, 5)),
            header(text(b"k"), struct.pack("<I", 9), struct.pack("<IQ", 9, 1) * 100_000),
            header(text(b"k"), struct.pack("<I", 77)),
            header(text(b"\xff")),
            header(text(b"t"), struct.pack("<I", 2**32 - 1), keys=0, tensors=1),
            header(text(b"t"), struct.pack("<IQ", 1, 5), keys=0, tensors=1),
            header(keys=2**63),
            header(keys=0, tensors=2**63),
        ],
    )
    def test_is_refused(self, file: Path, content: bytes) -> None:
        file.write_bytes(content)
        assert "is damaged or ends too early" in refusal(file)
        with pytest.raises(LoadError, match="is damaged or ends too early"):
            weights_bytes(resolve(str(file)))
