"""The operator of torch that stands for the rotation in compiled graphs."""

from __future__ import annotations

import itertools

import pytest
import torch

from theodolite.encodings import rotary_tables
from theodolite.kernels import operator, rotate
from theodolite.kernels.layout import Layout
from theodolite.kernels.operands import Tables
from theodolite.plan import Rotary

LAYOUTS = list(itertools.product([False, True], [16, 8], [False, True]))


def tables(tokens: int, pairs: int, rows: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rotary_tables(Rotary(head_dim=2 * pairs, rope_theta=100.0), torch.arange(rows or tokens) + 3)
    return cos[None, None], sin[None, None]


def heads(dtype: torch.dtype, tokens_first: bool) -> torch.Tensor:
    x = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if tokens_first else x


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def always(monkeypatch):
    """Graphs take the operator for small tensors too."""
    monkeypatch.setattr(operator, "WORTH", 1)
    monkeypatch.setattr(operator, "WORTH_HARD", 1)


class TestRegistered:
    """Fake kernels, autograd and the schema say the same as the kernel: torch's own check, over what differs."""

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize("tokens_first", [False, True])
    @pytest.mark.parametrize("gradient", [False, True])
    def test_dtypes_and_strides(self, dtype, tokens_first, gradient):
        x = heads(dtype, tokens_first).requires_grad_(gradient)
        torch.library.opcheck(torch.ops.theodolite.rotate.default, (x, *tables(5, 8), None, False, 16, False, False))

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize(("interleaved", "rotary_dim", "trailing"), LAYOUTS)
    def test_layouts(self, interleaved, rotary_dim, trailing):
        layout = interleaved, rotary_dim, trailing, True
        x = heads(torch.float32, True)
        positions = torch.tensor([[4, 0, 6, 6, 1]])
        for chosen, rows in ((None, 5), (positions, 7)):
            cos, sin = tables(5, rotary_dim // 2, rows)
            torch.library.opcheck(
                torch.ops.theodolite.rotate.default, (x.clone().requires_grad_(), cos, sin, chosen, *layout)
            )
            torch.library.opcheck(torch.ops.theodolite.rotate_.default, (x.clone(), cos, sin, chosen, *layout))

    def test_second_derivatives(self):
        x = heads(torch.float64, False).requires_grad_()
        cos, sin = (table.double() for table in tables(5, 8))

        def turned(x):
            return torch.ops.theodolite.rotate(x, cos, sin, None, True, 16, False, False)

        assert torch.autograd.gradcheck(turned, x)
        assert torch.autograd.gradgradcheck(turned, x)

    def test_tables_that_ask_for_a_gradient_are_told_where_to_go(self):
        cos, sin = (table.requires_grad_() for table in tables(5, 8))
        out = torch.ops.theodolite.rotate(
            heads(torch.float32, False).requires_grad_(), cos, sin, None, False, 16, False, False
        )
        with pytest.raises(RuntimeError, match=r"gives tables no gradient; theodolite\.kernels\.rotate does"):
            out.sum().backward()

    def test_in_place_writes_there(self):
        x, (cos, sin) = heads(torch.float32, True), tables(5, 8)
        expected = torch.ops.theodolite.rotate(x, cos, sin, None, False, 16, False, False)
        assert torch.ops.theodolite.rotate_(x, cos, sin, None, False, 16, False, False) is None
        assert torch.equal(x, expected)


class Nodes:
    """A backend that notes which functions the graph calls."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, graph, example_inputs):
        self.names += [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        return graph


class TestWhereItPays:
    """A graph holds the operator for large tensors on the CPU, and plain operations, which fuse, for the others."""

    def names(self, x, cos, sin, **options) -> list[str]:
        nodes = Nodes()
        torch.compile(lambda x, c, s: rotate(x, None, c, s, **options)[0], fullgraph=True, backend=nodes)(x, cos, sin)
        return nodes.names

    @pytest.mark.skipif(not operator.NATIVE, reason="the native rotation is not built")
    def test_large(self, always):
        cos, sin = (table[0, 0] for table in tables(5, 8))
        assert "theodolite.rotate" in self.names(heads(torch.float32, False), cos, sin)

    def test_small(self):
        cos, sin = (table[0, 0] for table in tables(5, 8))
        assert "theodolite.rotate" not in self.names(heads(torch.float32, False), cos, sin)

    @pytest.mark.skipif(not operator.NATIVE, reason="the native rotation is not built")
    @pytest.mark.parametrize(
        ("options", "gradient", "held"),
        [
            ({}, True, False),
            ({"interleaved": True}, False, False),
            ({"interleaved": True}, True, True),
            ({"rotary_dim": 8}, False, True),
        ],
        ids=str,
    )
    def test_what_inductor_does_badly_sooner(self, monkeypatch, options, gradient, held):
        monkeypatch.setattr(operator, "WORTH_HARD", 1)
        x, (cos, sin) = heads(torch.float32, False), tables(5, options.get("rotary_dim", 16) // 2)
        names = self.names(x.requires_grad_(gradient), cos[0, 0], sin[0, 0], **options)
        assert ("theodolite.rotate" in names) is held

    def test_learned_tables(self, always):
        cos, sin = (table[0, 0].requires_grad_() for table in tables(5, 8))
        assert "theodolite.rotate" not in self.names(heads(torch.float32, False), cos, sin)

    def test_outside_a_graph_it_does_not(self, always):
        x, (cos, sin) = heads(torch.float32, False), tables(5, 8)
        assert not operator.pays(x, Tables(cos, sin, None), Layout(False, 16, False, False))

    def test_an_exported_program_needs_no_theodolite(self, always):
        class Model(torch.nn.Module):
            def forward(self, x, cos, sin):
                return rotate(x, None, cos, sin)[0]

        cos, sin = (table[0, 0] for table in tables(5, 8))
        program = torch.export.export(Model(), (heads(torch.float32, False), cos, sin))
        targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert targets
        assert not any("theodolite" in target for target in targets)


@pytest.mark.skipif(not operator.NATIVE, reason="the native rotation is not built")
class TestInAGraph:
    """One graph, and the same bits and gradients as without a compiler."""

    @pytest.mark.parametrize("heads_first", [True, False])
    @pytest.mark.parametrize(("interleaved", "rotary_dim", "trailing"), LAYOUTS)
    def test_values_and_gradients(self, always, interleaved, rotary_dim, trailing, heads_first):
        x = heads(torch.float32, True)
        x = (x if heads_first else x.transpose(1, 2)).detach().requires_grad_()
        cos, sin = (table[0, 0] for table in tables(5, rotary_dim // 2))
        grad = torch.randn_like(x)
        options = {
            "interleaved": interleaved,
            "rotary_dim": rotary_dim,
            "trailing": trailing,
            "heads_first": heads_first,
        }

        def turned(x):
            return rotate(x, None, cos, sin, **options)[0]

        out = torch.compile(turned, fullgraph=True, backend="aot_eager")(x)
        expected = turned(x)
        assert torch.equal(out, expected)
        (given,) = torch.autograd.grad(out, x, grad)
        (wanted,) = torch.autograd.grad(expected, x, grad)
        assert torch.equal(given, wanted)

    def test_positions_out_of_range(self, always):
        cos, sin = (table[0, 0] for table in tables(5, 8))
        compiled = torch.compile(
            lambda x, p: rotate(x, None, cos, sin, positions=p)[0], fullgraph=True, backend="aot_eager"
        )
        x = heads(torch.float32, False)
        assert torch.equal(compiled(x, torch.arange(5)), rotate(x, None, cos, sin)[0])
        with pytest.raises(ValueError, match="positions: got 5; the tables have 5 rows, 0 to 4"):
            compiled(x, torch.tensor([0, 1, 2, 3, 5]))
