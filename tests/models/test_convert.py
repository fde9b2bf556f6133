"""Converted checkpoints give equal logits in the other layout, come back byte for byte, and appear whole or not."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FalconConfig

from theodolite.models import LoadError, patched
from theodolite.models.convert import convert_layout
from theodolite.models.layout_card import with_remark, without_remark
from theodolite.models.load import load_model
from theodolite.models.tensor_files import read_tensor_file
from theodolite.plan.findings import find
from theodolite.plan.open import open_model
from theodolite.plan.pair_layout import FILE as NOTE

from .tiny import logits, own_plan, spread, tiny, tokens
from .tiny_files import write_folder
from .trained_pairs import HEADS, KEY_HEADS, WIDTH

FAMILIES = [
    "llama", "qwen2", "qwen3", "gemma3", "phi3", "phi", "gpt_neox", "glm", "olmo2", "stablelm", "smollm3", "llama4",
    "deepseek_v2", "deepseek_v3", "gpt_oss", "qwen3_next",
]  # fmt: skip


def other(layout):
    return "interleaved" if layout == "halves" else "halves"


def shaken(family, **changes):
    """A tiny model whose biases and gains are not what they are at first: they must move too."""
    model = tiny(family, **changes)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def stated(model):
    return "interleaved" if own_plan(model).rotaries[0].interleaved else "halves"


def in_layout(model, plan, layout):
    """Logits of a model whose weights are in that layout."""
    turned = [layer.rotate and replace(layer.rotate, interleaved=layout == "interleaved") for layer in plan.layers]
    layers = tuple(replace(layer, rotate=rotate) for layer, rotate in zip(plan.layers, turned, strict=True))
    with patched(model, replace(plan, layers=layers)):
        return logits(model, tokens(33, batch=2))


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def same(one, two):
    """Sums of 64 float32 products in another order: 64 * 2^-24 = 4e-6 of their size, in each of 2 to 4 layers."""
    return (one - two).abs().max() / spread(two) < 2e-5


class TestEqualLogits:
    """The promise: the other layout's rotation on the converted weights is the old one's on the old weights."""

    @pytest.mark.parametrize("family", FAMILIES)
    def test_families(self, family, tmp_path):
        model = shaken(family)
        model.save_pretrained(tmp_path / "in")
        layout, plan = stated(model), own_plan(model)
        done = convert_layout(tmp_path / "in", tmp_path / "out", to=other(layout))
        moved = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        before = in_layout(model, plan, layout)
        assert same(in_layout(moved, plan, other(layout)), before)
        # In plain transformers it is right where the config could be told, and there alone.
        assert same(logits(moved, tokens(33, batch=2)), before) == done.fits
        convert_layout(tmp_path / "out", tmp_path / "back", to=layout)
        assert contents(tmp_path / "back") == contents(tmp_path / "in")

    @pytest.mark.parametrize("changes", [{"new_decoder_architecture": True, "num_kv_heads": 2}, {}])
    def test_falcon(self, changes, tmp_path):
        # Queries, keys and values of a group in one; one group of all heads without the newer architecture.
        config = FalconConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=False,
                              initializer_range=0.3, bias=True, **changes)  # fmt: skip
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        model.save_pretrained(tmp_path / "in")
        convert_layout(tmp_path / "in", tmp_path / "out", to="interleaved")
        moved = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        plan = own_plan(model)
        assert same(in_layout(moved, plan, "interleaved"), in_layout(model, plan, "halves"))
        assert not same(logits(moved, tokens(33, batch=2)), logits(model, tokens(33, batch=2)))

    def test_adapter(self, tmp_path):
        model = shaken("llama")
        model.save_pretrained(tmp_path / "base")
        adapter = tmp_path / "adapter"
        adapter.mkdir()
        generator = torch.Generator().manual_seed(3)
        low = {}
        for layer in range(2):
            # Keys are not adapted: theirs move in the base model alone.
            for name, rows in (("q_proj", 64), ("v_proj", 32)):
                path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                low[f"{path}.lora_A.weight"] = torch.randn(4, 64, generator=generator)
                low[f"{path}.lora_B.weight"] = torch.randn(rows, 4, generator=generator)
        save_file(low, adapter / "adapter_model.safetensors")
        (adapter / "adapter_config.json").write_text("{}")
        convert_layout(tmp_path / "base", tmp_path / "base-out", to="interleaved")
        done = convert_layout(
            adapter, tmp_path / "adapter-out", to="interleaved", config=tmp_path / "base" / "config.json"
        )
        assert set(done.moved) == {name for name in low if name.endswith("q_proj.lora_B.weight")}
        moved = AutoModelForCausalLM.from_pretrained(tmp_path / "base-out").eval()
        for one, folder in ((model, adapter), (moved, tmp_path / "adapter-out")):
            pairs, weights = load_file(folder / "adapter_model.safetensors"), one.state_dict()
            for name in pairs:
                if name.endswith("lora_B.weight"):
                    key = name.removeprefix("base_model.model.").replace(".lora_B", "")
                    weights[key].add_(0.05 * pairs[name] @ pairs[name.replace("lora_B", "lora_A")])
        plan = own_plan(model)
        assert same(in_layout(moved, plan, "interleaved"), in_layout(model, plan, "halves"))

    def test_config_is_told(self, tmp_path):
        shaken("deepseek_v3").save_pretrained(tmp_path / "in")
        done = convert_layout(tmp_path / "in", tmp_path / "out", to="halves")
        assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_interleave"] is False
        assert done.fits
        assert not (tmp_path / "out" / NOTE).exists()


class TestFiles:
    """Shards keep their names, headers and metadata; other files come along; other weights stay behind."""

    def test_shards(self, tmp_path):
        model = shaken("qwen2")
        model.save_pretrained(tmp_path / "in", max_shard_size="40KB")
        shards = sorted((tmp_path / "in").glob("*.safetensors"))
        assert len(shards) > 2
        (tmp_path / "in" / "tokenizer.json").write_text("{}")
        (tmp_path / "in" / "extra").mkdir()
        (tmp_path / "in" / "extra" / "notes.txt").write_text("kept")
        (tmp_path / "in" / "pytorch_model.bin").write_bytes(b"old")
        done = convert_layout(tmp_path / "in", tmp_path / "out", to="interleaved")
        assert done.left_out == ("pytorch_model.bin",)
        assert (tmp_path / "out" / "extra" / "notes.txt").read_text() == "kept"
        assert not (tmp_path / "out" / "pytorch_model.bin").exists()
        for shard in shards:
            one, two = read_tensor_file(shard), read_tensor_file(tmp_path / "out" / shard.name)
            assert shard.read_bytes()[: one.data] == (tmp_path / "out" / shard.name).read_bytes()[: two.data]
            before, after = load_file(shard), load_file(tmp_path / "out" / shard.name)
            assert {name for name in before if not torch.equal(before[name], after[name])} <= set(done.moved)
        moved = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        plan = own_plan(model)
        assert same(in_layout(moved, plan, "interleaved"), in_layout(model, plan, "halves"))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
    def test_lone_file(self, dtype, tmp_path):
        tensors = {f"layers.0.attention.w{name}.weight": torch.randn(rows, 8).to(dtype)
                   for name, rows in (("q", 32), ("k", 16), ("v", 16))}  # fmt: skip
        save_file(tensors, tmp_path / "in.safetensors", metadata={"made": "here"})
        done = convert_layout(tmp_path / "in.safetensors", tmp_path / "out.safetensors", to="halves", head_dim=8)
        assert set(done.moved) == set(list(tensors)[:2])
        with safe_open(tmp_path / "out.safetensors", "pt") as file:
            assert file.metadata() == {"made": "here"}
            found = file.get_tensor("layers.0.attention.wq.weight").float()
        q = tensors["layers.0.attention.wq.weight"].float()
        assert torch.equal(found, q.view(4, 4, 2, 8).transpose(1, 2).reshape(32, 8))

    def test_dtypes_that_torch_lacks_pass(self, tmp_path):
        q = torch.arange(64, dtype=torch.float32).numpy().tobytes()
        header = {
            "layers.0.attn.q_proj.weight": {"dtype": "F32", "shape": [8, 8], "data_offsets": [0, 256]},
            "layers.0.mlp.scale": {"dtype": "F4", "shape": [4], "data_offsets": [256, 258]},
            "layers.0.attn.k_proj.weight": {"dtype": "F32", "shape": [8, 8], "data_offsets": [258, 514]},
        }
        said = json.dumps(header).encode()
        (tmp_path / "in.safetensors").write_bytes(len(said).to_bytes(8, "little") + said + q + b"\x12\x34" + q)
        convert_layout(tmp_path / "in.safetensors", tmp_path / "out.safetensors", to="halves", head_dim=8)
        out = (tmp_path / "out.safetensors").read_bytes()
        assert out[: 8 + len(said)] == (tmp_path / "in.safetensors").read_bytes()[: 8 + len(said)]
        assert out[8 + len(said) + 256 :][:2] == b"\x12\x34"
        assert out[-256:] == out[8 + len(said) :][:256] != q

    def test_memory_is_that_of_a_tensor(self, tmp_path):
        # 8 layers of 2 x 4 MiB; one tensor, its new self and the index of rows are in memory at a time.
        rows = 1024
        tensors = {f"model.layers.{i}.self_attn.{n}_proj.weight": torch.zeros(rows, rows)
                   for i in range(8) for n in "qk"}  # fmt: skip
        save_file(tensors, tmp_path / "in.safetensors")
        code = (
            "import resource, sys; from theodolite.models.convert import convert_layout\n"
            "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "given = dict(to='halves', head_dim=64, source_layout='interleaved')\n"
            "convert_layout(*sys.argv[1:], **given, dry_run=True); before = peak()\n"
            "convert_layout(*sys.argv[1:], **given)\n"
            "print(peak() - before)"
        )
        paths = [tmp_path / "in.safetensors", tmp_path / "out.safetensors"]
        done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True)
        # Four tensors, where all would be 16.
        assert int(done.stdout) <= 4 * 4096
        assert paths[1].stat().st_size == paths[0].stat().st_size


@pytest.fixture
def folder(tmp_path):
    shaken("llama").save_pretrained(tmp_path / "in")
    return tmp_path / "in"


class TestCard:
    """A card that goes along speaks of the checkpoint as it was; who reads it must not take its word."""

    METADATA = "---\nbase_model: a/b\n---\n"
    TEXT = "# A model\n\nThe weights are unchanged.\n---\nLoad it by `from_pretrained`.\n"

    @pytest.mark.parametrize("metadata", ["", METADATA, METADATA.replace("\n", "\r\n")])
    def test_it_says_so_first(self, metadata, folder, tmp_path):
        given = (metadata + self.TEXT).encode()
        (folder / "README.md").write_bytes(given)
        convert_layout(folder, tmp_path / "out", to="interleaved")
        card = (tmp_path / "out" / "README.md").read_bytes()
        assert card.startswith(metadata.encode())
        assert card.endswith(self.TEXT.encode())
        remark = card[len(metadata) : -len(self.TEXT)].decode()
        assert "Queries and keys of this checkpoint were moved to interleaved pairs" in remark
        assert "in plain transformers this checkpoint gives nonsense" in remark
        assert "are about that one" in remark
        convert_layout(tmp_path / "out", tmp_path / "back", to="halves")
        assert (tmp_path / "back" / "README.md").read_bytes() == given

    def test_there_is_none_where_there_was_none(self, folder, tmp_path):
        convert_layout(folder, tmp_path / "out", to="interleaved")
        assert not (tmp_path / "out" / "README.md").exists()

    def test_a_name_in_it_is_text(self):
        told = with_remark(b"x", "halves", "The code of [a](b)<img>\n# c reads `it`.").decode()
        assert "The code of \\[a\\](b)&lt;img&gt; \\# c reads \\`it\\`." in told
        assert without_remark(told.encode()) == b"x"


class TestKindsOfFiles:
    """What a file is comes before how wide its heads are."""

    def test_gguf(self, tmp_path):
        (tmp_path / "in.gguf").write_bytes(b"GGUF\x03\0\0\0")
        said = (
            r"in.gguf is a GGUF file, which is not read here: llama.cpp reads one layout of each architecture; convert"
        )
        with pytest.raises(LoadError, match=said):
            convert_layout(tmp_path / "in.gguf", tmp_path / "out", to="halves")
        with pytest.raises(LoadError, match="is a GGUF file"):
            convert_layout(tmp_path / "in.gguf", tmp_path / "out.gguf", to="halves", head_dim=16)

    @pytest.mark.parametrize("name", ["in.bin", "in.PT"])
    def test_pickles(self, name, tmp_path):
        (tmp_path / name).write_bytes(b"\x80\x04")
        with pytest.raises(LoadError, match="is a pickle, which is never opened; give safetensors"):
            convert_layout(tmp_path / name, tmp_path / "out.safetensors", to="halves")

    def test_nothing_there(self, tmp_path):
        with pytest.raises(LoadError, match="does not exist"):
            convert_layout(tmp_path / "in", tmp_path / "out", to="halves")


class TestIndex:
    """An index says which file has which tensor; what it says must be so, and one of other files stays behind."""

    def test_one_that_names_a_tensor_that_is_nowhere(self, folder, tmp_path):
        sharded(folder)
        index = folder / "model.safetensors.index.json"
        told = json.loads(index.read_text())
        told["weight_map"]["model.ghost.weight"] = next(iter(told["weight_map"].values()))
        index.write_text(json.dumps(told))
        with pytest.raises(LoadError, match=r"index.json says that 'model.ghost.weight' is in 'model-0"):
            convert_layout(folder, tmp_path / "out", to="interleaved")

    def test_one_that_names_the_wrong_file(self, folder, tmp_path):
        sharded(folder)
        index = folder / "model.safetensors.index.json"
        told = json.loads(index.read_text())
        files = sorted(set(told["weight_map"].values()))
        name = next(name for name, file in told["weight_map"].items() if file == files[0])
        told["weight_map"][name] = files[1]
        index.write_text(json.dumps(told))
        with pytest.raises(LoadError, match="which does not have it"):
            convert_layout(folder, tmp_path / "out", to="interleaved")

    def test_one_of_files_that_are_not_read(self, folder, tmp_path):
        save_file({"x": torch.zeros(2)}, folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
        done = convert_layout(folder, tmp_path / "out", to="interleaved")
        assert done.left_out == ("a.safetensors", "model.safetensors.index.json")
        assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


def sharded(folder):
    """The same model in several files."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="40KB")


class TestRefusals:
    """Nothing is written where anything is wrong, and the sentence says what to do."""

    def test_twice(self, folder, tmp_path):
        convert_layout(folder, tmp_path / "out", to="interleaved")
        with pytest.raises(ValueError, match=f"is interleaved already: its {NOTE} says so"):
            convert_layout(tmp_path / "out", tmp_path / "again", to="interleaved")
        with pytest.raises(ValueError, match="is halves already: its config and its family's code say so"):
            convert_layout(folder, tmp_path / "again", to="halves")
        with pytest.raises(ValueError, match="source_layout: got 'halves', which is the layout asked for"):
            convert_layout(folder, tmp_path / "again", to="halves", source_layout="halves")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
        # Meta's weights under a config of transformers: the caller knows better.
        assert convert_layout(folder, tmp_path / "again", to="halves", source_layout="interleaved").fits

    def test_weights_are_asked_first(self, folder, tmp_path):
        from .test_detect import paired, write

        q, k = paired("interleaved")
        write(folder / "model.safetensors", [q[:, :, :]] * 2, [k] * 2)
        with pytest.raises(ValueError, match="is interleaved already: its weights show it"):
            convert_layout(folder, tmp_path / "out", to="interleaved")
        done = convert_layout(folder, tmp_path / "out", to="halves")
        assert (done.source_layout, done.why) == ("interleaved", "its weights show it")

    def test_existing(self, folder, tmp_path):
        (tmp_path / "out").mkdir()
        with pytest.raises(ValueError, match="exists; give a new name, for nothing is merged or overwritten"):
            convert_layout(folder, tmp_path / "out", to="interleaved")
        with pytest.raises(ValueError, match="is inside the checkpoint"):
            convert_layout(folder, folder / "out", to="interleaved")
        with pytest.raises(ValueError, match="is no folder"):
            convert_layout(folder, tmp_path / "no" / "out", to="interleaved")

    def test_dry_run(self, folder, tmp_path):
        done = convert_layout(folder, tmp_path / "out", to="interleaved", dry_run=True)
        assert len(done.moved) == 4
        assert [path.name for path in tmp_path.iterdir()] == ["in"]

    @pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.qweight", "model.layers.0.self_attn.qkv.weight"])
    def test_not_understood(self, name, folder, tmp_path):
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, name: torch.zeros(64, 2)}, folder / "model.safetensors")
        with pytest.raises(ValueError, match=r"is not known here|looks like queries or keys"):
            convert_layout(folder, tmp_path / "out", to="interleaved")
        assert [path.name for path in tmp_path.iterdir()] == ["in"]

    def test_broken_half_way(self, folder, tmp_path, monkeypatch):
        def fail(*_):
            raise OSError("the disk is full")

        monkeypatch.setattr("theodolite.models.rewritten._moved", fail)
        with pytest.raises(OSError, match="the disk is full"):
            convert_layout(folder, tmp_path / "out", to="interleaved")
        assert [path.name for path in tmp_path.iterdir()] == ["in"]

    @pytest.mark.parametrize(
        ("entry", "message"),
        [
            ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "does not fill"),
            ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "begins at byte"),
            ({"dtype": "F32", "shape": [1 << 70], "data_offsets": [0, 8]}, "no dtype or no shape"),
            ({"dtype": "F4", "shape": [1], "data_offsets": [0, 1 << 60]}, "its tensors end at byte"),
            ({"dtype": "F32", "shape": [2], "data_offsets": [0, -8]}, "no place"),
            ({"dtype": "F32", "shape": [2]}, "no place"),
            ([], "no dtype or no shape"),
        ],
    )
    def test_damaged_headers(self, entry, message, tmp_path):
        said = json.dumps({"a.layers.0.q_proj.weight": entry}).encode()
        (tmp_path / "x.safetensors").write_bytes(len(said).to_bytes(8, "little") + said + bytes(8))
        with pytest.raises(LoadError, match=message):
            read_tensor_file(tmp_path / "x.safetensors")

    def test_header_longer_than_the_file(self, tmp_path):
        (tmp_path / "x.safetensors").write_bytes((1 << 24).to_bytes(8, "little") + b"{}")
        with pytest.raises(LoadError, match="its header is longer than it"):
            read_tensor_file(tmp_path / "x.safetensors")


class TestSites:
    """Two kinds of attention are never chosen between silently."""

    def test_two_homes(self, tmp_path):
        tensors = {f"{home}.layers.0.attn.{n}_proj.weight": torch.randn(count * WIDTH, 8)
                   for home in ("model", "vision") for n, count in (("q", HEADS), ("k", KEY_HEADS))}  # fmt: skip
        save_file(tensors, tmp_path / "in.safetensors")
        with pytest.raises(ValueError, match=r"sites: queries and keys are in \['model.*', 'vision.*'\]"):
            convert_layout(tmp_path / "in.safetensors", tmp_path / "out.safetensors", to="halves", head_dim=WIDTH)
        done = convert_layout(
            tmp_path / "in.safetensors", tmp_path / "out.safetensors", to="halves", head_dim=WIDTH,
            sites=["model.layers.*.attn"],
        )  # fmt: skip
        assert all(name.startswith("model.") for name in done.moved)
        assert len(done.moved) == 2


class TestWhatReadsIt:
    """A checkpoint in the other layout is nonsense to its family's code: whoever reads the folder is told."""

    def test_inspect_load_and_back(self, tmp_path):
        source, other, back = tmp_path / "halves", tmp_path / "interleaved", tmp_path / "back"
        write_folder(source)
        convert_layout(source, other, to="interleaved", source_layout="halves")
        opened = open_model(str(other))
        assert opened.layout == "interleaved"
        assert all(rotary.interleaved for rotary in opened.plan.rotaries)
        (finding,) = [f for f in find(opened.plan, opened.raw, layout=opened.layout) if f.severity == "error"]
        assert finding.field == "pair_layout.json"
        assert "--to half" in finding.fix
        with pytest.raises(LoadError, match=r"is in interleaved pairs \(pair_layout.json\).*--to half"):
            load_model(str(other), dtype="float32", device="cpu")
        convert_layout(other, back, to="halves")
        assert open_model(str(back)).layout is None
        load_model(str(back), dtype="float32", device="cpu")

    @pytest.mark.parametrize(
        "content", [b"", b"[]", b"{}", b'{"layout": 3}', b'{"layout": "both"}', b"\xff", b"{" * 9999]
    )
    def test_a_file_that_says_nothing(self, tmp_path, content):
        write_folder(tmp_path / "model")
        (tmp_path / "model" / "pair_layout.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"pair_layout\.json"):
            open_model(str(tmp_path / "model"))
