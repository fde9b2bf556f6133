"""The survey of a tiny model from beginning to end, in this process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from theodolite.models import load
from theodolite.models.load import LoadedModel
from theodolite.plan import Linear
from theodolite.report import schema
from theodolite.runs import Store
from theodolite.survey import Settings, bench, survey
from theodolite.survey.bench import Bench, positions_digest
from theodolite.survey.instruments import Instruments
from theodolite.survey.passkey import KEY, passkey_prompt
from theodolite.survey.scalings import parse_scalings
from theodolite.survey.texts import builtin_text, read_documents, tokenize

from .folders import TRAINED

TO = 768


class Quiet:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.total = 0.0
        self.done = 0.0
        self.begun: list[str] = []
        self.lines: list[str] = []

    def expect(self, total: float) -> None:
        self.total = total

    def working(self, what: str) -> None:
        self.begun.append(what)

    def advance(self, done: float) -> None:
        self.done += done

    def finished(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture(scope="module")
def llama(tiny_llama: Path) -> LoadedModel:
    return load(str(tiny_llama), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def gemma3(tiny_gemma3: Path) -> LoadedModel:
    return load(str(tiny_gemma3), dtype="float32", device="cpu")


def settings(folder: Path, **more: Any) -> Settings:
    return Settings(out=folder, **{"scalings": "none,linear", **more})


def instruments(loaded: LoadedModel, store: Store, to: int = TO, **more: Any) -> Instruments:
    asked = settings(store.folder, **more)
    documents = read_documents(["moby-dick"], loaded.tokenizer, tokens=to + 1)
    return Instruments(Bench(loaded, store, Quiet()), loaded.plan, documents, asked, to)


class TestWhole:
    """A summary has all its fields, whatever the model can or cannot do."""

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    @pytest.mark.parametrize("to", [None, 352, 512, 520, 700])
    def test_schema(self, family, to, request, tmp_path):
        loaded, listener = request.getfixturevalue(family), Quiet()
        asked = settings(
            tmp_path, to=to, scalings="none,linear,yarn:3", passes=1, texts=("moby-dick", "chinese-classics")
        )
        summary = survey(loaded, asked, listener)
        schema.validate(summary)
        assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8")) == json.loads(json.dumps(summary))
        assert summary["to"] == (to or TO)
        assert [s["name"] for s in summary["scalings"]] == ["none", "linear", "yarn:3"]
        assert [bool(s["bands"]) for s in summary["scalings"]].count(True) == 2
        assert (summary["truncated_window"] is None) == (summary["to"] <= TRAINED)
        # Random weights copy nothing: there is no accuracy from which a distance counts as reached.
        assert [s["reaches"] for s in summary["scalings"]] == [None] * 3
        assert listener.done == pytest.approx(listener.total, rel=0.2)

    def test_with_passkey_without_far_and_without_passes(self, llama, tmp_path):
        summary = survey(llama, settings(tmp_path, passkey=True, far=False, passes=0), Quiet())
        schema.validate(summary)
        assert [s["far_reach"] for s in summary["scalings"]] == [[], []]
        assert summary["scalings"][1]["bands"] == summary["scalings"][1]["passes"] == []
        assert summary["scalings"][1]["short_cost"]["ratio"] > 0
        cells = [(cell["scaling"], cell["length"], cell["depth"]) for cell in summary["passkey"]]
        assert cells == [("none", length, depth) for length in (256, 512, 768) for depth in (0.1, 0.5, 0.9)]
        assert summary["recommendation"]["name"] == "none"

    def test_a_length_far_inside_the_trained_one(self, llama, tmp_path):
        long = replace(llama, plan=replace(llama.plan, max_position_embeddings=8192))
        summary = survey(long, settings(tmp_path, to=400), Quiet())
        schema.validate(summary)
        shipped = summary["scalings"][0]
        assert shipped["short_cost"]["tokens"] == 400
        assert min(cell["distance"] for cell in shipped["far_reach"]) == 400
        assert [(band["from"], band["to"]) for band in shipped["bands"]] == [(0, 400)]
        assert shipped["holds_to"] == 400

    def test_no_text_is_long_enough(self, llama, tmp_path):
        (tmp_path / "short.txt").write_text("Call me Ishmael.")
        with pytest.raises(ValueError, match=r"text: 769 tokens are needed for this length, and short\.txt has \d+$"):
            survey(llama, settings(tmp_path / "out", texts=(str(tmp_path / "short.txt"),)), Quiet())
        assert not (tmp_path / "out").exists()


class TestLengthDependent:
    """A scaling whose frequencies follow the length gets a pass with the frequencies of each length, and says so."""

    def test_a_pass_per_length_past_the_trained_one_and_the_shipped_pass_inside(self, llama, tmp_path):
        listener = Quiet()
        asked = settings(tmp_path, scalings="none,dynamic:2,linear", to=1280, passes=2)
        summary = survey(llama, asked, listener)
        shipped, dynamic, linear = summary["scalings"]
        assert shipped["passes"] == linear["passes"] == [{"length": None}]
        assert dynamic["passes"] == [{"length": length} for length in (768, 1024, 1280)]
        assert (shipped["depends_on_length"], dynamic["depends_on_length"]) == (False, True)
        begun = [what for what in listener.begun if what.startswith("full pass of dynamic")]
        assert begun == [f"full pass of dynamic:2, {length:,} tokens" for length in (768, 1024, 1280)]

        def recall(scaling: dict[str, Any], inside: bool) -> list[dict[str, Any]]:
            return [cell for cell in scaling["recall"] if (cell["length"] <= TRAINED) == inside]

        assert recall(dynamic, True) == recall(shipped, True)
        assert len(recall(dynamic, True)) == 12
        assert recall(dynamic, False) != recall(shipped, False)
        assert [cell["length"] for cell in dynamic["recall"]] == [cell["length"] for cell in shipped["recall"]]
        # Inside the trained length its frequencies are the model's own: the short text costs nothing.
        assert dynamic["short_cost"]["ratio"] == 1.0

    def test_inside_the_trained_length_it_is_the_model_as_shipped(self, llama, tmp_path):
        summary = survey(llama, settings(tmp_path, scalings="none,dynamic:2", to=TRAINED), Quiet())
        shipped, dynamic = summary["scalings"]
        for field in ("bands", "recall", "reach", "passes", "holds_to"):
            assert dynamic[field] == shipped[field]
        assert dynamic["passes"] == [{"length": None}]

    def test_the_bands_are_those_of_the_frequencies_at_the_length_asked(self, llama, tmp_path):
        with Store(tmp_path) as store:
            made = instruments(llama, store)
            _, dynamic = parse_scalings("dynamic:2", llama.plan, to=TO)
            read = made.read(dynamic)
            settled = replace(dynamic, name="settled", plan=dynamic.plan.at_length(TO))
            # Pauses at other lengths cut the chunks elsewhere: the same numbers, rounded elsewhere.
            assert np.abs(read.nll[0] - made.read(settled).nll[0]).max() < 1e-5
            assert len(read.nll[0]) == TO


class TestCells:
    """A cell's key says all that its result depends on, and nothing that it does not."""

    def test_a_second_run_measures_nothing(self, gemma3, tmp_path):
        first, second = Quiet(), Quiet()
        one = survey(gemma3, settings(tmp_path), first)
        stored = (tmp_path / "results.jsonl").read_bytes()
        two = survey(gemma3, settings(tmp_path), second)
        assert second.begun == []
        assert first.begun
        assert (tmp_path / "results.jsonl").read_bytes() == stored
        assert json.dumps(one) == json.dumps(two)

    def test_another_run_in_the_folder_takes_what_is_there(self, llama, tmp_path):
        survey(llama, settings(tmp_path), Quiet())
        listener = Quiet()
        survey(llama, settings(tmp_path, scalings="none,linear,ntk:3", passes=0), listener)
        assert sorted(listener.begun) == [
            "far reach of ntk:3",
            "reach of ntk:3",
            "short text, linear",
            "short text, ntk:3",
        ]

    @pytest.mark.parametrize("what", ["text", "length", "positions", "model"])
    def test_what_differs_is_measured_again(self, llama, tmp_path, what):
        survey(llama, settings(tmp_path, passes=0, far=False), Quiet())
        listener, changed = Quiet(), settings(tmp_path, passes=0, far=False)
        loaded = llama
        if what == "text":
            changed = replace(changed, texts=("chinese-classics",))
        elif what == "length":
            changed = replace(changed, to=700)
        elif what == "positions":
            changed = replace(changed, scalings="none,linear:3")
        else:
            loaded = replace(llama, fingerprint="another")
        survey(loaded, changed, listener)
        assert "full pass of none" in " ".join(listener.begun) or what == "positions"
        assert any(line.startswith("reach of linear") for line in listener.begun)

    def test_equal_positions_under_two_names_are_one_cell(self, llama, tmp_path):
        survey(llama, settings(tmp_path, scalings="none,linear:2"), Quiet())
        listener = Quiet()
        survey(llama, settings(tmp_path, scalings="none,linear:2.0"), listener)
        assert listener.begun == []

    def test_a_raised_version_makes_old_cells_void(self, llama, tmp_path, monkeypatch):
        survey(llama, settings(tmp_path, passes=0, far=False), Quiet())
        monkeypatch.setattr(bench, "_VERSION", bench._VERSION + 1)
        listener = Quiet()
        survey(llama, settings(tmp_path, passes=0, far=False), listener)
        assert listener.begun

    def test_the_digest_of_positions(self, llama):
        plan = llama.plan
        assert positions_digest(plan) == positions_digest(plan.with_scaling(Linear(factor=1.0)))
        layer = replace(plan.layers[0], score_scale=0.3)
        others = [plan.with_scaling(Linear(factor=2.0)), replace(plan, layers=(layer, *plan.layers[1:]))]
        assert len({positions_digest(p) for p in (plan, *others)}) == 3


class TestSeveralDocuments:
    """Every text is measured; cells are their mean, and bands are over all tokens."""

    def test_means(self, llama, tmp_path):
        texts = ("moby-dick", "chinese-classics")
        alone = [survey(llama, settings(tmp_path / name, texts=(name,)), Quiet()) for name in texts]
        both = survey(llama, settings(tmp_path / "both", texts=texts), Quiet())

        def nll(summary: dict[str, Any], kind: str) -> list[float]:
            return [cell["nll"] for cell in summary["scalings"][1][kind]]

        for kind in ("reach", "recall"):
            expected = np.mean([nll(summary, kind) for summary in alone], axis=0)
            # Both sides are rounded to six places.
            assert np.abs(np.asarray(nll(both, kind)) - expected).max() <= 1e-6
        perplexities = [s["scalings"][0]["bands"][-1]["cumulative"] for s in alone]
        assert both["scalings"][0]["bands"][-1]["cumulative"] == pytest.approx(np.sqrt(np.prod(perplexities)), rel=1e-6)
        assert [text["name"] for text in both["texts"]] == list(texts)


class TestPasskey:
    """The prompt is as long as asked, hides the number once, and ends where its digits can follow."""

    @pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 1.0])
    def test_prompt(self, llama, depth):
        text = tokenize(llama.tokenizer, builtin_text("moby-dick"), at_least=600)
        prompt, digits = passkey_prompt(llama.tokenizer, text, length=500, depth=depth)
        assert len(prompt) + len(digits) == 500
        decoded = llama.tokenizer.decode(prompt)
        assert decoded.count(f"The pass key is {KEY}. Remember it. {KEY} is the pass key.") == 1
        assert decoded.rstrip().endswith("What is the pass key? The pass key is")
        assert llama.tokenizer.decode(digits).strip() == KEY
        assert llama.tokenizer.decode(torch.cat((prompt, digits))).endswith(f"The pass key is {KEY}")

    def test_too_short(self, llama):
        text = tokenize(llama.tokenizer, builtin_text("moby-dick"), at_least=600)
        with pytest.raises(ValueError, match="length: got 50; the pass key and its question alone take"):
            passkey_prompt(llama.tokenizer, text, length=50, depth=0.5)
