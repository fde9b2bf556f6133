"""Files drawn from a seed through all of `theodolite inspect`; benchmarks/fuzz.py runs as many as are wanted."""

from __future__ import annotations

import hashlib
import mmap
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz import judge
from tests.fuzz.cases import KINDS, Case, case

SEED, CASES, CHUNK = 20, 1500, 100
PLAIN = (
    b'{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 1e4}'
)


class TestCases:
    """What a stranger's file holds is unknown: it is a plan in finite numbers, or one line with file and field."""

    @pytest.mark.parametrize("first", range(0, CASES, CHUNK))
    def test_a_hundred_files(self, tmp_path: Path, first: int) -> None:
        broken = {}
        for number in range(first, first + CHUNK):
            verdict = judge.judged(case(SEED, number), tmp_path)
            if verdict.faults:
                broken[number] = verdict.faults
        assert not broken, f"python benchmarks/fuzz.py --seed {SEED} --only {next(iter(broken))}"


class TestGenerator:
    """A case that cannot be drawn again is no use, and one that is always refused early tells nothing."""

    def test_the_same_bytes_everywhere(self) -> None:
        digest = hashlib.sha256()
        # The configs come from transformers, and are its own matter.
        drawn = [made for made in (case(0, number) for number in range(60)) if made.kind in ("params", "gguf")]
        for made in drawn:
            digest.update(made.data + made.original)
        assert len(drawn) == 24
        assert digest.hexdigest()[:16] == "82523b4768f1b89e"
        assert case(0, 7) == case(0, 7) != case(1, 7)

    def test_every_kind_is_accepted_and_refused(self, tmp_path: Path) -> None:
        seen: set[tuple[str, bool]] = set()
        for number in range(300):
            made = case(SEED, number)
            seen.add((made.kind, judge.judged(made, tmp_path).accepted))
            if len(seen) == 2 * len(KINDS):
                return
        raise AssertionError(sorted(seen))


class TestJudge:
    """A judge that finds nothing wrong would pass anything."""

    def faults(self, monkeypatch: pytest.MonkeyPatch, folder: Path, run: Callable[[list[str]], int]) -> str:
        monkeypatch.setattr(judge, "main", run)
        return "; ".join(judge.judged(Case(0, 0, "config", PLAIN, PLAIN), folder).faults)

    def test_a_good_file(self, tmp_path: Path) -> None:
        verdict = judge.judged(Case(0, 0, "config", PLAIN, PLAIN), tmp_path)
        # No length is stated, so the settings of the engines are refused, and that is no fault.
        assert verdict.accepted
        assert verdict.faults == []
        assert 0 < verdict.seconds < judge.MOST_SECONDS

    def test_exceptions_and_warnings(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def fail(arguments: list[str]) -> int:
            raise KeyError("rope_theta")

        def warn(arguments: list[str]) -> int:
            import numpy as np

            return int(np.float64(0) / np.float64(0) == 0)

        assert "KeyError" in self.faults(monkeypatch, tmp_path, fail)
        assert "RuntimeWarning" in self.faults(monkeypatch, tmp_path, warn)

    @pytest.mark.parametrize(
        ("told", "fault"),
        [
            ("theodolite inspect: it is wrong\n", "no file in"),
            ("theodolite inspect: config.json\nis wrong\n", "refused in"),
            ("theodolite inspect: config.json \x1b[2J\n", "refused in"),
            ("Traceback of config.json\n", "refused in"),
            (
                "theodolite inspect: config in config.json: got 'TypeError: x'; a value in it is of the wrong type or "
                "out of range\n",
                "no field in",
            ),
        ],
    )
    def test_refusals(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str, fault: str) -> None:
        def refuse(arguments: list[str]) -> int:
            sys.stderr.write(told)
            return 2

        assert fault in self.faults(monkeypatch, tmp_path, refuse)

    def test_what_is_printed(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def layers(frequencies: str) -> Callable[[list[str]], int]:
            def run(arguments: list[str]) -> int:
                layer = f'{{"inv_freq": {frequencies}, "live_pairs": null, "attention_factor": 1.0}}'
                print(f'{{"layers": [{layer}]}}' if "--json" in arguments else "amplitude  nan on cos and sin")
                return 0

            return run

        assert "amplitude" in self.faults(monkeypatch, tmp_path, layers("[1.0]"))
        assert "NaN is no JSON" in self.faults(monkeypatch, tmp_path, layers("[NaN]"))
        assert "turns by 0.0 to 1.0" in self.faults(monkeypatch, tmp_path, layers("[1.0, 0.0]"))

    def test_time_and_memory(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def large(arguments: list[str]) -> int:
            # Pages of its own: a long process has room to give without new ones.
            with mmap.mmap(-1, 2**25) as pages:
                pages.write(bytes(range(256)) * 2**17)
            print('{"layers": []}')
            return 0

        monkeypatch.setattr(judge, "MOST_SECONDS", -1.0)
        monkeypatch.setattr(judge, "MOST_BYTES", 2**24)
        found = self.faults(monkeypatch, tmp_path, large)
        assert " s;" in found
        if Path("/proc/self/clear_refs").exists():
            assert " MiB" in found
