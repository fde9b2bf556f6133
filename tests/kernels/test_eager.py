"""The rotation in plain torch, held bit for bit to the formula."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.kernels.formula import DTYPES, WIDTHS, formula, randn, same_bits, tables
from theodolite.kernels import blocks
from theodolite.kernels.eager import rotate_into
from theodolite.kernels.layout import Layout


def rotated(x, cos, sin, positions, layout, *, inplace=False):
    """Into memory that was NaN before."""
    out = x.clone() if inplace else torch.full_like(x, float("nan"))
    rotate_into([(out, out if inplace else x)], cos, sin, positions, layout)
    return out


class TestAgainstTheFormula:
    """The same bits as every other implementation, whatever is turned by whatever table."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("by_channel", [False, True])
    @pytest.mark.parametrize("conjugate", [False, True])
    @pytest.mark.parametrize("scratch", [2**10, None])
    def test_every_table_and_position(self, dtype, interleaved, by_channel, conjugate, scratch, monkeypatch):
        if scratch:
            # Blocks of a few tokens, and parts of a batch.
            monkeypatch.setattr(blocks, "SCRATCH", scratch)
            monkeypatch.setattr("theodolite.kernels.eager.SCRATCH", scratch)
        picks = (None, torch.randint(0, 23, (1, 9)), torch.randint(0, 23, (3, 9), dtype=torch.int32))
        for (channels, turning, trailing), heads, batch, positions in itertools.product(WIDTHS, (1, 2), (1, 3), picks):
            layout = Layout(interleaved, turning, trailing, conjugate)
            rows = 9 if positions is None else 23
            cos, sin = tables(batch, heads, rows, turning if by_channel else turning // 2)
            q, k = randn(3, 4, 9, channels, dtype=dtype), randn(3, 2, 9, channels, dtype=dtype, seed=1)
            expected = [formula(x, cos, sin, positions, layout)[0] for x in (q, k)]
            out = [torch.full_like(x, float("nan")) for x in (q, k)]
            rotate_into(list(zip(out, (q, k), strict=True)), cos, sin, positions, layout)
            case = (layout, heads, batch, positions)
            assert all(map(same_bits, out, expected)), case
            rotate_into([(q, q), (k, k)], cos, sin, positions, layout)
            assert all(map(same_bits, (q, k), expected)), case

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("of_table", [*DTYPES, torch.int8])
    def test_every_dtype_of_a_table(self, dtype, of_table, interleaved):
        layout = Layout(interleaved, 32, False, False)
        x, positions = randn(2, 3, 63, 32, dtype=dtype), torch.randint(0, 70, (1, 63))
        cos, sin = tables(1, 1, 70, 16, of_table)
        assert same_bits(rotated(x, cos, sin, positions, layout), formula(x, cos, sin, positions, layout)[0])

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("tokens", [1, 63, 100, 2000])
    def test_within_the_bound_of_float64(self, tokens, interleaved):
        x, (cos, sin), layout = randn(2, 3, tokens, 32), tables(2, 1, tokens, 16), Layout(interleaved, 32, False, False)
        true, size = formula(x, cos, sin, None, layout, np.float64)
        assert ((rotated(x, cos, sin, None, layout).double() - true).abs() <= 2.1 * 2.0**-24 * size).all()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("conjugate", [False, True])
    def test_zeros_infinities_nans_and_subnormals(self, dtype, interleaved, conjugate):
        info = torch.finfo(dtype)
        special = [0.0, -0.0, 1.0, -1.5, float("inf"), float("-inf"), float("nan")]
        special += [info.smallest_normal / 2, -info.smallest_normal / 4, info.max]
        values = torch.tensor(special, dtype=dtype)
        # Every pair of them, turned by every pair of entries.
        pairs = torch.cartesian_prod(values, values).repeat(1, 16).view(1, 1, -1, 16, 2)
        x = pairs.flatten(-2) if interleaved else torch.cat(pairs.unbind(-1), -1)
        table = values if dtype == torch.float64 else values.float()
        for c, s in itertools.product(table, table):
            cos, sin = (entry.expand(1, 1, x.shape[2], 16) for entry in (c, s))
            layout = Layout(interleaved, 32, False, conjugate)
            expected = formula(x, cos, sin, None, layout)[0]
            assert same_bits(rotated(x, cos, sin, None, layout), expected), (c, s)
            # Few of them fill no vector.
            few = slice(37, 40)
            given = rotated(x[:, :, few], cos[:, :, few], sin[:, :, few], None, layout)
            assert same_bits(given, expected[:, :, few]), (c, s)

    def test_channels_that_do_not_turn_keep_their_bits(self):
        x = randn(1, 2, 9, 40, dtype=torch.bfloat16)
        # A NaN with a payload, too.
        x[..., 24:] = torch.tensor([0x7FC1, 0x7F80, -0x8000, 1], dtype=torch.int16).view(torch.bfloat16).repeat(4)
        cos, sin = tables(1, 1, 9, 12)
        for inplace in (False, True):
            out = rotated(x, cos, sin, None, Layout(False, 24, False, False), inplace=inplace)
            assert torch.equal(out[..., 24:].view(torch.int16), x[..., 24:].view(torch.int16))

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_without_numbers(self, interleaved):
        x, (cos, sin) = randn(2, 3, 9, 32).to("meta"), (table.to("meta") for table in tables(2, 3, 9, 16))
        positions = torch.zeros(2, 9, dtype=torch.int64, device="meta")
        rotate_into([(x, x)], cos, sin, positions, Layout(interleaved, 32, False, False))

    @pytest.mark.parametrize("shape", [(0, 2, 5, 8), (2, 0, 5, 8), (2, 2, 0, 8)])
    @pytest.mark.parametrize("heads", [1, 2])
    def test_nothing_to_turn(self, shape, heads):
        x, other = torch.empty(shape), torch.empty(shape[0], 4, *shape[2:])
        cos, sin = tables(1, heads, shape[2], 4)
        true = formula(other, cos, sin, None, Layout(False, 8, False, False))[0]
        rotate_into([(x, x), (other, other)], cos, sin, None, Layout(False, 8, False, False))
        assert same_bits(other, true)
        positions = torch.zeros(1, shape[2], dtype=torch.int64)
        rotate_into([(x, x)], *tables(1, heads, 1, 4), positions, Layout(True, 8, False, False))


class Made(TorchDispatchMode):
    """The bytes of each tensor that a call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given, made = (
            [tensor.untyped_storage() for tensor in tree_leaves(tree) if isinstance(tensor, torch.Tensor)]
            for tree in ((args, kwargs), out)
        )
        known = {storage.data_ptr() for storage in given}
        self.sizes += [storage.nbytes() for storage in made if storage.data_ptr() not in known]
        return out


class TestMemory:
    """Operands are read and written as they lie, and nothing of their size is made beside them."""

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        "view",
        [
            lambda memory: memory[:, :7, :3, :32].transpose(1, 2),
            lambda memory: memory[:, :7, 1:4, 1:33].transpose(1, 2),
            lambda memory: memory.flatten()[1 : 6 * 7 * 32 + 1].view(2, 7, 3, 32).transpose(1, 2),
            lambda memory: memory[:, :7, :3, 3:67:2].transpose(1, 2),
            lambda memory: memory.flatten()[: 6 * 7 * 32].view(3, 2, 7, 32).transpose(0, 1),
            lambda memory: memory.flatten()[: 6 * 7 * 32].view(2, 3, 32, 7).transpose(2, 3),
        ],
        ids=[
            "tokens first",
            "odd strides",
            "an odd offset",
            "every second channel",
            "heads outside",
            "channels outside",
        ],
    )
    def test_strides(self, view, dtype, interleaved):
        memory = randn(2, 9, 5, 67, dtype=dtype)
        x = view(memory)
        layout = Layout(interleaved, x.shape[-1], False, False)
        cos, sin = tables(1, 3, 7, x.shape[-1] // 2)
        wide = torch.stack((cos, sin), -1)
        true = formula(x, cos, sin, None, layout)[0]
        into = randn(2, 9, 5, 67, dtype=dtype, seed=2)
        beside = into.clone()
        rotate_into([(view(into), x)], wide[..., 0], wide[..., 1], None, layout)
        view(beside).copy_(true)
        assert same_bits(into, beside)
        rotate_into([(x, x)], cos, sin, None, layout)
        assert same_bits(x, true)

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_expanded_operands(self, interleaved):
        layout = Layout(interleaved, 32, False, True)
        cos, sin = (table.expand(2, 3, 9, 16) for table in tables(1, 1, 9, 16))
        for x in (torch.ones(()).expand(2, 3, 9, 32), randn(2, 1, 9, 32).expand(2, 3, 9, 32)):
            assert same_bits(rotated(x, cos, sin, None, layout), formula(x, cos, sin, None, layout)[0])
        positions = torch.tensor([[8]]).expand(2, 9)
        x = randn(2, 3, 9, 32)
        assert same_bits(rotated(x, cos, sin, positions, layout), formula(x, cos, sin, positions, layout)[0])

    def test_recorded_leaves_in_place(self):
        # As autograd's own functions do, with recording switched off.
        x, (cos, sin) = randn(1, 2, 5000, 32).requires_grad_(), tables(1, 1, 5000, 16)
        true = formula(x.detach(), cos, sin, None, Layout(False, 32, False, False))[0]
        with torch.no_grad():
            rotate_into([(x, x)], cos, sin, None, Layout(False, 32, False, False))
        assert same_bits(x.detach(), true)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("by_channel", [False, True])
    @pytest.mark.parametrize(
        ("batch", "heads", "picked"), [(1, 1, None), (1, 1, 1), (8, 1, None), (1, 4, 1), (8, 4, 8), (1, 4, 8)]
    )
    def test_scratch_does_not_grow(self, dtype, interleaved, by_channel, batch, heads, picked):
        x = torch.zeros(8, 8, 700, 128, dtype=dtype)
        cos, sin = tables(batch, heads, 700, 128 if by_channel else 64, torch.int8)
        positions = None if picked is None else torch.zeros(picked, 700, dtype=torch.int32)
        with Made() as made:
            rotate_into([(x, x)], cos, sin, positions, Layout(interleaved, 128, False, False))
        assert made.sizes
        assert max(made.sizes) <= 1.5 * 2**20


class TestPositions:
    """A position without a row is refused before anything is written: a wrapped row is another angle, silently."""

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
    @pytest.mark.parametrize("wrong", [-1, 7, 2**31 - 1, -(2**31)])
    @pytest.mark.parametrize("batch", [1, 3])
    def test_refused_untouched(self, wrong, batch, dtype):
        q, k = randn(3, 2, 5, 8), randn(3, 1, 5, 8)
        before = q.clone(), k.clone()
        positions = torch.zeros(batch, 5, dtype=dtype)
        positions[-1, 3] = wrong
        with pytest.raises(ValueError, match=rf"positions: got {wrong}; the tables have 7 rows, 0 to 6$"):
            rotate_into([(q, q), (k, k)], *tables(1, 1, 7, 2), positions, Layout(False, 4, False, False))
        assert torch.equal(q, before[0])
        assert torch.equal(k, before[1])

    def test_the_first_and_the_last_row(self):
        x, (cos, sin) = randn(1, 2, 2, 8), tables(1, 1, 7, 4)
        positions, layout = torch.tensor([[6, 0]]), Layout(False, 8, False, False)
        assert same_bits(rotated(x, cos, sin, positions, layout), formula(x, cos, sin, positions, layout)[0])
