"""Headers of safetensors files, changed."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

from tests.fuzz.strange import ESCAPES, damaged, json_text, near, strange

_HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "model.embed_tokens.weight": {"dtype": "F32", "shape": [16, 4], "data_offsets": [0, 256]},
    "model.layers.0.self_attn.q_proj.weight": {"dtype": "BF16", "shape": [4, 4], "data_offsets": [256, 288]},
    "scale": {"dtype": "F32", "shape": [], "data_offsets": [288, 292]},
}


def safetensors_file(random: Random) -> tuple[bytes, bytes]:
    """A file that was changed, and the one that it was made from."""
    header = copy.deepcopy(_HEADER)
    for _ in range(random.randint(0, 3)):
        _change(header, random)
    text = json_text(header).encode("utf-8", "surrogatepass")
    if random.random() < 0.2:
        text = damaged(text, random)
    size = len(text)
    if random.random() < 0.2:
        size = random.choice((0, 1, size - 1, size + 1, size + 10**6, 2**31, 2**63, 2**64 - 1))
    data = max(size, 0).to_bytes(8, "little") + text + bytes(292)
    original = json_text(_HEADER).encode()
    return damaged(data, random) if random.random() < 0.1 else data, len(original).to_bytes(8, "little") + original


def _change(header: dict[str, Any], random: Random) -> None:
    name = random.choice(list(header) or [""])
    tensor = header.get(name)
    way = random.randrange(6)
    if way == 0:
        header[name] = strange(random)
    elif way == 1 and isinstance(tensor, dict) and tensor:
        key = random.choice(list(tensor))
        tensor[key] = strange(random) if random.random() < 0.5 else near(tensor[key], random)
    elif way == 2 and isinstance(tensor, dict):
        tensor["shape"] = random.choice(
            ([-1], [2**63], [2**64, 2], [1.0], ["1"], [None], [True], [1] * 40, [2**62] * 32)
        )
    elif way == 3 and isinstance(tensor, dict):
        tensor.pop("shape", None)
    elif way == 4:
        header[random.choice(ESCAPES)] = strange(random)
    else:
        header.pop(name, None)
