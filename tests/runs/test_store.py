"""What is done stays done: through kills, torn lines, second runs and second processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from theodolite.runs import Store, cell_key, write_atomically

# Appends cells with arrays until it is killed; says so once the first is there.
WRITER = """
import sys
from pathlib import Path
import numpy as np
from theodolite.runs import Store
with Store(Path(sys.argv[1])) as store:
    for i in range(10**9):
        store.put({"i": i}, {"square": i * i, "text": "x" * 20_000}, array=np.full(50_000, i, np.float32))
        print(i, flush=True)
"""
HOLDER = """
import sys, time
from pathlib import Path
from theodolite.runs import Store
with Store(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def started(code: str, folder: Path) -> subprocess.Popen[str]:
    """A process that has printed its first line."""
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert process.stdout is not None
    process.stdout.close()


def lines(folder: Path) -> list[dict[str, Any]]:
    with (folder / "results.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


class TestKill:
    """`kill -9` costs the cell that was being written and no other."""

    @pytest.mark.parametrize("milliseconds", [0, 7, 23, 61, 140])
    def test_a_real_process_killed_while_it_writes(self, tmp_path, milliseconds):
        process = started(WRITER, tmp_path)
        time.sleep(milliseconds / 1000)
        kill(process)
        with Store(tmp_path) as store:
            done = 0
            while {"i": done} in store:
                found = store.get({"i": done})
                assert found is not None
                assert found.result == {"square": done * done, "text": "x" * 20_000}
                assert np.array_equal(found.array, np.full(50_000, done, np.float32))
                done += 1
            assert done >= 1
            assert len(lines(tmp_path)) == done
            store.put({"i": done}, {"square": -1})
        assert [entry["cell"]["i"] for entry in lines(tmp_path)] == list(range(done + 1))
        # An array may have no cell, if the kill fell between the two; it is whole then too, and nothing else is left.
        for file in (tmp_path / "tokens").iterdir():
            assert np.load(file).shape == (50_000,)

    def test_a_half_written_array_is_cleared_away(self, tmp_path):
        (tmp_path / "tokens").mkdir()
        (tmp_path / "tokens" / ".77.abc.npy").write_bytes(b"half")
        with Store(tmp_path):
            assert list((tmp_path / "tokens").iterdir()) == []

    def test_a_last_line_torn_at_every_byte(self, tmp_path):
        with Store(tmp_path) as store:
            store.put({"cell": 1}, {"value": 1})
            first = store.path.stat().st_size
            store.put({"cell": "鲸"}, {"value": [2, "二"]})
        whole = (tmp_path / "results.jsonl").read_bytes()
        for size in range(first, len(whole)):
            (tmp_path / "results.jsonl").write_bytes(whole[:size])
            with Store(tmp_path) as store:
                assert {"cell": 1} in store
                assert {"cell": "鲸"} not in store
                assert store.path.stat().st_size == first
                store.put({"cell": "鲸"}, {"value": [2, "二"]})
            assert (tmp_path / "results.jsonl").read_bytes() == whole


class TestOnce:
    """A cell is written once, whatever its result is when it is measured again."""

    def test_the_first_result_stays(self, tmp_path):
        with Store(tmp_path) as store:
            assert store.put({"a": 1, "b": 2}, {"value": 1}).result == {"value": 1}
            assert store.put({"b": 2, "a": 1}, {"value": 2}).result == {"value": 1}
        assert len(lines(tmp_path)) == 1

    def test_what_lost_its_files_takes_its_own_place(self, tmp_path):
        with Store(tmp_path) as store:
            store.put({"a": 1}, {"value": 1})
            assert store.put({"a": 1}, {"value": 2}, again=True).result == {"value": 2}
        with Store(tmp_path) as store:
            assert store.get({"a": 1}).result == {"value": 2}

    def test_what_is_returned_is_what_is_read_back(self, tmp_path):
        result = {"pair": (1, 2), "float": 0.1 + 0.2, "text": "论语 \u2028 \n", "none": None, 3: "number"}
        with Store(tmp_path) as store:
            returned = store.put({"cell": 1}, result, seconds=1.5)
            assert store.get({"cell": 1}) == returned
        with Store(tmp_path) as store:
            assert store.get({"cell": 1}) == returned
        assert returned.result == {
            "pair": [1, 2],
            "float": 0.1 + 0.2,
            "text": "论语 \u2028 \n",
            "none": None,
            "3": "number",
        }
        assert lines(tmp_path)[0]["seconds"] == 1.5

    def test_arrays_come_back_to_the_bit(self, tmp_path):
        row = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
        with Store(tmp_path) as store:
            store.put({"cell": 1}, {}, array=row)
        with Store(tmp_path) as store:
            found = store.get({"cell": 1})
            assert found is not None
            assert found.array.tobytes() == row.tobytes()

    @pytest.mark.parametrize("number", [float("nan"), float("inf")])
    def test_what_json_cannot_say_is_refused_and_nothing_is_written(self, tmp_path, number):
        with Store(tmp_path) as store:
            with pytest.raises(ValueError, match="not JSON compliant"):
                store.put({"cell": 1}, {"value": number})
            assert {"cell": 1} not in store
            assert not store.path.exists()


class TestOneHolder:
    """Two runs never write to one folder; a dead one holds nothing."""

    def test_another_process(self, tmp_path):
        process = started(HOLDER, tmp_path)
        with pytest.raises(BlockingIOError, match=f"{tmp_path}: another run is writing here"):
            Store(tmp_path).__enter__()
        kill(process)
        with Store(tmp_path):
            pass

    def test_the_same_process(self, tmp_path):
        with Store(tmp_path), pytest.raises(BlockingIOError):
            Store(tmp_path).__enter__()
        with Store(tmp_path):
            pass

    def test_other_folders_are_free(self, tmp_path):
        with Store(tmp_path / "a"), Store(tmp_path / "b"):
            pass


class TestDamage:
    """What was changed or lost after it was written is never taken for a measurement."""

    def test_a_changed_result_is_named(self, tmp_path):
        with Store(tmp_path) as store:
            store.put({"cell": 1}, {"accuracy": 0.25})
        store.path.write_text(store.path.read_text().replace("0.25", "0.99"))
        with pytest.raises(ValueError, match="line 1 is not as it was written; delete the line"):
            Store(tmp_path).__enter__()

    @pytest.mark.parametrize("content", [None, b"", b"half", "other"])
    def test_a_lost_or_changed_array_makes_the_cell_unfinished(self, tmp_path, content):
        row = np.arange(10, dtype=np.float32)
        with Store(tmp_path) as store:
            store.put({"cell": 1}, {}, array=row)
        (file,) = (tmp_path / "tokens").glob("*.npy")
        if content is None:
            file.unlink()
        elif content == "other":
            np.save(file, row + 1)
        else:
            file.write_bytes(content)
        with Store(tmp_path) as store:
            assert store.get({"cell": 1}) is None
            store.put({"cell": 1}, {}, array=row)
        with Store(tmp_path) as store:
            found = store.get({"cell": 1})
            assert found is not None
            assert found.array.tobytes() == row.tobytes()


class TestGarbage:
    """A file that is no store is named with its line, never skipped over and never cut."""

    @pytest.mark.parametrize(
        "line",
        [
            b"no json\n",
            b"[]\n",
            b"5\n",
            b"null\n",
            b'{"key": "a"}\n',
            b"\xff\xfe\x00\n",
            b"\n",
            b'{"key": {}, "result": 1}\n',
        ],
    )
    def test_the_line_is_named(self, tmp_path, line):
        with Store(tmp_path) as store:
            store.put({"cell": 1}, {})
        good = store.path.read_bytes()
        # The same cell twice is no fault, and counts as a line.
        content = good + good + line + b"\n" + good
        store.path.write_bytes(content)
        with pytest.raises(ValueError, match=r"results\.jsonl: line 3 is not a result of a survey"):
            Store(tmp_path).__enter__()
        assert store.path.read_bytes() == content

    def test_the_folder_is_free_again_after_the_error(self, tmp_path):
        (tmp_path / "results.jsonl").write_text("garbage\n")
        kept = []
        for _ in range(2):
            with pytest.raises(ValueError, match="line 1") as error:
                Store(tmp_path).__enter__()
            # A traceback that someone keeps must not keep the folder.
            kept.append(error)
        (tmp_path / "results.jsonl").unlink()
        with Store(tmp_path):
            pass


class TestAtomicFiles:
    """A file appears whole or not at all."""

    def test_an_error_while_writing_leaves_what_was_there(self, tmp_path):
        def fail(path: Path) -> None:
            path.write_text("half")
            raise ZeroDivisionError

        for before in (None, "old"):
            if before is not None:
                (tmp_path / "file").write_text(before)
            with pytest.raises(ZeroDivisionError):
                write_atomically(tmp_path / "file", fail)
            assert [path.read_text() for path in tmp_path.iterdir()] == ([] if before is None else ["old"])

    def test_a_new_content_replaces_the_old(self, tmp_path):
        for content in ("old", "new"):
            write_atomically(tmp_path / "sub" / "file", lambda path, text=content: path.write_text(text))
        assert [path.name for path in (tmp_path / "sub").iterdir()] == ["file"]
        assert (tmp_path / "sub" / "file").read_text() == "new"


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


class TestKeys:
    """A key depends on what a cell says, not on the order in which it says it."""

    @given(st.dictionaries(st.text(), values, max_size=5))
    def test_order_and_storing_do_not_matter(self, cell):
        assert cell_key(dict(reversed(cell.items()))) == cell_key(cell)
        assert cell_key(json.loads(json.dumps(cell))) == cell_key(cell)

    def test_tuples_and_lists_are_the_same(self):
        assert cell_key({"depths": (0.1, 0.2)}) == cell_key({"depths": [0.1, 0.2]})

    def test_what_differs_has_another_key(self):
        cells = [{}, {"a": 1}, {"a": "1"}, {"a": None}, {"a": [1]}, {"b": 1}, {"a": 1, "b": 1}, {"a": {"b": 1}}]
        assert len({cell_key(cell) for cell in cells}) == len(cells)
