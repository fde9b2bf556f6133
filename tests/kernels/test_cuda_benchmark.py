"""The benchmark for GPUs, with a clock of our own: it runs on machines that no test sees, and must not fail there."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def ways(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("rotation_ways")
    monkeypatch.setattr(module, "Q_HEADS", 2)
    monkeypatch.setattr(module, "K_HEADS", 1)
    # Each way is made anew by every test, and compiling would cost minutes.
    monkeypatch.setattr(torch, "compile", lambda run, **options: run)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    return module


@pytest.fixture
def benchmark(ways):
    return importlib.import_module("cuda_rotation")


class FakeMeter:
    """Copying takes 1 ms and all else 2 ms, and allocates what q and k take, twice."""

    def cold(self, run):
        run()
        return 1.0 if getattr(run, "__name__", "") == "copy" else 2.0

    host = graph = cold

    def peak(self, run):
        run()
        return 7680.0


class TestWithoutADevice:
    """A person who tries it on a laptop is told in a sentence."""

    def test_the_sentence_and_the_status(self):
        command = [sys.executable, str(BENCHMARKS / "cuda_rotation.py")]
        hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, capture_output=True, text=True, env=hidden, timeout=120, check=False)
        assert done.returncode == 2
        assert done.stderr == "There is no CUDA device here, and this measures the rotation on one.\n"
        assert done.stdout == ""


class TestCorrectFirst:
    """A wrong result is never timed."""

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_bounds(self, ways, dtype, interleaved):
        case = ways.Case(5, dtype, interleaved)
        (x, _), (cos, sin) = ways.inputs(case, "cpu"), ways.tables(case, "cpu")
        right = ways.rotate(x, None, cos, sin, interleaved=interleaved)[0]
        assert 0 < ways.bounds(right, x, cos, sin, interleaved) <= 1
        for wrong in (
            ways.rotate(x, None, cos, sin, interleaved=not interleaved)[0],
            ways.rotate(x, None, cos, sin, interleaved=interleaved, conjugate=True)[0],
            right * (1 + 2 * torch.finfo(dtype).eps),
        ):
            assert ways.bounds(wrong, x, cos, sin, interleaved) > 1
        right[0, 0, 3, 7] = math.nan
        assert ways.bounds(right, x, cos, sin, interleaved) == math.inf

    def test_what_is_wrong_is_not_measured(self, ways, benchmark, monkeypatch):
        rotate = ways.rotate
        monkeypatch.setattr(ways, "rotate", lambda *given, **options: rotate(*given, **options, conjugate=True))
        message = r"theodolite, 5 tokens, float32, halves: off by [\d.e+]+ times what rounding allows"
        with pytest.raises(ArithmeticError, match=message):
            benchmark.measure(ways.Case(5, torch.float32, False), FakeMeter(), "cpu")

    def test_bits(self, ways, monkeypatch):
        assert ways.not_the_same_bits("cpu") == []
        rotate, calls = ways.rotate, []

        def once_in_a_while(q, k, *tables, **options):
            calls.append(options)
            out = rotate(q, k, *tables, **options)
            if len(calls) == 4:
                out[1][0, 0, 0, 0] += 1
            return out

        monkeypatch.setattr(ways, "rotate", once_in_a_while)
        (differing,) = ways.not_the_same_bits("cpu")
        assert differing.startswith("torch.float64, {'interleaved': False, 'rotary_dim': 128, ")
        assert differing.endswith("'conjugate': False}, positions")


class TestNumbers:
    """What is printed and written is what the clock said."""

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_rows(self, ways, benchmark, interleaved):
        rows = benchmark.measure(ways.Case(5, torch.bfloat16, interleaved), FakeMeter(), "cpu")
        by = {(row.what, row.who): row for row in rows}
        for what in ("forward", "forward and backward"):
            for who in ("theodolite", "theodolite, positions", "transformers"):
                assert (what, who) in by
        assert ("forward", "theodolite, in place") in by
        assert ("forward and backward", "theodolite, in place") not in by
        # 5 tokens of 3 heads of 128 channels of 2 bytes, read and written.
        copy, forward = by["forward", "copy_"], by["forward", "theodolite"]
        assert (copy.ms, copy.copies, copy.gigabytes) == (1.0, 1.0, 7680e-6)
        assert (forward.ms, forward.copies, forward.gigabytes) == (2.0, 2.0, 3840e-6)
        both = by["forward and backward", "theodolite"]
        assert (both.ms, both.copies, both.gigabytes, both.memory) == (2.0, 1.0, 7680e-6, 2.0)
        assert all(0 < row.bounds <= 1 for row in rows if "theodolite" in row.who)
        assert by["forward", "transformers"].bounds > 1

    def test_decoding(self, ways, benchmark):
        rows = benchmark.measure(ways.Case(1, torch.float32, False), FakeMeter(), "cpu", leave_out=("transformers",))
        assert {row.what for row in rows} == {"decoding", "decoding, in a graph"}
        assert all(row.copies == (1.0 if row.who == "copy_" else 2.0) for row in rows)
        assert "transformers" not in {row.who for row in rows}

    def test_table(self, benchmark):
        rows = [
            benchmark.Row("1 token", "decoding", "copy_", 0.0125, 1.0, 812.4, 0.0, math.nan),
            benchmark.Row("1 token", "decoding", "theodolite", 0.025, 2.0, 406.2, 0.87, 2.0),
        ]
        assert benchmark.table(rows).splitlines() == [
            "decoding, 1 token",
            "                                  ms   x copy    GB/s  x bound   x q+k",
            "  copy_                       0.0125     1.00     812        0        ",
            "  theodolite                  0.0250     2.00     406     0.87    2.00",
        ]

    def test_the_whole_of_it(self, benchmark, monkeypatch, tmp_path, capsys):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(benchmark, "machine", lambda: {"device": "none"})
        monkeypatch.setattr(benchmark, "CudaMeter", FakeMeter)
        monkeypatch.setattr(benchmark, "DEVICE", "cpu")
        out = tmp_path / "numbers.json"
        assert benchmark.main(["--tokens", "1", "3", "--out", str(out)]) == 0
        record = json.loads(out.read_text())
        assert record["machine"] == {"device": "none"}
        assert record["not the bits of the CPU"] == []
        assert {row["case"] for row in record["rows"]} == {
            f"{tokens} tokens, {dtype}, {layout}"
            for tokens in (1, 3)
            for dtype in ("bfloat16", "float32")
            for layout in ("halves", "interleaved")
        }
        assert "forward and backward, 3 tokens, float32, interleaved" in capsys.readouterr().out
