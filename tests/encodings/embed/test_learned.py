"""Learned tables: the row that each model means, and an end that is never passed in silence."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from theodolite.encodings.embed.learned import LearnedEmbedding


class TestRows:
    """Position 0 is the first row that is not padding's; every library counts the rows before it in its own way."""

    @pytest.mark.parametrize(
        ("options", "first"), [({}, 0), ({"offset": 2}, 2), ({"padding_idx": 1}, 2), ({"padding_idx": 0}, 1)]
    )
    def test_position_and_offset(self, options, first):
        table = LearnedEmbedding(9, 4, **options)
        assert table.weight.shape == (9 + first, 4)
        positions = torch.tensor([[8, 0, 3], [1, 1, 7]])
        assert torch.equal(table.table(positions), table.weight[positions + first])
        assert torch.equal(table.table(positions.to(torch.uint8)), table.weight[positions + first])

    @pytest.mark.parametrize(("padding_idx", "usable"), [(1, 512), (3, 510), (0, 513)])
    def test_roberta_counts_rows(self, padding_idx, usable):
        table = LearnedEmbedding.from_rows(514, 4, padding_idx=padding_idx)
        assert table.weight.shape == (514, 4)
        assert table.num_positions == usable
        table.table(torch.tensor([usable - 1]))
        message = (
            f"positions: got {usable}; the table has positions 0 to {usable - 1}: {usable} of its 514 rows, for they "
            rf"begin after padding_idx {padding_idx}; resize\(\)"
        )
        with pytest.raises(ValueError, match=message):
            table.table(torch.tensor([usable]))

    def test_padding_begins_as_zeros_and_stays(self):
        table = LearnedEmbedding(9, 4, padding_idx=1)
        assert torch.equal(table.weight[1], torch.zeros(4))
        assert table.weight[0].any()
        table.table(torch.arange(9)).sum().backward()
        assert torch.equal(table.weight.grad[:2], torch.zeros(2, 4))

    def test_begins_as_normal_numbers(self):
        torch.manual_seed(0)
        table = LearnedEmbedding(2000, 50, std=0.3)
        # 100 000 numbers: the standard error of their deviation is 0.3 / sqrt(200 000).
        assert table.weight.std().item() == pytest.approx(0.3, abs=4 * 0.3 / 200_000**0.5)

    def test_from_weight_copies(self):
        weight = torch.randn(1, 7, 4).half()
        table = LearnedEmbedding.from_weight(weight, padding_idx=1, channels=slice(0, 4))
        assert (table.num_positions, table.weight.dtype, table.channels) == (5, torch.float16, slice(0, 4))
        assert torch.equal(table.weight, weight[0])
        weight.zero_()
        assert table.weight.any()
        assert table.weight.requires_grad


class TestTheEnd:
    """An index error deep in decoding, a row that wraps, or one that is clamped, is what users get elsewhere."""

    def test_whisper_has_448_positions(self):
        table = LearnedEmbedding(448, 4)
        table(torch.zeros(1, 448, 4), torch.arange(448))
        with pytest.raises(ValueError, match=r"positions: got 448; the table has positions 0 to 447; resize\(\) makes"):
            table(torch.zeros(1, 1, 4), torch.tensor([448]))

    @pytest.mark.parametrize("options", [{}, {"offset": 2}, {"padding_idx": 1}])
    def test_below_zero_is_no_row(self, options):
        # With an offset, row -1 + 2 exists, and is not what was asked for.
        table = LearnedEmbedding(9, 4, **options)
        with pytest.raises(ValueError, match=r"positions: got -1; the table has positions 0 to 8"):
            table.table(torch.tensor([3, -1]))

    def test_the_first_thing_wrong_is_named(self):
        with pytest.raises(ValueError, match=r"positions: got 31; .* 0 to 8: 9 of its 11 rows.* after offset 2"):
            LearnedEmbedding(9, 4, offset=2).table(torch.tensor([[3, 31], [-5, 0]]))

    def test_no_positions_no_rows(self):
        assert LearnedEmbedding(9, 4).table(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, 4)

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    @pytest.mark.parametrize("wrong", [-1, 9])
    def test_compiled(self, backend, wrong):
        torch._dynamo.reset()
        table = LearnedEmbedding(9, 4, offset=2)
        compiled = torch.compile(table, fullgraph=True, backend=backend)
        x = torch.randn(1, 3, 4)
        good = torch.tensor([0, 8, 3])
        assert torch.equal(compiled(x, good), table(x, good))
        with pytest.raises(RuntimeError, match="positions: some are outside the table; the table has positions 0 to 8"):
            compiled(x, torch.tensor([0, wrong, 3]))

    @pytest.mark.parametrize("decompose", [False, True])
    def test_exported(self, decompose):
        table = LearnedEmbedding(9, 4, offset=2).eval()
        program = torch.export.export(table, (torch.randn(1, 3, 4), torch.tensor([0, 8, 3])))
        with warnings.catch_warnings():
            # Of the exporter's own making, not ours.
            warnings.simplefilter("ignore")
            module = (program.run_decompositions() if decompose else program).module()
        for wrong in (-1, 9):
            with pytest.raises(RuntimeError, match="the table has positions 0 to 8"):
                module(torch.zeros(1, 3, 4), torch.tensor([0, 1, wrong]))


class TestHalfPrecision:
    """Weights may be halves; sums are not."""

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_table_is_what_is_stored(self, dtype):
        table = LearnedEmbedding(9, 4).to(dtype)
        positions = torch.tensor([[3, 8], [0, 0]])
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                out = table.table(positions)
            assert out.dtype == torch.float32
            assert torch.equal(out, table.weight[positions].float())

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_gradients_are_summed_in_float32(self, dtype):
        table = LearnedEmbedding(8, 4).to(dtype)
        upstream = torch.rand(512, 8, 4, generator=torch.Generator().manual_seed(0))
        table.table(torch.arange(8).expand(512, 8)).backward(upstream)
        truth = upstream.double().sum(0)
        # One rounding to the dtype, and 512 of float32 numbers of one sign.
        allowed = (torch.finfo(dtype).eps / 2 + 512 * 2.0**-24) * truth
        assert ((table.weight.grad.double() - truth).abs() <= allowed).all()

    def test_gradcheck(self):
        table = LearnedEmbedding(6, 3, padding_idx=0).double()
        x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
        positions = torch.tensor([[0, 5, 5, 2], [1, 1, 1, 0]])
        mask = torch.tensor([1, 1, 0, 1])

        def call(x, weight):
            return torch.func.functional_call(table, {"weight": weight}, (x, positions), {"mask": mask})

        assert table.table(positions).dtype == torch.float64
        assert torch.autograd.gradcheck(call, (x, table.weight.detach().clone().requires_grad_()))


class TestStateDict:
    """One key, `weight`; a table with another number of rows is an error in words."""

    def test_one_key(self):
        assert list(LearnedEmbedding(9, 4, padding_idx=1).state_dict()) == ["weight"]

    def test_old_position_numbers_are_dropped(self):
        table, other = LearnedEmbedding(9, 4), LearnedEmbedding(9, 4)
        state = {**other.state_dict(), "position_ids": torch.arange(9)[None]}
        with pytest.warns(UserWarning, match="LearnedEmbedding: the checkpoint's position_ids is not read"):
            table.load_state_dict(state)
        assert torch.equal(table.weight, other.weight)

    @pytest.mark.parametrize("strict", [True, False])
    def test_another_number_of_rows(self, strict):
        model = nn.ModuleDict({"wpe": LearnedEmbedding(514, 4, padding_idx=1)})
        message = (
            r"wpe.weight: the checkpoint's table has 514 rows and this one 516 \(514 positions, 2 rows before them\); "
            r"make the module with from_rows\(514, 4, ...\), load, then resize\(\) it"
        )
        with pytest.raises(RuntimeError, match=message) as caught:
            model.load_state_dict({"wpe.weight": torch.zeros(514, 4)}, strict=strict)
        assert "size mismatch" not in str(caught.value)

    def test_another_width(self):
        with pytest.raises(RuntimeError, match="size mismatch for weight"):
            LearnedEmbedding(9, 4).load_state_dict({"weight": torch.zeros(9, 5)})

    def test_nothing_at_all(self):
        with pytest.raises(RuntimeError, match="Missing key"):
            LearnedEmbedding(9, 4).load_state_dict({})


class TestResized:
    """A new module of the same kind; the old one is as it was."""

    @pytest.mark.parametrize("options", [{}, {"offset": 2}, {"padding_idx": 1}, {"channels": slice(0, 4)}])
    def test_rows_before_position_0_come_along(self, options):
        table = LearnedEmbedding(9, 4, std=0.5, **options).bfloat16().eval()
        before = table.weight.detach().clone()
        longer = table.resize(20, keep=3)
        assert type(longer) is LearnedEmbedding
        assert (longer.num_positions, longer.offset, longer.padding_idx) == (20, table.offset, table.padding_idx)
        assert (longer.channels, longer.std, longer.training) == (table.channels, 0.5, False)
        assert longer.weight.dtype == torch.bfloat16
        assert longer.weight.requires_grad
        assert torch.equal(longer.weight[: table.offset + 3], before[: table.offset + 3])
        assert torch.equal(table.weight, before)
        longer.table(torch.tensor([19]))

    def test_frozen_stays_frozen(self):
        assert not LearnedEmbedding(9, 4).requires_grad_(False).resize(12).weight.requires_grad

    @pytest.mark.parametrize("offset", [0, 2])
    def test_a_grid(self, offset):
        table = LearnedEmbedding(10, 4, offset=offset)
        larger = table.resize_grid(old=(3, 3), new=(4, 5), prefix=1)
        assert (larger.num_positions, larger.offset) == (21, offset)
        assert torch.equal(larger.weight[: offset + 1], table.weight[: offset + 1])

    def test_then_saved_and_loaded(self):
        longer = LearnedEmbedding(9, 4, padding_idx=1).resize(20)
        again = LearnedEmbedding(20, 4, padding_idx=1)
        again.load_state_dict(longer.state_dict())
        assert torch.equal(again.table(torch.arange(20)), longer.table(torch.arange(20)))


class TestRefusals:
    """Bad arguments are named when the module is made."""

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: LearnedEmbedding(0, 4), "num_positions: got 0; it must be at least 1"),
            (lambda: LearnedEmbedding(9.0, 4), "num_positions: got a float"),
            (lambda: LearnedEmbedding(9, 0), "dim: got 0"),
            (lambda: LearnedEmbedding(9, 4, offset=-1), "offset: got -1"),
            (lambda: LearnedEmbedding(9, 4, padding_idx=-1), "padding_idx: got -1"),
            (
                lambda: LearnedEmbedding(9, 4, offset=2, padding_idx=1),
                "offset: got 2 beside padding_idx 1, which is offset 2",
            ),
            (lambda: LearnedEmbedding.from_rows(2, 4, offset=2), "rows: got 2; 2 of them stand before position 0"),
            (lambda: LearnedEmbedding.from_weight(torch.zeros(2, 3, 4)), r"weight: got \(2, 3, 4\); it must be \(rows"),
            (lambda: LearnedEmbedding.from_weight([1.0]), "weight: got list"),
            (lambda: LearnedEmbedding(9, 4).table(torch.tensor([0.5])), "positions: got torch.float32; give integers"),
            (lambda: LearnedEmbedding(9, 4).to("meta").resize(12), "weight: it is on the meta device"),
            (
                lambda: LearnedEmbedding(9, 4).to("meta")(torch.zeros(1, 3, 4), torch.arange(3)),
                "weight: it is on the meta device and has no values; load it first",
            ),
            (
                lambda: LearnedEmbedding(9, 4)(torch.zeros(1, 3, 4), torch.arange(3, device="meta")),
                "positions: got a tensor on the meta device, which has no values, and weight is on cpu",
            ),
        ],
    )
    def test_words(self, call, message):
        with pytest.raises(ValueError, match=message):
            call()

    def test_repr(self):
        assert repr(LearnedEmbedding(512, 4, padding_idx=1)) == "LearnedEmbedding(512, 4, padding_idx=1)"
        assert repr(LearnedEmbedding(512, 4, offset=2)) == "LearnedEmbedding(512, 4, offset=2)"
