"""The shape of a survey's summary, and a check that names the first field at fault.

The schema itself is `templates/summary.schema.json` (JSON Schema, draft 2020-12); `docs/summary.md` explains every
field. `validate` follows that file, so the two cannot drift apart, and needs no package for it.
"""

from __future__ import annotations

import json
import math
from functools import cache
from importlib.resources import files
from typing import Any

VERSION = "theodolite.survey/1"

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list, tuple),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}


@cache
def load() -> dict[str, Any]:
    """The JSON Schema of `summary.json`."""
    text = files("theodolite.report").joinpath("templates", "summary.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def validate(summary: Any) -> None:
    """Check a summary against the schema.

    Raises:
        ValueError: naming the first field that is missing or wrong, what it holds, and what is allowed.
    """
    given = summary.get("schema", VERSION) if isinstance(summary, dict) else VERSION
    if given != VERSION:
        raise ValueError(f"summary.schema: got {given!r}; this version of Theodolite reads {VERSION!r}")
    _check(summary, load(), "summary")
    names = [scaling["name"] for scaling in summary["scalings"]]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ValueError(f"summary.scalings[{index}].name: {name!r} stands twice; every name is unique")
        inv_freq = summary["scalings"][index]["inv_freq"]
        if len(inv_freq["plain"]) != len(inv_freq["scaled"]):
            raise ValueError(
                f"summary.scalings[{index}].inv_freq: plain has {len(inv_freq['plain'])} pairs and scaled "
                f"{len(inv_freq['scaled'])}; they are the same pairs"
            )
    chosen = summary["recommendation"]["name"]
    if chosen is not None and chosen not in names:
        raise ValueError(f"summary.recommendation.name: {chosen!r} is none of the scalings: {', '.join(names)}")


def _check(value: Any, rule: dict[str, Any], field: str) -> None:
    """Check one value against the keywords that our schema uses."""
    if "$ref" in rule:
        rule = load()["$defs"][rule["$ref"].rsplit("/", 1)[-1]]
    if "const" in rule and value != rule["const"]:
        raise ValueError(f"{field}: got {value!r}; it must be {rule['const']!r}")
    if "type" in rule:
        allowed = [rule["type"]] if isinstance(rule["type"], str) else rule["type"]
        if not any(_is(value, name) for name in allowed):
            raise ValueError(f"{field}: got {_short(value)}; it must be {' or '.join(allowed)}")
    if isinstance(value, dict):
        for name in rule.get("required", ()):
            if name not in value:
                raise ValueError(f"{field}.{name}: missing")
        for name, inner in rule.get("properties", {}).items():
            if name in value:
                _check(value[name], inner, f"{field}.{name}")
    elif isinstance(value, (list, tuple)):
        if not rule.get("minItems", 0) <= len(value) <= rule.get("maxItems", math.inf):
            allowed_length = f"{rule.get('minItems', 0)} to {rule.get('maxItems', 'any number of')}"
            raise ValueError(f"{field}: got {len(value)} items; it must have {allowed_length}")
        for index, item in enumerate(value):
            _check(item, rule["items"], f"{field}[{index}]")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_range(value, rule, field)


def _check_range(value: float, rule: dict[str, Any], field: str) -> None:
    if not math.isfinite(value):
        raise ValueError(f"{field}: got {value!r}; it must be finite")
    if value < rule.get("minimum", -math.inf):
        raise ValueError(f"{field}: got {value!r}; it must be at least {rule['minimum']}")
    if value > rule.get("maximum", math.inf):
        raise ValueError(f"{field}: got {value!r}; it must be at most {rule['maximum']}")
    if value <= rule.get("exclusiveMinimum", -math.inf):
        raise ValueError(f"{field}: got {value!r}; it must be above {rule['exclusiveMinimum']}")


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES[name])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
