"""What is said of how to apply a recommendation."""

from __future__ import annotations

import shlex

import pytest

from theodolite import positions
from theodolite.plan.engines import settings as engine_settings
from theodolite.positions import RelativeMap
from theodolite.survey.apply import settings_of
from theodolite.survey.maps import MAPS
from theodolite.survey.scalings import candidate_of

from .plans import plan_of

ENGINES = ("transformers", "vllm", "sglang", "llama.cpp")


def made(name: str, model: str = "a model") -> dict:
    return settings_of(candidate_of(name, plan_of(), to=768), model=model, length=768)


class TestScalings:
    """A scaling of frequencies has the settings of the engines, and a command here."""

    @pytest.mark.parametrize("name", ["none", "linear:2", "yarn"])
    def test_engines(self, name):
        plan = candidate_of(name, plan_of(), to=768).plan
        assert {engine: made(name)[engine] for engine in ENGINES} == engine_settings(plan, model="a model", length=768)

    def test_here(self):
        assert made("none")["theodolite"] == "theodolite ask --model 'a model' DOCUMENT QUESTION"
        assert made("yarn:2")["theodolite"] == "theodolite ask --model 'a model' --scaling yarn:2 DOCUMENT QUESTION"


class TestMaps:
    """A map has a sentence for each engine, and words that make it again here."""

    @pytest.mark.parametrize("name", MAPS)
    def test_no_engine_has_settings(self, name):
        for engine in ENGINES:
            assert isinstance(made(name)[engine], str)
            assert made(name)[engine].endswith(".")
            assert "a model" not in made(name)[engine]

    @pytest.mark.parametrize("name", MAPS)
    def test_the_command_names_the_same_map(self, name):
        command, python = made(name)["theodolite"].splitlines()
        words = shlex.split(command)
        assert words[:4] == ["theodolite", "ask", "--model", "a model"]
        relative = candidate_of(name, plan_of(), to=768).relative
        assert candidate_of(words[words.index("--scaling") + 1], plan_of(), to=99).relative == relative
        written = python.removeprefix("# in Python: theodolite.models.Stream(model, plan, relative=").removesuffix(")")
        same = eval(written, {kind.__name__: kind for kind in MAPS.values()})
        assert same == relative
        assert isinstance(same, RelativeMap)
        assert hasattr(positions, type(same).__name__)

    def test_what_engines_have_is_said(self):
        assert "dropped it in October 2024" in made("self-extend")["llama.cpp"]
        assert "dual chunk" not in made("self-extend")["vllm"] + made("self-extend")["sglang"]
        assert "v0.11.0" in made("dca")["vllm"]
        assert "dual_chunk_flash_attn" in made("dca")["sglang"]
        assert "no setting" in made("rerope")["llama.cpp"]
