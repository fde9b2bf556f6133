"""A GGUF file is converted once, whole or not at all, whoever asks and whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from theodolite.models import LoadError, gguf_cache, load, patched, resolve, weights_bytes
from theodolite.plan.gguf_header import read_header

from .tiny import logits, own_plan, spread, tiny, tokens
from .tiny_files import write_gguf

_CONVERT = """
import sys, time
from theodolite.models import gguf_cache, resolve
real = gguf_cache._convert
def slow(path, folder):
    real(path, folder)
    print("converted", flush=True)
    time.sleep(float(sys.argv[3]))
gguf_cache._convert = slow
print(gguf_cache.converted(resolve(sys.argv[1]), cache=sys.argv[2]), flush=True)
"""


def start(file: Path, cache: Path, pause: float) -> subprocess.Popen[str]:
    """Convert in another process, which waits `pause` seconds before it publishes."""
    command = [sys.executable, "-c", _CONVERT, str(file), str(cache), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def whole(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir() and not path.name.startswith(".")]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


class TestConversion:
    """What comes out is the model."""

    def test_the_model_is_the_one_that_was_written(self, tmp_path: Path) -> None:
        model, ids = write_gguf(tmp_path / "tiny.gguf"), tokens(30)
        loaded = load(str(tmp_path / "tiny.gguf"), dtype=torch.float32, device="cpu", cache=tmp_path / "cache")
        # The file keeps the norm's epsilon in float32.
        assert float((logits(loaded.model, ids) - logits(model, ids)).abs().max()) < 1e-5 * spread(logits(model, ids))
        assert loaded.plan.rotaries[0].rope_theta == model.config.rope_parameters["rope_theta"]
        assert loaded.tokenizer.decode(loaded.tokenizer("the")["input_ids"]) == "the"

    def test_the_second_time_converts_nothing(
        self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = load(str(file), cache=tmp_path / "cache")
        monkeypatch.setattr(gguf_cache, "_convert", lambda *a: pytest.fail("converted again"))
        os.utime(file, (1, 1))
        second = load(str(file), cache=tmp_path / "cache")
        assert first.fingerprint == second.fingerprint
        assert torch.equal(logits(first.model, tokens(9)), logits(second.model, tokens(9)))

    def test_another_file_of_the_same_name_is_converted_anew(self, file: Path, tmp_path: Path) -> None:
        first = gguf_cache.converted(resolve(str(file)), cache=tmp_path / "cache")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        assert gguf_cache.converted(resolve(str(file)), cache=tmp_path / "cache") != first

    def test_bytes_are_known_from_the_header(self, file: Path, tmp_path: Path) -> None:
        model = write_gguf(tmp_path / "again.gguf")
        parameters = sum(values.numel() for values in model.state_dict().values())
        assert read_header(file).parameters == parameters
        assert weights_bytes(resolve(str(file)), torch.bfloat16) == 2 * parameters

    def test_where_the_cache_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "/x")
        monkeypatch.delenv("THEODOLITE_CACHE", raising=False)
        assert gguf_cache.cache_folder() == Path("/x/theodolite")
        monkeypatch.setenv("THEODOLITE_CACHE", "/y")
        assert gguf_cache.cache_folder() == Path("/y")
        assert gguf_cache.cache_folder("/z") == Path("/z")


class TestScaling:
    """transformers reads rope.scaling of gpt-oss only: other models would run unscaled, without a word."""

    @pytest.mark.parametrize("kind", ["linear", "yarn"])
    def test_what_the_file_states_reaches_the_model(self, tmp_path: Path, kind: str) -> None:
        write_gguf(tmp_path / "scaled.gguf", scaling=kind)
        original = {"original_max_position_embeddings": 2048} if kind == "yarn" else {}
        judge = tiny("llama", rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **original})
        loaded = load(str(tmp_path / "scaled.gguf"), dtype=torch.float32, device="cpu", cache=tmp_path / "cache")
        truth = logits(judge, tokens(50))
        assert float((logits(loaded.model, tokens(50)) - truth).abs().max()) < 1e-5 * spread(truth)
        assert loaded.plan.rotaries == own_plan(judge).rotaries

    def test_divisors_of_llama_3_1(self, tmp_path: Path) -> None:
        divisors = (1.0, 1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0)
        model = write_gguf(tmp_path / "scaled.gguf", divisors=divisors)
        loaded = load(str(tmp_path / "scaled.gguf"), dtype=torch.float32, device="cpu", cache=tmp_path / "cache")
        (rotary,), plain = loaded.plan.rotaries, own_plan(model).rotaries[0]
        assert np.array_equal(rotary.inv_freq(length=50), plain.inv_freq() / np.array(divisors))
        assert rotary.attention_factor() == 1.0
        # transformers, by the restated config, and ours, patched in, agree.
        theirs = logits(loaded.model, tokens(50))
        with patched(loaded.model, loaded.plan):
            assert float((logits(loaded.model, tokens(50)) - theirs).abs().max()) < 1e-4 * spread(theirs)
        assert float((theirs - logits(model, tokens(50))).abs().max()) > 1e-3 * spread(theirs)

    def test_a_scaling_that_is_not_read(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "scaled.gguf", scaling="longrope")
        with pytest.raises(
            LoadError, match=r"scaled.gguf scales its rotary positions in a way that is not read: rope_factors_long"
        ):
            load(str(tmp_path / "scaled.gguf"), cache=tmp_path / "cache")


class TestFaults:
    """Killed, raced, full, damaged."""

    def test_killed_leaves_nothing_half(self, file: Path, tmp_path: Path) -> None:
        cache = tmp_path / "cache"
        process = start(file, cache, pause=60)
        assert process.stdout is not None
        assert process.stdout.readline() == "converted\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert whole(cache) == []
        # The next one cleans up what the killed one wrote, and succeeds.
        target = gguf_cache.converted(resolve(str(file)), cache=cache)
        assert whole(cache) == [target]
        assert not list(cache.glob(".*"))

    def test_two_processes_at_once_convert_once(self, file: Path, tmp_path: Path) -> None:
        cache = tmp_path / "cache"
        processes = [start(file, cache, pause=1) for _ in range(2)]
        outputs = [process.communicate(timeout=60)[0].splitlines() for process in processes]
        assert sorted(len(lines) for lines in outputs) == [1, 2]
        assert len({lines[-1] for lines in outputs}) == 1
        assert [str(path) for path in whole(cache)] == [outputs[0][-1]]

    def test_a_failure_leaves_nothing(self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(path: Path, folder: Path) -> None:
            (folder / "model.safetensors").write_bytes(b"half")
            raise KeyboardInterrupt

        monkeypatch.setattr(gguf_cache, "_convert", fail)
        with pytest.raises(KeyboardInterrupt):
            gguf_cache.converted(resolve(str(file)), cache=tmp_path / "cache")
        assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]

    def test_too_little_space_is_said_first(self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = gguf_cache.shutil.disk_usage(tmp_path)._replace(free=10_000_000)
        monkeypatch.setattr(gguf_cache.shutil, "disk_usage", lambda folder: usage)
        with pytest.raises(LoadError, match=r"has 0.0 GB free and the conversion needs 0.1 GB; set THEODOLITE_CACHE"):
            gguf_cache.converted(resolve(str(file)), cache=tmp_path / "cache")

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            (b"nonsense", "is no GGUF file"),
            (b"GGUF\x09\0\0\0", "GGUF version 09000000 is not read"),
            (b"GGUF\x03\0\0\0" + b"\1" * 9, "is damaged or ends too early"),
        ],
    )
    def test_damaged_files(self, tmp_path: Path, content: bytes, says: str) -> None:
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(LoadError, match=says):
            load(str(tmp_path / "bad.gguf"), cache=tmp_path / "cache")
        with pytest.raises(LoadError, match=says):
            weights_bytes(resolve(str(tmp_path / "bad.gguf")))

    def test_a_download_that_broke_off(self, file: Path, tmp_path: Path) -> None:
        file.write_bytes(file.read_bytes()[:-1000])
        with pytest.raises(LoadError, match="cannot be read by transformers"):
            load(str(file), cache=tmp_path / "cache")
        assert whole(tmp_path / "cache") == []
