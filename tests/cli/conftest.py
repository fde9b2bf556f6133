"""Tiny models, and a process that runs the command line on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.survey.conftest import tiny_gemma3, tiny_llama  # noqa: F401

ROOT = Path(__file__).parents[2]
Theodolite = Callable[..., tuple[int, str]]


@pytest.fixture(scope="session")
def theodolite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Theodolite]:
    """Run `theodolite` with arguments in a process of its own: its exit status and what it printed."""
    log = tmp_path_factory.mktemp("log") / "log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.cli.forks"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(*arguments: object, kill_after: int | None = None, draw: bool = False) -> tuple[int, str]:
            asked = {"arguments": list(map(str, arguments)), "log": str(log), "kill_after": kill_after, "draw": draw}
            assert process.stdin is not None
            assert process.stdout is not None
            print(json.dumps(asked), file=process.stdin, flush=True)
            return int(process.stdout.readline()), log.read_text(encoding="utf-8")

        yield run
        process.stdin.close()
