"""One rule for the lengths of rows: no effect where nothing depends on them, one for each row where something does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from theodolite.encodings import RotaryEmbedding, rotary_tables
from theodolite.encodings.rotate.axial import AxialRotary
from theodolite.encodings.rotate.learned import LearnedBase, LeRoPE
from theodolite.encodings.rotate.length_base import LengthBase
from theodolite.encodings.rotate.mixed import MixedRotary
from theodolite.encodings.rotate.parts import RotateByChannel, RotateByHead
from theodolite.encodings.rotate.per_head import PerHeadRotary
from theodolite.encodings.rotate.quantised import StoredRotary
from theodolite.encodings.rotate.xpos import XPos
from theodolite.plan import DynamicNTK, LongRoPE, Rotary
from theodolite.plan.axial import Axial

PLAN = Rotary(head_dim=16, rope_theta=10000.0)
DYNAMIC = replace(PLAN, scaling=DynamicNTK(factor=2, original_max_position_embeddings=16))
LONG = replace(
    PLAN,
    scaling=LongRoPE(short_factor=(1.0,) * 8, long_factor=(2.0,) * 8, original_max_position_embeddings=16, factor=4.0),
)
AXES = replace(DYNAMIC, mrope_section=(2, 3, 3))
IGNORE = {
    "rotary": lambda: RotaryEmbedding(PLAN),
    "per head": lambda: PerHeadRotary([PLAN, replace(PLAN, rope_theta=500.0)]),
    "learned base": lambda: LearnedBase(PLAN),
    "learned base per head": lambda: LearnedBase(PLAN, num_heads=2),
    "LeRoPE": lambda: LeRoPE(PLAN),
    "xpos": lambda: XPos(PLAN, centre=4),
    "stored": lambda: StoredRotary(PLAN, length=20),
    "by head": lambda: RotateByHead([(RotaryEmbedding(PLAN), 1), (LeRoPE(PLAN), 1)]),
    "by channel": lambda: RotateByChannel([(RotaryEmbedding(PLAN), 16)]),
    "axial": lambda: AxialRotary(Axial.qwen_vl(16)),
    "mixed": lambda: MixedRotary(16, 2),
}
DEPEND = {
    "dynamic NTK": lambda: RotaryEmbedding(DYNAMIC),
    "LongRoPE": lambda: RotaryEmbedding(LONG),
    "per head": lambda: PerHeadRotary([DYNAMIC, LONG]),
    "some heads": lambda: PerHeadRotary([PLAN, DYNAMIC]),
    "learned base": lambda: LearnedBase(DYNAMIC),
    "learned base per head": lambda: LearnedBase(LONG, num_heads=2),
    "LeRoPE": lambda: LeRoPE(DYNAMIC),
    "base by length": lambda: LengthBase(PLAN, theta_min=1e3, theta_max=1e6, reference_length=16),
    "by head": lambda: RotateByHead([(RotaryEmbedding(DYNAMIC), 1), (RotaryEmbedding(PLAN), 1)]),
}
FORMS = {
    "numbers": lambda lengths: lengths,
    "a tuple": tuple,
    "numbers of numpy": lambda lengths: [np.int64(length) for length in lengths],
    "a tensor": torch.tensor,
    "a tensor of int32": lambda lengths: torch.tensor(lengths, dtype=torch.int32),
}
LENGTHS = [9, 50, 400]


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 4, 5, 16, generator=generator), torch.randn(3, 2, 5, 16, generator=generator)


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", IGNORE)
class TestOfNoEffect:
    """Layers of several kinds share one forward's lengths; those that do not depend on them turn as without."""

    @pytest.mark.parametrize("lengths", [[9, 50, 400], torch.tensor([9, 50, 400]), [7]])
    def test_whatever_they_are(self, name, lengths):
        positions = torch.arange(10).reshape(2, 5) if name in ("axial", "mixed") else torch.arange(3, 8)
        rotate, (q, k) = IGNORE[name](), inputs()
        assert same(rotate(q, k, positions, lengths=lengths), rotate(q, k, positions))


@pytest.mark.parametrize("name", DEPEND)
class TestOneForEachRow:
    """Each row turns by its own length, wherever its positions came from, as it would alone."""

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 5)])
    def test_as_alone(self, name, shape, form):
        rotate, (q, k) = DEPEND[name](), inputs()
        positions = torch.arange(3, 8).expand(shape)
        out = rotate(q, k, positions, lengths=FORMS[form](LENGTHS))
        for row, length in enumerate(LENGTHS):
            one = slice(row, row + 1)
            alone = rotate(q[one], k[one], torch.arange(3, 8)[None], lengths=[length])
            assert same([x[one] for x in out], alone)
        assert not torch.equal(rotate(q, k, positions, lengths=[9, 9, 9])[0], out[0])

    def test_positions_of_one_row_have_tables_of_all(self, name):
        rotate = DEPEND[name]()
        tables = rotate.tables(torch.arange(5), lengths=LENGTHS)
        assert (tables[0].cos if name == "by head" else tables.cos).shape[0] == 3

    @pytest.mark.parametrize(
        ("lengths", "text"),
        [
            (None, "give"),
            ([9, 50], r"lengths: got 2 for positions of shape \(3, 5\); one per row of \(B, S\) is needed"),
            ([9, 50, 0], "lengths: got 0; each must be a whole number of at least 1 token"),
            ([9, 50, True], "lengths: got True; each must be a whole number"),
            ([9, 50, 2.0], "lengths: got 2.0; each must be a whole number"),
            (torch.tensor([9, 50, -4]), "lengths: got -4; each must be a whole number"),
            (torch.ones(3), "lengths: got torch.float32; give integers"),
            (torch.ones(3, 1, dtype=torch.int64), r"lengths: got shape \(3, 1\); it must be \(B,\), one for each row"),
            (50, r"lengths: got 50; give a whole number for each row, in a list or a tensor \(B,\)"),
            ("950", "lengths: got '950'; give a whole number for each row"),
        ],
    )
    def test_refusals(self, name, lengths, text):
        with pytest.raises(ValueError, match=text):
            DEPEND[name]().tables(torch.arange(5).expand(3, 5), lengths=lengths)


class TestAxes:
    """Axes are never guessed: (axes, S) could be rows."""

    def test_one_row_serves_all(self):
        positions = torch.arange(15).reshape(3, 1, 5)
        for build in (RotaryEmbedding, LeRoPE, LearnedBase):
            one, all_rows = (build(AXES).tables(x, lengths=LENGTHS) for x in (positions, positions.expand(3, 3, 5)))
            assert one.cos.shape == (3, 5, 8)
            assert same(one, all_rows)

    def test_without_rows_is_refused(self):
        for build in (RotaryEmbedding, LeRoPE, LearnedBase):
            with pytest.raises(ValueError, match=r"positions: got shape \(3, 5\); it must be \(axes, B, S\)"):
                build(AXES).tables(torch.arange(15).reshape(3, 5), lengths=LENGTHS)


class TestEdges:
    """No rows, no values, and a graph that is compiled."""

    def test_no_rows(self):
        positions = torch.zeros(0, 5, dtype=torch.int64)
        for rotate in (RotaryEmbedding(DYNAMIC), LeRoPE(DYNAMIC), LearnedBase(DYNAMIC)):
            assert rotate.tables(positions, lengths=[]).cos.shape == (0, 5, 8)

    def test_without_values(self):
        with pytest.raises(ValueError, match="lengths: they are on the meta device and have no values; give numbers"):
            rotary_tables(DYNAMIC, torch.arange(5), lengths=torch.tensor([5], device="meta"))

    def test_a_graph_says_what_to_do(self):
        rotate, (q, _) = RotaryEmbedding(DYNAMIC), inputs()
        compiled = torch.compile(lambda q, p: rotate(q, None, p, lengths=LENGTHS)[0], fullgraph=True, backend="eager")
        with pytest.raises(Exception, match="make the tables before and give them to apply_tables, or settle"):
            compiled(q, torch.arange(5))

    def test_tables_from_outside_are_compiled_once(self):
        torch._dynamo.reset()
        rotate, (q, _), counter = RotaryEmbedding(DYNAMIC), inputs(), torch._dynamo.testing.CompileCounter()
        turn = torch.compile(
            lambda q, t: rotate.apply_tables(q, None, t)[0], fullgraph=True, dynamic=True, backend=counter
        )
        for first in (20, 30, 40, 50):
            tables = rotate.tables(torch.arange(5), lengths=[first, first + 1, first + 2])
            assert torch.equal(turn(q, tables), rotate.apply_tables(q, None, tables)[0])
        assert counter.frame_count == 1

    def test_a_base_by_length_goes_into_the_graph(self):
        torch._dynamo.reset()
        rotate, (q, _) = DEPEND["base by length"](), inputs()
        compiled = torch.compile(rotate, fullgraph=True, dynamic=True, backend="eager")
        with torch.no_grad():
            for lengths in (LENGTHS, torch.tensor(LENGTHS)):
                expected = rotate(q, None, torch.arange(5), lengths=lengths)[0]
                assert torch.equal(compiled(q, None, torch.arange(5), lengths=lengths)[0], expected)

    def test_exported_for_one_length(self):
        class Settled(torch.nn.Module):
            def forward(self, q, positions):
                return RotaryEmbedding(DYNAMIC)(q, None, positions, lengths=LENGTHS)[0]

        q, _ = inputs()
        program = torch.export.export(Settled(), (q, torch.arange(5)), strict=False).module()
        assert torch.equal(program(q, torch.arange(5)), Settled()(q, torch.arange(5)))
