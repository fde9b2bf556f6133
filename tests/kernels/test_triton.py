"""The rotation in Triton: its values, in Triton's interpreter on the CPU."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from theodolite.kernels import triton_rotation
from theodolite.kernels.layout import Layout
from theodolite.kernels.reference import rotate_reference

HALVES = Layout(interleaved=False, rotary_dim=8, trailing=False, conjugate=False)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def fresh_code():
    """The module of Triton code, apart from the one that the library has imported or will import."""
    pytest.importorskip("triton", reason="Triton is not installed")
    path = Path(triton_rotation.__file__).with_name("triton_code.py")
    spec = importlib.util.spec_from_file_location("triton_code_under_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rotate_into():
    """The implementation as Triton's interpreter runs it."""
    # Before the environment is set, which would make an interpreter of all of Triton, and for all tests of the process.
    pytest.importorskip("triton", reason="Triton is not installed")
    with pytest.MonkeyPatch.context() as patch:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("TRITON_INTERPRET", "1")
            kernel = fresh_code().rotate_kernel
        patch.setattr(triton_rotation, "_kernel", lambda: kernel)
        from triton.runtime import interpreter

        # The interpreter does not read `debug` and `sanitize_overflow` where a launch sets them.
        options = interpreter.InterpreterOptions(debug=True, sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", options)
        patch.setattr(interpreter, "_convert_float", functools.partial(converted, interpreter._convert_float))
        with np.errstate(all="ignore"):
            yield triton_rotation.rotate_into


def converted(convert, numbers, given, wanted, mode):
    """bfloat16 as a GPU converts it (see test_triton_compiled.py); the interpreter cuts off, and loses subnormals."""
    if (given.name, wanted.name) == ("fp32", "bf16"):
        numbers = torch.from_numpy(np.array(numbers, dtype=np.float32))
        return numbers.bfloat16().view(torch.int16).numpy().view(np.uint16)
    if (given.name, wanted.name) == ("bf16", "fp32"):
        return np.array(numbers).astype(np.uint32) << 16
    return convert(numbers, given, wanted, mode)


def formula(x, cos, sin, positions, layout, exact=False):
    """The rotation of the contract, channel by channel, rounded after every operation; or in float64 throughout."""
    batch, heads, tokens, head_dim = x.shape
    half, start = layout.rotary_dim // 2, head_dim - layout.rotary_dim if layout.trailing else 0
    first = start + torch.arange(half) * (2 if layout.interleaved else 1)
    second = first + (1 if layout.interleaved else half)
    arithmetic = torch.float64 if exact or x.dtype == torch.float64 else torch.float32
    rows = torch.arange(tokens).expand(batch, -1) if positions is None else positions.long().expand(batch, -1)

    def entries(table, channels):
        if table.dtype == torch.int8:
            table = table.float() * torch.tensor(1 / 127, dtype=torch.float32)
        table = table if x.dtype == torch.float64 else table.float()
        table = table.to(arithmetic).expand(batch, -1, -1, -1)
        table = torch.stack([of_one[:, at] for of_one, at in zip(table, rows, strict=True)])
        table = table.repeat_interleave(heads // table.shape[1], dim=1)
        return table if table.shape[-1] == half else table[..., channels - start]

    x1, x2 = x[..., first].to(arithmetic), x[..., second].to(arithmetic)
    c1, c2, s1, s2 = entries(cos, first), entries(cos, second), entries(sin, first), entries(sin, second)
    if layout.conjugate:
        s1, s2 = -s2, -s1
    turned = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    out = x.double() if exact else x.clone()
    out[..., first], out[..., second] = (part.to(out.dtype) for part in turned)
    return out


def poisoned(x):
    """Memory for a result, in which nothing passes that is not written."""
    return torch.full_like(x, torch.nan, memory_format=torch.contiguous_format)


def random(*shape, dtype=torch.float32, seed=0):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (numbers * 60).round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else numbers.to(dtype)


def inputs(batch=2, heads=(3, 1), tokens=5, head_dim=8, dtype=torch.float32, rows=None, pairs=None, tables=1):
    q, k = (random(batch, count, tokens, head_dim, dtype=dtype, seed=count) for count in heads)
    shape = (1, tables, rows or tokens, pairs or head_dim // 2)
    return q, k, random(*shape, seed=11), random(*shape, seed=12)


def file_with_holes(path, size):
    """Zeros of float16 that take no memory, and no place on the disk but where they are written."""
    file = torch.from_file(str(path), shared=True, size=size, dtype=torch.float16)
    path.unlink()
    return file


def check(rotate_into, xs, cos, sin, positions=None, layout=HALVES):
    """Turn `xs` out of place and in place: the bits are the formula's."""
    outs = [poisoned(x) for x in xs]
    kept = [x.clone() for x in xs]
    rotate_into(list(zip(outs, xs, strict=True)), cos, sin, positions, layout)
    expected = [formula(x, cos, sin, positions, layout) for x in xs]
    for out, x, before, right in zip(outs, xs, kept, expected, strict=True):
        assert torch.equal(x, before)
        assert torch.equal(out, right)
    xs = [x.clone() for x in xs]
    rotate_into([(x, x) for x in xs], cos, sin, positions, layout)
    for x, right in zip(xs, expected, strict=True):
        assert torch.equal(x, right)


class TestSameBits:
    """Products and sums are rounded each and the result once, so it does not depend on where a model runs."""

    @pytest.mark.parametrize("conjugate", [False, True])
    @pytest.mark.parametrize(("rotary_dim", "trailing"), [(8, False), (4, False), (6, True)])
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_layouts(self, rotate_into, dtype, interleaved, rotary_dim, trailing, conjugate):
        q, k, cos, sin = inputs(dtype=dtype, pairs=rotary_dim // 2)
        check(rotate_into, (q, k), cos, sin, layout=Layout(interleaved, rotary_dim, trailing, conjugate))

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize(
        ("tokens", "heads", "head_dim", "rotary_dim"),
        [(1, (40, 8), 96, 96), (100, (1, 1), 2, 2), (63, (3, 1), 6, 6), (3, (9, 3), 80, 20), (2, (1, 3), 512, 512)],
    )
    def test_sizes(self, rotate_into, tokens, heads, head_dim, rotary_dim, interleaved):
        q, k, cos, sin = inputs(1, heads, tokens, head_dim, torch.bfloat16, pairs=rotary_dim // 2)
        check(rotate_into, (q, k), cos, sin, layout=Layout(interleaved, rotary_dim, False, False))

    @pytest.mark.parametrize("program_bytes", [1, 64, 512])
    @pytest.mark.parametrize("tokens_first", [False, True])
    def test_blocks(self, rotate_into, monkeypatch, program_bytes, tokens_first):
        monkeypatch.setattr(triton_rotation, "_PROGRAM_BYTES", program_bytes)
        triton_rotation._plan.cache_clear()
        q, k, cos, sin = inputs(2, (5, 3), 7)
        if tokens_first:
            q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
        check(rotate_into, (q, k), cos, sin)
        triton_rotation._plan.cache_clear()

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("table", [*DTYPES, torch.int8])
    def test_dtypes_of_tables(self, rotate_into, dtype, table):
        q, k, _, _ = inputs(dtype=dtype)
        cos, sin = (random(1, 1, 5, 4, dtype=table, seed=seed) for seed in (1, 2))
        check(rotate_into, (q, k), cos, sin)

    @pytest.mark.parametrize("conjugate", [False, True])
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("rotary_dim", [8, 6])
    def test_tables_by_channel(self, rotate_into, interleaved, conjugate, rotary_dim):
        q, k, cos, sin = inputs(pairs=rotary_dim)
        check(rotate_into, (q, k), cos, sin, layout=Layout(interleaved, rotary_dim, True, conjugate))

    @pytest.mark.parametrize("batch", [1, 2])
    def test_tables_of_heads_and_batches(self, rotate_into, batch):
        q, k, _, _ = inputs(heads=(6, 2))
        cos, sin = (random(batch, 2, 5, 4, seed=seed) for seed in (1, 2))
        check(rotate_into, (q, k), cos, sin)

    def test_one_tensor(self, rotate_into):
        q, _, cos, sin = inputs()
        check(rotate_into, (q,), cos, sin)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_what_is_no_ordinary_number(self, rotate_into, dtype):
        least, most = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
        special = [0.0, -0.0, least / 8, -least / 2, most, -most, torch.inf, -torch.inf, torch.nan, 1.0]
        q = torch.tensor(special, dtype=dtype).repeat(1, 1, 4, 8)
        cos, sin = (random(1, 1, 4, 40, seed=seed) for seed in (1, 2))
        out, layout = poisoned(q), Layout(False, 80, False, False)
        rotate_into([(out, q)], cos, sin, None, layout)
        torch.testing.assert_close(out, formula(q, cos, sin, None, layout), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(out.signbit(), formula(q, cos, sin, None, layout).signbit())


class TestExact:
    """Against the oracle in float64, so that the formula above is not the only witness."""

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_within_two_roundings_and_one(self, rotate_into, dtype, interleaved):
        q, k, cos, sin = inputs(dtype=dtype)
        layout = HALVES._replace(interleaved=interleaved)
        outs = poisoned(q), poisoned(k)
        rotate_into([(outs[0], q), (outs[1], k)], cos, sin, None, layout)
        for x, out in zip((q, k), outs, strict=True):
            exact = rotate_reference(x, cos, sin, interleaved=interleaved)
            assert (exact - formula(x, cos, sin, None, layout, exact=True)).abs().max() < 1e-14
            # Two products and a sum in the arithmetic, then the rounding to the dtype.
            unit = 2.0**-53 if dtype == torch.float64 else 2.0**-24
            summands = rotate_reference(x.abs(), cos.abs(), -sin.abs(), interleaved=interleaved).abs()
            flipped = rotate_reference(x.abs(), cos.abs(), sin.abs(), interleaved=interleaved).abs()
            bound = 2.1 * unit * torch.maximum(summands, flipped) + torch.finfo(dtype).eps / 2 * exact.abs()
            assert ((out.double() - exact).abs() <= bound).all()

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_conjugate_is_the_transpose(self, rotate_into, interleaved):
        x, cos, sin = (random(1, 1, 5, 8, dtype=torch.float64, seed=seed) for seed in (1, 2, 3))
        y = random(1, 1, 5, 8, dtype=torch.float64, seed=4)
        layout = HALVES._replace(interleaved=interleaved)
        turned, back = poisoned(x), poisoned(y)
        rotate_into([(turned, x)], cos, sin, None, layout)
        rotate_into([(back, y)], cos, sin, None, layout._replace(conjugate=True))
        # 40 summands, each of a few roundings.
        assert abs((turned * y).sum() - (x * back).sum()) <= 40 * 4 * 2.0**-53 * (turned.norm() * y.norm())


class TestPositions:
    """Rows are gathered in the kernel: a table for a long context is never copied."""

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    @pytest.mark.parametrize(("batch", "table_batch"), [(1, 1), (2, 1), (2, 2)])
    def test_rows(self, rotate_into, dtype, batch, table_batch):
        q, k, _, _ = inputs()
        cos, sin = (random(table_batch, 1, 9, 4, seed=seed) for seed in (1, 2))
        positions = torch.tensor([[8, 0, 3, 3, 7], [1, 8, 0, 2, 5]], dtype=dtype)[:batch]
        check(rotate_into, (q, k), cos, sin, positions)
        # The same numbers, with others between them.
        wide = torch.full((batch, 10), 99, dtype=dtype)
        wide[:, ::2] = positions
        check(rotate_into, (q, k), cos, sin, wide[:, ::2])

    @pytest.mark.parametrize("wrong", [-1, 9, 2**40])
    def test_a_position_without_a_row_is_an_error(self, rotate_into, wrong):
        q, k, cos, sin = inputs(rows=9)
        positions = torch.tensor([[0, 1, 2, 3, 4], [0, 8, wrong, 3, 4]])
        with pytest.raises(Exception, match="positions: a position has no row in the tables"):
            rotate_into([(poisoned(q), q), (poisoned(k), k)], cos, sin, positions, HALVES)

    @pytest.mark.parametrize("wrong", [-1, 9, 2**40, -(2**40)])
    def test_and_reads_nothing(self, rotate_into, monkeypatch, wrong):
        from triton.runtime import interpreter

        # As on a device in the time between the assertion and the end of the kernel.
        silent = interpreter.InterpreterOptions(debug=False, sanitize_overflow=False)
        monkeypatch.setattr(interpreter.interpreter_builder, "options", silent)
        q, _, _, _ = inputs(1)
        memory = torch.full((1, 1, 11, 4), torch.nan)
        memory[:, :, 1:10] = 1.0
        table, out = memory[:, :, 1:10], poisoned(q)
        rotate_into([(out, q)], table, table, torch.tensor([[0, 8, wrong, 3, 4]]), HALVES)
        assert out.isfinite().all()


class TestMemory:
    """Strides are anyone's: fused projections, slots of a cache, gradients of a sum."""

    def test_tokens_first(self, rotate_into):
        q, k, cos, sin = inputs()
        check(rotate_into, [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)], cos, sin)

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_channels_apart(self, rotate_into, interleaved):
        q, k, cos, sin = inputs()
        check(
            rotate_into,
            [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k)],
            *(table.transpose(2, 3).contiguous().transpose(2, 3) for table in (cos, sin)),
            layout=HALVES._replace(interleaved=interleaved),
        )

    @pytest.mark.parametrize("odd", range(4))
    def test_one_tensor_of_other_strides(self, rotate_into, odd):
        q, k, cos, sin = inputs()
        tensors = [poisoned(q), q, poisoned(k), k]
        # Rows of 9 channels, of which 8 are used.
        tensors[odd] = torch.cat((tensors[odd], tensors[odd][..., :1]), dim=-1)[..., :8]
        q_out, q, k_out, k = tensors
        rotate_into([(q_out, q), (k_out, k)], cos, sin, None, HALVES)
        assert torch.equal(q_out, formula(q, cos, sin, None, HALVES))
        assert torch.equal(k_out, formula(k, cos, sin, None, HALVES))

    def test_tables_of_different_strides(self, rotate_into):
        q, k, cos, sin = inputs()
        check(rotate_into, (q, k), torch.cat((sin, cos), dim=-1)[..., 4:], sin.expand(2, -1, -1, -1).contiguous()[:1])

    def test_an_expanded_gradient(self, rotate_into):
        _, _, cos, sin = inputs()
        gradients = [torch.ones(()).expand(2, heads, 5, 8) for heads in (3, 1)]
        outs = [poisoned(gradient) for gradient in gradients]
        rotate_into(list(zip(outs, gradients, strict=True)), cos, sin, None, HALVES)
        for out, gradient in zip(outs, gradients, strict=True):
            assert torch.equal(out, formula(gradient, cos, sin, None, HALVES))

    @pytest.mark.parametrize("rotary_dim", [8, 4])
    def test_into_a_cache_and_in_a_fused_projection(self, rotate_into, rotary_dim):
        _, _, cos, sin = inputs(pairs=rotary_dim // 2)
        layout = HALVES._replace(rotary_dim=rotary_dim)
        fused, cache = random(2, 5, 5, 8), torch.full((2, 1, 9, 8), torch.nan)
        q, k = fused[:, :, :3].transpose(1, 2), fused[:, :, 3:4].transpose(1, 2)
        before, expected = fused.clone(), [formula(x, cos, sin, None, layout) for x in (q, k)]
        rotate_into([(q, q), (cache[:, :, 2:7], k)], cos, sin, None, layout)
        assert torch.equal(fused[:, :, :3], expected[0].transpose(1, 2))
        assert torch.equal(fused[:, :, 3:], before[:, :, 3:])
        assert torch.equal(cache[:, :, 2:7], expected[1])
        assert cache[:, :, [0, 1, 7, 8]].isnan().all()

    @pytest.mark.parametrize("trailing", [False, True])
    def test_channels_that_do_not_turn_are_copied_bit_for_bit(self, rotate_into, trailing):
        q, _, cos, sin = inputs(pairs=2)
        others = slice(0, 4) if trailing else slice(4, 8)
        bits = torch.randint(-(2**31), 2**31, (2, 3, 5, 4), dtype=torch.int32)
        q[..., others] = bits.view(torch.float32)
        q[..., others].view(torch.int32)[0, 0, 0, 0] = 0x7F800001
        out = poisoned(q)
        rotate_into([(out, q)], cos, sin, None, Layout(False, 4, trailing, False))
        assert torch.equal(out[..., others].view(torch.int32), q[..., others].view(torch.int32))

    @pytest.mark.parametrize("empty", [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
    def test_nothing_is_launched_for_nothing(self, monkeypatch, empty):
        monkeypatch.setattr(triton_rotation, "_kernel", None)
        x, table = torch.empty(*empty, 8), torch.empty(1, 1, empty[2], 4)
        triton_rotation.rotate_into([(torch.empty_like(x), x), (x, x)], table, table, None, HALVES)

    def test_one_of_two_is_empty(self, rotate_into):
        q, k, cos, sin = inputs()
        check(rotate_into, (q[:, :0], k), cos, sin)
        check(rotate_into, (q, k[:, :0]), cos, sin)

    @pytest.mark.parametrize("axis", range(4))
    def test_more_elements_than_an_int32_counts(self, rotate_into, tmp_path, axis):
        # A file with holes takes no memory; from its middle, an offset that wrapped around would read zeros.
        file = file_with_holes(tmp_path / "x", 2**32 + 64)
        shape, strides = [1, 1, 1, 4], [16, 16, 16, 1]
        shape[axis], strides[axis] = (4 if axis == 3 else 3), 2**30
        x = file.as_strided(shape, strides, 2**31 if axis < 3 else 2**30)
        x.copy_(random(*shape, dtype=torch.float16))
        cos, sin = (random(1, 1, shape[2], 2, seed=seed) for seed in (1, 2))
        layout, out = HALVES._replace(rotary_dim=4), poisoned(x)
        expected = formula(x, cos, sin, None, layout)
        rotate_into([(out, x)], cos, sin, None, layout)
        assert torch.equal(out, expected)
        rotate_into([(x, x)], cos, sin, None, layout)
        assert torch.equal(x, expected)

    @pytest.mark.parametrize("axis", range(1, 4))
    def test_a_table_as_large(self, rotate_into, tmp_path, axis):
        file = file_with_holes(tmp_path / "table", 2**32 + 64)
        shape, strides = [1, 1, 3, 4], [16, 16, 16, 1]
        shape[axis], strides[axis] = (4 if axis == 3 else 3), 2**30
        table = file.as_strided(shape, strides, 2**31 if axis < 3 else 2**30)
        table.copy_(random(*shape, dtype=torch.float16))
        q, k = (random(1, heads, 3, 8, seed=heads) for heads in (6, 3))
        check(rotate_into, (q, k), table, table, torch.tensor([[2, 0, 1]]))
