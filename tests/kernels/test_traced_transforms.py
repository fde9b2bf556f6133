"""The rotation as torch operations under what derives, maps, records and exports them."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.kernels.formula import formula, randn, same_bits, tables
from theodolite.kernels.layout import Layout
from theodolite.kernels.traced import rotate_traced

HALVES, NEIGHBOURS = Layout(False, 16, False, False), Layout(True, 16, False, False)
LAYOUTS = pytest.mark.parametrize("layout", [HALVES, NEIGHBOURS], ids=["halves", "neighbours"])


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def leaf(*shape: int) -> torch.Tensor:
    return randn(*shape, dtype=torch.float64).requires_grad_()


class TestRecorded:
    """Gradients of any order, of the heads and of learned tables, reduced to the table's shape."""

    @pytest.mark.parametrize("conjugate", [False, True])
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize(
        ("width", "batch", "heads", "by_channel", "picked"),
        [
            (8, 1, 1, False, None),
            (4, 2, 1, True, None),
            (8, 1, 2, True, 1),
            (4, 2, 2, False, 2),
            (8, 1, 1, False, 2),
        ],
    )
    def test_against_numbers(self, conjugate, interleaved, width, batch, heads, by_channel, picked):
        layout = Layout(interleaved, width, width == 4, conjugate)
        # A row that two tokens share, and one that none has.
        positions = None if picked is None else torch.tensor([[0, 3, 3], [1, 0, 0]])[:picked]
        table = (batch, heads, 3 if picked is None else 4, width if by_channel else width // 2)

        def turned(x, cos, sin):
            return rotate_traced(x, cos, sin, positions, layout)

        inputs = leaf(2, 2, 3, 8), leaf(*table), leaf(*table)
        assert torch.autograd.gradcheck(turned, inputs)
        assert torch.autograd.gradgradcheck(turned, inputs)

    @LAYOUTS
    def test_half_precision_keeps_the_dtypes(self, layout):
        x, (cos, sin) = randn(1, 2, 9, 16, dtype=torch.bfloat16).requires_grad_(), tables(1, 1, 9, 8)
        given = torch.autograd.grad(
            rotate_traced(x, cos.requires_grad_(), sin.half().requires_grad_(), None, layout).sum(), (x, cos)
        )
        assert [grad.dtype for grad in given] == [torch.bfloat16, torch.float32]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("run", [lambda function: function, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@LAYOUTS
class TestTransforms:
    """Functions of functions see through it, outside a compiler and inside one."""

    def test_mapped(self, run, dtype, layout):
        x, (cos, sin) = randn(2, 4, 9, 16, dtype=dtype), tables(2, 1, 9, 8)

        def a_head(x):
            return rotate_traced(x.unsqueeze(1), cos, sin, None, layout).squeeze(1)

        def an_example(*tensors):
            return rotate_traced(*(tensor.unsqueeze(0) for tensor in tensors), None, layout).squeeze(0)

        expected = formula(x, cos, sin, None, layout)[0]
        assert same_bits(run(torch.vmap(a_head, in_dims=1, out_dims=1))(x), expected)
        assert same_bits(run(torch.vmap(an_example))(x, cos, sin), expected)

    def test_derived(self, run, dtype, layout):
        x, other, (cos, sin) = (
            randn(1, 1, 1, 16, dtype=dtype),
            randn(1, 1, 1, 16, dtype=dtype, seed=1),
            tables(1, 1, 1, 8),
        )

        def turned(x):
            return rotate_traced(x, cos, sin, None, layout)

        def along(x, other):
            return torch.func.jvp(turned, (x,), (other,))[1]

        # It is linear: a direction turns as a head does.
        assert same_bits(run(along)(x, other), turned(other))
        matrix = rotate_traced(torch.eye(16, dtype=dtype)[:, None, None], cos, sin, None, layout).view(16, 16).T
        jacobian = run(torch.func.jacrev(turned))(x).view(16, 16)
        assert torch.equal(jacobian, matrix)
        # One channel has two products.
        gradient = run(torch.func.grad(lambda x: turned(x).flatten()[5]))(x).flatten()
        assert torch.equal(gradient, matrix[5])


class TestGraphs:
    """It can be recorded with shapes as symbols, without numbers, and kept."""

    @LAYOUTS
    @pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
    def test_make_fx(self, mode, layout):
        (cos, sin), positions = tables(1, 1, 23, 8), torch.randint(0, 23, (2, 9))
        run = make_fx(lambda *inputs: rotate_traced(*inputs, layout), tracing_mode=mode)(
            randn(2, 4, 9, 16), cos, sin, positions
        )
        x, positions = randn(2, 4, 9, 16, seed=4), positions.flip(1)
        if mode == "symbolic":
            x, positions = randn(2, 4, 7, 16, seed=4), positions[:, :7]
        assert same_bits(run(x, cos, sin, positions), formula(x, cos, sin, positions, layout)[0])

    @LAYOUTS
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_without_numbers(self, layout, dtype):
        x, (cos, sin), positions = (
            randn(2, 4, 9, 16, dtype=dtype),
            tables(1, 2, 23, 8),
            torch.zeros(2, 9, dtype=torch.int64),
        )
        meta = rotate_traced(*(tensor.to("meta") for tensor in (x, cos, sin, positions)), layout)
        with FakeTensorMode() as mode:
            fake = rotate_traced(*(mode.from_tensor(tensor) for tensor in (x, cos, sin, positions)), layout)
        for out in (meta, fake):
            assert (out.shape, out.dtype, out.stride()) == (x.shape, x.dtype, x.stride())

    @LAYOUTS
    @pytest.mark.parametrize("strict", [False, True])
    def test_exported_for_every_length(self, layout, strict):
        class Module(torch.nn.Module):
            def forward(self, x, cos, sin, positions):
                return rotate_traced(x, cos, sin, positions, layout)

        tokens, rows = torch.export.Dim("tokens", max=4096), torch.export.Dim("rows", max=2**20)
        shapes = ({2: tokens}, {2: rows}, {2: rows}, {1: tokens})
        (cos, sin), positions = tables(1, 1, 23, 8), torch.randint(0, 23, (2, 9))
        program = torch.export.export(
            Module(), (randn(2, 4, 9, 16), cos, sin, positions), dynamic_shapes=shapes, strict=strict
        )
        # Kept for machines of any kind: no words.
        assert not [
            node for node in program.graph.nodes if "int32" in str(node.args) or "view.dtype" in str(node.target)
        ]
        for tokens in (5, 100):
            x, (cos, sin), positions = randn(2, 4, tokens, 16), tables(1, 1, 200, 8), torch.randint(0, 200, (2, tokens))
            assert same_bits(program.module()(x, cos, sin, positions), formula(x, cos, sin, positions, layout)[0])
