"""The rotation as torch operations: the bits of the formula, under every compiler, transform and recorder."""

from __future__ import annotations

import itertools
import shutil
import warnings

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.kernels.formula import DTYPES, WIDTHS, formula, randn, same_bits, tables
from theodolite.kernels import rotate
from theodolite.kernels.layout import Layout
from theodolite.kernels.packed import rounded
from theodolite.kernels.traced import rotate_traced

HALVES, NEIGHBOURS = Layout(False, 16, False, False), Layout(True, 16, False, False)
LAYOUTS = pytest.mark.parametrize("layout", [HALVES, NEIGHBOURS], ids=["halves", "neighbours"])


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, backend: str = "aot_eager", **options):
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def leaf(*shape: int) -> torch.Tensor:
    return randn(*shape, dtype=torch.float64).requires_grad_()


class TestAgainstTheFormula:
    """The same bits as every other implementation, whatever is turned by whatever table."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("by_channel", [False, True])
    @pytest.mark.parametrize("conjugate", [False, True])
    def test_every_table_and_position(self, dtype, interleaved, by_channel, conjugate):
        picks = (None, torch.randint(0, 23, (1, 9)), torch.randint(0, 23, (3, 9), dtype=torch.int32))
        for (channels, turning, trailing), heads, batch, positions in itertools.product(WIDTHS, (1, 2), (1, 3), picks):
            layout = Layout(interleaved, turning, trailing, conjugate)
            rows = 9 if positions is None else 23
            cos, sin = tables(batch, heads, rows, turning if by_channel else turning // 2)
            x = randn(3, 4, 9, channels, dtype=dtype)
            expected = formula(x, cos, sin, positions, layout)[0]
            assert same_bits(rotate_traced(x, cos, sin, positions, layout), expected), (layout, heads, batch, positions)
            # Tokens first in memory, and so in the result.
            turned = rotate_traced(x.transpose(1, 2).contiguous().transpose(1, 2), cos, sin, positions, layout)
            assert same_bits(turned, expected), (layout, heads, batch, positions)
            assert turned.transpose(1, 2).is_contiguous()

    @LAYOUTS
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("of_table", [*DTYPES, torch.int8])
    def test_every_dtype_of_a_table(self, dtype, of_table, layout):
        x, positions, (cos, sin) = (
            randn(2, 3, 9, 16, dtype=dtype),
            torch.randint(0, 70, (1, 9)),
            tables(1, 1, 70, 8, of_table),
        )
        assert same_bits(rotate_traced(x, cos, sin, positions, layout), formula(x, cos, sin, positions, layout)[0])

    @pytest.mark.parametrize("shape", [(0, 2, 5, 16), (2, 0, 5, 16), (2, 2, 0, 16)])
    @LAYOUTS
    def test_nothing_to_turn(self, shape, layout):
        assert rotate_traced(torch.empty(shape), *tables(1, 1, shape[2], 8), None, layout).shape == shape


class TestCompiled:
    """One graph, with no numbers that compilers leave to others, that serves every length and has the same bits."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("by_channel", [False, True])
    def test_every_width_and_table(self, dtype, interleaved, by_channel):
        positions, cases = torch.randint(0, 23, (3, 9)), []
        for (channels, width, trailing), tokens_first in zip(WIDTHS, (True, False, True, False), strict=True):
            x = randn(3, 4, 9, channels, dtype=dtype)
            x = x.transpose(1, 2).contiguous().transpose(1, 2) if tokens_first else x
            layout = Layout(interleaved, width, trailing, by_channel)
            cases.append((x, *tables(3, 2, 23, width if by_channel else width // 2), positions, layout))
        out = compiled(lambda cases: [rotate_traced(*case) for case in cases])(cases)
        for case, turned in zip(cases, out, strict=True):
            assert same_bits(turned, formula(*case)[0]), case[-1]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_wherever_it_lies(self, dtype):
        memory, (cos, sin) = randn(2, 3, 9, 33, dtype=dtype), tables(1, 1, 9, 8)
        whole, trailing = NEIGHBOURS, NEIGHBOURS._replace(trailing=True)
        cases = [
            (memory[..., 1:17], cos, sin, None, whole),
            (memory[..., 1::2], cos, sin, None, whole),
            (memory[:, :1, :, :16].expand(2, 3, 9, 16), cos, sin, None, whole),
            # One token of one head is dense, and its part that turns begins within a word.
            (memory[:1, :1, :1, :17], cos[:, :, :1], sin[:, :, :1], None, trailing),
        ]
        out = compiled(lambda cases: [rotate_traced(*case) for case in cases])(cases)
        for case, turned in zip(cases, out, strict=True):
            assert same_bits(turned, formula(*case)[0]), case[0].stride()

    def test_every_number_is_rounded_as_torch_rounds_it(self):
        upper = torch.arange(2**16, dtype=torch.int32)[:, None] << 16
        lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
        x = (upper | lower).view(torch.float32)
        assert same_bits((rounded(x) >> 16).to(torch.int16).view(torch.bfloat16), x.to(torch.bfloat16))

    @LAYOUTS
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_numbers_that_are_none(self, dtype, layout):
        special = torch.tensor([0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan"), 1e-40, 3e38], dtype=dtype)
        # Every pair of them, turned by every pair of entries.
        x = torch.cartesian_prod(special, special).repeat(1, 8).view(1, 64, 1, 16).expand(1, 64, 64, 16)
        table = torch.cartesian_prod(special, special).float().view(1, 1, 64, 2).expand(1, 1, 64, 2)
        cos, sin = (table[..., entry, None].expand(1, 1, 64, 8) for entry in (0, 1))
        out = compiled(rotate_traced)(x, cos, sin, None, layout)
        assert same_bits(out, formula(x, cos, sin, None, layout)[0])

    @LAYOUTS
    @pytest.mark.parametrize(("dtype", "picked"), [(torch.float32, True), (torch.bfloat16, False)])
    def test_one_graph_for_every_length(self, layout, dtype, picked):
        graph = compiled(rotate_traced, "eager", dynamic=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for tokens in (63, 100, 2000):
                x = randn(2, 4, tokens, 16, dtype=dtype)
                positions = torch.arange(tokens).flip(0)[None] if picked else None
                cos, sin = tables(1, 1, tokens + 5 if picked else tokens, 8)
                assert same_bits(graph(x, cos, sin, positions, layout), formula(x, cos, sin, positions, layout)[0])

    @LAYOUTS
    def test_no_complex_numbers(self, layout):
        seen = []

        def backend(graph, example_inputs):
            seen.extend(node.meta.get("example_value") for node in graph.graph.nodes)
            return graph

        compiled(rotate_traced, backend)(randn(1, 2, 9, 16), *tables(1, 1, 9, 8), None, layout)
        dtypes = {value.dtype for value in seen if isinstance(value, torch.Tensor)}
        assert torch.float32 in dtypes
        assert not any(dtype.is_complex for dtype in dtypes)

    @LAYOUTS
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("asks", [(True, False, False), (False, True, True)], ids=["of heads", "of tables"])
    def test_gradients(self, dtype, layout, asks):
        positions, other = torch.randint(0, 23, (2, 9)), randn(2, 4, 9, 16, dtype=dtype, seed=5)

        def gradients(turn):
            tensors = randn(2, 4, 9, 16, dtype=dtype), *tables(1, 2, 23, 16)
            tensors = [tensor.clone().requires_grad_(asked) for tensor, asked in zip(tensors, asks, strict=True)]
            out = turn(*tensors, positions, layout)
            # Expanded, as a sum gives it, and not.
            return torch.autograd.grad(out.sum() + (out * other).sum(), [x for x in tensors if x.requires_grad])

        for mine, plain in zip(gradients(compiled(rotate_traced)), gradients(rotate_traced), strict=True):
            assert same_bits(mine, plain)


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
class TestInductor:
    """The compiler that users run. It may contract a product and a sum; that is the only difference allowed."""

    def test_within_the_bound(self):
        positions, cases = torch.randint(0, 23, (1, 63)), []
        for dtype, interleaved in itertools.product((torch.float32, torch.bfloat16), (False, True)):
            for channels, width in ((64, 64), (48, 32)):
                x = randn(1, 63, 4, channels, dtype=dtype).transpose(1, 2)
                cases.append((x, *tables(1, 2, 23, width // 2), positions, Layout(interleaved, width, False, False)))

        def turned(cases, positions):
            return [rotate_traced(*tensors, positions, layout) for *tensors, _, layout in cases]

        graph = compiled(turned, "inductor")
        with warnings.catch_warnings():
            # Of the compiler's own making, not ours.
            warnings.simplefilter("ignore")
            out = graph(cases, positions)
        for case, mine in zip(cases, out, strict=True):
            true, size = formula(*case, np.float64)
            # After the arithmetic, one rounding to the dtype.
            step = 0 if mine.dtype == torch.float32 else torch.finfo(mine.dtype).eps / 2
            bound = 2.1 * 2.0**-24 * size
            assert ((mine.double() - true).abs() <= bound + step * (true.abs() + bound)).all(), case[-1]
            assert mine.stride() == case[0].stride()

    def test_positions_are_looked_at_before_threads_meet_them(self):
        """An exception in one of inductor's threads ends the process."""
        x, (cos, sin) = randn(1, 4, 63, 64), (table[0, 0] for table in tables(1, 1, 23, 32))
        positions = torch.randint(0, 23, (63,))

        def turned(x, positions):
            return rotate(x, None, cos, sin, positions=positions)[0]

        graph = compiled(turned, "inductor")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = graph(x, positions)
        assert (out - turned(x, positions)).abs().max() <= 4 * 2.0**-24 * x.norm(dim=-1).max()
        for wrong in (-1, 23):
            with pytest.raises(ValueError, match=f"positions: got {wrong}; the tables have 23 rows, 0 to 22"):
                graph(x, torch.full_like(positions, wrong))


class TestPositions:
    """A position without a row is an error in whatever runs the operations: a wrapped row turns by another angle."""

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
    @pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 3)], ids=["shared", "of a batch"])
    def test_refused(self, dtype, shape):
        batch, heads, picks = shape
        x, (cos, sin) = randn(3, 2, 5, 16), tables(batch, heads, 23, 8)
        good = torch.tensor([[0, 22, 3, 3, 7]], dtype=dtype).expand(picks, 5).clone()

        def turned(x, positions):
            return rotate_traced(x, cos, sin, positions, HALVES)

        class Module(torch.nn.Module):
            def forward(self, x, positions):
                return turned(x, positions)

        runs = {
            "eager": turned,
            "compiled, eager": compiled(turned, "eager"),
            "compiled, aot_eager": compiled(turned),
            "exported": torch.export.export(Module(), (x, good)).module(),
            "recorded": make_fx(turned)(x, good),
            "mapped": lambda x, positions: torch.vmap(turned, in_dims=(None, 0))(x, positions[None])[0],
        }
        for name, run in runs.items():
            assert same_bits(run(x, good), formula(x, cos, sin, good, HALVES)[0]), name
            for wrong in (-1, 23, -23, -(2**31)):
                bad = good.clone()
                bad[-1, 2] = wrong
                with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
                    run(x, bad)
