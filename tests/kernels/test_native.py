"""The rotation in C as Python calls it: instruction sets, threads, forks, memory, and libraries that do not load."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from theodolite.kernels import choice, native, recipes, rotate
from theodolite.kernels.layout import Layout

from .cases import DTYPES, formula, nan, randn, running, same_bits
from .test_native_source import CC, compiled, needs_compiler

SETS = native.load().sets if native.load() else []

needs_library = pytest.mark.skipif(native.load() is None, reason=f"there is no library: {native.why_not()}")


@pytest.fixture(autouse=True)
def _nothing_is_remembered(monkeypatch):
    monkeypatch.setattr(recipes, "_recipes", {})


def tables(rows: int, pairs: int) -> tuple[Tensor, Tensor]:
    return randn(rows, pairs, seed=11), randn(rows, pairs, seed=12)


def python(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, with one thread unless it asks for more; what hangs is an error."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@needs_library
class TestInstructionSets:
    """A model gives the same tokens on the machine next door, whatever its processor has."""

    @pytest.mark.parametrize("name", SETS)
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_same_bits_in_the_canonical_form(self, dtype, interleaved, name):
        # 54 pairs are whole vectors and a rest in every set; heads inside for q, gaps in k, each head its own table.
        options = {"interleaved": interleaved, "rotary_dim": 108, "trailing": True}
        layout = Layout(conjugate=False, **options)
        q = randn(2, 63, 10, 120, dtype=dtype).transpose(1, 2)
        k = randn(2, 5, 70, 121, dtype=dtype)[:, :, 3:66, 1:]
        cos, sin = randn(2, 2, 5, 40, 54, seed=3)
        positions = torch.randint(40, (2, 126), dtype=torch.int32, generator=torch.Generator().manual_seed(5))[:, ::2]
        outs = nan(2, 10, 63, 120, dtype=dtype), nan(2, 63, 5, 120, dtype=dtype).transpose(1, 2)
        with running(f"native {name}"):
            assert native.load().chosen_set == name
            native.rotate_into(list(zip(outs, (q, k), strict=True)), cos, sin, positions, layout)
        for out, x in zip(outs, (q, k), strict=True):
            assert same_bits(out, formula(x, cos, sin, positions=positions, **options))

    def test_one_that_does_not_run_is_refused(self):
        library, before = native.load(), native.load().chosen_set
        with pytest.raises(ValueError, match=r"^instruction set: got 'abacus'; this processor runs scalar"):
            library.choose_set("abacus")
        assert library.chosen_set == before == SETS[-1]


@needs_library
class TestThreads:
    """Threads are torch's, and Python's own may call at once: none of it shows in a bit."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_of_torch(self, dtype):
        # More than what is written past the caches, and an odd number of tokens.
        q, k = randn(1, 9, 4099, 128, dtype=dtype), randn(1, 3, 4099, 128, dtype=dtype, seed=1)
        (cos, sin), before = tables(4099, 64), torch.get_num_threads()
        expected = formula(q, cos, sin), formula(k, cos, sin)
        try:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                outs = nan(*q.shape, dtype=dtype), nan(*k.shape, dtype=dtype)
                with choice.use("native"):
                    rotate(q, k, cos, sin, out_q=outs[0], out_k=outs[1])
                    assert all(map(same_bits, outs, expected))
                    mine = q.clone(), k.clone()
                    rotate(*mine, cos, sin, inplace=True)
                    assert all(map(same_bits, mine, expected))
        finally:
            torch.set_num_threads(before)

    def test_of_python(self):
        # Small calls keep the interpreter's lock, large ones give it back: both kinds, at once.
        shapes = [(1, 8, 1, 64), (2, 3, 17, 24), (1, 4, 300, 64), (3, 1, 129, 96)]
        wrong: list[object] = []
        start = threading.Barrier(8)

        def work(number: int) -> None:
            try:
                start.wait()
                for step in range(50):
                    batch, heads, tokens, channels = shapes[(number + step) % 4]
                    tokens += number
                    x = randn(batch, heads, tokens, channels, dtype=DTYPES[step % 3], seed=100 * number + step)
                    cos, sin = tables(tokens, channels // 2)
                    options = {"interleaved": bool(step % 2), "conjugate": bool(number % 2)}
                    out = rotate(x, None, cos, sin, **options)[0]
                    mine = x.clone()
                    rotate(None, mine, cos, sin, inplace=True, **options)
                    right = formula(x, cos, sin, **options)
                    if not (same_bits(out, right) and same_bits(mine, right)):
                        wrong.append((number, step))
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    def test_after_a_fork(self):
        # Threads do not live on in a child, whose data loader may rotate: waiting for them would never end.
        done = python(
            """
            import os
            import signal
            import torch
            from theodolite.kernels import choice, rotate
            from tests.kernels.cases import formula, same_bits

            torch.set_num_threads(2)
            q, cos, sin = torch.randn(1, 8, 2048, 64), *torch.randn(2, 2048, 32)
            expected = formula(q, cos, sin)
            mine = q.clone()
            assert choice.active() == "native"
            assert same_bits(rotate(q, None, cos, sin)[0], expected)
            bits = expected.numpy().tobytes()
            child = os.fork()
            if child == 0:
                signal.alarm(30)
                out = rotate(q, None, cos, sin)[0]
                rotate(mine, None, cos, sin, inplace=True)
                # Nothing of torch that might wait for the threads.
                right = out.numpy().tobytes() == bits and mine.numpy().tobytes() == bits
                os._exit(0 if right else 9)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0, status
            assert same_bits(rotate(q, None, cos, sin)[0], expected)
            """,
            OMP_NUM_THREADS="2",
        )
        assert done.returncode == 0, done.stderr


TURNS = """
    import hashlib
    import torch
    import theodolite
    from theodolite.kernels import choice, rotate

    bits, generator = hashlib.sha256(), torch.Generator().manual_seed(7)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for options in ({}, {"interleaved": True}, {"rotary_dim": 20, "trailing": True, "conjugate": True}):
            q, k = (torch.randn(2, heads, 33, 24, generator=generator).to(dtype) for heads in (4, 2))
            cos, sin = torch.randn(2, 33, options.get("rotary_dim", 24) // 2, generator=generator)
            for inplace in (False, True):
                for x in rotate(q, k, cos, sin, inplace=inplace, **options):
                    bits.update(x.view(torch.uint8).numpy().tobytes())
    print(theodolite.__file__, choice.active(), bits.hexdigest())
"""


@pytest.fixture(scope="module")
def bits() -> str:
    """What the library makes of it, saying nothing."""
    done = python(TURNS)
    assert (done.returncode, done.stderr) == (0, "")
    _, name, bits = done.stdout.split()
    assert name == "native"
    return bits


class TestLoading:
    """A file that is not this version's library is refused in words; the rotation goes on without it."""

    STUB = """
        #include <stdint.h>
        int32_t theodolite_abi(void) {{ return {abi}; }}
        int64_t theodolite_call_size(void) {{ return {size}; }}
    """

    @pytest.fixture
    def reason(self, monkeypatch):
        """Why a file, in the place of the library, is not loaded."""

        def of(path: Path) -> str | None:
            monkeypatch.setattr(native, "PATH", path)
            self.forget()
            assert native.load() is None
            assert choice.active() == "eager"
            return native.why_not()

        yield of
        monkeypatch.undo()
        self.forget()

    @staticmethod
    def forget() -> None:
        native.load.cache_clear()
        native._loaded.cache_clear()

    @needs_compiler
    @pytest.mark.parametrize("change", [(1, 0), (-1, 0), (0, 8)])
    def test_of_another_interface(self, change, reason, tmp_path):
        source, path = tmp_path / "stub.c", tmp_path / f"stub{native.PATH.suffix}"
        abi, size = native.ABI + change[0], native.ctypes.sizeof(native.Call) + change[1]
        source.write_text(self.STUB.format(abi=abi, size=size))
        compiled(CC, "-shared", "-fPIC", source, "-o", path)
        text = reason(path)
        assert f"{path.name} has interface {abi}" in text
        assert "it is of another version; build it anew" in text

    @needs_compiler
    def test_of_another_library_altogether(self, reason, tmp_path):
        source, path = tmp_path / "other.c", tmp_path / f"other{native.PATH.suffix}"
        source.write_text("int other(void) { return 1; }\n")
        compiled(CC, "-shared", "-fPIC", source, "-o", path)
        assert "theodolite" in reason(path)

    @pytest.mark.parametrize("content", [b"", b"not a library\n" * 999, b"\x7fELF"], ids=["empty", "text", "damaged"])
    def test_of_no_library(self, content, reason, tmp_path):
        path = tmp_path / native.PATH.name
        path.write_bytes(content)
        assert path.name in reason(path)

    def test_of_none(self, reason, tmp_path):
        text = "it was not built: no C compiler was found when theodolite was installed"
        assert reason(tmp_path / "nowhere.so") == text

    @needs_library
    @pytest.mark.parametrize("instead", [None, b"not a library"], ids=["missing", "damaged"])
    def test_without_it_the_same_bits_and_one_line(self, bits, instead, tmp_path):
        package = tmp_path / "theodolite"
        left_out = shutil.ignore_patterns("_rotate.*", "__pycache__", "texts")
        shutil.copytree(native.PATH.parents[1], package, ignore=left_out)
        if instead is not None:
            (package / "kernels" / native.PATH.name).write_bytes(instead)
        done = python(TURNS, PYTHONPATH=str(tmp_path))
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [str(package / "__init__.py"), "eager", bits]
        assert done.stderr.startswith("theodolite: rotations on the CPU take the slower path: ")
        assert ("it was not built" if instead is None else native.PATH.name) in done.stderr
        assert done.stderr.count("\n") == 1

    @needs_library
    def test_it_may_be_left_alone(self, bits):
        done = python(TURNS, THEODOLITE_KERNEL="eager")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.split()[1:] == ["eager", bits]


@needs_library
class TestTables:
    """A row is read where it stands: coarse ones are widened as they pass, none is gathered first."""

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.int8, torch.float64])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_stored_in_other_dtypes(self, dtype, stored, interleaved):
        q, options = randn(2, 4, 19, 52, dtype=dtype), {"interleaved": interleaved, "conjugate": True}
        if stored == torch.int8:
            generator = torch.Generator().manual_seed(2)
            cos, sin = torch.randint(-128, 128, (2, 19, 52), dtype=torch.int8, generator=generator)
            wide = [table.float() * torch.tensor(1 / 127, dtype=torch.float32) for table in (cos, sin)]
        else:
            cos, sin = (table.to(stored) for table in tables(19, 52))
            wide = [cos, sin] if dtype == stored == torch.float64 else [cos.float(), sin.float()]
        out = nan(*q.shape, dtype=dtype)
        with choice.use("native"):
            rotate(q, None, cos, sin, out_q=out, stored_tables=True, **options)
            assert same_bits(out, formula(q, *wide, **options))
            assert same_bits(out, rotate(q, None, *wide, **options)[0])

    @pytest.mark.parametrize("size", [torch.int32, torch.int64])
    @pytest.mark.parametrize("heads", [None, 1, 3])
    @pytest.mark.parametrize("batched", [False, True])
    def test_a_picked_row_is_the_gathered_one(self, batched, heads, size):
        generator = torch.Generator().manual_seed(4)
        shape = (50, 20) if heads is None else (2, heads, 50, 20)
        cos, sin = torch.randn(2, *shape, generator=generator)
        positions = torch.randint(50, (2, 23) if batched else (23,), generator=generator)
        positions.view(-1)[:2] = torch.tensor([49, 0])
        q, k = randn(2, 6, 23, 40), randn(2, 3, 23, 40, seed=1)
        wide = [table.expand(2, *shape[-2:])[:, None] if heads is None else table for table in (cos, sin)]
        rows = positions.expand(2, 23)
        gathered = [torch.stack([table[batch][:, rows[batch]] for batch in range(2)]) for table in wide]
        with choice.use("native"):
            picked = rotate(q, k, cos, sin, positions=positions.to(size))
            plainly = rotate(q, k, *gathered)
        assert all(map(same_bits, picked, plainly))
        assert same_bits(picked[0], formula(q, *gathered))


@needs_library
class TestWhereItWrites:
    """Every element of the output, and nothing beside it: the rest of a cache is other tokens."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("interleaved", [False, True])
    def test_a_slot_of_a_cache(self, interleaved, dtype):
        cos, sin = tables(9, 20)
        q, k = randn(2, 6, 1, 44, dtype=dtype), randn(2, 3, 1, 44, dtype=dtype, seed=1)
        cache = randn(2, 3, 9, 44, dtype=dtype, seed=2)
        before, positions = cache.clone(), torch.tensor([5])
        options = {"interleaved": interleaved, "rotary_dim": 40, "positions": positions}
        # The first call is checked, and the others follow it.
        for _ in range(3):
            cache[:, :, 5] = torch.nan
            with choice.use("native"):
                turned, slot = rotate(q, k, cos, sin, out_k=cache[:, :, 5:6], **options)
            assert slot.data_ptr() == cache[:, :, 5:6].data_ptr()
            assert same_bits(cache[:, :, 5:6], formula(k, cos, sin, **options))
            assert same_bits(turned, formula(q, cos, sin, **options))
            assert same_bits(cache[:, :, :5], before[:, :, :5])
            assert same_bits(cache[:, :, 6:], before[:, :, 6:])

    @pytest.mark.parametrize("heads_first", [False, True])
    @pytest.mark.parametrize("interleaved", [False, True])
    def test_all_of_the_output(self, interleaved, heads_first):
        options = {"interleaved": interleaved, "rotary_dim": 22, "trailing": True, "heads_first": heads_first}
        shape = (3, 5, 7, 36) if heads_first else (3, 7, 5, 36)
        q, (cos, sin), wide = randn(*shape, dtype=torch.bfloat16), tables(7, 11), nan(3, 5, 9, 40, dtype=torch.bfloat16)
        out = wide[:, :, 1:8, 2:38]
        out = out if heads_first else out.transpose(1, 2)
        for _ in range(3):
            wide.fill_(torch.nan)
            with choice.use("native"):
                rotate(q, None, cos, sin, out_q=out, **options)
            assert same_bits(out, formula(q, cos, sin, **options))
            # What lies around it is as it was.
            assert int(wide.isnan().sum()) == wide.numel() - out.numel()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_slices_of_a_fused_projection_in_place(self, dtype):
        # Four heads of queries, two of keys, two of values, in the memory of one matrix product.
        for step in range(3):
            fused = randn(2, 11, 8, 24, dtype=dtype, seed=step)
            before, (cos, sin) = fused.clone(), tables(11, 12)
            q, k = fused[:, :, :4], fused[:, :, 4:6]
            with choice.use("native"):
                turned = rotate(q, k, cos, sin, heads_first=False, inplace=True)
            assert turned[0] is q
            assert turned[1] is k
            assert same_bits(q, formula(before[:, :, :4], cos, sin, heads_first=False))
            assert same_bits(k, formula(before[:, :, 4:6], cos, sin, heads_first=False))
            assert same_bits(fused[:, :, 6:], before[:, :, 6:])

    def test_versions_rise_by_what_is_written(self):
        q, k, (cos, sin) = randn(1, 2, 5, 8), randn(1, 1, 5, 8), tables(5, 4)
        outs = torch.empty_like(q), torch.empty_like(k)
        for _ in range(3):
            versions = [x._version for x in (q, k, *outs)]
            with choice.use("native"):
                rotate(q, k, cos, sin)
                assert [x._version for x in (q, k, *outs)] == versions
                rotate(q, k, cos, sin, out_q=outs[0])
                rotate(q, k, cos, sin, out_q=outs[0], out_k=outs[1])
                assert q._version == versions[0]
                assert k._version == versions[1]
                assert outs[0]._version >= versions[2] + 2
                assert outs[1]._version >= versions[3] + 1
                rotate(q, None, cos, sin, inplace=True)
                rotate(q, k, cos, sin, inplace=True)
                assert q._version >= versions[0] + 2
                assert k._version >= versions[1] + 1


@needs_library
class TestAllocations:
    """Memory for the results and not a byte more: no half, no table, no copy of either."""

    @staticmethod
    def allocated(call) -> list[int]:
        """Bytes of each piece of memory that torch hands out meanwhile."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            kept = call()
        del kept
        events = seen.profiler.kineto_results.events()
        return sorted(event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("options", [{}, {"interleaved": True, "rotary_dim": 40}, {"conjugate": True}], ids=str)
    def test_forward_in_place_and_backward(self, options, dtype):
        q, k = randn(2, 6, 70, 48, dtype=dtype), randn(2, 2, 70, 48, dtype=dtype, seed=1)
        cos, sin = tables(90, options.get("rotary_dim", 48) // 2)
        options = {**options, "positions": torch.arange(89, 19, -1)}
        results, weights = sorted([q.nbytes, k.nbytes]), [torch.ones_like(q), torch.ones_like(k)]
        slots = torch.empty_like(q), torch.empty_like(k)
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        with choice.use("native"):
            for _ in range(3):
                assert self.allocated(lambda: rotate(q, k, cos, sin, **options)) == results
                assert self.allocated(lambda: rotate(q, k, cos, sin, inplace=True, **options)) == []
                assert self.allocated(lambda: rotate(q, k, cos, sin, out_q=slots[0], out_k=slots[1], **options)) == []
                assert self.allocated(lambda: rotate(*leaves, cos, sin, **options)) == results
                turned = rotate(*leaves, cos, sin, **options)
                assert self.allocated(lambda turned=turned: torch.autograd.grad(turned, leaves, weights)) == results


class TestChoosing:
    """A name that is misspelt is an error, not another implementation than the one that was asked for."""

    def test_in_the_environment(self):
        done = subprocess.run(
            [sys.executable, "-c", "import theodolite.kernels"],
            env=os.environ | {"THEODOLITE_KERNEL": "nativ"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode != 0
        assert "THEODOLITE_KERNEL: got 'nativ'; there are native, triton, eager" in done.stderr

    def test_in_a_block(self):
        words = "implementation: got 'nativ'; there are native, triton, eager"
        with pytest.raises(ValueError, match=words), choice.use("nativ"):
            pass
