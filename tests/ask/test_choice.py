"""Which scaling a long document is read by: as asked, as a survey found, or as the text itself shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.survey.conftest import calm, tiny_llama  # noqa: F401
from tests.survey.folders import TRAINED
from theodolite.ask import choice
from theodolite.models import load
from theodolite.models.load import LoadedModel
from theodolite.plan import PlanError, YaRN
from theodolite.positions import SelfExtend
from theodolite.survey.summary import SCHEMA
from theodolite.survey.texts import builtin_text


@pytest.fixture(scope="module")
def loaded(tiny_llama: Path) -> LoadedModel:  # noqa: F811
    return load(str(tiny_llama), dtype=torch.float32, device="cpu")


class Silent:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.worked: list[str] = []

    def expect(self, total: float) -> None: ...

    def working(self, what: str) -> None:
        self.worked.append(what)

    def advance(self, done: float) -> None: ...

    def finished(self, line: str) -> None: ...


def scaling(name: str, holds_to: int | None, recall: float | None, *, to: int = 1024) -> dict[str, Any]:
    cells = [] if recall is None else [{"length": to, "depth": 0.5, "distance": 9, "accuracy": recall}]
    return {"name": name, "holds_to": holds_to, "recall": cells, "bands": [{}] if holds_to or recall else []}


def summary(loaded: LoadedModel, recommended: str, *scalings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "model": "tiny",
        "model_details": {"fingerprint": loaded.fingerprint},
        "to": 1024,
        "scalings": list(scalings),
        "recommendation": {"name": recommended, "why": "so"},
        **changes,
    }


class TestAsAsked:
    """A scaling that is named is taken."""

    def test_taken(self, loaded: LoadedModel) -> None:
        asked = choice.as_asked(loaded, "yarn", 800)
        assert asked.candidate.plan.layers[0].rotate.scaling == YaRN(factor=2, original_max_position_embeddings=TRAINED)
        assert asked.why == "yarn:2, as asked"
        assert choice.as_asked(loaded, "none", 800).candidate.plan == loaded.plan
        mapped = choice.as_asked(loaded, "self-extend:4:window=64", 800).candidate
        assert mapped.relative == SelfExtend(window=64, group_size=4)

    @pytest.mark.parametrize("name", ["yarrn", "yarn,linear", "yarn:0.5", "yarn:2:beta=3"])
    def test_refused(self, loaded: LoadedModel, name: str) -> None:
        with pytest.raises(PlanError, match=r"scaling|factor"):
            choice.as_asked(loaded, name, 800)


class TestByLength:
    """What is within the trained length is read as shipped."""

    def test_within_and_past(self, loaded: LoadedModel) -> None:
        found = choice.by_length(loaded, TRAINED)
        assert found is not None
        assert found.candidate.plan == loaded.plan
        assert found.why == "as shipped: within the 512 of training"
        assert choice.by_length(loaded, TRAINED + 1) is None


class TestFromSurvey:
    """A survey's recommendation, where it holds that far; else what recalls best of what holds; else nothing."""

    def test_the_recommendation(self, loaded: LoadedModel) -> None:
        made = summary(
            loaded, "yarn:2", scaling("none", 600, 0.2), scaling("yarn:2", 1024, 0.5), scaling("ntk:2", 1024, 0.52)
        )
        found = choice.from_survey(loaded, made, 900)
        assert found is not None
        assert found.candidate.name == "yarn:2"
        assert found.why == "yarn:2, which the survey found to hold to 1,024, recalls 50% at 1,024"

    def test_the_best_that_holds(self, loaded: LoadedModel) -> None:
        made = summary(
            loaded, "none", scaling("none", 600, 0.9), scaling("yarn:2", 1024, 0.5), scaling("ntk:2", 1024, 0.52)
        )
        found = choice.from_survey(loaded, made, 900)
        assert found is not None
        assert found.candidate.name == "ntk:2"

    def test_the_model_as_shipped(self, loaded: LoadedModel) -> None:
        made = summary(loaded, "none", scaling("none", 1024, 0.9), scaling("yarn:2", 1024, 0.9))
        found = choice.from_survey(loaded, made, 900)
        assert found is not None
        assert found.candidate.plan == loaded.plan
        assert found.why.startswith("as shipped, which the survey found to hold to 1,024")

    def test_settings_are_those_of_the_surveys_length(self, loaded: LoadedModel) -> None:
        # A factor that is not given follows from how far the survey went, not from the document.
        made = summary(loaded, "yarn", scaling("none", 600, 0.2), scaling("yarn", 2048, 0.5, to=2048), to=2048)
        found = choice.from_survey(loaded, made, 600)
        assert found is not None
        assert found.candidate.plan.layers[0].rotate.scaling.factor == 4
        assert found.candidate.name == "yarn:4"

    def test_nothing(self, loaded: LoadedModel) -> None:
        made = summary(loaded, "yarn:2", scaling("none", 600, 0.2), scaling("yarn:2", 1024, 0.5))
        assert choice.from_survey(loaded, made, 1025) is None
        assert choice.from_survey(loaded, summary(loaded, "none", scaling("none", None, 0.2)), 900) is None

    def test_what_is_said_of_it(self, loaded: LoadedModel) -> None:
        made = summary(
            loaded, "yarn:2", scaling("none", 600, 0.2), scaling("yarn:2", 1024, 0.5), scaling("ntk", None, 0.1),
            scaling("linear", None, None),
        )  # fmt: skip
        assert choice.holds(made) == "holds, by the survey to 1,024: as shipped to 600, yarn:2 to 1,024, ntk nowhere"


class TestReadSurvey:
    """A survey is read where it is one, and of this model."""

    def test_read(self, loaded: LoadedModel, tmp_path: Path) -> None:
        made = summary(loaded, "none", scaling("none", 600, 0.2))
        (tmp_path / "summary.json").write_text(json.dumps(made))
        assert choice.read_survey(loaded, tmp_path) == made
        assert choice.read_survey(loaded, tmp_path / "summary.json") == made

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (None, "cannot be read"),
            ("{", "cannot be read"),
            ("[]", "is no summary of a survey"),
            ('{"schema": "other"}', "is no summary of a survey"),
            (json.dumps({"schema": SCHEMA}), "is not as a survey writes it"),
            (json.dumps({"schema": SCHEMA, "model_details": {}, "to": "far"}), "is not as a survey writes it"),
            ("[" * 100_000, "cannot be read"),
        ],
    )
    def test_refused(self, loaded: LoadedModel, tmp_path: Path, content: str | None, words: str) -> None:
        if content is not None:
            (tmp_path / "summary.json").write_text(content)
        with pytest.raises(ValueError, match=words):
            choice.read_survey(loaded, tmp_path)

    @pytest.mark.parametrize(
        "changes",
        [
            {"to": 5000.5},
            {"to": True},
            {"scalings": [{**scaling("none", 600, 0.2), "recall": 5}]},
            {"scalings": [{**scaling("none", 600, 0.2), "holds_to": "x"}]},
            {"scalings": [{**scaling("none", 600, 0.2), "name": ["a"]}]},
            {"scalings": 7},
            {"recommendation": None},
        ],
        ids=str,
    )
    def test_of_another_kind(self, loaded: LoadedModel, tmp_path: Path, changes: dict[str, Any]) -> None:
        made = summary(loaded, "none", scaling("none", 600, 0.2)) | changes
        (tmp_path / "summary.json").write_text(json.dumps(made))
        with pytest.raises(ValueError, match="is not as a survey writes it"):
            choice.read_survey(loaded, tmp_path)

    def test_another_model(self, loaded: LoadedModel, tmp_path: Path) -> None:
        made = summary(loaded, "none", scaling("none", 600, 0.2), model_details={"fingerprint": "another"})
        (tmp_path / "summary.json").write_text(json.dumps(made))
        with pytest.raises(ValueError, match=r"is of another model \(tiny\), or of other weights of it"):
            choice.read_survey(loaded, tmp_path)


class TestByReach:
    """Without a survey the text itself is copied from, under each scaling; once."""

    def test_measured_and_kept(self, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("THEODOLITE_CACHE", str(tmp_path))
        ids = loaded.tokenizer(builtin_text("moby-dick")[:4000])["input_ids"]
        document = torch.tensor(ids[:800])
        one, again = Silent(), Silent()
        found = choice.by_reach(loaded, document, 900, one)
        assert {"reach of none", "reach of rerope:window=256", "reach of yarn:2"} <= set(one.worked)
        assert choice.by_reach(loaded, document, 900, again) == found
        assert again.worked == []
        # A random model copies nothing under any scaling, and what is as good is left as shipped.
        assert found.candidate.plan == loaded.plan
        assert found.why.startswith("as shipped: copied from all over this text, as shipped ")

    def test_the_best_is_taken(self, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("THEODOLITE_CACHE", str(tmp_path))
        scores = {"none": 0.1, "ntk": 0.2, "yarn": 0.495, "rerope": 0.5, "self-extend": 0.2}
        monkeypatch.setattr(
            choice.Instruments, "spread", lambda self, candidate: [{"accuracy": scores[candidate.name.split(":")[0]]}]
        )
        document = torch.arange(800) % 300
        found = choice.by_reach(loaded, document, 900, Silent())
        # The first of those that are as good.
        assert found.candidate.name == "yarn:2"
        assert "ntk:2 20%, yarn:2 50%, rerope:window=256 50%" in found.why

    def test_for_the_room_and_not_for_the_text(
        self, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("THEODOLITE_CACHE", str(tmp_path))
        tried = []
        monkeypatch.setattr(
            choice.Instruments, "spread", lambda self, candidate: tried.append(candidate) or [{"accuracy": 0.5}]
        )
        choice.by_reach(loaded, torch.arange(480) % 300, 2500, Silent())
        assert [candidate.name for candidate in tried][:3] == ["none", "ntk:5", "yarn:5"]
        assert all(c.relative is None or c.relative.largest_distance(2500) < TRAINED for c in tried)

    def test_too_short_to_try(self, loaded: LoadedModel) -> None:
        found = choice.by_reach(loaded, torch.arange(266), 1300, Silent())
        assert found.candidate.plan == loaded.plan
        assert found.why == "as shipped: 266 tokens are too few to try scalings on"

    def test_what_is_damaged_is_measured_again(
        self, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("THEODOLITE_CACHE", str(tmp_path))
        document = torch.arange(800) % 300
        found = choice.by_reach(loaded, document, 900, Silent())
        (results,) = tmp_path.glob("ask/*/results.jsonl")
        results.write_bytes(b"[]\n" + results.read_bytes())
        again = Silent()
        assert choice.by_reach(loaded, document, 900, again) == found
        assert again.worked

    def test_another_process_holds_what_is_kept(
        self, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("THEODOLITE_CACHE", str(tmp_path))
        document = torch.arange(800) % 300
        with choice.Store(tmp_path / "ask" / loaded.fingerprint[:16]):
            choice.by_reach(loaded, document, 900, Silent())
