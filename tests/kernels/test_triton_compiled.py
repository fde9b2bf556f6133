"""The rotation in Triton: what it compiles to for a GPU, how it is launched, and where it can run at all."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.test_triton import DTYPES, HALVES, fresh_code
from theodolite.kernels import triton_rotation


class PretendDriver:
    """What Triton asks of a driver, with no device behind it: code is compiled for an H100, and launches are noted."""

    def __init__(self):
        from triton.backends.compiler import GPUTarget

        self.grids = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            load_binary=lambda *arguments: (None, None, 0, 0, 1024),
        )
        self.get_current_target = lambda: GPUTarget("cuda", 90, 32)
        self.get_current_device = self.get_current_stream = lambda *arguments: 0
        self.launcher_cls = lambda source, metadata: lambda *arguments: self.grids.append(arguments[:3])


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Compile and, as it were, launch the rotation of given tensors; returns the one kernel and its grid."""
    kernel = fresh_code().rotate_kernel
    from triton.runtime import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton_rotation, "_kernel", lambda: kernel)
    pretend = PretendDriver()
    monkeypatch.setattr(driver, "_active", pretend)

    def run(*xs, positions=None, layout=HALVES):
        pretend.grids.clear()
        layout = layout._replace(rotary_dim=xs[0].shape[-1])
        cos, sin = torch.empty(2, 1, 1, xs[0].shape[2], layout.rotary_dim // 2)
        triton_rotation.rotate_into([(torch.empty_like(x), x) for x in xs], cos, sin, positions, layout)
        (grid,) = pretend.grids
        (code,) = kernel.device_caches[0][0].values()
        return code, grid

    return run


def activations(dtype=torch.bfloat16, heads=32, tokens=5, batch=1, head_dim=128):
    return torch.empty(batch, tokens, heads, head_dim, dtype=dtype).transpose(1, 2)


class TestCompiled:
    """No GPU is at hand, but its compiler is: what the code promises can be read off what comes out."""

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_nothing_is_fused_flushed_or_cut_off(self, compiled, dtype, interleaved):
        code, _ = compiled(activations(dtype), layout=HALVES._replace(interleaved=interleaved))
        ptx = code.asm["ptx"]
        assert re.search(r"\bmul(\.rn)?\.f(32|64)", ptx)
        assert not re.search(r"\bfma\.|\.ftz", ptx)
        rounding = {torch.bfloat16: "cvt.rn.bf16x2.f32", torch.float16: "cvt.rn.f16x2.f32"}.get(dtype)
        assert rounding is None or rounding in ptx
        assert "cvt.rz" not in ptx

    @pytest.mark.parametrize("heads", [32, 9])
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES[1:])
    def test_memory_is_moved_by_16_bytes_and_through_registers_alone(self, compiled, dtype, interleaved, heads):
        code, _ = compiled(activations(dtype, heads, 63), layout=HALVES._replace(interleaved=interleaved))
        moves = set(re.findall(r"\b(?:ld|st)\.(?:global|shared)[\w.]*", code.asm["ptx"]))
        # Two pairs of interleaved float32 are 16 bytes, and their entries of a table 8.
        narrow = {"ld.global.v2.b32"} if dtype == torch.float32 and interleaved else set()
        assert moves == {"ld.global.v4.b32", "st.global.v4.b32"} | narrow

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_every_offset_is_int64(self, compiled, interleaved):
        x = activations(heads=8).transpose(2, 3).contiguous().transpose(2, 3)
        layout = HALVES._replace(interleaved=interleaved)
        code, _ = compiled(x, positions=torch.zeros(1, 5, dtype=torch.int32), layout=layout)
        moved = [line.partition(" loc(")[0] for line in code.asm["ttir"].splitlines() if "tt.addptr" in line]
        assert len(moved) > 10
        assert all(re.search(r", (tensor<[\dx]+x)?i64>?$", line) for line in moved)

    def test_a_position_without_a_row_stops_the_device_and_is_the_only_assertion(self, compiled):
        code, _ = compiled(activations(), positions=torch.zeros(1, 5, dtype=torch.int64))
        assert code.asm["ptx"].count("call.uni __assertfail") == 1

    def test_without_positions_nothing_is_asserted(self, compiled):
        assert "__assertfail" not in compiled(activations())[0].asm["ptx"]

    @pytest.mark.parametrize("heads_first", [False, True])
    def test_new_lengths_and_batches_are_not_compiled_anew(self, compiled, heads_first):
        codes = set()
        for batch, tokens in [(1, 16), (1, 63), (3, 63), (2, 2048)]:
            x = activations(batch=batch, tokens=tokens)
            codes.add(compiled(x.contiguous() if heads_first else x)[0].hash)
        assert len(codes) == 1

    def test_queries_and_keys_are_one_launch(self, compiled):
        # 8 KiB are 32 rows of a head: a token's queries, and with it its keys.
        _, grid = compiled(activations(batch=2), activations(batch=2, heads=8))
        assert grid == (2 * 5 * 2, 1, 1)

    def test_no_part_of_a_program_idles(self, compiled):
        # Of 40 heads 8 are taken together, with 4 tokens.
        assert compiled(activations(heads=40, tokens=16))[1] == (5 * 4, 1, 1)

    def test_rows_that_lie_together_are_moved_together(self, compiled):
        # 512 bytes are 2 tokens of a head, beside which there is place for 16 heads.
        assert compiled(activations().contiguous())[1] == (2 * 3, 1, 1)


class TestSupported:
    """Whether it can run is told without trying, and on a CPU without importing Triton."""

    def test_devices(self, monkeypatch):
        monkeypatch.setattr(triton_rotation, "_kernel", lambda: object())
        assert not triton_rotation.supported(torch.empty(0))
        assert not triton_rotation.supported(torch.empty(0, device="meta"))
        assert triton_rotation.supported(SimpleNamespace(device=torch.device("xpu", 0)))

    @pytest.mark.parametrize(("capability", "known"), [((6, 1), False), ((7, 0), True), ((9, 0), True)])
    def test_generations(self, monkeypatch, capability, known):
        triton_rotation._known.cache_clear()
        monkeypatch.setattr(triton_rotation, "_kernel", lambda: object())
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert triton_rotation.supported(SimpleNamespace(device=torch.device("cuda", 0))) is known
        triton_rotation._known.cache_clear()

    def test_without_triton(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.delitem(sys.modules, "theodolite.kernels.triton_code", raising=False)
        monkeypatch.setattr(triton_rotation, "_kernel", triton_rotation._kernel.__wrapped__)
        assert not triton_rotation.supported(SimpleNamespace(device=torch.device("xpu", 0)))

    def test_triton_is_imported_late(self):
        code = "import theodolite.kernels.triton_rotation, sys; print('triton' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
        assert done.stdout.strip() == "False"
