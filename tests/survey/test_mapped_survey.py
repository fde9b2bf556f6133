"""A survey with maps of distances: every instrument reads at them, and cells tell one map from another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.test_stream import MAPS, at_mapped_distances, log_probs
from tests.models.tiny import logits, own_plan, tiny, tokens
from theodolite.models import load, patched
from theodolite.models.load import LoadedModel
from theodolite.plan import DynamicNTK
from theodolite.positions import ReRoPE, SelfExtend
from theodolite.report import schema
from theodolite.runs import Store
from theodolite.survey import Settings, run, survey
from theodolite.survey.bench import positions_digest
from theodolite.survey.passages import CUE, LENGTH, passages_at, spread_starts
from theodolite.survey.passes import full_pass, recall_starts
from theodolite.survey.passkey import passkey, passkey_prompt
from theodolite.survey.reach import Spread, far_reach, spread_chunks, spread_reach
from theodolite.survey.scalings import candidate_of
from theodolite.survey.settings import DEPTHS
from theodolite.survey.texts import builtin_text, tokenize

from .folders import TRAINED
from .test_survey import TO, Quiet, instruments

NAMES = "none,self-extend,dca,rerope,leaky-rerope,sinks,lm-infinite"
# As in the tests of the reader at mapped distances; and numbers are stored to six places.
ROUNDED = 1e-6
STORED = ROUNDED + 1e-6


@pytest.fixture(scope="module")
def llama(tiny_llama: Path) -> LoadedModel:
    return load(str(tiny_llama), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def gemma3(tiny_gemma3: Path) -> LoadedModel:
    return load(str(tiny_gemma3), dtype="float32", device="cpu")


def settings(folder: Path, **more: Any) -> Settings:
    return Settings(out=folder, **{"scalings": NAMES, "passes": 6, **more})


def cells(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line)["cell"] for line in (folder / "results.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("relative", MAPS, ids=lambda relative: type(relative).__name__)
class TestInstruments:
    """Each instrument gives what one pass over all mapped distances gives, written out pair by pair."""

    @pytest.fixture(params=["llama", "gemma3"])
    def model(self, request: pytest.FixtureRequest) -> Any:
        return tiny(request.param, dtype=torch.float64, **({"sliding_window": 24} if request.param == "gemma3" else {}))

    @staticmethod
    def copied(model: Any, relative: Any, read: Tensor, places: Tensor, passage: Tensor, at: int) -> float:
        """Mean nll of a passage's continuation, begun again at position `at` after `read` at `places`."""
        ids, positions = torch.cat((read, passage)), torch.cat((places, at + torch.arange(LENGTH)))
        true = log_probs(at_mapped_distances(model, own_plan(model), ids, relative, positions), ids)
        return -float(true[len(read) + CUE - 1 :].mean())

    def test_full_pass(self, model, relative):
        text, plan = tokens(151)[0], own_plan(model)
        nll, recall = full_pass(
            model, plan, text, length=150, checkpoints=[101], depths=(0.0, 1.0), passages=1, chunk=40, relative=relative
        )
        true = -log_probs(at_mapped_distances(model, plan, text, relative), text)
        assert float((torch.from_numpy(nll) - true).abs().max()) < ROUNDED
        for cell in recall:
            (passage,) = passages_at(text, recall_starts(101, cell["depth"], 1))
            expected = self.copied(model, relative, text[:101], torch.arange(101), passage, 101)
            assert cell["nll"] == pytest.approx(expected, abs=STORED)

    def test_spread_reach(self, model, relative):
        text, form = tokens(301)[0], Spread(tokens=100, chunk=50, passages=1)
        made = spread_reach(model, own_plan(model), text, length=300, spread=form, relative=relative)
        chunks = spread_chunks(form, 300)
        places = torch.cat([torch.arange(begin, begin + 50) for begin in chunks])
        for cell, begin in zip(made, reversed(chunks), strict=True):
            (passage,) = passages_at(text, spread_starts(begin, begin + 50, 1))
            expected = self.copied(model, relative, text[places], places, passage, 300)
            assert cell["nll"] == pytest.approx(expected, abs=STORED)

    def test_far_reach(self, model, relative):
        text = tokens(101)[0]
        made = far_reach(model, own_plan(model), text, read=60, distances=[60, 700], passages=1, relative=relative)
        (start,) = spread_starts(0, 60, 1)
        (passage,) = passages_at(text, [start])
        for cell in made:
            expected = self.copied(model, relative, text[:60], torch.arange(60), passage, start + cell["distance"])
            assert cell["nll"] == pytest.approx(expected, abs=STORED)


class TestPasskey:
    """The key is asked for at mapped distances too."""

    def test_nll(self, llama):
        # Weights in float64 as the definition has them.
        model = tiny("llama", dtype=torch.float64, vocab_size=llama.model.config.vocab_size)
        text, relative = tokenize(llama.tokenizer, builtin_text("moby-dick"), at_least=200), ReRoPE(window=9)
        plan = own_plan(model)
        made = passkey(model, llama.tokenizer, plan, text, length=150, depth=0.3, relative=relative)
        prompt, digits = passkey_prompt(llama.tokenizer, text, length=150, depth=0.3)
        ids = torch.cat((prompt, digits))
        true = log_probs(at_mapped_distances(model, plan, ids, relative), ids)[-len(digits) :]
        assert made["nll"] == pytest.approx(-float(true.mean()), abs=STORED)


class TestWhole:
    """All maps beside the rest, in one summary by the schema."""

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_every_map_is_a_candidate(self, family, request, tmp_path):
        loaded, listener = request.getfixturevalue(family), Quiet()
        ids = torch.arange(3, 90)[None]
        before = logits(loaded.model, ids)
        summary = survey(loaded, settings(tmp_path, passkey=True), listener)
        schema.validate(summary)
        assert torch.equal(logits(loaded.model, ids), before)
        assert [s["name"] for s in summary["scalings"]] == NAMES.split(",")
        shipped, *mapped = summary["scalings"]
        assert shipped["relative"] is None
        assert [s["relative"]["kind"] for s in mapped] == [s["name"].replace("-", "_") for s in mapped]
        assert mapped[0]["relative"] == {"kind": "self_extend", "window": 256, "group_size": 3}
        assert mapped[0]["means"] == "Self-Extend: groups of 3 beyond 256 tokens"
        for scaling in mapped:
            assert scaling["inv_freq"] == shipped["inv_freq"]
            assert "no words for a map of distances" in scaling["rope_parameters"]["unsaid"]
            assert scaling["bands"][-1]["perplexity"] != shipped["bands"][-1]["perplexity"]
            assert scaling["reach"] != shipped["reach"]
            assert scaling["far_reach"] != shipped["far_reach"]
            # Every map leaves the first quarter of the trained length as it was.
            assert scaling["bands"][0]["perplexity"] == pytest.approx(shipped["bands"][0]["perplexity"], rel=1e-5)
            assert scaling["short_cost"]["ratio"] == pytest.approx(1.0, rel=1e-5)
        assert summary["model_details"]["fingerprint"] == loaded.fingerprint
        assert {cell["scaling"] for cell in summary["passkey"]} == set(NAMES.split(","))

    def test_short_text_and_passkey_are_read_at_mapped_distances(self, llama, tmp_path):
        # A window so short that it shows everywhere.
        read, name = (
            settings(tmp_path, scalings="rerope:window=9", passes=1, passkey=True, far=False),
            "rerope:window=9",
        )
        summary = survey(llama, read, Quiet())
        found = {(cell["scaling"], cell["length"], cell["depth"]): cell["nll"] for cell in summary["passkey"]}
        for length, depth in {(length, depth) for _, length, depth in found}:
            assert abs(found[name, length, depth] - found["none", length, depth]) > 1e-4
        unread = survey(llama, replace(read, passes=0, passkey=False), Quiet())
        costs = [made["scalings"][1]["short_cost"]["perplexity"] for made in (summary, unread)]
        # As short text of its own, it is what the pass has read; not what the model as shipped has.
        assert costs[0] == pytest.approx(costs[1], rel=1e-5)
        assert abs(unread["scalings"][1]["short_cost"]["ratio"] - 1) > 1e-4

    def test_progress_adds_up(self, llama, tmp_path):
        listener = Quiet()
        survey(llama, settings(tmp_path, scalings="none,linear,rerope,dca", passes=2), listener)
        assert listener.done == pytest.approx(listener.total, rel=0.2)

    def test_what_does_not_fit_is_told(self, llama, tmp_path):
        listener = Quiet()
        survey(llama, settings(tmp_path, scalings="self-extend:2:window=400", passes=0, far=False), listener)
        assert (
            "self-extend:2:window=400: distances to 583 in 768 tokens, and those trained end at 511" in listener.lines
        )


class TestLengthDependent:
    """A model whose own frequencies follow the length is settled for each, under a map too."""

    def test_a_pass_for_every_length(self, llama, tmp_path):
        dynamic = DynamicNTK(factor=2.0, original_max_position_embeddings=TRAINED)
        native = replace(llama, plan=llama.plan.with_scaling(dynamic))
        with Store(tmp_path) as store:
            made = instruments(native, store)
            shipped, mapped = (made.read(candidate_of(name, native.plan, to=TO)) for name in ("none", "rerope"))
        # At the length asked the frequencies are the shipped model's, and its pass is not that of the map.
        assert (shipped.lengths, mapped.lengths) == ([256, 512], [256, 512, 768])
        (document,) = made.documents
        for length in mapped.lengths:
            settled = native.plan.at_length(length)
            with patched(llama.model, settled):
                _, recall = full_pass(
                    llama.model,
                    settled,
                    document.tokens,
                    length=length,
                    checkpoints=[length],
                    depths=DEPTHS,
                    relative=ReRoPE(window=256),
                )
            nll = [cell["nll"] for cell in mapped.recall if cell["length"] == length]
            assert nll == pytest.approx([cell["nll"] for cell in recall], abs=1e-5)
            plain = [cell["nll"] for cell in shipped.recall if cell["length"] == length]
            assert np.abs(np.subtract(nll, plain)).max() > 1e-4


class TestCells:
    """A cell without a map keeps the key that it had; one with a map has a key of its own."""

    def test_the_key_of_a_cell_without_a_map(self, llama, tmp_path):
        survey(llama, settings(tmp_path, scalings="none,rerope", passes=0, far=False), Quiet())
        with Store(tmp_path) as store:
            document = instruments(llama, store).documents[0]
            known = {
                "version": 1,
                "model": llama.fingerprint,
                "dtype": "float32",
                "text": document.sha256,
                "positions": positions_digest(llama.plan),
                "instrument": "spread reach",
                "length": TO,
                "tokens": 4096,
                "chunk": 192,
                "passages": 2,
            }
            assert known in store
            assert {**known, "relative": {"kind": "rerope", "window": 256}} in store
            assert {**known, "relative": None} not in store

    def test_what_was_measured_without_maps_is_taken_with_them(self, llama, tmp_path):
        survey(llama, settings(tmp_path, scalings="none,linear", passes=1), Quiet())
        listener = Quiet()
        survey(llama, settings(tmp_path, scalings="none,linear,rerope", passes=2), listener)
        assert listener.begun == ["reach of rerope", "far reach of rerope", f"full pass of rerope, {TO} tokens"]

    def test_maps_differ_by_kind_and_by_setting(self, llama, tmp_path):
        names = ("rerope:window=9", "rerope:window=10", "sinks:4:window=9", "lm-infinite:4:window=9")
        survey(llama, settings(tmp_path, scalings=",".join(names), passes=0, far=False), Quiet())
        made = [cell for cell in cells(tmp_path) if cell["instrument"] == "spread reach"]
        assert len(made) == 1 + len(names)
        assert len({json.dumps(cell.get("relative")) for cell in made}) == 1 + len(names)

    def test_two_spellings_are_one_cell(self, llama, tmp_path):
        survey(llama, settings(tmp_path, scalings="self-extend,dca", passes=2), Quiet())
        listener = Quiet()
        text = "self-extend:3:window=256,dca:pinned=383:local_size=32"
        survey(llama, settings(tmp_path, scalings=text, passes=2), listener)
        assert listener.begun == []

    def test_every_cell_of_a_map_says_so(self, llama, tmp_path):
        survey(llama, settings(tmp_path, scalings="dca", passes=1, passkey=True), Quiet())
        kinds = {"spread reach", "far reach", "pass", "passkey"}
        expected = {"kind": "dca", "chunk_size": 384, "local_size": 32, "pinned": None}
        assert {cell["instrument"] for cell in cells(tmp_path) if cell.get("relative") == expected} == kinds
        assert all("relative" not in cell or cell["relative"] == expected for cell in cells(tmp_path))


class Stops(Quiet):
    """A listener that is interrupted when the work on cell number `after` begins."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def working(self, what: str) -> None:
        super().working(what)
        if len(self.begun) > self.after:
            raise KeyboardInterrupt


class TestResume:
    """An interrupted survey goes on with the next cell, and writes the same bytes as one that was not."""

    def test_interrupted_at_every_cell(self, llama, tmp_path):
        asked = settings(tmp_path / "whole", scalings="none,yarn,self-extend,rerope", passes=2)
        whole = Quiet()
        survey(llama, asked, whole)
        cut = replace(asked, out=tmp_path / "cut")
        begun: list[str] = []
        for after in range(len(whole.begun) + 1):
            listener = Stops(1 if after < len(whole.begun) else 99)
            try:
                survey(llama, cut, listener)
            except KeyboardInterrupt:
                begun += listener.begun[:-1]
            else:
                begun += listener.begun
                break
        assert begun == whole.begun
        summaries = [(folder / "summary.json").read_bytes() for folder in (asked.out, cut.out)]
        assert summaries[0] == summaries[1]


class TestRecommendation:
    """Where a map wins, no engine is given settings that do not have it."""

    def test_settings_of_the_winner(self, llama, tmp_path, monkeypatch):
        def recommend(scalings: list[dict[str, Any]], **more: Any) -> dict[str, str]:
            return {"name": "self-extend", "why": "It holds."}

        monkeypatch.setattr("theodolite.survey.verdict.recommend", recommend)
        summary = run.survey(llama, settings(tmp_path, scalings="none,self-extend", passes=1), Quiet())
        schema.validate(summary)
        made = summary["settings"]
        assert made["theodolite"].splitlines() == [
            "theodolite ask --model tiny-llama --scaling self-extend:3:window=256 DOCUMENT QUESTION",
            f"# in Python: theodolite.models.Stream(model, plan, relative={SelfExtend(window=256, group_size=3)})",
        ]
        engines = {name: text for name, text in made.items() if name != "theodolite"}
        assert set(engines) == {"transformers", "vllm", "sglang", "llama.cpp"}
        assert all(isinstance(text, str) and "rope" not in text and "serve " not in text for text in engines.values())
