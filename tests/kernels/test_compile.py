"""The rotation inside torch.compile: one graph, real numbers, the same bits."""

from __future__ import annotations

import itertools
import shutil
import warnings

import pytest
import torch
import torch._dynamo.testing

from theodolite.encodings import rotary_tables
from theodolite.kernels import rotate
from theodolite.plan import Rotary

LAYOUTS = list(itertools.product([False, True], [None, 8], [False, True]))


def tables(tokens: int, pairs: int):
    return rotary_tables(Rotary(head_dim=2 * pairs, rope_theta=10000.0), torch.arange(3, 3 + tokens))


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(2, heads, 63, 16, generator=generator).to(dtype) for heads in (4, 2))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class TestOneGraph:
    """A break in the middle of every layer would cost more than the rotation."""

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    @pytest.mark.parametrize(("interleaved", "rotary_dim", "trailing"), LAYOUTS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_equals_eager(self, backend, dtype, interleaved, rotary_dim, trailing):
        q, k = inputs(dtype)
        cos, sin = tables(63, (rotary_dim or 16) // 2)
        layout = {"interleaved": interleaved, "rotary_dim": rotary_dim, "trailing": trailing}

        def turned(q, k, cos, sin):
            return rotate(q, k, cos, sin, **layout)

        expected = turned(q, k, cos, sin)
        out = torch.compile(turned, fullgraph=True, backend=backend)(q, k, cos, sin)
        assert torch.equal(out[0], expected[0])
        assert torch.equal(out[1], expected[1])

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    @pytest.mark.parametrize("rotary_dim", [None, 8])
    def test_in_place(self, backend, rotary_dim):
        q, k = inputs()
        cos, sin = tables(63, (rotary_dim or 16) // 2)
        expected = rotate(q, k, cos, sin, rotary_dim=rotary_dim)

        def turned(q, k):
            return rotate(q, k, cos, sin, rotary_dim=rotary_dim, inplace=True)

        out = torch.compile(turned, fullgraph=True, backend=backend)(q, k)
        assert out[0] is q
        assert torch.equal(q, expected[0])
        assert torch.equal(k, expected[1])

    def test_gradients(self):
        cos, sin = tables(63, 8)
        q, k = (x.requires_grad_() for x in inputs())

        def loss(q, k):
            turned = rotate(q, k, cos, sin)
            return (turned[0].square().sum(1) * turned[1].sum(1)).sum()

        expected = torch.autograd.grad(loss(q, k), (q, k))
        given = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(q, k), (q, k))
        for one, other in zip(given, expected, strict=True):
            assert torch.equal(one, other)

    def test_lengths_do_not_recompile_forever(self):
        """One graph for small tensors and one for large ones, where the operator stands: no more, at any length."""
        counter = torch._dynamo.testing.CompileCounter()
        compiled = torch.compile(
            lambda q, c, s: rotate(q, None, c, s)[0], fullgraph=True, backend=counter, dynamic=True
        )
        for tokens in (63, 100, 2000, 999, 3000, 77):
            q = torch.randn(2, 4, tokens, 16)
            assert torch.equal(compiled(q, *tables(tokens, 8)), rotate(q, None, *tables(tokens, 8))[0])
        assert counter.frame_count <= 2

    def test_no_complex_numbers(self):
        seen = []

        def backend(graph, example_inputs):
            values = (node.meta.get("example_value") for node in graph.graph.nodes)
            seen.extend(value.dtype for value in values if isinstance(value, torch.Tensor))
            return graph

        q, k = inputs()
        torch.compile(lambda: rotate(q, k, *tables_63), fullgraph=True, backend=backend)()
        assert seen
        assert not any(dtype.is_complex for dtype in seen)


tables_63 = tables(63, 8)


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
class TestInductor:
    """The compiler that users run may contract a product and a sum; that is the only difference allowed."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_equals_eager(self, dtype):
        q, k = inputs(dtype)
        expected = rotate(q, k, *tables_63)
        with warnings.catch_warnings():
            # Of the compiler's own making, not ours.
            warnings.simplefilter("ignore")
            out = torch.compile(lambda q, k: rotate(q, k, *tables_63), fullgraph=True)(q, k)
        for x, mine, other in zip((q, k), out, expected, strict=True):
            # Two products rounded or not, in float32; then one rounding to the dtype, which may fall either way.
            length = x.double().norm(dim=-1, keepdim=True)
            step = 0 if dtype == torch.float32 else torch.finfo(dtype).eps
            bound = 4 * 2.0**-24 * length + step * other.double().abs()
            assert ((mine.double() - other.double()).abs() <= bound).all()
