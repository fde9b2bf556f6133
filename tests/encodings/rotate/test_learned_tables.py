"""Tables for learned rotations of one's own: those of plain numbers bit for bit, and the slope of every frequency."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from theodolite.encodings.rotate.learned_tables import learned_tables
from theodolite.encodings.rotate.tables import pair_tables

FREQUENCIES = torch.logspace(0, -4, 6, dtype=torch.float64)
POSITIONS = torch.tensor([[0, 1, 77, 40_000], [5, 2**24, 3, 12]])


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def plain(frequencies: torch.Tensor, positions: torch.Tensor, **options):
    return pair_tables(frequencies.tolist(), positions, **options)


class TestIsPairTables:
    """The same bits as for plain numbers, in each shape that frequencies have."""

    @pytest.mark.parametrize("positions", [POSITIONS, POSITIONS[0], POSITIONS.double() / 3, POSITIONS[:, :0]])
    @pytest.mark.parametrize("amplitude", [1.0, 1.3])
    def test_for_all_rows(self, positions, amplitude):
        made = learned_tables(FREQUENCIES, positions, amplitude=amplitude)
        assert same(made, plain(FREQUENCIES, positions, amplitude=amplitude))
        assert made.cos.shape == (*positions.shape, 6)

    @pytest.mark.parametrize("positions", [POSITIONS, POSITIONS[0], POSITIONS[:1]])
    def test_by_row(self, positions):
        frequencies = torch.stack([FREQUENCIES, FREQUENCIES / 3])
        made = learned_tables(frequencies, positions)
        for row, places in enumerate(torch.broadcast_to(positions, (2, 4))):
            assert same([table[row] for table in made], plain(frequencies[row], places))

    def test_one_row_is_a_row(self):
        assert learned_tables(FREQUENCIES[None], POSITIONS[0]).cos.shape == (1, 4, 6)

    @pytest.mark.parametrize("heads", [1, 3])
    @pytest.mark.parametrize("positions", [POSITIONS, POSITIONS[0]])
    def test_by_head(self, heads, positions):
        frequencies = torch.stack([FREQUENCIES * (head + 1) / 3 for head in range(heads)])
        made = learned_tables(frequencies[None], positions)
        assert made.cos.shape == (positions.shape[0] if positions.dim() == 2 else 1, heads, 4, 6)
        for head in range(heads):
            alone = plain(frequencies[head], positions.reshape(-1, 4))
            assert same([table[:, head] for table in made], alone)

    def test_by_row_and_head(self):
        frequencies = FREQUENCIES * torch.arange(1, 7).reshape(2, 3, 1) / 6
        made = learned_tables(frequencies, POSITIONS[0])
        for row in range(2):
            for head in range(3):
                assert same([table[row, head] for table in made], plain(frequencies[row, head], POSITIONS[0]))

    def test_axes(self):
        options = {"axis_of_pairs": (0, 1, 1, 0, 0, 1), "axes": 2}
        places = torch.stack([POSITIONS, POSITIONS.flip(1)])
        assert same(learned_tables(FREQUENCIES, places, **options), plain(FREQUENCIES, places, **options))
        heads = torch.stack([FREQUENCIES, FREQUENCIES / 2])[None]
        made = learned_tables(heads, places, **options)
        assert same([table[:, 1] for table in made], plain(FREQUENCIES / 2, places, **options))

    def test_float32_is_widened_and_float64_tables(self):
        single = FREQUENCIES.float()
        assert same(learned_tables(single, POSITIONS), plain(single.double(), POSITIONS))
        double = learned_tables(FREQUENCIES, POSITIONS, dtype=torch.float64)
        assert double.cos.dtype == torch.float64
        assert (double.cos - learned_tables(FREQUENCIES, POSITIONS).cos).abs().max() <= 6e-8

    def test_are_no_views(self):
        for frequencies in (FREQUENCIES, FREQUENCIES[None, None]):
            assert learned_tables(frequencies, POSITIONS[0]).cos._base is None

    def test_shapes_without_values(self):
        for frequencies, positions in ((FREQUENCIES.to("meta"), POSITIONS), (FREQUENCIES, POSITIONS.to("meta"))):
            assert learned_tables(frequencies, positions).cos.is_meta


class TestGradient:
    """Every frequency gets its slope, whichever shape it came in."""

    @pytest.mark.parametrize("shape", [(6,), (2, 6), (1, 3, 6), (2, 3, 6)])
    @pytest.mark.parametrize("axes", [0, 2])
    def test_against_finite_differences(self, shape, axes):
        generator = torch.Generator().manual_seed(0)
        start = torch.rand(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        options = {"axis_of_pairs": (0, 1, 1, 0, 0, 1), "axes": 2} if axes else {}
        positions = torch.tensor([[3, 1, 4], [0, 2, 6]])
        positions = torch.stack([positions, positions + 1]) if axes else positions
        assert torch.autograd.gradcheck(
            lambda f: tuple(learned_tables(f, positions, amplitude=1.2, dtype=torch.float64, **options)), start
        )

    def test_through_a_compiled_graph(self):
        parameter = nn.Parameter(torch.linspace(0, -3, 6))

        def loss(positions):
            tables = learned_tables(parameter.double().exp()[None, None], positions)
            return (tables.cos + 2 * tables.sin).sum()

        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        grads = [torch.autograd.grad(run(POSITIONS % 50), parameter)[0] for run in (loss, compiled)]
        # The same operations; sums over 8 tokens may be taken in another order.
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)
        assert grads[0].abs().min() > 0


class TestRefusals:
    """A table without a gradient, or of memory that nobody wrote, is worse than none."""

    @pytest.mark.parametrize("frequencies", [nn.Parameter(FREQUENCIES), nn.Parameter(FREQUENCIES).exp()])
    def test_plain_tables_of_what_is_trained(self, frequencies):
        with pytest.raises(ValueError, match=r"inv_freq: it requires a gradient, .*; use learned_tables, or detach it"):
            pair_tables(frequencies, POSITIONS)
        assert same(pair_tables(frequencies.detach(), POSITIONS), learned_tables(frequencies, POSITIONS))

    @pytest.mark.parametrize("make", [pair_tables, learned_tables])
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"axes": 2}, "axis_of_pairs: got 0; one for each of the 6 pairs is needed"),
            ({"axes": 2, "axis_of_pairs": (0, 1)}, "axis_of_pairs: got 2; one for each of the 6 pairs is needed"),
            ({"axis_of_pairs": (0,) * 6}, "axis_of_pairs: got 6; with axes=0 there are none"),
            (
                {"axes": 2, "axis_of_pairs": (0, 1, 2, 0, 1, 2)},
                r"axis_of_pairs: got \[0, 1, 2, .*; each must be",
            ),
            ({"axes": 2, "axis_of_pairs": (0, 1, -1, 0, 1, 1)}, "each must be from 0 to 1"),
        ],
    )
    def test_axes(self, make, options, text):
        with pytest.raises(ValueError, match=text):
            make(FREQUENCIES, POSITIONS[None].expand(2, -1, -1), **options)

    @pytest.mark.parametrize(
        ("frequencies", "text"),
        [
            ([1.0, 0.5], "inv_freq: got a list; give a tensor of fractions, or plain numbers to pair_tables"),
            (torch.arange(6), "inv_freq: got torch.int64; give a tensor of fractions"),
            (torch.tensor(1.0), r"inv_freq: got shape \(\); it must be \(P,\), \(B, P\) or \(1 or B, Ht, P\)"),
            (torch.ones(3, 6), r"inv_freq: got 3 for positions of shape \(2, 4\); one per row of \(B, S\) is needed"),
            (torch.ones(3, 2, 6), r"inv_freq: got 3 for positions of shape \(2, 4\)"),
        ],
    )
    def test_frequencies(self, frequencies, text):
        with pytest.raises(ValueError, match=text):
            learned_tables(frequencies, POSITIONS)
