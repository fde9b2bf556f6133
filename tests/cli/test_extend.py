"""`theodolite extend`: what it takes, what it refuses, what it prints."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from tests.models.conftest import calm  # noqa: F401
from tests.models.tiny_files import write_folder, write_gguf
from tests.report import sample
from theodolite.cli import main
from theodolite.models.source import fingerprint, resolve
from theodolite.plan import LongRoPE, ModelPlan, YaRN
from theodolite.plan.gguf import read_file
from theodolite.plan.huggingface import read_config_file
from theodolite.survey.found import SCHEMA, recorded, with_found
from theodolite.survey.scalings import candidate_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_folder(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("THEODOLITE_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def survey(of: Path, folder: Path, recommended: str = "yarn:1.5", **held: int | None) -> Path:
    """A survey of a model to 12,288 tokens; `held` says otherwise of a scaling than that it holds to the end."""
    summary = sample.summary(names=("none", "linear", "yarn:1.5", "ntk:1.5"), passed=("none", "linear", "yarn:1.5"))
    summary["model_details"]["fingerprint"] = fingerprint(resolve(str(of)))
    summary["recommendation"]["name"] = recommended
    for scaling in summary["scalings"]:
        key = scaling["name"].split(":")[0]
        if key in held:
            scaling["holds_to" if scaling["bands"] else "reaches"] = held[key]
        elif scaling["name"] == "yarn:1.5":
            scaling["holds_to"] = 12288
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def run(*words: Any) -> int:
    return main(["extend", *map(str, words)])


def refused(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    """The one line of a refusal, without the progress before it."""
    assert run(*words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = [line for line in printed.err.splitlines() if line.startswith("theodolite extend: ")]
    assert "Traceback" not in printed.err
    return line.removeprefix("theodolite extend: ")


class TestFolder:
    """One command, and the model is there."""

    def test_the_survey_says_scaling_and_length(self, model, tmp_path, capsys):
        status = run(model, "--survey", survey(model, tmp_path / "survey"), "-o", tmp_path / "longer")
        printed = capsys.readouterr()
        assert status == 0, printed.err
        (rotary,) = read_config_file(tmp_path / "longer").rotaries
        assert (rotary.scaling.rope_type, rotary.scaling.factor) == ("yarn", 1.5)
        assert AutoConfig.from_pretrained(tmp_path / "longer").max_position_embeddings == 12288
        card = (tmp_path / "longer" / "README.md").read_text(encoding="utf-8")
        assert sample.TEXTS[0]["sha256"] in card
        assert "tiny: yarn:1.5, to 12,288 tokens, measured to 12,288" in printed.err
        assert "linked: model.safetensors" in printed.out
        assert "measured: to 12,288 tokens, by the survey" in printed.out

    def test_unmeasured(self, model, tmp_path, capsys):
        assert run(model, "--scaling", "linear", "--to", "20k", "--unmeasured", "-o", tmp_path / "longer") == 0
        assert read_config_file(tmp_path / "longer").rotaries[0].scaling.factor == 3.0
        assert read_config_file(tmp_path / "longer").max_position_embeddings == 20480
        assert "Nothing: no survey" in (tmp_path / "longer" / "README.md").read_text(encoding="utf-8")
        assert "measured: nothing" in capsys.readouterr().out

    def test_copy_and_json(self, model, tmp_path, capsys):
        words = ("--scaling", "yarn:2", "--to", 16384, "--unmeasured", "--copy", "--json", "-o", tmp_path / "longer")
        assert run(model, *words) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["linked"] == []
        assert "model.safetensors" in found["copied"]
        assert found["written"] == ["README.md", "config.json"]
        assert found["path"] == str(tmp_path / "longer")
        assert (found["model"], found["scaling"], found["to"], found["measured_to"]) == ("tiny", "yarn:2", 16384, None)
        (layer,) = found["layers"]
        assert layer["inv_freq"][0] == 1.0
        assert found["findings"] == [] or {f["severity"] for f in found["findings"]} <= {"warning", "note"}
        assert not os.path.samefile(model / "model.safetensors", tmp_path / "longer" / "model.safetensors")

    def test_a_gguf_as_a_folder(self, file, tmp_path, capsys):
        assert run(file, "--survey", survey(file, tmp_path / "survey"), "-o", tmp_path / "longer") == 0
        assert read_config_file(tmp_path / "longer").rotaries[0].scaling.factor == 1.5
        assert (tmp_path / "longer" / "model.safetensors").is_file()
        assert (tmp_path / "longer" / "tokenizer.json").is_file()
        assert "weights: tiny.gguf, dequantised to float32" in capsys.readouterr().out
        card = (tmp_path / "longer" / "README.md").read_text(encoding="utf-8")
        assert "The weights are those of tiny.gguf, dequantised to float32" in card
        assert "hard links to theodolite's conversion of tiny.gguf to float32" in card
        plain = tmp_path / "plain"
        plain.write_text("")
        assert (tmp_path / "longer" / "model.safetensors").stat().st_mode == plain.stat().st_mode

    def test_llama3_is_widened_over_llama3(self, tmp_path, capsys):
        llama3 = {
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }  # fmt: skip
        write_folder(tmp_path / "tiny", rope_parameters=llama3, max_position_embeddings=65536)
        words = ("--scaling", "llama3:2", "--to", "128k", "--unmeasured", "-o", tmp_path / "longer")
        assert run(tmp_path / "tiny", *words) == 0
        assert read_config_file(tmp_path / "longer").rotaries[0].scaling.factor == 16.0


class TestGguf:
    """A .gguf file becomes a .gguf file."""

    @pytest.mark.parametrize(("scaling", "factor"), [("yarn:1.5", 1.5), ("linear", 2.0)])
    def test_by_a_survey(self, file, tmp_path, capsys, scaling, factor):
        found = survey(file, tmp_path / "survey", linear=12288)
        assert run(file, "--scaling", scaling, "--survey", found, "-o", tmp_path / "longer.gguf") == 0
        assert read_file(tmp_path / "longer.gguf").rotaries[0].scaling.factor == factor
        assert read_file(tmp_path / "longer.gguf").max_position_embeddings == 12288
        card = (tmp_path / "longer.gguf.md").read_text(encoding="utf-8")
        assert "llama-server -m longer.gguf -c 12288" in card
        assert sample.TEXTS[0]["sha256"] in card
        assert "written: longer.gguf, longer.gguf.md" in capsys.readouterr().out

    def test_a_folder_is_no_gguf(self, model, tmp_path, capsys):
        line = refused(capsys, model, "--scaling", "yarn", "--to", "16k", "--unmeasured", "-o", tmp_path / "x.gguf")
        assert line == (
            f"out: '{tmp_path / 'x.gguf'}' can only be written from a .gguf file; give a folder; llama.cpp's "
            "convert_hf_to_gguf.py makes a GGUF of it"
        )


class TestTerminated:
    """Whoever ends the command finds nothing half written."""

    @pytest.mark.parametrize(("of", "out", "step"), [
        ("model", "longer", "folder._place"), ("file", "longer.gguf", "gguf.require_says"),
    ])  # fmt: skip
    def test_nothing_lies_about(self, request, tmp_path, monkeypatch, of, out, step):
        given = request.getfixturevalue(of)
        before = sorted(path.name for path in tmp_path.iterdir())
        kill = lambda *_: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
        monkeypatch.setattr(f"theodolite.models.extend.{step}", kill)
        with pytest.raises(SystemExit) as ended:
            run(given, "--scaling", "yarn", "--to", "16k", "--unmeasured", "-o", tmp_path / out)
        assert ended.value.code == 143
        assert sorted(path.name for path in tmp_path.iterdir()) == before


class TestMeasured:
    """Nothing is promised that was not measured, unless that is asked for by name."""

    def test_no_survey(self, model, tmp_path, capsys):
        line = refused(capsys, model, "--scaling", "yarn:2", "--to", "16k", "-o", tmp_path / "longer")
        assert line.startswith("survey: none is given; give the folder of a survey that holds to that length")
        assert not (tmp_path / "longer").exists()

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (
                ("--scaling", "yarn:1.5", "--to", "12288"),
                "to: yarn:1.5 to 12,288 tokens is not measured: the survey, to 12,288, found it to hold to 9,000; it "
                "reached: none 10,240, linear 8,192, yarn:1.5 9,000, ntk:1.5 8,500; give a length within that",
            ),
            (
                (
                    "--scaling",
                    "linear",
                ),
                "to: linear:2 to 12,288 tokens is not measured: the survey, to 12,288, found it",
            ),
            (("--scaling", "yarn:2"), "to: yarn:2 to 12,288 tokens is not measured: the survey, to 12,288, did not"),
            (("--scaling", "ntk:1.5", "--to", "9000"), "to: ntk:1.5 to 9,000 tokens is not measured"),
        ],
    )
    def test_further_than_the_survey_found(self, model, tmp_path, capsys, words, said):
        found = survey(model, tmp_path / "survey", none=10240, yarn=9000, linear=8192, ntk=8500)
        line = refused(capsys, model, *words, "--survey", found, "-o", tmp_path / "longer")
        assert line.startswith(said)
        assert not (tmp_path / "longer").exists()
        assert run(model, *words, "--survey", found, "--unmeasured", "-o", tmp_path / "longer") == 0

    @pytest.mark.parametrize("scaling", ["yarn:1.5", "ntk:1.5"])
    def test_as_far_as_it_found(self, model, tmp_path, scaling):
        # Without a full pass it is the reach that counts.
        found = survey(model, tmp_path / "survey", yarn=9000, ntk=9000)
        words = ("--scaling", scaling, "--to", "9000", "--survey", found, "-o", tmp_path / "longer")
        assert run(model, *words) == 0

    def test_a_survey_of_another_model(self, model, file, tmp_path, capsys):
        found = survey(file, tmp_path / "survey")
        line = refused(capsys, model, "--survey", found, "-o", tmp_path / "longer")
        assert "is of another model" in line

    @pytest.mark.parametrize("damage", ["no", "recommendation", "texts"])
    def test_a_damaged_survey(self, model, tmp_path, capsys, damage):
        found = survey(model, tmp_path / "survey")
        summary = json.loads((found / "summary.json").read_text(encoding="utf-8"))
        summary.pop(damage, None)
        (found / "summary.json").write_text("no" if damage == "no" else json.dumps(summary), encoding="utf-8")
        assert refused(capsys, model, "--survey", found, "-o", tmp_path / "longer")

    def test_a_survey_that_recommends_the_model_as_shipped(self, model, tmp_path, capsys):
        found = survey(model, tmp_path / "survey", recommended="none")
        line = refused(capsys, model, "--survey", found, "-o", tmp_path / "longer")
        assert line.startswith("scaling: the survey recommends none (")

    def test_a_name_without_a_factor_means_what_it_meant_there(self, model, tmp_path):
        found = survey(model, tmp_path / "survey", linear=12288)
        words = ("--scaling", "linear", "--to", "9000", "--survey", found, "-o", tmp_path / "longer")
        assert run(model, *words) == 0
        assert read_config_file(tmp_path / "longer").rotaries[0].scaling.factor == 2.0


class TestRefusals:
    """In one line, with what can be done instead."""

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("--scaling", "yarn:2"), "to: it is needed where no --survey says it"),
            (("--to", "16k"), "scaling: it is needed where no --survey says it"),
            (
                ("--scaling", "self-extend:2", "--to", "16k"),
                "scaling: got 'self-extend:2'; no config can say a map of distances; theodolite ask --scaling reads "
                "with it, and scalings are written; this model takes yarn, linear, ntk, dynamic, llama3",
            ),
            (
                ("--scaling", "none", "--to", "16k"),
                "scaling: got 'none'; it changes nothing but the length; this model",
            ),
            (("--scaling", "yarn,linear", "--to", "16k"), "scaling: got 'yarn,linear'; give the name of one"),
            (("--scaling", "warp", "--to", "16k"), "scaling: got 'warp'; allowed: none, linear"),
            (("--scaling", "yarn:1.5", "--to", "16k"), "scaling: got 'yarn:1.5'; it stretches to 12,288 tokens, and"),
            (("--scaling", "yarn:2", "--to", "8192"), "to: got 8192; the model states 8,192 tokens already; give more"),
        ],
    )
    def test_words(self, model, tmp_path, capsys, words, said):
        line = refused(capsys, model, *words, "--unmeasured", "-o", tmp_path / "longer")
        assert line.startswith(said)
        assert [path.name for path in tmp_path.iterdir()] == ["tiny"]

    def test_a_weaker_scaling_over_the_models_own(self, tmp_path, capsys):
        llama3 = {
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }  # fmt: skip
        write_folder(tmp_path / "tiny", rope_parameters=llama3, max_position_embeddings=65536)
        words = ("--scaling", "linear", "--to", "128k", "--unmeasured", "-o", tmp_path / "longer")
        line = refused(capsys, tmp_path / "tiny", *words)
        assert "the model already carries 'llama3', which must not be lost" in line
        assert line.endswith("; this model takes llama3")
        assert not (tmp_path / "longer").exists()

    @pytest.mark.parametrize("name", ["x.bin", "x.safetensors", "x.GGUF", "x.PT", "x.json"])
    @pytest.mark.parametrize("of", ["model", "file"])
    def test_the_name_of_a_file_for_a_folder(self, request, tmp_path, capsys, of, name):
        given = request.getfixturevalue(of)
        words = ("--scaling", "yarn", "--to", "16k", "--unmeasured", "-o", tmp_path / name)
        assert refused(capsys, given, *words).startswith(f"out: '{tmp_path / name}' would be a folder, and ends like a")

    def test_a_folder_s_name_may_have_a_stop_in_it(self, model, tmp_path):
        words = ("--scaling", "yarn", "--to", "16k", "--unmeasured", "-o", tmp_path / "SmolLM2-1.7B")
        assert run(model, *words) == 0

    def test_a_place_inside_the_model(self, model, capsys):
        before = sorted(model.iterdir())
        line = refused(capsys, model, "--scaling", "yarn", "--to", "16k", "--unmeasured", "-o", model / "longer")
        assert line.startswith(f"out: '{model / 'longer'}' is inside '{model}', which is not changed")
        assert sorted(model.iterdir()) == before

    @pytest.mark.parametrize("scaling", ["yarn", "linear", "none", "self-extend"])
    def test_a_length_past_all_numbers(self, model, tmp_path, capsys, scaling):
        words = ("--scaling", scaling, "--to", "9" * 400, "--unmeasured", "-o", tmp_path / "longer")
        assert refused(capsys, model, *words).startswith("to: got 999")

    def test_a_factor_that_may_be_meant_over_either_length(self, model, tmp_path, capsys):
        words = ("--scaling", "yarn:2", "--to", "16k", "--unmeasured", "-o", tmp_path / "once")
        assert run(model, *words) == 0
        once, twice = tmp_path / "once", tmp_path / "twice"
        capsys.readouterr()
        words = ("--to", "32k", "-o", twice)
        line = refused(capsys, once, "--scaling", "yarn:4", *words, "--unmeasured")
        assert line.endswith("this would be YaRN 8 from 8,192 tokens; yarn:2 is enough for 32,768 tokens")
        assert run(once, "--scaling", "yarn:2", *words, "--unmeasured") == 0
        assert "`yarn:2` counts over the 16,384 tokens" in (twice / "README.md").read_text(encoding="utf-8")

    @pytest.mark.parametrize("scaling", ["llama3:4", "yarn"])
    def test_divisors_of_a_gguf_file(self, tmp_path, capsys, scaling):
        write_gguf(tmp_path / "tiny.gguf", divisors=(1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0))
        words = ("--scaling", scaling, "--to", "16k", "--unmeasured", "-o", tmp_path / "longer.gguf")
        line = refused(capsys, tmp_path / "tiny.gguf", *words)
        assert line.endswith("; no named scaling goes over divisors, as which a GGUF file has Llama 3.1's too")

    def test_what_is_there(self, model, tmp_path, capsys):
        (tmp_path / "longer").mkdir()
        line = refused(capsys, model, "--scaling", "yarn", "--to", "16k", "--unmeasured", "-o", tmp_path / "longer")
        assert line.startswith("out: ")
        assert "is there already" in line

    def test_no_such_model(self, tmp_path, capsys):
        words = ("--scaling", "yarn", "--to", "16k", "--unmeasured", "-o", tmp_path / "longer")
        assert refused(capsys, tmp_path / "nothing", *words).endswith("does not exist")

    def test_a_config_that_contradicts_itself(self, model, tmp_path, capsys):
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        config["rope_scaling"] = {"type": "\x1b[2Jlinear", "factor": 2.0}
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
        line = refused(capsys, model, "--scaling", "yarn", "--to", "16k", "--unmeasured", "-o", tmp_path / "longer")
        assert "\x1b" not in line


class TestStatus:
    """1 where what was written is not clean, so that a script sees it."""

    def test_an_error_that_the_original_has(self, model, tmp_path, capsys, monkeypatch):
        from theodolite.plan import findings

        fault = findings.Finding(severity="error", field="x", message="wrong\x1b", fix="-", reference="a/b#1")
        monkeypatch.setattr(findings, "find", lambda *a, **k: (fault,))
        words = ("--scaling", "yarn:2", "--to", "16k", "--unmeasured", "-o", tmp_path / "longer")
        assert run(model, *words) == 1
        assert "  error: x: wrong\ufffd" in capsys.readouterr().out


def search(of: Path, folder: Path, plan: ModelPlan, *, won: bool = True, **changes: Any) -> Path:
    """A search of a model to 12,288 tokens that has found divisors of its pairs."""
    shipped = plan.scalable[0]
    divisors = tuple(1.0 + 0.25 * pair for pair in range(shipped.rotary_dim // 2))
    scaling = LongRoPE(
        short_factor=divisors,
        long_factor=divisors,
        original_max_position_embeddings=plan.max_position_embeddings or 0,
        attention_factor_given=1.0625,
    )
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "theodolite": "0",
        "model_details": {"fingerprint": fingerprint(resolve(str(of))), "dtype": "float32"},
        "to": 12288,
        "rivals": ["yarn:2"],
        "winner": recorded(shipped, with_found(plan, shipped.rope_theta, scaling).scalable[0]),
        "confirmed": {
            "short": {"found": 3.5, "yarn:2": 3.625},
            "lengths": [{"length": 12288, "recall": {"found": 0.75, "yarn:2": 0.5}}],
        },
        "texts": {"confirm": [{"name": "*book*", "tokens": 12289, "sha256": "ab" * 32}]},
        "won": won,
        "why": "It won." if won else "It did not win.",
        **changes,
    }
    folder.mkdir(parents=True)
    (folder / "search.json").write_text(json.dumps(result), encoding="utf-8")
    return folder


class TestSearched:
    """What a search has found is a measurement of its own, as far as it was confirmed."""

    def test_a_folder(self, model, tmp_path, capsys):
        found = search(model, tmp_path / "found", read_config_file(model))
        assert run(model, "--scaling", f"search:{found}", "-o", tmp_path / "longer") == 0
        assert "measured: to 12,288 tokens, by the search" in capsys.readouterr().out
        expected = candidate_of(f"search:{found}", read_config_file(model), to=12288).plan
        written = read_config_file(tmp_path / "longer")
        assert written.scalable[0].inv_freq().tolist() == expected.scalable[0].inv_freq().tolist()
        assert written.scalable[0].attention_factor() == 1.0625
        config = AutoConfig.from_pretrained(tmp_path / "longer")
        assert config.rope_parameters["rope_type"] == "longrope"
        assert config.max_position_embeddings == 12288
        card = (tmp_path / "longer" / "README.md").read_text()
        assert "| `found` | 75.0% | 3.5000 |" in card
        assert "\\*book\\*" in card

    @pytest.mark.parametrize("won", [True, False])
    def test_a_factor_below_the_ratio_of_lengths(self, model, tmp_path, capsys, won):
        # 1.4 times 8,192 are 11,469 tokens, and the search went to 12,288.
        scaling = YaRN(factor=1.4, original_max_position_embeddings=8192, beta_fast=28.5, attention_factor_given=1.1)
        plan = read_config_file(model)
        winner = recorded(plan.scalable[0], with_found(plan, 11849.25, scaling).scalable[0])
        found = search(model, tmp_path / "found", plan, won=won, winner=winner)
        command = (model, "--scaling", f"search:{found}", "-o", tmp_path / "longer")
        if not won:
            assert "say --unmeasured" in refused(capsys, *command)
            command = (*command, "--unmeasured")
        assert run(*command) == 0
        (written,) = read_config_file(tmp_path / "longer").rotaries
        assert (written.rope_theta, written.scaling) == (11849.25, scaling)
        assert AutoConfig.from_pretrained(tmp_path / "longer").rope_parameters["factor"] == 1.4
        card = (tmp_path / "longer" / "README.md").read_text(encoding="utf-8")
        assert "no ratio of lengths: times the trained length it is 11,469 tokens, and 12,288 are stated" in card

    def test_a_gguf(self, file, tmp_path, capsys):
        found = search(file, tmp_path / "found", read_file(file))
        assert run(file, "--scaling", f"search:{found}", "-o", tmp_path / "longer.gguf") == 0
        capsys.readouterr()
        expected = candidate_of(f"search:{found}", read_file(file), to=12288).plan
        written = read_file(tmp_path / "longer.gguf")
        # Divisors are float32 in the file.
        np.testing.assert_allclose(
            written.scalable[0].inv_freq(length=12288), expected.scalable[0].inv_freq(length=12288), rtol=2**-24
        )
        assert written.scalable[0].attention_factor() == pytest.approx(1.0625, rel=2**-24)

    def test_past_what_was_confirmed(self, model, tmp_path, capsys):
        found = search(model, tmp_path / "found", read_config_file(model))
        command = (model, "--scaling", f"search:{found}", "--to", "16k", "-o", tmp_path / "longer")
        assert "the search confirmed it to 12,288" in refused(capsys, *command)
        assert run(*command, "--unmeasured") == 0

    def test_one_that_did_not_win(self, model, tmp_path, capsys):
        found = search(model, tmp_path / "found", read_config_file(model), won=False)
        command = (model, "--scaling", f"search:{found}", "-o", tmp_path / "longer")
        assert "It did not win. Take the named scaling, search further, or say --unmeasured" in refused(
            capsys, *command
        )
        assert run(*command, "--unmeasured") == 0

    def test_of_other_files(self, model, tmp_path, capsys):
        details = {"fingerprint": "other", "dtype": "float32"}
        found = search(model, tmp_path / "found", read_config_file(model), model_details=details)
        line = refused(capsys, model, "--scaling", f"search:{found}", "-o", tmp_path / "longer")
        assert "was of other files than those of tiny" in line

    @pytest.mark.parametrize("changes", [
        {"rivals": None}, {"confirmed": {}}, {"texts": []}, {"to": "x"}, {"winner": None}, {"schema": "other"},
        {"model_details": 3}, {"confirmed": {"short": {"found": 1, "yarn:2": "x"}, "lengths": []}},
    ])  # fmt: skip
    def test_damaged(self, model, tmp_path, capsys, changes):
        found = search(model, tmp_path / "found", read_config_file(model), **changes)
        line = refused(capsys, model, "--scaling", f"search:{found}", "-o", tmp_path / "longer")
        assert "search.json" in line
        assert not (tmp_path / "longer").exists()
