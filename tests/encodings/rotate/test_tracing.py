"""A graph holds the work on positions, not the tables of the positions that it was traced with."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.encodings.rotate.test_behaviour import CASES, PLAN, equal, inputs, moved, options, run
from theodolite.encodings import RotaryEmbedding
from theodolite.encodings.rotate.mixed import MixedRotary
from theodolite.encodings.rotate.parts import RotateByHead
from theodolite.encodings.rotate.quantised import StoredRotary
from theodolite.encodings.rotate.rerotation import rerotate
from theodolite.plan import Linear, Rotary

ALL = pytest.mark.parametrize("name", CASES)
# A function that is traced cannot close over parameters that are no fakes, nor over any in torch.jit.
FIXED = pytest.mark.parametrize("name", [name for name, case in CASES.items() if not list(case.build().parameters())])


def traced_elsewhere(trace, name: str) -> bool:
    """Whether the graph that `trace` makes at some positions is right at others."""
    case = CASES[name]
    rotate, (q, k), positions = moved(case.build()), inputs(), case.positions(19)

    def turned(q, k, positions):
        return rotate(q, k, positions, **options(case))

    with torch.no_grad():
        graph = trace(turned, (q, k, positions))
        return equal(graph(q, k, positions + 3), turned(q, k, positions + 3))


class TestTraced:
    """make_fx and torch.jit.trace write down what is done to tensors: the tables must be among it."""

    @ALL
    def test_by_make_fx(self, name):
        assert traced_elsewhere(lambda call, given: make_fx(call)(*given), name)

    @FIXED
    @pytest.mark.parametrize("mode", ["fake", "symbolic"])
    def test_by_make_fx_without_values(self, name, mode):
        assert traced_elsewhere(lambda call, given: make_fx(call, tracing_mode=mode)(*given), name)

    @FIXED
    def test_by_jit(self, name):
        def trace(call, given):
            with warnings.catch_warnings():
                # Of sizes that are compared, and of torch.jit's end.
                warnings.simplefilter("ignore")
                return torch.jit.trace(call, given, check_trace=False)

        assert traced_elsewhere(trace, name)

    def test_patches(self):
        rope, (q, k) = MixedRotary(16, 2), inputs()
        positions = torch.stack([torch.arange(19), torch.arange(19) // 4])
        with torch.no_grad():
            graph = make_fx(lambda q, k, positions: rope(q, k, positions))(q, k, positions)
            assert equal(graph(q, k, positions + 3), rope(q, k, positions + 3))

    def test_moves(self):
        k, positions = inputs()[1], torch.arange(19)
        other = Rotary(head_dim=16, rope_theta=10000.0, scaling=Linear(factor=2))

        def by(k, by):
            return rerotate(k, rotary=PLAN, by=by)

        def to(k, positions):
            return rerotate(k, old=PLAN, new=other, positions=positions)

        for move in (by, to):
            for mode in ("real", "fake"):
                graph = make_fx(move, tracing_mode=mode)(k, positions)
                assert torch.equal(graph(k, positions + 3), move(k, positions + 3))


@ALL
class TestFake:
    """Tensors without values go through: shapes and devices, and nothing of theirs is kept."""

    def test_built_and_called_in_a_mode(self, name):
        case = CASES[name]
        with FakeTensorMode() as mode:
            rotate = case.build()
            arguments = {key: mode.from_tensor(value) for key, value in options(case).items()}
            out = rotate(*(mode.from_tensor(x) for x in inputs()), case.positions(19), **arguments)
        assert [(x.shape, x.device.type) for x in out] == [(x.shape, "cpu") for x in inputs()]
        if not list(rotate.parameters()):
            assert equal(run(rotate, case), run(case.build(), case))

    def test_called_outside_of_it(self, name):
        case = CASES[name]
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with torch.no_grad():
            out = case.build()(*(mode.from_tensor(x) for x in (*inputs(), case.positions(19))), **options(case))
        assert [x.shape for x in out] == [x.shape for x in inputs()]


class TestCompiledChecks:
    """What the eager call refuses, a compiled one refuses when it runs."""

    @pytest.mark.parametrize("wrong", [-1, 2**24 + 1])
    def test_stored(self, wrong):
        torch._dynamo.reset()
        compiled = torch.compile(StoredRotary(PLAN, length=8), fullgraph=True, backend="aot_eager")
        positions = torch.arange(19)
        assert equal(compiled(*inputs(), positions), StoredRotary(PLAN, length=8)(*inputs(), positions))
        positions[4] = wrong
        with pytest.raises(ValueError, match=rf"positions: got {wrong}; they must be from 0 to 16777216"):
            compiled(*inputs(), positions)

    def test_mixed(self):
        torch._dynamo.reset()
        rope = MixedRotary(16, 2)
        compiled = torch.compile(rope, fullgraph=True, backend="aot_eager")
        positions = torch.zeros(2, 19, dtype=torch.int64)
        positions[0, 4] = 2**25
        with pytest.raises(ValueError, match="positions: got 33554432; they must be from -16777216 to 16777216"):
            compiled(*inputs(), positions)

    def test_heads_of_any_number(self):
        torch._dynamo.reset()
        both = RotateByHead([(RotaryEmbedding(PLAN), 1), (None, 1)])
        compiled = torch.compile(both, fullgraph=True, dynamic=True, backend="eager")
        for heads in (4, 6):
            q, k = torch.randn(2, heads, 9, 16), torch.randn(2, 2, 9, 16)
            assert equal(compiled(q, k, torch.arange(9)), both(q, k, torch.arange(9)))
