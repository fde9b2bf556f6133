"""llama.cpp on the files that `extend` writes: its perplexity is ours, within 3 %."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed; it is built from source in minutes")

from benchmarks.llama_cpp_judge import WITHIN, compare


@pytest.mark.parametrize(
    ("scaling", "tokens"),
    [
        ("none", 512),
        pytest.param("yarn:2", 12288, marks=pytest.mark.slow),
        pytest.param("linear:2", 12288, marks=pytest.mark.slow),
    ],
)
def test_perplexity(scaling: str, tokens: int, tmp_path: Path) -> None:
    theirs, ours = compare(scaling, tmp_path, tokens=tokens)
    assert abs(theirs / ours - 1) < WITHIN
