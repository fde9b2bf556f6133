"""Values that no key of a model's file expects, and the text of JSON that has them."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

ESCAPES = ("\x1b[2J\x1b]0;owned\x07", "\u202egnp", "a\nb\rc", "\0", "\ud800", "</script><b>&", "%s%n{0}", "../../etc")
"""Names that would act on a terminal, a page or a path."""


class Raw(str):
    """JSON text that is put in as it stands."""


_SCALARS: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 64, 2**31, 2**40, 2**40 + 1, 2**63, 2**64, -(2**63), 2**4096,
    Raw("1" + "0" * 5000), 0.0, -0.0, 0.5, 1.5, -0.5, 1e-320, 1e-300, 1e16, 1e300, 1e308, Raw("1e999"), Raw("NaN"),
    Raw("Infinity"), Raw("-Infinity"), "", "x", "yarn", "false", "32", "1e4", "x" * 100_000,
)  # fmt: skip
_NESTED: tuple[Any, ...] = (
    [], [None], [0], [1], ["a"], [[]], [{}], [1, 0], [1e308] * 8, [-8, 16], [0.5] * 64, [True], {}, {"a": 1},
    {"rope_type": "yarn"}, {"full_attention": {}}, {"": None}, Raw("[" * 40 + "]" * 40),
    Raw('{"a":' * 31 + "1" + "}" * 31),
)  # fmt: skip
_DEEP = Raw("[" * 100_000 + "]" * 100_000)
_NOT_CLOSED = Raw('{"a":' * 100_000)


def strange(random: Random) -> Any:
    """A value of a wrong type or past all sense."""
    drawn = random.random()
    if drawn < 0.01:
        return random.choice((_DEEP, _NOT_CLOSED))
    if drawn < 0.08:
        return random.choice(ESCAPES)
    # A copy, for what is put into it later must not be in the next case.
    return copy.deepcopy(random.choice(_NESTED if drawn < 0.3 else _SCALARS))


def near(value: Any, random: Random) -> Any:
    """The value, changed a little: what a slip of the pen or of a program makes of it."""
    if isinstance(value, bool) or value is None:
        return random.choice((not value, int(value or 0), str(value), 1.0))
    if isinstance(value, (int, float)):
        # What was changed before may be past all floats.
        value = value if isinstance(value, float) else max(-(2**64), min(value, 2**64))
        return random.choice((value + 1, value - 1, -value, 2 * value, value / 2, float(value), str(value), [value],
                              value * 1e6, value * 10**9, value // 3))  # fmt: skip
    if isinstance(value, str):
        return random.choice((value + "_", value[:-1], value.upper(), [value], value.replace("_", "-"), {value: value}))
    if isinstance(value, list):
        return _near_list(value, random)
    if isinstance(value, dict):
        return random.choice(([value], list(value), {"text_config": value}, {**value, "type": "linear"}))
    return value


def _near_list(value: list[Any], random: Random) -> Any:
    at = random.randrange(len(value)) if value else 0
    return random.choice((
        value[:-1], value + value, value[1:], value * 40, value[::-1], [*value[:at], strange(random), *value[at + 1 :]],
        [*value[:at], near(value[at], random) if value else 0, *value[at + 1 :]], [value], {"0": value}, len(value),
        [None] * len(value), [0] * len(value), value[:1] * len(value),
    ))  # fmt: skip


def json_text(value: Any) -> str:
    """The value as JSON has it; what is `Raw` as it stands."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {json_text(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(json_text, value)) + "]"
    return json.dumps(value)


def damaged(data: bytes, random: Random) -> bytes:
    """Bytes that were cut, turned over, doubled, or are of another encoding."""
    way = random.randrange(10)
    at = random.randrange(len(data) + 1)
    if way == 0:
        return data[:at]
    if way == 1:
        return data[:at] + bytes(random.getrandbits(8) for _ in range(random.randint(1, 8))) + data[at:]
    if way == 2:
        changed = bytearray(data or b"\0")
        for _ in range(random.randint(1, 8)):
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
        return bytes(changed)
    if way == 3:
        return b"\xef\xbb\xbf" * random.randint(1, 2) + data
    if way == 4:
        return data.decode("utf-8", "replace").encode(random.choice(("utf-16", "utf-16-le", "utf-32", "utf-7")))
    if way == 5:
        return data + random.choice((data, b"\0", b"}", b"\n\n", b"\x1a"))
    if way == 6:
        return data[:at] + b"\0" * random.randint(1, 64) + data[at + 64 :]
    if way == 7:
        return bytes(random.getrandbits(8) for _ in range(random.randrange(300)))
    if way == 8:
        return data[at:]
    return data[:at] + random.choice((b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf8\x88")) + data[at:]
