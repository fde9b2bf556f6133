"""The search of a tiny model from beginning to end, in this process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.survey.test_survey import Quiet
from theodolite.models import load
from theodolite.models.load import LoadedModel
from theodolite.plan import Llama3, PlanError
from theodolite.plan.huggingface import read_config
from theodolite.search import Settings, run, search
from theodolite.search.confirm import Confirmed, bands, depths, gain, lengths_to_confirm
from theodolite.search.result import is_better
from theodolite.search.settings import shared_out
from theodolite.search.trials import Measure, Trials
from theodolite.survey.found import read_found
from theodolite.survey.scalings import candidate_of, parse_scalings, require_known, with_factor
from theodolite.survey.texts import Document

TO = 1024


@pytest.fixture(scope="module")
def llama(tiny_llama: Path) -> LoadedModel:
    return load(str(tiny_llama), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def gemma3(tiny_gemma3: Path) -> LoadedModel:
    return load(str(tiny_gemma3), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def done(llama, tmp_path_factory):
    out = tmp_path_factory.mktemp("search")
    return search(llama, settings(out), Quiet()), out


def settings(out: Path, **other) -> Settings:
    return Settings(**{"out": out, "to": TO, "evaluations": 20, **other})


class Killed(Exception):
    """Stands for a kill."""


class Dying(Quiet):
    """Dies after so many measurements."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def advance(self, done: float) -> None:
        super().advance(done)
        self.left -= 1
        if self.left < 0:
            raise Killed


class TestWhole:
    """What comes out says what was tried, what was found, and whether it is better."""

    def test_the_result(self, done):
        result, out = done
        assert json.loads((out / "search.json").read_text()) == result
        assert [trial["name"] for trial in result["trials"][:6]] == [
            "none", "yarn:2", "yarn:3", "ntk:2", "ntk:3", "ntk:4",
        ]  # fmt: skip
        spaces = [trial["space"] for trial in result["trials"][6:]]
        assert spaces == sorted(spaces, key=["yarn", "pairs"].index)
        assert set(spaces) == {"yarn", "pairs"}
        assert {rival.split(":")[0] for rival in result["rivals"]} == {"yarn", "ntk"}
        assert [entry["length"] for entry in result["confirmed"]["lengths"]] == [768, 1024]
        assert set(result["confirmed"]["short"]) == {"found", *result["rivals"]}

    def test_costs_are_by_their_definition(self, done):
        result, _ = done
        # Of those named that copy best, one of each kind.
        kinds = [[t for t in result["trials"][1:6] if t["name"].startswith(kind)] for kind in ("yarn", "ntk")]
        short = min(min(kind, key=lambda t: t["copying"])["short"] for kind in kinds)
        for trial in result["trials"]:
            cost = trial["copying"] + 20 * max(0.0, trial["short"] - short)
            # Three numbers rounded to six digits after the point, one of them twenty times.
            assert trial["cost"] == pytest.approx(cost, abs=2.2e-5)

    def test_each_stretch_of_text_has_one_purpose(self, done):
        result, _ = done
        texts = result["texts"]
        hashes = [text["sha256"] for text in (texts["search"], *texts["choice"], *texts["confirm"])]
        assert len(set(hashes)) == len(hashes) == 5

    def test_a_random_model_is_said_to_copy_nothing(self, done):
        result, _ = done
        assert not result["won"]
        assert "does not continue passages even from near by" in result["why"]

    def test_what_was_found_is_read_back(self, done, llama):
        result, out = done
        plan = read_found(str(out), llama.plan)
        trial = next(trial for trial in result["trials"] if trial["name"] == result["winner"]["name"])
        assert plan.scalable[0].inv_freq().tolist() == trial["inv_freq"]
        config = {**llama.config, "rope_parameters": result["winner"]["rope_parameters"]}
        assert read_config(config).scalable[0].inv_freq().tolist() == trial["inv_freq"]

    def test_layers_with_windows_keep_theirs(self, gemma3, tmp_path):
        result = search(gemma3, settings(tmp_path, spaces=("yarn",), evaluations=6), Quiet())
        plan = read_found(str(tmp_path), gemma3.plan)
        changed = [a != b for a, b in zip(plan.layers, gemma3.plan.layers, strict=True)]
        windows = [layer.mask.sliding_window is not None for layer in gemma3.plan.layers]
        assert changed == [not window for window in windows]
        assert result["winner"]["space"] == "yarn"


class TestResume:
    """A killed search goes on where it was, and comes to the same."""

    @pytest.mark.parametrize("after", [0, 3, 40, 110])
    def test_a_killed_search(self, llama, done, tmp_path, after):
        with pytest.raises(Killed):
            search(llama, settings(tmp_path), Dying(after))
        again = search(llama, settings(tmp_path), Quiet())
        again["settings"] = done[0]["settings"]
        assert again == done[0]

    def test_a_finished_search_measures_nothing(self, llama, done, monkeypatch):
        result, out = done

        def fail(*_):
            raise AssertionError("measured again")

        monkeypatch.setattr("theodolite.survey.bench.Bench._run", fail)
        assert search(llama, settings(out), Quiet()) == result

    def test_more_evaluations_keep_those_made(self, llama, done, tmp_path):
        result, _ = done
        more = search(llama, settings(tmp_path, evaluations=60, spaces=("yarn",)), Quiet())
        fewer = search(llama, settings(tmp_path, evaluations=20, spaces=("yarn",)), Quiet())
        ours = [trial["point"] for trial in fewer["trials"]]
        assert [trial["point"] for trial in more["trials"]][: len(ours)] == ours
        assert [trial["point"] for trial in result["trials"]][:6] == ours[:6]


class TestPlanted:
    """A search whose measure has a known best finds it, or comes nearer than anything with a name."""

    def test_a_planted_map(self, llama, tmp_path, monkeypatch):
        own = llama.plan.scalable[0].inv_freq()
        wanted = np.log(own) - np.array([0, 0, 0.05, 0.2, 0.7, 0.9, 1.1, 1.1])

        def measure(self, plan, documents, what):
            rotary = plan.at_length(TO).scalable[0]
            away = np.abs(np.log(rotary.inv_freq()) - wanted).sum() + 5 * abs(rotary.attention_factor() - 1.1)
            return Measure(copying=float(away), accuracy=0.5, short=3.0, cells=[])

        monkeypatch.setattr(Trials, "measure", measure)
        result = search(llama, settings(tmp_path, evaluations=300), Quiet())
        named = min(trial["cost"] for trial in result["trials"][:6])
        best = min(result["trials"], key=lambda trial: trial["cost"])
        assert result["winner"]["name"] == best["name"]
        assert best["space"] == "pairs"
        assert best["cost"] < named / 4
        assert result["winner"]["scaling"]["attention_factor_given"] == pytest.approx(1.1, abs=0.05)

    def test_short_text_is_not_given_away(self, llama, tmp_path, monkeypatch):
        """What copies better and loses short text does not win."""

        def measure(self, plan, documents, what):
            theta = plan.scalable[0].rope_theta / llama.plan.scalable[0].rope_theta
            return Measure(copying=3.0 - theta, accuracy=0.5, short=3.0 + 0.2 * (theta - 1.0), cells=[])

        monkeypatch.setattr(Trials, "measure", measure)
        result = search(llama, settings(tmp_path, evaluations=40, spaces=("yarn",)), Quiet())
        assert result["winner"]["rope_theta"] == pytest.approx(llama.plan.scalable[0].rope_theta, rel=0.05)


class TestConfirm:
    def test_lengths(self):
        assert lengths_to_confirm(8192, 16384) == [12288, 16384]
        assert lengths_to_confirm(8192, 10000) == [10000]
        assert lengths_to_confirm(8192, 65536) == [12288, 16384, 65536]

    def test_bands_are_equal_and_nearest_first(self):
        one = Confirmed(recall={1200: np.arange(24.0).reshape(2, 12)}, perplexity={}, short=0.0)
        rows = bands(1200, {"found": one})
        assert [row["distance"] for row in rows] == list(range(50, 1200, 100))
        # The last band of the text is the nearest: the mean over both documents of its column.
        assert [row["accuracy"]["found"] for row in rows] == [6.0 + band for band in range(11, -1, -1)]
        assert len(depths()) == 12

    def test_gain(self):
        rng = np.random.default_rng(1)
        base = rng.random((2, 12))
        same = Confirmed(recall={8: base}, perplexity={}, short=0.0)
        more = Confirmed(recall={8: base + 0.1}, perplexity={}, short=0.0)
        assert gain(more, same, 8) == {"mean": 0.1, "low": 0.1, "high": 0.1}
        noisy = Confirmed(recall={8: base + rng.normal(0, 0.1, base.shape)}, perplexity={}, short=0.0)
        found = gain(noisy, same, 8)
        assert found["low"] < found["mean"] < found["high"]
        # Four standard errors of 24 draws with 0.1 each.
        assert found["high"] - found["low"] == pytest.approx(4 * 0.1 / 24**0.5, rel=0.4)


class TestBetter:
    """It wins where the gain is beyond doubt over each rival, at each length, and no short text is given for it."""

    @staticmethod
    def entry(**lows: float) -> dict[str, Any]:
        return {"gain": {name: {"mean": low + 0.05, "low": low, "high": low + 0.1} for name, low in lows.items()}}

    @pytest.mark.parametrize(("lows", "short", "better"), [
        ([{"yarn": 0.01, "ntk": 0.2}], 3.5, True),
        ([{"yarn": -0.01, "ntk": 0.2}], 3.5, False),
        ([{"yarn": 0.01, "ntk": 0.0}], 3.5, False),
        ([{"yarn": 0.01, "ntk": 0.2}, {"yarn": -0.01, "ntk": 0.2}], 3.5, False),
        ([{"yarn": 0.01, "ntk": 0.2}], 3.6, True),
        ([{"yarn": 0.01, "ntk": 0.2}], 3.65, False),
        ([{"yarn": 0.01, "ntk": 0.2}], 3.8, False),
    ])  # fmt: skip
    def test_rule(self, lows, short, better):
        entries = [self.entry(**one) for one in lows]
        assert is_better(entries, {"found": short, "yarn": 3.6, "ntk": 3.7}, ["yarn", "ntk"]) is better


def document(tokens: int) -> Document:
    return Document(name="book", tokens=torch.arange(tokens), sha256="")


class TestTexts:
    """Nothing that was searched on is confirmed on."""

    @pytest.mark.parametrize(("sizes", "counts"), [
        ([202], (1, 0, 1)), ([303], (1, 1, 1)), ([404], (1, 2, 1)), ([606], (1, 2, 2)), ([5000], (1, 2, 2)),
        ([150, 150], (1, 0, 1)), ([101] * 9, (1, 2, 2)),
    ])  # fmt: skip
    def test_counts(self, sizes, counts):
        texts = shared_out([document(size) for size in sizes], 100)
        assert (1, len(texts.choice), len(texts.confirm)) == counts
        assert {len(text.tokens) for text in (texts.search, *texts.choice, *texts.confirm)} == {101}

    def test_they_do_not_overlap(self):
        texts = shared_out([document(5000)], 100)
        tokens = torch.cat([text.tokens for text in (texts.search, *texts.choice, *texts.confirm)])
        assert len(tokens.unique()) == len(tokens)

    def test_too_little(self):
        with pytest.raises(ValueError, match=r"a search to 100 tokens needs 202, half of them .*book has 201"):
            shared_out([document(201)], 100)


class TestByName:
    """`search:DIR` stands wherever a scaling is named."""

    def test_candidates(self, done, llama):
        _, out = done
        require_known(f"yarn:2,search:{out}")
        candidate = candidate_of(f"search:{out}", llama.plan, to=TO)
        assert candidate.plan == read_found(str(out), llama.plan)
        assert candidate.relative is None
        assert with_factor(candidate, 2.0) == f"search:{out}"
        names = [one.name for one in parse_scalings(f"yarn:2,search:{out}", llama.plan, to=TO)]
        assert names == ["none", "yarn:2", f"search:{out}"]

    def test_of_another_model(self, done, llama):
        _, out = done
        other = replace(llama.plan.scalable[0], rope_theta=5e4)
        with pytest.raises(PlanError, match="found for a model with other frequencies"):
            read_found(str(out), llama.plan.with_rotary(other))

    @pytest.mark.parametrize("damage", [
        b"", b"{", b"[]", b"\xff\xfe", b'{"schema": "theodolite.search/1"}', b'{"schema": "other"}', b"[" * 100_000,
        b'{"schema": "theodolite.search/1", "winner": {"scaling": {"rope_type": "linear"}}}',
        b'{"schema": "theodolite.search/1", "winner": {"scaling": {"rope_type": "yarn", "factor": -1}}}',
    ])  # fmt: skip
    def test_damaged(self, tmp_path, llama, damage):
        (tmp_path / "search.json").write_bytes(damage)
        with pytest.raises(PlanError, match=r"search\.json|factor: got -1"):
            read_found(str(tmp_path), llama.plan)

    def test_none(self, tmp_path, llama):
        with pytest.raises(PlanError, match="cannot be read as a result of a search"):
            candidate_of(f"search:{tmp_path / 'nowhere'}", llama.plan, to=TO)


class TestRefusals:
    @pytest.mark.parametrize(("other", "message"), [
        ({"to": 512}, "trained for 512 tokens; give more"),
        ({"evaluations": 3}, "evaluations"),
        ({"spaces": ("yarn", "yarn")}, "each once"),
        ({"spaces": ("other",)}, "yarn, pairs"),
        ({"finalists": 0}, "finalists"),
        ({"tokens": 100}, "tokens"),
        ({"seed": -1}, "seed"),
        ({"against": "magic"}, "magic"),
    ])  # fmt: skip
    def test_settings(self, llama, tmp_path, other, message):
        with pytest.raises(ValueError, match=message):
            search(llama, settings(tmp_path, **other), Quiet())

    def test_a_space_that_the_model_has_not(self, llama, tmp_path):
        native = Llama3(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128)
        scaled = replace(llama, plan=llama.plan.with_scaling(native))
        with pytest.raises(PlanError, match=r"llama3.*must not be lost"):
            search(scaled, settings(tmp_path, spaces=("yarn",)), Quiet())

    def test_outputs_that_are_no_numbers(self, llama, tmp_path, monkeypatch):
        bad = Measure(copying=float("nan"), accuracy=0.0, short=1.0, cells=[])
        monkeypatch.setattr(Trials, "measure", lambda *_: bad)
        with pytest.raises(FloatingPointError, match="not numbers"):
            search(llama, settings(tmp_path), Quiet())


class TestShares:
    def test_evaluations_are_shared_out(self):
        assert run._shares(160, ["yarn", "pairs"]) == [64, 96]
        assert run._shares(160, ["pairs", "yarn"]) == [96, 64]
        assert run._shares(160, ["pairs"]) == [160]
        assert run._shares(4, ["yarn", "pairs"]) == [2, 2]
