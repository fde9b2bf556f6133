"""GGUF files of a few architectures, written here byte by byte and changed: keys, types, counts, shapes, data."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.fuzz.strange import ESCAPES, damaged

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMS = {U8: "<B", I8: "<b", U16: "<H", I16: "<h", U32: "<I", I32: "<i", F32: "<f", U64: "<Q", I64: "<q", F64: "<d"}
_CLAIMS = (0, 1, 2**16, 2**31, 2**32 + 1, 2**40, 2**61, 2**63, 2**64 - 1)
SPARSE = 2**30
"""Bytes of zeros, which take no room on a disk, after some of the files."""


@dataclass
class Tensor:
    """A tensor's entry in the header, and its bytes."""

    name: bytes
    shape: list[int]
    kind: int
    data: bytes
    offset: int | None = None


@dataclass
class File:
    """What a file is put together from; counts that are None are true."""

    entries: list[tuple[bytes, int, bytes]]
    tensors: list[Tensor] = field(default_factory=list)
    version: int = 3
    keys: int | None = None
    tensor_count: int | None = None
    alignment: int = 32

    def written(self) -> bytes:
        """Its bytes."""
        entries = b"".join(_string(key) + struct.pack("<I", kind) + data for key, kind, data in self.entries)
        places, data = [], b""
        for tensor in self.tensors:
            data += bytes(-len(data) % self.alignment)
            places.append(len(data) if tensor.offset is None else tensor.offset)
            data += tensor.data
        infos = b"".join(
            _string(tensor.name) + struct.pack(f"<I{len(tensor.shape)}QIQ", len(tensor.shape),
                                               *(size % 2**64 for size in tensor.shape), tensor.kind, place % 2**64)
            for tensor, place in zip(self.tensors, places, strict=True)
        )  # fmt: skip
        counts = struct.pack(
            "<QQ",
            len(self.tensors) if self.tensor_count is None else self.tensor_count,
            len(self.entries) if self.keys is None else self.keys,
        )
        header = b"GGUF" + struct.pack("<I", self.version) + counts + entries + infos
        return header + bytes(-len(header) % self.alignment) + data


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def entry(key: str, value: Any, kind: int | None = None) -> tuple[bytes, int, bytes]:
    """A key with its value, of the type that a converter gives it unless one is named."""
    name = key.encode("utf-8", "surrogatepass")
    if isinstance(value, (list, tuple)):
        inner = kind if kind is not None else _kind(value[0]) if value else U32
        return name, ARRAY, struct.pack("<IQ", inner, len(value)) + b"".join(_data(one, inner) for one in value)
    kind = _kind(value) if kind is None else kind
    return name, kind, _data(value, kind)


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return U32 if 0 <= value < 2**32 else I64
    return F32 if isinstance(value, float) else STRING


def _data(value: Any, kind: int) -> bytes:
    if kind == STRING:
        return _string(str(value).encode("utf-8", "surrogatepass"))
    return struct.pack("<?", value) if kind == BOOL else struct.pack(_FORMS[kind], value)


def floats(numbers: list[float], *, name: str = "rope_freqs.weight", kind: int = 0) -> Tensor:
    """A tensor of plain numbers: float32 (0), float16 (1) or float64 (28)."""
    form = {0: "f", 1: "e", 28: "d"}[kind]
    return Tensor(name.encode(), [len(numbers)], kind, struct.pack(f"<{len(numbers)}{form}", *numbers))


_COMMON = {"block_count": 4, "context_length": 4096, "embedding_length": 64, "attention.head_count": 4}
_ROTARY = {**_COMMON, "rope.freq_base": 1e4, "rope.dimension_count": 16}
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 1024}
_MODELS: tuple[tuple[str, dict[str, Any], tuple[Tensor, ...]], ...] = (
    ("llama", _ROTARY, (floats([1.0 + i for i in range(8)]),)),
    ("llama", {**_ROTARY, "rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, ()),
    ("qwen2", {**_ROTARY, **_YARN, "rope.scaling.attn_factor": 1.1, "rope.scaling.yarn_beta_fast": 32.0}, ()),
    ("gemma3", {**_ROTARY, "attention.sliding_window": 512, "rope.freq_base_swa": 1e4, "attention.key_length": 32,
                "rope.dimension_count": 32, "attention.head_count": [4] * 4}, ()),
    ("phi3", {**_ROTARY, "rope.scaling.original_context_length": 1024, "rope.scaling.attn_factor": 1.2},
     (floats([1.0] * 8, name="rope_factors_short.weight"), floats([4.0] * 8, name="rope_factors_long.weight", kind=1))),
    ("deepseek2", {**_ROTARY, **_YARN, "attention.key_length": 24, "rope.dimension_count": 8,
                   "rope.scaling.yarn_log_multiplier": 0.1, "attention.key_length_mla": 24}, ()),
    ("qwen2vl", {**_ROTARY, "rope.dimension_sections": [2, 3, 3, 0]}, ()),
    ("gemma2", {**_ROTARY, "attention.sliding_window": 64}, ()),
    ("gpt-oss", {**_ROTARY, **_YARN, "attention.sliding_window": 128}, ()),
    ("modern-bert", {**_ROTARY, "rope.freq_base_swa": 1e4, "attention.sliding_window": 64}, ()),
    ("cohere2", {**_ROTARY, "attention.sliding_window": 64}, ()),
    ("llama4", {**_ROTARY, "attention.chunk_size": 64}, ()),
    ("granite", {**_ROTARY, "attention.scale": 0.1}, ()),
    ("qwen3next", {**_ROTARY, "rope.dimension_count": 4}, ()),
    ("falcon", {**_COMMON, "attention.head_count_kv": 1}, ()),
    ("gpt2", _COMMON, ()), ("bloom", _COMMON, ()), ("mpt", _COMMON, ()), ("mamba", _COMMON, ()), ("bert", _COMMON, ()),
    ("t5", {**_COMMON, "attention.relative_buckets_count": 32}, ()), ("jamba", _COMMON, ()),
)  # fmt: skip
_NAMES = (
    *_ROTARY, *_YARN, "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier", "rope.scale_linear", "attention.key_length", "attention.key_length_mla",
    "attention.sliding_window", "rope.freq_base_swa", "rope.dimension_sections", "attention.scale",
    "attention.relative_buckets_count", "attention.head_count_kv",
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    0, 1, 2, 3, 5, 16, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, -1, -(2**63), 0.0, -0.0, 0.5, 2.0, -1.0, 1e-30, 3e38,
    float("nan"), float("inf"), -float("inf"), True, False, "", "yarn", "longrope", "none", "x" * 5000, *ESCAPES, [],
    [0], [4, 4], [0.5, float("nan")], ["a", "b"], [True], [-1], [2, 3, 3], [4] * 5000, list(range(4)),
)  # fmt: skip
_NUMBERS = (0.0, -1.0, float("nan"), float("inf"), 1e-38, 3e38, 1e-3, 1.0, 2.0, 8.0, 65504.0)


def gguf_file(random: Random) -> tuple[bytes, bytes, int]:
    """A file that was changed, the one that it was made from, and how many zeros come after the first."""
    architecture, keys, tensors = random.choice(_MODELS)
    file = _file(architecture, keys, tensors)
    original = file.written()
    drawn = random.random()
    for _ in range(0 if drawn < 0.2 else 1 if drawn < 0.65 else random.randint(2, 5)):
        random.choices(_CHANGES, _WEIGHTS)[0](file, random, architecture)
    data = file.written()
    if drawn < 0.2 or random.random() < 0.05:
        data = damaged(data, random)
    return data, original, SPARSE if random.random() < 0.04 else 0


def _file(architecture: str, keys: dict[str, Any], tensors: tuple[Tensor, ...]) -> File:
    entries = [entry("general.architecture", architecture), entry("general.name", "a model")]
    entries += [entry(f"{architecture}.{name}", value) for name, value in keys.items()]
    entries.append(entry("tokenizer.ggml.tokens", [f"<{i}>" for i in range(20)]))
    weight = Tensor(b"blk.0.attn_q.weight", [5, 3], 0, bytes(60))
    return File(entries, [Tensor(t.name, list(t.shape), t.kind, t.data) for t in (*tensors, weight)])


def _value(random: Random, key: str) -> tuple[bytes, int, bytes]:
    value = random.choice(_VALUES)
    kind: int | None = None
    if isinstance(value, (int, float)) and random.random() < 0.3:
        kind = random.choice((F32, F64)) if value == value and abs(value) < 1e38 else F64
    return entry(key, value, kind)


def _replace(file: File, random: Random, architecture: str) -> None:
    if file.entries:
        at = random.randrange(len(file.entries))
        file.entries[at] = _value(random, file.entries[at][0].decode("utf-8", "replace"))


def _add(file: File, random: Random, architecture: str) -> None:
    file.entries.append(_value(random, f"{architecture}.{random.choice(_NAMES)}"))


def _delete(file: File, random: Random, architecture: str) -> None:
    if file.entries:
        del file.entries[random.randrange(len(file.entries))]


def _twice(file: File, random: Random, architecture: str) -> None:
    if file.entries:
        file.entries.insert(random.randrange(len(file.entries)), random.choice(file.entries))


def _claim(file: File, random: Random, architecture: str) -> None:
    """Counts, lengths and types that are not there."""
    claim, way = random.choice(_CLAIMS), random.randrange(7)
    if way == 0:
        file.keys = random.choice((claim, len(file.entries) + 1, max(0, len(file.entries) - 1)))
    elif way == 1:
        file.tensor_count = random.choice((claim, len(file.tensors) + 1, max(0, len(file.tensors) - 1)))
    elif way == 2:
        inner = random.choice((U8, F64, STRING, ARRAY, BOOL, 13, 2**31))
        file.entries.append((b"x.list", ARRAY, struct.pack("<IQ", inner, claim)))
    elif way == 3:
        levels = random.choice((1, 3, 4, 5, 1000))
        file.entries.append((b"x.nested", ARRAY, struct.pack("<IQ", ARRAY, 1) * levels + struct.pack("<IQB", U8, 1, 7)))
    elif way == 4:
        file.entries.append((b"x.text", STRING, struct.pack("<Q", claim)))
    elif way == 5:
        file.entries.append((b"x.kind", random.choice((13, 14, 255, 2**32 - 1)), bytes(8)))
    else:
        file.version = random.choice((0, 1, 2, 4, 2**24 * 3, 2**32 - 1))


def _align(file: File, random: Random, architecture: str) -> None:
    value = random.choice((0, 1, 3, 7, 8, 4096, 2**31, -1, 2**62, "32", 0.5, True, [32], float("nan")))
    file.entries.append(entry("general.alignment", value))
    if type(value) is int and 0 < value <= 4096:
        file.alignment = value


def _shape(file: File, random: Random, architecture: str) -> None:
    tensor = random.choice(file.tensors)
    way = random.randrange(6)
    if way == 0:
        tensor.shape = random.choice(([], [0], [8, 1], [2, 4], [2**32, 2**32], [2**63, 2], [1] * 4, [1] * 5, [3, 3, 3]))
    elif way == 1:
        tensor.shape = [random.choice((*_CLAIMS, 7, 9, 8))] * random.randint(1, 5)
    elif way == 2:
        tensor.kind = random.choice((0, 1, 2, 8, 28, 30, 99, 2**32 - 1))
    elif way == 3:
        tensor.offset = random.choice((*_CLAIMS, 32, 33, 10**6))
    elif way == 4:
        tensor.name = random.choice(
            (b"", b"rope_freqs.weight", b"rope_factors_long.weight", b"\xff\xfe", b"blk.99999999999.x")
        )
    else:
        tensor.data = tensor.data[: random.randrange(len(tensor.data) + 1)]


def _divisors(file: File, random: Random, architecture: str) -> None:
    count = random.choice((0, 1, 2, 4, 7, 8, 8, 8, 9, 16, 5000))
    name = random.choice(("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"))
    kind = random.choice((0, 0, 0, 1, 28))
    numbers = [random.choice(_NUMBERS) if random.random() < 0.3 else 2.0 for _ in range(count)]
    if kind == 1:
        numbers = [number if abs(number) <= 65504 or number != number else 1e-7 for number in numbers]
    file.tensors = [tensor for tensor in file.tensors if tensor.name != name.encode()]
    file.tensors.insert(0, floats(numbers, name=name, kind=kind))


_CHANGES = (_replace, _add, _delete, _twice, _claim, _align, _shape, _divisors)
_WEIGHTS = (34, 20, 6, 4, 10, 5, 9, 12)
