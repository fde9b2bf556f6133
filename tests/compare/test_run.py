"""A comparison from its settings to its result: what is trained, kept, done again, and said."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.compare.words import VOCAB, Last, Words
from theodolite.compare import Settings, Size, Training, compare
from theodolite.compare import stand as stand_module
from theodolite.compare.result import DEFINITIONS
from theodolite.compare.run import require_possible
from theodolite.compare.training import Trained
from theodolite.plan import PlanError
from theodolite.runs import Store

accelerate = pytest.importorskip("accelerate")


class Quiet:
    """A listener that keeps the lines, and can be told to stop the run at one."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.lines: list[str] = []
        self.total, self.done, self.stop_at = 0.0, 0.0, stop_at

    def expect(self, total: float) -> None:
        self.total = total

    def working(self, what: str) -> None: ...

    def advance(self, done: float) -> None:
        self.done += done

    def finished(self, line: str) -> None:
        self.lines.append(line)
        if self.stop_at is not None and len(self.lines) >= self.stop_at:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def accelerator() -> Any:
    return accelerate.Accelerator(cpu=True)


def tiny(out: Any, **given: Any) -> Settings:
    usual: dict[str, Any] = {
        "policies": ("rope", "alibi", "learned"),
        "seeds": (0, 1, 2),
        "size": Size(hidden_size=16, num_layers=1, num_heads=2),
        "training": Training(length=8, rows=4, steps=6, lr=1e-2),
        "times": (1, 2, 4),
        "rows": 5,
        "scalings": "linear,ntk:4,rerope",
        "fine_tuned": "none,linear",
        "fine_tuning": 2,
    }
    return Settings(out=out, **{**usual, **given})


def without_speed(result: dict[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(result)
    for cell in result["cells"]:
        del cell["tokens_per_second"], cell["seconds"]
    return result


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, accelerator: Any) -> tuple[Settings, dict[str, Any], Quiet]:
    settings, listener = tiny(tmp_path_factory.mktemp("whole")), Quiet()
    return settings, compare(settings, Words(), accelerator, listener), listener


class TestResult:
    """What a comparison says is what was measured, for every policy, seed and length."""

    def test_is_the_file(self, whole):
        settings, result, _ = whole
        assert json.loads((settings.out / "compare.json").read_text()) == result

    def test_has_every_policy_at_every_length_that_it_can_read(self, whole):
        _, result, _ = whole
        found = {(q["policy"], q["length"]) for q in result["quality"] if q["measure"] == "window"}
        assert found == {("rope", 8), ("rope", 16), ("rope", 32), ("alibi", 8), ("alibi", 16), ("alibi", 32)} | {
            ("learned", 8)
        }
        assert [(stop["policy"], stop["length"]) for stop in result["stops"]] == [("learned", 8)]

    def test_losses_are_those_of_the_stored_rows(self, whole):
        settings, result, _ = whole
        entries = [json.loads(line) for line in (settings.out / "results.jsonl").read_text().splitlines()]
        by_key = {entry["key"]: entry for entry in entries}
        weights = {
            (e["cell"]["policy"], e["cell"]["seed"]): e["result"]["weights"]
            for e in entries
            if e["cell"]["what"] == "training"
        }
        for quality in result["quality"]:
            for seed, value in zip(quality["seeds"], quality["by_seed"], strict=True):
                key = next(
                    key
                    for key, entry in by_key.items()
                    if entry["cell"]["what"] == "losses"
                    and entry["cell"]["weights"] == weights[quality["policy"], seed]
                    and entry["cell"]["frequencies"] is None
                )
                nll = np.load(settings.out / "tokens" / f"{key}.npy").astype(np.float64)
                n = quality["length"]
                part = nll[:, :n] if quality["measure"] == "window" else nll[:, n - settings.tail : n]
                assert value == pytest.approx(part.mean(), abs=1e-6)

    def test_differences_are_paired_by_seed(self, whole):
        _, result, _ = whole
        by = {(q["policy"], q["length"], q["measure"]): q["by_seed"] for q in result["quality"]}
        assert result["differences"]
        for d in result["differences"]:
            first, second = (by[name, d["length"], d["measure"]] for name in (d["policy"], d["against"]))
            assert d["by_seed"] == pytest.approx(np.subtract(first, second).tolist(), abs=2e-6)

    def test_rotary_policies_alone_are_run_under_scalings(self, whole):
        _, result, _ = whole
        extension = {(e["policy"], e["scaling"], e["fine_tuned"]) for e in result["extension"]}
        tuned = {("rope", scaling, style) for scaling in ("none", "linear") for style in ("plain", "pose")}
        assert extension == {("rope", "linear", None), ("rope", "ntk:4", None), ("rope", "rerope", None)} | tuned

    def test_says_what_its_words_mean(self, whole):
        _, result, _ = whole
        assert result["definitions"] == DEFINITIONS
        assert {q["measure"] for q in result["quality"]} <= set(DEFINITIONS)

    def test_counts_all_work(self, whole):
        _, _, listener = whole
        assert listener.done == listener.total > 0

    def test_a_task_has_the_share_right(self, tmp_path, accelerator):
        settings = tiny(tmp_path, policies=("rope", "nope"), training=Training(length=8, rows=8, steps=30, lr=1e-2))
        result = compare(settings, Last(), accelerator, Quiet())
        assert {q["measure"] for q in result["quality"]} == {"right", "exact", "loss"}
        assert all(0 <= q["mean"] <= 1 for q in result["quality"] if q["measure"] == "right")
        assert result["extension"] == []
        assert result["gain"] == []


class TestPaired:
    """Policies are held against each other with all else equal."""

    def test_weights_and_batches_are_equal(self, tmp_path, accelerator, monkeypatch):
        begun: dict[str, Any] = {}

        def train(model, batches, training, accelerator, *, advance):
            name = len(begun)
            begun[name] = {k: v.clone() for k, v in model.state_dict().items()}, batches(3).ids
            return Trained(curve=[(1, 1.0)], diverged=None, seconds=1.0, tokens=1)

        monkeypatch.setattr(stand_module, "train", train)
        settings = tiny(tmp_path, policies=("rope", "t5", "learned"), seeds=(4,), scalings="", fine_tuning=0)
        compare(settings, Words(), accelerator, Quiet())
        (first, ids), *others = begun.values()
        assert len(others) == 2
        for weights, other_ids in others:
            assert torch.equal(ids, other_ids)
            common = set(first) & set(weights)
            assert len(common) >= 10
            assert all(torch.equal(first[name], weights[name]) for name in common)


class TestGoesOn:
    """What is done is not done again, whatever stopped the run."""

    @pytest.mark.parametrize("stop_at", [1, 4, 9, 10, 12])
    def test_a_stopped_run_gives_the_same(self, whole, tmp_path, accelerator, stop_at):
        _, result, _ = whole
        settings = tiny(tmp_path)
        with pytest.raises(KeyboardInterrupt):
            compare(settings, Words(), accelerator, Quiet(stop_at))
        again = compare(settings, Words(), accelerator, Quiet())
        assert without_speed(again) == without_speed(result)

    def test_the_same_run_trains_nothing(self, whole, accelerator, monkeypatch):
        settings, result, _ = whole
        monkeypatch.setattr(stand_module, "train", None)
        monkeypatch.setattr(stand_module, "losses", None)
        monkeypatch.setattr(stand_module, "losses_near", None)
        assert compare(settings, Words(), accelerator, Quiet()) == result

    def test_more_policies_train_what_is_new(self, whole, tmp_path, accelerator, monkeypatch):
        settings, _, _ = whole
        trained = []
        real = stand_module.train

        def train(model, *given, **more):
            trained.append(model)
            return real(model, *given, **more)

        monkeypatch.setattr(stand_module, "train", train)
        wider = replace(settings, policies=(*settings.policies, "nope"))
        result = compare(wider, Words(), accelerator, Quiet())
        assert len(trained) == 3
        assert result["policies"] == ["rope", "alibi", "learned", "nope"]

    def test_weights_that_are_gone_are_trained_again(self, tmp_path, accelerator):
        settings = tiny(tmp_path, policies=("alibi",), seeds=(0,))
        result = compare(settings, Words(), accelerator, Quiet())
        (path,) = (tmp_path / "weights").iterdir()
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        assert without_speed(compare(settings, Words(), accelerator, Quiet())) == without_speed(result)
        assert path.read_bytes() == content

    def test_one_run_at_a_time(self, tmp_path, accelerator):
        settings = tiny(tmp_path)
        with Store(tmp_path), pytest.raises(BlockingIOError, match="another run"):
            compare(settings, Words(), accelerator, Quiet())


class TestDiverged:
    """A run that came to nothing is said and left out of every mean."""

    def test_is_reported(self, tmp_path, accelerator, monkeypatch):
        real = stand_module.train
        count = iter(range(100))

        def train(model, *given, **more):
            done = real(model, *given, **more)
            return replace(done, diverged="the loss was nan by step 3") if next(count) == 1 else done

        monkeypatch.setattr(stand_module, "train", train)
        settings, listener = tiny(tmp_path, policies=("rope", "alibi"), scalings="", fine_tuning=0), Quiet()
        result = compare(settings, Words(), accelerator, listener)
        assert [(c["policy"], c["seed"]) for c in result["cells"] if c["diverged"]] == [("alibi", 0)]
        assert all(q["seeds"] == [1, 2] for q in result["quality"] if q["policy"] == "alibi")
        assert all(d["seeds"] == [1, 2] and not d["significant"] for d in result["differences"])
        assert any("alibi" in line and "diverged: the loss was nan by step 3" in line for line in listener.lines)


class TestRefuses:
    """What cannot be done is said before anything is trained."""

    def test_too_little_text(self, tmp_path, accelerator):
        with pytest.raises(ValueError, match="160 tokens are needed and there are 100"):
            compare(tiny(tmp_path), Words(available=100), accelerator, Quiet())
        assert not list(tmp_path.iterdir())

    def test_a_policy_that_ends_before_the_task(self, tmp_path):
        with pytest.raises(PlanError, match=r"learned.*no positions past 8.*last is asked at 32"):
            require_possible(tiny(tmp_path), Last())

    def test_a_part_too_narrow_for_the_heads(self, tmp_path):
        with pytest.raises(PlanError, match="partial"):
            require_possible(tiny(tmp_path, policies=("rope", "rope:partial=0.05")), Words())

    @pytest.mark.parametrize(
        ("given", "match"),
        [
            ({"policies": ()}, "policies"),
            ({"policies": ("rope", "rope:theta=10000")}, "rope stands twice"),
            ({"policies": ("rpoe",)}, "policy"),
            ({"seeds": ()}, "seeds"),
            ({"seeds": (1, 1)}, "seeds"),
            ({"times": (2, 4)}, "times"),
            ({"times": (1, 4, 2)}, "times"),
            ({"styles": ("pose", "fancy")}, "styles"),
            ({"rows": 0}, "rows"),
            ({"fine_tuning": -1}, "fine_tuning"),
        ],
    )
    def test_settings(self, tmp_path, given, match):
        with pytest.raises(PlanError, match=match):
            tiny(tmp_path, **given)

    def test_sizes(self):
        with pytest.raises(PlanError, match="hidden_size"):
            Size(hidden_size=18, num_heads=4)


def test_words_can_be_learnt(tmp_path, accelerator):
    """The oracle of these tests: with training the loss goes to what the language leaves open."""
    settings = tiny(tmp_path, policies=("rope",), seeds=(0,), training=Training(length=8, rows=32, steps=120, lr=1e-2))
    result = compare(replace(settings, scalings="", fine_tuning=0), Words(), accelerator, Quiet())
    p = 0.8 + 0.2 / VOCAB
    entropy = -p * np.log(p) - (1 - p) * np.log((1 - p) / (VOCAB - 1))
    (window,) = (q for q in result["quality"] if q["measure"] == "sliding" and q["length"] == 8)
    assert entropy - 0.5 < window["mean"] < entropy + 0.5 < np.log(VOCAB)
