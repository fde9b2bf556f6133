"""The rotation in ONNX: the standard operator where it can say what is asked for, plain operations elsewhere."""

from __future__ import annotations

import itertools

import pytest
import torch

from theodolite.encodings import rotary_tables
from theodolite.kernels import rotate
from theodolite.plan import Rotary

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")

pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = 5


class Turn(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, cos, sin, positions=None):
        return rotate(q, None, cos, sin, positions=positions, **self.options)[0]


def exported(inputs: tuple[torch.Tensor, ...], **options):
    """The graph's operators, and what onnxruntime makes of the inputs."""
    program = torch.onnx.export(Turn(**options).eval(), inputs, dynamo=True, opset_version=23, verbose=False)
    model = program.model_proto
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    (out,) = session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})
    return [node.op_type for node in model.graph.node], torch.from_numpy(out)


def heads(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def tables(rows: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rotary_tables(Rotary(head_dim=2 * pairs, rope_theta=100.0), torch.arange(rows) + 3)
    return cos, sin


# Two products and a sum, in float32, of values below 5.
BOUND = 4 * 2.0**-24 * 10


class TestTheStandardOperator:
    """Runtimes have kernels for RotaryEmbedding; a graph of slices and products is what they cannot see through."""

    @pytest.mark.parametrize(
        ("interleaved", "rotary_dim", "trailing"), list(itertools.product([False, True], [None, 8], [False, True]))
    )
    def test_layouts(self, interleaved, rotary_dim, trailing):
        q, options = (
            heads(2, 3, TOKENS, 16),
            {"interleaved": interleaved, "rotary_dim": rotary_dim, "trailing": trailing},
        )
        cos, sin = tables(TOKENS, (rotary_dim or 16) // 2)
        nodes, out = exported((q, cos, sin), **options)
        assert nodes.count("RotaryEmbedding") == 1
        assert (out - rotate(q, None, cos, sin, **options)[0]).abs().max() <= BOUND

    @pytest.mark.parametrize("options", [{"heads_first": False}, {"conjugate": True}], ids=str)
    def test_orders_and_directions(self, options):
        q = heads(2, 3, TOKENS, 16)
        q = q if options.get("heads_first", True) else q.transpose(1, 2).contiguous()
        cos, sin = tables(TOKENS, 8)
        nodes, out = exported((q, cos, sin), **options)
        assert "RotaryEmbedding" in nodes
        assert (out - rotate(q, None, cos, sin, **options)[0]).abs().max() <= BOUND

    @pytest.mark.parametrize("rows", [1, 2])
    def test_positions_pick_rows_of_the_cache(self, rows):
        q, (cos, sin) = heads(2, 3, TOKENS, 16), tables(11, 8)
        positions = torch.tensor([[0, 10, 3, 3, 7], [9, 1, 2, 0, 4]])[:rows]
        nodes, out = exported((q, cos, sin, positions))
        assert "RotaryEmbedding" in nodes
        assert (out - rotate(q, None, cos, sin, positions=positions)[0]).abs().max() <= BOUND

    def test_half_precision_is_turned_in_float32(self):
        q, (cos, sin) = heads(1, 3, TOKENS, 16).half(), tables(TOKENS, 8)
        nodes, out = exported((q, cos, sin))
        assert "RotaryEmbedding" in nodes
        expected = rotate(q, None, cos, sin)[0]
        # float32 on both sides, so the one rounding differs only where a sum lies within BOUND of a halfway case.
        assert ((out.double() - expected.double()).abs() <= 2.0**-10 * expected.double().abs() + 2.0**-24).all()
        assert (out != expected).float().mean() < 0.01

    def test_tables_of_each_row(self):
        q, (cos, sin) = heads(2, 3, TOKENS, 16), tables(2 * TOKENS, 8)
        cos, sin = cos.view(2, TOKENS, 8), sin.view(2, TOKENS, 8)
        nodes, out = exported((q, cos, sin))
        assert "RotaryEmbedding" in nodes
        assert (out - rotate(q, None, cos, sin)[0]).abs().max() <= BOUND


class TestWhatItCannotSay:
    """Tables of heads or of channels: plain operations, and the same numbers."""

    @pytest.mark.parametrize("shape", [(1, 3, TOKENS, 8), (TOKENS, 16)], ids=["per head", "by channel"])
    def test_plain_operations(self, shape):
        angles = heads(*shape)
        q, cos, sin = heads(2, 3, TOKENS, 16), angles.cos(), angles.sin()
        nodes, out = exported((q, cos, sin))
        assert "RotaryEmbedding" not in nodes
        assert (out - rotate(q, None, cos, sin)[0]).abs().max() <= BOUND
