"""The summary's schema: what it accepts, what it says when it does not, and that the docs name every field."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from theodolite.report import schema

from . import sample

DOCS = Path(__file__).parents[2] / "docs" / "summary.md"


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    """A sample with one field replaced, or removed where the value is `...`."""
    made = copy.deepcopy(sample.with_passkey(sample.summary()))
    place: Any = made
    for step in path[:-1]:
        place = place[step]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return made


class TestSchema:
    def test_is_itself_a_valid_schema(self):
        jsonschema.Draft202012Validator.check_schema(schema.load())

    @pytest.mark.parametrize(
        "made",
        [
            sample.summary(),
            sample.with_passkey(sample.summary(to=16384)),
            sample.summary(names=("none", *sample.MAPS), passed=("none", *sample.MAPS)),
        ],
    )
    def test_accepts_the_samples_after_a_round_trip(self, made):
        made = json.loads(json.dumps(made))
        jsonschema.validate(made, schema.load())
        schema.validate(made)

    @pytest.mark.parametrize(
        ("path", "value", "message"),
        [
            (["model"], ..., "summary.model: missing"),
            (["schema"], "theodolite.survey/2", "summary.schema: got 'theodolite.survey/2'"),
            (["trained_length"], 8192.5, r"summary.trained_length: got 8192.5; it must be integer"),
            (["to"], True, "summary.to: got True; it must be integer"),
            (["scalings"], [], "summary.scalings: got 0 items"),
            (["scalings", 1, "reach", 0, "accuracy"], 1.5, r"summary.scalings\[1\].reach\[0\].accuracy: got 1.5"),
            (["scalings", 0, "bands", 2, "perplexity"], 0, r"scalings\[0\].bands\[2\].perplexity: got 0; .* above 0"),
            (["scalings", 0, "bands", 0, "interval"], [1.0], r"bands\[0\].interval: got 1 items"),
            (["scalings", 0, "recall", 0, "nll_alone"], ..., r"recall\[0\].nll_alone: missing"),
            (["passkey", 0, "exact"], 1, r"summary.passkey\[0\].exact: got 1; it must be boolean"),
            (["settings", "llama.cpp"], None, r"summary.settings.llama.cpp: got None; it must be string"),
            (["settings", "theodolite"], 3, r"summary.settings.theodolite: got 3; it must be string"),
            (["scalings", 1, "relative"], "dca", r"scalings\[1\].relative: got 'dca'; it must be object or null"),
            (["scalings", 1, "relative"], {"window": 9}, r"scalings\[1\].relative.kind: missing"),
            (["model_details", "fingerprint"], None, r"model_details.fingerprint: got None; it must be string"),
        ],
    )
    def test_names_the_field_at_fault_and_agrees_with_jsonschema(self, path, value, message):
        made = changed(path, value)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(made, schema.load())
        with pytest.raises(ValueError, match=message):
            schema.validate(made)

    @pytest.mark.parametrize(
        ("path", "value", "message"),
        [
            (["scalings", 0, "name"], "yarn:2", "'yarn:2' stands twice"),
            (["recommendation", "name"], "linear:9", "'linear:9' is none of the scalings"),
            (["scalings", 0, "inv_freq", "scaled"], [1.0], "plain has 32 pairs and scaled 1"),
            (["scalings", 0, "reach", 0, "nll"], float("nan"), "got nan; it must be finite"),
        ],
    )
    def test_refuses_what_a_schema_cannot_say(self, path, value, message):
        with pytest.raises(ValueError, match=message):
            schema.validate(changed(path, value))

    @pytest.mark.parametrize(
        "path", [["scalings", 1, "relative"], ["model_details", "fingerprint"], ["settings", "theodolite"]]
    )
    def test_accepts_a_summary_from_before_a_field_was_added(self, path):
        made = changed(path, ...)
        jsonschema.validate(made, schema.load())
        schema.validate(made)

    def test_refuses_what_is_no_object(self):
        with pytest.raises(ValueError, match=r"summary: got \[\]; it must be object"):
            schema.validate([])


def fields(rule: dict[str, Any], path: str) -> list[str]:
    """Every field of the schema, lists marked by `[]`."""
    if "$ref" in rule:
        rule = schema.load()["$defs"][rule["$ref"].rsplit("/", 1)[-1]]
    found = []
    for name, inner in rule.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        found += [here, *fields(inner, here)]
    if "items" in rule:
        found += fields(rule["items"], f"{path}[]")
    return found


def test_every_field_is_documented_and_no_other():
    rows = [line.split("|")[1].strip().strip("`") for line in DOCS.read_text("utf-8").splitlines() if line[:3] == "| `"]
    assert sorted(rows) == sorted(fields(schema.load(), ""))


@pytest.mark.parametrize("module", ["theodolite.report", *(f"theodolite.report.{n}" for n in ("page", "terminal"))])
def test_importing_the_room_loads_neither_torch_nor_an_extra(module):
    heavy = ("torch", "transformers", "matplotlib", "jinja2", "rich", "theodolite.survey")
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
