"""The rotation in plain torch gives the same bits however the work is shared, and on every processor."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.formula import formula, randn, same_bits, tables
from theodolite.kernels import blocks
from theodolite.kernels.eager import rotate_into
from theodolite.kernels.layout import Layout


def rotated(x, cos, sin, positions, layout):
    out = torch.full_like(x, float("nan"))
    rotate_into([(out, x)], cos, sin, positions, layout)
    return out


class TestThreads:
    """How torch shares the work decides which numbers go through vectors, which through the scalar loop after them."""

    @pytest.mark.parametrize("threads", [1, 2, 3, 5, 7])
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize(
        "shape", [(1, 5, 331, 64), (1, 5, 1301, 64), (37, 31, 1, 64), (1, 2051, 1, 32), (2, 2051, 2, 32)]
    )
    def test_bits_do_not_depend_on_them(self, threads, interleaved, shape):
        x, layout = randn(*shape), Layout(interleaved, shape[-1], False, False)
        cos, sin = tables(1, 1, shape[2], shape[-1] // 2)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            out = rotated(x, cos, sin, None, layout)
        finally:
            torch.set_num_threads(before)
        assert same_bits(out, formula(x, cos, sin, None, layout)[0])

    @pytest.mark.parametrize("capability", ["default", "avx2"])
    def test_bits_do_not_depend_on_the_processor(self, capability):
        if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
            pytest.skip("torch has one form of its loops here")
        root = Path(__file__).parents[2]
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": str(root)}
        done = subprocess.run(
            [sys.executable, "-c", "from tests.kernels.test_eager_threads import sweep; sweep()"],
            cwd=root, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def test_a_product_that_is_fused_is_not_used(self, monkeypatch):
        monkeypatch.setattr(torch, "complex", lambda a, b: pytest.fail("complex numbers"))
        monkeypatch.setattr(blocks, "_whole_vectors_are_exact", lambda dtype: False)
        x, (cos, sin), layout = randn(1, 2, 9, 32), tables(1, 1, 9, 16), Layout(True, 32, False, False)
        assert same_bits(rotated(x, cos, sin, None, layout), formula(x, cos, sin, None, layout)[0])

    def test_a_fused_product_is_seen(self, monkeypatch):
        exact = blocks._whole_vectors_are_exact.__wrapped__
        assert exact(torch.float32)
        assert exact(torch.float64)
        # As a processor does that rounds only the sum.
        numbers, entries = torch.complex, torch.view_as_real
        monkeypatch.setattr(torch, "complex", lambda real, imag: numbers(real.double(), imag.double()))
        monkeypatch.setattr(torch, "view_as_real", lambda product: entries(product).float())
        assert not exact(torch.float32)


def sweep() -> None:
    """Rows of every length up to two steps of any vector loop, and past them."""
    for pairs, interleaved in itertools.product((*range(1, 34), 48, 64, 100), (False, True)):
        layout = Layout(interleaved, 2 * pairs, False, False)
        x, (cos, sin) = randn(1, 3, 17, 2 * pairs), tables(1, 1, 17, pairs)
        assert same_bits(rotated(x, cos, sin, None, layout), formula(x, cos, sin, None, layout)[0]), layout
