"""A written folder is the model, further: plain transformers computes what the patched model does."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from theodolite.models import LoadError, load, patched
from theodolite.models.extend import Card, extend_folder, stretched
from theodolite.models.extend import configs as configs_module
from theodolite.plan import LongRoPE, ModelPlan, PlanError, Scaling
from theodolite.plan.findings import find
from theodolite.plan.huggingface import read_config
from theodolite.plan.huggingface.reading import read_config_file, text_part
from theodolite.plan.huggingface.writing import as_written
from theodolite.plan.pair_layout import write_layout
from theodolite.survey.scalings import candidate_of

from .tiny import logits, spread, tokens
from .tiny_files import write_folder

DIVISORS = tuple(1.0 + 0.37 * i for i in range(8))
# Family, scaling, changes to the tiny config.
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "yarn:2", {}),
    ("llama", "yarn:2:beta_fast=24:attention_factor=1.1", {}),
    ("llama", "linear:2.5", {}),
    ("llama", "ntk:3", {}),
    ("llama", "dynamic:2", {}),
    ("llama", "llama3:4", {}),
    ("llama", "divisors", {}),
    ("llama", "base", {}),
    ("qwen3", "yarn:3", {}),
    ("gemma3", "linear:2", {}),
    ("gemma3", "yarn:2", {}),
    ("olmo3", "yarn:2", {}),
    ("phi3", "ntk:2", {}),
    ("phi3", "divisors", {}),
    ("phi3-longrope", "divisors", {}),
    ("deepseek_v3", "yarn:2", {}),
    ("deepseek_v3-yarn", "yarn:2", {}),
    ("gpt_oss", "yarn:2", {"max_position_embeddings": 131072}),
    ("glm", "yarn:2", {}),
    ("stablelm", "linear:2", {}),
    ("gpt_neox", "ntk:2", {}),
]
NAMES = [f"{family} {scaling}" for family, scaling, _ in CASES]


def planned(plan: ModelPlan, scaling: str, to: int) -> ModelPlan:
    """A plan by a scaling's name, or by what no name says: a divisor for each pair, or another base."""
    if scaling == "divisors":
        pairs = DIVISORS[: plan.rotaries[0].rotary_dim // 2]
        original = getattr(plan.rotaries[0].scaling, "original_max_position_embeddings", plan.max_position_embeddings)
        wanted = LongRoPE(
            short_factor=pairs,
            long_factor=pairs,
            original_max_position_embeddings=original,
            attention_factor_given=1.05,
        )
        return plan.with_scaling(wanted)
    if scaling == "base":
        changed = [replace(layer, rotate=replace(layer.rotate, rope_theta=77_777.5)) for layer in plan.layers]
        return replace(plan, layers=tuple(changed))
    return candidate_of(scaling, plan, to=to).plan


def card(plan: ModelPlan, scaling: str, to: int, **more: Any) -> Card:
    after = stretched(plan, planned(plan, scaling, to), to, name=scaling)
    return Card(model="tiny", hub=False, scaling=scaling, before=plan, after=after, to=to, **more)


def written(folder: Path, scaling: str, to: int = 16384, out: str = "longer", **options: Any) -> Path:
    result = extend_folder(folder, folder.parent / out, card(read_config_file(folder), scaling, to), **options)
    return result.path


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write_folder(tmp_path / "model")
    return tmp_path / "model"


class TestTransformersRunsIt:
    """The folder is for those who do not have this library."""

    @pytest.mark.parametrize(("family", "scaling", "changes"), CASES, ids=NAMES)
    def test_logits_are_those_of_the_patched_model(
        self, tmp_path: Path, family: str, scaling: str, changes: dict[str, Any]
    ) -> None:
        folder = tmp_path / "model"
        write_folder(folder, family, **changes)
        trained = int(changes.get("max_position_embeddings", 8192))
        plain = load(str(folder), dtype=torch.float32, device="cpu")
        out = written(folder, scaling, 2 * trained)
        theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        if "num_experts_per_tok" in json.loads((out / "config.json").read_text(encoding="utf-8")):
            theirs.set_experts_implementation("eager")
            plain.model.set_experts_implementation("eager")
        ids, first = tokens(40), trained + 1001
        places = torch.arange(first, first + 40)[None]
        found = logits(theirs, ids, position_ids=places)
        plan = planned(plain.plan, scaling, 2 * trained)
        with patched(plain.model, plan, length=first + 40):
            wanted = logits(plain.model, ids, position_ids=places)
        apart = float((found - wanted).abs().max()) / spread(wanted)
        # transformers rounds frequency, angle and power to float32, so an angle of p radians is off by p * 2^-24 each.
        bound = 3 * (first + 40) * 2.0**-24
        assert apart < bound
        with patched(plain.model, plain.plan, length=first + 40):
            unscaled = logits(plain.model, ids, position_ids=places)
        assert float((unscaled - wanted).abs().max()) / spread(wanted) > 5 * apart

    @pytest.mark.parametrize(("family", "scaling", "changes"), CASES, ids=NAMES)
    def test_frequencies_are_those_of_the_plan(
        self, tmp_path: Path, family: str, scaling: str, changes: dict[str, Any]
    ) -> None:
        folder = tmp_path / "model"
        write_folder(folder, family, **changes)
        trained = int(changes.get("max_position_embeddings", 8192))
        plan = planned(read_config_file(folder), scaling, 2 * trained)
        out = written(folder, scaling, 2 * trained)
        rotary = AutoModelForCausalLM.from_pretrained(out).model if family != "gpt_neox" else None
        module = AutoModelForCausalLM.from_pretrained(out).gpt_neox if rotary is None else rotary
        for layer in {layer.layer_type: layer for layer in plan.layers if layer.rotate}.values():
            nested = hasattr(module.rotary_emb, f"{layer.layer_type}_inv_freq")
            prefix = f"{layer.layer_type}_" if nested else ""
            theirs = getattr(module.rotary_emb, f"{prefix}inv_freq")
            amplitude = getattr(module.rotary_emb, f"{prefix}attention_scaling")
            assert layer.rotate is not None
            ours = torch.from_numpy(layer.rotate.inv_freq(length=100))
            # A power of up to 2^20 in float32, a blend and a division.
            assert torch.allclose(theirs.double(), ours, rtol=2.0**-19, atol=0)
            assert amplitude == pytest.approx(layer.rotate.attention_factor(), rel=1e-9)

    def test_it_says_the_length_everywhere(self, llama: Path) -> None:
        for name, content in (
            ("generation_config.json", {"max_length": 8192, "eos_token_id": 2}),
            ("tokenizer_config.json", {"model_max_length": 8192, "tokenizer_class": "PreTrainedTokenizerFast"}),
        ):
            (llama / name).write_text(json.dumps(content), encoding="utf-8")
        out = written(llama, "yarn:2", 16001)
        assert AutoConfig.from_pretrained(out).max_position_embeddings == 16001
        assert AutoTokenizer.from_pretrained(out).model_max_length == 16001
        model = AutoModelForCausalLM.from_pretrained(out)
        assert model.generation_config.max_length == 16001
        assert model.generation_config.eos_token_id == 2

    @pytest.mark.parametrize("limit", [20000, 1e30, None])
    def test_a_limit_that_is_no_less_stays(self, llama: Path, limit: Any) -> None:
        file = llama / "tokenizer_config.json"
        given = {**json.loads(file.read_text(encoding="utf-8")), "model_max_length": limit}
        file.write_text(json.dumps(given), encoding="utf-8")
        out = written(llama, "yarn:2")
        assert (out / "tokenizer_config.json").read_bytes() == file.read_bytes()

    def test_it_can_be_extended_again(self, llama: Path) -> None:
        once = written(llama, "yarn:2", 16384)
        twice = written(once, "yarn:2", 32768, out="longest")
        (rotary,) = read_config_file(twice).rotaries
        assert (rotary.scaling.factor, rotary.scaling.original_max_position_embeddings) == (4.0, 8192)

    @pytest.mark.parametrize(("family", "scaling", "changes"), CASES, ids=NAMES)
    def test_inspect_finds_no_error(self, tmp_path: Path, family: str, scaling: str, changes: dict[str, Any]) -> None:
        write_folder(tmp_path / "model", family, **changes)
        out = written(tmp_path / "model", scaling, 2 * int(changes.get("max_position_embeddings", 8192)))
        config = json.loads((out / "config.json").read_text(encoding="utf-8"))
        assert [f for f in find(read_config(config), config) if f.severity == "error"] == []


class TestBothDialects:
    """Older readers look for rope_theta and rope_scaling, newer ones for rope_parameters."""

    @pytest.mark.parametrize(("family", "scaling", "changes"), CASES, ids=NAMES)
    def test_each_dialect_alone_says_the_plan(
        self, tmp_path: Path, family: str, scaling: str, changes: dict[str, Any]
    ) -> None:
        write_folder(tmp_path / "model", family, **changes)
        plan = read_config_file(tmp_path / "model")
        to = 2 * int(changes.get("max_position_embeddings", 8192))
        out = written(tmp_path / "model", scaling, to)
        wanted = as_written(card(plan, scaling, to).after)
        config = json.loads((out / "config.json").read_text(encoding="utf-8"))
        old = ("rope_scaling", "rope_theta", "partial_rotary_factor")
        assert read_config(config) == wanted
        assert read_config({key: value for key, value in config.items() if key not in old}) == wanted
        legacy = out / "config.legacy.json"
        older = json.loads(legacy.read_text(encoding="utf-8")) if legacy.exists() else config
        older = {key: value for key, value in older.items() if key != "rope_parameters"}
        nested = any(isinstance(value, dict) for value in config["rope_parameters"].values())
        assert legacy.exists() == (family in ("gemma3", "olmo3"))
        if not nested or legacy.exists():
            assert read_config(older) == wanted
            self._require_older_words(older)

    def _require_older_words(self, config: dict[str, Any]) -> None:
        """As transformers 4 looks: the base by itself, and a type under either name."""
        assert config["rope_theta"] > 1
        scaling = config.get("rope_scaling")
        if scaling is not None and "type" in scaling:
            assert scaling["type"] == scaling["rope_type"]

    def test_the_two_are_the_same_word_for_word(self, llama: Path) -> None:
        config = json.loads((written(llama, "yarn:2") / "config.json").read_text(encoding="utf-8"))
        assert config["rope_scaling"] == config["rope_parameters"]
        # Older readers refuse a factor that is no float.
        assert type(config["rope_scaling"]["factor"]) is float
        assert config["rope_scaling"]["type"] == config["rope_scaling"]["rope_type"] == "yarn"
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0

    def test_divisors_say_their_amplitude_by_every_name(self, llama: Path) -> None:
        rope = json.loads((written(llama, "divisors") / "config.json").read_text(encoding="utf-8"))["rope_parameters"]
        assert rope["attention_factor"] == rope["short_mscale"] == rope["long_mscale"] == 1.05
        assert rope["short_factor"] == rope["long_factor"] == list(DIVISORS)

    def test_a_changed_base_has_no_scaling_beside_it(self, llama: Path) -> None:
        config = json.loads((written(llama, "ntk:2") / "config.json").read_text(encoding="utf-8"))
        assert "rope_scaling" not in config
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == pytest.approx(1e4 * 2 ** (16 / 14))

    def test_a_config_in_older_words(self, llama: Path) -> None:
        file = llama / "config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        del config["rope_parameters"]
        older = {**config, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
        file.write_text(json.dumps(older), encoding="utf-8")
        out = written(llama, "linear:2")
        (rotary,) = read_config_file(out).rotaries
        assert (rotary.rope_theta, rotary.scaling.factor) == (5e5, 4.0)
        assert AutoConfig.from_pretrained(out).rope_parameters["factor"] == 4.0

    def test_a_part_of_a_config_is_changed_where_it_stands(self, llama: Path) -> None:
        inner = json.loads((llama / "config.json").read_text(encoding="utf-8"))
        config = {"model_type": "llava", "text_config": inner, "vision_config": {"model_type": "clip_vision_model"}}
        plan = read_config(config)
        found, legacy = configs_module.config_for(config, card(plan, "yarn:2", 16384).after)
        assert legacy is None
        assert text_part(found)["rope_scaling"]["factor"] == 2.0
        assert "rope_scaling" not in found
        assert "rope_scaling" not in inner
        assert found["vision_config"] == config["vision_config"]


class TestFiles:
    """Weights are not doubled on the disk, nothing that runs is carried along, and nothing of the original changes."""

    def test_what_is_linked_copied_made_and_left_out(self, llama: Path) -> None:
        for name in ("pytorch_model.bin", "modeling_tiny.py", "LICENSE", "README.md", "chat_template.jinja", ".hidden"):
            (llama / name).write_text(f"{name} of the original", encoding="utf-8")
        (llama / "additional_chat_templates").mkdir()
        (llama / "additional_chat_templates" / "tools.jinja").write_text("tools", encoding="utf-8")
        before = {path: path.read_bytes() for path in llama.rglob("*") if path.is_file()}
        result = extend_folder(llama, llama.parent / "longer", card(read_config_file(llama), "yarn:2", 16384))
        assert result.linked == ("model.safetensors",)
        assert set(result.copied) == {
            "LICENSE", "README.original.md", "additional_chat_templates/tools.jinja", "chat_template.jinja",
            "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        }  # fmt: skip
        assert result.made == ("README.md", "config.json")
        assert result.left_out == ("modeling_tiny.py", "pytorch_model.bin")
        there = {path.relative_to(result.path).as_posix() for path in result.path.rglob("*") if path.is_file()}
        assert there == {*result.linked, *result.copied, *result.made}
        assert os.path.samefile(llama / "model.safetensors", result.path / "model.safetensors")
        assert (result.path / "README.original.md").read_text(encoding="utf-8") == "README.md of the original"
        assert {path: path.read_bytes() for path in llama.rglob("*") if path.is_file()} == before

    def test_copied_on_request(self, llama: Path) -> None:
        result = extend_folder(
            llama, llama.parent / "longer", card(read_config_file(llama), "yarn:2", 16384), copy=True
        )
        assert result.linked == ()
        assert "model.safetensors" in result.copied
        assert not os.path.samefile(llama / "model.safetensors", result.path / "model.safetensors")
        assert (llama / "model.safetensors").read_bytes() == (result.path / "model.safetensors").read_bytes()
        assert "copies of" in (result.path / "README.md").read_text(encoding="utf-8")

    def test_copied_where_no_link_can_be(self, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*a: Any) -> None:
            raise OSError("another file system")

        monkeypatch.setattr(os, "link", refuse)
        out = written(llama, "yarn:2")
        assert (llama / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()

    def test_a_cache_of_links_is_followed(self, llama: Path) -> None:
        blob = llama.parent / "blob"
        (llama / "model.safetensors").rename(blob)
        (llama / "model.safetensors").symlink_to(blob)
        out = written(llama, "yarn:2")
        assert not (out / "model.safetensors").is_symlink()
        assert os.path.samefile(blob, out / "model.safetensors")

    def test_several_weight_files_and_their_index(self, tmp_path: Path) -> None:
        model = write_folder(tmp_path / "model")
        (tmp_path / "model" / "model.safetensors").unlink()
        model.save_pretrained(tmp_path / "model", max_shard_size="60KB")
        out = written(tmp_path / "model", "yarn:2")
        shards = sorted(path.name for path in out.glob("model-*.safetensors"))
        assert len(shards) > 1
        assert (out / "model.safetensors.index.json").is_file()
        found = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
        assert all(torch.equal(found[name], values) for name, values in model.state_dict().items())

    def test_code_that_comes_with_a_model_is_not_named(self, llama: Path) -> None:
        for name in ("config.json", "tokenizer_config.json"):
            content = {**json.loads((llama / name).read_text(encoding="utf-8")), "auto_map": {"AutoModel": "x.Y"}}
            (llama / name).write_text(json.dumps(content), encoding="utf-8")
        out = written(llama, "yarn:2")
        for name in ("config.json", "tokenizer_config.json"):
            assert "auto_map" not in json.loads((out / name).read_text(encoding="utf-8"))


def _half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _overlapping(data: bytes) -> bytes:
    """The second tensor begins where the first does."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]
    said = json.dumps(header).encode()
    return len(said).to_bytes(8, "little") + said + data[8 + length :]


class TestDamagedWeights:
    """A model that is said to be extended must be there."""

    @pytest.mark.parametrize(
        "damage", [_half, _overlapping, lambda data: data[:8], lambda data: b"", lambda d: d + b"x"]
    )
    def test_one_file(self, llama: Path, damage: Any) -> None:
        file = llama / "model.safetensors"
        file.write_bytes(damage(file.read_bytes()))
        with pytest.raises(LoadError, match=r"model.safetensors cannot be read as a safetensors file"):
            written(llama, "yarn:2")
        assert [path.name for path in llama.parent.iterdir()] == ["model"]

    @pytest.mark.parametrize("fault", ["nowhere", "twice"])
    def test_several_files(self, llama: Path, fault: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(llama)
        (llama / "model.safetensors").unlink()
        model.save_pretrained(llama, max_shard_size="60KB")
        index = llama / "model.safetensors.index.json"
        told = json.loads(index.read_text(encoding="utf-8"))
        first, second = sorted(set(told["weight_map"].values()))[:2]
        if fault == "nowhere":
            told["weight_map"]["ghost"] = first
            index.write_text(json.dumps(told), encoding="utf-8")
            said = "says that 'ghost' is in"
        else:
            shutil.copyfile(llama / first, llama / second)
            said = "is in model-0"
        with pytest.raises(LoadError, match=said):
            written(llama, "yarn:2")
        assert [path.name for path in llama.parent.iterdir()] == ["model"]

    def test_an_index_of_files_that_are_not_read_stays_behind(self, llama: Path) -> None:
        shutil.copyfile(llama / "model.safetensors", llama / "a.safetensors")
        index = {"weight_map": {"lm_head.weight": "a.safetensors"}}
        (llama / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        result = extend_folder(llama, llama.parent / "longer", card(read_config_file(llama), "yarn:2", 16384))
        assert result.left_out == ("a.safetensors", "model.safetensors.index.json")
        assert result.linked == ("model.safetensors",)


class TestPairLayout:
    """A checkpoint in the layout that its family's code does not read stays one that plain transformers cannot run."""

    @pytest.mark.parametrize(("layout", "runs"), [("interleaved", False), ("halves", True)])
    def test_the_card_says_so(self, llama: Path, layout: str, runs: bool) -> None:
        write_layout(llama, layout, "A note.")
        out = written(llama, "yarn:2")
        told = (out / "README.md").read_text(encoding="utf-8")
        assert ("**Not in plain transformers" in told) != runs
        assert ("AutoModelForCausalLM" in told) == runs
        assert (out / "pair_layout.json").is_file()


class TestWholeOrNot:
    """A folder that is there is a model that loads."""

    def test_one_that_is_there_stays(self, llama: Path) -> None:
        (llama.parent / "longer").mkdir()
        with pytest.raises(FileExistsError, match=r"out: '.*longer' is there already; give a name that is not"):
            written(llama, "yarn:2")
        assert list((llama.parent / "longer").iterdir()) == []

    def test_nothing_is_written_into_the_model(self, llama: Path) -> None:
        before = sorted(llama.iterdir())
        with pytest.raises(ValueError, match=r"out: .* is inside .*, which is not changed"):
            extend_folder(llama, llama / "a" / "b", card(read_config_file(llama), "yarn:2", 16384))
        assert sorted(llama.iterdir()) == before

    @pytest.mark.parametrize("broken", ["write_card", "require_read_by_transformers", "_place"])
    def test_nothing_half(self, llama: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
        def fail(*a: Any, **k: Any) -> None:
            raise OSError("the disk is full")

        monkeypatch.setattr(f"theodolite.models.extend.folder.{broken}", fail)
        with pytest.raises(OSError, match="the disk is full"):
            written(llama, "yarn:2")
        assert [path.name for path in llama.parent.iterdir()] == ["model"]

    def test_what_transformers_would_read_otherwise_is_refused(
        self, llama: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = configs_module.config_for
        other = {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}, "rope_scaling": None}
        monkeypatch.setattr(
            "theodolite.models.extend.folder.config_for", lambda *a: ({**real(*a)[0], **other}, real(*a)[1])
        )
        with pytest.raises(LoadError, match="the installed transformers would read"):
            written(llama, "yarn:2")
        assert not (llama.parent / "longer").exists()

    @pytest.mark.parametrize("scaling", ["yarn:2", "ntk:2", "linear:2", "divisors"])
    def test_a_part_of_the_head_that_the_family_does_not_know(self, tmp_path: Path, scaling: str) -> None:
        # transformers' Llama turns all channels by a plain base, and fails on the widths of a scaling.
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        write_folder(tmp_path / "model", rope_parameters=rope)
        with pytest.raises(PlanError, match=r"partial_rotary_factor: got 8; 8 of 16 channels turn by it"):
            written(tmp_path / "model", scaling)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]

    def test_no_weights(self, llama: Path) -> None:
        (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
        with pytest.raises(LoadError, match=r"only pytorch_model.bin, which is a pickle and never opened"):
            written(llama, "yarn:2")
        assert not (llama.parent / "longer").exists()

    def test_damaged_limits(self, llama: Path) -> None:
        (llama / "generation_config.json").write_text("[1]", encoding="utf-8")
        with pytest.raises(LoadError, match=r"generation_config.json cannot be read: it holds no JSON object"):
            written(llama, "yarn:2")
        assert not (llama.parent / "longer").exists()

    def test_a_scaling_that_the_family_reads_as_another(self, tmp_path: Path) -> None:
        # Its code takes "yarn" for an older name of longrope.
        write_folder(tmp_path / "model", "phi3")
        with pytest.raises(PlanError, match=r"scaling: got 'yarn'; a config of phi3 has no words for this plan: rope_"):
            written(tmp_path / "model", "yarn:2")
        assert not (tmp_path / "longer").exists()

    def test_a_plan_that_no_config_says(self, llama: Path) -> None:
        plan = read_config_file(llama)
        changed = replace(plan.layers[0], rotate=replace(plan.layers[0].rotate, rope_theta=5e4))
        after = replace(plan, layers=(changed, *plan.layers[1:]), max_position_embeddings=16384)
        given = Card(model="tiny", hub=False, scaling="own", before=plan, after=after, to=16384)
        with pytest.raises(PlanError):
            extend_folder(llama, llama.parent / "longer", given)
        assert not (llama.parent / "longer").exists()
        assert plan.rotaries[0].scaling == Scaling()

    def test_a_scaling_that_transformers_does_not_take(self, tmp_path: Path) -> None:
        write_folder(tmp_path / "model", "phi3")
        with pytest.raises(LoadError, match=r"\(phi3\): .* must be one of \['longrope'\], got linear"):
            written(tmp_path / "model", "linear:2")
        assert not (tmp_path / "longer").exists()
