"""The card tells what was measured, and a name in it is text and nothing else."""

from __future__ import annotations

import html
import json
import math
import re
import shlex
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.report import sample
from theodolite.models.extend import Card
from theodolite.models.extend.card import write_card
from theodolite.models.extend.markdown import block, code, escaped, table
from theodolite.plan import DynamicNTK, LayerPlan, ModelPlan, Rotary, Scaling, YaRN

HOSTILE = "<img src=x onerror=alert(1)>|[a](http://x.y)`b`*c*_d_\n# e\x1b[2J\u202eflip @who #1 www.x.y ~s~ $f$ &amp;"


def plan(scaling: Scaling | None = None, length: int = 8192) -> ModelPlan:
    rotary = Rotary(head_dim=64, rope_theta=100000.0, scaling=scaling or Scaling())
    return ModelPlan(model_type="llama", max_position_embeddings=length, layers=(LayerPlan(rotate=rotary),) * 30)


def card(**more: Any) -> Card:
    yarn = YaRN(factor=1.5, original_max_position_embeddings=8192)
    given: dict[str, Any] = {
        "model": "SmolLM2", "hub": False, "scaling": "yarn:1.5", "before": plan(), "after": plan(yarn, 12288),
        "to": 12288,
    }  # fmt: skip
    return Card(**{**given, **more})


def surveyed(**more: Any) -> Card:
    summary = sample.summary()
    entry = next(s for s in summary["scalings"] if s["name"] == "yarn:1.5")
    return card(**{"summary": summary, "entry": entry, "measured_to": 12288, **more})


def text(card: Card, name: str = "longer", files: str = "Files.") -> str:
    return write_card(card, name=name, files=files)


def rows(text: str, begins: str) -> list[list[str]]:
    """The cells of the table after the line that begins so."""
    after = text[text.index(begins) :]
    lines = after[after.index("\n|") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]


class TestWhatItTells:
    """What a model rests on goes with it."""

    def test_before_and_after(self) -> None:
        head, *body = rows(text(surveyed()), "## What was changed")
        assert head == ["", "before", "after"]
        found = {row[0]: row[1:] for row in body}
        assert found["length stated, tokens"] == ["8,192", "12,288"]
        assert found["base"] == ["100,000", "100,000"]
        assert found["factor on cos and sin"] == ["1", "1.04055"]
        assert "YaRN 1.5 from 8,192 tokens" in found["positions"][1]

    def test_perplexity_by_position_is_the_survey_s(self) -> None:
        summary, given = sample.summary(), surveyed()
        head, *body = rows(text(given), "Perplexity by position")
        assert head[1:] == ["as shipped", "as shipped, on a moving window", "yarn:1.5"]
        assert len(body) == len(given.entry["bands"]) == 6
        shipped = {band["from"]: band["perplexity"] for band in summary["scalings"][0]["bands"]}
        window = {band["from"]: band["perplexity"] for band in summary["truncated_window"]["bands"]}
        for row, band in zip(body, given.entry["bands"], strict=True):
            assert row[0] == f"{band['from']:,} to {band['to']:,}"
            wanted = (shipped.get(band["from"]), window.get(band["from"]), band["perplexity"])
            assert row[1:] == ["–" if value is None else f"{value:,.2f}" for value in wanted]

    def test_recall_is_the_mean_over_depths(self) -> None:
        given = surveyed()
        _, *body = rows(text(given), "Recall, the mean")
        cells = [cell["accuracy"] for cell in given.entry["recall"] if cell["length"] == 12288]
        assert body[-1][0] == "12,288"
        assert body[-1][2] == f"{sum(cells) / len(cells):.0%}"

    def test_text_reach_and_cost(self) -> None:
        told, given = text(surveyed()), surveyed()
        for one in sample.TEXTS:
            assert one["sha256"] in told
            assert f"{one['tokens']:,} tokens" in told
        assert f"Holds to: {given.entry['holds_to']:,} tokens" in told
        cost = given.entry["short_cost"]
        assert f"perplexity {cost['perplexity']:.2f}, as shipped {cost['shipped']:.2f}" in told
        assert "not measured" not in told.split("Reaches")[0]

    def test_a_length_past_what_was_measured_is_owned_up_to(self) -> None:
        told = text(surveyed(to=20000, after=plan(YaRN(factor=3, original_max_position_embeddings=8192), 20000)))
        assert "**Not to this length.** The survey found this scaling to hold to 12,288 tokens, and 20,000 are" in told

    def test_nothing_measured(self) -> None:
        told = text(card())
        assert "Nothing: no survey of this scaling stands behind this length" in told
        assert "`--scaling none,yarn:1.5 --to 12288`" in told
        assert "Perplexity by position" not in told

    def test_a_survey_without_full_pass_window_or_cost(self) -> None:
        summary = {**sample.summary(), "truncated_window": None}
        bare = {**surveyed().entry, "bands": [], "recall": [], "short_cost": None, "holds_to": None}
        told = text(card(summary=summary, entry=bare, measured_to=0))
        assert "Holds to: nowhere, or not measured" in told
        assert "Perplexity by position" not in told

    def test_what_others_read_otherwise(self) -> None:
        yarn = YaRN(factor=2.0, original_max_position_embeddings=8192)
        told = text(card(after=plan(yarn, 12288)))
        assert "- `factor`: factor 2 times original\\_max\\_position\\_embeddings 8,192 is 16,384, and" in told
        assert "What to know" not in text(card(after=plan(yarn, 16384)))
        known = plan(YaRN(factor=2.0, original_max_position_embeddings=8192, attention_factor_given=1.3), 10000)
        assert "attention\\_factor" not in text(card(before=known, after=replace(known, max_position_embeddings=16384)))

    def test_how_to_serve(self) -> None:
        told = text(card())
        assert 'AutoModelForCausalLM.from_pretrained("longer")' in told
        # The config says the rest, so nothing is overridden.
        assert "```sh\nvllm serve longer --max-model-len 12288\n```" in told
        assert "```sh\npython -m sglang.launch_server --model-path longer --context-length 12288\n```" in told
        script, server = told[told.index("python convert_hf_to_gguf") :].splitlines()[:2]
        assert script == "python convert_hf_to_gguf.py longer --outfile longer.gguf"
        assert server.startswith("llama-server -m longer.gguf -c 12288 --rope-freq-base 100000 --rope-scaling yarn")

    def test_what_an_engine_does_not_find_in_the_config_stays_an_override(self) -> None:
        yarn = YaRN(factor=2, original_max_position_embeddings=8192, attention_factor_given=1.25)
        told = text(card(after=plan(yarn, 16384), to=16384))
        (line,) = [line for line in told.splitlines() if line.startswith("vllm serve")]
        overrides = json.loads(shlex.split(line)[-1])
        assert overrides["rope_parameters"]["attn_factor"] == pytest.approx(1.25 / (1 + 0.1 * math.log(2)), rel=1e-12)
        # Older readers refuse a factor that is no float.
        assert type(overrides["rope_parameters"]["factor"]) is float
        dynamic = plan(DynamicNTK(factor=2, original_max_position_embeddings=8192))
        told = text(card(after=dynamic, scaling="dynamic:2"))
        assert "# vLLM has one static table for dynamic NTK" in told
        assert "--hf-overrides" in told

    def test_what_an_engine_cannot_do_is_a_sentence(self) -> None:
        yarn = YaRN(factor=2.0, original_max_position_embeddings=8192, truncate=False)
        told = text(card(after=plan(yarn, 16384), to=16384))
        assert "\n\nllama.cpp rounds the ends" in told
        assert "convert_hf_to_gguf.py longer" not in told

    def test_a_pair_layout_that_the_family_does_not_read(self) -> None:
        told = write_card(card(), name="longer", files="Files.", layout="interleaved")
        assert "**Not in plain transformers, vLLM or SGLang.** Queries and keys stand in interleaved pairs" in told
        assert "`theodolite convert layout longer OUT --to half`" in told
        assert "from_pretrained" not in told
        assert "vllm serve" not in told

    def test_weights_of_a_gguf_file_are_called_so(self) -> None:
        told = text(card(gguf="tiny.Q4_1.gguf"))
        assert "The weights are those of tiny.Q4\\_1.gguf, dequantised to float32" in told
        assert "unchanged" not in told
        assert "The weights are those of SmolLM2, unchanged and untrained." in text(card())

    def test_a_factor_over_the_model_s_own_scaling(self) -> None:
        own, new = (YaRN(factor=factor, original_max_position_embeddings=8192) for factor in (2.0, 4.0))
        told = text(card(before=plan(own, 16384), after=plan(new, 32768), scaling="yarn:2", to=32768))
        assert (
            "`yarn:2` counts over the 16,384 tokens that the model stated with YaRN 2 from 8,192 tokens of its own: "
            "the files say YaRN 4 from 8,192 tokens."
        ) in told
        assert "counts over" not in text(card())

    def test_a_gguf_needs_no_flags(self) -> None:
        told = text(card(), name="longer.gguf")
        assert "llama-server -m longer.gguf -c 12288\n" in told
        assert "vllm" not in told

    def test_dynamic_says_why_the_length_stays(self) -> None:
        dynamic = plan(DynamicNTK(factor=2.0, original_max_position_embeddings=8192))
        assert "`max_position_embeddings` stays at 8,192" in text(card(after=dynamic, scaling="dynamic:2"))

    def test_a_model_of_the_hub_is_linked_by_its_metadata(self) -> None:
        assert text(card(model="a/b", hub=True)).startswith('---\nbase_model: "a/b"\n---\n\n# a/b, extended')
        assert text(card()).startswith("# SmolLM2, extended to 12,288 tokens")


class TestNames:
    """Names of models, texts and scalings are a stranger's: they draw no picture and open no link."""

    def test_hostile_names_do_nothing(self) -> None:
        summary = sample.summary()
        summary["texts"] = [{**summary["texts"][0], "name": HOSTILE}]
        summary["definitions"] = dict.fromkeys(summary["definitions"], HOSTILE)
        entry = {**summary["scalings"][1], "name": HOSTILE}
        told = text(
            surveyed(model=HOSTILE, scaling=HOSTILE, summary=summary, entry=entry), name=HOSTILE.replace("/", "-")
        )
        outside = re.sub(r"(`{3,})[\s\S]*?\1|(`+)[^`][\s\S]*?\2(?!`)", "", re.sub(r"\\`", "", told))
        assert not re.search(r"<img|(?<!\\)\[a|(?<!\\)\*c|\x1b|\u202e", outside)
        assert not re.search(r"^# e", outside, re.MULTILINE)
        assert "\x1b" not in told
        assert "\u202e" not in told

    def test_characters_that_cannot_be_written_are_replaced(self) -> None:
        assert escaped("a\udcffb") == "a\ufffdb"

    @settings(deadline=None)
    @given(st.text())
    def test_code_is_shown_whole(self, given: str) -> None:
        shown = code(given).replace("\\|", "|")
        fence = re.match("`+", shown).group()
        inner = shown[len(fence) : -len(fence)]
        assert shown.endswith(fence)
        assert not re.search(f"(?<!`){fence}(?!`)", inner)
        assert "\n" not in shown

    @settings(deadline=None)
    @given(st.text(alphabet="`ab\n"))
    def test_a_block_ends_where_it_ends(self, given: str) -> None:
        first, *_, last = block(given).splitlines()
        assert first == last
        assert len(first) >= 3
        assert first not in given

    @settings(deadline=None)
    @given(st.text(alphabet="|<>[]*_`\\ab&$~@#"))
    def test_a_cell_is_one_cell(self, given: str) -> None:
        line = table(["x"], [[escaped(given)]]).splitlines()[2]
        assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 2
        shown = re.sub(r"\\(.)", r"\1", line[2:-2])
        assert html.unescape(shown) == given

    def test_addresses_are_no_links(self) -> None:
        assert escaped("see http://x.y and WWW.x.y") == r"see http:\//x.y and WWW\.x.y"

    def test_plain_names_are_left_readable(self) -> None:
        assert escaped("SmolLM2-135M-Instruct (8k), v1.0: 50% + 2") == "SmolLM2-135M-Instruct (8k), v1.0: 50% + 2"
